"""Encoding chunks that were gathered on the host, and bringing all of them there.

In the background, chunk by chunk, so that a train step queued in between waits for little.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from cnr_jax.rows.codecs import Codec, Encoded, Raw
from cnr_jax.rows.gather.chunk import (
    Chunk,
    Program,
    chunk_rows,
    host_device,
    program_rows,
)
from cnr_jax.rows.mesh import outside_mesh


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, rows: jax.Array) -> Encoded:
    return codec.encode(rows)


class EncodedChunk(NamedTuple):
    """A chunk on the host, without its padding.

    Attributes:
        parts: each `[count, width of the part]`.
        escaped: positions of escaped rows.
        rows: these rows themselves; None when there are none.
    """

    parts: dict[str, np.ndarray]
    escaped: np.ndarray
    rows: np.ndarray | None


def encode_chunks(
    chunks: Iterable[Chunk], device: jax.Device
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Encodes chunks that are not yet, each while the one before is used.

    No more than two are in the works: on CPU a train step waits for all that is queued before
    it, which are these.
    """
    waiting: tuple[Chunk, Encoded | None] | None = None
    for chunk in chunks:
        encoded = _start_encoding(chunk, device)
        if waiting is not None:
            yield waiting[0], _to_host(*waiting)
        waiting = chunk, encoded
    if waiting is not None:
        yield waiting[0], _to_host(*waiting)


@outside_mesh()
def _start_encoding(chunk: Chunk, device: jax.Device) -> Encoded | None:
    """What a chunk is encoded to, not waited for; None if it is stored as it is."""
    if chunk.encoded is not None:
        return chunk.encoded
    if isinstance(chunk.codec, Raw):
        return None
    return _encode(chunk.codec, jax.device_put(chunk.rows, device))


def _to_host(chunk: Chunk, encoded: Encoded | None) -> EncodedChunk:
    count = chunk.count
    if encoded is None:
        assert chunk.rows is not None
        return EncodedChunk({"rows": chunk.rows[:count]}, np.empty(0, np.int64), None)
    parts = {name: np.asarray(part)[:count] for name, part in encoded.parts.items()}
    escaped = np.flatnonzero(np.asarray(encoded.escaped)[:count])
    if not len(escaped):
        return EncodedChunk(parts, escaped, None)
    rows = chunk.rows if chunk.rows is not None else np.asarray(chunk.escaped_rows)
    return EncodedChunk(parts, escaped, rows[escaped])


def host_programs(codec: Codec, dtype: np.dtype, width: int) -> Iterator[Program]:
    """What encoding chunks of rows of this kind on the host needs."""
    if not isinstance(codec, Raw):
        large = chunk_rows(width, dtype.itemsize)
        for rows in {program_rows(1, large), large}:
            yield _encode_zeros, (codec, dtype, width, rows)


def _encode_zeros(codec: Codec, dtype: np.dtype, width: int, rows: int) -> None:
    chunk = Chunk(codec=codec, count=1, rows=np.zeros((rows, width), dtype))
    list(encode_chunks([chunk], host_device()))
