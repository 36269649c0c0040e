"""Training that is restored on its way, by `cnr_jax.CheckpointManager`.

At a restore the state is saved, the manager is closed, and a new one restores: training goes on
with what came back. All that is stored exactly is compared, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from flights_course import Course, Figures, Trainee, joined

import cnr_jax as cnr


def train_undisturbed(
    course: Course, seed: int, keep: Iterable[int]
) -> tuple[dict[str, Figures], dict[int, Trainee]]:
    """A run without restores.

    Returns:
        Its figures, and what it was at the steps of `keep`.
    """
    run, kept, step = course.begin(seed), {}, 0
    for stop in sorted({*keep, course.steps}):
        course.advance(run, step, stop)
        if stop < course.steps:
            kept[stop] = run.copy()
        step = stop
    return course.figures(run), kept


def train_restored(
    course: Course,
    begun: Trainee,
    stops: Sequence[int],
    root: Path,
    *,
    bits: int | Literal["auto"] | None,
    slots: str = "raw",
    codec: str = "adaptive",
) -> tuple[dict[str, Figures], list[cnr.SaveReport]]:
    """A run with restores.

    Args:
        course: what it is trained on.
        begun: an undisturbed run at the first of the stops; not changed.
        stops: steps after which it is restored.
        root: an empty folder.
        bits: of the codec; "auto": as chosen for so many restores; None: tables are stored
            exactly.
        slots: how those of the optimizer are stored, as `Options(slot_codec=...)` takes it.
        codec: of tables that are not stored exactly.

    Returns:
        Its figures, and the report of each save.
    """
    run = begun.copy()
    reports: list[cnr.SaveReport] = []
    options = cnr.Options(
        codec="raw" if bits is None else codec,
        bits=bits,
        slot_codec=slots,
        expected_restores=len(stops) if bits == "auto" else None,
        preservation_policy=ocp.checkpoint_managers.LatestN(1),
        on_save=reports.append,
    )
    state = course.saved(run.state)
    tables = course.tables(state)
    abstract = jax.eval_shape(lambda saved: saved, state)

    def opened() -> cnr.CheckpointManager:
        return cnr.CheckpointManager(root, tables=tables, options=options)

    manager = opened()
    for stop, following in zip(stops, [*stops[1:], course.steps], strict=True):
        state = course.saved(run.state)
        manager.save(stop, args=cnr.args.Save(state, run.touched))
        manager.close()
        manager = opened()
        restored = manager.restore(None, args=cnr.args.Restore(abstract))
        names = () if bits is None else course.names
        _check(restored.state, state, names, slots=slots != "raw")
        run.state, run.touched = joined(restored.state), restored.touched
        course.advance(run, stop, following)
    manager.close()
    return course.figures(run), reports


def _check(
    got: Any, want: Any, rounded: Collection[str], *, slots: bool = False
) -> None:
    """Checks that all but the `rounded` tables, and perhaps `slots`, came back bit for bit.

    Raises:
        RuntimeError: if not, or if one of these tables was not rounded.
    """
    wrong: list[str] = []
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        expected = name not in [f"params/{table}" for table in rounded]
        if slots and name.startswith("sparse_optimizer/") and "/count" not in name:
            expected = False
        if np.array_equal(a, b) != expected:
            wrong.append(f"{name}, expected {'equal' if expected else 'rounded'}")
    if wrong:
        raise RuntimeError(f"not restored as it should be: {'; '.join(wrong)}")
