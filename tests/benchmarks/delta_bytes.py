"""Bytes of a delta, everything counted, against the same rows in float32.

    python tests/benchmarks/delta_bytes.py [--quick] [--json PATH]

One table with a row-wise float32 slot on 8 devices, rows touched at random, one full and one
delta through the real manager and TensorStore. Table bytes are codes, row metadata, row ids,
array metadata and checksums; manifests are counted with them, slots are stated beside.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from commandline import make_parser, write_figures
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

SPECS = {"rows": P("x", None), "columns": P(None, "x")}


def measure(rows: int, dim: int, share: float, bits: int, sharding: str) -> dict:
    """Saves a full and a delta of `share` of the rows; returns the delta's bytes."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    table = NamedSharding(mesh, SPECS[sharding])
    state = {
        "user": jax.device_put(
            jax.random.normal(jax.random.key(0), (rows, dim)), table
        ),
        "slots": {"user": jax.device_put(jnp.zeros(rows), NamedSharding(mesh, P()))},
    }
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(bits=bits, policy=cnr.OneShot())
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            manager.save(0, args=cnr.args.Save(state, touched))
            ids = rng.choice(rows, int(rows * share), replace=False)
            touched = jax.jit(lambda t, i: cnr.record(t, {"user": i}))(touched, ids)
            manager.save(1, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            report = manager.last_report
        on_disk = sum(
            f.stat().st_size for f in Path(root, "1").rglob("*") if f.is_file()
        )
    fp32 = report.rows * dim * 4
    table_bytes = report.table_bytes + report.manifest_bytes
    return {
        "sharding": sharding,
        "rows": rows,
        "dim": dim,
        "bits": bits,
        "share": share,
        "rows_in_delta": report.rows,
        "table_and_manifest_bytes": table_bytes,
        "slot_bytes": report.slot_bytes,
        "bytes_on_disk": on_disk,
        "times_smaller_than_fp32_rows": fp32 / table_bytes,
    }


def main() -> None:
    args = make_parser(__doc__, quick="a table of 80,000 rows").parse_args()
    rows = 80_000 if args.quick else 1_000_000
    cases = [
        (dim, share, bits, sharding)
        for sharding in SPECS
        for dim in (64, 16)
        for bits in (4, 2, 8)
        for share in (0.01, 0.10, 0.26)
        if sharding == "rows" or (bits == 4 and share == 0.26)
    ]
    print("sharding  dim  bits  share   rows      table+manifests   slots     smaller")
    figures = []
    for dim, share, bits, sharding in cases:
        figure = measure(rows, dim, share, bits, sharding)
        figures.append(figure)
        print(
            f"{sharding:8} {dim:4} {bits:5} {share:6.0%} {figure['rows_in_delta']:9,}"
            f" {figure['table_and_manifest_bytes']:15,} {figure['slot_bytes']:10,}"
            f" {figure['times_smaller_than_fp32_rows']:9.2f}x",
            flush=True,
        )
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
