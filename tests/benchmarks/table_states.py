"""A state of many tables, the changes of a train step to it, and saving it.

Tables of 800, 808, 816, ... rows of 16, 32 or 64 float32 in turn, each with one accumulator a
row, split by rows over all devices.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from checks import check_quantized, check_same
from system import State, System

DIMS = (16, 32, 64)
TOUCHED_BYTES = 80_000_000
BITS = 4


def names_of(count: int) -> list[str]:
    """Names of tables, in order."""
    return [f"t{i:04d}" for i in range(count)]


def make_state(count: int) -> State:
    """`count` tables of distinct numbers of rows, and their accumulators."""
    import jax

    rng = np.random.default_rng(0)
    block = rng.normal(0, 0.01, (8 * (100 + count), max(DIMS))).astype(np.float32)
    by_rows, whole = _shardings()
    params, slots = {}, {}
    for i, name in enumerate(names_of(count)):
        rows = np.roll(block, i)[: 8 * (100 + i), : DIMS[i % len(DIMS)]]
        params[name] = jax.device_put(np.ascontiguousarray(rows), by_rows)
        slots[name] = jax.device_put(1 + np.abs(rows[:, 0]), by_rows)
    dense = jax.device_put(block[:64], whole)
    return jax.block_until_ready({"params": params, "slots": slots, "dense": dense})


def make_alike(count: int, rows: int, dim: int) -> State:
    """`count` tables of one shape, and their accumulators, of the same rows in other orders.

    Not of rows to which something is added: beside an offset of some hundred steps codes of 4 bits
    are too coarse, so nearly all rows would be stored exactly, beside the others.
    """
    import jax

    rng = np.random.default_rng(0)
    by_rows, _ = _shardings()
    block = rng.normal(0, 0.01, (rows, dim)).astype(np.float32)
    slot = 1 + np.abs(block[:, 0])
    names = names_of(count)
    params, slots = {}, {}
    for i, name in enumerate(names):
        params[name] = jax.device_put(np.roll(block, i, axis=0), by_rows)
        slots[name] = jax.device_put(np.roll(slot, i), by_rows)
    return jax.block_until_ready({"params": params, "slots": slots})


def _shardings() -> tuple[Any, Any]:
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    axis = (AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=axis)
    return NamedSharding(mesh, P("x")), NamedSharding(mesh, P())


def find_tables(state: State) -> Any:
    """The tables of a state, each with its slot."""
    import cnr_jax as cnr

    return cnr.find_tables(
        state,
        {
            name: cnr.TableSpec(f"params/{name}", slots=[f"slots/{name}"])
            for name in state["params"]
        },
    )


class CnrMany(System):
    """This library at 4 bits; every delta rests on the save before, unless it is said otherwise."""

    name = "cnr"

    def __init__(self, root: Path, state: State, policy: Any = None) -> None:
        import cnr_jax as cnr

        super().__init__(root, state)
        options = cnr.Options(policy=policy or cnr.Consecutive(), bits=BITS)
        self.manager = cnr.CheckpointManager(
            root, tables=find_tables(state), options=options
        )

    def _save(self, step: int, state: State, touched: Any) -> None:
        import cnr_jax as cnr

        self.manager.save(step, args=cnr.args.Save(state, touched))

    def _wait(self) -> None:
        self.manager.wait_until_finished()

    def restore(self, step: int, abstract: State) -> State:
        import cnr_jax as cnr

        return self.manager.restore(step, args=cnr.args.Restore(abstract)).state

    def close(self) -> None:
        self.manager.close()


def change(
    state: State, touched: Any, number: int, share: float | None = None
) -> tuple[State, Any, int]:
    """Changes and stamps a share of the rows of each table, as a train step would.

    By numpy: a program over so many leaves takes minutes to compile.

    Args:
        state: to begin with.
        touched: that goes with it.
        number: of the change.
        share: of the rows; None: those that have `TOUCHED_BYTES`.

    Returns:
        The new state and touched rows, and the bytes of the rows that changed.
    """
    import jax

    rng = np.random.default_rng(number)
    whole = sum(leaf.nbytes for leaf in state["params"].values())
    if share is None:
        share = min(0.2, TOUCHED_BYTES / whole)
    clock, changed = int(touched.clock) + 1, 0
    params, slots, stamps = {}, {}, {}
    for name, leaf in state["params"].items():
        count = round(share * len(leaf))
        rows = rng.choice(len(leaf), count, replace=False)
        table, slot = np.array(leaf), np.array(state["slots"][name])
        stamp = np.array(touched.stamps[name])
        table[rows] *= 1.01
        slot[rows] += 0.01
        stamp[rows] = clock
        params[name] = jax.device_put(table, leaf.sharding)
        slots[name] = jax.device_put(slot, state["slots"][name].sharding)
        stamps[name] = jax.device_put(stamp, touched.stamps[name].sharding)
        changed += table[rows].nbytes
    now = jax.device_put(np.int32(clock), touched.clock.sharding)
    touched = dataclasses.replace(touched, stamps=stamps, clock=now)
    return {**state, "params": params, "slots": slots}, touched, changed


def check(got: State, want: State, bits: int | None) -> None:
    """Compares every leaf: bit for bit, tables in steps of the codec if they are quantized."""
    for branch in ("params", "slots"):
        assert got[branch].keys() == want[branch].keys()
        for name, leaf in want[branch].items():
            ours, theirs = np.asarray(got[branch][name]), np.asarray(leaf)
            if bits is None or branch == "slots":
                check_same(f"{branch}/{name}", ours, theirs)
            else:
                check_quantized(f"{branch}/{name}", ours, theirs, bits)
    assert np.array_equal(np.asarray(got["dense"]), np.asarray(want["dense"]))
