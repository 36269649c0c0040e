"""What a user is likely to get wrong at first: an error or a warning says what to do instead."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.optim import as_optax, rowwise_adagrad

from .conftest import each_of, xla_flags

OPTION, STATE, TOUCHED = (
    errors.OptionError,
    errors.StateMismatchError,
    errors.TouchedError,
)


def make_state(rows: int = 8) -> dict[str, Any]:
    user = jnp.arange(rows * 4, dtype=jnp.float32).reshape(rows, 4)
    return {"user": user, "w": jnp.ones(3)}


@pytest.fixture
def state() -> dict[str, Any]:
    return make_state()


@pytest.fixture
def tables(state: Any) -> cnr.Tables:
    return cnr.find_tables(state, ["user"])


@pytest.fixture
def touched(state: Any, tables: cnr.Tables) -> cnr.Touched:
    return cnr.init_touched(state, tables)


@pytest.fixture
def manager(tmp_path: Path, tables: cnr.Tables) -> Iterator[cnr.CheckpointManager]:
    """Of a root in which nothing is saved yet."""
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(
        tmp_path / "run", tables=tables, options=options
    ) as manager:
        yield manager


def save(
    root: Path, state: Any, tables: cnr.Tables, touched: cnr.Touched | None = None
) -> None:
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))


def warnings_in(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    found = [r for r in caplog.records if r.levelno == logging.WARNING]
    return [r.getMessage() for r in found if part in r.getMessage()]


# ---- making a manager ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "hint"),
    [
        (["user"], r"find_tables\(state, \['user'\]\)"),
        ({"user": "params/user"}, r"find_tables\(state, \{'user': 'params/user'\}\)"),
        ("user", r"find_tables\(state, 'user'\)"),
        ([cnr.TableSpec("user")], r"find_tables\(state, names\)"),
        (jnp.zeros((8, 4)), r"find_tables\(state, names\)"),
    ],
)
def test_names_are_not_taken_for_tables(
    tables: Any, hint: str, tmp_path: Path, state: Any
) -> None:
    root = tmp_path / "run"
    message = rf"tables is \w+, expected what find_tables returns\n  hint: .*{hint}"
    calls: list[Callable[[], Any]] = [
        lambda: cnr.CheckpointManager(root, tables=tables),
        lambda: cnr.handler_registry(tables),
        lambda: cnr.init_touched(state, tables),
        lambda: cnr.tune(state, tables, cnr.Options()),
    ]
    for call in calls:
        with pytest.raises(OPTION, match=message):
            call()
    assert not root.exists()


def test_a_table_spec_needs_a_name(state: Any) -> None:
    given: Any = [cnr.TableSpec("params/user")]
    with pytest.raises(errors.TableError, match="hint: name each"):
        cnr.find_tables(state, given)


def test_root_alone_is_given_by_position(tmp_path: Path, tables: Any) -> None:
    make: Any = cnr.CheckpointManager
    root = tmp_path / "run"
    hint = r"\n  hint: CheckpointManager\(root, tables=tables"
    with pytest.raises(OPTION, match=f"got Tables after it{hint}"):
        make(root, tables)
    with pytest.raises(
        OPTION, match=f"got dict, CheckpointManagerOptions after it{hint}"
    ):
        make(root, {}, ocp.CheckpointManagerOptions())
    assert not root.exists()
    assert list(inspect.signature(make).parameters)[:2] == ["root", "tables"]
    with make(root=root, tables=tables) as manager:
        assert manager.all_steps() == []


def test_names_are_not_taken_for_tables_in_a_restore(
    tmp_path: Path, state: Any, tables: cnr.Tables
) -> None:
    save(tmp_path, state, tables)
    with cnr.CheckpointManager(tmp_path) as manager:
        args = cnr.args.Restore(state, tables=["user"])  # type: ignore[arg-type]
        with pytest.raises(OPTION, match=r"(?s)tables is list.*find_tables\(state"):
            manager.restore(0, args=args)


def test_options_of_orbax_and_of_cnr_are_told_apart(
    tmp_path: Path, tables: cnr.Tables
) -> None:
    theirs, ours, root = ocp.CheckpointManagerOptions(), cnr.Options(), tmp_path / "run"
    with pytest.raises(
        OPTION, match=r"options is CheckpointManagerOptions.*\n.*orbax_options="
    ):
        cnr.CheckpointManager(root, tables=tables, options=theirs)  # type: ignore[arg-type]
    with pytest.raises(
        OPTION, match=r"options is CheckpointManagerOptions.*\n.*orbax_options="
    ):
        cnr.handler_registry(tables, theirs)  # type: ignore[arg-type]
    with pytest.raises(OPTION, match=r"orbax_options is Options.*\n.*options="):
        cnr.CheckpointManager(root, tables=tables, orbax_options=ours)  # type: ignore[arg-type]
    assert not root.exists()


class Deciding:
    """A policy of a user's own."""

    name = "deciding"

    def decide(self, history: Any) -> Any:
        return cnr.Full().decide(history)


