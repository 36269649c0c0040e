"""Whole runs of trained tables: bytes, capacity and restores by policy, with merges and without.

    python tests/benchmarks/trained_runs.py [--quick] [--data DIR] [--json PATH] [--dir FOLDER]
        [--only TEXT ...]

A small DLRM trains on flights, and is saved 12 times by several systems at the same moments:

* **Adagrad**: one table of all features, 1.7 M x 64, with an accumulator a row. After a pass over
  all flights it trains on batches that are drawn from a part of them, so that, as in the paper, a
  save meets 26 % of all rows, and all twelve together about 53 %.
* **Adam**, **AdamW**: ten tables of 679,484 rows together, x 16, all of which move, in one pass
  over 800,000 flights (`adam_flights.py`), saved after every twelfth of it.

The systems save by `IncrementLog()`, whose merges end before the next save, by `Consecutive()`,
or by default; rows as `lattice` or `adaptive` codes of 4 bits, slots exact or as `moments`. Two
steps are kept with what they rest on. *Bytes* are those of files of all saves, times fewer than
all leaves in float32 as often; *with merges* counts those of the merging process too. *Capacity*
is the most that the root holds after a save, in leaves in float32; *while merged*, with the
baseline that waits for a save. *Restore* is that of the last step, against a full save and one
delta on it as the defaults write them, both warm, in turns. What was saved last is restored and
compared by every system with what the state was. A full run takes about 40 minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Else threads of it that wait count too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import adam_flights
import flights_dlrm
import jax
import numpy as np
import orbax.checkpoint as ocp
import traces
import trained_tables
from commandline import make_parser, write_figures
from increment_log import bytes_of
from results import print_table, spread

import cnr_jax as cnr

SAVES, RESTORES = 12, 5
INTERVAL_SHARE, UNION_SHARE = 0.26, 0.53
FLIGHTS, RATE = 800_000, 1e-3


@dataclasses.dataclass(frozen=True)
class System:
    """How a run is saved.

    Attributes:
        name: of the line in the table.
        policy: of the saves.
        options: further options.
        of: names of the trainings that it saves.
    """

    name: str
    policy: Any
    options: dict[str, Any]
    of: tuple[str, ...] = ("Adagrad", "Adam", "AdamW")


_LATTICE = {"codec": "lattice", "compression": "zstd"}
_MOMENTS = {**_LATTICE, "slot_codec": "moments"}
SYSTEMS = (
    System("log, lattice, exact slots", cnr.IncrementLog(), _LATTICE, ("Adagrad",)),
    System("log, lattice, moments", cnr.IncrementLog(), _MOMENTS),
    System("Consecutive, lattice, moments", cnr.Consecutive(), _MOMENTS),
    System("log, adaptive", cnr.IncrementLog(), {}),
    System("default", cnr.Intermittent(), {}),
)
# What restores are held against: full, and one delta on it.
REFERENCE = System("full and a delta", cnr.OneShot(), {})


class Adagrad:
    """The training of one table; yields its state before each save."""

    def __init__(self, data: Path, quick: bool) -> None:
        flights = trained_tables.load_flights_3m(data)
        if quick:
            some = slice(40 * flights_dlrm.BATCH)
            rows, ids = np.unique(flights.ids[some], return_inverse=True)
            flights = trained_tables.Flights(
                ids.reshape(-1, flights.ids.shape[1]).astype(np.int32),
                len(rows),
                flights.dense[some],
                flights.label[some],
            )
        self._flights, self._dim = flights, 16 if quick else 64
        features, columns = flights.ids.shape[1], flights.dense.shape[1]
        self.state = flights_dlrm.init(flights.rows, features, columns, self._dim)
        self.tables = cnr.find_tables(self.state, [flights_dlrm.TABLE])
        self.touched = cnr.init_touched(self.state, self.tables)
        self.tracking = "recorded"

        def train(state: Any, touched: Any, *batch: Any) -> tuple[Any, Any]:
            touched = cnr.record(touched, {flights_dlrm.TABLE: batch[0]})
            return flights_dlrm.train_step(state, *batch)[0], touched

        self._train = jax.jit(train, donate_argnums=(0, 1))

    def saves(self) -> Iterator[dict[str, float]]:
        """Trains up to each save, and yields which rows it has met."""
        flights, rng = self._flights, np.random.default_rng(0)
        batch = flights_dlrm.BATCH
        for number in range(len(flights.label) // batch):
            self._step(np.arange(number * batch, (number + 1) * batch))
        pool = self._part(np.arange(len(flights.label)), UNION_SHARE)
        met = np.zeros(flights.rows, bool)
        for _ in range(SAVES):
            drawn = self._part(rng.permutation(pool), INTERVAL_SHARE)
            for some in np.array_split(drawn, max(1, round(len(drawn) / batch))):
                # Batches of one size, so that the step is compiled once.
                self._step(np.resize(some, batch))
            ids = np.unique(flights.ids[drawn])
            met[ids] = True
            yield {"rows": len(ids) / flights.rows, "all rows": met.mean().item()}

    def _step(self, flights: np.ndarray) -> None:
        held = self._flights
        given = held.ids[flights], held.dense[flights], held.label[flights]
        self.state, self.touched = self._train(self.state, self.touched, *given)

    def _part(self, flights: np.ndarray, share: float) -> np.ndarray:
        """As many of the last flights as look up a share of all rows."""
        low, high = 1, len(flights)
        while low < high:
            count = (low + high) // 2
            ids = np.unique(self._flights.ids[flights[-count:]])
            if len(ids) < share * self._flights.rows:
                low = count + 1
            else:
                high = count
        return flights[-low:]


class Dense:
    """Training by a dense optimizer of optax; yields its state before each save."""

    def __init__(self, data: Path, quick: bool, optimizer: str) -> None:
        flights = FLIGHTS // 10 if quick else FLIGHTS
        given = (optimizer, RATE)
        self._training = adam_flights.Training(data, flights, 4096, 16, given)
        self.state = self._training.begin()
        tables = [name for name, _ in adam_flights.tables_of(self.state)]
        self.tables = cnr.find_tables(
            self.state, {name: f"params/tables/{name}" for name in tables}
        )
        self.touched, self.tracking = None, "fingerprint"

    def saves(self) -> Iterator[dict[str, float]]:
        """Trains up to each save; all rows move."""
        steps, done = self._training.steps, 0
        for number in range(1, SAVES + 1):
            step = round(steps * number / SAVES)
            self.state, _ = self._training.trained(self.state, done, step)
            done = step
            yield {"rows": 1.0, "all rows": 1.0}


class Saved:
    """A run as one system saves it."""

    def __init__(self, root: Path, system: System, training: Any) -> None:
        self.root, self._tables = root, training.tables
        self.manager = cnr.CheckpointManager(
            root,
            tables=training.tables,
            options=cnr.Options(
                policy=system.policy,
                bits=4,
                tracking=training.tracking,
                **system.options,
            ),
            orbax_options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(2)
            ),
        )
        self.found: list[dict[str, Any]] = []

    def save(self, step: int, training: Any) -> None:
        """Saves, waits for the merge that follows, and notes what both took."""
        given = [] if training.touched is None else [training.touched]
        self.manager.save(step, args=cnr.args.Save(training.state, *given))
        self.manager.wait_until_finished()
        report = self.manager.last_report
        assert report is not None and report.outcome == "committed", report
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(training.state))
        started = time.perf_counter()
        while self.manager._handler.lifecycle.merging.is_busy:
            time.sleep(0.02)
        self.found.append(
            {
                "kind": report.kind,
                "written": report.total_bytes / whole,
                "merged": report.merged_bytes / whole,
                "merge secs": time.perf_counter() - started,
                "capacity": bytes_of(self.root, steps_only=True) / whole,
                "while merged": bytes_of(self.root, steps_only=False) / whole,
            }
        )

    def restore(self, training: Any) -> float:
        """Seconds in which another manager restores the newest state."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            training.state,
        )
        with cnr.CheckpointManager(self.root, tables=self._tables) as manager:
            started = time.perf_counter()
            found = manager.restore(None, args=cnr.args.Restore(abstract))
            jax.block_until_ready(found.state)
            secs = time.perf_counter() - started
        check(found.state, training)
        return secs


