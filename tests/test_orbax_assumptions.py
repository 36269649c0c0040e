"""What we rely on in Orbax beyond its documented interface, one test for each.

When a new version of Orbax breaks one of these, the name of the test says what to look at. That
`finalize` runs on the primary process only is shown by tests/multiprocess: there process 0 dies
before it writes the manifest, and no other process commits the step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax._src.lib import _jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import future, v1
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.metadata.checkpoint import metadata_store
from orbax.checkpoint._src.serialization import tensorstore_utils

import cnr_jax as cnr
from cnr_jax.checkpointer.orbax_compat.interrupts import end_interrupted_tasks
from cnr_jax.checkpointer.orbax_compat.places import (
    METRICS,
    Directories,
    ExactPath,
    place_of,
    step_names,
)
from cnr_jax.checkpointer.orbax_compat.skeleton import array_folder, save_skeleton
from cnr_jax.checkpointer.orbax_compat.steps import Steps
from cnr_jax.checkpointer.orbax_compat.storage import as_storage_allows
from cnr_jax.format import names
from cnr_jax.repository.store.plain_arrays import write_array
from cnr_jax.testing import inprocess


@dataclasses.dataclass
class Event:
    """What was called, in which thread, and what the root held then."""

    what: str
    main: bool
    listing: set[str]
    detail: Any = None


class ProbeHandler(ocp.AsyncCheckpointHandler):
    """Writes one file in the background, when it is let, and notes every call."""

    def __init__(self, root: Path) -> None:
        self.root, self.events = root, list[Event]()
        self.may_write = threading.Event()
        self.may_write.set()
        self.started = threading.Event()
        self.fail = False

    def note(self, what: str, detail: Any = None) -> None:
        main = threading.current_thread() is threading.main_thread()
        listing = {path.name for path in self.root.iterdir()}
        self.events.append(Event(what, main, listing, detail))

    def find(self, what: str) -> list[Event]:
        return [event for event in self.events if event.what == what]

    async def async_save(self, directory: epath.Path, args: Any) -> list[Any]:
        self.note("async_save", (directory, directory.exists(), args))

        async def write() -> None:
            self.note("write", directory.exists())
            self.started.set()
            assert self.may_write.wait(60)
            if self.fail:
                raise OSError("no space")
            (directory / "file").write_text("written")
            self.note("written")

        return [future.CommitFutureAwaitingContractedSignals(write(), name="probe")]

    def save(self, directory: epath.Path, args: Any) -> None:
        raise AssertionError("Orbax calls async_save")

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        self.note("restore")
        return (directory / "file").read_text()

    def finalize(self, directory: epath.Path) -> None:
        self.note("finalize", (directory, (directory / "file").exists()))


@ocp.args.register_with_handler(ProbeHandler, for_save=True)
@dataclasses.dataclass
class ProbeSave(ocp.args.CheckpointArgs):
    pass


@ocp.args.register_with_handler(ProbeHandler, for_restore=True)
@dataclasses.dataclass
class ProbeRestore(ocp.args.CheckpointArgs):
    pass


class Asked:
    """A preservation policy that notes when it is asked, and keeps the latest."""

    def __init__(self, handler: ProbeHandler) -> None:
        self._handler = handler

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        steps = [info.step for info in checkpoints]
        self._handler.note("policy", steps)
        return [step == steps[-1] for step in steps]


@pytest.fixture
def probe(tmp_path: Path) -> Any:
    """A handler and a plain manager that uses it for every item."""
    handler = ProbeHandler(tmp_path)
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add(None, ProbeSave, handler)
    registry.add(None, ProbeRestore, handler)
    options = ocp.CheckpointManagerOptions(preservation_policy=Asked(handler))
    manager = ocp.CheckpointManager(
        tmp_path, options=options, handler_registry=registry
    )
    yield handler, manager
    handler.may_write.set()
    handler.fail = False
    manager.close()


def listing(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_items_are_written_below_temporary_names_of_a_known_form(probe: Any) -> None:
    handler, manager = probe
    manager.save(12, args=ocp.args.Composite(state=ProbeSave()))
    manager.wait_until_finished()
    (event,) = handler.find("async_save")
    path = event.detail[0]
    step, item = f"12{names.TEMPORARY_SUFFIX}", f"state{names.TEMPORARY_SUFFIX}"
    assert path == epath.Path(handler.root) / step / item
    place = place_of(path)
    assert (place.directory, place.item) == ("12", "state")
    assert (handler.root / "12" / "state" / "file").exists()


def test_restore_is_given_the_final_path(probe: Any, tmp_path: Path) -> None:
    _, manager = probe
    manager.save(3, args=ProbeSave())
    assert manager.restore(3, args=ProbeRestore()) == "written"
    place = place_of(epath.Path(tmp_path / "3" / "default"))
    assert (place.root, place.directory, place.item) == (tmp_path, "3", "default")


def test_the_directory_exists_in_the_background(probe: Any) -> None:
    """In `async_save` it usually does not yet: Orbax makes it meanwhile."""
    handler, manager = probe
    manager.save(1, args=ProbeSave())
    manager.wait_until_finished()
    assert handler.find("write")[0].detail is True


def test_orbax_signals_that_the_directories_of_a_save_are_there(probe: Any) -> None:
    """By a future of its public module, which is made in `async_save`."""
    handler, manager = probe
    found: list[Directories] = []
    save = handler.async_save

    async def noting(directory: epath.Path, args: Any) -> list[Any]:
        found.append(Directories())
        return await save(directory, args)

    handler.async_save = noting
    handler.may_write.clear()
    manager.save(1, args=ProbeSave())
    (made,) = found
    made.wait(60, lambda: None)
    assert handler.find("async_save")[0].detail[0].is_dir()
    handler.may_write.set()
    manager.wait_until_finished()


def test_async_save_runs_in_the_calling_thread_with_the_very_arguments(
    probe: Any,
) -> None:
    """`prepare` looks at the arguments before, and recognizes them by identity."""
    handler, manager = probe
    args = ProbeSave()
    manager.save(1, args=args)
    manager.wait_until_finished()
    (event,) = handler.find("async_save")
    assert event.main and event.detail[2] is args
    assert not handler.find("write")[0].main


def test_the_previous_save_is_committed_before_the_next_async_save(probe: Any) -> None:
    handler, manager = probe
    handler.may_write.clear()
    manager.save(1, args=ProbeSave())
    threading.Timer(0.2, handler.may_write.set).start()
    manager.save(2, args=ProbeSave())
    manager.wait_until_finished()
    order = [event.what for event in handler.events]
    second = len(order) - 1 - order[::-1].index("async_save")
    assert order.index("finalize") < second
    assert "1" in handler.events[second].listing


def test_the_policy_is_asked_right_after_async_save_with_the_new_step(
    probe: Any,
) -> None:
    """So what it forgets must not count before the save is committed."""
    handler, manager = probe
    handler.may_write.clear()
    manager.save(1, args=ProbeSave())
    asked = handler.find("policy")
    assert [event.detail for event in asked] == [[1]]
    assert asked[0].main
    assert "1" not in asked[0].listing, "not committed yet"
    handler.may_write.set()
    manager.save(2, args=ProbeSave())
    assert [event.detail for event in handler.find("policy")] == [[1], [1, 2]]


def test_old_steps_are_deleted_only_after_the_new_one_is_committed(probe: Any) -> None:
    handler, manager = probe
    manager.save(1, args=ProbeSave())
    manager.wait_until_finished()
    handler.may_write.clear()
    manager.save(2, args=ProbeSave())
    assert list(manager.all_steps()) == [2], "off the list at once"
    assert "1" in listing(handler.root), "but still there"
    handler.may_write.set()
    manager.wait_until_finished()
    assert listing(handler.root) == {"2"}


def test_finalize_runs_once_after_all_writing_and_before_the_rename(probe: Any) -> None:
    handler, manager = probe
    manager.save(5, args=ProbeSave())
    manager.wait_until_finished()
    # The policy is asked meanwhile, by another thread.
    whats = [e.what for e in handler.events if e.what != "policy"]
    assert whats[-1] == "finalize" and whats.count("finalize") == 1
    assert "written" in whats[:-1]
    (event,) = handler.find("finalize")
    directory, file_exists = event.detail
    assert file_exists and not event.main
    assert directory.name == f"default{names.TEMPORARY_SUFFIX}"
    assert event.listing == {f"5{names.TEMPORARY_SUFFIX}"}
    assert listing(handler.root) == {"5"}


def test_a_failed_save_deletes_nothing_and_is_raised_once_by_waiting(
    probe: Any,
) -> None:
    handler, manager = probe
    manager.save(1, args=ProbeSave())
    manager.wait_until_finished()
    handler.fail = True
    manager.save(2, args=ProbeSave())
    with pytest.raises(OSError, match="no space"):
        manager.wait_until_finished()
    manager.wait_until_finished()
    assert not handler.find("finalize")[1:]
    assert listing(handler.root) == {"1", f"2{names.TEMPORARY_SUFFIX}"}
    # Orbax has lost sight of step 1 until the list is read again: we do that on any error.
    assert list(manager.all_steps()) == []
    manager.reload()
    assert list(manager.all_steps()) == [1]
    handler.fail = False
    manager.save(2, args=ProbeSave())
    manager.wait_until_finished()
    assert listing(handler.root) == {"2"}, "the temporary directory was replaced"


def test_where_orbax_logs_the_error_of_a_failed_save(
    probe: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, manager = probe
    handler.fail = True
    # Managers of ours, in other tests, have left one there.
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    manager.save(2, args=ProbeSave())
    with pytest.raises(OSError, match="no space"):
        manager.wait_until_finished()
    records = [record for record in caplog.records if record.exc_info]
    assert {record.name for record in records} == {"absl"}
    assert [(record.module, record.funcName) for record in records] == [
        ("future", "run"),
        ("async_checkpointer", "_thread_func"),
        ("checkpoint_manager", "wait_until_finished"),
    ]


def test_where_orbax_logs_that_it_cannot_read_metadata(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    file = tmp_path / "_CHECKPOINT_METADATA"
    store = metadata_store(enable_write=False)

    def delete(call: inprocess.Call) -> None:
        if call.call == "open_read":
            file.unlink()

    assert store.read(file) is None
    file.touch()
    with inprocess.watching(tmp_path, before=delete, looks=True):
        assert store.read(file) is None
    found = [(r.module, r.funcName, r.levelname) for r in caplog.records]
    assert found == [("checkpoint", "read", level) for level in ("WARNING", "ERROR")]
    missing, gone = (record.args for record in caplog.records)
    assert missing == (file,) and gone[0] == file
    assert isinstance(gone[1], FileNotFoundError)


def test_restore_waits_for_the_save_in_flight(probe: Any) -> None:
    """`CnrHandler.restore` settles the save before it notes the restore."""
    handler, manager = probe
    handler.may_write.clear()
    manager.save(1, args=ProbeSave())
    threading.Timer(0.2, handler.may_write.set).start()
    assert manager.restore(1, args=ProbeRestore()) == "written"
    assert "1" in handler.find("restore")[0].listing


def test_files_of_a_pytree_have_the_names_by_which_they_are_known(
    tmp_path: Path,
) -> None:
    """What else lies there is not listed in a manifest, and Orbax is not shown it."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P("x"))
    state = {
        "large": jax.device_put(np.zeros((1 << 12, 8), np.float32), where),
        "key": jax.random.key(0),
        "number": 3,
        "host": np.arange(5),
        "inner": {"bf16": jnp.ones(3, jnp.bfloat16), "none": None},
    }
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "dense", state)
    for path in (tmp_path / "dense").rglob("*"):
        name = path.relative_to(tmp_path / "dense").as_posix()
        if path.is_dir():
            assert names.leads_to_looked_up(name), name
        elif name not in (names.ORBAX_METADATA, names.ORBAX_COMMITTED):
            assert names.is_looked_up(name), name


