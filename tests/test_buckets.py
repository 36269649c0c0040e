"""Runs that live in a bucket of S3: the service is one of loopback that knows conditions."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.cli.app import app
from cnr_jax.format import names
from cnr_jax.repository import markers
from cnr_jax.repository.causes import causes
from cnr_jax.repository.committer import Attempt, ConditionalCommitter
from cnr_jax.repository.index import ledger as ledger_module
from cnr_jax.repository.index.gaps import Gaps
from cnr_jax.repository.markers import is_committed
from cnr_jax.repository.store import (
    bucket_clients,
    buckets,
    exists,
    names_in,
    s3_clients,
    store_of,
)
from cnr_jax.repository.upkeep import removal
from cnr_jax.repository.upkeep.removal import go_on
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from . import bucket_program
from .bucket_proxy import KEY, SECRET, FolderProxy, Proxy
from .conftest import Gate, case_of, each_of, xla_flags

PROGRAM = Path(bucket_program.__file__)
DATA = PROGRAM.parent / "data"

TABLE, LEAF = "user", "['params']['user']['embedding']"


@pytest.fixture
def root(bucket: epath.Path) -> epath.Path:
    return bucket / "runs/lr=[0.1] #1"


def held(folder: Any) -> list[str]:
    """Names of what lies in a folder; not of folders in which nothing is any more.

    SeaweedFS lists those for some minutes.
    """
    return [name for name in names_in(folder) if exists(folder / name)]


def consequences(root: Any) -> list[str]:
    return [problem.kind for problem in cnr.verify(root) if problem.consequence]


def test_a_run_lives_in_a_bucket(tiny_run: Any, root: epath.Path) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
        assert manager.last_report.kind == "delta"
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1, 2, 3]
        run.restore(manager, 1)
        run.same(run.state, run.truth[1])
        run.run(manager, [2, 3, 4])  # whose numbers are taken
        assert manager.all_steps() == [0, 1, 2, 3, 4]
        for step in (None, *range(5)):
            run.check(manager, step)
    assert consequences(root) == []
    found = cnr.describe(root)
    assert [each.kind for each in found.steps] == ["full", *["delta"] * 4]
    assert found.latest_step == 4 and len(found.abandoned) == 2
    with run.open(str(root), {"max_to_keep": 2}, policy=cnr.Full()) as manager:
        run.restore(manager, None)
        run.run(manager, range(5, 8))
        assert manager.all_steps() == [6, 7]
        manager.delete(6)
        run.check(manager, None)
    assert held(root) == ["7", names.CATALOGUE, names.WRITER], "all else is gone"
    assert not list(Path().glob("s3*")), "nothing is taken for a local path"


def test_what_a_save_has_written_is_named_or_known(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
    assert cnr.verify(root) == ()
    item = root / "1/default"
    assert {*names_in(root / "1")} == {"default", *names.OF_STEP}
    assert names.MANIFEST in names_in(item)


def test_damage_is_found_and_another_step_restored(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(2))
    rows = root / "1/default/rows.p00000"
    chunk = rows / names_in(rows)[0] / "c/0"
    manifest = root / "1/default" / names.process_manifest(0)
    store = store_of(root)
    for path in (chunk, manifest):
        whole = store.read(path)
        for spoilt in (whole[:-1], bytes(len(whole)), None):
            with case_of((path.name, spoilt and len(spoilt))):
                if spoilt is None:
                    store.remove_file(path)
                else:
                    store.write(path, spoilt, replaces=True)
                (problem,) = [each for each in cnr.verify(root) if each.consequence]
                assert problem.directory == "1" and path.name in problem.message
                with run.open(str(root)) as manager:
                    got = manager.restore(None, args=cnr.args.Restore(run.state))
                    run.same(got.state, run.truth[0])
        store.write(path, whole, replaces=True)
    assert cnr.verify(root) == ()


def test_what_reads_and_tends_a_root(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run, url = tiny_run(), str(root)
    with run.open(url) as manager:
        run.run(manager, range(4))
        truth = run.truth[3]
    rows = cnr.read_rows(url, TABLE, [0, 3])
    assert rows.tolist() == truth[LEAF][[0, 3]].tolist()
    exported = cnr.export(url, 3, tmp_path / "out")
    assert exported is not None and (tmp_path / "out").is_dir()
    plan = cnr.prune(url, keep=1, delete=True, writer_is_dead=True)
    assert plan is not None
    with run.open(url) as manager:
        run.check(manager, None)
    fresh = tiny_run(salt=1)
    with fresh.open(url, new_run=True) as manager:
        fresh.run(manager, range(2))
        assert manager.all_steps() == [0, 1]
        fresh.check(manager, None)
    (earlier,) = [name for name in names_in(root) if name.startswith("earlier-run-")]
    with run.open(str(tmp_path / "elsewhere")) as manager:
        got = manager.restore(3, directory=f"{url}/{earlier}")
        run.same(run.state, run.truth[3])
        assert got.touched is not None
    assert consequences(root) == []


def test_every_verb_reads_a_bucket(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run, url = tiny_run(), str(root)
    with run.open(url) as manager:
        run.run(manager, range(3))
    tried = {"simulate", "diff"}  # the one reads no root
    for words in (
        ["ls", url],
        ["show", url, "2"],
        ["verify", url],
        ["explain", url, "2"],
        ["rows", url, TABLE, "3"],
        ["bits", url],
        ["report", url, "-o", str(tmp_path / "report.html")],
        ["export", url, "2", "--to", str(tmp_path / "out")],
        ["advise", url, "--failures", "exponential:1", "--job-hours", "9"],
        ["cost", url],
        ["mirror", url, str(root.parent / "far")],
        ["mirror", url, str(root.parent / "far"), "--repair", "--writer-is-dead"],
        ["prune", url, "--keep", "2"],
        ["prune", url, "--keep", "2", "--yes", "--writer-is-dead"],
        ["compact", url, "--dry-run"],
        ["compact", url, "--writer-is-dead"],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)
        tried.add(words[0])
    result = CliRunner().invoke(app, ["diff", url, "1", "2"])
    assert result.exit_code == 3, "they differ"
    verbs = {getattr(each.callback, "__name__", "") for each in app.registered_commands}
    assert tried == verbs
    assert [each.kind for each in cnr.describe(url).steps] == ["full", "delta", "full"]
    for where in (url, root.parent / "far"):
        with run.open(str(where)) as manager:
            run.check(manager, 2)


def test_items_and_metrics_lie_beside_the_state(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()

    def open_() -> cnr.CheckpointManager:
        return cnr.CheckpointManager(
            str(root),
            tables=run.tables,
            options=cnr.Options(codec="raw", policy=cnr.Consecutive()),
            orbax_options=ocp.CheckpointManagerOptions(
                max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min"
            ),
            item="model",
        )

    def batches() -> Any:
        return iter(grain.MapDataset.range(100).shuffle(seed=3).batch(4))

    iterator = batches()
    with open_() as manager:
        for step in range(4):
            run.train(step)
            next(iterator)
            items = ocp.args.Composite(
                model=cnr.args.Save(run.state, run.touched),
                meta=ocp.args.JsonSave({"epoch": step}),
                data=grain.checkpoint.CheckpointSave(iterator),
            )
            assert manager.save(step, args=items, metrics={"loss": float(step != 1)})
            run.truth[step] = run.values()
            manager.wait_until_finished()
        following = next(iterator).tolist()
    with open_() as manager:
        assert manager.best_step() == 1 and 1 in manager.all_steps()
        assert manager.metrics(1) == {"loss": 0.0}
        iterator = batches()
        got = manager.restore(
            3,
            args=ocp.args.Composite(
                model=cnr.args.Restore(run.state),
                meta=ocp.args.JsonRestore(),
                data=grain.checkpoint.CheckpointRestore(iterator),
            ),
        )
        run.same(got.model.state, run.truth[3])
        assert got.meta == {"epoch": 3}
        assert next(iterator).tolist() == following
    assert consequences(root) == []


def test_folders_in_which_nothing_is_any_more_are_none(
    tiny_run: Any,
    root: epath.Path,
    s3: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, store = tiny_run(), store_of(root)
    options: dict[str, Any] = {"orbax": {"max_to_keep": 3}, "policy": cnr.Full()}
    with contextlib.closing(FolderProxy(s3)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with run.open(str(root), **options) as manager:
            run.run(manager, range(4))
            run.restore(manager, 2)
            run.run(manager, range(3, 8))
        emptied = {"0", "1", "2", "3", "3.g2.branch", "4"}
        assert emptied < {*names_in(root)}
        store.remove_file(root / names.CATALOGUE)  # which tells what is there
        caplog.clear()
        with run.open(str(root), **options) as manager:
            assert manager.all_steps() == [5, 6, 7]
            run.restore(manager, None)
            run.run(manager, [8])
            assert manager.all_steps() == [6, 7, 8], "retention goes on"
            run.check(manager, None)
        assert caplog.messages == []
        assert emptied | {"5"} == {*names_in(root)}.difference(held(root))
        store.remove_file(root / names.CATALOGUE)
        found = cnr.describe(root)
        assert [each.step for each in found.steps] == [6, 7, 8]
        assert found.unfinished == found.abandoned == cnr.verify(root) == ()


def test_a_restore_passes_over_a_step_that_is_listed_though_it_is_gone(
    tiny_run: Any, root: epath.Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    with contextlib.closing(FolderProxy(s3)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with run.open(str(root), policy=cnr.Full()) as manager:
            run.run(manager, range(4))
        with (
            cnr.CheckpointManager(str(root)) as reader,
            run.open(str(root)) as manager,
        ):
            assert reader.all_steps() == [0, 1, 2, 3]
            for step in (3, 2):
                manager.delete(step)
            assert {"2", "3"} < {*names_in(root)}
            run.restore(reader, None)
            run.same(run.state, run.truth[1])
            assert reader.all_steps() == [0, 1]


def test_a_step_that_is_committed_while_it_is_looked_at_is_one(
    tiny_run: Any, root: epath.Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks = tiny_run(), ledger_module.what_is_in
    writes = threading.Event()
    with run.open(str(root)) as manager:
        run.run(manager, [0])
        reader = cnr.CheckpointManager(str(root))
        proxy.harm = lambda kind, path, _: (
            None
            if kind != "PUT" or not path.endswith("1/default/manifest.json")
            else None
            if writes.wait(60)
            else 500
        )
        run.train(1)
        assert run.save(manager, 1)
        while not exists(root / "1" / names.ATTEMPT):
            time.sleep(0.02)

        def after_all(*told: Any) -> Any:
            writes.set()
            manager.wait_until_finished()
            return looks(*told)

        monkeypatch.setattr(ledger_module, "what_is_in", after_all)
        reader._listing.ledger.refresh(root, "default")
        assert reader.all_steps() == [0, 1]
        reader.close()


@pytest.mark.slow  # the service takes its time to take them
def test_more_than_a_thousand_names_are_listed(tiny_run: Any, root: epath.Path) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, [2000])
    with ThreadPoolExecutor(16) as pool:
        paths = [root / f"plots {i}.d/file" for i in range(1100)]
        list(pool.map(lambda p: store.write(p, b"", replaces=True), paths))
        paths = [root / f"0/{i}" for i in range(1100)]
        list(pool.map(lambda p: store.write(p, b"", replaces=True), paths))
    assert len(names_in(root)) == 1104 and len(names_in(root / "0")) == 1100
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [2000]
    assert store.remove_tree(root / "0") == [] and held(root / "0") == []


def test_a_killed_save_is_no_step_and_its_number_is_free(
    tiny_run: Any, root: epath.Path
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
        known = store.read(root / names.CATALOGUE)
        run.run(manager, [2])
    store.write(root / names.CATALOGUE, known, replaces=True)
    uncommit(root / "2")
    store.remove_file(root / "2/default" / names.MANIFEST)
    store.write(root / "2/default/junk", b"", replaces=True)
    (problem,) = cnr.verify(root)
    assert (problem.directory, problem.kind) == ("2", "unfinished")
    found = cnr.describe(root)
    assert [each.step for each in found.steps] == [0, 1] and found.unfinished == ("2",)
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1]
        run.restore(manager, None)
        run.run(manager, [2, 3])
        assert manager.all_steps() == [0, 1, 2, 3]
        for step in range(4):
            run.check(manager, step)
    assert cnr.verify(root) == ()


def test_a_move_that_is_cut_short_leaves_one_whole_step(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback copies what is in its way; it may be killed after any request."""
    run, kept, store = tiny_run(), tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
    for left in range(0, 24, 5):
        count = iter(range(left))
        real = bucket_clients.client_of

        def client(bucket: str) -> Any:
            return Ends(real(bucket), count)  # noqa: B023

        monkeypatch.setattr(bucket_clients, "client_of", client)
        target = root / f"2.abandoned-g0-{'0' * 32}"
        with case_of(left), contextlib.suppress(InterruptedError):
            store.move(root / "2", target)
        monkeypatch.undo()
        whole = [p for p in (root / "2", target) if is_committed(p)]
        assert whole, left
        if whole[0] == target:
            store.move(target, root / "2")
        with kept.open(str(root)) as reader:
            run.same(
                reader.restore(2, args=cnr.args.Restore(run.state)).state, run.truth[2]
            )
    assert store.remove_tree(target) == []