def check(found: Any, training: Any) -> None:
    """Raises an error if restored rows are further from those of the state than codes of 4 bits."""
    for name, table in training.tables.items():
        want, got = (
            np.asarray(functools.reduce(operator.getitem, table.path, tree))
            for tree in (training.state, found)
        )
        off = np.linalg.norm(want - got, axis=1)
        spread_of = want.max(axis=1) - want.min(axis=1)
        most = 1.5 * spread_of / 15 * want.shape[1] ** 0.5 + 1e-6
        assert off.mean() < most.mean(), (name, off.mean(), most.mean())


def run(
    name: str, training: Any, folder: Path, systems: list[System]
) -> dict[str, Any]:
    """Saves one training by all systems; returns the figures of each."""
    saved = {each.name: Saved(folder / each.name, each, training) for each in systems}
    reference: Saved | None = None
    shares: list[dict[str, float]] = []
    for step, found in enumerate(training.saves()):
        shares.append(found)
        for each in saved.values():
            each.save(step, training)
        if step >= SAVES - 2:
            reference = reference or Saved(folder / "reference", REFERENCE, training)
            reference.save(step, training)
    assert reference is not None
    for each in (*saved.values(), reference):
        each.manager.close()
    secs: dict[str, list[float]] = {n: [] for n in (*saved, REFERENCE.name)}
    for _ in range(RESTORES):
        for each, of in (*saved.items(), (REFERENCE.name, reference)):
            secs[each].append(of.restore(training))
    return {
        "training": name,
        "shares": shares,
        "saves": {n: each.found for n, each in saved.items()},
        "restore secs": secs,
    }


