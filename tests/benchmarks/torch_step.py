"""The train step of `workload.make_step` for torch tensors, updated in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def make_step(products: int, sines: int) -> Callable[[dict[str, Any], Any], None]:
    """A step `(state, ids)` on a state from `System.prepare`.

    Args:
        products: matrix products of 2048 x 256 by 256 x 256, on all cores.
        sines: passes over a vector of 4096, on one core.
    """
    import torch

    start, line = torch.randn(2048, 256), torch.randn(4096)

    @torch.no_grad()
    def step(state: dict[str, Any], ids: np.ndarray) -> None:
        drawn = torch.from_numpy(ids).long()
        m, v = start, line
        for _ in range(products):
            m = torch.tanh(2 * m @ state["dense.kernel"])
        for _ in range(sines):
            v = torch.sin(v) + 1
        rows = state["table"][drawn]
        gradient = 0.1 * torch.cos(rows + torch.arange(rows.shape[1]))
        gradient += 1e-12 * (m.sum() + v.sum())
        state["slot"].index_add_(0, drawn, (gradient**2).mean(1))
        scale = torch.rsqrt(state["slot"][drawn])[:, None]
        state["table"].index_add_(0, drawn, -0.01 * gradient * scale)
        state["dense.step"] += 1

    return step