class Ends:
    """A client that ends its program, so to say, after some changes."""

    def __init__(
        self,
        client: Any,
        left: Iterator[int],
        error: type[BaseException] = InterruptedError,
    ) -> None:
        self._client, self._left, self._error = client, left, error

    def __getattr__(self, name: str) -> Any:
        if name in ("copy", "delete", "put") and next(self._left, None) is None:
            raise self._error
        return getattr(self._client, name)


# ---- what commits a step ------------------------------------------------------------------------


def as_before(step: epath.Path) -> None:
    """Leaves a step as older versions: the file that says who holds the folder says no more."""
    store, note = store_of(step), step / names.ATTEMPT
    nonce, _, ending = store.read(note).partition(b" ")
    assert ending == b"committed"
    store.write(note, nonce, replaces=True)
    store.write(step / names.ORBAX_COMMITTED, nonce, replaces=True)


def uncommit(step: epath.Path) -> None:
    """Leaves a step as a kill does right before it is committed."""
    as_before(step)
    store_of(step).remove_file(step / names.ORBAX_COMMITTED)


def shown(root: epath.Path) -> list[str]:
    """Step directories that hold what plain Orbax looks for."""
    return [n for n in names_in(root) if names.ORBAX_COMMITTED in names_in(root / n)]


def test_a_step_is_there_before_plain_orbax_lists_it(
    tiny_run: Any, root: epath.Path
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
    for step in ("2", "3"):  # as if killed between the two, and so a second time
        store.remove_file(root / step / names.ORBAX_COMMITTED)
    assert cnr.verify(root) == ()
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1, 2, 3]
        run.restore(manager, None)
        run.same(run.state, run.truth[3])
        assert shown(root) == ["0", "1"], "who may not be alone changes nothing"
        run.run(manager, [4])
        assert shown(root) == ["0", "1", "2", "3", "4"]
        run.check(manager, 3)


