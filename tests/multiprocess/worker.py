"""One process of a run of one or two, each with four CPU devices; started by the tests.

Trains two tables that span all processes, saves after every step, and writes what it ends with.
Which rows a step changes depends on the step only, so runs on any number of processes agree bit
for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
import cnr_jax.checkpointer.saving.capture
import cnr_jax.checkpointer.saving.dense
import cnr_jax.handler
from cnr_jax.checkpointer.orbax_compat.distributed import distributed_client
from cnr_jax.checkpointer.saving.retirement import Retirement
from cnr_jax.format.fields import dump_document
from cnr_jax.repository.committer import RenameCommitter
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Call

ROWS = {"user": 512, "item": 128}
# Also a table that `bits="auto"` takes for small, whole on every device.
WITH_SMALL = {**ROWS, "kind": 4}
FOREVER_SECS = 600.0


class Run:
    """The train state on this run's mesh, and one train step.

    Args:
        rows: of each table; it is sharded where they can be dealt out to all devices evenly.
    """

    def __init__(self, rows: Mapping[str, int] = ROWS) -> None:
        self._rows = rows
        devices = jax.device_count()
        self.mesh = jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,))
        self.state = self._fresh()
        self.tables = cnr.find_tables(self.state, list(rows))
        self.touched = cnr.init_touched(self.state, self.tables)
        self._step = jax.jit(self._arrays_after, donate_argnums=(0, 1))

    def put(self, values: np.ndarray, *spec: Any) -> jax.Array:
        sharding = NamedSharding(self.mesh, P(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])

    def _fresh(self) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        tables = {
            k: rng.normal(size=(n, 8)).astype(np.float32) for k, n in self._rows.items()
        }
        spec = {
            k: "rows" if n % jax.device_count() == 0 else None
            for k, n in self._rows.items()
        }
        return {
            "params": {
                k: {"embedding": self.put(v, spec[k])} for k, v in tables.items()
            },
            # One slot is sharded like its table, the other lies on every device.
            "sharded": {
                k: {"embedding": self.put(np.zeros(n, np.float32), spec[k])}
                for k, n in self._rows.items()
            },
            "replicated": {
                k: {"embedding": self.put(np.zeros((n, 2), np.float32))}
                for k, n in self._rows.items()
            },
            "w": self.put(np.ones((8, 3), np.float32), "rows"),
            "everywhere": self.put(np.arange(5, dtype=np.float32)),
            "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
            "counter": jnp.int32(0),
            "scale": np.float32(0.5),
            "step": 0,
            "rate": 0.25,
            "done": False,
            "name": "run of several processes",
            "nothing": None,
        }

    @staticmethod
    def _arrays_after(arrays: Any, touched: cnr.Touched, ids: Any, change: Any) -> Any:
        touched = cnr.record(touched, ids)
        new: dict[str, Any] = {"params": {}, "sharded": {}, "replicated": {}}
        for k, rows in ids.items():
            table, sharded, replicated = (arrays[n][k]["embedding"] for n in new)
            step = change * jnp.sin(table[rows])
            new["params"][k] = {"embedding": table.at[rows].add(step)}
            new["sharded"][k] = {"embedding": sharded.at[rows].add(change)}
            new["replicated"][k] = {"embedding": replicated.at[rows].add(2 * change)}
        return {**new, "w": arrays["w"] + change}, touched

    def train(self, step: int) -> None:
        rng = np.random.default_rng(step)
        # Distinct rows, so that no order of additions can show.
        ids = {
            k: rng.choice(n, min(n, 17), replace=False).astype(np.int32)
            for k, n in self._rows.items()
        }
        arrays = {k: self.state[k] for k in ("params", "sharded", "replicated", "w")}
        placed = {k: self.put(v) for k, v in ids.items()}
        change = self.put(np.float32(1 + step / 4))
        arrays, self.touched = self._step(arrays, self.touched, placed, change)
        key = jax.random.split(self.state["key"])[0]
        counter = self.state["counter"] + 1
        new = {"key": key, "counter": counter, "step": step, "rate": 0.25 / (step + 1)}
        self.state = {**self.state, **arrays, **new}

    def changed_unrecorded(self, table: str, row: int) -> dict[str, Any]:
        """The tables, with one row changed behind the back of `record`."""
        params = self.state["params"]
        changed = jax.jit(lambda x: x.at[row].add(1))(params[table]["embedding"])
        return {**params, table: {"embedding": changed}}

    def small_table(self) -> np.ndarray:
        """The whole table that is not sharded, as this process has it."""
        return np.asarray(self.state["params"]["kind"]["embedding"].addressable_data(0))

    def values(self) -> dict[str, np.ndarray]:
        """Every leaf as a numpy array, global ones gathered; alike on every process."""
        found = {}
        for path, leaf in jax.tree.leaves_with_path(self.state):
            if isinstance(leaf, jax.Array):
                if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    leaf = jax.random.key_data(leaf)
                if not leaf.is_fully_addressable:
                    leaf = multihost_utils.process_allgather(leaf, tiled=True)
            found[jax.tree_util.keystr(path)] = np.asarray(leaf)
        return found


# What a save opens when all rows of its process, and when all of it is written.
WRITTEN = {"rows": "/manifest.p", "manifest": "/manifest.json"}


def before_written(root: str, work: Callable[[str, str], None]) -> None:
    """From now on works before a save opens such a file, given its step's folder, and which."""

    def before(call: Call) -> None:
        for where, name in WRITTEN.items():
            if call.call == "open" and name in call.path:
                work(Path(call.path).parents[1].name, where)

    watch.enter_context(inprocess.watching(root, before=before))


