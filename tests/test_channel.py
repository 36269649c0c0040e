"""Errors as processes tell each other of them, and waits for another process that fail."""

from __future__ import annotations

import inspect
import json
from typing import Any

import jax
import pytest

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import channel

CLASSES = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, errors.CnrError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
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
    """The key-value store of a run in which another process always succeeds."""

    def __init__(self, problem: str = "") -> None:
        self.texts: dict[str, str] = {}
        self.problem = problem

    def key_value_set(self, key: str, text: str, **_: Any) -> None:
        self.texts[key] = text

    def key_value_delete(self, key: str) -> None:
        self.texts.pop(key, None)

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        if self.problem:
            raise jax.errors.JaxRuntimeError(self.problem)
        return self.texts.pop(key, "{}")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process as one of two."""

    def of(process: int, store: Store) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr(channel, "distributed_client", lambda: store)

    return of


@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        ("DEADLINE_EXCEEDED: GetKeyValue() timed out", "process_silent", "for 14 s"),
        ("UNAVAILABLE: failed to connect", "coordination_lost", "failed to connect"),
        ("CANCELLED: the service has stopped", "coordination_lost", "has stopped"),
    ],
)
def test_wait_that_times_out_is_told_from_one_that_fails(
    two: Any, problem: str, kind: str, text: str
) -> None:
    two(1, Store(problem))
    with pytest.raises(errors.SaveError, match=text) as caught:
        channel.Channel(7.0).broadcast(None)
    assert (caught.value.kind, caught.value.process) == (kind, 0)


def test_nothing_is_kept_of_what_is_settled(two: Any) -> None:
    store = Store()
    two(0, store)
    talking = channel.Channel(7.0)
    barriers = channel.Barriers(talking)
    sizes: list[tuple[int, int]] = []
    for save in range(100):
        talking.settle(f"saved/{save:032x}", None, 1.0)
        barriers.begin([f"written.{save}", f"committed.{save}"], f"{save:032x}")
        for key in (f"written.{save}", f"committed.{save}"):
            barriers(key=key, timeout_ms=1000)
        kept = sum(len(v) for v in vars(talking).values() if hasattr(v, "__len__"))
        kept += sum(len(v) for v in vars(barriers).values() if hasattr(v, "__len__"))
        sizes.append((kept, len(store.texts)))
    assert sizes[99] == sizes[10]


def test_own_failure_is_raised_itself(two: Any) -> None:
    two(0, Store())
    mine = errors.SaveError("no space", step=3, process=0, errno=28)
    with pytest.raises(errors.SaveError) as caught:
        channel.Channel(7.0).settle("saved", mine, 1.0)
    assert caught.value is mine
