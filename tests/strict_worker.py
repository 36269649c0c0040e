"""All that a run does, under settings of jax that are given; started by tests.

Each part is tried, whatever became of those before it, and a line of JSON says of each what it
raised. What is compiled is kept for the process: a part fails only where it is the first to
trace something. So each process has settings of its own, or rows of its own width for each.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

ROWS = 96
# Devices that arrays are split over; a machine with a GPU may have no second one.
ACROSS = min(2, jax.device_count())
# Set by `main`: columns of a table, and what jax is set to while the library is called.
dim = 8
_around_calls: dict[str, Any] = {}
# By table: dtype of its rows, and how they are stored.
TABLES: dict[str, tuple[Any, Any]] = {
    "user": (np.float32, cnr.TableOptions(codec="adaptive", bits=4)),
    "item": (ml_dtypes.bfloat16, cnr.TableOptions(codec="symmetric", bits=4)),
    "word": (np.float32, cnr.TableOptions(codec="kmeans", bits=2)),
    "half": (np.float16, cnr.TableOptions(codec="raw")),
    "greedy": (np.float32, cnr.TableOptions(codec="greedy", bits=3)),
    "plain": (np.float32, cnr.TableOptions(codec="asymmetric", bits=8)),
    "level": (np.float32, cnr.TableOptions(codec="codebook", bits=3)),
}
# Large leaves have programs of their own, and what is small is not cut.
SMALL = {
    "cnr_jax.repository.replay.leaves.SMALL_BYTES": 0,
    "cnr_jax.rows.fingerprints.chunks._AGAIN_ROWS": 8,
    "cnr_jax.rows.fingerprints.chunks._MANY_ROWS": 16,
}

State = Any


def everywhere(given: Any) -> Any:
    """Arrays on all devices."""
    mesh = jax.make_mesh((ACROSS,), ("rows",), (AxisType.Auto,))
    return jax.device_put(given, NamedSharding(mesh, P()))


@contextlib.contextmanager
def library() -> Iterator[None]:
    """What jax is set to for calls of the library, and not for the program around them."""
    before = {name: getattr(jax.config, name) for name in _around_calls}
    with contextlib.ExitStack() as stack:
        for name, value in _around_calls.items():
            stack.callback(jax.config.update, name, before[name])
            jax.config.update(name, value)
        yield


def first_state() -> State:
    """Tables with their moments of Adam, split over two devices, a dense leaf and a counter."""
    mesh = jax.make_mesh((ACROSS,), ("rows",), (AxisType.Auto,))
    rng = np.random.default_rng(3)

    def put(values: np.ndarray, *spec: Any) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    params: dict[str, jax.Array] = {}
    for name, (dtype, _) in TABLES.items():
        rows = rng.normal(size=(ROWS, dim)).astype(dtype)
        rows[:4] = 0
        rows[4:8] = 0.5
        params[name] = put(rows, "rows")

    def like(scale: float) -> dict[str, jax.Array]:
        made = rng.uniform(0, scale, size=(ROWS, dim)).astype(np.float32)
        return {name: put(made, "rows") for name in params}

    slots = optax.ScaleByAdamState(
        count=put(np.zeros((), np.int32)), mu=like(0.1), nu=like(0.01)
    )
    return {
        "params": params,
        "opt_state": (slots,),
        "dense": put(np.ones((3, 4), np.float32)),
        "key": jax.random.wrap_key_data(
            put(np.array([1, 2], np.uint32)), impl="threefry2x32"
        ),
        "step": 3,
    }


def changed(state: State, ids: jax.Array) -> State:
    """The rows of these ids, and their slots, moved."""
    parts = ("params", "opt_state")
    moved = moving({part: state[part] for part in parts}, ids)
    return {**state, **moved}


@jax.jit
def moving(state: State, ids: jax.Array) -> State:
    """The train step of `changed`."""

    def move(leaf: jax.Array) -> jax.Array:
        rows = leaf.at[ids].get(mode="clip")
        return leaf.at[ids].set(rows + jnp.asarray(0.25, leaf.dtype))

    (slots,) = state["opt_state"]
    slots = slots._replace(
        mu=jax.tree.map(move, slots.mu), nu=jax.tree.map(move, slots.nu)
    )
    return {"params": jax.tree.map(move, state["params"]), "opt_state": (slots,)}


def ids_of(step: int) -> jax.Array:
    """The rows that change in a step, put where the tables are, as strict settings want it."""
    ids = np.random.default_rng(step).integers(0, ROWS, 7).astype(np.int32)
    return everywhere(ids)


def values(state: State) -> list[np.ndarray]:
    """All leaves on the host."""
    plain = [
        jax.random.key_data(leaf)
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        else leaf
        for leaf in jax.tree.leaves(state)
    ]
    return [np.asarray(each, np.float32) for each in jax.device_get(plain)]


def same(got: State, want: State) -> None:
    """All values, as far as codecs of few bits keep them."""
    for a, b in zip(values(got), values(want), strict=True):
        np.testing.assert_allclose(a, b, atol=0.9)


def saves(root: Path, tracking: Any, staging: Any) -> None:
    """A full save and deltas, and restores of them in several ways."""
    state = first_state()
    tables = cnr.find_tables(state, list(TABLES))
    assert all(len(table.slots) == 2 for table in tables.values())
    own = {name: each for name, (_, each) in TABLES.items()}
    # What there are few tables for is to be quick: each codec is compiled for each device.
    rounded = staging == "device" and len(TABLES) > 2
    options = cnr.Options(
        policy=cnr.Consecutive(),
        slot_codec="auto" if rounded else "raw",
        compression="zstd" if staging == "device" else None,
        tables=own,
        tracking=tracking,
        staging=staging,
    )
    touched = None
    if tracking != "fingerprint":
        touched = cnr.init_touched(state, tables)
    kinds: list[str] = []
    with library():
        manager = cnr.CheckpointManager(root, tables=tables, options=options)
    with manager:
        for step in range(3):
            ids = ids_of(step)
            if touched is not None:
                touched = cnr.record(touched, {name: ids for name in tables})
            state = changed(state, ids)
            with library():
                manager.save(step, args=cnr.args.Save(state, touched))
                manager.wait_until_finished()
            report = manager.last_report
            kinds.append(report.kind)
            # Where the program that reads rows back cannot run, a line at DEBUG is all there is.
            assert report.sample_rows, report
        with library():
            got, touched = manager.restore(None, args=cnr.args.Restore(state))
        same(got, state)
        ids = ids_of(3)
        if tracking == "fingerprint":
            touched = None
        else:
            touched = cnr.record(touched, {name: ids for name in tables})
        got = changed(got, ids)
        with library():
            manager.save(3, args=cnr.args.Save(got, touched))
            manager.wait_until_finished()
    assert kinds == ["full", "delta", "delta"], kinds
    with library(), cnr.CheckpointManager(root, tables=tables) as reader:
        found = reader.restore(2).state
    same(found, state)


def records(root: Path) -> None:
    """`record` within a train step, of masked, ragged and wide ids, and as debugging wants it."""
    state = first_state()
    tables = cnr.find_tables(state, list(TABLES))
    touched = cnr.init_touched(state, tables)
    one, two = list(tables)[:2]
    ids, mask = everywhere((np.zeros((4, 3), np.int32), np.ones((4, 1), bool)))
    flat, splits = everywhere((np.arange(6, dtype=np.int16), np.arange(3)))

    # Given, as jax copies arrays that a program refers to from a GPU to the host.
    @jax.jit
    def step(touched: cnr.Touched, ids: Any, mask: Any, flat: Any, splits: Any) -> Any:
        touched = cnr.record(touched, {one: cnr.Lookup(ids, where=mask)})
        touched = cnr.record(touched, {two: cnr.Lookup(flat, row_splits=splits)})
        return cnr.record(touched, {one: [ids, flat]}, check=True)

    touched = step(touched, ids, mask, flat, splits)
    touched = cnr.record(touched, {two: cnr.Lookup(ids, where=mask)}, check=True)
    jax.effects_barrier()
    cnr.reset_touched(touched)
    state = {"user": state["params"][one]}
    layout = cnr.ModSharded(shards=2, rows_per_shard=ROWS // 2)
    tables = cnr.find_tables(state, {"user": cnr.TableSpec(layout=layout)})
    touched = cnr.init_touched(state, tables)
    jax.jit(cnr.record)(touched, {"user": ids})


def updates(root: Path, make: Any) -> None:
    """A row optimizer, by itself and below optax."""
    params, ids = first_state()["params"], ids_of(0)
    optimizer = make(0.1)
    tx = cnr.optim.as_optax(optimizer)

    @jax.jit
    def step(params: Any, slots: Any, ids: jax.Array) -> Any:
        def loss(rows: Any) -> jax.Array:
            every = jax.tree.leaves(rows)
            return sum(jnp.sum(each.astype(jnp.float32) ** 2) for each in every)

        grads = jax.grad(loss)({name: table[ids] for name, table in params.items()})
        every = dict.fromkeys(params, ids)
        where = dict.fromkeys(params, jnp.ones(ids.shape, bool))
        params, slots = optimizer.update(grads, every, params, slots, where=where)
        steps, slots = tx.update(params, slots, params, ids=every)
        moved = cnr.optim.moved_rows(steps)
        return optax.apply_updates(params, steps), slots, moved

    step(params, optimizer.init(params), ids)


def reads(root: Path) -> None:
    """What reads a root beside a restore, and what decides on codecs."""
    root = root / "saved"
    state = first_state()
    tables = cnr.find_tables(state, list(TABLES))
    options = cnr.Options(policy=cnr.Consecutive(), bits=4)
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
        state = changed(state, ids_of(0))
        manager.save(1, args=cnr.args.Save(state))
    cnr.read_rows(root, "user", np.arange(9), slots=True)
    cnr.changed_rows(root, 1, "user")
    assert not cnr.verify(root)
    cnr.describe(root)
    for form in ("orbax", "safetensors", "zarr"):
        cnr.export(root, 1, root.with_name(form), form)
    with ocp.CheckpointManager(root.with_name("plain")) as plain:
        plain.save(1, args=ocp.args.StandardSave(state))
    cnr.import_orbax(root.with_name("plain"), root.with_name("imported"), list(TABLES))
    own = {"user": cnr.TableOptions(codec="greedy", bits=4)}
    cnr.tune(state, tables, cnr.Options(bits=4, tables=own))
    taken = np.arange(ROWS)[::-1].copy()
    moved = cnr.args.Restore(state, ids={"user": taken}, partial=True)
    with cnr.CheckpointManager(root, tables=tables) as reader:
        reader.restore(1, args=moved)
    imported = root.with_name("imported")
    with cnr.CheckpointManager(imported, tables=tables) as reader:
        reader.restore(None)


def tries(root: Path) -> None:
    """Widths by a metric, before and after some steps."""
    state = first_state()
    cnr.try_bits(
        state,
        cnr.find_tables(state, list(TABLES)),
        jax.jit(lambda state: jax.tree.map(jnp.sum, state["params"])),
        better=dict.fromkeys(TABLES, "lower"),
        bits=[4, "raw"],
        seeds=2,
        options=cnr.Options(codec="asymmetric", rounding="dithered"),
        train=lambda state, seed: changed(state, ids_of(seed)),
        restores=2,
    )


def odd_rows(root: Path) -> None:
    """Rows that are not finite, which a codec stores as they are, and rows of zeros."""
    rows = np.zeros((ROWS, dim), np.float32)
    rows[1], rows[2], rows[3, 2] = np.nan, np.inf, -np.inf
    state = {"user": jax.device_put(rows)}
    tables = cnr.find_tables(state, ["user"])
    for staging in ("host", "device"):
        options = cnr.Options(codec="asymmetric", bits=8, staging=staging)
        here = root / staging
        with (
            library(),
            cnr.CheckpointManager(here, tables=tables, options=options) as manager,
        ):
            manager.save(0, args=cnr.args.Save(state))
            manager.save(1, args=cnr.args.Save(state))
            got = manager.restore(0, args=cnr.args.Restore(state)).state
        np.testing.assert_array_equal(jax.device_get(got["user"]), rows)


def parts() -> dict[str, Callable[[Path], None]]:
    """What is tried, by name."""
    found: dict[str, Callable[[Path], None]] = {"records": records}
    for tracking in ("fingerprint", "recorded", "audited"):
        for staging in ("host", "device"):
            found[f"{tracking} {staging}"] = functools.partial(
                saves, tracking=tracking, staging=staging
            )
    for make in (cnr.optim.rowwise_adagrad, cnr.optim.lazy_adam, cnr.optim.lazy_sgd):
        found[make.__name__] = functools.partial(updates, make=make)
    found |= {"reads": reads, "tries": tries, "odd rows": odd_rows}
    return found


@contextlib.contextmanager
def set_to(settings: dict[str, Any], how: str) -> Iterator[None]:
    """Sets jax as told.

    Args:
        settings: by name.
        how: `"everywhere"`: for all threads; `"here"`: for this one, as context managers do;
            `"calls"`: for all threads, while the library is called.
    """
    for name in settings.keys() & {"jax_default_device"}:
        settings[name] = [*jax.devices(), *jax.devices("cpu")][settings[name]]
    # A newer jax has some no longer.
    settings = {n: v for n, v in settings.items() if hasattr(jax.config, n)}
    with contextlib.ExitStack() as stack:
        if how == "here":
            for name, value in settings.items():
                context = getattr(jax, name.removeprefix("jax_"))
                stack.enter_context(context(value))
        _around_calls.clear()
        _around_calls.update(settings if how != "here" else {})
        if how == "everywhere":
            stack.enter_context(library())
            _around_calls.clear()
        yield


def tried(
    folder: str,
    settings: dict[str, Any],
    how: str = "everywhere",
    wanted: Sequence[str] = (),
    tables: Sequence[str] = (),
    width: int = 8,
) -> int:
    """Tries parts of some tables, all unless told; returns how many failed."""
    global dim
    dim, failed = width, 0
    for name in TABLES.keys() - set(tables or TABLES):
        del TABLES[name]
    with set_to(settings, how):
        for name, work in parts().items():
            if wanted and name not in wanted:
                continue
            said = {"settings": str(settings), "part": name, "error": None}
            try:
                work(Path(tempfile.mkdtemp(dir=folder)) / "root")
            except Exception as error:
                failed += 1
                said["error"] = f"{type(error).__name__}: {error}"
                said["trace"] = traceback.format_exc()
            print(json.dumps(said), flush=True)
    return failed


def main(runs: list[dict[str, Any]]) -> int:
    """Does one run after the other; each is the arguments of `tried`."""
    for name, value in SMALL.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    with tempfile.TemporaryDirectory() as folder:
        return sum(tried(folder, **run) for run in runs)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])) > 0)
