"""Measurement of a store on demand: how much longer saves take there if several are in flight."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.args import Save
from cnr_jax.errors import OptionError
from cnr_jax.format import names
from cnr_jax.goodput.measured import MeasuredSave, writes_of
from cnr_jax.goodput.measurements import read_measurements
from cnr_jax.goodput.profile import ENOUGH, Profile, check_numbers
from cnr_jax.goodput.records import profile_at
from cnr_jax.integers import integer
from cnr_jax.manager import CheckpointManager
from cnr_jax.options import Options
from cnr_jax.policy import Full
from cnr_jax.repository.course import course_of
from cnr_jax.repository.describe import describe
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.store import AnyPath, store_of
from cnr_jax.rows.touched import init_touched
from cnr_jax.state.find import find_tables
from cnr_jax.texts import logger

_log = logger(__name__)
# Seconds of a measurement on the command line.
SECS = 120.0
_DIM = 64
# The most bytes of a save, and of all that are there at a time.
_MOST_BYTES, _MOST_AT_ONCE = 256 << 20, 4 << 30
# Each number in flight has its turn so many times, as storage is not the same all the time.
_ROUNDS = 2
# Saves of a turn. The first ones compile, and fewer are in flight beside the last.
_FIRST, _FEW = 2, ENOUGH + 2


def measure_store(
    root: str | os.PathLike[str],
    *,
    secs: float = SECS,
    most_in_flight: int = 4,
    item: str | None = None,
) -> Profile | None:
    """Measures how much longer saves take in the storage of a run if several are in flight.

    A run measures what its saves take, but several at a time only if it has had several. This call
    makes saves of exact rows, of the size of the run's deltas (256 MiB at most), one after the
    other, with 1, 2, ... in flight. They go to a folder of its own in the root, which it removes.

    Call it while the run trains, on the same host, from a process of its own in which jax may use
    the CPU alone (`JAX_PLATFORMS=cpu`). Then saves of the run and its input weigh on what is
    measured. The run itself goes on, but its saves take longer meanwhile, and it notes that.

    Args:
        root: directory of the run's checkpoints.
        secs: seconds that the measurement takes, or more where some saves take longer.
        most_in_flight: most saves at a time.
        item: item to look at, where steps hold several.

    Returns:
        The profile of the run, for `advise`, with `in_flight` as far as five saves of each number
        were measured, and from there on as the run has measured it. None if the run has not saved
        often enough to tell what its train steps take.

    Raises:
        NoStepError: if there is no such root.
        OptionError: if a number cannot be used, or the program has several processes.
        RootError, SaveError: if the storage fails.

    Example:
        `cnr_jax.advise(cnr_jax.measure_store("run"), "exponential:4000", job_hours=500)`.
    """
    check_numbers(above=True, secs=secs)
    most = integer(most_in_flight)
    if most is None or most < 1:
        raise OptionError(
            f"most_in_flight is {most_in_flight!r}, expected an integer of 1 or more"
        )
    if jax.process_count() > 1:
        raise OptionError(
            f"storage is measured by one process, got {jax.process_count()}\n"
            "  hint: call measure_store from a program of its own"
        )
    found = describe(root, item=item)
    course = course_of(found)
    profile = profile_at(found, course=course)
    if profile is None or not profile.is_known:
        return profile
    deltas = [save.total_bytes or 0 for save in course.saves if save.kind == "delta"]
    nbytes = statistics.median(deltas) if deltas else profile.full_bytes
    nbytes = min(int(nbytes), _MOST_BYTES)
    saves: list[MeasuredSave] = []
    with _scratch_of(root) as folder:
        for turn, count in itertools.product(range(_ROUNDS), range(1, most + 1)):
            place = folder / f"{turn}-{count}"
            saves += _saves(place, nbytes, count, secs / (_ROUNDS * most))
            store_of(place).remove_tree(place)
    _, measured = writes_of(saves)
    known = profile.in_flight[len(measured) :]
    return dataclasses.replace(profile, in_flight=(*measured, *known))


@contextlib.contextmanager
def _scratch_of(root: str | os.PathLike[str]) -> Iterator[AnyPath]:
    """Folder in a root, which no reader takes for a step; it is removed at the end."""
    path = open_root(root) / names.MEASURING.format(token=secrets.token_hex(8))
    try:
        yield path
    finally:
        left = store_of(path).remove_tree(path)
        if left:
            _log.warning("%s could not be removed, delete it: %s", path, left[0])


def _saves(root: AnyPath, nbytes: int, count: int, secs: float) -> list[MeasuredSave]:
    """Makes saves of some bytes, always `count` at a time; returns what was measured of them."""
    rng = np.random.default_rng(0)
    rows = rng.random((max(nbytes // (4 * _DIM), 1), _DIM), np.float32)
    state = {"rows": jnp.asarray(rows)}
    tables = find_tables(state, ["rows"])
    touched = init_touched(state, tables)
    # All stay: with several in flight the removal of one would count as part of another.
    options = Options(
        codec="raw", policy=Full(), max_in_flight=count, single_writer=True
    )
    most = max(_MOST_AT_ONCE // max(nbytes, 1), _FIRST + _FEW)
    step, end = 0, time.monotonic() + secs
    with CheckpointManager(root, tables=tables, options=options) as manager:
        while step < _FIRST + _FEW or (step < most and time.monotonic() < end):
            manager.save(step, args=Save(state, touched))
            step += 1
    found = read_measurements(root)
    return [*found.saves[_FIRST:]] if found is not None else []