def test_steps_whose_dense_leaves_orbax_has_written_are_read(root: epath.Path) -> None:
    """As in roots of older versions that were copied to a bucket."""
    old = DATA / "v1" / "root"
    for file in filter(Path.is_file, old.rglob("*")):
        path = root / str(file.relative_to(old))
        store_of(root).write(path, file.read_bytes(), replaces=True)
    with cnr.CheckpointManager(old) as kept, cnr.CheckpointManager(str(root)) as copy:
        assert copy.all_steps() == kept.all_steps() == [10, 20, 30]
        for step in kept.all_steps():
            want, got = (manager.restore(step).state for manager in (kept, copy))
            equal = jax.tree.map(
                lambda a, b: bool(jnp.all((a == b) | (a != a))), got, want
            )
            assert all(jax.tree.leaves(equal)), equal


def test_what_a_program_shows_late_makes_no_step_of_what_is_gone(
    tiny_run: Any, root: epath.Path
) -> None:
    """A program may sleep between a commit and what plain Orbax is told of it."""
    run, store = tiny_run(), store_of(root)
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(3))
        manager.delete(1)
    committer = ConditionalCommitter(lambda: None)
    committer.prepare(Attempt(root, "3", "a" * 32), [])
    for step in ("1", "3"):
        markers.show_alone(root, step, [])
        assert shown(root).count(step) == 1 and not is_committed(root / step)
    store.remove_file(root / names.CATALOGUE)
    assert [p.kind for p in cnr.verify(root)] == ["unfinished"]
    assert [each.step for each in cnr.describe(root).steps] == [0, 2]
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 2]
        run.restore(manager, None)
        run.run(manager, [3, 4])
        assert manager.all_steps() == [0, 2, 3, 4]
        run.check(manager, 3)


def test_steps_that_were_saved_before_there_was_a_marker_of_ours_are_read(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(3))
    for step in range(3):
        as_before(root / str(step))
    assert cnr.verify(root) == ()
    with run.open(str(root), {"max_to_keep": 2}, policy=cnr.Full()) as manager:
        assert manager.all_steps() == [0, 1, 2]
        run.restore(manager, None)
        run.run(manager, [3])
        assert manager.all_steps() == [2, 3]
        for step in (2, 3):
            run.check(manager, step)
    assert held(root) == ["2", "3", names.CATALOGUE, names.WRITER]


def test_a_removal_that_is_cut_short_leaves_a_whole_step_or_none(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed after any request."""
    real, seen = bucket_clients.client_of, set[bool]()
    for left in range(10):
        run, count, where = tiny_run(), iter(range(left)), root / str(left)
        with run.open(str(where), policy=cnr.Full()) as manager:
            run.run(manager, range(2))
            monkeypatch.setattr(
                bucket_clients,
                "client_of",
                lambda bucket, count=count: Ends(real(bucket), count),
            )
            with contextlib.suppress(InterruptedError):
                manager.delete(1)
            monkeypatch.undo()
            with case_of(left), run.open(str(where)) as reader:
                is_there = 1 in reader.all_steps()
                seen.add(is_there)
                if is_there:
                    run.check(manager, 1)
                kinds = [problem.kind for problem in cnr.verify(where)]
                assert kinds in ([], ["unfinished"])
                assert not (is_there and kinds)
    assert seen == {True, False} and next(count, None) is not None, "all of it was done"
    assert held(where) == ["0", names.CATALOGUE, names.WRITER]


@pytest.mark.parametrize(
    "by",
    [
        "retention",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("deletion", "interrupt")
        ),
    ],
)
def test_a_step_whose_removal_fails_is_whole_or_none(
    tiny_run: Any, bucket: epath.Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Storage fails from any request on; the next removal, or manager, goes on with it."""
    real, seen = bucket_clients.client_of, set[bool]()
    error = KeyboardInterrupt if by == "interrupt" else InterruptedError
    # Retention removes the step before, after a save.
    retires = by == "retention"
    first, going = (8, 0) if retires else (0, 1)
    for left in range(first, 40):
        run, count, where = tiny_run(), iter(range(left)), bucket / f"{by}{left}"
        told = {"max_to_keep": 1} if retires else None
        with case_of(left), run.open(str(where), told, policy=cnr.Full()) as manager:
            run.run(manager, range(1 if retires else 2))
            monkeypatch.setattr(
                bucket_clients,
                "client_of",
                lambda bucket, count=count: Ends(real(bucket), count, error),
            )
            with contextlib.suppress(error, errors.SaveError):
                if retires:
                    run.run(manager, [1])
                else:
                    manager.delete(1)
            monkeypatch.undo()
            whole = [each.step for each in cnr.describe(where).steps]
            # What begins to go counts no more, until it is read anew.
            assert manager.all_steps() in (whole, [n for n in whole if n != going])
            seen.add(going in whole)
            for step in whole:
                run.check(manager, step)
            run.run(manager, [2])
            whole = [each.step for each in cnr.describe(where).steps]
            manager.reload()
            assert manager.all_steps() == whole and whole[-1] == 2
            run.restore(manager, 2)
            run.run(manager, [3])
            assert not retires or manager.all_steps() == [3]
            assert not retires or "0" not in held(where)
            assert consequences(where) == []
            whole = manager.all_steps()
        with case_of(left), run.open(str(where), policy=cnr.Full()) as manager:
            assert manager.all_steps() == whole
            run.restore(manager, None)
            run.run(manager, [4])
            assert (str(going) in held(where)) == (going in whole)
        if next(count, None) is not None:
            break
    assert seen == {True, False} and left < 39, "all of it was done"


def test_a_step_of_which_nothing_is_known_when_its_removal_fails_counts_again(
    tiny_run: Any,
    root: epath.Path,
    proxy: Proxy,
    impatient: None,
) -> None:
    run = tiny_run()
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(2))
        proxy.harm = lambda kind, path, *_: 503 if "/1/" in path else None
        with pytest.raises(errors.RootError, match="answer 503"):
            manager.delete(1)
        assert manager.all_steps() == [0], "perhaps it is none any more"
        proxy.harm = lambda *_: None
        run.run(manager, [2])
        assert manager.all_steps() == [0, 2]
        manager.reload()
        assert manager.all_steps() == [0, 1, 2]
        run.check(manager, 1)


def test_no_save_rests_on_a_step_whose_removal_is_cut_short(
    tiny_run: Any, root: epath.Path
) -> None:
    """A rule that does not keep the newest step lets go of the one that the next would rest on."""
    run, best = tiny_run(), {"best_fn": lambda metrics: metrics["auc"]}
    with run.open(str(root), best | {"max_to_keep": 1}) as manager:
        run.run(manager, [0], metrics={"auc": 0.5})
        away = Fault("unlink", action="EIO", times=0, match="/1/")
        with inprocess.failing(str(root), away):
            run.run(manager, [1], metrics={"auc": 0.1})
        assert manager.all_steps() == [0] and manager.last_report.outcome == "dropped"
        for step in (2, 3):
            run.run(manager, [step], metrics={"auc": 0.5 + step})
            assert cnr.describe(root).steps[-1].restorable
            run.check(manager, step)
    with run.open(str(root)) as manager:
        run.check(manager, 3)
    assert consequences(root) == []


# ---- attempts -----------------------------------------------------------------------------------


def attempt(root: epath.Path, letter: str) -> Attempt:
    return Attempt(root, "5", letter * 32)


