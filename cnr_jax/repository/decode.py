"""Decoding merged rows on the host, by programs of two sizes that all tables share."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import numpy as np

from cnr_jax.repository.encoded import Kind, Merged, aligned_empty
from cnr_jax.rows.chunk import chunk_rows, host_device, padded, program_rows
from cnr_jax.rows.codecs import Codec, Raw


def host_rows(merged: Merged, rows: int, out: np.ndarray | None) -> np.ndarray:
    """Decodes merged rows on the host.

    Args:
        merged: the rows.
        rows: how many there are.
        out: where they go, `[rows, *shape of a row]`; None: a new array of their own dtype.
    """
    kind = merged.kind
    if out is None and isinstance(kind.codec, Raw):
        out = merged.parts["rows"].reshape(rows, *kind.trailing)[:, *kind.slices]
    else:
        if out is None:
            out = aligned_empty((rows, *kind.shape), kind.dtype)
        _decode_into(out, slice(0, rows), kind, merged.parts, rows)
    for patch in merged.patches:
        _decode_into(out, patch.rows, patch.kind, patch.parts, len(patch.rows))
    return out


def _decode_into(
    out: np.ndarray,
    at: np.ndarray | slice,
    kind: Kind,
    parts: Mapping[str, np.ndarray],
    count: int,
) -> None:
    step = chunk_rows(kind.width, kind.dtype.itemsize)
    for start in range(0, count, step):
        stop = min(start + step, count)
        block = {name: part[start:stop] for name, part in parts.items()}
        rows = _decoded_block(kind, block, stop - start)
        where = slice(start, stop) if isinstance(at, slice) else at[start:stop]
        out[where] = rows.reshape(len(rows), *kind.trailing)[:, *kind.slices]


def _decoded_block(
    kind: Kind, parts: Mapping[str, np.ndarray], count: int
) -> np.ndarray:
    if isinstance(kind.codec, Raw):
        return parts["rows"]
    size = program_rows(count, chunk_rows(kind.width, kind.dtype.itemsize))
    # One device for all parts: a program is compiled once for each device it runs on.
    block = {name: padded(part, size) for name, part in parts.items()}
    block = jax.device_put(block, host_device())
    return np.asarray(_decode(kind.codec, block, kind.width, kind.dtype))[:count]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _decode(
    codec: Codec, parts: dict[str, jax.Array], dim: int, dtype: np.dtype
) -> jax.Array:
    return codec.decode(parts, dim=dim, dtype=dtype)
