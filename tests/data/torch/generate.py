"""Writes what PyTorch's greedy search finds, for machines without PyTorch. Not run by tests.

    python tests/data/torch/generate.py

writes `choose_qparams.npz` beside it: rows, and for each case `<bits>_<bins>_<ratio>` the ends
of the range that `torch.choose_qparams_optimized` chooses for each row, [rows, 2].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

CASES = [(2, 25, 0.6), (3, 45, 1.0), (4, 200, 0.16), (4, 45, 1.0)]
OUT = Path(__file__).with_name("choose_qparams.npz")


def main() -> None:
    """Writes the file anew."""
    rng = np.random.default_rng(0)
    rows = np.concatenate(
        [
            rng.normal(size=(24, 32)),
            rng.standard_t(3, (24, 32)) + 1,
            rng.exponential(size=(16, 32)),
        ]
    ).astype(np.float32)
    found = {"rows": rows}
    for bits, bins, ratio in CASES:
        ends = [
            torch.choose_qparams_optimized(
                torch.from_numpy(row), len(row), bins, ratio, bits
            )
            for row in rows
        ]
        found[f"{bits}_{bins}_{ratio}"] = np.array(
            [[float(low), float(high)] for high, low in ends], np.float32
        )
    np.savez_compressed(OUT, **found)


if __name__ == "__main__":
    main()