def test_one_attempt_at_a_time_holds_a_folder(root: epath.Path) -> None:
    store, taken = store_of(root), list[str]()

    def check(letter: str) -> Any:
        def raises() -> None:
            if letter in taken:
                raise errors.WriterError("taken over")

        return raises

    one, two = (ConditionalCommitter(check(letter)) for letter in "ab")
    first, second = attempt(root, "a"), attempt(root, "b")
    one.prepare(first, [])
    rows = root / "5/default/rows"
    store.write(rows, b"of the first", replaces=False)
    taken.append("a")  # by the second, which cannot know whether the first has ended
    two.prepare(second, [])
    assert held(root / "5") == [names.ATTEMPT]
    store.write(rows, b"of the second", replaces=False)
    with pytest.raises(FileExistsError):
        store.write(rows, b"of the first", replaces=False)
    with pytest.raises(errors.WriterError, match=r"got b{32}.*(?s:.*)hint: "):
        one.publish(first, [])
    with pytest.raises(errors.WriterError):
        one.abandon(first)
    one = ConditionalCommitter(lambda: None)  # which has not noticed yet
    one.abandon(first)
    assert store.read(rows) == b"of the second"
    two.publish(second, [])
    assert two.is_published(second) and not one.is_published(first)
    two.publish(second, [])  # as after a lost answer
    two.abandon(second)
    assert store.read(rows) == b"of the second", "what is committed stays"
    for late in (first, attempt(root, "c")):
        with pytest.raises(errors.DependentsExistError):
            one.prepare(late, [])


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "takes over"])
def test_of_a_commit_and_a_takeover_only_one_takes_place(
    root: epath.Path, commits: bool
) -> None:
    """Who is first, when the other has looked already and is about to act."""
    committer, store = ConditionalCommitter(lambda: None), store_of(root)
    first, second = attempt(root, "a"), attempt(root, "b")
    rows, real = root / "5/default/rows", type(store).swap
    committer.prepare(first, [])
    store.write(rows, b"of the first", replaces=False)

    def swap(*args: Any) -> Any:
        patch.undo()
        if commits:
            committer.publish(first, [])
        else:
            committer.prepare(second, [])
            store.write(rows, b"of the second", replaces=False)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "swap", swap)
        if commits:
            with pytest.raises(errors.DependentsExistError, match=r"is there already"):
                committer.prepare(second, [])
        else:
            with pytest.raises(errors.WriterError, match=r"another attempt .* holds"):
                committer.publish(first, [])
    assert committer.is_published(first) is commits is is_committed(root / "5")
    assert store.read(rows) == (b"of the first" if commits else b"of the second")


