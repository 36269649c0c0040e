"""A save between the call and its commit: checked, prepared, in flight, reported."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.core import Tracer

from cnr_jax import errors
from cnr_jax.checkpointer.save_errors import save_error
from cnr_jax.checkpointer.saving import capture
from cnr_jax.checkpointer.saving.background import Background
from cnr_jax.checkpointer.tracking.tracker import Found
from cnr_jax.format.manifest import DenseLeaf, Manifest, Tracking, dump
from cnr_jax.format.names import step_number
from cnr_jax.repository.commit import Facts
from cnr_jax.repository.layout import Place
from cnr_jax.repository.lineage.entries import Entry
from cnr_jax.repository.lineage.planner import Plan
from cnr_jax.repository.rows_writer import Written
from cnr_jax.rows.gather.rounding import RowErrors
from cnr_jax.rows.touched import Touched
from cnr_jax.state.split import split
from cnr_jax.state.table import Tables
from cnr_jax.telemetry import SaveReport

NOT_IN_JIT = "  hint: call save after the train step, outside of jax.jit"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is to be saved, split and found to be in order."""

    arrays: dict[str, dict[str, jax.Array]]
    dense: dict[str, Any]
    dense_leaves: tuple[DenseLeaf, ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class Prepared:
    """A save that is decided but not begun.

    Attributes:
        args: the arguments it was prepared from; another save must not use it.
    """

    args: Any
    place: Place
    plan: Plan
    checked: Checked
    found: Found
    started_secs: float


@dataclasses.dataclass(slots=True, kw_only=True)
class InFlight:
    """A save that is being written, or was until the next one settles it.

    Attributes:
        written: what this process has written, once it has.
        row_errors: of rounded rows among it; None where all are exact.
        manifest_bytes: of `manifest.json`, if this process has written it.
        manifest: of the save, once it is seen to be committed.
        is_reported: whether its report is handed over.
        is_failure_told: whether the log says why it failed.
    """

    place: Place
    plan: Plan
    facts: Facts
    fingerprint_secs: float = 0.0
    blocking_secs: float = 0.0
    background: Background | None = None
    written: Written | None = None
    row_errors: RowErrors | None = None
    manifest_bytes: int | None = None
    manifest: Manifest | None = None
    is_reported: bool = False
    is_failure_told: bool = False

    def has_failed(self) -> bool:
        """Whether all processes have heard that the save has failed; waits for their word."""
        return self.background is None or self.background.has_failed()

    def failure(self) -> errors.SaveError:
        """Why the save was not committed, as far as this process knows."""
        known = self.background.error if self.background is not None else None
        reason = known or RuntimeError("it was not committed")
        return save_error(reason, self.plan.step, os.fspath(self.place.path))

    def stop(self) -> None:
        """Waits until nothing of a failed save is being written.

        Orbax raises the first error while other parts may still be writing, into a directory
        of which the same step, saved again, uses the name.
        """
        if self.background is not None:
            self.background.stop()


def check(
    state: Any, touched: Touched | None, tables: Tables, tracking: Tracking
) -> Checked:
    """All checks of form that a process can do alone, before anything is decided or written.

    Raises:
        StateMismatchError, TouchedError, TableError: if the state cannot be saved.
    """
    if isinstance(state, Touched):
        raise errors.StateMismatchError(
            "the state is Touched: it and the touched rows are swapped\n"
            "  hint: cnr_jax.args.Save(state, touched)"
        )
    if isinstance(state, tuple | list) and touched is None:
        both = cast("Sequence[Any]", state)
        if len(both) == 2 and isinstance(both[1], Touched):
            raise errors.StateMismatchError(
                f"the state is a {type(state).__name__} of a state and touched rows\n"
                "  hint: pass the two, cnr_jax.args.Save(state, touched); of what restore"
                " returned, Save(*restored)"
            )
    _check_alive(state, "state")
    arrays, dense = split(state, tables)
    leaves = capture.dense_leaves(dense)
    if tracking != "fingerprint":
        if touched is None:
            raise errors.TouchedError(
                f"a run with tracking={tracking!r} cannot be saved without touched rows\n"
                "  hint: cnr.args.Save(state, touched), with touched from init_touched or"
                " a restore; or Options(tracking='fingerprint'), which needs none"
            )
        _check_alive(touched, "touched")
        capture.check_touched(touched, tables)
    return Checked(arrays=arrays, dense=dense, dense_leaves=leaves)


def is_alive(tree: Any) -> bool:
    """Whether all leaves are arrays that hold something, none donated or being traced."""
    return all(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and not leaf.is_deleted()
        for leaf in jax.tree_util.tree_leaves(tree)
    )


def check_concrete(state: Any, touched: Any) -> None:
    """Checks that there are values to be saved.

    Raises:
        StateMismatchError, TouchedError: if there are tracers, inside `jax.jit`.
    """
    for tree, what, kind in (
        (state, "state", errors.StateMismatchError),
        (touched, "touched", errors.TouchedError),
    ):
        # Paths are slow to make, and only needed for the message.
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if isinstance(leaf, Tracer):
                raise kind(
                    f"{what}{jax.tree_util.keystr(path)} is a tracer, which has no value"
                    f" to save\n{NOT_IN_JIT}"
                )


def _check_alive(tree: Any, what: str) -> None:
    """Checks that no array was donated: saving it would fail halfway."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise errors.StateMismatchError(
                f"{what}{jax.tree_util.keystr(path)} was donated to a computation\n"
                "  hint: save what the train step returned, not what it was given"
            )


def pending_entry(plan: Plan) -> Entry:
    """The ledger's entry of a save that is about to be written."""
    return Entry(
        directory=plan.directory,
        step=plan.step,
        uuid=plan.uuid,
        generation=plan.generation,
        parent=plan.parent,
        run=plan.run,
    )


def report_of(flight: InFlight, manifest: Manifest, tables: Tables) -> SaveReport:
    """What a committed save did."""
    parent, totals = manifest.parent, manifest.totals
    rounding = flight.row_errors
    own = flight.manifest_bytes
    if own is None:  # another process has written it
        own = len(dump(manifest))
    return SaveReport(
        step=manifest.step,
        kind=manifest.kind,
        tracking=manifest.tracking,
        parent=step_number(parent.directory) if parent else None,
        generation=manifest.generation,
        rows=totals.rows,
        table_bytes=totals.table_bytes,
        slot_bytes=totals.slot_bytes,
        dense_bytes=totals.dense_bytes,
        manifest_bytes=totals.manifest_bytes + own,
        full_fp32_bytes=capture.full_fp32_bytes(tables, manifest.dense_leaves),
        blocking_secs=flight.blocking_secs,
        fingerprint_secs=flight.fingerprint_secs,
        total_secs=manifest.history[-1].secs,
        reason=manifest.reason,
        restores=manifest.restores,
        auto_bits=flight.plan.auto_bits,
        sample_rows=rounding.rows if rounding else None,
        mean_row_error=rounding.mean if rounding else None,
        worst_row_error=rounding.worst if rounding else None,
    )
