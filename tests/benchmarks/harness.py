"""Runs a benchmark: fresh process per run, cases interleaved, figures gathered.

A script names its cases (`plan`), measures one of them in a process of its own (`child`)
and prints what was found (`present`):

    if __name__ == "__main__":
        harness.main(__doc__, plan, child, present)

Repetitions are the outer loop (A B C A B C), so that a change of other load falls on all
cases alike. Each run gets an empty folder, which is removed afterwards. What is measured
beside time is in `measures`, how it is shown in `results`; both are at hand here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from commandline import make_parser, write_figures
from measures import PeakMemory as PeakMemory
from measures import devices as devices
from measures import drop_cache as drop_cache
from measures import files_and_bytes as files_and_bytes
from measures import machine as machine
from measures import sync_tree as sync_tree
from results import Figures as Figures
from results import Measured as Measured
from results import Results as Results
from results import middle as middle
from results import print_mark as print_mark
from results import print_table as print_table
from results import spread as spread

MARKER = "FIGURES "
_TAIL_LINES = 15


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        label: names it; unique in the plan.
        params: for the child, of JSON types.
        group: cases that are shown together.
        needs: packages without which the case is left out.
        once: run it once only, because its figures do not vary (bytes, say).
    """

    label: str
    params: dict[str, Any]
    group: str = ""
    needs: tuple[str, ...] = ()
    once: bool = False


Plan = Callable[[bool], Sequence[Case]]
Child = Callable[[dict[str, Any], Path], Figures]


def main(
    doc: str | None,
    plan: Plan,
    child: Child,
    present: Callable[[Results], None],
    *,
    repeats: tuple[int, int] = (5, 1),
    timeout_secs: float = 900.0,
    argv: Sequence[str] | None = None,
) -> None:
    """Runs the benchmark, or one run of it when called with `--child`.

    Args:
        doc: the script's docstring; its first line describes it in the help.
        plan: the cases, given whether the run is a quick one.
        child: measures one case, given its parameters and an empty folder. Runs in a
            fresh process; what it prints is not shown unless it fails.
        present: prints the figures.
        repeats: how often each case is run by default: in a full run, in a quick one.
        timeout_secs: after which a run is killed and counts as failed.
        argv: arguments, by default those of the process.

    Raises:
        SystemExit: with code 1 if a run failed, after all the others have been made.
    """
    args = _parser(doc).parse_args(argv)
    if args.child is not None:
        run = json.loads(args.child)
        print(MARKER + json.dumps(child(run["params"], Path(run["root"]))), flush=True)
        return
    count = args.repeats or repeats[args.quick]
    cases = _present_cases(plan(args.quick), args.only)
    with tempfile.TemporaryDirectory(prefix="cnr-bench-", dir=args.dir) as folder:
        results = Results(
            [Measured(label=c.label, group=c.group, params=c.params) for c in cases],
            machine(Path(folder)),
        )
        once = {case.label for case in cases if case.once}
        script = Path(inspect.getfile(child)).resolve()
        spawn = partial(_spawn, script, folder=Path(folder), timeout_secs=timeout_secs)
        for number in range(count):
            _run_turn(spawn, results, once if number else set(), number)
            if args.json:
                _write(args.json, results, args)
    print(f"\n{_conditions(results.machine)}; {count} runs of each case")
    present(results)
    failed = [case for case in results if case.failures]
    for case in failed:
        print(f"\nFAILED {case.label}\n{next(iter(case.failures.values()))}")
    if failed:
        sys.exit(1)


def _parser(doc: str | None) -> argparse.ArgumentParser:
    parser = make_parser(
        doc,
        quick="small; ends within 60 s",
        dir="where to write (default: temporary)",
    )
    parser.add_argument("--repeats", type=int, help="runs of each case")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="cases whose label contains one of these",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _present_cases(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Cases that can be run here; says which cannot."""
    kept: list[Case] = []
    for case in cases:
        missing = [n for n in case.needs if importlib.util.find_spec(n) is None]
        if missing:
            print(f"left out: {case.label} ({', '.join(missing)} not installed)")
        elif any(text in case.label for text in only):
            kept.append(case)
    labels = [case.label for case in kept]
    assert len(set(labels)) == len(labels), f"labels are not unique: {labels}"
    return kept


def _run_turn(
    spawn: Callable[[dict[str, Any]], Figures],
    results: Results,
    skipped: set[str],
    number: int,
) -> None:
    """Runs every case once."""
    for case in results:
        if case.label in skipped:
            continue
        load = os.getloadavg()[0]
        try:
            case.runs[number] = {**spawn(case.params), "load": load}
        except _RunError as error:
            case.failures[number] = str(error)
        state = "failed" if number in case.failures else "done"
        print(f"  run {number + 1}, {case.label}: {state}", file=sys.stderr)
    results.machine["load_at_end"] = os.getloadavg()[0]


def _write(path: Path, results: Results, args: argparse.Namespace) -> None:
    arguments = {"quick": args.quick, "repeats": args.repeats, "only": args.only}
    report = {
        "machine": results.machine,
        "arguments": arguments,
        "cases": [case.as_json() for case in results],
    }
    write_figures(path, report)


class _RunError(Exception):
    """A child that ended without figures; holds the last lines it wrote."""


def _spawn(
    script: Path, params: dict[str, Any], *, folder: Path, timeout_secs: float
) -> Figures:
    """Measures one case in a fresh process, in a folder of its own.

    Raises:
        _RunError: if there are no figures.
    """
    root = Path(tempfile.mkdtemp(dir=folder))
    given = json.dumps({"params": params, "root": str(root)})
    command = [sys.executable, str(script), "--child", given]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_secs
        )
    except subprocess.TimeoutExpired as error:
        raise _RunError(f"no end after {timeout_secs:g} s") from error
    finally:
        shutil.rmtree(root, ignore_errors=True)
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines or not lines[-1].startswith(MARKER):
        tail = (ended.stdout + ended.stderr).splitlines()[-_TAIL_LINES:]
        raise _RunError("\n".join([f"exit code {ended.returncode}", *tail]))
    return json.loads(lines[-1][len(MARKER) :])


def _conditions(found: dict[str, Any]) -> str:
    return (
        f"{found['cores']} cores, load {found['load_at_start']:.1f} at the start and"
        f" {found.get('load_at_end', float('nan')):.1f} at the end, disk"
        f" {found['disk_write_mb_per_sec']:.0f} MB/s written and synced"
    )