@each_of(
    ("policy", "hint"),
    [
        ("full", r"cnr_jax\.Full\(\)"),
        ("one_shot", r"cnr_jax\.OneShot\(\)"),
        ("always", r"cnr_jax\.Intermittent\(\)"),
        (cnr.Full, r"cnr_jax\.Full\(\)"),
        ("increment_log", r"cnr_jax\.IncrementLog\(\)"),
        (cnr.IncrementLog, r"cnr_jax\.IncrementLog\(\)"),
        (Deciding, r"policy=Deciding\(\)"),
        (None, r"cnr_jax\.Intermittent\(\)"),
    ],
)
def test_policy_is_an_object_that_decides(policy: Any, hint: str) -> None:
    with pytest.raises(OPTION, match=rf"policy is .*, expected an object.*\n.*{hint}"):
        cnr.Options(policy=policy)


@each_of(
    "policy",
    [cnr.Full, cnr.OneShot, cnr.Consecutive, cnr.IncrementLog, cnr.Intermittent],
)
def test_bits_that_no_codec_reads_are_refused_with_policies_of_ours(
    policy: Any,
) -> None:
    with pytest.raises(OPTION, match="bits"):
        cnr.Options(codec="raw", bits=4, policy=policy())


def test_policy_of_the_users_own_is_taken() -> None:
    class Mine:
        name = "mine"

        def decide(self, history: Any) -> cnr.Decision:
            return cnr.Full().decide(history)

    assert isinstance(cnr.Options(policy=Mine()).policy, Mine)


# ---- saving -------------------------------------------------------------------------------


def test_save_inside_jit_is_refused(
    manager: cnr.CheckpointManager, state: Any, touched: cnr.Touched
) -> None:
    hint = r"(.|\n)*outside of jax.jit"

    def traced_state(state: Any) -> Any:
        return manager.save(0, args=cnr.args.Save(state, touched))

    def traced_touched(touched: Any) -> Any:
        return manager.save(0, args=cnr.args.Save(state, touched))

    def traced_step(step: Any) -> Any:
        return manager.save(step, args=cnr.args.Save(state, touched))

    with pytest.raises(STATE, match=r"state\['user'\] is a tracer" + hint):
        jax.jit(traced_state)(state)
    with pytest.raises(TOUCHED, match=r"touched.* is a tracer" + hint):
        jax.jit(traced_touched)(touched)
    with pytest.raises(OPTION, match="a step is an integer, got a tracer" + hint):
        jax.jit(traced_step)(0)
    assert manager.save(0, args=cnr.args.Save(state, touched))


def test_save_inside_jit_is_refused_under_a_plain_manager_too(
    tmp_path: Path, state: Any, tables: cnr.Tables
) -> None:
    registry = cnr.handler_registry(tables)
    with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:

        def step(state: Any) -> Any:
            return manager.save(0, args=cnr.args.Save(state))

        with pytest.raises(STATE, match=r"(?s)is a tracer.*outside of jax.jit"):
            jax.jit(step)(state)


