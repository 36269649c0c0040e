"""What leaving out rows that were recorded but did not change saves, on real data.

    python tests/benchmarks/unchanged_rows.py [--quick] [--json PATH]

The tables and batches of examples/drop_in.py (flights of New York's airports), trained by
SGD with float32 and with bfloat16 tables, where a small update may round to nothing, and with
examples whose label is not there yet: they are looked up and recorded, but weigh nothing. Two
managers save every state, one with `drop_unchanged`. Bytes are all bytes of the deltas.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from commandline import make_parser, write_figures

import cnr_jax as cnr

PROGRAM = Path(__file__).parents[2] / "examples" / "drop_in.py"


def load(path: Path) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(
    dtype: str, rate: float, unlabelled: float, steps: int, every: int
) -> dict[str, Any]:
    """Rows and bytes of all deltas of one run, with and without unchanged rows."""
    flights = load(PROGRAM)
    params = flights.init_state()["params"]
    params = {k: v.astype(dtype) for k, v in params.items()}
    tables = cnr.find_tables({"params": params}, flights.TABLES)
    touched = cnr.init_touched({"params": params}, tables)

    @jax.jit
    def train_step(params: Any, touched: Any, ids: Any, late: Any, known: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            vectors = [params[name][ids[name]] for name in flights.TABLES]
            hidden = jnp.concatenate(vectors, axis=1) @ params["hidden"]
            logits = (jax.nn.relu(hidden) @ params["out"]).astype(jnp.float32)
            losses = optax.sigmoid_binary_cross_entropy(logits, late)
            return (losses * known).sum()

        gradients = jax.grad(loss_fn)(params)
        new = jax.tree.map(
            lambda p, g: (p - rate * g).astype(p.dtype), params, gradients
        )
        return new, cnr.record(touched, ids)

    found: dict[bool, list[cnr.SaveReport]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as root:
        managers = {
            drop: cnr.CheckpointManager(
                Path(root, str(drop)),
                tables=tables,
                options=cnr.Options(
                    policy=cnr.Consecutive(),
                    tracking="audited",
                    drop_unchanged=drop,
                    on_save=found[drop].append,
                ),
            )
            for drop in found
        }
        for step in range(1, steps + 1):
            batch = flights.batch(step)
            known = np.random.default_rng(step).random(len(batch["late"])) >= unlabelled
            params, touched = train_step(
                params, touched, batch["ids"], batch["late"], known
            )
            if step % every == 0:
                for manager in managers.values():
                    state = cnr.args.Save({"params": params}, touched)
                    manager.save(step, args=state)
        for manager in managers.values():
            manager.close()
    deltas = {
        drop: [r for r in each if r.kind == "delta"] for drop, each in found.items()
    }
    result: dict[str, Any] = {"dtype": dtype, "rate": rate, "unlabelled": unlabelled}
    for drop, name in ((False, "all"), (True, "changed")):
        result[f"{name}_rows"] = sum(r.rows for r in deltas[drop])
        result[f"{name}_bytes"] = sum(r.total_bytes for r in deltas[drop])
    return result


def main() -> None:
    args = make_parser(__doc__, quick="fewer steps").parse_args()
    steps = 20 if args.quick else 100
    results = []
    print("dtype     rate   unlabelled  recorded rows  changed   MB all  MB changed")
    for dtype, rate, unlabelled in (
        ("float32", 0.01, 0.0),
        ("bfloat16", 0.001, 0.0),
        ("float32", 0.01, 0.1),
        ("float32", 0.01, 0.5),
    ):
        result = measure(dtype, rate, unlabelled, steps, 5)
        results.append(result)
        print(
            f"{dtype:9s} {rate:<7} {unlabelled:8.0%} {result['all_rows']:14,d}"
            f" {result['changed_rows']:9,d}"
            f" {result['all_bytes'] / 1e6:8.2f} {result['changed_bytes'] / 1e6:8.2f}"
            f"   {result['all_bytes'] / result['changed_bytes']:.2f}x fewer"
        )
    figures = {"jax": jax.__version__, "numpy": np.__version__, "results": results}
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