watch = contextlib.ExitStack()


def hold_at(root: str, step: int, where: str) -> None:
    """Makes this process stand still in the middle of the save of `step`."""

    def hold(folder: str, reached: str) -> None:
        if (folder.split(".")[0], reached) == (str(step), where):
            time.sleep(FOREVER_SECS)

    before_written(root, hold)


class Faults:
    """Makes chosen saves fail in this process.

    Args:
        text: `step:where:process` for each fault, separated by commas.
        root: that is saved to.
    """

    def __init__(self, text: str | None, root: str | Path) -> None:
        found = [fault.split(":") for fault in (text or "").split(",") if fault]
        here = str(jax.process_index())
        self._faults = {int(s): where for s, where, process in found if process == here}
        self.hit: list[str] = []
        self._step = -1
        for where, (owner, name) in PLACES.items():
            setattr(owner, name, self._failing(getattr(owner, name), where))
        before_written(str(root), lambda _, where: self._strike(where, f"kill {where}"))

    def begin(self, step: int) -> None:
        """From now on what is called belongs to the save of this step, until the next."""
        self._step = step

    def _failing(self, work: Callable[..., Any], where: str) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            self._strike(where)
            return work(*args, **kwargs)

        return failing

    def _strike(self, *places: str) -> None:
        """Does what is to happen at one of these places in the save that goes on."""
        where = self._faults.get(self._step)
        if where not in places:
            return
        self.hit.append(f"{self._step} {where}")
        if where.startswith("hang"):
            time.sleep(FOREVER_SECS)
        if where.startswith("kill"):
            time.sleep(1)  # what is before training goes on is not for us
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, f"at {where}")


PLACES = {
    "gather": (cnr_jax.checkpointer.saving.capture, "Rows"),
    "dense": (cnr_jax.checkpointer.saving.dense, "bytes_of"),
    "directories": (RenameCommitter, "prepare"),
    "rename": (RenameCommitter, "publish"),
    "deletion": (Retirement, "remove"),
    "open": (cnr_jax.handler.CnrHandler, "open"),
    "hang prepare": (cnr_jax.handler.CnrHandler, "plan"),
}


def brief(error: cnr.errors.SaveError) -> str:
    """What must be the same on all processes, and where it was raised first."""
    lines = str(error).splitlines()
    return (
        f"{error.kind} process={error.process} errno={error.errno} {lines[1].strip()}"
    )


