"""Writes the frozen checkpoints that later versions must still read. Not run by tests.

    python tests/data/generate.py v1
    python tests/data/generate.py v1-zstd
    python tests/data/generate.py v1-rollback
    python tests/data/generate.py v1-errors
    python tests/data/generate.py v1-encoding
    python tests/data/generate.py v1-motion
    python tests/data/generate.py v1-dense
    python tests/data/generate.py v1-blosc
    python tests/data/generate.py v1-sums
    python tests/data/generate.py v1-crc32-sums

The first writes `tests/data/v1/root/`, three steps that rest on each other, and
`tests/data/v1/expected.npz`: what was saved (`truth/...`) and what it must restore to
(`restored/...`), both as bits. The second writes the first of these steps, its arrays compressed;
the third goes back to the first step before it saves the last; the fourth writes the first two,
with manifests that say how far off rounded rows are; the fifth the first, with a codec of its own
for one table, in a manifest that says so; the sixth the first two, with so many rows that move that
manifests say how far, and a rounding that was asked for; the seventh the first two, with dense
leaves of every kind, as tiles; the eighth the first, compressed, its numbers of several bytes by
blosc, as the second would be today; the ninth three steps of another state, of one process and
device, whose table and slots are sums of integers; the tenth the same three, with CRC-32s of what
is added to. In the first six Orbax has written the dense leaves, and they can only be written by
versions of the library from before it stored them as tiles; the ninth by those from before CRC-32s.
What is written once stays: a folder that exists is refused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.rows.codecs import Asymmetric

STEPS = (10, 20, 30)
SUMS_ROWS = 256
# Logical rows recorded before each step: row ids as gaps of one and two bytes, as bitmaps, as
# none; and rows of one table only.
TOUCHED = {
    10: {"user": [0, 1], "item": [3]},
    20: {"user": [2, 5, 6, 150, 310], "item": [0, 4, 14]},
    30: {"user": [5, 7], "item": []},
}
USER_ROWS = 320
# The last of 16 stored rows is padding.
ITEM_ROWS = 15
ITEM_LAYOUT = cnr.ModSharded(shards=2, rows_per_shard=8)


def first_state(peaked: bool = False, more: bool = False) -> dict[str, Any]:
    """Two tables over two devices, one with a slot, and a dense leaf of every kind.

    Args:
        peaked: some codes are much more frequent than others, and most slots are zeros.
        more: with further dense leaves, of other shardings, dtypes and kinds.
    """
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)

    def sharded(values: np.ndarray, dtype: Any) -> jax.Array:
        spec = P("rows", *[None] * (values.ndim - 1))
        return jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, spec))

    user = rng.normal(size=(USER_ROWS, 8)).astype(np.float32)
    user = user**5 if peaked else user
    user[3, 2] = np.nan
    user[9] = 0
    start = 0.0 if peaked else 1.0
    columns = NamedSharding(mesh, P(None, "rows"))
    values = {
        "by_rows": sharded(rng.normal(size=(8, 6)), jnp.bfloat16),
        "by_columns": jax.device_put(
            np.arange(24, dtype=np.int32).reshape(4, 6), columns
        ),
        "on_both": jax.device_put(jnp.ones(8), NamedSharding(mesh, P())),
        "of_numpy": rng.normal(size=(2, 3)),
        "number_of_numpy": np.uint16(65_000),
        "keys": jax.random.split(jax.random.key(8), 4),
        "other_key": jax.random.key(9, impl="rbg"),
        "flag": True,
        "negative": -5,
        "large": 2**63 + 1,
        "no_dimension": jnp.float32(0.5),
    }
    return {
        **({"more": values} if more else {}),
        "params": {
            "user": {"embedding": sharded(user, jnp.float32)},
            "item": {"embedding": sharded(rng.normal(size=(16, 8)), jnp.bfloat16)},
            "dense": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32),
        },
        "opt": {
            "user": {"embedding": sharded(rng.random(USER_ROWS) * start, jnp.float32)}
        },
        "key": jax.random.key(7),
        "step": 0,
        "rate": 0.125,
        "name": "frozen",
    }


def touched_at(step: int, kind: str) -> dict[str, list[int]]:
    """Rows recorded before a step."""
    found = dict(TOUCHED[step])
    if kind == "motion":
        found["user"] = [*found["user"], *range(40, 80)]
    return found


def next_state(
    state: dict[str, Any], step: int, touched: dict[str, list[int]]
) -> dict[str, Any]:
    """The state at `step`: rows that were touched have moved, and all dense leaves."""
    rng = np.random.default_rng(step)
    params = dict(state["params"])
    accumulator = state["opt"]["user"]["embedding"]
    for name, ids in touched.items():
        table = params[name]["embedding"]
        values = rng.normal(size=(len(ids), 8)).astype(np.float32)
        if step == 20 and name == "user":
            values[1, 7] = np.inf  # escaped in a delta, and replaced by the next one
        index = jnp.asarray(ids, jnp.int32)
        index = ITEM_LAYOUT.to_physical(index) if name == "item" else index
        moved = table.at[index].set(values.astype(table.dtype))
        params[name] = {"embedding": moved}
        if name == "user":
            accumulator = accumulator.at[index].add(1)
    params["dense"] = params["dense"] + step
    return {
        **state,
        "params": params,
        "opt": {"user": {"embedding": accumulator}},
        "key": jax.random.fold_in(state["key"], step),
        "step": step,
        "rate": state["rate"] / 2,
        "name": f"frozen at {step}",
    }


def tables_of(state: dict[str, Any]) -> cnr.Tables:
    """The tables of such a state; `item` is dealt round robin over two shards."""
    item = cnr.TableSpec(path="params/item", rows=ITEM_ROWS, layout=ITEM_LAYOUT)
    return cnr.find_tables(state, {"user": "params/user", "item": item})


def as_bits(leaf: Any) -> np.ndarray:
    """A leaf as npz can hold it exactly."""
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array
    return np.asarray(leaf)


def flatten(state: Any, prefix: str) -> dict[str, np.ndarray]:
    """All leaves by path, below a prefix."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        f"{prefix}/{jax.tree_util.keystr(path, simple=True, separator='/')}": as_bits(
            leaf
        )
        for path, leaf in leaves
    }