def test_swapped_state_and_touched_are_refused(
    manager: cnr.CheckpointManager, state: Any, touched: cnr.Touched
) -> None:
    with pytest.raises(STATE, match=r"swapped\n.*Save\(state, touched\)"):
        manager.save(0, args=cnr.args.Save(touched, state))


def test_state_is_given_by_name_and_in_arguments(
    manager: cnr.CheckpointManager, state: Any, touched: cnr.Touched
) -> None:
    hint = r"args=cnr_jax\.args\.Save\(state\)"
    with pytest.raises(OPTION, match=f"got dict beside the step\n.*{hint}"):
        manager.save(0, state)
    with pytest.raises(OPTION, match=f"got Save beside the step\n.*{hint}"):
        manager.save(0, cnr.args.Save(state, touched))
    with pytest.raises(OPTION, match=f"args is dict.*\n.*{hint}"):
        manager.save(0, args=state)
    with pytest.raises(OPTION, match=f"nothing is given.*\n.*{hint}"):
        manager.save(0)
    assert manager.all_steps() == []
    assert manager.save(0, args=cnr.args.Save(state, touched))
    manager.wait_until_finished()
    hint = r"args=cnr_jax\.args\.Restore\(state\)"
    with pytest.raises(OPTION, match=f"got dict beside the step\n.*{hint}"):
        manager.restore(0, state)
    with pytest.raises(OPTION, match=f"args is dict.*\n.*{hint}"):
        manager.restore(0, args=state)


def test_touched_rows_that_come_late_are_said_to_be_unused_once(
    manager: cnr.CheckpointManager,
    state: Any,
    touched: cnr.Touched,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager.save(0, args=cnr.args.Save(state))
    for step in (1, 2):
        manager.save(step, args=cnr.args.Save(state, touched))
    (said,) = warnings_in(caplog, "touched rows")
    assert "are not used" in said and "Options(tracking='recorded')" in said


def test_touched_rows_are_not_said_to_be_unused_where_fingerprints_were_asked_for(
    tmp_path: Path,
    state: Any,
    tables: cnr.Tables,
    touched: cnr.Touched,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = cnr.Options(tracking="fingerprint")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))
    assert not warnings_in(caplog, "touched rows")