def train_and_save(
    manager: cnr.CheckpointManager, run: Run, steps: range, faults: Faults
) -> list[str]:
    """Goes on after saves that failed; returns what was raised, where."""
    lines: list[str] = []
    for step in steps:
        run.train(step)
        faults.begin(step)
        try:
            assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
        except cnr.errors.SaveError as error:
            lines.append(f"{step}: {brief(error)}")
            if error.kind == "process_silent":
                break
        while manager.is_saving_in_progress():  # what fails must belong to this step
            time.sleep(0.01)
    return lines


def save_and_only_look(
    manager: cnr.CheckpointManager, run: Run, steps: range, faults: Faults
) -> list[str]:
    """After each save calls nothing before it is known what became of it; returns that."""
    lines: list[str] = []
    for step in steps:
        run.train(step)
        faults.begin(step)
        args = cnr.args.Save(run.state, run.touched)
        try:
            saved = manager.save(step, args=args)
        except cnr.errors.SaveError as error:
            lines.append(f"{step}: raised that of {error.step}")
            saved = manager.save(step, args=args)
        assert saved
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            report, failure = manager.last_report, manager.failure
            if report is not None and report.step == step:
                lines.append(
                    f"{step}: {report.kind} {report.rows} {report.table_bytes}"
                )
                break
            if isinstance(failure, cnr.errors.SaveError) and failure.step == step:
                lines.append(f"{step}: {brief(failure)}")
                break
            time.sleep(0.01)
    return lines


def save_back_to_back(manager: cnr.CheckpointManager, run: Run, first: int) -> str:
    """Leaves out saves that are due while one is being written; ends with one that is not."""
    manager._progress._skips = True
    saved: list[bool] = []
    for step in range(first, first + 6):
        run.train(step)
        saved.append(manager.save(step, args=cnr.args.Save(run.state, run.touched)))
    run.train(first + 6)
    args = cnr.args.Save(run.state, run.touched)
    assert manager.save(first + 6, args=args, force=True)
    manager.wait_until_finished()
    return f"back to back {saved}"


def save_in_few_bits(root: Path) -> list[str]:
    """A run that is restored, while its processes expect different numbers of restores."""
    run = Run(WITH_SMALL)
    options = cnr.Options(
        codec="asymmetric",
        bits="auto",
        expected_restores=[0.5, 100][jax.process_index()],
        policy=cnr.Consecutive(),
        timeout_secs=60,
    )
    lines = []
    with cnr.CheckpointManager(root, tables=run.tables, options=options) as manager:
        for step in range(2):
            run.train(step)
            assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
            manager.wait_until_finished()
            assert manager.latest_step() == step
            report = manager.last_report
            assert report is not None
            saved = run.small_table()
            args = cnr.args.Restore(run.state)
            run.state, run.touched = manager.restore(step, args=args)
            got = run.small_table()
            # A step of 8 bits over numbers up to 3.25, which dithered codes may be off by.
            np.testing.assert_allclose(got, saved, rtol=0, atol=0.026)
            line = f"{report.kind} {report.restores} {report.auto_bits}"
            lines.append(f"{line} of {got.ravel().tolist()}")
    return [*lines, *(go_on_in_few_bits(root, run, step) for step in (2, 3))]


def go_on_in_few_bits(root: Path, run: Run, step: int) -> str:
    """The same run without options; at last its manifests are of a writer that told none."""
    if step == 3 and jax.process_index() == 0:
        for path in root.glob("*/default/manifest.json"):
            document = json.loads(path.read_bytes())
            del document["sha256"], document["encoding"]
            path.write_bytes(dump_document(document))
    multihost_utils.sync_global_devices(f"rewritten {step}")
    options = cnr.Options(timeout_secs=60)
    with cnr.CheckpointManager(root, tables=run.tables, options=options) as manager:
        run.state, run.touched = manager.restore(None, args=cnr.args.Restore(run.state))
        args = cnr.args.Save(run.state, run.touched, full=True)
        assert manager.save(step, args=args)
        manager.wait_until_finished()
        report = manager.last_report
        assert report is not None
        return f"{report.kind} {report.auto_bits} of {' '.join(report.inherited)}"