def test_renamed_and_temporary_directories_are_no_steps(tmp_path: Path) -> None:
    state = {"x": np.arange(3)}
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (10, 20):
            manager.save(step, args=ocp.args.StandardSave(state))
    aside = names.abandoned("20", 1, "00ff" * 8)
    (tmp_path / names.removed("40", "0011" * 4)).mkdir()
    (tmp_path / names.WRITER).write_text("{}")
    assert aside.startswith("20.abandoned-g1-00ff00ff")
    (tmp_path / "20").rename(tmp_path / aside)
    (tmp_path / f"30{names.TEMPORARY_SUFFIX}").mkdir()
    with ocp.CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == [10]
        assert manager.latest_step() == 10
        manager.save(20, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [10, 20]
    assert (tmp_path / aside).exists()


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"step_prefix": "ck"}, "ck_20"),
        ({"step_format_fixed_length": 6}, "000020"),
        ({"step_prefix": "ck", "step_format_fixed_length": 6}, "ck_000020"),
    ],
    ids=["prefix", "padded", "both"],
)
def test_other_step_names_work_for_chains_and_for_steps_renamed_aside(
    tiny_run: Any, tmp_path: Path, form: dict[str, Any], name: str
) -> None:
    def open_() -> cnr.CheckpointManager:
        return cnr.CheckpointManager(
            tmp_path,
            tables=run.tables,
            options=cnr.Options(codec="raw", policy=cnr.Consecutive()),
            orbax_options=ocp.CheckpointManagerOptions(**form),
        )

    run = tiny_run()
    with open_() as manager:
        run.run(manager, [10, 20, 30])
        assert manager._get_write_step_directory(20, manager.directory).name == name
        assert (tmp_path / name).is_dir()
        run.restore(manager, 10)
        run.salt = 1
        run.run(manager, [20])
        assert (tmp_path / name).is_dir()
        assert len([p for p in listing(tmp_path) if names.ABANDONED_MARK in p]) == 2
    with open_() as manager:
        assert sorted(manager.all_steps()) == [10, 20]
        restored = manager.restore(None, args=cnr.args.Restore(run.state))
        run.same(restored.state, run.truth[20])


