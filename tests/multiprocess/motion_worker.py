"""One process of a run of two whose rows hardly move between restores."""

from __future__ import annotations

import argparse
import faulthandler
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.codecs import Asymmetric
from cnr_jax.rows.codecs.dither import dither_seed, row_keys

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
    where = NamedSharding(mesh, P("r"))
    values = np.random.default_rng(0).uniform(-0.1, 0.1, (ROWS, DIM)).astype(np.float32)
    user = jax.make_array_from_callback(values.shape, where, lambda at: values[at])
    # Of which process 0 holds nothing.
    there = np.array([d for d in jax.devices() if d.process_index == 1])
    edge = jax.make_array_from_callback(
        values.shape,
        NamedSharding(Mesh(there, ("r",)), P("r")),
        lambda at: values[at],
        dtype=values.dtype,
    )
    state: Any = {"user": user, "edge": edge}
    # Rows of process 1 move a hundred times as far: what each sees alone is not the answer.
    by = np.where(np.arange(ROWS) < ROWS // 2, 0.0004, 0.04).astype(np.float32)
    by = by[:, None] * np.random.default_rng(1).choice([-1, 1], values.shape)
    change = jax.make_array_from_callback(values.shape, where, lambda at: by[at])
    move = jax.jit(lambda x, c, sign: x + sign * c)
    tables = cnr.find_tables(state, ["user", "edge"])
    options = cnr.Options(
        codec="asymmetric",
        bits="auto",
        policy=cnr.Consecutive(),
        tracking="fingerprint",
        timeout_secs=120,
        tables={"edge": cnr.TableOptions(codec="raw")},
    )
    root, lines = Path(args.root), []
    with cnr.CheckpointManager(args.root, tables=tables, options=options) as manager:
        for step in range(4):
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None
            manifest = read_manifest(root / str(step) / "default")
            restored = manager.restore(step, args=cnr.args.Restore(state)).state
            # In 8 bits rows move far enough, which is known from the second restore on.
            codec = Asymmetric(bits=report.auto_bits or 0, refits=0)
            for saved, got in zip(
                state["user"].addressable_shards,
                restored["user"].addressable_shards,
                strict=True,
            ):
                rows = np.arange(ROWS)[saved.index[0]]
                keys = [row_keys(dither_seed(manifest.lineage, "user"), rows)]
                encoded = jax.jit(codec.encode)(
                    saved.data, *(keys if step == 1 else [])
                )
                want = codec.decode(encoded.parts, dim=DIM, dtype=np.float32)
                np.testing.assert_array_equal(np.asarray(got.data), np.asarray(want))
            for shard in restored["edge"].addressable_shards:
                np.testing.assert_array_equal(
                    np.asarray(shard.data), values[shard.index]
                )
            lines.append(f"{step}: {report.auto_bits} bits, {report.reason}")
            lines.append(f"{manifest.motion}")
            sign = np.float32(1 if step % 2 else -1)
            state = {**restored, "user": move(restored["user"], change, sign)}
    found = cnr.try_bits(state, tables, lambda _: 1.0, better="higher", bits=[4])
    lines.append(f"{found.widths[0].table_bytes} {found.widths[0].mean_row_error:.4f}")
    assert all(
        leaf.committed for leaf in cnr.init_touched(state, tables).stamps.values()
    )
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
