"""What processes tell each other: errors, decisions, and how something ended for all of them.

Threads stand for processes here: each has an index of its own, and all have one store.
"""

from __future__ import annotations

import contextvars
import inspect
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest

from cnr_jax import errors
from cnr_jax.checkpointer import multihost
from cnr_jax.checkpointer.multihost import (
    Channel,
    agree,
    all_succeed,
    on_primary,
    raise_if_told,
)

from ..conftest import each_of

CLASSES = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, errors.CnrError)
]


@each_of("kind", CLASSES)
def test_error_comes_back_from_json_with_all_that_it_says(kind: Any) -> None:
    error = kind("the fact\n  where\n  hint: what to do", kind="special")
    facts = {k: v for k, v in vars(error).items() if not k.startswith("_")}
    error.path = "/root/1/default"
    for name, value in facts.items():
        if name not in ("kind", "path"):
            setattr(error, name, ("one", "two") if isinstance(value, tuple) else 28)
    if isinstance(error, OSError):
        error.errno = 28
    same = errors.CnrError.from_json(json.loads(json.dumps(error.to_json())))
    assert type(same) is kind
    assert str(same) == str(error)
    assert (same.kind, same.path) == ("special", "/root/1/default")
    for name in facts:
        assert getattr(same, name) == getattr(error, name)
    assert getattr(same, "errno", None) == getattr(error, "errno", None)


def test_error_of_a_class_of_someone_else_comes_back_as_one_of_ours() -> None:
    class Theirs(errors.CnrError):
        kind = "theirs"

    same = errors.CnrError.from_json(Theirs("text").to_json())
    assert (type(same), same.kind, str(same)) == (errors.CnrError, "theirs", "text")


class Store:
    """The key-value store of a run, as jax's coordination service keeps it."""

    def __init__(self, problem: str = "") -> None:
        self.texts: dict[str, str] = {}
        self.problem = problem
        self._changed = threading.Condition()

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.texts and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.texts[key] = text
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.texts.pop(key, None)
            below = key.rstrip("/") + "/"
            for each in [k for k in self.texts if k.startswith(below)]:
                del self.texts[each]

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._changed:
            self.texts[key] = str(int(self.texts.get(key, "0")) + increment)
            return int(self.texts[key])

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            if key not in self.texts:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self.texts[key]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        if self.problem:
            raise jax.errors.JaxRuntimeError(self.problem)
        with self._changed:
            there = self._changed.wait_for(lambda: key in self.texts, timeout_ms / 1000)
            if not there:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
            return self.texts[key]


