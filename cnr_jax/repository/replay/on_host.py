"""Decoding of rows on the host, by programs of two sizes that all tables share.

One call decodes rows of many small regions, as a call costs as much as thousands of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from cnr_jax.repository.replay.encoded import Encoding, Merged
from cnr_jax.rows.codecs import Codec, Raw
from cnr_jax.rows.tiling import (
    aligned_empty,
    chunk_rows,
    host_device,
    in_chunks,
    own_settings,
    padded,
    program_rows,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Decoding:
    """Encoded rows to be decoded, and the array that they go to.

    Attributes:
        encoding: encoding of the rows.
        parts: parts of the rows, each `[count, width of the part]`.
        count: number of rows.
        out: array that gets the decoded rows, `[rows, *wanted shape of a row]`.
        at: the row of `out` that each row goes to; None: the first `count`, in order.
    """

    encoding: Encoding
    parts: Mapping[str, np.ndarray]
    count: int
    out: np.ndarray
    at: np.ndarray | None = None

    def put(self, rows: np.ndarray, first: int) -> None:
        """Puts decoded rows into `out`; the first of them is row `first` of this decoding."""
        last = first + len(rows)
        where = slice(first, last) if self.at is None else self.at[first:last]
        encoding = self.encoding
        self.out[where] = rows.reshape(-1, *encoding.trailing)[:, *encoding.slices]


def host_rows(merged: Merged, rows: int, out: np.ndarray | None) -> np.ndarray:
    """Decodes merged rows on the host.

    Args:
        merged: the rows.
        rows: number of rows.
        out: array that they go to, `[rows, *shape of a row]`; None: a new one of their own dtype.
    """
    out, main, patches = decodings(merged, rows, out)
    decode_all(main)
    decode_all(patches)
    return out


def decodings(
    merged: Merged, rows: int, out: np.ndarray | None
) -> tuple[np.ndarray, list[Decoding], list[Decoding]]:
    """Returns the decodings that merged rows need; the arguments are those of `host_rows`.

    Returns:
        The array that will hold the rows; what is to be decoded into it first; and patches, to be
        decoded after that.
    """
    encoding = merged.encoding
    patches: list[Decoding] = []
    if out is None and isinstance(encoding.codec, Raw):
        out = merged.parts["rows"].reshape(rows, *encoding.trailing)[
            :, *encoding.slices
        ]
        main: list[Decoding] = []
    else:
        if out is None:
            out = aligned_empty((rows, *encoding.shape), encoding.dtype)
        main = [Decoding(encoding, merged.parts, rows, out)]
    for patch in merged.patches:
        count = len(patch.rows)
        patches.append(Decoding(patch.encoding, patch.parts, count, out, patch.rows))
    return out, main, patches


@own_settings()
def decode_all(items: Sequence[Decoding]) -> None:
    """Decodes rows of many regions; no two decodings may write the same row of an array."""
    groups: dict[tuple[Codec, int, np.dtype], list[Decoding]] = {}
    for item in items:
        if isinstance(item.encoding.codec, Raw):
            item.put(item.parts["rows"], 0)
        else:
            key = (item.encoding.codec, item.encoding.width, item.encoding.dtype)
            groups.setdefault(key, []).append(item)
    for (codec, width, dtype), group in groups.items():
        size = chunk_rows(width, dtype.itemsize)
        for block in in_chunks(group, size):
            rows = _decoded(codec, width, dtype, _parts(block), size)
            done = 0
            for item, start, stop in block:
                item.put(rows[done : done + stop - start], start)
                done += stop - start


def _parts(block: Sequence[tuple[Decoding, int, int]]) -> dict[str, np.ndarray]:
    item, start, stop = block[0]
    if len(block) == 1:
        return {name: part[start:stop] for name, part in item.parts.items()}
    return {
        name: np.concatenate([each.parts[name][a:b] for each, a, b in block])
        for name in item.parts
    }


def _decoded(
    codec: Codec,
    width: int,
    dtype: np.dtype,
    parts: Mapping[str, np.ndarray],
    large: int,
) -> np.ndarray:
    count = len(next(iter(parts.values())))
    size = program_rows(count, large)
    # All regions use one device, as a program is compiled once for each device it runs on.
    block = {name: padded(part, size) for name, part in parts.items()}
    block = jax.device_put(block, host_device())
    return np.asarray(_decode(codec, block, width, dtype))[:count]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _decode(
    codec: Codec, parts: dict[str, jax.Array], dim: int, dtype: np.dtype
) -> jax.Array:
    return codec.decode(parts, dim=dim, dtype=dtype)
