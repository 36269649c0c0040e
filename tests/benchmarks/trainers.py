"""Training loops that a benchmark steps through one by one, for jax and for torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import peers
import workload

DIM = 64
_BATCHES = 4


class JaxTrainer:
    """Donated train steps on jax arrays.

    Every row of `share` is changed before each save, and batches look up no other rows, so
    that a delta has exactly these.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        import cnr_jax as cnr

        self.state = workload.table_state(params["rows"], DIM, params.get("devices", 1))
        self.abstract = workload.abstract_of(self.state)
        self.devices = params.get("devices", 1)
        self.touched = None
        if params["system"].startswith("cnr"):
            self.touched = cnr.init_touched(self.state, workload.tables_of(self.state))
        self.ids = workload.touched_rows(params["rows"], params["share"])
        self.batches = batches_of(self.ids)
        self._run: Callable[..., Any] | None = None
        self._next = 0

    def use(self, work: dict[str, int]) -> None:
        """Takes steps of another length, and compiles them."""
        self._run = workload.make_step(
            self.touched is not None, devices=self.devices, **work
        )
        self.step()

    def touch(self) -> None:
        """Changes all rows of the share."""
        import jax

        self.state, self.touched = workload.touch(self.state, self.touched, self.ids)
        jax.block_until_ready(self.state)

    def step(self) -> float:
        """Seconds of one step, from its dispatch until its arrays are there."""
        import jax

        assert self._run is not None
        ids = self.batches[self._next % _BATCHES]
        self._next += 1
        start = time.perf_counter()
        self.state, self.touched = self._run(self.state, self.touched, ids)
        jax.block_until_ready((self.state, self.touched))
        return time.perf_counter() - start

    def save(self, system: Any, step: int) -> None:
        system.save(step, self.state, self.touched)

    def copy(self) -> Any:
        """The state in buffers of its own: a view would keep steps from being donated."""
        import jax
        import jax.numpy as jnp

        return jax.block_until_ready(jax.tree.map(jnp.copy, self.state))


class TorchTrainer:
    """Train steps in place on torch tensors."""

    def __init__(self, params: dict[str, Any]) -> None:
        system = peers.system_of(params["system"])
        self.state = system.prepare(workload.table_state(params["rows"], DIM))
        self.abstract = None
        self.ids = workload.touched_rows(params["rows"], params["share"])
        self.batches = batches_of(self.ids)
        self._next = 0

    def use(self, work: dict[str, int]) -> None:
        import torch_step

        self._run = torch_step.make_step(**work)
        self.step()

    def touch(self) -> None:
        self.state["slot"] += 0.01

    def step(self) -> float:
        ids = self.batches[self._next % _BATCHES]
        self._next += 1
        start = time.perf_counter()
        self._run(self.state, ids)
        return time.perf_counter() - start

    def save(self, system: Any, step: int) -> None:
        system.save(step, self.state)

    def copy(self) -> Any:
        return {path: leaf.clone() for path, leaf in self.state.items()}


def batches_of(ids: np.ndarray) -> list[np.ndarray]:
    """Batches that look up some of these rows only."""
    return [ids[workload.batch_ids(len(ids), number)] for number in range(_BATCHES)]
