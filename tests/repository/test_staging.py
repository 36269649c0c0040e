from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_jax.repository.staging import Room, Stage


@dataclasses.dataclass
class Item:
    nbytes: int
    number: int = 0


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Watched(Stage):
    """A stage that knows the most that it held."""

    peak_bytes = 0

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_held":
            self.peak_bytes = max(self.peak_bytes, self._held)


def waits(thread: threading.Thread) -> bool:
    """Whether a thread is still there after a while: it waits for something."""
    thread.join(0.05)
    return thread.is_alive()


def ends(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


@given(
    sizes=st.lists(st.integers(0, 30), max_size=30),
    limit=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_items_come_through_in_order_and_within_the_limit(
    sizes: list[int], limit: int
) -> None:
    stage = Watched(Room(limit), timeout_secs=20)
    got: list[int] = []
    reader = in_thread(lambda: got.extend(item.number for item in stage))
    for number, size in enumerate(sizes):
        assert stage.put(Item(size, number))
    stage.close()
    assert ends(reader)
    assert got == list(range(len(sizes)))
    # An item that is larger than the limit passes alone.
    assert stage.peak_bytes <= max([limit, *sizes])


def test_put_waits_for_room() -> None:
    stage = Stage(Room(10), timeout_secs=20)
    assert stage.put(Item(6))
    writer = in_thread(lambda: stage.put(Item(6)))
    assert waits(writer)
    items = iter(stage)
    next(items)
    assert waits(writer)  # the first item is still in use
    next(items)
    assert ends(writer)


def test_item_larger_than_the_limit_passes_alone() -> None:
    stage = Stage(Room(10), timeout_secs=20)
    assert stage.put(Item(1000))
    writer = in_thread(lambda: stage.put(Item(1)))
    assert waits(writer)
    items = iter(stage)
    assert next(items).nbytes == 1000
    next(items)
    assert ends(writer)


def test_put_gives_up_after_its_timeout() -> None:
    stage = Stage(Room(10), timeout_secs=0.05)
    stage.put(Item(10))
    started = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        stage.put(Item(1))
    assert time.perf_counter() - started < 5


def test_failed_reader_frees_the_writer_and_takes_nothing_more() -> None:
    stage = Stage(Room(10), timeout_secs=20)
    stage.put(Item(10))
    results: list[bool] = []
    writer = in_thread(lambda: results.append(stage.put(Item(10))))
    assert waits(writer)
    stage.fail()
    assert ends(writer)
    assert results == [False]
    assert not stage.put(Item(1))


def test_aborted_writer_never_looks_like_a_finished_one() -> None:
    stage = Stage(Room(10), timeout_secs=20)
    stage.put(Item(1))
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in stage:
                stage.abort()
        except RuntimeError as error:
            failures.append(error)

    assert ends(in_thread(read))
    assert "given up" in str(failures[0])


def test_reader_that_waits_learns_of_an_abort() -> None:
    stage = Stage(Room(10), timeout_secs=20)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            list(stage)
        except RuntimeError as error:
            failures.append(error)

    reader = in_thread(read)
    assert waits(reader)
    stage.abort()
    assert ends(reader)
    assert len(failures) == 1


def test_reader_waits_for_more_until_closed() -> None:
    stage = Stage(Room(10), timeout_secs=20)
    got: list[int] = []
    reader = in_thread(lambda: got.extend(item.number for item in stage))
    stage.put(Item(1, 7))
    assert waits(reader)
    stage.close()
    assert ends(reader)
    assert got == [7]


def test_closed_stage_without_items_is_empty() -> None:
    stage = Stage(Room(10), timeout_secs=20)
    stage.close()
    assert list(stage) == []


def test_a_patient_reader_waits_until_it_may_start_or_there_is_no_room() -> None:
    for let in ("close", "no room"):
        stage = Stage(Room(10), timeout_secs=20, patient=True)
        got: list[int] = []
        reader = in_thread(lambda: got.extend(item.number for item in stage))  # noqa: B023
        assert stage.put(Item(6, 1))
        assert waits(reader) and got == []
        if let == "no room":
            assert stage.put(Item(6, 2))
        stage.close()
        assert ends(reader)
        assert got == ([1, 2] if let == "no room" else [1])


def test_giving_up_frees_a_patient_reader() -> None:
    stage = Stage(Room(10), timeout_secs=20, patient=True)
    assert stage.put(Item(6))
    failed: list[Exception] = []

    def read() -> None:
        try:
            list(stage)
        except RuntimeError as error:
            failed.append(error)

    reader = in_thread(read)
    assert waits(reader)
    stage.abort()
    assert ends(reader) and len(failed) == 1


def test_stages_share_their_room_and_give_it_back() -> None:
    room = Room(10)
    first, second = Stage(room, timeout_secs=20), Stage(room, timeout_secs=20)
    assert first.put(Item(6)) and second.put(Item(4))
    waiting = in_thread(lambda: second.put(Item(5)))
    assert waits(waiting)
    first.close()
    assert [item.nbytes for item in first] == [6]
    assert ends(waiting) and room.held_bytes == 9
    second.close()
    taken = iter(second)
    assert next(taken).nbytes == 4
    second.fail()  # with one item in hand, and one that waits
    assert room.held_bytes == 0
    with pytest.raises(RuntimeError, match="given up"):
        next(taken)
    assert room.held_bytes == 0
