"""What is put to the test: this library and plain Orbax, behind one interface."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
import training

import cnr_jax as cnr
from cnr_jax.checkpointer.saving.merging import Merging
from cnr_jax.policy import Policy
from cnr_jax.repository.compaction import baseline
from cnr_jax.repository.index.save_plan import MergedBaseline

# Saves that managers of this library have in flight, in this process and those that it starts.
IN_FLIGHT = "CNR_CAMPAIGN_IN_FLIGHT"

# Set where chains are merged, in this process and those that it starts.
MERGES = "CNR_CAMPAIGN_MERGES"

# Options of a run whose deltas hold differences of integers.
SUMS: dict[str, Any] = {"codec": "lattice", "slot_codec": "moments"}


def most_in_flight() -> int:
    """Saves in flight that managers of this library are opened with."""
    return int(os.environ.get(IN_FLIGHT, "1"))


def policy_of_runs() -> Policy:
    """The policy of runs that name none: with merges a log of increments, else `Consecutive`."""
    return cnr.IncrementLog(merge_at=2) if MERGES in os.environ else cnr.Consecutive()


def _merged_here(self: Merging, root: Any, request: baseline.Request) -> MergedBaseline:
    """Merges in this process, whose calls are counted, as the process of its own would."""
    baseline.main([os.fspath(root), json.dumps(dataclasses.asdict(request))])
    return baseline.take_note(root, request)


if MERGES in os.environ:
    Merging._made = _merged_here


# As one program: a process of the campaign lives for a second.
_record = jax.jit(cnr.record)


class Trainer(Protocol):
    """A train loop in one root.

    Attributes:
        state: of numpy arrays.
        step: that the state is of; -1 at first.
    """

    state: dict[str, Any]
    step: int

    def go_on(self, step: int | None = None) -> int | None:
        """Restores a step, by default the newest; returns it, None if there is none."""
        ...

    def train(self, step: int, salt: int = 0) -> None:
        """One train step."""
        ...

    def save(self, step: int) -> bool:
        """Starts to save the state."""
        ...

    def wait(self) -> None:
        """Waits until the last save is done; raises what it raised."""
        ...

    def steps(self) -> list[int]:
        """Steps that are listed."""
        ...

    def delete(self, step: int) -> None:
        """Deletes a step."""
        ...

    def close(self) -> None:
        """Ends the loop."""
        ...


class _Loop:
    """What both systems have in common."""

    manager: Any

    def __init__(self) -> None:
        self.state = training.first_state()
        self.step = -1

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def delete(self, step: int) -> None:
        self.manager.delete(step)

    def close(self) -> None:
        self.manager.close()

    def _restored(self, state: Any) -> int:
        self.state = training.on_host(state)
        self.step = int(self.state["step"])
        return self.step


class Ours(_Loop):
    """`cnr_jax` with recorded rows, one table exact and one in 4 bits, or on a lattice."""

    name = "cnr_jax"

    def __init__(
        self,
        root: Path,
        *,
        keep: int | None = None,
        policy: Policy | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        state = training.on_device(self.state)
        self.tables = training.tables_of(state)
        self.touched = cnr.init_touched(state, self.tables)
        self.manager = cnr.CheckpointManager(
            root,
            tables=self.tables,
            options=cnr.Options(
                policy=policy or policy_of_runs(),
                tables={"user": cnr.TableOptions(codec="raw")},
                preservation_policy=latest(keep),
                # Codes are compared between runs, and dither is another in each that is restored.
                rounding="nearest",
                **(SUMS if training.HAS_SUMS else {}),
                **{"max_in_flight": most_in_flight(), **options},
            ),
        )

    def go_on(self, step: int | None = None) -> int | None:
        if step is None and self.manager.latest_step() is None:
            return None
        args = cnr.args.Restore(training.on_device(self.state))
        state, self.touched = self.manager.restore(step, args=args)
        return self._restored(state)

    def train(self, step: int, salt: int = 0) -> None:
        self.state = training.trained(self.state, step, salt)
        self.touched = _record(self.touched, training.ids_of(step, salt))

    def save(self, step: int) -> bool:
        state = training.on_device(self.state)
        return self.manager.save(step, args=cnr.args.Save(state, self.touched))

    def wait(self) -> None:
        super().wait()
        # A merge that the save has begun ends too, so that the calls of a run are always the same.
        while self.manager._handler.lifecycle.merging.is_busy:
            time.sleep(0.001)


class PlainOrbax(_Loop):
    """`ocp.CheckpointManager` with `StandardSave` of the same state, as its guide shows it."""

    name = "Orbax"

    def __init__(self, root: Path, *, keep: int | None = None, **_: Any) -> None:
        super().__init__()
        self.manager = ocp.CheckpointManager(
            root,
            options=ocp.CheckpointManagerOptions(preservation_policy=latest(keep)),
        )

    def go_on(self, step: int | None = None) -> int | None:
        if step is None and self.manager.latest_step() is None:
            return None
        abstract = jax.tree.map(
            ocp.utils.to_shape_dtype_struct, training.on_device(self.state)
        )
        args = ocp.args.StandardRestore(abstract)
        return self._restored(self.manager.restore(step, args=args))

    def train(self, step: int, salt: int = 0) -> None:
        self.state = training.trained(self.state, step, salt)

    def save(self, step: int) -> bool:
        state = training.on_device(self.state)
        return self.manager.save(step, args=ocp.args.StandardSave(state))


def latest(keep: int | None) -> Any:
    """Orbax's policy that keeps so many; None keeps all."""
    return None if keep is None else ocp.checkpoint_managers.LatestN(keep)


SYSTEMS: dict[str, type[Ours] | type[PlainOrbax]] = {
    system.name: system for system in (Ours, PlainOrbax)
}
