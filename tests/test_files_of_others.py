"""Files and folders of others in a root: no damage to a step, and never moved or deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.testing import inprocess

from .older_steps import leave_dense_to_orbax

UUID, TOKEN = "00ff" * 8, "00ff" * 4
# As desktops, servers, editors, backups and stores that are synced leave them.
LITTER = (
    ".DS_Store",
    "._manifest.json",
    "desktop.ini",
    ".nfs000000012",
    ".~lock.manifest.json#",
    "manifest.json~",
    "process_0~",
    "_METADATA (conflicted copy)",
    "ocdbt.process_0 (1)",
    "rows.p\uff11",
)


def litter(folder: Path, *, copies: bool = True) -> None:
    """Leaves all of it in a folder, also what is no file, and copies of all that is there."""
    held = sorted(folder.iterdir()) if copies else []
    for name in LITTER:
        (folder / name).write_text("x")
    (folder / "@eaDir").mkdir()
    (folder / "@eaDir" / "x@SynoEAStream").write_text("x")
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to("/no such folder/file")
    (folder / "loop").symlink_to(".")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(folder)  # the path of a socket is short
        made.bind("socket")
        os.chdir(before)
    for path in held:
        into = folder / ".snapshot" / "hourly.0" / path.name
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, into) if path.is_dir() else shutil.copy(path, into)


def littered(top: Path) -> None:
    """Leaves litter in each folder."""
    # Outermost first: what is copied is not littered yet.
    folders = [Path(at) for at, _, _ in os.walk(top)]
    for folder in folders:
        litter(folder)


def composite(run: Any, step: int) -> Any:
    state = cnr.args.Save(run.state, run.touched)
    return ocp.args.Composite(default=state, data=ocp.args.JsonSave({"at": step}))


def test_files_that_nobody_names_are_no_damage(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(run) as manager:
        for step in (1, 2, 3):
            run.train(step)
            manager.save(step, args=composite(run, step))
            run.truth[step] = run.values()
    leave_dense_to_orbax(root / "3/default")
    for step in (1, 2, 3):
        littered(root / str(step))
    litter(root, copies=False)
    found = cnr.verify(root)
    assert {(p.kind, p.consequence) for p in found} == {("file_unknown", ())}
    told = {f"{p.directory}/{p.file}" for p in found}
    left = {p.relative_to(root).as_posix() for p in root.glob("3/**/.DS_Store")}
    of_data = {name for name in left if name.startswith("3/data/")}
    assert left - of_data <= told and len(left - of_data) > 8
    assert {"3/@eaDir", "3/default/dense/array_metadatas/process_0~"} <= told
    assert {"2/default/dense/process_0~", "2/default/dense/p00000/.DS_Store"} <= told
    described = cnr.describe(root)
    assert described.latest_step == 3 and not any(s.problem for s in described.steps)
    with opened(run) as manager:
        assert (manager.latest_step(), manager.all_steps()) == (3, [1, 2, 3])
        for step in (1, 2, 3):
            run.check(manager, step)
        assert manager.verify() == found and manager.latest_step() == 3
        run.restore(manager, None)
        run.same(run.state, run.truth[3])
        run.run(manager, [4])
    littered(root / "4")
    names_now = {path.name for path in root.iterdir() if path.is_dir()}
    assert {name for name in names_now if name[0].isdigit()} == {"1", "2", "3", "4"}
    registry = cnr.handler_registry(run.tables)
    with ocp.CheckpointManager(root, handler_registry=registry) as plain:
        got = plain.restore(4, args=cnr.args.Restore(run.state))
        run.same(got.state, run.truth[4])
    with opened(run, preservation_policy=ocp.checkpoint_managers.LatestN(1)) as manager:
        run.restore(manager, None)
        manager.save(5, args=cnr.args.Save(run.state, run.touched, full=True))
        manager.wait_until_finished()
        assert manager.all_steps() == [5], (
            "the others go as ever, with all that is in them"
        )


def test_what_is_left_in_a_save_being_written_is_no_part_of_it(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    turn = threading.Lock()

    def leave(call: inprocess.Call) -> None:
        ends = ("_METADATA", "manifest.p00000.json", "manifest.json")
        if not call.path.endswith(ends) or not turn.acquire(blocking=False):
            return  # what is left makes calls too
        try:
            for at in root.glob(f"2{names.TEMPORARY_SUFFIX}*/**/"):
                is_ours = not {"@eaDir", "empty", "loop"} & {*at.parts}
                if is_ours and not (at / ".DS_Store").exists():
                    # Another thread of the save may give the folder its name meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        litter(at, copies=False)
        finally:
            turn.release()

    with opened(run) as manager:
        run.run(manager, [1])
        with inprocess.watching(root, after=leave):
            run.run(manager, [2])
    left = [path for path in (root / "2").rglob("*") if path.name in LITTER]
    assert len({path.parent for path in left}) > 5
    for path in left:
        path.unlink()
    shutil.rmtree(root / "2/default/dense/@eaDir")
    assert not [found for found in cnr.verify(root) if found.consequence]
    run.check(manager, 2)


# In the place of what Orbax looks up, unless it is there: a file, a folder, an empty one, a link.
TAKEN = {
    "array_metadatas/process_1": lambda path: path.write_text("x"),
    f"d/{UUID}": lambda path: path.write_text("x"),
    "_strings.json": lambda path: path.mkdir(),
    "checkpoint": lambda path: path.symlink_to("/no such folder/file"),
}


def test_step_with_a_file_that_orbax_could_take_is_refused_but_not_passed_over(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(run) as manager:
        run.run(manager, [1, 2, 3])
    for name, make in TAKEN.items():
        path = root / "2/default/dense" / name
        path.parent.mkdir(exist_ok=True)
        make(path)  # beside tiles Orbax looks nothing up
    leave_dense_to_orbax(root / "3/default")
    for name, make in TAKEN.items():
        path = root / "3/default/dense" / name
        make(path)
        with opened(run) as manager:
            for step in (3, None):
                with pytest.raises(
                    errors.IntegrityError, match="move them away"
                ) as raised:
                    manager.restore(step, args=cnr.args.Restore(run.state))
                assert (raised.value.kind, raised.value.path) == (
                    "file_unknown",
                    str(path),
                )
                assert "restore step 2" in str(raised.value)
            (found,) = (p for p in manager.verify("structure") if p.consequence)
            assert found.consequence == ("3",) and found.file.endswith(name)
            assert (manager.latest_step(), manager.all_steps()) == (3, [1, 2, 3])
            assert cnr.describe(root).steps[-1].problem
            path.rmdir() if path.is_dir() else path.unlink()
            run.restore(manager, None)
            run.same(run.state, run.truth[3])


FOLDERS = (
    "plots.removed-axes",
    "plots5.removed-20250131",
    f"5.removed-{TOKEN.upper()}",
    f"5.removed-{TOKEN}.bak",
    f"5.removed-{TOKEN}\n",
    "notes.orbax-checkpoint-tmp-fixes",
    "notes.orbax-checkpoint-tmp",
    "5.orbax-checkpoint-tmp.bak",
    "5.orbax-checkpoint-tmp-mine",
    "5.orbax-checkpoint-tmp-12\n",
    "\uff15.orbax-checkpoint-tmp",
    "earlier-run-notes",
    f"earlier-run-{UUID}.root",
    f"EARLIER-RUN-{UUID}.root",
    f"old-earlier-run-{UUID}.root",
    f"earlier-run-{UUID}.root\n",
    "x.abandoned-cart",
    f"cart.abandoned-g1-{UUID}",
    f"5.abandoned-g1-{UUID[1:]}",
    f"5.abandoned-g01-{UUID}",
    f"5.abandoned-g1-{UUID}.bak",
    "5.backup",
    "5 (copy)",
    "005",
    "\uff15",
    "5\n",
    f"{names.WRITER}.00ff00ff.tmp",
)
FILES = (
    f"{names.WRITER}.bak",
    f"{names.WRITER}.mine.tmp",
    f"{names.SUSPECTS}.mine",
    f"my.{names.WRITER}.00ff00ff.tmp",
    f"{names.SUSPECTS}.00ff00ff.tmp\n",
    "earlier-run-results.csv",
    f"earlier-run-{'11' * 16}.root",
    "9.orbax-checkpoint-tmp",
    f"9.removed-{TOKEN}",
    f"9.abandoned-g1-{UUID}",
)


def lost(root: Path) -> list[str]:
    """What somebody has put there and is there no more."""
    found = [f"{name}/thesis" for name in FOLDERS]
    return [name for name in (*found, *FILES) if not (root / name).is_file()]


def test_names_that_only_resemble_ours_are_left_alone(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    latest = ocp.checkpoint_managers.LatestN(2)
    options: Any = {"policy": cnr.Full(), "preservation_policy": latest}
    with opened(run, **options) as manager:
        run.run(manager, [3, 4])
    for name in FOLDERS:
        (root / name).mkdir()
        (root / name / "thesis").write_text(name)
    for name in FILES:
        (root / name).write_text(name)
    ours = {
        "7.orbax-checkpoint-tmp",
        "ck_8.orbax-checkpoint-tmp-1234567890",
        names.removed("7", TOKEN),
        names.removed("7.orbax-checkpoint-tmp", TOKEN),
        names.removed(names.abandoned("7", 2, UUID), TOKEN),
    }
    for name in ours:
        (root / name).mkdir()
    (root / names.replacing(names.WRITER, "00ff0011")).write_text("{")
    with opened(run, **options) as manager:
        run.restore(manager, 3)
        run.salt = 1
        run.run(manager, [4])
        assert lost(root) == []
        with pytest.raises(errors.DependentsExistError, match="is a file"):
            run.save(manager, 9)
        run.run(manager, [5, 6])
        assert manager.all_steps() == [5, 6]
    assert lost(root) == []
    held = {path.name for path in root.iterdir()} - {*FOLDERS, *FILES}
    assert held == {"5", "6", names.WRITER, "cnr_jax.writer.lock"}
    described = cnr.describe(root)
    assert [step.step for step in described.steps] == [5, 6]
    assert described.earlier_runs == (f"earlier-run-{UUID}.root",)
    with opened(run, new_run=True, **options) as manager:
        run.run(manager, [1, 2])
    (earlier,) = root.glob("earlier-run-*0001.root")
    asked: Any = {"keep": 1, "other_runs": True, "writer_is_dead": True}
    assert {fate.name for fate in cnr.prune(root, **asked).going} == {"1", earlier.name}
    assert len(cnr.prune(root, **asked, delete=True).going) == 2
    assert lost(root) == [] and not earlier.exists()
    assert {each.name for each in root.iterdir() if each.name.isdecimal()} >= {"2"}


def test_prefix_that_resembles_a_form_names_steps_as_any(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    prefix = "a.removed-b.abandoned-c"
    with opened(run, step_prefix=prefix, step_format_fixed_length=3) as manager:
        run.run(manager, [1, 2])
    assert cnr.describe(root).latest_step == 2 and cnr.verify(root) == ()
    with opened(run, step_prefix=prefix, step_format_fixed_length=3) as manager:
        run.restore(manager, None)
        run.same(run.state, run.truth[2])


def test_copies_of_steps_and_what_they_rest_on_are_not_pruned(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(run) as manager:
        run.run(manager, [1, 2, 3])
        run.train(4)
        manager.save(4, args=cnr.args.Save(run.state, run.touched, full=True))
    for name in ("backup_2", "002", "2.bak"):
        shutil.copytree(root / "2", root / name)
    going = {
        fate.name
        for fate in cnr.prune(root, keep=1, delete=True, writer_is_dead=True).going
    }
    assert going == {"2", "3"}
    assert {"1", "4", "002", "backup_2", "2.bak"} <= {
        path.name for path in root.iterdir()
    }
    found = cnr.describe(root)
    assert [s.step for s in found.steps if not s.problem] == [1, 4]
    assert {s.directory for s in found.steps if "not called" in s.problem} == {
        "002",
        "backup_2",
    }


# Of the looks before which something goes.
STRIDE = 29


# What a program that only looks does, each with what goes meanwhile, and what it must say.
def looks(root: Path) -> dict[str, Any]:
    def seen() -> None:
        assert [step.step for step in cnr.describe(root).steps if step.problem] == []

    def right() -> None:
        assert [p for p in cnr.verify(root, "structure") if p.consequence] == []

    def pruned() -> None:
        told = cnr.prune(root, keep=1, other_runs=True)
        assert {"3"} <= {fate.name for fate in told.fates if fate.stays}

    def drawn() -> None:
        from cnr_jax.cli.roots import check_root, read_root
        from cnr_jax.repository.course import course_of

        check_root(os.fspath(root))
        course_of(read_root(os.fspath(root), None))

    return {"describe": seen, "verify": right, "prune": pruned, "report": drawn}


def test_what_goes_while_a_root_is_looked_through_is_gone(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    """Retention takes steps, and somebody the metrics, before the k-th look of each."""
    run, saved, root = tiny_run(), tmp_path / "root", tmp_path / "live"
    with opened(run, policy=cnr.Full(), metrics=True) as manager:
        run.run(manager, [1, 2, 3])
    (saved / "1/default/dense/.nfs0001").write_text("x")

    def go() -> None:
        for name in ("1", "2"):
            (root / name).rename(root / names.removed(name, TOKEN))
            shutil.rmtree(root / names.removed(name, TOKEN))
        (root / names.METRICS).unlink()

    for name, look in looks(root).items():
        nth, went = 1, True
        while went:
            went = False
            shutil.copytree(saved, root)

            def before(call: inprocess.Call, nth: int = nth) -> None:
                nonlocal went
                if call.number == nth:
                    went = True
                    go()

            with inprocess.watching(root, before=before, looks=True):
                look()
            shutil.rmtree(root)
            nth += STRIDE
        assert nth > 3 * STRIDE, name
