"""Whether what was saved comes back: bit for bit, or within what a codec may lose."""

from __future__ import annotations

from typing import Any

import numpy as np
from system import State, flat

_BLOCK_ROWS = 1 << 18


def check_restored(got: State, want: State, bits: int | None = None) -> None:
    """Compares two states on the host.

    Args:
        got: what was restored.
        want: what was saved.
        bits: of the codec of `table`; None if it is to be equal bit for bit. All else must
            be so in any case. In steps of a row, its range by the number of steps of the
            codec, quantized elements may be off by 1.5 at most (a codec may clip) and by
            0.35 in the root mean square (rounding alone gives 0.29).

    Raises:
        AssertionError: naming the leaf.
    """
    ours, theirs = flat(got), flat(want)
    assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
    for path, leaf in theirs.items():
        one, two = np.asarray(ours[path]), np.asarray(leaf)
        assert one.shape == two.shape, (path, one.shape, two.shape)
        for first in range(0, max(1, len(two) if two.ndim else 1), _BLOCK_ROWS):
            rows: Any = slice(first, first + _BLOCK_ROWS) if two.ndim else ()
            quantized = path == "table" and bits is not None
            _check(path, one[rows], two[rows], bits if quantized else None)


def _check(path: str, got: np.ndarray, want: np.ndarray, bits: int | None) -> None:
    if bits is None:
        same = (
            np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()
        )
        assert same, f"{path}: not what was saved"
        return
    steps = (want.max(axis=1) - want.min(axis=1))[:, None] / (2**bits - 1)
    off = np.abs(got - want)
    # Rows without a range, and numbers that are none, must be exact.
    exact = (got.view(np.uint32) == want.view(np.uint32)) | (steps == 0) & (off == 0)
    off = np.where(exact, 0, off / np.where(steps == 0, np.nan, steps))
    worst, usual = float(off.max()), float(np.sqrt(np.mean(off**2)))
    assert worst <= 1.5, f"{path}: off by {worst:.2f} steps of {bits} bits"
    assert 0 < usual <= 0.35, f"{path}: off by {usual:.3f} steps of {bits} bits"