def test_processes_read_the_steps_together_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form of names does that; tests/multiprocess shows what it is about."""
    for asked in (False, True):
        options = ocp.CheckpointManagerOptions(single_host_load_and_broadcast=asked)
        steps = Steps(epath.Path(tmp_path), options)
        assert not steps.are_broadcast, "one process alone"
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: 2)
            assert steps.are_broadcast is asked


def test_the_handlers_path_is_on_disk(tiny_run: Any, tmp_path: Path) -> None:
    """So `CnrHandler` may never move: the path is part of the format."""
    run = tiny_run()
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as manager:
        run.run(manager, [0])
    document = json.loads((tmp_path / "0" / "_CHECKPOINT_METADATA").read_text())
    assert document["item_handlers"] == {"default": "cnr_jax.handler.CnrHandler"}


def test_one_process_needs_no_client_and_waiting_has_a_limit() -> None:
    """Processes talk through the client of `jax.distributed`; tests/multiprocess uses it."""
    assert callable(ocp.multihost.get_jax_distributed_client)
    for name in (
        "blocking_key_value_get",
        "key_value_delete",
        "key_value_increment",
        "key_value_set",
        "key_value_try_get",
    ):
        assert callable(getattr(_jax.DistributedRuntimeClient, name))
    assert ocp.multihost.coordination_timeout() > 0


def test_steps_are_read_and_ranked_as_a_manager_of_orbax_does(tmp_path: Path) -> None:
    """Where Orbax's own cannot, because of damage, ours leave out what is damaged."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["auc"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in range(3):
            args = ocp.args.StandardSave({"a": jnp.ones(2)})
            manager.save(step, args=args, metrics={"auc": -step} if step else None)
        manager.wait_until_finished()
        manager.reload()
        steps = Steps(epath.Path(tmp_path), options)
        steps.reload()
        assert steps.numbers() == list(manager.all_steps()) == [0, 1, 2]
        found = [info.metrics for info in steps.infos()]
        assert found == [manager.metrics(step) for step in range(3)]
        times = [info.time for info in steps.infos()]
        assert times == sorted(times) and times[0].tzinfo is not None
        assert steps.ranked() == [2, 1] and manager.best_step() == 1
        (tmp_path / "1" / METRICS / METRICS).write_text("{")
        with pytest.raises(ValueError):
            manager.reload()
        steps.reload()
        assert steps.numbers() == [0, 1, 2] and steps.ranked() == [2]


