"""What `prune` deletes and why the rest stays; who may; and what a crash in it leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli.app import app
from cnr_jax.format import names
from cnr_jax.repository.upkeep.claim import WritingLock
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from .conftest import flip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the root lies that is saved once for all tests."""
    return tmp_path_factory.mktemp("saved") / "root"


@pytest.fixture
def root(tiny_run: Any, first: Path, tmp_path: Path) -> Path:
    """Chains 0 <- 1 <- 2 and 3 <- 4 <- 5 and 6 <- 7, whose writer is dead."""
    if not first.exists():
        run = tiny_run()
        with run.open(first, policy=cnr.Consecutive(max_chain=2)) as manager:
            run.run(manager, range(8))
        claim_of(first, pid=2**22 + 1, host=socket.gethostname())
    shutil.copytree(first, tmp_path / "root")
    return tmp_path / "root"


def claim_of(root: Path, **changes: Any) -> None:
    """Has another program claim a root."""
    path = root / "cnr_jax.writer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())


def tree(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def check_all_restore(root: Path) -> None:
    """What is listed restores."""
    with cnr.CheckpointManager(root) as reader:
        for step in steps_in(root):
            assert reader.restore(step).state["step"] == step


def test_a_plan_changes_nothing_and_is_what_is_done_then(
    root: Path, tiny_run: Any
) -> None:
    before = tree(root)
    plan = cnr.prune(root, keep=2)
    assert tree(root) == before and not plan.is_done
    assert {fate.step: fate.reason for fate in plan.fates if fate.stays} == {
        6: "it is one of the newest 2",
        7: "it is one of the newest 2",
    }
    files = [p for n in range(6) for p in (root / f"{n}").rglob("*.*") if p.is_file()]
    held = sum(path.stat().st_size for path in files)
    assert plan.freed_bytes > held > 0
    plan = cnr.prune(root, keep=1, min_fulls=2)
    stays = {fate.step: fate.reason for fate in plan.fates if fate.stays}
    assert stays == {
        3: "2 full checkpoints are to be kept",
        6: "7 rests on it",
        7: "it is the newest",
    }
    assert "to be deleted: 5 steps" in str(plan)
    done = cnr.prune(root, keep=1, min_fulls=2, delete=True)
    assert done.is_done and done.fates == plan.fates and "\ndeleted: 5" in str(done)
    assert steps_in(root) == [3, 6, 7]
    assert cnr.verify(root) == ()
    check_all_restore(root)
    # Nobody claims the root now: the next one may prune, or save, at once.
    assert not cnr.prune(root, keep=1, min_fulls=2, delete=True).going
    run = tiny_run()
    with run.open(root) as manager:
        run.restore(manager, None)
        run.run(manager, [8])
        assert manager.all_steps() == [3, 6, 7, 8]


@pytest.mark.parametrize("delete", [False, True])
def test_each_manifest_is_read_once(root: Path, delete: bool) -> None:
    with inprocess.watching(root, looks=True) as calls:
        cnr.prune(root, keep=2, delete=delete)
    paths = [call.path for call in calls if call.call == "open_read"]
    for name in (names.MANIFEST, names.process_manifest(0)):
        read = Counter(path for path in paths if path.endswith(f"/{name}"))
        assert len(read) == 8 and set(read.values()) == {1}


def test_deltas_go_before_what_they_rest_on_wherever_it_ends(root: Path) -> None:
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    with inprocess.watching(copy) as calls:
        cnr.prune(copy, keep=2, delete=True)
    assert steps_in(copy) == [6, 7]
    moments = [c.number for c in calls if c.call in ("rename", "unlink", "fsync")]
    seen: set[tuple[int, ...]] = set()
    for nth in moments[:: max(1, len(moments) // 20)]:
        again, left = root.with_name(f"again-{nth}"), root.with_name(f"left-{nth}")
        shutil.copytree(root, again)
        with inprocess.copying(again, left, nth=nth):
            cnr.prune(again, keep=2, delete=True)
        found = cnr.describe(left)
        assert found.latest_step == 7
        assert all(step.restorable for step in found.steps), nth
        seen.add(tuple(step.step for step in found.steps))
        # What is left of it is finished by the next one.
        cnr.prune(left, keep=2, delete=True, writer_is_dead=True)
        assert steps_in(left) == [6, 7]
        assert not cnr.describe(left).removed
    assert len(seen) > 3


def test_one_that_fails_stands_in_nobodys_way(root: Path) -> None:
    with inprocess.failing(root, Fault("rename", action="EIO", match="/5")):
        with pytest.raises(cnr.errors.RootError, match="Input/output") as caught:
            cnr.prune(root, keep=2, delete=True)
    assert "\n  nothing was deleted\n" in str(caught.value)
    assert steps_in(root) == [*range(8)]
    assert all(step.restorable for step in cnr.describe(root).steps)
    cnr.prune(root, keep=2, delete=True)
    assert steps_in(root) == [6, 7]


def test_a_root_that_nobody_may_write_to_is_an_error_with_path_and_hint(
    root: Path,
) -> None:
    before = tree(root)
    with inprocess.failing(root, Fault("open", action="EROFS", times=0)):
        assert len(cnr.prune(root, keep=2).going) == 6
        with pytest.raises(cnr.errors.RootError) as caught:
            cnr.prune(root, keep=2, delete=True)
        words = ["prune", str(root), "--keep", "2", "--yes"]
        ended = CliRunner().invoke(app, words)
    error = caught.value
    assert (error.path, error.errno) == (str(root), errno.EROFS)
    first, why, nothing, hint = str(error).splitlines()
    assert first == f"the root {root} cannot be pruned"
    assert "Read-only file system" in why and nothing == "  nothing was deleted"
    assert hint.startswith("  hint: ")
    assert ended.exit_code == 1 and ended.stderr.startswith(f"cnr-jax: {first}\n")
    assert tree(root) == before


def test_an_error_in_the_middle_tells_what_is_deleted(root: Path) -> None:
    with inprocess.failing(root, Fault("rename", action="EIO", match="/4")):
        with pytest.raises(cnr.errors.RootError) as caught:
            cnr.prune(root, keep=2, delete=True)
    left = steps_in(root)
    assert {5} <= {*range(8)} - {*left} <= {0, 1, 2, 5} and 4 in left
    count = f"{8 - len(left)} folder"
    assert f"\n  deleted before: {count}" in str(caught.value)
    check_all_restore(root)


def test_nothing_is_deleted_where_somebody_may_be_saving(
    root: Path, tiny_run: Any
) -> None:
    claim_of(root, host="elsewhere", pid=1)
    before = tree(root)
    with pytest.raises(
        cnr.errors.WriterError, match=r"1 on elsewhere.*\n.*--writer-is"
    ):
        cnr.prune(root, keep=1, delete=True)
    (root / "cnr_jax.writer.json").write_text("{")
    with pytest.raises(cnr.errors.WriterError, match="claim that cannot be read"):
        cnr.prune(root, keep=1, delete=True)
    lock = WritingLock(root)
    assert lock.acquire(0)
    with pytest.raises(cnr.errors.WriterError, match="is writing a save"):
        cnr.prune(root, keep=1, delete=True, writer_is_dead=True)
    lock.release()
    assert steps_in(root) == list(range(8))
    assert before.keys() == tree(root).keys()
    # A manager of this process, whoever says that it is dead: it goes on without harm.
    run = tiny_run()
    with run.open(root) as manager:
        run.restore(manager, None)
        run.run(manager, [8])
        with pytest.raises(cnr.errors.WriterError, match="not known to have ended"):
            cnr.prune(root, keep=1, delete=True)
        cnr.prune(root, keep=1, delete=True, writer_is_dead=True)
        run.run(manager, [9])
        assert manager.all_steps() == steps_in(root)
        run.check(manager, 9)


OWN, NONE = os.getpid(), 2**22 + 1  # no process has a number as high as that


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [
        ({"pid": NONE}, True),
        ({"pid": OWN}, False),
        # Its number was given to another process since.
        ({"pid": OWN, "started_ticks": 1}, True),
        ({"pid": OWN, "started_ticks": None}, False),
        ({"pid": 1}, True),
        ({"pid": 1, "started_ticks": None}, False),
        ({"pid": NONE, "host": "elsewhere"}, False),
        # This host after a boot, another container, a claim of an older version.
        ({"pid": NONE, "boot_id": "elsewhen"}, False),
        ({"pid": NONE, "namespaces": "pid:[1] time:[1]"}, False),
        ({"pid": NONE, "boot_id": None, "namespaces": None}, False),
        ({"pid": NONE, "started_ticks": None}, True),
    ],
)
def test_a_writer_has_ended_only_if_that_is_seen_of_its_process(
    root: Path, changes: dict[str, Any], goes_on: bool
) -> None:
    claim_of(root, **changes)
    claim = (root / "cnr_jax.writer.json").read_text()
    if goes_on:
        assert cnr.prune(root, keep=2, delete=True).is_done
        return
    alive = changes == {"pid": OWN}
    seen = "is running" if alive else "whose process cannot be seen from here"
    for keep in (2, 1):
        with pytest.raises(
            cnr.errors.WriterError, match=rf"not known.*\n.*{seen}\n.*--writer-is"
        ):
            cnr.prune(root, keep=keep, delete=True)
        # Whoever says that it is dead says so of this one time: it may be running.
        assert cnr.prune(root, keep=keep, delete=True, writer_is_dead=True).is_done
        assert (root / "cnr_jax.writer.json").read_text() == claim
    assert steps_in(root) == [6, 7]


def test_a_writer_that_nobody_has_waited_for_has_ended(root: Path) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert stat[0] == "Z"
    claim_of(root, pid=child.pid, started_ticks=int(stat[19]))
    assert cnr.prune(root, keep=2, delete=True).is_done
    child.wait()


def test_a_live_writer_is_not_seen_from_another_container(root: Path) -> None:
    program = "import sys, cnr_jax as c; c.prune(sys.argv[1], keep=1, delete=True)"
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    claim_of(root, pid=OWN)
    there = subprocess.run(
        [*apart, sys.executable, "-c", program, str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "not known to have ended" in there.stderr
    assert steps_in(root) == [*range(8)]


@pytest.mark.parametrize("locks", [True, False])
def test_a_live_writer_has_the_root_after_a_prune_that_took_it_for_dead(
    root: Path, tiny_run: Any, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr("fcntl.flock", refuse)
    run, path = tiny_run(), root / "cnr_jax.writer.json"
    with run.open(root) as manager:
        run.restore(manager, None)
        run.run(manager, [8])
        claim = path.read_bytes()
        during: list[bytes] = []
        with inprocess.watching(
            root, before=lambda call: during.append(path.read_bytes())
        ):
            cnr.prune(root, keep=2, delete=True, writer_is_dead=True)
        # A killed one leaves a claim of the process of the live one, where it has to take it.
        known = [json.loads(each) for each in {*during, claim}]
        assert len({each["started_ticks"] for each in known}) == 1
        assert (len({each["id"] for each in known}) == 1) == locks
        assert path.read_bytes() == claim
        with pytest.raises(cnr.errors.WriterError, match="not known to have ended"):
            cnr.prune(root, keep=1, delete=True)
        run.run(manager, [9])
        assert manager.all_steps() == steps_in(root)
        run.check(manager, 9)


def test_what_cannot_be_understood_stays_and_takes_no_place(root: Path) -> None:
    flip(root / "4" / "default" / "manifest.json")
    next((root / "7" / "default" / "rows.p00000").rglob("c/0")).unlink()
    plan = cnr.prune(root, keep=1)
    stays = {fate.step: fate.reason for fate in plan.fates if fate.stays}
    assert stays.pop(4).startswith("its manifest cannot be read")
    assert stays.pop(5) == stays.pop(7) == "it cannot be restored, and may be mended"
    assert stays.pop(6) == "it is the newest"
    why = "folders up to 4 cannot be read, and may rest on it"
    assert stays == dict.fromkeys(range(4), why)
    assert not plan.going
    for step in range(8):
        (root / f"{step}" / "default" / "manifest.json").unlink()
    with pytest.raises(cnr.errors.NoStepError, match="nothing is deleted"):
        cnr.prune(root, keep=1, delete=True)
    assert steps_in(root) == list(range(8))


def test_what_was_set_aside_goes_if_a_step_goes_or_on_demand(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root, policy=cnr.Full()) as manager:
        run.run(manager, [10, 20])
    run = tiny_run()
    with run.open(root, policy=cnr.Full(), new_run=True) as manager:
        run.run(manager, [10, 20, 30])
        run.restore(manager, 10)
        run.run(manager, [20])
    (aside,) = (path.name for path in root.glob("*.abandoned-*"))
    (earlier,) = (path.name for path in root.glob("earlier-run-*"))
    beside = {f.name: f.stays for f in cnr.prune(root, keep=3).fates if f.step is None}
    assert beside == {aside: True, earlier: True}
    manifest = root / "10" / "default" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    reasons = {fate.name: fate.reason for fate in cnr.prune(root, keep=1).fates}
    assert "cannot be read may rest on it" in reasons[aside]
    manifest.write_bytes(whole)
    plan = cnr.prune(root, keep=2, other_runs=True)
    assert [fate.name for fate in plan.going] == ["30", aside, earlier]
    # It was left behind, and nothing took its place: it counts as older than 10.
    assert plan.going[0].reason == (
        "a rollback has left it behind: it is older than the newest 2"
    )
    assert "2 other folders and 1 step" in str(plan)
    cnr.prune(root, keep=2, delete=True, writer_is_dead=True)
    assert steps_in(root) == [10, 20] and not list(root.glob("*.abandoned-*"))
    # What a new run has set aside is a root of its own.
    assert steps_in(root / earlier) == [10, 20]
    cnr.prune(root / earlier, keep=1, delete=True)
    assert steps_in(root / earlier) == [20]
    cnr.prune(root, keep=2, delete=True, other_runs=True, writer_is_dead=True)
    assert not (root / earlier).exists()


def test_steps_of_plain_orbax_stay_and_keep_none_of_ours(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with ocp.CheckpointManager(root) as plain:
        for step in (1, 100):
            plain.save(step, args=ocp.args.StandardSave(run.state))
    with run.open(root, policy=cnr.Full(), adopt=True) as manager:
        run.restore(manager, 1)
        run.run(manager, [10, 20, 30])
        run.restore(manager, 10)
        run.run(manager, [20, 40])
    (aside,) = (path.name for path in root.glob("20.abandoned-*"))
    plan = cnr.prune(root, keep=1)
    stays = {fate.name: fate.reason for fate in plan.fates if fate.stays}
    why = "plain Orbax has saved it"
    assert stays == {"1": why, "100": why, "40": "it is the newest"}
    assert {fate.name for fate in plan.going} == {"10", "20", "30", aside}
    cnr.prune(root, keep=1, delete=True, writer_is_dead=True)
    assert steps_in(root) == [1, 40, 100] and not list(root.glob("*.abandoned-*"))
    shutil.rmtree(root / "40")
    with pytest.raises(cnr.errors.OptionError, match="no checkpoint of cnr_jax"):
        cnr.prune(root, keep=1)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"keep": 0}, "keep is 0"), ({"keep": 1, "min_fulls": True}, "min_fulls is True")],
)
def test_numbers_are_positive(root: Path, given: Any, says: str) -> None:
    with pytest.raises(cnr.errors.OptionError, match=says):
        cnr.prune(root, **given)


def test_what_is_no_root_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(cnr.errors.NoStepError):
        cnr.prune(tmp_path / "nowhere", keep=1)
    for no_root in (root / "3", tmp_path, "az://bucket/run"):
        with pytest.raises(cnr.errors.OptionError):
            cnr.prune(no_root, keep=1)


@pytest.mark.parametrize("name", ["cnr_jax.writer.lock", "cnr_jax.writer.json"])
def test_a_folder_in_the_place_of_a_file_beside_the_steps_is_named(
    root: Path, name: str, tiny_run: Any
) -> None:
    (root / name).unlink(missing_ok=True)
    (root / name).mkdir()
    before = steps_in(root)
    said = f"{name} is in the way of who saves here\n  got a folder"
    for dead in (False, True):
        with pytest.raises(cnr.errors.WriterError, match=said) as caught:
            cnr.prune(root, keep=1, delete=True, writer_is_dead=dead)
        assert caught.value.kind == "in_the_way"
    # Who only looks has nothing to do with it.
    assert cnr.prune(root, keep=1).going and cnr.describe(root).latest_step == 7
    run = tiny_run()
    with run.open(root) as manager:
        run.restore(manager, None)
        run.train(8)
        with pytest.raises(cnr.errors.WriterError, match=said):
            run.save(manager, 8)
        assert steps_in(root) == before
        (root / name).rmdir()
        run.save(manager, 8)
        manager.wait_until_finished()
        run.check(manager, 8)


def test_copies_that_a_new_run_has_taken_along_stay(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root, policy=cnr.Full()) as manager:
        run.run(manager, [10, 20])
    for name in ("backup_20", "before lr=0.1 step 10"):
        shutil.copytree(root / name[-2:], root / name)
    run = tiny_run()
    with run.open(root, policy=cnr.Full(), new_run=True) as manager:
        run.run(manager, [10, 20])
    (earlier,) = root.glob("earlier-run-*")
    held = {path.name for path in earlier.iterdir() if path.is_dir()}
    plan = cnr.prune(root, keep=1, other_runs=True, delete=True, writer_is_dead=True)
    fates = {fate.name: fate.reason for fate in plan.fates if fate.stays}
    assert "called alike" in fates[earlier.name] and steps_in(root) == [20]
    assert {"backup_20", "10"} <= held
    assert held == {path.name for path in earlier.iterdir() if path.is_dir()}
    # Once they lie elsewhere, the rest goes.
    for name in ("backup_20", "before lr=0.1 step 10"):
        (earlier / name).rename(tmp_path / name)
    cnr.prune(root, keep=1, other_runs=True, delete=True, writer_is_dead=True)
    assert not earlier.exists()
