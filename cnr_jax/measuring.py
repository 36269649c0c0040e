"""Measurement of a store on demand: how much longer saves take there if several are in flight."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import statistics
import time
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from cnr_jax.args import Save
from cnr_jax.errors import OptionError
from cnr_jax.format import names
from cnr_jax.goodput.measured import MeasuredSave, writes_of
from cnr_jax.goodput.measurements import read_measurements
from cnr_jax.goodput.profile import ENOUGH, Profile, check_integers, check_numbers
from cnr_jax.goodput.records import profile_at
from cnr_jax.manager import CheckpointManager
from cnr_jax.options import Options
from cnr_jax.policy import Full
from cnr_jax.repository.course import course_of
from cnr_jax.repository.describe import describe
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.store import AnyPath, store_of
from cnr_jax.rows.touched import init_touched
from cnr_jax.state.find import find_tables

# Seconds of a measurement on the command line.
SECS = 120.0
_DIM = 64
# Saves of more bytes are like ones of so many.
_MOST_BYTES = 256 << 20
# Saves at each number in flight. The first ones compile, and fewer are in flight beside them and
# beside the last.
_FEW = ENOUGH + 5


def measure_store(
    root: str | os.PathLike[str],
    *,
    secs: float = SECS,
    most_in_flight: int = 4,
    item: str | None = None,
) -> Profile | None:
    """Measures how much longer saves take in the storage of a run if several are in flight.

    A run measures what its saves take, but several at a time only if it has had several. This call
    writes saves of exact rows, of the size of the run's deltas, into a folder of its own in the
    root, with 1, 2, ... in flight all the time, and removes the folder. Call it while the run
    trains, on the same host: then its saves and its input weigh on what is measured. The run goes
    on as it is.

    Args:
        root: directory of the run's checkpoints.
        secs: seconds that the measurement takes, or more where ten saves take longer.
        most_in_flight: most saves at a time.
        item: item to look at, where steps hold several.

    Returns:
        The profile of the run with `in_flight` as measured, for `advise`; None if the run has not
        saved often enough to tell what its train steps take.

    Raises:
        NoStepError: if there is no such root, or no step in it.
        OptionError: if a number cannot be used.
        RootError, SaveError: if the storage fails.

    Example:
        `cnr_jax.advise(cnr_jax.measure_store("run"), "exponential:4000", job_hours=500)`.
    """
    check_numbers(above=True, secs=secs)
    check_integers(most_in_flight=most_in_flight)
    if most_in_flight < 1:
        raise OptionError("most_in_flight is 0: at least one save is in flight")
    found = describe(root, item=item)
    course = course_of(found)
    profile = profile_at(found, course=course)
    if profile is None:
        return None
    deltas = [save.total_bytes or 0 for save in course.saves if save.kind == "delta"]
    nbytes = statistics.median(deltas) if deltas else profile.full_bytes
    nbytes = min(int(nbytes), _MOST_BYTES)
    saves: list[MeasuredSave] = []
    with _scratch_of(root) as folder:
        for count in range(1, most_in_flight + 1):
            part = secs / most_in_flight
            saves += _saves(folder / str(count), nbytes, count, part)
    return dataclasses.replace(profile, in_flight=writes_of(saves)[1])


@contextlib.contextmanager
def _scratch_of(root: str | os.PathLike[str]) -> Iterator[AnyPath]:
    """Folder in a root, which no reader takes for a step; it is removed at the end."""
    path = open_root(root) / names.MEASURING.format(token=secrets.token_hex(8))
    try:
        yield path
    finally:
        store_of(path).remove_tree(path)


def _saves(root: AnyPath, nbytes: int, count: int, secs: float) -> list[MeasuredSave]:
    """Saves of some bytes of which `count` are in flight all the time, as they were measured."""
    rng = np.random.default_rng(0)
    rows = rng.random((max(nbytes // (4 * _DIM), 1), _DIM), np.float32)
    state = {"rows": jnp.asarray(rows)}
    tables = find_tables(state, ["rows"])
    touched = init_touched(state, tables)
    options = Options(codec="raw", policy=Full(), max_in_flight=count, min_fulls=1)
    kept = ocp.CheckpointManagerOptions(max_to_keep=1)
    step, end = 0, time.monotonic() + secs
    with CheckpointManager(
        root, tables=tables, options=options, orbax_options=kept
    ) as manager:
        while step < _FEW or time.monotonic() < end:
            manager.save(step, args=Save(state, touched))
            step += 1
    found = read_measurements(root)
    return [*found.saves[2:]] if found is not None else []