def generate(folder: Path) -> None:
    """Writes root and expected values below a folder that must not exist."""
    folder.mkdir(parents=True)
    _, _, kind = folder.name.partition("-")
    compression = "zstd" if kind in ("zstd", "blosc") else ""
    few = {"zstd": 1, "blosc": 1, "errors": 2, "encoding": 1, "motion": 2, "dense": 2}
    steps = STEPS[: few.get(kind, 3)]
    own = cnr.TableOptions(codec=Asymmetric(refits=7), slot_codec="bfloat16")
    state = first_state(peaked=bool(compression), more=kind == "dense")
    tables = tables_of(state)
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(
        policy=cnr.Consecutive(),
        codec="adaptive",
        bits=4,
        compression=compression or None,
        tables={"item": own} if kind == "encoding" else {},
        rounding="nearest" if kind == "motion" else None,
    )
    expected: dict[str, np.ndarray] = {}
    with cnr.CheckpointManager(
        folder / "root", tables=tables, options=options
    ) as manager:
        for step in steps:
            if kind == "rollback" and step == STEPS[-1]:
                manager.wait_until_finished()
                state, touched = manager.restore(STEPS[0], args=cnr.args.Restore(state))
            moved = touched_at(step, kind)
            state = next_state(state, step, moved)
            ids = {name: jnp.asarray(rows, jnp.int32) for name, rows in moved.items()}
            touched = cnr.record(touched, ids)
            manager.save(step, args=cnr.args.Save(state, touched))
            expected |= flatten(state, f"truth/{step}")
    with cnr.CheckpointManager(folder / "root", tables=tables) as manager:
        for step in steps:
            restored = manager.restore(step, args=cnr.args.Restore(state))
            expected |= flatten(restored.state, f"restored/{step}")
    np.savez_compressed(folder / "expected.npz", **expected)


def sums_at(step: int) -> dict[str, Any]:
    """A state on one device under dense Adam, with an accumulator of one number a row."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(SUMS_ROWS, 8)) * 0.05
    mu, nu = np.zeros((2, SUMS_ROWS, 8))
    accumulator = np.zeros(SUMS_ROWS)
    for _ in range(step):
        ids = rng.choice(SUMS_ROWS * 3 // 4, 24, replace=False)
        grads = np.zeros_like(table)
        grads[ids] = rng.normal(size=(24, 8)) * 0.01 * np.exp(rng.normal(size=(24, 1)))
        mu, nu = 0.9 * mu + 0.1 * grads, 0.999 * nu + 0.001 * grads**2
        table -= 1e-3 * mu / (np.sqrt(nu) + 1e-8)
        accumulator += (grads**2).mean(axis=1)
    # What no integers hold.
    table[5, 3], mu[6, 1], nu[7, 0] = np.nan, np.inf, -1
    state = {
        "params": {"user": table},
        "opt": {
            "mu": {"user": mu},
            "nu": {"user": nu},
            "accumulator": {"user": accumulator},
        },
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state)


def sums_tables(state: dict[str, Any]) -> cnr.Tables:
    """The tables of such a state."""
    return cnr.find_tables(state, ["user"])


def generate_sums(folder: Path) -> None:
    """As `generate`, of rows that are stored as sums of integers."""
    folder.mkdir(parents=True)
    tables, expected = sums_tables(sums_at(0)), dict[str, np.ndarray]()
    options = cnr.Options(
        policy=cnr.Consecutive(),
        codec="lattice",
        slot_codec="moments",
        tracking="fingerprint",
    )
    with cnr.CheckpointManager(
        folder / "root", tables=tables, options=options
    ) as manager:
        for step in STEPS:
            manager.save(step, args=cnr.args.Save(sums_at(step)))
            manager.wait_until_finished()
    with cnr.CheckpointManager(folder / "root", tables=tables) as manager:
        for step in STEPS:
            restored = manager.restore(step, args=cnr.args.Restore(sums_at(0)))
            expected |= flatten(restored.state, f"restored/{step}")
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    name = sys.argv[1]
    write = generate_sums if name.endswith("sums") else generate
    write(Path(__file__).parent / name)