@each_of("reads", ["before", "anew"])
def test_no_save_of_who_has_lost_the_root_rests_on_what_is_removed(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    """Its commit comes long after it has looked at its claim, and the new manager removes."""
    run, other, gate = tiny_run(), tiny_run(salt=1), Gate()
    publish, root = ConditionalCommitter.publish, root / reads

    def late(self: Any, attempt: Attempt, *told: Any) -> None:
        if attempt.directory == "2":
            gate.passes()
        publish(self, attempt, *told)

    monkeypatch.setattr(ConditionalCommitter, "publish", late)
    settings = {"max_to_keep": 1}
    with run.open(str(root)) as first, contextlib.ExitStack() as stack:
        run.run(first, range(2))
        gate.shut()
        run.train(2)
        early = stack.enter_context(other.open(str(root), settings, policy=cnr.Full()))
        run.save(first, 2)
        assert gate.reached.wait(60)
        if reads == "anew":
            early = other.open(str(root), settings, policy=cnr.Full())
            stack.enter_context(early)
        other.restore(early, 1)
        other.run(early, [3])
        assert early.all_steps() == [3]
        gate.open()
        with pytest.raises(errors.WriterError, match=r"has taken over(?s:.*)hint"):
            first.wait_until_finished()
        assert early.reload() is None and early.all_steps() == [3]
        other.check(early, None)
        other.run(early, [4])
    assert consequences(root) == [] and cnr.describe(root).latest_step == 4


def test_who_has_lost_the_root_removes_nothing_that_the_new_manager_rests_on(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its removal comes long after it has looked at its claim."""
    run, other, gate = tiny_run(), tiny_run(salt=1), Gate()
    look = RootWriter.check_removal

    def late(self: Any, directory: str) -> None:
        look(self, directory)
        if directory == "1":
            gate.passes()

    monkeypatch.setattr(RootWriter, "check_removal", late)
    with run.open(str(root), {"max_to_keep": 2}, policy=cnr.Full()) as first:
        run.run(first, range(2))
        gate.shut()
        run.train(2)
        run.save(first, 2)
        run.train(3)
        run.save(first, 3)  # after which 1 goes
        assert gate.reached.wait(60)
        with other.open(str(root)) as second:
            other.restore(second, 1)
            other.run(second, [2])
            gate.open()
            first.wait_until_finished()
            other.run(second, [3])
            for step in (2, 3):
                other.check(second, step)
            assert {"1", "2.g2.branch"} < {*names_in(root)}
            assert is_committed(root / "1") and markers.is_shown(root / "1")
    assert consequences(root) == []


def test_who_stands_in_for_a_manager_sees_what_that_has_saved_meanwhile(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user promises by mistake that the manager has ended, which saves right then."""
    run, stand_in = tiny_run(), RootWriter.stand_in
    with run.open(str(root), policy=cnr.Full()) as manager:
        run.run(manager, range(4))
    with run.open(str(root)) as manager:
        run.restore(manager, None)
        run.run(manager, [4])
        run.restore(manager, 1)

        def late(*told: Any, **kwargs: Any) -> None:
            run.run(manager, [2])  # rests on 1, which nothing rested on before
            stand_in(*told, **kwargs)

        monkeypatch.setattr(RootWriter, "stand_in", late)
        cnr.prune(str(root), keep=1, delete=True, writer_is_dead=True)
        monkeypatch.undo()
        run.check(manager, 2)
        run.run(manager, [3])
        assert {1, 2, 3} <= {*manager.all_steps()}
        run.check(manager, None)
    assert consequences(root) == []


def test_a_save_without_a_state_is_not_committed_by_who_has_lost_the_root(
    tiny_run: Any, root: epath.Path
) -> None:
    """It begins to write when the new manager has stopped what it saw."""
    run, other, gate = tiny_run(), tiny_run(salt=1), Gate()
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    told = {"tables": run.tables, "options": options, "item": "default"}
    with cnr.CheckpointManager(str(root), **told) as first:
        items = {"default": cnr.args.Save(run.state, run.touched)}
        assert first.save(0, args=ocp.args.Composite(**items))
        first.wait_until_finished()
        committer: Any = first._saves.pipeline.committer
        check = committer._check_claim
        committer._check_claim = lambda: (check(), gate.passes())
        gate.shut()
        with other.open(str(root)) as second, ThreadPoolExecutor(1) as pool:
            meta = ocp.args.Composite(meta=ocp.args.JsonSave({"epoch": 1}))
            saved = pool.submit(first.save, 5, args=meta)
            assert gate.reached.wait(60)
            other.restore(second, None)
            other.run(second, [1])
            gate.open()
            with pytest.raises(errors.WriterError):
                saved.result()
                first.wait_until_finished()
            assert second.reload() is None and second.all_steps() == [0, 1]


def test_a_reader_of_a_step_that_is_being_removed_is_told_so(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
    partial = ocp.args.PyTreeRestore()
    for at, args in enumerate((cnr.args.Restore(run.state), None, partial)):
        with cnr.CheckpointManager(str(root)) as reader:
            assert reader.all_steps() == [0, 1, 2]
            if at == 0:
                markers.begin_removal(root / "2", lambda: None)
            with case_of(at), pytest.raises(errors.NoStepError) as caught:
                reader.restore(2, args=args)
            assert caught.value.kind == "step_deleted"


def test_a_removal_that_is_taken_back_is_not_gone_on_with(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new manager has seen that a step was to go; by then the step is committed again."""
    run, note = tiny_run(), root / "1" / names.ATTEMPT
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
    store, stop = store_of(root), markers.stop
    whole = store.read(note)

    def late(step: epath.Path, *told: Any) -> bytes:
        found = stop(step, *told)
        if step.name == "1":
            assert markers.says_removed(found)
            store.write(note, whole, replaces=True)
        return found

    with run.open(str(root)) as manager:
        run.restore(manager, None)
        store.write(note, whole.replace(b"committed", b"removing"), replaces=True)
        store.remove_file(root / names.CATALOGUE)
        monkeypatch.setattr(RootWriter, "_is_of_epoch", False)
        monkeypatch.setattr(markers, "stop", late)
        run.run(manager, [2])
        assert manager.all_steps() == [0, 1, 2]
        for step in range(3):
            run.check(manager, step)
    assert consequences(root) == []


def gated_commit(monkeypatch: pytest.MonkeyPatch, gate: Gate, directory: str) -> None:
    """Commits of a step come to the gate first."""
    publish = ConditionalCommitter.publish

    def late(self: Any, attempt: Attempt, *told: Any) -> None:
        if attempt.directory == directory:
            gate.passes()
        publish(self, attempt, *told)

    monkeypatch.setattr(ConditionalCommitter, "publish", late)


def test_a_manager_that_claims_a_root_again_stops_no_save_of_its_own(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt ends `reload`, which waits for the save."""
    run, gate = tiny_run(), Gate()
    gated_commit(monkeypatch, gate, "1")
    with run.open(str(root), max_in_flight=2) as manager:
        run.run(manager, [0])
        gate.shut()
        run.train(1)
        run.save(manager, 1)
        assert gate.reached.wait(60)
        with monkeypatch.context() as patch:

            def interrupted() -> None:
                raise KeyboardInterrupt

            patch.setattr(manager._saves, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.reload()
        threading.Timer(1, gate.open).start()
        run.run(manager, [2])
        assert manager.all_steps() == [0, 1, 2]
        for step in range(3):
            run.check(manager, step)


def test_who_claims_and_sleeps_stops_no_save_of_who_came_after(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slow, last = tiny_run(), tiny_run(salt=1), tiny_run(salt=2)
    asleep, gate, end = Gate(), Gate(), removal.end_attempts
    gated_commit(monkeypatch, gate, "2")
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
    with (
        slow.open(str(root)) as second,
        last.open(str(root)) as third,
        ThreadPoolExecutor(1) as pool,
    ):
        slow.restore(second, None)
        last.restore(third, None)

        def sleeps(*told: Any) -> None:
            monkeypatch.setattr(removal, "end_attempts", end)
            asleep.passes()
            end(*told)

        monkeypatch.setattr(removal, "end_attempts", sleeps)
        asleep.shut()
        gate.shut()
        late = pool.submit(slow.run, second, [3])
        assert asleep.reached.wait(60)
        last.train(2)
        last.save(third, 2)
        assert gate.reached.wait(60)
        asleep.open()
        with pytest.raises(errors.WriterError, match="has taken over"):
            late.result()
        gate.open()
        third.wait_until_finished()
        assert third.all_steps() == [0, 1, 2]
        last.check(third, None)


def test_what_may_not_be_stopped_is_in_the_way_of_no_save(
    tiny_run: Any, root: epath.Path, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
    store_of(root).write(root / "9" / names.ATTEMPT, b"a" * 32, replaces=False)
    proxy.says = b"<Error><Code>AccessDenied</Code></Error>"
    proxy.harm = lambda kind, path, _: 403 if kind == "PUT" and "/9/" in path else None
    with run.open(str(root)) as manager:
        run.restore(manager, None)
        run.run(manager, [2])
        run.check(manager, None)
    assert "that another program may commit goes on" in caplog.text


def test_a_new_manager_stops_only_what_is_not_committed(root: epath.Path) -> None:
    committer, store = ConditionalCommitter(lambda: None), store_of(root)
    first, note = attempt(root, "a"), root / "5" / names.ATTEMPT
    claimed = lambda: None  # noqa: E731
    assert markers.stop(root / "5", claimed) == b"" and held(root) == []
    committer.prepare(first, [])
    store.write(root / "5/rows", b"of the first", replaces=False)
    for _ in range(2):
        assert (
            markers.stop(root / "5", claimed)
            == store.read(note)
            == markers.stopped("a" * 32)
        )
    with pytest.raises(errors.SaveError, match=r"stopped the save of(?s:.*)hint: "):
        committer.publish(first, [])
    # As a copy that goes on under its own name: it keeps its files.
    late = ConditionalCommitter(lambda: None)
    late.prepare(first, [])
    assert store.read(root / "5/rows") == b"of the first"
    markers.stop(root / "5", claimed)
    committer.prepare(first, [])
    with pytest.raises(errors.WriterError):
        late.publish(first, [])
    assert store.read(root / "5/rows") == b"of the first"
    committer.publish(first, [])
    assert markers.stop(root / "5", claimed) == store.read(note)
    assert markers.says_committed(store.read(note)) and not late.is_published(first)

    def lost() -> None:
        assert markers.says_removed(markers.stop(root / "5", claimed))
        assert not is_committed(root / "5")
        raise errors.WriterError("taken over")

    with pytest.raises(errors.WriterError, match="taken over"):
        markers.begin_removal(root / "5", lost)
    assert is_committed(root / "5")

    def goes_on() -> None:
        markers.begin_removal(root / "5", claimed)
        raise errors.WriterError("taken over")

    # The new manager goes on with it: it is not committed again.
    with pytest.raises(errors.WriterError, match="taken over"):
        markers.begin_removal(root / "5", goes_on)
    assert store.read(note) == names.REMOVED
    assert markers.stop(root / "5", claimed) == store.read(note) == names.REMOVED


@pytest.mark.parametrize("before", ["it", "its first request", "its second request"])
def test_a_removal_leaves_alone_who_saves_there_again(
    root: epath.Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has ended the removal meanwhile, and writes in the folder."""
    committer, store, step = (
        ConditionalCommitter(lambda: None),
        store_of(root),
        root / "5",
    )
    first, second, real = attempt(root, "a"), attempt(root, "b"), type(store)._delete
    committer.prepare(first, [])
    for name in (f"default/{names.MANIFEST}", "default/rows"):
        store.write(step / name, b"of the first", replaces=False)
    committer.publish(first, [])
    version = markers.begin_removal(step, lambda: None)
    calls = 0

    def saves() -> None:
        monkeypatch.undo()
        go_on(step)
        assert held(step) == []
        committer.prepare(second, [])
        store.write(step / "default/rows", b"of the second", replaces=False)
        committer.publish(second, [])

    def deletes(self: Any, path: Any, keys: list[str]) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if "first" in before else 2):
            real(self, path, keys)  # as nothing recalls it
            saves()
        else:
            real(self, path, keys)

    if before == "it":
        saves()
    else:
        monkeypatch.setattr(type(store), "_delete", deletes)
    assert store.remove_tree(step, attempt=version) == []
    assert is_committed(step)
    assert store.read(step / "default/rows") == b"of the second"
    assert go_on(step)
    assert store.read(step / "default/rows") == b"of the second"


def test_an_attempt_that_is_given_up_leaves_nothing(root: epath.Path) -> None:
    committer, store = ConditionalCommitter(lambda: None), store_of(root)
    for letter in "ab":
        committer.prepare(attempt(root, letter), [])
        store.write(root / "5/default/rows", letter.encode(), replaces=False)
        if letter == "a":
            continue  # one that could not be given up
        committer.abandon(attempt(root, letter))
    assert held(root) == []


@pytest.mark.parametrize("call", ["swap", "remove_tree"])
def test_an_attempt_that_is_given_up_removes_nothing_of_who_took_over(
    root: epath.Path, call: str
) -> None:
    """Who takes over is first, when the other has looked already and is about to act."""
    committer, store = ConditionalCommitter(lambda: None), store_of(root)
    first, second = attempt(root, "a"), attempt(root, "b")
    rows, real = root / "5/default/rows", getattr(type(store), call)
    committer.prepare(first, [])
    store.write(rows, b"of the first", replaces=False)
    store.write(root / "5/zz", b"of the first", replaces=False)

    def takes_over(*args: Any) -> Any:
        patch.undo()
        found = real(*args)  # of a removal the first part, as nothing recalls it
        committer.prepare(second, [])
        store.write(rows, b"of the second", replaces=False)
        return found

    def before(*args: Any) -> Any:
        patch.undo()
        committer.prepare(second, [])
        store.write(rows, b"of the second", replaces=False)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), call, before if call == "swap" else takes_over)
        committer.abandon(first)
    assert store.read(rows) == b"of the second"
    committer.publish(second, [])
    assert committer.is_published(second)


def test_of_many_that_begin_at_once_one_has_the_folder(root: epath.Path) -> None:
    committer = ConditionalCommitter(lambda: None)

    def begin(letter: str) -> str:
        try:
            committer.prepare(attempt(root, letter), [])
        except errors.WriterError:
            return ""
        return letter

    with ThreadPoolExecutor(8) as pool:
        found = [letter for letter in pool.map(begin, "01234567") if letter]
    # Whoever came later took it over.
    held = store_of(root).read(root / "5" / names.ATTEMPT).decode()[0]
    assert held in found
    for letter in found:
        if letter != held:
            with pytest.raises(errors.WriterError):
                committer.publish(attempt(root, letter), [])


# ---- services that ignore conditions -------------------------------------------------------------

leaves_headers_out = pytest.mark.skipif(
    os.environ.get("CNR_S3_SERVER") == "seaweedfs",
    reason="it checks signatures, which are of the headers that the proxy leaves out, too",
)


@leaves_headers_out
def test_no_mirror_is_made_where_conditions_are_ignored(
    tiny_run: Any, root: epath.Path, tmp_path: Path, proxy: Proxy
) -> None:
    run = tiny_run()
    with run.open(tmp_path) as manager:
        run.run(manager, range(2))
    proxy.stripped = frozenset(["if-none-match"])
    with pytest.raises(errors.OptionError, match="ignores the cond"):
        cnr.mirror(tmp_path, str(root))
    assert names_in(root) == []


@leaves_headers_out
@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_service_that_ignores_conditions_is_refused(
    tiny_run: Any, root: epath.Path, proxy: Proxy, header: str
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
    before = names_in(root), store_of(root).read(root / names.WRITER)
    proxy.stripped = frozenset([header])
    with run.open(str(root)) as manager:
        run.restore(manager, None)
        with pytest.raises(errors.OptionError, match="ignores the cond") as caught:
            run.run(manager, [2])
        assert caught.value.kind == "no_conditions"
        assert "hint: save to a service that" in str(caught.value)
    assert (names_in(root), store_of(root).read(root / names.WRITER)) == before, (
        "whoever saves there is not disturbed"
    )
    with run.open(str(root), single_writer=True) as manager:
        run.restore(manager, None)
        run.run(manager, [2, 3])
        assert manager.all_steps() == [0, 1, 2, 3]
        run.check(manager, None)
    assert consequences(root) == []


@leaves_headers_out
def test_commands_are_told_that_there_is_one_writer(
    tiny_run: Any, root: epath.Path, proxy: Proxy, tmp_path: Path
) -> None:
    run = tiny_run()
    proxy.stripped = frozenset(["if-none-match", "if-match"])
    with run.open(str(root), single_writer=True, policy=cnr.Full()) as manager:
        run.run(manager, range(4))
    for keep in (3, 2):
        told: Any = {"writer_is_dead": True, "delete": True, "keep": keep}
        with pytest.raises(errors.OptionError, match="commands --single-writer"):
            cnr.prune(str(root), **told)
        cnr.prune(str(root), single_writer=True, **told)
        left = [name for name in names_in(root) if name.isdigit()]
        assert left == [str(step) for step in range(4 - keep, 4)]
    run = tiny_run()
    with run.open(tmp_path) as manager:
        run.run(manager, range(2))
    far = root.parent / "far"
    assert cnr.mirror(tmp_path, str(far), single_writer=True).copied_steps == 2
    with run.open(tmp_path) as manager:
        run.restore(manager, None)
        run.run(manager, [2])
    with pytest.raises(errors.OptionError, match="commands --single-writer"):
        cnr.mirror(tmp_path, str(far))
    assert cnr.mirror(tmp_path, str(far), single_writer=True).copied_steps == 1
    again: Any = {"single_writer": True, "writer_is_dead": True}
    assert cnr.mirror(tmp_path, str(far), repair=True, **again).problems == ()
    words = ["prune", str(far), "--keep", "1", "--yes", "--writer-is-dead"]
    assert CliRunner().invoke(app, words).exit_code == 12
    assert CliRunner().invoke(app, [*words, "--single-writer"]).exit_code == 0
    assert cnr.compact(str(far), **again).is_done
    assert cnr.verify(str(far)) == ()


def test_a_step_of_a_root_is_no_root(tiny_run: Any, root: epath.Path) -> None:
    """That root's retention would delete what is saved there."""
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
        item = manager._listing.item
    before = {name: names_in(root / name) for name in ("0", "1")}
    # And where parts of it are gone already.
    store_of(root).remove_file(root / "0" / names.ORBAX_METADATA)
    del before["0"]
    for inner in (root / "1", root / "1" / item, root / "0", root / "0" / item):
        for call in (run.open, cnr.verify, cnr.describe):
            with pytest.raises(errors.OptionError, match="a step of the root"):
                call(str(inner))
    assert {name: names_in(root / name) for name in before} == before


def test_a_swap_without_a_version_is_refused(root: epath.Path) -> None:
    """Other clients put whatever is there where the version to be replaced is empty."""
    store = store_of(root)
    version = store.swap(root / "file", b"1", None)
    of_none = buckets._version({"e_tag": "", "version": None})
    for other in (of_none, {"e_tag": "0"}, {"version": "1"}):
        with case_of(other), pytest.raises(OSError, match=r"file"):
            store.swap(root / "file", b"2", other)
    assert store.read(root / "file") == b"1"
    assert store.swap(root / "file", b"3", version) != version


# ---- programs that are killed, or race ----------------------------------------------------------


def environment() -> dict[str, str]:
    found = [str(PROGRAM.parents[1]), *filter(None, sys.path)]
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(found)}


def start(root: Any, salt: int, saves: int, how: str = "once") -> Any:
    env = environment()
    words = [sys.executable, str(PROGRAM), str(root), str(salt), str(saves), how]
    program = subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None and program.stdout.readline() == "ready\n", (
        program.communicate()
    )
    return program


def go(program: Any) -> None:
    program.stdin.write("go\n")
    program.stdin.flush()


def check_all(root: Any) -> list[int]:
    """Every step that is listed is whole, and as one program has saved it; returns the steps."""
    if not names_in(root):
        return []  # nothing was begun
    like = bucket_program.first_state()
    with cnr.CheckpointManager(str(root)) as manager:
        steps = manager.all_steps()
        for step in steps:
            got = manager.restore(step, args=cnr.args.Restore(like))
            bucket_program.check(got.state, step)
    assert consequences(root) == []
    return steps


def killed(root: Any, times: int, seed: int) -> None:
    """A program is killed at random while it saves, and goes on from the last commit it told of."""
    rng, newest = random.Random(seed), -1
    for each in range(times):
        program = start(root, each, 400)
        go(program)
        time.sleep(rng.uniform(0.2, 1.5))
        program.kill()
        out, err = program.communicate()
        told = [int(line.split()[1]) for line in out.splitlines() if "saved" in line]
        assert "Traceback" not in err, err
        newest = max([newest, *told])
        steps = check_all(root)
        assert not steps or steps[-1] >= newest, "what was told to be durable is there"
        newest = max([newest, *steps])


def raced(root: Any, programs: int, saves: int) -> int:
    """Programs save to one root at once, each insisting; returns how often one was told to stop.

    All may be told so: what one still writes is in the way of who has taken the step over. Whoever
    comes afterwards goes on with what they were told is saved.
    """
    found = [start(root, salt, saves, "insists") for salt in range(programs)]
    for each in found:
        go(each)
    told, saved = 0, False
    for each in found:
        out, err = each.communicate(timeout=240)
        assert each.returncode == 0, err
        told += out.count("failed")
        saved |= "saved" in out
    assert check_all(root) or not saved
    last = start(root, programs, 2, "once")
    out, err = last.communicate("go\n", timeout=240)
    assert last.returncode == 0 and out.count("saved") == 2, (out, err)
    assert check_all(root)
    return told


def test_what_a_killed_program_has_saved_is_there(root: epath.Path) -> None:
    killed(root, 2, seed=0)


def test_programs_that_race_mix_nothing(root: epath.Path) -> None:
    raced(root, 2, 3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_programs_are_killed_and_race(bucket: epath.Path) -> None:
    """As many as `CNR_RACES` and `CNR_KILLS` say."""
    races, kills = (int(os.environ.get(f"CNR_{n}", 20)) for n in ("RACES", "KILLS"))
    told = sum(raced(bucket / f"raced/{i}", 2, 12) for i in range(races))
    killed(bucket / "killed", kills, seed=1)
    print(f"{races} races, in which {told} saves were refused, and {kills} kills")
    assert told or races < 20


# ---- answers that are lost ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "every"),
    [
        ("drop", 4),
        *(
            pytest.param(h, 1, marks=pytest.mark.slow)
            for h in ("drop", "reset", 500, 503)
        ),
    ],
)
def test_a_request_that_fails_once_loses_nothing(
    tiny_run: Any, root: epath.Path, proxy: Proxy, harm: Any, every: int
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
        with proxy.counting() as counts:
            run.run(manager, [2])
        puts = counts["PUT"]
        assert 10 < puts and sum(counts.values()) <= 24, "of a delta"
        # Each of them once, by and by, and those at the end, of which the first commits.
        turns = [*range(0, puts, every), puts - 2, puts - 1]
        for step, at in enumerate(turns, 3):
            begun = proxy.counts["PUT"]
            proxy.harm = lambda kind, path, number: (
                harm if kind == "PUT" and number == begun + at else None  # noqa: B023
            )
            with case_of(at):
                run.train(step)
                assert run.save(manager, step)
                manager.wait_until_finished()
        proxy.harm = lambda *_: None
        assert proxy.harmed == len(turns)
        assert manager.all_steps() == [*range(3 + len(turns))]
        for step in (None, 4):
            run.check(manager, step)
    assert cnr.verify(root) == ()


slow_too = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("DELETE", "LIST", "HEAD")
]


@pytest.mark.parametrize("kind", ["GET", *slow_too])
def test_a_look_that_fails_once_is_made_again(
    tiny_run: Any, root: epath.Path, proxy: Proxy, kind: str
) -> None:
    run = tiny_run()
    proxy.harm = lambda asked, path, number: (
        [503, "drop", "reset", None, None][number % 5] if asked == kind else None
    )
    with run.open(str(root), {"max_to_keep": 1}, policy=cnr.Full()) as manager:
        run.run(manager, range(2))
        run.check(manager, None)
        assert manager.all_steps() == [1]
    assert consequences(root) == [] and proxy.harmed > 0


def test_what_commits_a_step_is_put_when_all_of_it_is_there(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run, put = tiny_run(), list[str]()
    proxy.harm = lambda kind, path, number: (
        put.append(path.rpartition("/7/")[2]) if kind == "PUT" else None
    )
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    with cnr.CheckpointManager(
        str(root), tables=run.tables, options=options, item="model"
    ) as manager:
        iterator = iter(grain.MapDataset.range(9))
        items = ocp.args.Composite(
            model=cnr.args.Save(run.state, run.touched),
            data=grain.checkpoint.CheckpointSave(iterator),
            meta=ocp.args.JsonSave({"epoch": 1}),
        )
        assert manager.save(7, args=items)
    of_step = [each for each in put if not each.startswith("/")]
    assert of_step[0] == names.ATTEMPT and of_step[-2:] == [*names.MARKERS]
    assert {each.split("/")[0] for each in of_step[:-2]} >= {
        "model",
        "data",
        "meta",
        names.ORBAX_METADATA,
    }


@pytest.mark.parametrize("harm", [503, pytest.param("reset", marks=pytest.mark.slow)])
def test_a_service_that_is_away_for_some_seconds_loses_no_save(
    tiny_run: Any, root: epath.Path, proxy: Proxy, harm: Any
) -> None:
    run, asked = tiny_run(), list[float]()

    def away(*_: Any) -> Any:
        """From the first request on, for some seconds; and for another one, however late."""
        asked.append(time.monotonic())
        return harm if asked[-1] < asked[0] + 1.5 or len(asked) == 2 else None

    with run.open(str(root)) as manager:
        run.run(manager, [0])
        proxy.harm = away
        run.run(manager, [1])
        assert manager.all_steps() == [0, 1] and proxy.harmed > 1
        run.check(manager, None)


@each_of("kind", ["truncate", "drop"])
def test_a_put_that_met_another_one_says_so_though_the_answer_is_lost(
    root: epath.Path, proxy: Proxy, impatient: None, kind: str
) -> None:
    store, path = store_of(root), root / kind
    store.write_new(path, b"one")
    proxy.harm = lambda asked, *_: kind if asked == "PUT" else None
    with pytest.raises(FileExistsError):
        store.write_new(path, b"another")
    assert store.read(path) == b"one"


@each_of("interval", [1, 10])
def test_each_step_of_a_chain_may_be_the_one_that_is_looked_at(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    run, looks, look = tiny_run(), list[list[int]](), Gaps.look

    def noting(self: Any, place: Any, chain: Any, *, dense: bool = True) -> Any:
        if not dense and chain:
            looks.append([entry.step // interval for entry in chain])
        return look(self, place, chain, dense=dense)

    monkeypatch.setattr(Gaps, "look", noting)
    root = root / str(interval)
    with run.open(str(root), policy=cnr.Consecutive(max_chain=100)) as manager:
        run.run(manager, range(0, 24 * interval, interval))
    assert [parent for parent, *_ in looks] == [*range(23)], "before each commit"
    drawn = {save: found[1] for save, found in enumerate(looks, start=1) if found[1:]}
    assert [*drawn] == [*range(2, 24)] and all(len(found) < 3 for found in looks)
    # However often one was drawn: not always the same, from either end.
    behind = {save - step for save, step in drawn.items()}
    assert len({*drawn.values()}) > 3 and len(behind) > 3 and min(behind) == 2


def test_a_save_does_not_rest_on_a_parent_that_another_manager_has_deleted(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), policy=cnr.Consecutive()) as manager:
        run.run(manager, range(4))
        with tiny_run().open(str(root)) as other:
            other.delete(3)
        run.run(manager, [4])
        report = manager.last_report
        assert report.outcome != "committed" and "3" in report.problem
        run.run(manager, [5, 6])
        assert manager.last_report.kind == "delta"
        assert manager.all_steps() == [0, 1, 2, 5, 6]
        for step in (0, 1, 2, 5, 6):
            run.check(manager, step)
    assert consequences(root) == []


def test_training_does_not_wait_for_a_service_that_does_not_answer(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run, answers = tiny_run(), threading.Event()
    with run.open(str(root), max_in_flight=2) as manager:
        run.run(manager, range(2))
        proxy.harm = lambda *_: None if answers.wait(60) else 500
        for step in (2, 3):
            run.train(step)
            assert run.save(manager, step)
        assert not answers.is_set() and manager.is_saving_in_progress()
        answers.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 2, 3]
        for step in range(4):
            run.check(manager, step)


def test_an_interrupt_ends_the_opening_of_a_root_that_does_not_answer(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run, main = tiny_run(), threading.main_thread().ident
    proxy.harm = lambda *_: 100.0
    timer = threading.Timer(1, signal.pthread_kill, [main, signal.SIGINT])
    # Processes that run tests beside each other let none in.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            run.open(str(root))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 50, "a request may take 60 s"
    proxy.harm = lambda *_: None
    with run.open(str(root)) as manager:
        run.run(manager, [0])
        run.check(manager, None)


def test_what_a_program_waits_for_is_said(
    tiny_run: Any,
    root: epath.Path,
    tmp_path: Path,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bucket_clients, "_SILENT_SECS", 0.3)
    harms = iter([1.0])
    proxy.harm = lambda *_: next(harms, None)
    run = tiny_run()
    options: list[Any] = [{"mirror": str(root)}, {"near": tmp_path / "near"}, {}]
    for each in options:
        caplog.clear()
        harms = iter([1.0])
        run.open(tmp_path / "root" if "mirror" in each else str(root), **each).close()
        said = [text for text in caplog.messages if "waiting for an answer" in text]
        assert said and f"waiting for an answer about {root}" in said[0], each


def test_a_program_that_lost_the_root_puts_nothing_there(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    run, other = tiny_run(), tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
        with other.open(str(root)) as taken:
            other.restore(taken, None)
            other.run(taken, [2])
            before = len(proxy.log)
            with pytest.raises(errors.WriterError, match="has taken over"):
                run.run(manager, [2])
            kinds = {kind for kind, _ in proxy.log[before:]}
            assert kinds.isdisjoint({"PUT", "DELETE"})
            run.check(taken, 2, other.truth)


@pytest.mark.parametrize("harm", [403, 500, "reset"])
def test_a_save_that_cannot_be_stored_says_where_and_what_to_do(
    tiny_run: Any,
    root: epath.Path,
    proxy: Proxy,
    harm: Any,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, [0])
        proxy.harm = lambda kind, path, number: (
            harm if kind == "PUT" and "/1/" in path and "rows." in path else None
        )
        begun = time.monotonic()
        with pytest.raises(errors.SaveError) as caught:
            run.run(manager, [1])
        assert time.monotonic() - begun < 60
        proxy.harm = lambda *_: None
        text = "".join(traceback.format_exception(caught.value))
        assert f"{root}/1/default/rows.p00000/" in str(caught.value)
        assert {403: "Harm", 500: "Harm"}.get(harm, "") in str(caught.value)
        assert "hint: " in str(caught.value)
        assert "what was committed before is untouched" in str(caught.value)
        for secret in (KEY, SECRET):
            assert secret not in text and secret not in caplog.text
        run.run(manager, [2])
        assert manager.all_steps() == [0, 2]
        run.check(manager, None)
    assert consequences(root) == []


def test_what_a_service_says_of_keys_is_not_repeated(
    root: epath.Path, proxy: Proxy
) -> None:
    said = f"<Error><Code>InvalidAccessKeyId</Code><Id>{KEY}</Id></Error>".encode()
    proxy.says = said
    proxy.harm = lambda *_: 403
    with pytest.raises(errors.RootError) as caught:
        cnr.CheckpointManager(str(root))
    text = "".join(traceback.format_exception(caught.value))
    assert "answer 403 InvalidAccessKeyId: s3://" in text and KEY not in text
    assert str(caught.value).count("hint: are the keys the right ones") == 1
    for error in causes(caught.value):
        assert KEY not in str(error)


def test_a_bucket_that_is_not_there_is_no_empty_root(s3: str) -> None:
    with pytest.raises(OSError, match=r"NoSuchBucket(?s:.*)hint: make the bucket"):
        cnr.CheckpointManager("s3://no-such-bucket/run")
    with pytest.raises(OSError, match="NoSuchBucket"):
        store_of(epath.Path("s3://x")).read(epath.Path("s3://no-such-bucket/file"))


# ---- settings -----------------------------------------------------------------------------------


@each_of("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@each_of("url", ["127.0.0.1:9000", "localhost", "", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(
    root: epath.Path, name: str, url: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, url)
        with pytest.raises(errors.OptionError, match=f"{name} is no URL") as caught:
            cnr.CheckpointManager(str(root))
        assert repr(url) in str(caught.value)


def test_a_profile_that_is_not_there_is_refused(
    root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(errors.OptionError, match="AWS_PROFILE names no profile"):
        cnr.CheckpointManager(str(root))


def ask(root: epath.Path) -> None:
    """Puts a file by keys that the service may not know: the proxy sees them all the same."""
    with contextlib.suppress(PermissionError):
        store_of(root).write(root / "file", b"1", replaces=True)


@each_of("place", ["profile", "services"])
def test_a_profile_has_keys_region_and_endpoint(
    root: epath.Path,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    pytest.importorskip("boto3")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    (tmp_path / "keys").write_text(
        "[training]\naws_access_key_id = OFTRAINING\naws_secret_access_key = x\n"
    )
    config = {
        "profile": f"endpoint_url = {proxy.url}\n",
        "services": "services = own\n[services own]\ns3 =\n"
        f"  endpoint_url = {proxy.url}\n",
    }[place]
    (tmp_path / place).write_text(f"[profile training]\nregion = eu-north-1\n{config}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / place))
    monkeypatch.setenv("AWS_PROFILE", "training")
    ask(root)
    (signed,) = {found.split(",")[0] for found in proxy.signed}
    assert "OFTRAINING" in signed and "/eu-north-1/s3/" in signed
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "boto3", None)
        with pytest.raises(errors.OptionError, match="hint: pip install boto3"):
            cnr.CheckpointManager(str(root))
    proxy.signed.clear()


def test_new_keys_of_a_profile_are_taken_up(
    root: epath.Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setattr(s3_clients, "_KEYS_SECS", 0)  # they are old at once
    for key in ("OLDKEY", "NEWKEY"):
        (tmp_path / "keys").write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\n"
        )
        ask(root)
        assert f"Credential={key}/" in proxy.signed[-1]


def test_what_the_environment_says_reaches_the_service(
    root: epath.Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    bucket_clients._new_client.cache_clear()
    ask(root)
    said = proxy.headers
    assert said["x-amz-security-token"] == "a-token"
    assert said["x-amz-server-side-encryption"] == "aws:kms"
    assert said["x-amz-server-side-encryption-aws-kms-key-id"] == "a-key"
    assert f"Credential={KEY}/" in said["authorization"]
    assert "/eu-west-1/s3/" in said["authorization"]
    (tmp_path / "certificates").write_text("none")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificates"))
    with pytest.raises(
        errors.OptionError, match=r"No certificates(?s:.*)hint: look at"
    ):
        cnr.CheckpointManager(str(root))
    bucket_clients._new_client.cache_clear()


def test_a_root_where_nothing_is_can_be_adopted(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), adopt=True) as manager:
        run.run(manager, range(2))
        run.check(manager, None)
    with pytest.raises(errors.OptionError, match="metrics cannot be kept in s3://"):
        run.open(str(root), metrics=True)


def test_a_forked_process_fails_at_once_or_works(root: epath.Path) -> None:
    """Threads of the client are not there in a child: a request would be waited for, for ever."""
    program = """
import os, sys
from etils import epath
from cnr_jax.repository.store import store_of

root, used = epath.Path(sys.argv[1]), sys.argv[2] == "used"
store = store_of(root)
if used:
    store.write(root / "file", b"1", replaces=True)
child = os.fork()
if not child:
    try:
        found = store.read(root / "file")
    except OSError as error:
        found = str(error)
    os.write(1, repr(found).encode())
    os._exit(0)
os.waitpid(child, 0)
"""
    for used, told in (("used", "hint: start processes by"), ("unused", "b'1'")):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(root), used],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
        )
        assert told in ended.stdout, ended.stderr
