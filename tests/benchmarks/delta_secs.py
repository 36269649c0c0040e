"""From which share of changed rows on a delta takes longer than a full save.

    python tests/benchmarks/delta_secs.py [--quick] [--json PATH] [--repeats N]

A table of 1 M x 64 float32 with a row-wise float32 slot, at 4 bits and exact, through the real
manager on one device while nothing trains, against full saves: of the same codec, and Orbax's
without compression. A run makes all of them in turns, until each is complete and synced. The
full run takes about 3 minutes, a quick one 30 s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import harness
from harness import Case, Figures
from results import Results, middle, print_table, spread

from cnr_jax.policy import Decision, Full, OneShot, SaveRecord

SHARES = (0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99)
SYSTEMS = ("cnr-4bit", "cnr-raw")
ORBAX = "orbax-uncompressed"
TURNS = 3


class AsTold:
    """A policy that does what its caller wants next."""

    name: ClassVar[str] = "as_told"
    full = True

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns a full save, or a delta on the latest full one."""
        return (Full() if self.full else OneShot()).decide(history)


def plan(quick: bool) -> list[Case]:
    """One case for each codec."""
    rows = 100_000 if quick else 1_000_000
    return [Case(name, {"system": name, "rows": rows}) for name in SYSTEMS]


def child(params: dict[str, Any], root: Path) -> Figures:
    """Median seconds over turns of a full save, deltas of growing shares, and Orbax."""
    harness.devices(1)
    import peers
    from workload import table_state, tables_of, touch, touched_rows

    import cnr_jax as cnr

    rows, policy = params["rows"], AsTold()
    state = table_state(rows, 64)
    touched = cnr.init_touched(state, tables_of(state))
    ours = peers.make(params["system"], root / "ours", state, policy=policy)
    orbax = peers.make(ORBAX, root / "orbax", state)
    found: dict[str, list[float]] = {}
    step = 0
    for turn in range(TURNS + 1):
        took: dict[str, float] = {}
        for share in (None, *SHARES):
            policy.full = share is None
            if share is not None:
                ids = touched_rows(rows, share, seed=turn)
                state, touched = touch(state, touched, ids)
            label = "full" if share is None else f"delta {share}"
            took[label] = _secs(ours, step, state, touched)
            step += 1
        took["orbax"] = _secs(orbax, turn, state)
        if turn:  # the first turn compiles
            for label, secs in took.items():
                found.setdefault(label, []).append(secs)
    ours.close()
    orbax.close()
    return {label: statistics.median(values) for label, values in found.items()}


def _secs(system: Any, step: int, state: Any, touched: Any = None) -> float:
    """Seconds of a save, until it is complete and synced."""
    import jax

    jax.block_until_ready((state, touched))
    started = time.perf_counter()
    system.save(step, state, touched)
    system.wait()
    return time.perf_counter() - started


def present(results: Results) -> None:
    """Seconds, and deltas in parts of both full saves."""
    for case in results:
        full = middle(case.values("full"))
        orbax = middle(case.values("orbax"))
        labels = ["full", *(f"delta {share}" for share in SHARES), "orbax"]
        rows = [
            [
                label,
                spread(case.values(label), "{:.3f}"),
                f"{middle(case.values(label)) / full:.2f}",
                f"{middle(case.values(label)) / orbax:.2f}",
            ]
            for label in labels
        ]
        print_table(
            f"{case.label}, {case.params['rows']:,} x 64: seconds of a save",
            ("save", "median (range)", "/ full", f"/ {ORBAX}"),
            rows,
        )


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present)
