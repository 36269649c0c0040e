"""Whether audits of recorded runs find what they must, and nothing else.

    python tests/benchmarks/late_movers.py [--quick] [--json PATH]

*Late*: 4 M x 16 rows with two slots, 1 % of them looked up between two saves, by SGD. From step
500 on all rows move in each step as by Adam, by momentum, or by a weight decay, while what is
recorded are the rows looked up, as before. The audit must stop one of the next three saves and
name what may be wrong; three seeds each. Ids are uniform or follow a power law, by seed.

*Right*: SGD, row-wise Adagrad and lazy Adam of `cnr_jax.optim`, 1,000 saves in all with a restore
every 50, a table that takes many rounds and one that is read whole by each save. No save may be
stopped.

A full run takes about 10 minutes, a quick one 40 s. The exit code is 1 if anything was found that
should not, or not found that should.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from commandline import make_parser, write_figures

RATE = 0.05
STARTS_AT, EVERY = 500, 25
LATE = ("adam", "momentum", "decay")
RIGHT = ("sgd", "adagrad", "lazy_adam")


def main() -> None:
    parser = make_parser(__doc__, quick="smaller tables and fewer saves; takes 40 s")
    args = parser.parse_args()
    rows, saves = (200_000, 60) if args.quick else (4_000_000, 1000)
    figures: list[dict[str, Any]] = []
    for seed in range(1 if args.quick else 3):
        for kind in LATE:
            figures.append(late(kind, rows, seed))
            print(figures[-1], flush=True)
    for kind in RIGHT:
        figures.append(right(kind, rows // 10, -(-saves // len(RIGHT))))
        print(figures[-1], flush=True)
    write_figures(args.json, figures)
    sys.exit(any(not each["well"] for each in figures))


def late(kind: str, rows: int, seed: int) -> dict[str, Any]:
    """A run in which other rows begin to move at step `STARTS_AT`."""
    import jax
    import jax.numpy as jnp

    import cnr_jax as cnr

    rng = np.random.default_rng(seed)
    state = {"user": jnp.asarray(rng.normal(size=(rows, 16)).astype(np.float32))}
    state |= {name: jnp.zeros((rows, 16)) for name in ("mu", "nu")}
    tables = cnr.find_tables(state, {"user": cnr.TableSpec(slots=["mu", "nu"])})
    touched = cnr.init_touched(state, tables)
    draw = _drawing(rng, rows, rows // 100 // EVERY, uniform=seed != 1)
    before, after = _step("sgd"), _step(kind)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        options = cnr.Options(preservation_policy=_latest())
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            for step in range(STARTS_AT + 4 * EVERY):
                run = before if step < STARTS_AT else after
                state, touched = run(state, touched, draw())
                if step % EVERY == 0:
                    jax.block_until_ready(state)
                    try:
                        manager.save(step, args=cnr.args.Save(state, touched))
                    except cnr.errors.AuditError as error:
                        saves = (step - STARTS_AT) // EVERY + (step >= STARTS_AT)
                        return {
                            "kind": kind,
                            "seed": seed,
                            "stopped_at": step,
                            "saves_with_moves": saves,
                            "secs": time.perf_counter() - started,
                            "error": str(error).splitlines()[:4],
                            "well": 0 < saves <= 3 and "likely cause" in str(error),
                        }
    return {"kind": kind, "seed": seed, "stopped_at": None, "well": False}


def right(kind: str, rows: int, saves: int) -> dict[str, Any]:
    """Saves of a run that records all that moves."""
    import jax
    import jax.numpy as jnp

    import cnr_jax as cnr

    rng = np.random.default_rng(7)
    params = {
        "user": jnp.asarray(rng.normal(size=(rows, 16)).astype(np.float32)),
        "item": jnp.asarray(rng.normal(size=(500, 16)).astype(np.float32)),
    }
    make: dict[str, Callable[[], Any]] = {
        "adagrad": lambda: cnr.optim.rowwise_adagrad(RATE),
        "lazy_adam": lambda: cnr.optim.lazy_adam(RATE),
    }
    optimizer = make[kind]() if kind in make else None
    state = {"params": params, "opt": optimizer.init(params) if optimizer else {}}
    tables = cnr.find_tables(state, {"user": "params/user", "item": "params/item"})
    touched = cnr.init_touched(state, tables)

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(state: Any, touched: Any, ids: Any) -> Any:
        touched = cnr.record(touched, ids)
        params = state["params"]
        grads = {name: jnp.cos(params[name][ids[name]]) for name in params}
        if optimizer is None:
            moved = {
                name: table.at[ids[name]].add(-RATE * grads[name])
                for name, table in params.items()
            }
            return {**state, "params": moved}, touched
        moved, slots = optimizer.update(grads, ids, params, state["opt"])
        return {"params": moved, "opt": slots}, touched

    draws = {"user": _drawing(rng, rows, rows // 100, uniform=False)}
    draws["item"] = _drawing(rng, 500, 20, uniform=True)
    stopped: list[str] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        options = cnr.Options(preservation_policy=_latest(), audit_bytes=1 << 19)
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            for step in range(saves):
                ids = {name: draw() for name, draw in draws.items()}
                state, touched = run(state, touched, ids)
                try:
                    manager.save(step, args=cnr.args.Save(state, touched))
                except cnr.errors.AuditError as error:
                    stopped.append(str(error))
                if step % 50 == 49:
                    args = cnr.args.Restore(state)
                    state, touched = manager.restore(step, args=args)
    return {
        "kind": kind,
        "saves": saves,
        "false_alarms": len(stopped),
        "secs": time.perf_counter() - started,
        "error": stopped[:1],
        "well": not stopped,
    }


def _latest() -> Any:
    import orbax.checkpoint as ocp

    return ocp.checkpoint_managers.LatestN(2)


def _drawing(
    rng: np.random.Generator, rows: int, count: int, *, uniform: bool
) -> Callable[[], np.ndarray]:
    """Draws batches of ids, not permuted: those of a power law have the hot rows in front."""

    def draw() -> np.ndarray:
        if uniform:
            return rng.integers(0, rows, count, dtype=np.int32)
        # The inverse of a density that falls as 1 / (id + 100).
        most = np.log((rows + 100) / 100)
        ids = 100 * np.expm1(most * rng.random(count))
        return np.minimum(ids, rows - 1).astype(np.int32)

    return draw


def _step(kind: str) -> Callable[..., Any]:
    """A donated train step of a table with two slots."""
    import jax
    import jax.numpy as jnp

    import cnr_jax as cnr

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(state: Any, touched: Any, ids: Any) -> Any:
        touched = cnr.record(touched, {"user": ids})
        table, mu, nu = state["user"], state["mu"], state["nu"]
        grads = jnp.cos(table[ids])
        if kind == "adam":
            mu = (0.9 * mu).at[ids].add(0.1 * grads)
            nu = (0.999 * nu).at[ids].add(0.001 * grads**2)
            table = table - RATE * mu / (jnp.sqrt(nu) + 1e-8)
        elif kind == "momentum":
            mu = (0.9 * mu).at[ids].add(grads)
            table = table - RATE * mu
        else:
            table = table * (1 - 1e-4) if kind == "decay" else table
            table = table.at[ids].add(-RATE * grads)
        return {"user": table, "mu": mu, "nu": nu}, touched

    return run


if __name__ == "__main__":
    main()