EVERY = {
    "every step": {},
    "intervals": {"save_interval_steps": 3},
    "some steps": {"save_interval_steps": 5, "save_on_steps": [6, 7]},
    "asked for": {"should_save_fn": lambda step, latest: step == 4 + (latest or 0)},
    "a policy": {
        "save_decision_policy": ocp.checkpoint_managers.FixedIntervalPolicy(2)
    },
}


@pytest.mark.parametrize("which", EVERY)
def test_saves_are_due_as_a_manager_of_orbax_would_find(
    tmp_path: Path, which: str
) -> None:
    """Whose default policies are private; ours are made anew of public ones."""
    options = ocp.CheckpointManagerOptions(**EVERY[which])
    args = ocp.args.JsonSave({})
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        steps = Steps(epath.Path(tmp_path), options)
        for last in (None, 3):
            if last is not None:
                manager.save(last, args=args, force=True)
                manager.wait_until_finished()
            steps.reload()
            for step in range(1, 13):
                due = steps.is_due(step, last, [], is_busy=False)
                assert due == manager.should_save(step), (last, step)


def test_a_step_is_described_as_orbax_describes_it(
    tiny_run: Any, tmp_path: Path
) -> None:
    """The form of `_CHECKPOINT_METADATA`, which is written here, and which Orbax reads."""
    run, told = tiny_run(), {"note": ["of the user", 1]}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["auc"])
    with cnr.CheckpointManager(
        tmp_path / "ours", tables=run.tables, orbax_options=options
    ) as manager:
        items = ocp.args.Composite(
            state=cnr.args.Save(run.state, run.touched), more=ocp.args.JsonSave({})
        )
        manager.save(1, args=items, metrics={"auc": 1.0}, custom_metadata=told)
    with ocp.CheckpointManager(tmp_path / "theirs", options=options) as theirs:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(run.state), more=ocp.args.JsonSave({})
        )
        theirs.save(1, args=items, metrics={"auc": 1.0}, custom_metadata=told)
    ours, others = (
        json.loads((tmp_path / root / "1" / "_CHECKPOINT_METADATA").read_text())
        for root in ("ours", "theirs")
    )
    assert {k: type(v) for k, v in ours.items()} == {
        k: type(v) for k, v in others.items()
    }
    assert ours["custom_metadata"] == others["custom_metadata"] == told
    assert ours["item_handlers"].keys() == others["item_handlers"].keys()
    assert ours["item_handlers"]["more"] == others["item_handlers"]["more"]
    with ocp.CheckpointManager(tmp_path / "ours", options=options) as plain:
        assert list(plain.all_steps()) == [1] and plain.best_step() == 1
        assert plain.metadata(1).custom_metadata == told
        assert plain.metrics(1) == {"auc": 1.0}


