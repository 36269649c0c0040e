"""One process of a run of two, beside which the first one merges what was saved."""

from __future__ import annotations

import argparse
import faulthandler
import logging
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

ROWS, DIM = 256, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("cnr_jax").addHandler(handler)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    mesh = jax.make_mesh((jax.device_count(),), ("r",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("r"))
    values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)

    def state() -> dict[str, jax.Array]:
        placed = jax.make_array_from_callback(
            values.shape, by_rows, lambda at: np.asarray(values[at])
        )
        return {"user": placed}

    tables = cnr.find_tables(state(), ["user"])
    options = cnr.Options(
        codec="lattice",
        bits=8,
        policy=cnr.Consecutive(),
        tracking="fingerprint",
        preservation_policy=ocp.checkpoint_managers.LatestN(1),
        timeout_secs=120,
    )
    with cnr.CheckpointManager(args.root, tables=tables, options=options) as manager:
        for step in range(9):
            values[step * 20 : step * 20 + 30] += 0.5
            manager.save(step, args=cnr.args.Save(state()))
            manager.wait_until_finished()
            if step in (3, 6) and args.process == 0:
                assert cnr.compact(args.root).is_offered
        assert manager.last_report is not None and manager.last_report.kind == "delta"
        listed = f"{manager.all_steps()} {manager.latest_step()}"
        restored = manager.restore(8, args=cnr.args.Restore(state())).state["user"]
        for one in restored.addressable_shards:
            np.testing.assert_allclose(one.data, values[one.index], atol=0.05)
    appeared = [text for text in said if "appeared" in text or "not in the" in text]
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join([listed, *appeared]))


if __name__ == "__main__":
    main()
