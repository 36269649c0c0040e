"""The catalogue of a root in a bucket: it changes how much is asked, and no answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository import markers
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.index.entries import entry_of
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.store import names_in, store_of

from .bucket_proxy import FolderProxy, Proxy
from .conftest import case_of
from .test_buckets import held


@pytest.fixture
def root(bucket: epath.Path) -> epath.Path:
    return bucket / "run"


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()


def put(root: epath.Path, data: bytes | None) -> None:
    path = root / names.CATALOGUE
    if data is None:
        store_of(path).remove_file(path)
    else:
        store_of(path).write(path, data, replaces=True)


def taken(root: epath.Path) -> bytes:
    return store_of(root).read(root / names.CATALOGUE)


def told(root: epath.Path) -> list[str]:
    """Steps that the catalogue of a root tells of."""
    return sorted(catalogue.read(root).entries)


def answers(run: Any, root: epath.Path, **options: Any) -> Any:
    """What a manager says of a root."""
    with run.open(str(root), **options) as manager:
        found = manager._steps.infos(), manager.all_steps(), manager.latest_step()
        ledger = manager._listing.ledger
        standing = [
            (e.directory, e.uuid, e.generation, e.parent, e.run, e.forks, e.rows_bytes)
            for e in ledger.committed()
        ]
        chains = [
            (ledger.restore_bytes(e), ledger.own_bytes(e)) for e in ledger.restorable()
        ]
        return *found, standing, chains, sorted(ledger.folders)


def test_a_root_is_opened_by_three_requests(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(9))
    with proxy.counting() as counts:
        known = answers(run, root)
    assert counts == {"LIST": 1, "GET": 2}
    assert told(root) == [str(i) for i in range(9)]
    # Of what it does not tell, each is looked at.
    store_of(root).move(root / "8", root / "9")
    with proxy.counting() as counts:
        answers(run, root)
    assert sum(counts.values()) < 12
    store_of(root).move(root / "9", root / "8")
    put(root, None)
    with proxy.counting() as counts:
        assert answers(run, root) == known
    assert sum(counts.values()) > 9 * 4
    with run.open(str(root)) as manager:
        run.check(manager, None)
        run.run(manager, [9])
    assert told(root) == [str(i) for i in range(10)], "it is made anew"


@pytest.mark.skipif(
    os.environ.get("CNR_S3_SERVER") == "seaweedfs",
    reason="folders of steps that are removed are listed there, and looked at",
)
def test_a_mirror_is_opened_by_as_few(
    tiny_run: Any, root: epath.Path, tmp_path: Path, proxy: Proxy
) -> None:
    run, near = tiny_run(), tmp_path / "near"
    policy = cnr.Consecutive(max_chain=3)
    for keep in (None, 2):
        options = {"near": near, "policy": policy, "mirror_keep": keep}
        with run.open(str(root), **options) as manager:
            if keep is None:
                run.run(manager, range(9))
            else:
                run.restore(manager, None)
                run.run(manager, [9])
        there = [each for each in held(root) if names.may_be_step(each)]
        assert told(root) == sorted(there)
        shutil.rmtree(near)
        with proxy.counting() as counts:
            read = Ledger.load(root, "default")
        assert counts == {"LIST": 2, "GET": 2}, "however many steps"
        put(root, None)
        looked = Ledger.load(root, "default")
        assert {e.uuid for e in read.restorable()} == {
            e.uuid for e in looked.restorable()
        }


def test_a_delta_takes_few_requests_and_few_follow_one_another(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run, rounds = tiny_run(), dict[str, int]()

    def note(kind: str, path: str, _: int) -> None:
        if path.endswith("/c/0"):
            rounds.setdefault("array", proxy.rounds)
        if kind == "PUT" and names.ATTEMPT in path:
            rounds["commit"] = proxy.rounds

    with run.open(str(root)) as manager:
        run.run(manager, range(2))
        proxy.harm, proxy.delay_secs = note, 0.05
        with proxy.counting() as counts:
            run.run(manager, [2])
        proxy.harm, proxy.delay_secs = lambda *_: None, 0.0
        assert manager.last_report.kind == "delta"
    assert sum(counts.values()) <= 23
    assert rounds["commit"] - rounds["array"] + 1 <= 8


@pytest.mark.slow  # the service takes its time to take them
def test_a_root_of_a_thousand_steps_is_opened_by_four_requests(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, [1000])
    known = catalogue.read(root)
    (entry,), (noted,) = known.entries.values(), known.noted.values()
    manifest = entry.manifest
    steps = [str(i) for i in range(1001)]
    entries = [
        entry_of(d, dataclasses.replace(manifest, step=int(d), uuid=f"{int(d):032x}"))
        for d in steps[:-1]
    ]
    with ThreadPoolExecutor(16) as pool:
        paths = [root / d / names.ORBAX_COMMITTED for d in steps[:-1]]
        list(pool.map(lambda path: store.write(path, b"", replaces=True), paths))
    told_of = dict.fromkeys(steps, noted)
    put(root, catalogue.dumped("default", known.epoch, [*entries, entry], told_of))
    with proxy.counting() as counts:
        with run.open(str(root)) as manager:
            assert manager.all_steps() == list(range(1001))
    assert counts == {"LIST": 2, "GET": 2}


def test_a_restore_of_a_long_chain_does_not_wait_step_by_step(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(12))
    with run.open(str(root)) as reader:
        proxy.delay_secs, proxy.rounds = 0.05, 0
        run.check(reader, 11)
        proxy.delay_secs = 0.0
        assert proxy.rounds <= 16


def test_times_and_metrics_are_told(tiny_run: Any, root: epath.Path) -> None:
    run, keep = tiny_run(), {"best_fn": lambda metrics: metrics["loss"]}
    with run.open(str(root), keep) as manager:
        for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0]):
            run.train(step)
            run.save(manager, step, metrics={"loss": loss, "of": [step, "x"]})
            manager.wait_until_finished()

    def infos() -> Any:
        with run.open(str(root), keep) as manager:
            return repr(manager._steps.infos()), manager.best_step()

    found = catalogue.read(root)
    assert sorted(found.entries) == ["0", "1", "2", "3"]
    assert sorted(found.noted) == ["0", "1", "3"], "JSON has no number for that of 2"
    with_catalogue = infos()
    put(root, None)
    assert with_catalogue == infos()


def histories(run: Any, root: epath.Path, other: epath.Path) -> list[bytes]:
    """Catalogues of all moments of a run that goes back, drops steps, and saves some again."""
    found: list[bytes] = []

    def saves(manager: Any, steps: Any) -> None:
        for step in steps:
            run.run(manager, [step])
            found.append(taken(root))

    with run.open(str(root), policy=cnr.Full()) as manager:
        saves(manager, range(4))
        manager.delete(3)
        run.restore(manager, 2)
        saves(manager, [3])  # of the same name as the one that is gone
    with run.open(str(root)) as manager:
        run.restore(manager, 1)
        saves(manager, [2, 3])  # a rollback
        manager.delete(3)
    with run.open(str(root), {"max_to_keep": 2}) as manager:
        run.restore(manager, None)
        saves(manager, [3, 4, 5])
    cnr.prune(str(root), keep=1, delete=True, writer_is_dead=True)
    with run.open(str(root)) as manager:
        run.restore(manager, None)
        saves(manager, [6])
    with run.open(str(other), new_run=True) as manager:
        run.run(manager, range(7))
    return [*found, taken(other)]


def test_no_catalogue_changes_an_answer(tiny_run: Any, bucket: epath.Path) -> None:
    """Old ones, one of another root, and damaged ones are as good as none."""
    run, root = tiny_run(), bucket / "run"
    played = histories(run, root, bucket / "other")
    newest = taken(root)
    put(root, None)
    right = answers(run, root)
    before = names_in(root)
    spoilt = [newest[:-2], newest[: len(newest) // 2], b"", b"{}", b"[]", b"\xff", b"{"]
    document = json.loads(newest)
    document["steps"] = {}
    spoilt += [json.dumps(document).encode()]
    spoilt += [newest.replace(b'"generation":', b'"generation":1', 1)]
    for i, data in enumerate([newest, *played[::2], *spoilt]):
        with case_of((i, data[:40])):
            put(root, data)
            assert answers(run, root) == right
    assert names_in(root) == sorted({*before, names.CATALOGUE})
    for data in (played[0], played[-1], spoilt[0]):
        put(root, data)
        with run.open(str(root)) as manager:
            run.restore(manager, None)
            step = manager.latest_step() + 1
            run.run(manager, [step])
            run.check(manager, None)
        with_catalogue = answers(run, root)
        assert str(step) in told(root)
        put(root, None)
        assert answers(run, root) == with_catalogue


def test_a_catalogue_of_before_a_name_was_used_again_is_none(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(3))
        old = taken(root)
        manager.delete(2)
        assert told(root) == ["0", "1"]
        run.restore(manager, 1)
        run.run(manager, [2])
        new = Ledger.load(root, "default").entries["2"].uuid
        put(root, old)
        assert Ledger.load(root, "default").entries["2"].uuid == new


def test_what_another_manager_has_saved_since_is_not_told_wrongly(
    tiny_run: Any, root: epath.Path
) -> None:
    """A manager that was opened before knows steps that are gone, or others, by now."""
    run = tiny_run()
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(3))
    with run.open(str(root), policy=cnr.Full()) as late:
        run.restore(late, 2)
        state = run.state, run.touched
        with run.open(str(root), policy=cnr.Full()) as manager:
            run.restore(manager, 1)
            run.run(manager, [2])  # another one of that name, of a later generation
        run.state, run.touched = state
        run.run(late, [3])
    uuids = {d: e.uuid for d, e in catalogue.read(root).entries.items()}
    put(root, None)
    entries = Ledger.load(root, "default").entries
    assert uuids and all(entries[d].uuid == uuid for d, uuid in uuids.items())


def test_adopted_and_local_roots_have_none(tiny_run: Any, tmp_path: Any) -> None:
    run = tiny_run()
    with run.open(tmp_path / "run") as manager:
        run.run(manager, range(2))
    assert names.CATALOGUE not in names_in(epath.Path(tmp_path / "run"))
    claim = json.loads((tmp_path / "run" / names.WRITER).read_text())
    assert "epoch" not in claim


def test_who_deletes_without_a_claim_ends_the_catalogue(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(3))
        manager.reload()
        manager.delete(2)
        assert told(root) == []
        assert manager.all_steps() == [0, 1]
    with run.open(str(root)) as manager:
        manager.delete(1)
        assert manager.all_steps() == [0]


@pytest.mark.parametrize("lists_emptied", [False, True])
def test_what_was_on_its_way_out_when_a_root_was_opened_is_no_step(
    tiny_run: Any,
    root: epath.Path,
    s3: str,
    monkeypatch: pytest.MonkeyPatch,
    lists_emptied: bool,
) -> None:
    """Whether folders in which nothing is any more are listed for a while or not."""
    run, other = tiny_run(), tiny_run()
    with contextlib.ExitStack() as stack:
        if lists_emptied:
            made = stack.enter_context(contextlib.closing(FolderProxy(s3)))
            monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        manager = stack.enter_context(run.open(str(root), policy=cnr.Full()))
        run.run(manager, range(3))
        begin, second = markers.begin_removal, list[Any]()

        def opens(*args: Any) -> Any:
            patch.undo()
            second.append(stack.enter_context(other.open(str(root), policy=cnr.Full())))
            other.restore(second[0], None)
            return begin(*args)

        with monkeypatch.context() as patch:
            patch.setattr(markers, "begin_removal", opens)
            manager.delete(0)
        assert second[0].all_steps() == [0, 1, 2], "it was there still"
        other.run(second[0], [3])
        assert second[0].all_steps() == [1, 2, 3]
        assert told(root) == ["1", "2", "3"]
        with other.open(str(root)) as reader:
            assert reader.all_steps() == [1, 2, 3]
        assert [each.step for each in cnr.describe(root).steps] == [1, 2, 3]


def test_a_killed_removal_is_not_listed(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(3))
        old = taken(root)

        def fails(*_: object) -> None:
            raise OSError("x")

        # Of all that is there, what commits it is gone.
        monkeypatch.setattr(type(store), "_delete", fails)
        manager.delete(1)
        monkeypatch.undo()
    assert "1" in names_in(root)
    begun = root / "7" / names.ATTEMPT  # of a save that was killed
    store.write(begun, b"a" * 32, replaces=True)
    for data in (old, taken(root), None):
        put(root, data)
        with run.open(str(root)) as reader:
            assert reader.all_steps() == [0, 2]
    with run.open(str(root)) as manager:
        run.restore(manager, None)
        run.run(manager, [3])
    assert held(root / "1") == [], "what was left of it goes with the next claim"
    assert store.read(begun) == markers.stopped("a" * 32), "it comes to nothing"


def test_a_catalogue_that_is_put_as_a_step_is_removed_does_not_tell_of_it(
    tiny_run: Any, root: epath.Path
) -> None:
    run, threads = tiny_run(), list[threading.Thread]()
    with run.open(str(root)) as manager:
        run.run(manager, [0, 1])
        writer = manager._saves._writer
        writer.check_removal("9")  # none is named by now

        class Others(Mapping[str, catalogue.Noted]):
            """Asked for when it is decided which steps are told of."""

            def __iter__(self) -> Iterator[str]:
                removal = threading.Thread(target=writer.check_removal, args=("0",))
                threads.append(removal)
                removal.start()
                removal.join(1)
                return iter(())

            def __len__(self) -> int:
                return 1  # as if there were some

            def __getitem__(self, key: str) -> catalogue.Noted:
                raise KeyError(key)

        writer.put_catalogue(Others())
        (removal,) = threads
        removal.join()
        assert "0" not in told(root)


def test_a_catalogue_that_cannot_be_put_costs_requests_alone(
    tiny_run: Any, root: epath.Path, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, [0])
        proxy.harm = lambda kind, path, number: (
            403 if kind == "PUT" and names.CATALOGUE in path else None
        )
        run.run(manager, [1])
        assert "managers look at more steps" in caplog.text
        proxy.harm = lambda *_: None
        assert told(root) == ["0"]
        with run.open(str(root)) as reader:
            assert reader.all_steps() == [0, 1]
        run.run(manager, [2])
    assert told(root) == ["0", "1", "2"]


def test_a_step_that_retention_removes_at_once_is_not_told(
    tiny_run: Any, root: epath.Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some services list folders of steps that are gone, which a catalogue must not tell of."""
    folders = FolderProxy(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", folders.url)
    run, every = tiny_run(), ocp.checkpoint_managers.EveryNSteps(3)
    options = {"policy": cnr.Full(), "preservation_policy": every, "max_in_flight": 2}
    with contextlib.closing(folders):
        with run.open(str(root), **options) as manager:
            run.run(manager, [0])
            for step in (2, 3):  # both in flight; the first is not to stay
                run.train(step)
                run.save(manager, step)
            manager.wait_until_finished()
            assert manager.all_steps() == [0, 3]
        with run.open(str(root)) as manager:
            assert manager.all_steps() == [0, 3]
        assert told(root) == ["0", "3"]


def test_what_another_program_has_left_behind_and_removed_is_no_step(
    tiny_run: Any, root: epath.Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program opens the root before both steps of a number are removed, and saves after it."""
    folders = FolderProxy(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", folders.url)
    run, other = tiny_run(), tiny_run()
    with contextlib.closing(folders):
        with run.open(str(root), policy=cnr.Full()) as manager:
            run.run(manager, range(3))
            run.restore(manager, 1)
            run.salt += 1
            run.run(manager, [2])
            with other.open(str(root), policy=cnr.Full()) as second:
                other.restore(second, 1)
                assert names_in(root / "2") and names_in(root / "2.g2.branch")
                manager.delete(2)
                other.run(second, [3])
                assert second.all_steps() == [0, 1, 3]
        assert told(root) == ["0", "1", "3"]
        with other.open(str(root)) as reader:
            assert reader.all_steps() == [0, 1, 3]