def test_a_save_waits_for_nothing_that_another_one_was_promised(
    tiny_run: Any, tmp_path: Path
) -> None:
    """Handlers of Orbax wait for what was promised under the number of the newest save.

    A plain save of this process that could not make its directories leaves its promise behind.
    """
    run = tiny_run()
    plain = ocp.CheckpointManager(tmp_path / "plain")
    shutil.rmtree(tmp_path / "plain")
    (tmp_path / "plain").write_text("no folder")
    with pytest.raises(Exception, match=r"plain|Not a directory|File exists"):
        plain.save(1, args=ocp.args.JsonSave({}))
        plain.wait_until_finished()
    started = time.monotonic()
    with run.open(tmp_path / "ours") as manager:
        run.train(1)
        items = ocp.args.Composite(
            state=cnr.args.Save(run.state, run.touched), more=ocp.args.JsonSave({})
        )
        assert manager.save(1, args=items)
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
    assert time.monotonic() - started < 60


keeps_tasks = pytest.mark.skipif(
    ocp.__version__ == "0.12.3", reason="it lets go of the task, whatever happens"
)


@keeps_tasks
def test_an_interrupt_in_a_handler_leaves_its_task_on_the_thread() -> None:
    """With the frames that the interrupt went through, and what they hold."""

    async def handler() -> None:
        raise KeyboardInterrupt

    async def save() -> None:
        await asyncio.gather(handler())

    # Not through a manager: what that leaves behind would warn in other tests.
    with pytest.raises(KeyboardInterrupt):
        asyncio_utils.run_sync(save())
    task: Any = threading.current_thread().main_task  # type: ignore[attr-defined]
    assert not task.done() and task.get_loop().is_closed()
    (left,) = [child for child in task._fut_waiter._children if child.done()]
    assert isinstance(left.exception(), KeyboardInterrupt)
    end_interrupted_tasks()
    assert not hasattr(threading.current_thread(), "main_task")


