"""The state, the touched rows and the train step of the main benchmarks.

State: `{"table": float32[rows, dim], "slot": float32[rows], "dense": {...}}`, the slot being
one accumulator a row. `tables_of` says so to `cnr_jax`. Jax is imported by the functions, so
that a child can choose its devices first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from lookups import BATCH_ROWS as BATCH_ROWS
from lookups import SINCE_BASELINE as SINCE_BASELINE
from lookups import Popularity as Popularity
from lookups import batch_ids as batch_ids
from lookups import fitted_rates as fitted_rates
from lookups import touched_rows as touched_rows

State = dict[str, Any]

DENSE_DIM = 256


def table_state(
    rows: int, dim: int, devices: int = 1, seed: int = 0, wide_slots: bool = False
) -> State:
    """A state whose table is N(0, 0.01), split by rows over the first `devices` devices.

    Args:
        rows: of the table.
        dim: of the table.
        devices: to split it over.
        seed: of all values.
        wide_slots: whether the slot has the table's shape, as that of full Adagrad.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = _mesh(devices)
    slots = (rows, dim) if wide_slots else (rows,)
    by_rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

    @partial(jax.jit, out_shardings={"table": by_rows, "slot": by_rows, "dense": whole})
    def make() -> State:
        keys = jax.random.split(jax.random.key(seed), 3)
        shape = (DENSE_DIM, DENSE_DIM)
        return {
            "table": 0.01 * jax.random.normal(keys[0], (rows, dim), jnp.float32),
            "slot": 0.1 + jax.random.uniform(keys[1], slots, jnp.float32),
            "dense": {
                "kernel": jax.random.normal(keys[2], shape) / DENSE_DIM**0.5,
                "step": jnp.int32(0),
            },
        }

    return jax.block_until_ready(make())


def _mesh(devices: int) -> Any:
    import jax
    from jax.sharding import AxisType

    return jax.make_mesh(
        (devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def abstract_of(state: State) -> State:
    """Shapes, dtypes and shardings of a state, to restore into."""
    import jax

    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def tables_of(state: State) -> Any:
    """The one table of a state, with its slot, as `cnr_jax` wants it."""
    import cnr_jax as cnr

    return cnr.find_tables(state, {"table": cnr.TableSpec("table", slots=["slot"])})


def touch(state: State, touched: Any, ids: np.ndarray) -> tuple[State, Any]:
    """Changes these rows and their slots, and records them; both arguments are donated.

    Args:
        state: from `table_state`.
        touched: or None, where nothing is to be recorded.
        ids: int32, distinct.
    """
    return _toucher(touched is not None)(state, touched, ids)


@lru_cache(maxsize=2)
def _toucher(recorded: bool) -> Callable[..., tuple[State, Any]]:
    import jax

    import cnr_jax as cnr

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(state: State, touched: Any, ids: Any) -> tuple[State, Any]:
        if recorded:
            touched = cnr.record(touched, {"table": ids})
        step = state["dense"]["step"] + 1
        dense = {**state["dense"], "step": step}
        new = {
            "table": state["table"].at[ids].mul(1.01),
            "slot": state["slot"].at[ids].add(0.01),
            "dense": dense,
        }
        return new, touched

    return run


def make_step(
    recorded: bool, products: int, sines: int, devices: int = 1
) -> Callable[..., Any]:
    """A donated train step `(state, touched, ids) -> (state, touched)`.

    It looks up the rows `ids`, runs a dense part on them, updates the rows and slots, and
    records the rows.

    Args:
        recorded: whether there is a `touched`; otherwise pass None.
        products: matrix products of 2048 x 256 by 256 x 256, one after the other: XLA runs
            each on all cores.
        sines: passes of a loop over a vector of 4096: XLA runs it on one core.
        devices: that share the dense part: the products by rows, the loop all on the first,
            so that a step is as long and leaves as many cores free as on one device.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import cnr_jax as cnr

    def share_of(x: jax.Array, kernel: jax.Array, sines: Any) -> jax.Array:
        # Values stay of the order of 1: products of ever smaller ones are slow.
        x = jax.lax.fori_loop(0, products, lambda _, m: jnp.tanh(2 * m @ kernel), x)
        line = jax.lax.fori_loop(
            0, sines, lambda _, v: jnp.sin(v) + 1, x.reshape(-1)[:4096]
        )
        return 1e-12 * (x.sum() + line.sum())

    def share_of_device(x: jax.Array, kernel: jax.Array) -> jax.Array:
        own = jnp.where(jax.lax.axis_index("x") == 0, sines, 0)
        return jax.lax.psum(share_of(x, kernel, own), "x")

    def dense_part(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x = jnp.resize(x, (2048, DENSE_DIM))
        if devices == 1:
            return share_of(x, kernel, sines)
        split = jax.shard_map(
            share_of_device,
            mesh=_mesh(devices),
            in_specs=(P("x"), P()),
            out_specs=P(),
        )
        return split(x, kernel)

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(state: State, touched: Any, ids: jax.Array) -> tuple[State, Any]:
        if recorded:
            touched = cnr.record(touched, {"table": ids})
        rows = state["table"][ids]
        change = dense_part(rows, state["dense"]["kernel"])
        # Bounded, however often a batch looks a row up, and another one in each column.
        gradient = 0.1 * jnp.cos(rows + jnp.arange(rows.shape[1])) + change
        slot = state["slot"].at[ids].add(jnp.mean(gradient**2, axis=1))
        update = -0.01 * gradient * jax.lax.rsqrt(slot[ids])[:, None]
        dense = state["dense"]
        new = {
            "table": state["table"].at[ids].add(update),
            "slot": slot,
            "dense": {"kernel": dense["kernel"] + change, "step": dense["step"] + 1},
        }
        return new, touched

    return run


def calibrate(secs: float, saturated: bool, rows: int, dim: int) -> dict[str, int]:
    """`products` and `sines` for `make_step` such that a step takes about `secs`.

    Args:
        secs: length of a step, on a machine that does nothing else.
        saturated: whether the dense part uses all cores; otherwise it uses one.
        rows: of the table; a small one is taken if it is large.
        dim: of the table.
    """
    rows = min(rows, 1 << 16)
    name = "products" if saturated else "sines"
    sizes = (10, 30) if saturated else (500, 1500)
    times = []
    for size in sizes:
        work = {"products": 0, "sines": 0, name: size}
        step = make_step(False, **work)
        state, times_here = table_state(rows, dim), []
        for number in range(8):
            ids = batch_ids(rows, number)
            start = time.perf_counter()
            state, _ = step(state, None, ids)
            _wait(state)
            times_here.append(time.perf_counter() - start)
        times.append(min(times_here[1:]))
    each = max(1e-7, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    fixed = times[0] - sizes[0] * each
    found = max(1, round((secs - fixed) / each))
    return {"products": 0, "sines": 0, name: found}


def _wait(state: State) -> None:
    import jax

    jax.block_until_ready(state)
