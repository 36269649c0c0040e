"""Rows on their way to storage: which ones, and the chunks they are handled in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Literal

import jax
import numpy as np

from cnr_jax.rows.codecs import Codec, Encoded

Where = Literal["host", "device"]
# Where rows that lie on a device are handled, given the bytes of all there are.
Way = Callable[[jax.Device, int], Where]
# A call that compiles something and keeps it: equal ones compile the same.
Program = tuple[Callable[..., object], tuple[Hashable, ...]]
# Bytes of decoded rows in a chunk: large enough to hide the cost of a dispatch, small enough
# to stay in cache while it is encoded. Measured on 2 CPU cores, 4 bits, dim 64: 0.67 GB/s in
# chunks of 2 MiB, 0.45 GB/s in chunks of 16 MiB.
CHUNK_BYTES = 2 << 20
# Rows of the small chunk that holds the rest of a group, so that few touched rows cost little.
SMALL_ROWS = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The rows of one tile that are saved with one codec.

    Attributes:
        data: the shard that holds the tile, on its device.
        first: row of `data` at which the tile starts.
        rows: rows of the tile.
        positions: sorted int64 positions within the tile; None for all rows.
        codec: how they are encoded.
        where: whether they are gathered in host memory, or gathered and encoded on the device.
        sampled: which of the rows to be saved are also kept as they are, sorted, where they
            are encoded on the device; None: none.
    """

    data: jax.Array
    first: int
    rows: int
    positions: np.ndarray | None
    codec: Codec
    where: Where
    sampled: np.ndarray | None = None

    @property
    def count(self) -> int:
        """Rows to be saved."""
        return self.rows if self.positions is None else len(self.positions)

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.data.shape[1:])

    @property
    def group(self) -> tuple[Where, Codec, np.dtype, int]:
        """Runs of one group share chunks and compiled programs."""
        return self.where, self.codec, np.dtype(self.data.dtype), self.width


@dataclasses.dataclass(slots=True)
class Chunk:
    """Up to a fixed number of consecutive rows of one group.

    Attributes:
        count: rows that are meant; what follows them is padding.
        rows: host array `[at least count, width]`; None where `encoded` holds the rows.
        encoded: encoded on the device; None where they are encoded later.
        escaped_rows: the rows themselves, on the device, where some were escaped.
        sampled: rows of the chunk that are in the sample of the save, in order, where `rows`
            does not hold them; what follows them is padding.
    """

    codec: Codec
    count: int
    rows: np.ndarray | None = None
    encoded: Encoded | None = None
    escaped_rows: jax.Array | None = None
    sampled: jax.Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on host and device that this chunk keeps."""
        size = self.rows.nbytes if self.rows is not None else 0
        size += self.escaped_rows.nbytes if self.escaped_rows is not None else 0
        size += self.sampled.nbytes if self.sampled is not None else 0
        if self.encoded is not None:
            size += sum(part.nbytes for part in self.encoded.parts.values())
        return size


def chunk_rows(width: int, itemsize: int, limit_bytes: int | None = None) -> int:
    """Rows of a large chunk: a power of two, one where rows are very wide.

    Args:
        width: elements of a row.
        itemsize: bytes of an element.
        limit_bytes: of decoded rows; None: `CHUNK_BYTES`.

    Example:
        >>> chunk_rows(64, 4)
        8192
    """
    limit_bytes = CHUNK_BYTES if limit_bytes is None else limit_bytes
    rows = max(1, limit_bytes // max(1, width * itemsize))
    return 1 << (rows.bit_length() - 1)


def program_rows(count: int, large: int) -> int:
    """Rows of the chunk, large or small, that holds `count` rows, at most `large`.

    Example:
        >>> program_rows(300, 8192), program_rows(600, 8192), program_rows(2, 4)
        (512, 8192, 4)
    """
    small = min(SMALL_ROWS, large)
    return small if count <= small else large


def host_device() -> jax.Device:
    """The device that encodes rows which are staged on the host."""
    return jax.local_devices(backend="cpu")[0]


def padded(values: np.ndarray, rows: int) -> np.ndarray:
    """`values` with rows of zeros after them, `rows` in all; itself if it has as many."""
    if len(values) == rows:
        return values
    longer = np.zeros((rows, *values.shape[1:]), values.dtype)
    longer[: len(values)] = values
    return longer


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like `np.empty`, at an address from which JAX on CPU need not copy it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