@keeps_tasks
def test_a_second_interrupt_puts_the_task_of_the_first_back() -> None:
    """So that ending one of them is not enough."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def waits() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        await asyncio.sleep(60)

    tasks: list[Any] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            asyncio_utils.run_sync(waits())
        tasks.append(threading.current_thread().main_task)  # type: ignore[attr-defined]
    tasks[1].get_coro().close()
    assert threading.current_thread().main_task is tasks[0]  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        asyncio_utils.run_sync(waits())
    end_interrupted_tasks()
    assert not hasattr(threading.current_thread(), "main_task")
    tasks[1]._log_destroy_pending = False  # it was ended here


@pytest.mark.parametrize("prefix", [None, "ck"])
@pytest.mark.parametrize("length", [None, 3])
def test_orbax_takes_those_folders_for_steps_that_it_would_name_so(
    tmp_path: Path, prefix: str | None, length: int | None
) -> None:
    for lead in ("", "ck_", "notes", "lost+found"):
        for number in ("0", "7", "07", "007", "0007", "1234", "9"):
            (tmp_path / f"{lead}{number}").mkdir()
    given = ocp.CheckpointManagerOptions(
        step_prefix=prefix, step_format_fixed_length=length
    )
    with ocp.CheckpointManager(tmp_path, options=given) as manager:
        found = manager._step_name_format.find_all(tmp_path)
        theirs = {metadata.path.name for metadata in found}
    is_step = step_names(given)
    assert is_step is not None
    assert {p.name for p in tmp_path.iterdir() if is_step(p.name)} == theirs != set()


def test_a_manager_makes_its_paths_from_the_one_it_is_given(tmp_path: Path) -> None:
    """So that it sees what is there as that one does, and handlers are given such paths."""
    with ocp.CheckpointManager(ExactPath(tmp_path)) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        manager.wait_until_finished()
        name_format = ocp.path.step.standard_name_format()
        found = [manager.directory, name_format.find_step(manager.directory, 0).path]
        found += [each.path for each in name_format.find_all(manager.directory)]
    assert len(found) == 3
    assert {type(path) for path in found} == {ExactPath}


def test_a_step_tells_its_states_and_which_of_them_v1_has_saved(tmp_path: Path) -> None:
    state = {"w": jnp.ones(3)}
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        args = ocp.args.Composite(
            a=ocp.args.StandardSave(state),
            b=ocp.args.PyTreeSave(state),
            c=ocp.args.JsonSave({}),
        )
        manager.save(0, args=args)
    with v1.training.Checkpointer(str(tmp_path / "new")) as checkpointer:
        checkpointer.save(0, state)

    def told(step: Path) -> dict[str, bool]:
        note = json.loads((step / "_CHECKPOINT_METADATA").read_text())
        by_v1 = {
            item: handler.startswith("orbax.checkpoint.experimental.v1.")
            for item, handler in note["item_handlers"].items()
        }
        states = {path.parent.name for path in step.glob("*/_METADATA")}
        return {item: v1 for item, v1 in by_v1.items() if item in states}

    assert told(tmp_path / "old" / "0") == {"a": False, "b": False}
    assert list(told(tmp_path / "new" / "0").values()) == [True]


def test_leaves_are_restored_in_the_structure_of_their_metadata_but_for_placeholders(
    tmp_path: Path,
) -> None:
    nothing = {"none": None, "dict": {}, "list": [], "tuple": ()}
    state = {"a": (jnp.ones(3), [1, "text"]), "key": jax.random.key(3), **nothing}
    handler, path = ocp.PyTreeCheckpointHandler(), epath.Path(tmp_path / "item")
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))
    told = handler.metadata(path).tree
    # A key is told as the numbers that it is, and comes back as a key.
    assert told["key"].dtype == np.uint32 and told["a"][0].shape == (3,)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    wanted = {
        **told,
        "a": [jax.ShapeDtypeStruct((3,), np.float32, sharding=device), [0, ""]],
        "key": ocp.PLACEHOLDER,
    }
    asked = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=asked)
    found = handler.restore(path, args=args)
    assert found["a"][1] == [1, "text"] and found["key"] is ocp.PLACEHOLDER
    assert found["a"][0].sharding == device
    asked["key"] = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=device)
    found = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=asked))
    assert (
        jax.random.key_data(found["key"]) == jax.random.key_data(state["key"])
    ).all()


def test_arrays_that_are_not_packed_are_folders_and_as_long_as_these_say(
    tmp_path: Path,
) -> None:
    path = tmp_path / "item"
    leaves = {("a", "b"): np.zeros(1), ("a", "c"): 7}
    save_skeleton(path, leaves, {"told": 1}, None)
    assert (path / array_folder(("a", "b")) / "zarr.json").is_file()
    shutil.rmtree(path / "a.b")
    blocks = [np.arange(2.0), np.arange(1.0)]
    write_array(path / "a.b", (3,), np.dtype(float), blocks, 2, {})
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path)
        told = checkpointer.metadata(path).item_metadata
    assert found["a"]["b"].tolist() == [0, 1, 0] and found["a"]["c"] == 7
    assert told.tree["a"]["b"].shape == (3,)
    assert told.custom_metadata == {"told": 1}


def test_what_arrays_are_opened_with_is_taken_from_two_dicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`as_storage_allows`: there is no public way to have TensorStore not sync, or not lock."""
    device = tmp_path.stat().st_dev
    for known in ("_syncs", "_locks"):
        monkeypatch.setattr(f"cnr_jax.repository.store.local.{known}", {device: False})

    def told(use_ocdbt: bool) -> tuple[Any, Any]:
        made = tensorstore_utils.get_ts_context(use_ocdbt=use_ocdbt)
        found = [made[f"file_io_{key}"].to_json() for key in ("sync", "locking")]
        return found[0], found[1].get("mode", "os")

    for use_ocdbt in (False, True):
        with as_storage_allows(tmp_path / "not there yet"):
            with as_storage_allows(tmp_path):
                assert told(use_ocdbt) == (False, "lockfile")
            assert told(use_ocdbt) == (False, "lockfile")
        assert told(use_ocdbt) == (True, "os")
