"""Whether what was saved comes back: bit for bit, or within what a codec may lose."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
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
            be so in any case.

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
            if path == "table" and bits is not None:
                check_quantized(path, one[rows], two[rows], bits)
            else:
                check_same(path, one[rows], two[rows])


def first_check(root: Path, params: dict[str, Any]) -> bool:
    """Whether this is the first run of these parameters to ask.

    What a case saves is restored and compared in one of its runs, not in every turn.

    Args:
        root: the folder of the run, those of other runs lie beside it.
        params: of JSON types.
    """
    key = json.dumps(params, sort_keys=True)
    mark = root.parent / f"checked-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if mark.exists():
        return False
    mark.touch()
    return True


def check_same(path: str, got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit.

    Raises:
        AssertionError: naming the leaf.
    """
    same = np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()
    assert same, f"{path}: not what was saved"


def check_quantized(path: str, got: np.ndarray, want: np.ndarray, bits: int) -> None:
    """Within what a codec of so many bits may lose of float32.

    In steps of a row, its range by the number of steps of the codec, elements may be off by
    1.5 at most (a codec may clip) and by 0.45 in the root mean square: rounding to the nearest
    gives 0.29, and dither, of a run that was restored, 0.41. Rows without a range, or with numbers
    that are none, have no steps: they are exact.

    Raises:
        AssertionError: naming the leaf.
    """
    # In float32 the range of large numbers overflows, and the step of tiny ones vanishes.
    high, low = (
        edge.astype(np.float64) for edge in (want.max(axis=1), want.min(axis=1))
    )
    with np.errstate(invalid="ignore"):
        steps = (high - low) / (2**bits - 1)
    stepped = np.isfinite(steps) & (steps > 0)
    if not stepped.all():
        one, two = got[~stepped], want[~stepped]
        exact = (one == two) | (one.view(np.uint32) == two.view(np.uint32))
        assert exact.all(), f"{path}: rows without a range are not what was saved"
        got, want, steps = got[stepped], want[stepped], steps[stepped]
    off = np.abs(got - want) / steps[:, None]
    if not off.size:
        return
    worst, usual = float(off.max()), float(np.sqrt(np.mean(off**2)))
    assert worst <= 1.5, f"{path}: off by {worst:.2f} steps of {bits} bits"
    assert 0 < usual <= 0.45, f"{path}: off by {usual:.3f} steps of {bits} bits"