class Processes:
    """A run of several processes, each of them a thread."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch) -> None:
        self.count, self.store = count, Store()
        # Threads that a process starts in a copy of its context are that process too.
        self._here = contextvars.ContextVar("process", default=0)
        patch.setattr(jax, "process_count", lambda: count)
        patch.setattr(jax, "process_index", self._here.get)
        patch.setattr(multihost, "distributed_client", lambda: self.store)

    def channels(self, timeout_secs: float = 30.0) -> list[Channel]:
        return [Channel(timeout_secs) for _ in range(self.count)]

    def start(self, process: int, work: Callable[[], Any]) -> Callable[[], Any]:
        """Begins work on a process; what is returned waits, and gives what came of it."""
        ended: list[Any] = []

        def run() -> None:
            self._here.set(process)
            try:
                ended.append(work())
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()

        def outcome() -> Any:
            thread.join(60)
            assert ended, "it hangs"
            return ended[0]

        return outcome

    def all(self, work: Callable[[int], Any]) -> list[Any]:
        """What work gives on each process, or raises there."""
        outcomes = [self.start(i, lambda i=i: work(i)) for i in range(self.count)]
        return [outcome() for outcome in outcomes]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Processes]:
    return lambda count: Processes(count, monkeypatch)


def failing(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        ("DEADLINE_EXCEEDED: GetKeyValue() timed out", "process_silent", "for 14 s"),
        ("UNAVAILABLE: failed to connect", "coordination_lost", "failed to connect"),
        ("CANCELLED: the service has stopped", "coordination_lost", "has stopped"),
    ],
)
def test_wait_that_times_out_is_told_from_one_that_fails(
    processes: Any, problem: str, kind: str, text: str
) -> None:
    run = processes(2)
    run.store.problem = problem
    found = run.start(1, lambda: Channel(7.0).hear("1"))()
    assert isinstance(found, errors.SaveError) and text in str(found)
    assert (found.kind, found.process) == (kind, 0)


def test_nothing_is_kept_of_what_is_agreed_on(processes: Any) -> None:
    run = processes(3)
    channels = run.channels()

    def saves(process: int) -> list[int]:
        talking, sizes = channels[process], list[int]()
        for save in range(50):
            on_primary(talking, lambda s=save: s)
            all_succeed(talking, lambda: None)
            agree(talking, None, topic=f"{save:032x}/saved")
            on_primary(talking, lambda: None, topic=f"{save:032x}/published")
            kept = vars(talking).values()
            sizes.append(sum(len(v) for v in kept if hasattr(v, "__len__")))
        return sizes

    for sizes in run.all(saves):
        assert sizes[49] == sizes[10]
    assert run.store.texts == {}


def test_own_failure_is_raised_itself_and_told_to_the_others(processes: Any) -> None:
    run = processes(3)
    channels = run.channels()
    mine = errors.SaveError("no space", step=3, process=1, errno=28)
    found = run.all(
        lambda process: agree(
            channels[process], mine if process == 1 else None, topic="saved"
        )
    )
    assert found[1] is mine
    for other in (found[0], found[2]):
        assert (type(other), str(other)) == (errors.SaveError, "no space")
        assert (other.step, other.process, other.errno) == (3, 1, 28)
    assert run.store.texts == {}


def test_what_process_0_decides_all_get_or_the_error_that_it_raised(
    processes: Any,
) -> None:
    run = processes(2)
    channels = run.channels()
    asked: list[int] = []

    def decide(process: int) -> Any:
        asked.append(process)
        return {"step": 3}

    got = run.all(lambda p: on_primary(channels[p], lambda: decide(p)))
    assert got == [{"step": 3}] * 2 and asked == [0]
    mine = errors.WriterError("taken over")
    got = run.all(lambda p: on_primary(channels[p], lambda: failing(mine)))
    assert got[0] is mine
    assert (type(got[1]), str(got[1])) == (
        errors.WriterError,
        "on process 0: taken over",
    )
    got = run.all(lambda p: on_primary(channels[p], lambda: failing(OSError(5, "bad"))))
    assert isinstance(got[0], OSError)
    assert str(got[1]) == "process 0 has failed: OSError: [Errno 5] bad"
    assert run.store.texts == {}


def test_an_attempt_that_fails_on_one_fails_on_all_alike(processes: Any) -> None:
    run = processes(3)
    channels = run.channels()
    mine = errors.StateMismatchError("not the state", path="/root")
    damage = errors.IntegrityError("bytes differ")

    def attempt(process: int) -> int:
        return failing({1: damage, 2: mine}[process]) if process else 7

    # Damage would be answered with another step, which would not help process 2.
    got = run.all(lambda p: all_succeed(channels[p], lambda: attempt(p)))
    assert got[2] is mine
    for process in (0, 1):
        assert type(got[process]) is errors.StateMismatchError
        assert str(got[process]) == "on process 2: not the state"
    assert got[1].__cause__ is damage
    assert run.all(lambda p: all_succeed(channels[p], lambda: p)) == [0, 1, 2]
    assert run.store.texts == {}


def test_process_0_decides_on_what_all_have_found(processes: Any) -> None:
    run = processes(3)
    channels = run.channels()
    got = run.all(lambda p: agree(channels[p], None, 10 + p, lambda all_: sum(all_)))
    assert got == [33] * 3
    mine = errors.OptionError("they differ")
    got = run.all(lambda p: agree(channels[p], None, p, lambda _: failing(mine)))
    assert got[0] is mine
    assert [(type(e), str(e)) for e in got] == [(errors.OptionError, "they differ")] * 3


def test_the_loop_asks_while_a_save_ends_on_the_same_channel(
    processes: Any,
) -> None:
    """Process 1 hears what the loop was told only after the background of both is done."""
    run = processes(2)
    channels = run.channels()
    run.all(lambda p: on_primary(channels[p], lambda: "matched"))
    assert run.start(0, lambda: on_primary(channels[0], lambda: "busy"))() == "busy"
    for save in ("a", "b"):
        assert run.all(
            lambda p, s=save: agree(channels[p], None, topic=f"{s}/saved")
        ) == [None, None]
    assert run.start(1, lambda: on_primary(channels[1], lambda: "-"))() == "busy"
    assert run.store.texts == {}


def test_a_process_that_finds_nobody_yet_is_not_ahead_of_the_others(
    processes: Any,
) -> None:
    run = processes(2)
    channels = run.channels()
    channels[0].timeout_secs = 0.2
    for process in (0, 0):
        alone = run.start(process, lambda: on_primary(channels[0], lambda: "alone"))()
        assert (alone.kind, alone.process) == ("process_silent", 1)
    channels[0].timeout_secs = 30.0
    assert run.all(lambda p: on_primary(channels[p], lambda: "both")) == ["both"] * 2
    assert run.store.texts == {}


def test_saves_end_in_any_order(processes: Any) -> None:
    run = processes(2)
    channels = run.channels()
    run.all(lambda p: on_primary(channels[p], lambda: "matched"))
    first = [run.start(0, lambda: agree(channels[0], None, topic="a/saved"))]
    assert run.all(lambda p: agree(channels[p], None, topic="b/saved")) == [None] * 2
    first.append(run.start(1, lambda: agree(channels[1], None, topic="a/saved")))
    assert [outcome() for outcome in first] == [None, None]
    assert run.store.texts == {}


def test_failure_of_process_0_can_be_seen_before_all_agree(processes: Any) -> None:
    run = processes(3)
    channels = run.channels()
    run.all(lambda p: on_primary(channels[p], lambda: "matched"))
    mine = errors.SaveError("no space", step=3, process=0, errno=28)
    first = run.start(0, lambda: agree(channels[0], mine, topic="a/saved"))
    deadline = time.monotonic() + 60
    while (
        found := run.start(1, lambda: raise_if_told(channels[1], "a/saved"))()
    ) is None:
        assert time.monotonic() < deadline
    assert (type(found), str(found)) == (errors.SaveError, "no space")
    assert run.start(1, lambda: raise_if_told(channels[1], "b/saved"))() is None
    others = [
        run.start(p, lambda p=p: agree(channels[p], None, topic="a/saved"))
        for p in (1, 2)
    ]
    assert first() is mine
    assert [str(other()) for other in others] == ["no space"] * 2
    assert run.store.texts == {}


def test_a_process_that_comes_late_hears_that_it_was_given_up(processes: Any) -> None:
    run = processes(3)
    channels = run.channels()
    run.all(lambda p: on_primary(channels[p], lambda: "matched"))

    def at(process: int, timeout_secs: float) -> Any:
        return run.start(
            process,
            lambda: agree(
                channels[process], None, topic="a", timeout_secs=timeout_secs
            ),
        )

    second = at(1, 30)
    deadline = time.monotonic() + 60
    while not any(key.endswith("/a/1") for key in list(run.store.texts)):
        assert time.monotonic() < deadline
    found = [at(0, 0.2)(), second(), at(2, 30)()]
    assert [(e.kind, e.process) for e in found] == [("process_silent", 2)] * 3
    assert run.store.texts == {}