def keys_left() -> int:
    """How many keys of ours the processes have left in their store."""
    client = distributed_client()
    return len(client.key_value_dir_get("cnr_jax/"))


def train_until_preempted(manager: cnr.CheckpointManager, run: Run) -> list[str]:
    """Saves when it is due: at first, and before the end."""
    for step in itertools.count():
        run.train(step)
        saved = manager.save(step, args=cnr.args.Save(run.state, run.touched))
        if manager.reached_preemption(step):
            return [f"last {step} {saved} {manager.latest_step()}"]
        time.sleep(0.05)
    raise AssertionError


def refused(save: Callable[[], Any]) -> str:
    """The error of a save, in one line."""
    try:
        save()
    except cnr.errors.CnrError as error:
        text = f"{type(error).__name__} {error.kind} {error}"
        return text.replace("\n", " | ")
    return "not refused"


def try_bad_saves(manager: cnr.CheckpointManager, run: Run, step: int) -> list[str]:
    """Saves that one process alone gets wrong, each in its own way."""
    here = jax.process_index()
    good, touched = run.state, run.touched
    wrong = [
        dict(good, counter=jnp.int32(100 + here)),
        dict(good, key=jax.random.key(here)),
        dict(good, step=1000 + here),
        dict(good, name=f"process {here}"),
        dict(good, scale=np.float32(here)),
        dict(good, **({"extra": 1} if here else {})),
        # Row 500 lies on the devices of process 1, which alone sees that it changed.
        dict(good, params=run.changed_unrecorded("user", 500)),
        # Process 1 alone sees that its state is not the one of the tables.
        dict(good, params={"user": good["params"]["user"]} if here else good["params"]),
    ]
    found = [
        refused(lambda s=s: manager.save(step, args=cnr.args.Save(s, touched)))
        for s in wrong
    ]
    found.append(
        refused(
            lambda: manager.save(
                step, args=cnr.args.Save(good, None if here else touched)
            )
        )
    )
    for name in ("full", "exact"):
        asked = cnr.args.Save(good, touched, **{name: not here})
        found.append(refused(lambda args=asked: manager.save(step, args=args)))
    return found


def try_bad_restore(manager: cnr.CheckpointManager, run: Run) -> str:
    """A restore into a state that is wrong on process 1 alone."""
    wrong = {**run.state, "rate": np.zeros(3)} if jax.process_index() else run.state
    return refused(lambda: manager.restore(None, args=cnr.args.Restore(wrong)))


