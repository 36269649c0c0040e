"""A save in the background ends as its writing did, and as its blocking part did."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import Channel
from cnr_jax.checkpointer.orbax_compat.places import Directories
from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.checkpointer.saving.launch import write_in_background
from cnr_jax.repository.committer import Attempt

ATTEMPT = Attempt(Path("root"), "3", "0" * 32)


class Write:
    """Writes rows until it is released, as where a save streams through bounded memory."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self.released, self.ended = threading.Event(), threading.Event()
        self.begun = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        if self._error is not None:
            raise self._error
        assert self.released.wait(60)
        self.ended.set()


def begin(write: Write, directories: Any = None) -> SaveInFlight:
    flight = SaveInFlight(attempt=ATTEMPT, item="default")
    there, release = directories or Directories(), write.released.set
    write_in_background(flight, there, write, release, Channel(60.0))
    if directories is None:
        assert write.begun.wait(60)
    return flight


def launched(flight: SaveInFlight) -> None:
    """Says that the blocking part of the save is over."""
    flight.launched.open()


def test_all_parts_written_is_success() -> None:
    write = Write()
    flight = begin(write)
    launched(flight)
    with pytest.raises(TimeoutError):
        flight.result(0.01)
    write.released.set()
    flight.result(60)
    assert flight.write_error is None


def test_what_ends_the_blocking_part_fails_the_save_and_stops_the_writing() -> None:
    write = Write()
    flight = begin(write)
    flight.give_up(OSError(28, "no space"))
    launched(flight)
    with pytest.raises(errors.SaveError, match="no space") as caught:
        flight.result(60)
    assert "step 3" in str(caught.value)
    assert write.ended.is_set() and flight.write_error is not None


@pytest.mark.parametrize("where", ["rows"])
def test_a_part_that_fails_fails_the_save(where: str) -> None:
    write = Write(OSError(5, "broken disk"))
    flight = begin(write)
    launched(flight)
    with pytest.raises(errors.SaveError, match="broken disk"):
        flight.result(60)
    # Whoever waits for room among the rows that wait to be written goes on.
    assert write.released.is_set()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cancelled_save_says_so_whenever_it_is_cancelled(when: str) -> None:
    write = Write()
    flight = begin(write)
    if when == "before":
        flight.cancel()
        launched(flight)
    else:
        launched(flight)
        flight.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        flight.result(60)
    assert write.ended.is_set()


def test_stop_waits_until_nothing_is_written_any_more() -> None:
    write = Write()
    flight = begin(write)
    flight.stop()
    assert write.ended.is_set()
    with pytest.raises(concurrent.futures.CancelledError):
        flight.result(60)


class LateDirectories:
    """Of a file system that takes its time."""

    def __init__(self) -> None:
        self.made = threading.Event()

    def wait(self, *args: Any, **kwargs: Any) -> None:
        assert self.made.wait(60)


def test_a_save_that_is_cancelled_before_it_can_write_writes_nothing() -> None:
    write, directories = Write(), LateDirectories()
    flight = begin(write, directories)
    flight.cancel()
    directories.made.set()
    launched(flight)
    with pytest.raises(concurrent.futures.CancelledError):
        flight.result(60)
    assert not write.ended.is_set()
