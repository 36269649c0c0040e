"""A train step with a row optimizer as a transformation of optax, against dense optax.

    python tests/benchmarks/optax_step.py [--quick] [--json PATH] [--repeats N]

A table of 4 M x 64 float32, of which a step looks up 1 % of the rows, each once. Steps of all forms
take turns in one process, with a table each, donated; their medians are compared, and so are the
ratios of steps made one after the other. "gradient alone" fills a gradient as large as the table
and sums it, for the looked-up rows only: what the form for optax has to do and the row form has
not. A full run makes 3 turns of 9 steps in about 4 minutes and takes 6 GB of memory, a quick one
takes 20 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import Case, Figures, Results, middle, print_mark, print_table

DIM, SHARE = 64, 0.01
RATE = 0.1
FORMS = {
    "dense": "optax.adagrad",
    "as_optax": "as_optax(rowwise_adagrad)",
    "rows": "rowwise_adagrad, row form",
    "gradient": "gradient alone",
}
LIMIT = 0.8


def plan(quick: bool) -> list[Case]:
    """All forms of the step, of one table."""
    rows, steps = (200_000, 5) if quick else (4_000_000, 9)
    return [Case(f"{rows:,} x {DIM}", {"rows": rows, "steps": steps})]


def child(params: dict[str, Any], root: Path) -> Figures:
    """Median seconds of a step of each form, and the middle ratios to others."""
    harness.devices(1)
    import jax
    import jax.numpy as jnp
    import numpy as np

    steps = _steps()
    rng = np.random.default_rng(0)
    table = jnp.full((params["rows"], DIM), 0.5)
    carried = {name: init(jnp.copy(table)) for name, (init, _) in steps.items()}
    del table
    secs: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(params["steps"] + 2):
        count = round(params["rows"] * SHARE)
        ids = jnp.asarray(rng.choice(params["rows"], count, replace=False), jnp.int32)
        for name, (_, step) in steps.items():
            jax.block_until_ready((carried[name], ids))
            start = time.perf_counter()
            carried[name] = jax.block_until_ready(step(carried[name], ids))
            # The first two compile, and touch memory that no step had before.
            if number > 1:
                secs[name].append(time.perf_counter() - start)
    figures = {name: middle(each) for name, each in secs.items()}
    for other in ("dense", "rows"):
        pairs = zip(secs["as_optax"], secs[other], strict=True)
        figures[f"to_{other}"] = middle([ours / theirs for ours, theirs in pairs])
    return figures | {"load": os.getloadavg()[0]}


def _steps() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """By form: (table -> what is carried, jitted (carried, ids) -> carried)."""
    import jax
    import jax.numpy as jnp
    import optax

    from cnr_jax.optim import as_optax, rowwise_adagrad

    by_rows = rowwise_adagrad(RATE)

    def loss(rows: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sum((rows - 1) ** 2, axis=1))

    def dense_grads(tables: Any, ids: jax.Array) -> Any:
        return jax.grad(lambda tables: loss(tables["table"][ids]))(tables)

    def by_optax(tx: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        tx = optax.with_extra_args_support(tx)

        def step(carried: Any, ids: jax.Array) -> Any:
            tables, state = carried
            grads = dense_grads(tables, ids)
            updates, state = tx.update(grads, state, tables, ids={"table": ids})
            return optax.apply_updates(tables, updates), state

        def init(table: jax.Array) -> Any:
            return {"table": table}, tx.init({"table": table})

        return init, jax.jit(step, donate_argnums=0)

    def row_step(carried: Any, ids: jax.Array) -> Any:
        table, state = carried
        return by_rows.update(jax.grad(loss)(table[ids]), ids, table, state)

    def gradient_step(carried: Any, ids: jax.Array) -> Any:
        table, sums = carried
        return table, sums + dense_grads({"table": table}, ids)["table"][ids].sum()

    return {
        "dense": by_optax(optax.adagrad(RATE)),
        "as_optax": by_optax(as_optax(by_rows)),
        "rows": (
            lambda table: (table, by_rows.init(table)),
            jax.jit(row_step, donate_argnums=0),
        ),
        "gradient": (
            lambda table: (table, jnp.float32(0)),
            jax.jit(gradient_step, donate_argnums=0),
        ),
    }


def present(results: Results) -> None:
    """Tables and marks."""
    for case in results:
        lines = [[what, case.text(name, "{:.1f}", 1e3)] for name, what in FORMS.items()]
        title = f"{case.label}, {SHARE:.0%} looked up; load {case.text('load')}"
        print_table(title, ("step", "ms: median (range)"), lines)
        ratio = middle(case.values("to_dense"))
        print_mark("as_optax(rowwise_adagrad) / optax.adagrad", ratio, LIMIT)
        print(f"  as_optax / row form: {middle(case.values('to_rows')):.3g}")


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