def tuned(run: Run) -> str:
    """What all processes tune together, and what each of them logs about it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("cnr_jax.checkpointer.tuning")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    options = cnr.tune(run.state, run.tables, cnr.Options(bits=2))
    return "\n".join([*said, str({k: v.codec for k, v in options.tables.items()})])


def tried(run: Run) -> str:
    """What widths make of the tables of all processes, by a metric of both."""
    distance = jax.jit(lambda a, b: jax.numpy.abs(a - b).mean())

    def far(state: Any) -> dict[str, Any]:
        params, own = state["params"], run.state["params"]
        return {
            # Process 1 has another figure: that of process 0 counts on both.
            name: distance(params[name]["embedding"], own[name]["embedding"])
            * (1 + jax.process_index())
            for name in params
        }

    found = cnr.try_bits(
        run.state,
        run.tables,
        far,
        better={"user": "lower", "item": "lower"},
        bits=[2, "raw"],
        seeds=2,
        options=cnr.Options(codec="asymmetric", rounding="dithered"),
    )
    return "\n".join(
        f"{each.bits}: {each.table_bytes} {each.slot_bytes} {each.mean_row_error or 0:.4g}"
        f" {[f'{x:.4g}' for loss in each.losses.values() for x in loss.values]}"
        for each in found.widths
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--stop", type=int, required=True)
    parser.add_argument("--policy", default="consecutive")
    parser.add_argument("--tracking")
    parser.add_argument("--compression")
    parser.add_argument("--hold-step", type=int)
    parser.add_argument("--hold-where", choices=["rows", "manifest"])
    parser.add_argument("--hold-process", type=int)
    parser.add_argument("--bad-saves", action="store_true")
    parser.add_argument("--bad-restore", action="store_true")
    parser.add_argument("--few-bits", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--faults")
    parser.add_argument("--only-look", action="store_true")
    parser.add_argument("--until-preempted", action="store_true")
    parser.add_argument("--timeout-secs", type=float, default=60.0)
    parser.add_argument("--keep", type=int)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    if args.processes > 1:
        address = f"127.0.0.1:{args.port}"
        jax.distributed.initialize(address, args.processes, args.process)
    if args.hold_step is not None and args.hold_process == args.process:
        hold_at(args.root, args.hold_step, args.hold_where)
    run = Run()
    policies = {"consecutive": cnr.Consecutive(), "one_shot": cnr.OneShot()}
    heard: list[int] = []
    keep = args.keep and ocp.checkpoint_managers.LatestN(args.keep)
    options = cnr.Options(
        codec="raw",
        policy=policies[args.policy],
        tracking=args.tracking,
        compression=args.compression,
        timeout_secs=args.timeout_secs,
        preservation_policy=keep,
        on_save=lambda report: heard.append(report.step),
    )
    if args.tune:
        Path(f"{args.out}.{args.process}.tuned").write_text(tuned(run))
        Path(f"{args.out}.{args.process}.tried").write_text(tried(run))
    interval = 1000 if args.until_preempted else 1
    lines: list[str] = []
    with cnr.CheckpointManager(
        args.root,
        tables=run.tables,
        options=options,
        orbax_options=ocp.CheckpointManagerOptions(save_interval_steps=interval),
    ) as manager:
        if args.bad_restore:
            lines.append(try_bad_restore(manager, run))
        start, latest = 0, manager.latest_step()
        if latest is not None:
            run.state, run.touched = manager.restore(
                None, args=cnr.args.Restore(run.state)
            )
            start = run.state["step"] + 1
        lines.append(f"restored {latest}, starts at {start}")
        if args.faults:
            faults = Faults(args.faults, args.root)
            goes_on = save_and_only_look if args.only_look else train_and_save
            lines += goes_on(manager, run, range(start, args.stop), faults)
            lines.append(f"hit {', '.join(faults.hit)}")
            if any("process_silent" in line for line in lines):
                Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))
                os._exit(0)  # jax would wait for the other process
            manager.wait_until_finished()
            lines.append(f"heard {heard}")
            lines.append(save_back_to_back(manager, run, args.stop))
            assert keys_left() < 20
        elif args.until_preempted:
            lines += train_until_preempted(manager, run)
        for step in range(
            start, 0 if args.faults or args.until_preempted else args.stop
        ):
            run.train(step)
            touched = None if args.tracking == "fingerprint" else run.touched
            assert manager.save(step, args=cnr.args.Save(run.state, touched))
        manager.wait_until_finished()
        if args.bad_saves:
            lines += try_bad_saves(manager, run, args.stop)
            # Nothing is out of step afterwards: the next good save works.
            run.train(args.stop)
            assert manager.save(args.stop, args=cnr.args.Save(run.state, run.touched))
        manager.wait_until_finished()
        if args.few_bits:
            lines += save_in_few_bits(args.few_bits)
        lines.append(f"latest {manager.latest_step()}")
        if args.faults or args.until_preempted:
            truth = run.values()
            run.state, run.touched = manager.restore(
                None, args=cnr.args.Restore(run.state)
            )
            for path, value in run.values().items():
                np.testing.assert_array_equal(value, truth[path], err_msg=path)
    np.savez(f"{args.out}.{args.process}.npz", **run.values())
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
