"""Exports of a step of 4 GB: seconds, and memory, which is not to grow with the table.

    python tests/benchmarks/export.py [--quick] [--json PATH] [--repeats N]

A table of 16 M x 64 float32 (4.1 GB) with one float32 accumulator a row is saved at 4 bits, a full
save and a delta of 26 %. Each process exports the delta in one of the three formats, to the same
disk; imports come first, and some rows are compared with what `read_rows` gives. Memory is what
was resident at the peak beyond what was at the start. A full run takes about 10 minutes and 12 GB
of disk, a quick one 60 s.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import saved_runs
from checks import check_same
from harness import Case, Figures, Results, print_mark, print_table

FORMATS = ("orbax", "safetensors", "zarr")
_MIB = 1 << 20


def plan(quick: bool) -> list[Case]:
    """One case a format."""
    rows = 200_000 if quick else 16_000_000
    run = {"system": "cnr-4bit", "rows": rows, "devices": 1, "deltas": 1}
    return [
        Case(form, {"run": {**run, "parts": False}, "format": form}, form)
        for form in FORMATS
    ]


def child(params: dict[str, Any], root: Path) -> Figures:
    """Exports the delta of a run that was saved."""
    path = saved_runs.saved_run(params["run"], root)
    harness.devices(1)
    import jax
    import orbax.checkpoint  # noqa: F401

    import cnr_jax as cnr

    jax.block_until_ready(jax.numpy.zeros(1))
    there = root / "exported"
    write = cnr.export  # imported now
    with harness.PeakMemory() as memory:
        start, cpu = time.perf_counter(), time.process_time()
        done = write(path, 1, there, params["format"])
        secs, cpu = time.perf_counter() - start, time.process_time() - cpu
    ids = np.sort(np.random.default_rng(0).integers(0, params["run"]["rows"], 1000))
    want = cnr.read_rows(path, "table", ids, 1)
    check_same("table", _rows(params["format"], there, ids), want)
    return {
        "secs": secs,
        "cpu_secs": cpu,
        "extra_bytes": memory.extra_bytes,
        "bytes": done.bytes,
    }


def _rows(form: str, there: Path, ids: np.ndarray) -> np.ndarray:
    """Rows of the exported table."""
    if form == "safetensors":
        file = there / "model.safetensors"
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            told = json.loads(stream.read(size))["table"]
        begin, shape = 8 + size + told["data_offsets"][0], tuple(told["shape"])
        return np.memmap(file, np.float32, "r", begin, shape)[ids]
    import tensorstore as ts

    store = {"driver": "file", "path": str(there / "table")}
    array = ts.open({"driver": "zarr3", "kvstore": store}).result()
    return np.asarray(array[ids].read().result())


def present(results: Results) -> None:
    """A table and marks."""
    lines = [
        [
            form,
            results[form].text("bytes", "{:.2f}", 1e-9),
            results[form].text("secs"),
            results[form].text("cpu_secs"),
            results[form].text("extra_bytes", "{:.0f}", 1 / _MIB),
        ]
        for form in FORMATS
        if form in results
    ]
    print_table("exports", ("format", "GB", "s", "CPU s", "MiB"), lines)
    for form in FORMATS:
        if form in results:
            beyond = results[form].median("extra_bytes") / _MIB
            print_mark(f"{form}: MiB", beyond, 512)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(1, 1))