def lines_of(figures: dict[str, Any]) -> Iterator[list[str]]:
    """Lines of the table of one training."""
    for name, found in figures["saves"].items():
        secs, reference = (figures["restore secs"][n] for n in (name, REFERENCE.name))
        written = sum(each["written"] for each in found)
        merged = written + sum(each["merged"] for each in found)
        ratios = [a / b for a, b in zip(secs, reference, strict=True)]
        merging = [each["merge secs"] for each in found if each["merge secs"] > 0.1]
        yield [
            name,
            f"{len(found) / written:.1f}",
            f"{len(found) / merged:.1f}",
            f"{max(each['capacity'] for each in found[1:]):.2f}",
            f"{max(each['while merged'] for each in found[1:]):.2f}",
            spread(ratios),
            spread(secs),
            f"{statistics.median(merging):.1f}" if merging else "",
        ]


def main() -> None:
    parser = make_parser(
        __doc__,
        quick="small tables",
        data="the folder of the data",
        dir="where to save",
    )
    parser.add_argument("--only", nargs="+", default=[], help="trainings to run")
    args = parser.parse_args()
    data, figures = traces.data_folder(args.data), dict[str, Any]()
    for name in args.only or ("Adagrad", "Adam", "AdamW"):
        if name == "Adagrad":
            training: Any = Adagrad(data, args.quick)
        else:
            training = Dense(data, args.quick, name.lower())
        systems = [each for each in SYSTEMS if name in each.of]
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            figures[name] = run(name, training, Path(folder), systems)
        shares = figures[name]["shares"]
        print_table(
            f"{name}: 12 saves, {statistics.fmean(s['rows'] for s in shares):.0%} of the"
            f" rows each, {shares[-1]['all rows']:.0%} together",
            [
                *("system", "times fewer bytes", "with merges", "capacity"),
                *("while merged", "restore, times", "restore, s", "merge, s"),
            ],
            list(lines_of(figures[name])),
        )
        write_figures(args.json, figures)


if __name__ == "__main__":
    main()