def test_touched_rows_that_a_restore_gave_may_go_on_unless_rows_were_recorded_in_them(
    tmp_path: Path, state: Any, tables: cnr.Tables, caplog: pytest.LogCaptureFixture
) -> None:
    with cnr.CheckpointManager(tmp_path / "one", tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
    for root in ("one", "another"):
        with cnr.CheckpointManager(tmp_path / root, tables=tables) as manager:
            base = manager.restore(
                None, directory=tmp_path / "one", args=cnr.args.Restore(state)
            )
            for step in (1, 2):
                manager.save(step, args=cnr.args.Save(*base))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None and report.tracking == "fingerprint"
            assert not warnings_in(caplog, "touched rows")
            touched = cnr.record(base.touched, {"user": jnp.array([1])})
            manager.save(3, args=cnr.args.Save(base.state, touched))
        assert warnings_in(caplog, "touched rows")
        caplog.clear()


def test_rows_too_wide_for_a_codec_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"expert": jnp.ones((2, 512, 129)), "user": jnp.ones((8, 4))}
    tables = cnr.find_tables(state, ["expert", "user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        for step in range(2):
            manager.save(step, args=cnr.args.Save(state))
    (said,) = warnings_in(caplog, "stored exactly")
    assert "more than 65,536 elements" in said
    assert "expert/table of 66,048." in said and "user" not in said
    assert "TableOptions(codec='raw')" in said


def test_wide_rows_that_are_meant_to_be_exact_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"expert": jnp.ones((2, 512, 129)), "user": jnp.ones((8, 4))}
    tables = cnr.find_tables(state, ["expert", "user"])
    options = cnr.Options(tables={"expert": cnr.TableOptions(codec="raw")})
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
    assert not warnings_in(caplog, "stored exactly")


# ---- recording ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["eager", "jit"])
def test_arguments_of_record_are_checked(wrap: Any, touched: cnr.Touched) -> None:
    ids = jnp.array([1, 2])
    with pytest.raises(TOUCHED, match=r"expected a dict.*\n.*\(touched, \{'user': ids"):
        wrap(cnr.record)(touched, ids)
    with pytest.raises(TOUCHED, match=r"touched is dict.*\n.*record\(touched, ids\)"):
        wrap(cnr.record)({"user": ids}, touched)
    with pytest.raises(TOUCHED, match=r"touched is dict.*\n.*init_touched\("):
        wrap(cnr.record)({"user": ids}, {"user": ids})


# ---- restoring ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["latest", "3", 1.0, True, -1])
def test_step_to_restore_is_an_integer_or_none(
    step: Any, manager: cnr.CheckpointManager, state: Any
) -> None:
    manager.save(0, args=cnr.args.Save(state))
    with pytest.raises(OPTION, match=r"(?s)a step is .*restore\(None\) takes the new"):
        manager.restore(step, args=cnr.args.Restore(state))
    for fine in (None, 0, np.int64(0)):
        manager.restore(fine, args=cnr.args.Restore(state))


def test_way_to_a_larger_table_is_the_one_that_the_error_names(
    tmp_path: Path, state: Any, tables: cnr.Tables
) -> None:
    save(tmp_path, state, tables)
    larger = make_state(rows=12)
    new = cnr.find_tables(larger, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=new) as manager:
        with pytest.raises(STATE, match="8 rows in the checkpoint, 12 in") as found:
            manager.restore(0, args=cnr.args.Restore(larger))
        hint = str(found.value).partition("hint: ")[2]
        assert hint.startswith(
            "args.Restore(state, partial=True) takes the rows that both"
        )
        args = cnr.args.Restore(larger, partial=True)
        restored = manager.restore(0, args=args)
    rows = larger["user"].at[:8].set(state["user"])
    assert np.array_equal(restored.state["user"], rows)


def test_partial_restore_of_what_differs_does_not_advise_a_partial_restore(
    manager: cnr.CheckpointManager, state: Any
) -> None:
    manager.save(0, args=cnr.args.Save(state))
    other = {**state, "w": jnp.ones(4)}
    args = cnr.args.Restore(other, partial=True)
    with pytest.raises(STATE, match=r"w: shape \[3\].*\n.*leave such a leaf out of"):
        manager.restore(0, args=args)
    del other["w"]
    restored = manager.restore(0, args=cnr.args.Restore(other, partial=True))
    assert np.array_equal(restored.state["user"], state["user"])


# ---- reading a root -----------------------------------------------------------------------


def test_verify_does_not_call_a_missing_root_well(tmp_path: Path) -> None:
    message = f"no folder {tmp_path / 'typo'}, so no.*\n.*is the path right"
    with pytest.raises(errors.NoStepError, match=message) as found:
        cnr.verify(tmp_path / "typo")
    assert isinstance(found.value, FileNotFoundError)
    assert (found.value.kind, found.value.path) == ("no_root", str(tmp_path / "typo"))
    (tmp_path / "file").touch()
    for read in (cnr.verify, cnr.describe, cnr.CheckpointManager):
        with pytest.raises(errors.OptionError, match="file is a file"):
            read(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert cnr.verify(tmp_path / "empty") == ()


def test_reader_of_a_missing_root_says_so_and_does_not_make_it(
    tmp_path: Path, tables: cnr.Tables
) -> None:
    root = tmp_path / "typo"
    with pytest.raises(errors.NoStepError, match=f"no folder {root}"):
        cnr.CheckpointManager(root)
    read_only = ocp.CheckpointManagerOptions(read_only=True)
    with pytest.raises(errors.NoStepError, match=f"no folder {root}"):
        cnr.CheckpointManager(root, tables=tables, orbax_options=read_only)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def step_folder(tmp_path: Path, state: Any, tables: cnr.Tables) -> Path:
    save(tmp_path / "exp1", state, tables)
    return tmp_path / "exp1" / "0"


@pytest.mark.parametrize("below", ["", "default"])
def test_folder_of_a_step_is_not_taken_for_a_root(
    below: str, step_folder: Path, tmp_path: Path, state: Any, tables: cnr.Tables
) -> None:
    root, before = step_folder / below, sorted(step_folder.parent.rglob("*"))
    read_only = ocp.CheckpointManagerOptions(read_only=True)
    save(tmp_path / "other", state, tables)
    with cnr.CheckpointManager(tmp_path / "other", tables=tables) as other:
        calls: list[Callable[[], Any]] = [
            lambda: cnr.CheckpointManager(root, tables=tables),
            lambda: cnr.CheckpointManager(root),
            lambda: cnr.CheckpointManager(root, orbax_options=read_only),
            lambda: cnr.verify(root),
            lambda: other.restore(None, directory=root),
            lambda: other.restore(0, directory=root),
        ]
        for call in calls:
            with pytest.raises(
                OPTION, match=f"is a step of the root {tmp_path}/exp1\n"
            ):
                call()
    assert sorted(step_folder.parent.rglob("*")) == before


def test_root_that_is_empty_or_a_file_is_refused(
    tmp_path: Path, tables: cnr.Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OPTION, match="is no root: it is empty"):
        cnr.CheckpointManager("", tables=tables)
    for root in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(
            OPTION, match=f"{root} is no root: {tmp_path}/file is a file"
        ):
            cnr.CheckpointManager(root, tables=tables)
    with pytest.raises(OPTION, match="no such home folder"):
        cnr.CheckpointManager("~nobody-of-this-name/run", tables=tables)
    assert not list((tmp_path / "here").iterdir())


def test_tilde_is_the_home_folder(
    tmp_path: Path, state: Any, tables: cnr.Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save(Path("~/run"), state, tables)
    assert (tmp_path / "home" / "run" / "0").is_dir()
    assert cnr.verify("~/run") == ()


def test_steps_and_roots_that_are_missing_elsewhere_are_told_apart(
    manager: cnr.CheckpointManager, tmp_path: Path, state: Any, tables: cnr.Tables
) -> None:
    save(tmp_path / "other", state, tables)
    for step in (None, 1):
        with pytest.raises(errors.NoStepError, match=f"no folder {tmp_path}/missing"):
            manager.restore(step, directory=tmp_path / "missing")
    with pytest.raises(
        errors.NoStepError, match=r"step 1 does not exist.*\n  steps: 0"
    ):
        manager.restore(1, directory=tmp_path / "other")
    restored = manager.restore(0, directory=tmp_path / "other")
    assert np.array_equal(restored.state["user"], state["user"])


# ---- two managers, and the end of one ------------------------------------------------------


def test_closed_manager_refuses_what_it_cannot_do(
    manager: cnr.CheckpointManager, state: Any, touched: cnr.Touched
) -> None:
    manager.save(0, args=cnr.args.Save(state, touched))
    manager.close()
    root = Path(manager.directory)
    before = sorted(root.rglob("*"))
    calls: list[Callable[[], Any]] = [
        lambda: manager.save(1, args=cnr.args.Save(state, touched)),
        lambda: manager.restore(0, args=cnr.args.Restore(state)),
        lambda: manager.delete(0),
        manager.verify,
    ]
    for call in calls:
        with pytest.raises(errors.CallError, match="this manager is closed") as found:
            call()
        assert found.value.kind == "closed"
    assert sorted(root.rglob("*")) == before
    assert (manager.latest_step(), manager.all_steps()) == (0, [0])
    manager.close()


def test_other_manager_of_the_same_process_is_said_to_be_one(
    manager: cnr.CheckpointManager, state: Any, tables: cnr.Tables, touched: cnr.Touched
) -> None:
    manager.save(0, args=cnr.args.Save(state, touched))
    first = line_of_last_statement()
    manager.wait_until_finished()
    with cnr.CheckpointManager(manager.directory, tables=tables) as other:
        restored = other.restore(None, args=cnr.args.Restore(state))
        other.save(1, args=cnr.args.Save(*restored))
        second = line_of_last_statement()
    with pytest.raises(
        errors.WriterError,
        match="another manager of this same process: close it, or save through it",
    ) as caught:
        manager.save(2, args=cnr.args.Save(state, touched))
    # All else is the same of the two: they are told apart by where they saved first.
    got, expected = str(caught.value).splitlines()[1:3]
    assert f"by the save at {second}" in got and f"by the save at {first}" in expected


def line_of_last_statement() -> str:
    caller = inspect.stack()[1]
    return f"{Path(caller.filename).name}:{caller.lineno - 1}"


PROGRAM = """
import logging, sys, time
from concurrent.futures import thread
import jax.numpy as jnp
import cnr_jax as cnr
from cnr_jax.repository.rows_writer import RowsWriter

write = RowsWriter.write

def late(*args):
    while not thread._shutdown:  # the main thread has come to its end
        time.sleep(0.01)
    if sys.argv[2] == "in a pool":
        thread.ThreadPoolExecutor().submit(int)  # as a save does that is not small
    return write(*args)

logging.basicConfig(level=logging.WARNING)
state = {"user": jnp.ones((8, 4)), "w": jnp.ones(3)}
tables = cnr.find_tables(state, ["user"])
manager = cnr.CheckpointManager(sys.argv[1], tables=tables)
manager.save(0, args=cnr.args.Save(state))
manager.wait_until_finished()
RowsWriter.write = late
manager.save(1, args=cnr.args.Save(state))
"""


def run_program(*args: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()},
    )
    return [line for line in done.stderr.splitlines() if "step 1" in line]


def test_program_that_ends_without_close_waits_for_what_can_be_written(
    tmp_path: Path,
) -> None:
    assert run_program(str(tmp_path / "run"), "alone") == []
    with cnr.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [0, 1]


def test_program_that_ends_without_close_is_told_what_it_lost(tmp_path: Path) -> None:
    (said,) = run_program(str(tmp_path / "run"), "in a pool")
    assert "the save of step 1 failed" in said
    assert "the program ended before this save was durable" in said
    assert "use `with`, or call close() or wait_until_finished()" in said
    assert "the next save contains" not in said
    with cnr.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [0]


# ---- touched rows that are not those of the state ------------------------------------------


def test_touched_rows_that_record_did_not_return_are_a_likely_cause(
    tmp_path: Path, state: Any, tables: cnr.Tables, touched: cnr.Touched
) -> None:
    options = cnr.Options(codec="raw", tracking="audited")
    other = {**state, "user": state["user"].at[3].add(1.0)}
    likely = "or the touched rows given to Save are not those that `record` returned"
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))
        with pytest.raises(errors.AuditError, match=likely):
            manager.save(1, args=cnr.args.Save(other, touched))
        # The clock has advanced: these are rows of `record`, which was told of others.
        recorded = cnr.record(touched, {"user": jnp.array([1])})
        with pytest.raises(errors.AuditError) as found:
            manager.save(1, args=cnr.args.Save(other, recorded))
        assert likely not in str(found.value)
    assert "passes the touched rows along: Save(state, touched)" in str(found.value)
    # As the hint says.
    options = cnr.Options(codec="raw", tracking="fingerprint")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        with pytest.raises(
            errors.UsedRootError, match=r"that belong to it, not new ones: Save\("
        ):
            manager.save(1, args=cnr.args.Save(other))
        for step in (1, 2):
            rows = recorded if step == 1 else None
            assert manager.save(step, args=cnr.args.Save(other, rows))
        restored = manager.restore(2, args=cnr.args.Restore(state))
    assert np.array_equal(restored.state["user"], other["user"])


