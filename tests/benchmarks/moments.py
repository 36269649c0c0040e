"""Bytes of saves under dense Adam and AdamW, with tables and moments as integers.

    python tests/benchmarks/moments.py [--quick] [--data DIR] [--json PATH]

A small DLRM passes once over 800,000 flights (`adam_flights.py`; 390 batches, rate 1e-3; 679,484
rows of ten tables, each of which is met for the first time in this pass: the hard case). It is
saved 12 times, 32 or 33 batches apart, with `codec="lattice"`, `slot_codec="moments"` and rows
found by fingerprints. All bytes of tables and slots count: integers, scales, centres, ids, rows
that are stored exactly, and manifests; dense leaves do not. They are compared with those of table,
mu and nu in float32. *Change* is the median motion of the rows that have moved since the save
before, by element, in steps of their tables. Seconds are those of the CPU, all threads together.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Else threads of it that wait count too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import adam_flights
import jax
import numpy as np
import traces
from commandline import make_parser, write_figures
from results import print_table

import cnr_jax as cnr
from cnr_jax.rows.codecs.lattice import SAMPLE_ROWS, Lattice

CASES = ((16, "adam"), (16, "adamw"), (64, "adam"), (64, "adamw"))
SAVES, RATE, FLIGHTS = 12, 1e-3, 800_000


class Saved:
    """What saves of a state take, below a folder of their own."""

    def __init__(self, root: str, state: Any, policy: Any) -> None:
        names = [name for name, _ in adam_flights.tables_of(state)]
        tables = cnr.find_tables(state, {n: f"params/tables/{n}" for n in names})
        self._exact_bytes = sum(x.nbytes for t in tables.values() for x in t.leaves)
        options = cnr.Options(
            policy=policy,
            codec="lattice",
            bits=4,
            slot_codec="moments",
            tracking="fingerprint",
            compression="zstd",
        )
        self._manager = cnr.CheckpointManager(root, tables=tables, options=options)

    def save(self, step: int, state: Any) -> dict[str, Any]:
        """Saves, and returns what it took."""
        started = time.process_time()
        self._manager.save(step, args=cnr.args.Save(state))
        self._manager.wait_until_finished()
        report = self._manager.last_report
        assert report is not None
        nbytes = report.table_bytes + report.slot_bytes + report.manifest_bytes
        return {
            "kind": report.kind,
            "rows": report.rows,
            "bytes": nbytes,
            "table": report.table_bytes,
            "slots": report.slot_bytes,
            "times fewer": self._exact_bytes / nbytes,
            "save CPU s": time.process_time() - started,
        }

    def restore(self, step: int, state: Any) -> float:
        """Seconds that a restore takes."""
        started = time.process_time()
        self._manager.restore(step, args=cnr.args.Restore(state))
        return time.process_time() - started

    def close(self) -> None:
        self._manager.close()


def change(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """Median motion of rows that have moved, in steps."""
    found: list[np.ndarray] = []
    step_of = jax.jit(Lattice(bits=4).step)
    for name, rows in before.items():
        at = np.linspace(0, len(rows) - 1, SAMPLE_ROWS).astype(np.int64)
        off = np.sqrt(((after[name] - rows) ** 2).mean(axis=1))
        found.append(off[off > 0] / float(step_of(rows[at])))
    return float(np.median(np.concatenate(found)))


def run(training: adam_flights.Training) -> list[dict[str, Any]]:
    """Figures of each save: a full one, then deltas on the save before; and of one more full."""
    state, done, found = training.begin(), 0, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        saved = Saved(f"{folder}/deltas", state, cnr.Consecutive())
        before: dict[str, np.ndarray] = {}
        for number in range(1, SAVES + 1):
            step = round(training.steps * number / SAVES)
            state, _ = training.trained(state, done, step)
            done = step
            found.append({"save": number} | saved.save(step, state))
            after = {n: np.asarray(x) for n, x in adam_flights.tables_of(state)}
            found[-1]["change"] = change(before, after) if before else 0.0
            before = {name: rows.copy() for name, rows in after.items()}
        # At last, as a save after a restore would be of another lineage.
        for number in (2, SAVES):
            step = round(training.steps * number / SAVES)
            found[number - 1]["restore CPU s"] = saved.restore(step, state)
        saved.close()
        full = Saved(f"{folder}/full", state, cnr.Full())
        found.append({"save": SAVES} | full.save(done, state))
        found[-1]["restore CPU s"] = full.restore(done, state)
        full.close()
    return found


def main() -> None:
    parser = make_parser(
        __doc__, quick="dim 16, Adam, few flights", data="the folder of the data"
    )
    args = parser.parse_args()
    cases, flights = (CASES[:1], 100_000) if args.quick else (CASES, FLIGHTS)
    runs: list[dict[str, Any]] = []
    for dim, name in cases:
        data = traces.data_folder(args.data)
        training = adam_flights.Training(data, flights, 4096, dim, (name, RATE))
        found = run(training)
        ours = found[:SAVES]
        whole = sum(each["bytes"] * each["times fewer"] for each in ours)
        times = whole / sum(each["bytes"] for each in ours)
        runs += [{"dim": dim, "optimizer": name} | each for each in found]
        header = list(found[1])
        rows = [[_text(each.get(key)) for key in header] for each in found]
        print_table(
            f"dim {dim}, {name}; 12 saves together: {times:.1f} times fewer bytes",
            header,
            rows,
        )
    write_figures(args.json, runs)


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value}"


if __name__ == "__main__":
    main()
