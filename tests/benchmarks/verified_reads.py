"""What it costs that every byte is checked: restores with and without, and `verify`.

    python tests/benchmarks/verified_reads.py [--quick] [--json PATH] [--repeats N]

The table of `restore.py` (4 M x 64 float32 with an accumulator a row, a full save and a delta of
26 %), at 4 bits and exact. `verify_reads=False` leaves out only the comparison of each chunk's
checksum with the manifest: TensorStore compares data with checksums in any case, and manifests
and dense files are always compared with their digests. What the digests of dense files cost is
measured by itself. `verify` is set against reading the files and doing nothing with them. Warm:
all files were just read; cold: the kernel was told to forget them. A full run makes 3 turns in
about 8 minutes, a quick one takes 60 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import peers
import saved_runs
import workload
from harness import Case, Figures, Results, middle, print_table

SYSTEMS = ("cnr-4bit", "cnr-raw")
DENSE_BYTES = 512 << 20


def plan(quick: bool) -> list[Case]:
    """Restores, then `verify`, then digests."""
    rows = 200_000 if quick else 4_000_000
    cases: list[Case] = []
    for name in SYSTEMS:
        run = {"system": name, "rows": rows, "devices": 1, "deltas": 1, "parts": False}
        make = partial(_case, run, quick)
        for heat in ("warm", "cold"):
            for way in ("checked", "unchecked"):
                cases += make("restore", way, heat)
            for way in ("read", "structure", "data"):
                cases += make("verify", way, heat)
    size = DENSE_BYTES // 8 if quick else DENSE_BYTES
    return [*cases, Case("dense: digests", {"bytes": size}, "dense")]


def _case(
    run: dict[str, Any], quick: bool, group: str, way: str, heat: str
) -> list[Case]:
    if quick and (heat == "cold" or run["system"] != SYSTEMS[0]):
        return []
    label = f"{group}: {run['system']}, {way}, {heat}"
    return [Case(label, {"run": run, "way": way, "heat": heat}, group)]


def child(params: dict[str, Any], root: Path) -> Figures:
    """One restore, or one look at a run."""
    if "bytes" in params:
        return _digests(params["bytes"], root)
    path = saved_runs.saved_run(params["run"], root)
    harness.devices(1)
    way = params["way"]
    work = _restorer(params, path) if "checked" in way else _looker(way, path)
    size = _read_all(path)
    if params["heat"] == "cold":
        harness.drop_cache(path)
    return _timed(work, size)


def _timed(work: Callable[[], Any], size: int) -> Figures:
    cpu = time.process_time()
    start = time.perf_counter()
    work()
    secs = time.perf_counter() - start
    return {
        "secs": secs,
        "cpu_secs": time.process_time() - cpu,
        "mb_per_sec": size / 1e6 / secs,
    }


def _restorer(params: dict[str, Any], path: Path) -> Any:
    import jax

    run = params["run"]
    state = workload.abstract_of(workload.table_state(8, saved_runs.DIM, 1))
    for leaf in ("table", "slot"):
        shape = (run["rows"], *state[leaf].shape[1:])
        state[leaf] = state[leaf].update(shape=shape)
    checked = params["way"] == "checked"
    system = peers.make(run["system"], path, state, verify_reads=checked)
    return lambda: jax.block_until_ready(system.restore(run["deltas"], state))


def _looker(way: str, path: Path) -> Any:
    import cnr_jax as cnr

    if way == "read":
        return lambda: _read_all(path)

    def look() -> None:
        assert cnr.verify(str(path), way) == ()  # type: ignore[arg-type]

    return look


def _digests(size: int, root: Path) -> Figures:
    """A dense part of one file, warm."""
    from cnr_jax.format.manifest import FileDigest
    from cnr_jax.repository.store import digest_file
    from cnr_jax.repository.store.checked import sealed

    (root / "dense").mkdir()
    file = root / "dense" / "file"
    file.write_bytes(os.urandom(size))
    named: FileDigest = digest_file(file, "dense/file")
    return _timed(lambda: sealed(root, [named]).check(), size)


def _read_all(path: Path) -> int:
    """Bytes of all files, each read once."""
    size = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with Path(folder, name).open("rb") as file:
                while data := file.read(1 << 20):
                    size += len(data)
    return size


def present(results: Results) -> None:
    """Tables, and what checking adds."""
    for group, title in (
        ("restore", "Restores of a full save and a delta of 26 %"),
        ("verify", "A look at the same files"),
        ("dense", f"SHA-256 of {DENSE_BYTES >> 20} MiB of dense files (less if quick)"),
    ):
        lines = [
            [
                case.label.partition(": ")[2],
                case.text("secs", "{:.3f}"),
                case.text("cpu_secs", "{:.3f}"),
                case.text("mb_per_sec", "{:.0f}"),
            ]
            for case in results.group(group)
        ]
        print_table(f"{title}: medians (ranges)", ("", "s", "CPU s", "MB/s"), lines)
    print("\nRun by run")
    for name in SYSTEMS:
        for heat in ("warm", "cold"):
            pairs = (
                ("restore", "checked", "unchecked"),
                ("verify", "data", "read"),
            )
            for group, way, floor in pairs:
                ours, other = (f"{group}: {name}, {w}, {heat}" for w in (way, floor))
                if ours in results and other in results:
                    ratio = middle(results.ratios(ours, other, "secs"))
                    print(f"  {group}, {name}, {heat}: {way} / {floor} {ratio:.2f}x")


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