def test_steps_that_are_moved_aside_are_said_to_stay_for_now(
    manager: cnr.CheckpointManager,
    state: Any,
    touched: cnr.Touched,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step in range(3):
        manager.save(step, args=cnr.args.Save(state, touched))
    restored = manager.restore(1, args=cnr.args.Restore(state))
    manager.save(2, args=cnr.args.Save(*restored))
    manager.wait_until_finished()
    (said,) = warnings_in(caplog, "it is now")
    root = manager.directory
    assert "left behind as the run went back" in said
    assert "goes when retention" in said and "its name again, 2 in the root" in said
    (aside,) = [p for p in root.iterdir() if p.name.startswith("2.abandoned")]
    assert str(aside) in said


# ---- options and arguments of another kind -------------------------------------------------

FLAGS = [
    field.name
    for field in dataclasses.fields(cnr.Options)
    if isinstance(field.default, bool)
]


@each_of(
    ("options", "message"),
    [
        ({"preservation_policy": 2}, r"preservation_policy is 2.*\n.*LatestN\(3\)"),
        (
            {"preservation_policy": ocp.checkpoint_managers.LatestN},
            r"preservation_policy is .*\n.*LatestN\(3\)",
        ),
        ({"on_save": "print"}, r"on_save is 'print'.*\n.*on_save=print"),
        ({"tables": {"item": 8}}, r"table 'item' are 8.*\n.*TableOptions\(bits=8\)"),
        ({"tables": ["item"]}, r"tables is list.*\n.*TableOptions\(bits=8\)"),
        ({"timeout_secs": None}, "timeout_secs is None, expected a number"),
        ({"timeout_secs": "60"}, "timeout_secs is '60', expected a number"),
        (
            {"max_staging_bytes": "2 GB"},
            "max_staging_bytes is '2 GB', expected a number",
        ),
        *(
            ({name: value}, rf"{name} is {value!r}, expected True or False\n  hint: ")
            for name in FLAGS
            for value in ("no", 1, None)
        ),
        ({"slot_codec": "zip"}, "slot_codec 'zip' is not known, .*'log8', or 'auto'"),
        (
            {"tables": {"user": cnr.TableOptions(slot_codec="zip")}},
            "table 'user': slot_codec 'zip' is not known, .*, or 'auto'",
        ),
        ({"slot_codec": None}, "None is no codec, expected the name of one"),
        ({"codec": 4}, "4 is no codec, expected the name of one"),
        ({"bits": 4.0}, "options: bits is 4.0, expected 2, 3, 4, 8 or 'auto'"),
        ({"bits": True}, "options: bits is True, expected 2, 3, 4, 8 or 'auto'"),
        ({"bits": "raw"}, "expected 2, 3, 4, 8 or 'auto'\n  hint: codec='raw' stores"),
        (
            {"bits": 5},
            r"options: bits is 5, expected one of \(2, 3, 4, 8\) or 'auto'\n"
            "  hint: codec='raw' stores all bits, and takes no bits=$",
        ),
        (
            {"tables": {"user": cnr.TableOptions(bits=16)}},
            r"table 'user': bits is 16, expected one of \(2, 3, 4, 8\) or 'auto'\n  hint: ",
        ),
        # Which has no 8 bits, that "auto" comes to at times.
        ({"codec": "kmeans", "bits": 5}, r"bits is 5, expected one of \(2, 3, 4\)\n"),
    ],
)
def test_options_of_another_kind_are_refused(options: Any, message: str) -> None:
    with pytest.raises(OPTION, match=message):
        cnr.Options(**options)


@each_of(
    "options",
    [
        # As of a program with a flag for each.
        {"codec": "raw"},
        {name: np.bool_(name == "keep_staging") for name in FLAGS},
    ],
)
def test_options_that_do_not_contradict_one_another_are_taken(options: Any) -> None:
    made = cnr.Options(**options)
    assert all(getattr(made, name) == value for name, value in options.items())


def test_arguments_of_another_kind_are_refused(
    manager: cnr.CheckpointManager, state: Any, touched: cnr.Touched
) -> None:
    with pytest.raises(
        STATE, match=r"tuple of a state and.*\n.*Save\(state, touched\)"
    ):
        manager.save(0, args=cnr.args.Save((state, touched)))
    with pytest.raises(
        OPTION, match=r"is Restore, expected Save\n.*args\.Save\(state\)"
    ):
        manager.save(0, args=cnr.args.Restore(state))
    assert manager.all_steps() == []
    manager.save(0, args=cnr.args.Save(state, touched))
    wrong = cnr.args.Save(state)
    for args in (wrong, ocp.args.Composite(default=wrong)):
        with pytest.raises(
            OPTION, match=r"is Save, expected Restore\n.*Restore\(state\)"
        ):
            manager.restore(0, args=args)
    with pytest.raises(OPTION, match="a step is an integer, got '0'"):
        manager.delete("0")  # type: ignore[arg-type]
    for step in (jnp.float32(1), 1.0, None, True):
        with pytest.raises(OPTION, match="a step is an integer, got "):
            manager.save(step, args=cnr.args.Save(state, touched))  # type: ignore[arg-type]
    assert manager.save(jnp.int32(1), args=cnr.args.Save(state, touched))  # type: ignore[arg-type]
    manager.wait_until_finished()
    manager.delete(1)
    manager.wait_until_finished()
    assert manager.all_steps() == [0]


@each_of(
    ("call", "error", "message"),
    [
        (lambda s: cnr.find_tables(s, None), errors.TableError, "got None\n  hint: f"),
        (
            # The state and the names swapped: no value of a table is printed.
            lambda s: cnr.find_tables(["user"], s),
            errors.TableError,
            r"table 'user' is specified by .{,40}\n  expected a path",
        ),
        (
            lambda s: cnr.find_tables(s, {"user": cnr.TableSpec(layout="mod")}),  # type: ignore[arg-type]
            errors.TableError,
            r"'user' has layout 'mod'\n.*ModSharded\(",
        ),
        (
            lambda s: cnr.init_touched(cnr.find_tables(s, ["user"]), s),
            OPTION,
            r"tables is dict, .*\n  hint: tables=cnr_jax.find_tables\(state, names\)$",
        ),
        (lambda s: cnr.reset_touched(None), TOUCHED, "touched is NoneType, expected"),
        (lambda s: cnr.Consecutive(max_chain="3"), OPTION, "max_chain cannot be '3'"),
        (lambda s: cnr.Intermittent(max_deltas=2.5), OPTION, "cannot be 2.5"),
        (lambda s: cnr.args.Restore(s, partial="yes"), OPTION, "partial is 'yes'"),
        (lambda s: cnr.args.Restore(s, cast=1), OPTION, "cast is 1, expected True"),
        (
            lambda s: as_optax(0.1),  # type: ignore[arg-type]
            OPTION,
            r"optimizer is 0.1, .*\n.*rowwise_adagrad\(0.1\)",
        ),
        (lambda s: rowwise_adagrad("x"), OPTION, "learning_rate .* got 'x'"),
        (lambda s: cnr.ByteModel(dim=0), OPTION, "no rows are stored like that"),
        (lambda s: cnr.ByteModel(bits=5), OPTION, "expected dim .* bits of 1, 2, 3"),
    ],
)
def test_what_else_is_of_another_kind_is_refused(
    call: Callable[..., Any], error: type[Exception], message: str, state: Any
) -> None:
    with pytest.raises(error, match=message):
        call(state)
