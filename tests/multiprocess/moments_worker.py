"""One process of a run of two under dense Adam, whose moments are stored as integers."""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

ROWS, DIM = 512, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    mesh = jax.make_mesh((jax.device_count(),), ("r",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("r"))

    def placed(values: np.ndarray, where: Any = by_rows) -> jax.Array:
        return jax.make_array_from_callback(
            values.shape, where, lambda at: np.asarray(values[at])
        )

    values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    optimizer = optax.scale_by_adam()
    params = {"user": placed(values)}
    count = placed(np.zeros((), np.int32), NamedSharding(mesh, P()))
    mu, nu = ({"user": placed(np.zeros_like(values))} for _ in range(2))
    state: Any = {
        "params": params,
        "opt": optax.ScaleByAdamState(count, mu=mu, nu=nu),
    }

    @jax.jit
    def train_step(state: Any, grads: jax.Array) -> Any:
        updates, opt = optimizer.update({"user": grads}, state["opt"])
        moved = jax.tree.map(lambda x, u: x - 1e-3 * u, state["params"], updates)
        return {"params": moved, "opt": opt}

    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(
        codec="lattice",
        slot_codec="moments",
        policy=cnr.Consecutive(),
        tracking="fingerprint",
        timeout_secs=120,
    )
    lines: list[str] = []
    with cnr.CheckpointManager(args.root, tables=tables, options=options) as manager:
        for step in range(3):
            rng = np.random.default_rng(step)
            grads = np.zeros((ROWS, DIM), np.float32)
            ids = rng.choice(ROWS, 64, replace=False)
            grads[ids] = rng.normal(size=(64, DIM))
            state = train_step(state, placed(grads))
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
        report = manager.last_report
        assert report is not None
        lines.append(f"{report.kind} {report.slot_bytes}")
        restored = manager.restore(2, args=cnr.args.Restore(state)).state
        for name in ("mu", "nu"):
            saved, got = (getattr(x["opt"], name)["user"] for x in (state, restored))
            squares = restored["opt"].nu["user"].addressable_shards
            for a, b, nu in zip(
                saved.addressable_shards, got.addressable_shards, squares, strict=True
            ):
                x, read, nu = (np.asarray(s.data) for s in (a, b, nu))
                most = 0.43 * x if name == "nu" else 0.51 / 8 * np.sqrt(nu)
                assert read.any() and (np.abs(read - x) <= most).all()
        # By columns each process reads what both have written.
        by_columns = NamedSharding(mesh, P(None, "r"))
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=by_columns if x.ndim else x.sharding
            ),
            state,
        )
        turned = manager.restore(2, args=cnr.args.Restore(wanted)).state
        whole = NamedSharding(mesh, P())
        same = jax.jit(lambda x: x, out_shardings=whole)
        for name in ("mu", "nu"):
            one, other = (
                np.asarray(same(getattr(x["opt"], name)["user"]).addressable_data(0))
                for x in (restored, turned)
            )
            assert one.tobytes() == other.tobytes(), name
            lines.append(hashlib.sha256(one.tobytes()).hexdigest())
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
