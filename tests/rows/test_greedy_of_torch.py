"""The greedy search against PyTorch's, and where PyTorch's is the worse one.

`torch.choose_qparams_optimized` is the search of Guan et al., on which Check-N-Run's rests. What
it does otherwise than `Greedy`, all of it in `torch_search` below:

* it keeps a range only where both next moves are worse, and it better than all before, so that a
  search whose error falls up to its last move keeps nothing of it;
* it stops once `int(bins * (1 - ratio))` bins are left, or fewer;
* low end and scale are rounded to float16 while a range is judged, but what it returns is not;
* it returns the high end first.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from cnr_jax.rows.codecs import Greedy

FROZEN = Path(__file__).parents[1] / "data" / "torch" / "choose_qparams.npz"
CASES = [(2, 25, 0.6), (3, 45, 1.0), (4, 200, 0.16), (4, 45, 1.0)]
F = np.float32


def answers(bits: int, bins: int, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and the low and high ends that PyTorch found, [rows, 2]."""
    with np.load(FROZEN) as frozen:
        return frozen["rows"], frozen[f"{bits}_{bins}_{ratio}"]


def torch_loss(row: np.ndarray, low: F, high: F, bits: int) -> F:
    low = F(np.float16(low))
    top = F(2**bits - 1)
    scale = F(np.float16(F(high - low) / top)) if high != low else F(1)
    inverse = F(1) / scale if scale else F(1)
    codes = np.clip(np.rint((row - low) * inverse), F(0), top)
    error = row - (codes * scale + low)
    # One after the other, as a loop adds.
    return np.sqrt(np.cumsum(error * error, dtype=F)[-1])


def torch_search(row: np.ndarray, bins: int, ratio: float, bits: int) -> tuple[F, F]:
    best_low, best_high = low, high = row.min(), row.max()
    notch = F(high - low) / F(bins)
    left = F(int(bins * (1.0 - ratio)))
    best = loss = torch_loss(row, low, high, bits)
    while low + left * notch < high:
        raised = torch_loss(row, low + notch, high, bits)
        lowered = torch_loss(row, low, high - notch, bits)
        if loss < raised and loss < lowered and loss < best:
            best, best_low, best_high = loss, low, high
        if raised < lowered:
            low, loss = low + notch, raised
        else:
            high, loss = high - notch, lowered
    return best_low, best_high


@pytest.mark.parametrize("case", CASES, ids=str)
def test_search_with_its_quirks_finds_what_pytorch_finds(case):
    bits, bins, ratio = case
    rows, wanted = answers(*case)
    got = np.array([torch_search(row, bins, ratio, bits) for row in rows])
    notch = np.ptp(rows, axis=1, keepdims=True) / bins
    alike = (np.abs(got - wanted) < 0.01 * notch).all(axis=1)
    # Fused additions there may turn a move that is as good as the other one.
    assert alike.mean() >= 0.95


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frozen_answers_are_those_of_pytorch(case):
    torch = pytest.importorskip("torch")
    bits, bins, ratio = case
    rows, wanted = answers(*case)
    found = [
        torch.choose_qparams_optimized(
            torch.from_numpy(row), len(row), bins, ratio, bits
        )
        for row in rows
    ]
    got = np.array([[float(low), float(high)] for high, low in found])
    notch = np.ptp(rows, axis=1, keepdims=True) / bins
    # Other processors may add in another order.
    assert ((np.abs(got - wanted) < 0.01 * notch).all(axis=1)).mean() >= 0.95


@partial(jax.jit, static_argnums=0)
def errors_of(codec: Greedy, rows: jax.Array) -> jax.Array:
    back = codec.decode(codec.encode(rows).parts, dim=rows.shape[1], dtype=rows.dtype)
    return jax.numpy.linalg.norm(back - rows, axis=1)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_our_search_errs_no_more_than_pytorch_s(case):
    bits, bins, ratio = case
    rows, ends = answers(*case)
    ours = np.asarray(errors_of(Greedy(bits=bits, bins=bins, ratio=ratio), rows))
    low, high = ends[:, :1].astype(np.float64), ends[:, 1:].astype(np.float64)
    scale = (high - low) / (2**bits - 1)
    codes = np.clip(np.rint((rows - low) / scale), 0, 2**bits - 1)
    theirs = np.linalg.norm(rows - (codes * scale + low), axis=1)
    # Rounded metadata may cost a row a little; a range that was not kept gains many much.
    assert (ours <= theirs * 1.05).mean() >= 0.95
    assert ours.mean() <= theirs.mean() * 1.002
