"""Small trainings that are restored by `cnr_jax.CheckpointManager`: some of the cases of `harm.py`.

Saved at each stop, by a manager that is closed, and restored by a new one: with fingerprints, which
are the default where nothing is recorded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from simulated_restores import Course, Run

import cnr_jax as cnr


def restored(
    course: Course, seed: int, stops: Sequence[int], root: Path, options: cnr.Options
) -> Run:
    """A run that is saved and restored after each of the stops, ascending.

    Raises:
        RuntimeError: if anything but the tables, and slots that are rounded, did not come back as
            it was.
    """
    run = course.unbroken(seed, stops[0])
    tables = cnr.find_tables(run.state, list(course.training.tables))
    opened = functools.partial(
        cnr.CheckpointManager, root, tables=tables, options=options
    )
    manager = opened()
    for stop, following in zip(stops, [*stops[1:], course.steps], strict=True):
        manager.save(stop, args=cnr.args.Save(run.state))
        manager.close()
        manager = opened()
        abstract = jax.eval_shape(lambda saved: saved, run.state)
        got = manager.restore(None, args=cnr.args.Restore(abstract)).state
        rounded = [f"params/{table}" for table in course.training.tables]
        if options.slot_codec != "raw":
            rounded += [f"/{table}" for table in course.training.tables]
        _check(got, run.state, tuple(rounded))
        run = course.advance(seed, Run(got, run.seen), stop, following)
    manager.close()
    return run


def _check(got: Any, want: Any, rounded: tuple[str, ...]) -> None:
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.endswith(rounded) and not np.array_equal(a, b):
            raise RuntimeError(f"{name} was not restored as it was saved")


@contextmanager
def warnings_of_harm() -> Iterator[list[str]]:
    """Collects what the library warns of rounding while it is open."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "harm" in record.getMessage():
                found.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("cnr_jax")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
