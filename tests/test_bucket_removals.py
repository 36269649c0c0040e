"""Removals in buckets that fail, sleep, or are late: no save is lost by them, nor rests on them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository.store import store_of

from .bucket_proxy import Proxy
from .test_bucket_rollbacks import keeping_first_and
from .test_buckets import consequences, held


@pytest.fixture
def root(bucket: epath.Path) -> epath.Path:
    return bucket / "run"


def all_whole(run: Any, root: epath.Path, steps: list[int]) -> None:
    """A fresh manager has exactly these steps, and restores each of them."""
    with run.open(str(root)) as manager:
        assert manager.all_steps() == steps
        for step in steps:
            run.check(manager, step)
    assert consequences(root) == []


def removing(path: str, body: bytes) -> bool:
    """Whether a request takes the commit of step 3 back."""
    return path.endswith(f"/3/{names.ATTEMPT}") and b"removing" in body


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lost", ["the answer", "all after it"])
@pytest.mark.parametrize("by", ["retention", "delete"])
def test_no_save_rests_on_a_step_whose_commit_may_be_taken_back(
    tiny_run: Any, root: epath.Path, proxy: Proxy, lost: str, by: str
) -> None:
    """An outage begins with the request that does it; later saves would rest on the step."""
    run, best = tiny_run(), {"best_fn": lambda m: m["loss"], "best_mode": "min"}
    began = False

    def harm(kind: str, path: str, _: int) -> Any:
        nonlocal began
        if not began:
            began = kind == "PUT" and removing(path, proxy.bodies[-1])
            return "drop" if began and lost == "the answer" else None
        return "reset"

    keeps = best | {"max_to_keep": 2} if by == "retention" else None
    with run.open(str(root), keeps) as manager:
        for step in range(3):
            run.run(manager, [step], metrics={"loss": 1.0})
        if by == "delete":
            run.run(manager, [3])
            proxy.harm = harm
            with pytest.raises((OSError, cnr.errors.CnrError)):
                manager.delete(3)
        else:
            proxy.harm = harm
            run.run(manager, [3], metrics={"loss": 9.0})
        assert began
        proxy.harm = lambda *_: None
        for step in (4, 5):
            run.run(manager, [step], metrics={"loss": 0.5})
        steps = manager.all_steps()
        assert {4, 5} <= {*steps} and 3 not in steps
    with run.open(str(root)) as manager:
        for step in steps:
            run.check(manager, step)
    assert consequences(root) == []


def test_a_number_is_saved_beside_a_removal_that_is_tried_again(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    """Storage refuses to delete 2, and is slow when that is tried again; 2 is saved meanwhile."""
    run = tiny_run()
    slow, done = threading.Event(), threading.Event()

    def refuses(kind: str, path: str, _: int) -> Any:
        return 403 if kind == "DELETE" and b"/2/" in proxy.bodies[-1] else None

    def waits(kind: str, path: str, _: int) -> Any:
        if kind == "DELETE" and b"/2/default" in proxy.bodies[-1] and not slow.is_set():
            slow.set()
            done.wait(60)
        return None

    with run.open(
        str(root),
        keeping_first_and(2),
        policy=cnr.Full(),
        max_in_flight=2,
        when_busy="wait",
    ) as manager:
        run.run(manager, range(4))
        proxy.harm = refuses
        run.run(manager, [4])
        assert manager.all_steps() == [0, 3, 4] and "2" in held(root)
        run.restore(manager, 0)
        run.salt += 1
        proxy.harm = waits
        run.train(1)
        assert run.save(manager, 1)
        assert slow.wait(60)
        run.train(2)
        assert run.save(manager, 2)
        done.set()
        manager.wait_until_finished()
    all_whole(run, root, [0, 1, 2])


@pytest.mark.parametrize("sleeps", ["before", "after"])
@pytest.mark.parametrize(
    ("call", "nth"),
    [("swap", 1), ("_below", 0), ("remove_file", 0), ("_delete", 0), ("_delete", 1)],
)
def test_a_removal_that_sleeps_touches_no_save_of_who_came_since(
    tiny_run: Any,
    root: epath.Path,
    monkeypatch: pytest.MonkeyPatch,
    sleeps: str,
    call: str,
    nth: int,
) -> None:
    run, store = tiny_run(), type(store_of(root))
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(4))
    asleep, awake = threading.Event(), threading.Event()
    real, threads, calls = getattr(store, call), list[threading.Thread](), 0

    def sleeping(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if threading.current_thread() not in threads or "/3" not in str(path):
            return real(self, path, *args, **kwargs)
        calls += 1
        found = None
        if sleeps == "after" or calls != nth + 1:
            found = real(self, path, *args, **kwargs)
        if calls == nth + 1:
            asleep.set()
            awake.wait(60)
            if sleeps == "before":
                found = real(self, path, *args, **kwargs)
        return found

    monkeypatch.setattr(store, call, sleeping)
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.restore(manager, 3)
        threads.append(threading.Thread(target=manager.delete, args=(3,)))
        threads[0].start()
        assert asleep.wait(60)
        with run.open(str(root), policy=cnr.Full()) as other:
            run.restore(other, 2)
            run.salt += 1
            run.run(other, [3, 4])
        awake.set()
        threads[0].join()
    all_whole(run, root, [0, 1, 2, 3, 4])
    shown = [n for n in held(root) if names.ORBAX_COMMITTED in held(root / n)]
    assert sorted(map(names.step_number, shown)) == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("impatient")
def test_what_is_left_of_a_step_of_before_is_removed_too(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    """A step that Orbax's file alone commits; no file tells that an attempt holds its folder."""
    run, store = tiny_run(), store_of(root)
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(4))
    for name in "0123":
        store.remove_file(root / name / names.ATTEMPT)
        marker = root / name / names.ORBAX_COMMITTED
        store.write(marker, b"0" * 32, replaces=True)
    store.remove_file(root / names.CATALOGUE)
    with run.open(str(root), {"max_to_keep": 4}, policy=cnr.Full()) as manager:
        run.restore(manager, None)
        proxy.harm = lambda kind, *_: (
            500 if kind == "DELETE" and b"/0/default" in proxy.bodies[-1] else None
        )
        run.run(manager, [4])
        proxy.harm = lambda *_: None
        assert manager.all_steps() == [1, 2, 3, 4] and held(root / "0")
        run.run(manager, [5])
        assert not held(root / "0"), "the next removal goes on with it"
    all_whole(run, root, [2, 3, 4, 5])
