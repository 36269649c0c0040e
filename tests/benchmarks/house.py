"""How many owners each fact of the package has, and what a save costs beside bytes and seconds.

    python tests/benchmarks/house.py [--quick] [--json PATH]

Counts the marks of the layout in the checkout that it is run in, and says of each how it counts:

* *ast*: in the syntax trees of `cnr_jax` without `testing` (`source_counts.py`).
* *list*: places that somebody has judged, named below. A place that is gone, or a field that its
  class has no more, ends the program: whoever moves it says in the list what became of it.
* *run*: calls of a delta save of one table with one slot, as `save_path.py` counts them.
* *strace*: calls of `fsync` and `fdatasync` of all threads in a delta save of a table, a slot and 5
  dense leaves. Those made in Python are counted within; without `strace` nothing is known of the
  others, which are TensorStore's, and the program says so.

Marks in seconds and bytes are those of `stall.py`, `many_tables.py`, `restore.py` and
`side_by_side.py`. Takes half a minute; figures do not depend on the machine, but for visits and
syncs, which depend on the turns of threads by some per cent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import save_path
import source_counts
from commandline import make_parser, write_figures

import cnr_jax as cnr

PACKAGE = Path(cnr.__file__).parent

# Code that follows parents from a step to the full checkpoint below it.
CHAIN_WALKERS = (("repository/index/entries.py", "chain_of"),)
# Code that decides which step of a root is the newest to take.
NEWEST_RULES = (("repository/index/chains.py", "Chains.newest"),)
# Modules that tell of a folder whose it is and what it holds, with one function of each that does.
KIND_TELLERS = (("repository/index/folders.py", "Folder"),)
# Objects that hold something of the save in flight, or of "the last" one, and where in them.
STATE_OF_A_SAVE: Mapping[tuple[str, str], Sequence[str]] = {
    ("checkpointer/saving/lifecycle.py", "Lifecycle"): ("open", "doubt"),
    ("checkpointer/saving/pipeline.py", "SavePipeline"): ("_saves", "_beginning"),
    ("checkpointer/saving/due.py", "Progress"): ("_sure", "_begun"),
    ("repository/index/planner.py", "Planner"): ("begun",),
    ("repository/index/ledger.py", "Ledger"): ("doomed", "leaving", "crowded"),
    ("repository/upkeep/writer.py", "RootWriter"): ("_claim", "_lock", "_writing"),
    ("checkpointer/tracking/tracker.py", "Tracker"): ("_last", "_prints"),
    ("rows/gather/host.py", "Buffers"): ("_idle",),
}
# Types of which one is made for each save, to describe it.
TYPES_OF_A_SAVE = (
    ("repository/index/save_plan.py", "SavePlan"),
    ("checkpointer/saving/in_flight.py", "SaveInFlight"),
    ("checkpointer/tracking/tracker.py", "ChangedRows"),
    ("checkpointer/saving/pipeline.py", "PipelinedSave"),
)

# A number of no file.
_NOTHING = 1 << 30


class Mark(NamedTuple):
    """One thing that is counted.

    Attributes:
        name: of what.
        how: it is counted.
        before: the redesign of the middle, counted alike.
        asked: the most that it may be, or, of comments, the least.
        least: whether that is the least.
    """

    name: str
    how: str
    before: float
    asked: float
    least: bool = False

    def is_kept(self, found: float) -> bool:
        """Whether a figure is what was asked for, as it is printed."""
        return (
            round(found, 1) >= self.asked
            if self.least
            else round(found, 1) <= self.asked
        )


MARKS = {
    "code": Mark("lines of code without testing/", "ast", 21914, 20500),
    "files": Mark("direct calls of files of a root outside the store", "ast", 90, 0),
    "is_local": Mark("calls of is_local outside the store", "ast", 30, 0),
    "walkers": Mark("chain walkers", "list", 4, 1),
    "newest": Mark("rules for the newest step", "list", 4, 1),
    "tellers": Mark("modules that tell kinds of folders", "list", 7, 1),
    "state": Mark("objects with state of the save in flight", "list", 10, 2),
    "types": Mark("types that describe one save", "list", 8, 4),
    "fields": Mark("their fields", "list, ast", 91, 55),
    "private": Mark("private names of Orbax", "ast", 33, 4),
    "visits": Mark("visits of the training thread in a delta save", "run", 285, 180),
    "moves": Mark("visits of all threads in it", "run", 531, 350),
    "syncs": Mark("fsync and fdatasync of a delta save", "strace", 87, 45),
    "python": Mark("of these in Python", "run", 35, 18),
    "once": Mark("functions used once, %", "ast", 26.6, 18),
    "comments": Mark("comments per 100 lines", "ast", 2.2, 3.5, least=True),
}


def main() -> None:
    parser = make_parser(
        __doc__, quick="without the saves: what is counted in the source"
    )
    args = parser.parse_args()
    found = in_source(PACKAGE)
    if not args.quick:
        found |= in_a_save() | syncs()
    for line in table(found):
        print(line)
    if "syncs" not in found and not args.quick:
        print("strace is not there: what TensorStore syncs is not known")
    write_figures(args.json, found)


def in_source(package: Path) -> dict[str, float]:
    """What is counted without running anything, by the keys of `MARKS`.

    Raises:
        LookupError: if a place of the lists above is gone.
    """
    check_lists(package)
    lines = source_counts.lines(package)
    once, functions = source_counts.functions_used_once(package)
    of_types = [source_counts.fields(package, *each) for each in TYPES_OF_A_SAVE]
    return {
        "code": lines.code,
        "files": len(source_counts.calls_of_files(package)),
        "is_local": len(source_counts.calls_of_is_local(package)),
        "walkers": len(CHAIN_WALKERS),
        "newest": len(NEWEST_RULES),
        "tellers": len(KIND_TELLERS),
        "state": len(STATE_OF_A_SAVE),
        "types": len(of_types),
        "fields": sum(map(len, of_types)),
        "private": len(source_counts.private_names_of_orbax(package)),
        "once": 100 * once / functions,
        "comments": 100 * lines.comments / lines.all,
    }


def check_lists(package: Path) -> None:
    """Sees that all places of the lists are there.

    Raises:
        LookupError: if one is not; it names all that are not.
    """
    places = (*CHAIN_WALKERS, *NEWEST_RULES, *KIND_TELLERS, *TYPES_OF_A_SAVE)
    gone = [each for each in places if not source_counts.is_there(package, *each)]
    for each, names in STATE_OF_A_SAVE.items():
        if not source_counts.is_there(package, *each):
            gone.append(each)
            continue
        held = source_counts.attributes(package, *each)
        gone += [(each[0], f"{each[1]}.{name}") for name in names if name not in held]
    if gone:
        told = "\n".join(f"  {file}: {name}" for file, name in gone)
        raise LookupError(
            f"places that the lists of house.py name are gone from {package}\n{told}\n"
            "  hint: say in the list what does their work now, or take them off"
        )


def in_a_save() -> dict[str, float]:
    """Visits of modules in a delta save."""
    with tempfile.TemporaryDirectory() as root:
        visits = save_path.of_a_save(Path(root))[0]["visits"]
    return {"visits": visits["training thread"], "moves": visits["all threads"]}


def syncs() -> dict[str, float]:
    """Syncs of a delta save, in a process of its own; of all threads if `strace` is there."""
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    command = [sys.executable, "-c", f"{program}import house; house.sync_a_delta()"]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        if strace := shutil.which("strace"):
            calls = "trace=fsync,fdatasync"
            command = [strace, "-f", "-qq", "-e", calls, "-o", str(trace), *command]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
        in_python = json.loads(done.stdout)
        if not strace:
            return {"python": in_python}
        # From the first sync of nothing to the second one. A call that was interrupted by a
        # switch of threads takes two lines, of which the second says "resumed".
        lines = trace.read_text().splitlines()
    begin, end = (i for i, line in enumerate(lines) if f"fsync({_NOTHING})" in line)
    made = [line for line in lines[begin + 1 : end] if "sync(" in line]
    return {"syncs": len(made), "python": in_python}


def sync_a_delta() -> None:
    """Saves a delta between two syncs of nothing; prints how many were made in Python."""
    shapes = {f"dense{i}": (100, 10 * (i + 1)) for i in range(5)}
    with tempfile.TemporaryDirectory() as root:
        run = save_path.opened(
            Path(root), {name: jnp.zeros(shape) for name, shape in shapes.items()}
        )
        with run.manager:
            for step in range(3):
                run.step(step)
                run.save(step)
                run.manager.wait_until_finished()
            run.step(3)
            with _Syncs() as syncs_of_python:
                run.save(3)
                run.manager.wait_until_finished()
            assert run.manager.last_report.kind == "delta", run.manager.last_report
    print(len(syncs_of_python.made))


class _Syncs:
    """Notes syncs that are made in Python, between two of nothing that `strace` shows."""

    def __init__(self) -> None:
        # By several threads: a number that is added to could miss some.
        self.made = list[int]()

    def __enter__(self) -> _Syncs:
        self._before = os.fsync, os.fdatasync
        self._show()
        os.fsync, os.fdatasync = map(self._counting, self._before)
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync, os.fdatasync = self._before
        self._show()

    def _counting(self, call: Any) -> Any:
        def counted(descriptor: int) -> None:
            self.made.append(descriptor)
            call(descriptor)

        return counted

    def _show(self) -> None:
        try:
            os.fsync(_NOTHING)
        except OSError:
            return
        raise AssertionError("a sync of nothing has succeeded")


def table(found: Mapping[str, float]) -> list[str]:
    """Lines that tell each mark: its figure, how it counts, before, asked for, kept or not."""
    lines = [f"{'':51} {'found':>7} {'before':>7} {'asked':>7}"]
    for key, mark in MARKS.items():
        if key not in found:
            lines.append(
                f"{mark.name:51} {'-':>7} {mark.before:>7g} {mark.asked:>7g} not counted"
            )
            continue
        figure = f"{round(found[key], 1):g}"
        told = "kept" if mark.is_kept(found[key]) else "MISSED"
        lines.append(
            f"{mark.name:51} {figure:>7} {mark.before:>7g} {mark.asked:>7g} {told}, by {mark.how}"
        )
    return lines


if __name__ == "__main__":
    main()
