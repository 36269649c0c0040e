"""Which modules of the package a save and a restore pass through, and where a save's state is.

    python tests/benchmarks/save_path.py [--quick] [--json PATH]

*Save*: a delta of one table with one slot, in one process, from the call of `save` until
`wait_until_finished` has returned. *Restore*: `restore(None)` of a manager that has just been
opened, while the newest step is damaged. Counted are calls of functions that are defined in
`cnr_jax`, by thread; what a generator does after it was resumed is no call, and neither is a
comprehension. A *visit* is a run of calls of one thread in one module: a course that comes back
to a module is one more. Everything was compiled before.

*State*: what is reachable from the manager and differs while the files of a save are being
written both from what it was before the call and from what it is once the save has ended:
attributes of objects that stay, and objects that are new. Not among them are values that
never change once they are made (plans, entries), what a save carries on (clocks, the newest
step), which stays, attributes that Orbax's own manager has, which are Orbax's to keep, what a
ledger works out from its entries and remembers (the ledger itself is counted), and the gate of a
stage: it is an event that an interrupt cannot break, and the events of `threading` are not
counted either.

Takes a few seconds; figures do not depend on the machine.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from commandline import make_parser, write_figures

import cnr_jax as cnr
from cnr_jax.repository.index.chains import Derived
from cnr_jax.testing import damage
from cnr_jax.waiting import Gate

PACKAGE = Path(cnr.__file__).parent
ROWS, DIM = 1000, 8
# What the layout of the code is held to: modules and calls of a save, modules of a restore, and
# objects that know of the save in flight.
MARKS = {"save modules": 55, "save calls": 1200, "restore modules": 48, "objects": 4}


def main() -> None:
    parser = make_parser(__doc__, quick="the same: it takes seconds")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        figures["save"], figures["state"] = of_a_save(Path(root))
    with tempfile.TemporaryDirectory() as root:
        figures["restore"] = of_a_restore(Path(root))
    for name in ("save", "restore"):
        show(name, figures[name])
    print("state of the save in flight")
    for owner, attributes in figures["state"].items():
        print(f"  {owner}: {', '.join(attributes)}")
    found = {
        "save modules": len(figures["save"]["modules"]),
        "save calls": sum(figures["save"]["modules"].values()),
        "restore modules": len(figures["restore"]["modules"]),
        "objects": len(figures["state"]),
    }
    for name, most in MARKS.items():
        kept = "kept" if found[name] <= most else "MISSED"
        print(f"{name}: {found[name]}, at most {most}: {kept}")
    write_figures(args.json, figures | {"found": found})


def show(name: str, figures: Mapping[str, Any]) -> None:
    """Prints the modules of a save or a restore, and its threads."""
    modules, threads = figures["modules"], figures["threads"]
    print(f"{name}: {len(modules)} modules, {sum(modules.values())} calls")
    visits = (f"{count} of {whose}" for whose, count in figures["visits"].items())
    print(f"  visits of modules: {', '.join(visits)}")
    for thread, calls in threads.items():
        print(f"  {calls:5d} calls in {thread}")
    for module, calls in sorted(modules.items()):
        print(f"  {calls:5d} {module}")


class Calls:
    """Counts calls of functions of the package, in all threads that start after this.

    Attributes:
        found: module and thread of each call.
        visits: of modules, by thread.
        counts: whether it counts now.
    """

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.visits: Counter[threading.Thread] = Counter()
        self._last: dict[threading.Thread, str] = {}
        self.counts = False
        threading.setprofile(self._see)

    def of(self, work: Callable[[], object]) -> dict[str, Any]:
        """What is called, in whichever thread, until `work` returns."""
        for each in (self.found, self.visits, self._last):
            each.clear()
        self.counts = True
        sys.setprofile(self._see)
        try:
            work()
        finally:
            sys.setprofile(None)
            self.counts = False
        found = dict(self.found)
        modules: Counter[str] = Counter()
        threads: Counter[str] = Counter()
        for (module, thread), calls in found.items():
            modules[module] += calls
            threads[thread] += calls
        visits = {
            "training thread": self.visits[threading.current_thread()],
            "all threads": self.visits.total(),
        }
        return {"modules": dict(modules), "threads": dict(threads), "visits": visits}

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.counts:
            return
        module, first = _module_of(frame.f_code)
        if module and frame.f_lasti <= first:
            # Names of pools' threads end with numbers.
            thread = threading.current_thread()
            name = re.sub(r"[-_ ]*\d.*", "", thread.name)
            self.found[module, name] += 1
            if self._last.get(thread) != module:
                self._last[thread] = module
                self.visits[thread] += 1


@functools.cache
def _module_of(code: CodeType) -> tuple[str, int]:
    """The module of a function of the package, or nothing; and where its first call begins."""
    path = Path(code.co_filename)
    if PACKAGE not in path.parents or re.fullmatch(
        r"<(list|dict|set)comp>|<genexpr>|<module>", code.co_name
    ):
        return "", 0
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    begins = (i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")
    return module.removesuffix(".__init__"), next(begins, 0)


@dataclasses.dataclass
class Run:
    """A run of one table with one slot."""

    root: Path
    state: Any
    touched: Any
    manager: Any

    def step(self, step: int) -> None:
        """Changes some rows of the table and of its slot."""
        ids = (jnp.arange(50) + 7 * step) % ROWS
        self.state, self.touched = _train(self.state, self.touched, ids)
        jax.block_until_ready(self.state)

    def save(self, step: int) -> None:
        """Begins to save."""
        args = cnr.args.Save(self.state, self.touched)
        assert self.manager.save(step, args=args)


@jax.jit
def _train(state: Any, touched: Any, ids: jax.Array) -> tuple[Any, Any]:
    touched = cnr.record(touched, {"user": ids})
    rows = {name: state[name].at[ids].add(0.1) for name in ("user", "sum_of_squares")}
    return {**state, **rows}, touched


def opened(root: Path, dense: Mapping[str, jax.Array] | None = None) -> Run:
    """A run whose manager has just been opened; `dense` is in its state beside the table."""
    table = {"user": jnp.zeros((ROWS, DIM)), "sum_of_squares": jnp.zeros(ROWS)}
    state = {**table, **(dense or {})}
    tables = cnr.find_tables(state, {"user": cnr.TableSpec(slots=["sum_of_squares"])})
    touched = cnr.init_touched(state, tables)
    manager = cnr.CheckpointManager(root, tables=tables)
    return Run(root, state, touched, manager)


def of_a_save(root: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """What a delta passes through; and where its state is while it is being written."""
    calls, run = Calls(), opened(root)

    def whole(step: int) -> None:
        run.save(step)
        run.manager.wait_until_finished()

    with run.manager:
        for step in range(3):
            run.step(step)
            whole(step)
        run.step(3)
        found = calls.of(lambda: whole(3))
        assert run.manager.last_report.kind == "delta", run.manager.last_report
        before = reachable(run.manager)
        run.step(4)
        with writing_stopped():
            run.save(4)
            during = reachable(run.manager)
        run.manager.wait_until_finished()
        after = reachable(run.manager)
    with ocp.CheckpointManager(root) as plain:
        return found, of_the_flight(before, during, after, set(vars(plain)))


def of_a_restore(root: Path) -> dict[str, Any]:
    """What a restore passes through whose newest step is damaged."""
    run = opened(root)
    with run.manager:
        for step in range(3):
            run.step(step)
            run.save(step)
    (newest, *_) = (
        file
        for file in damage.files_of(root)
        if file.step == 2 and file.kind == "array" and "codes" in file.array
    )
    calls = Calls()
    with opened(root).manager as manager:
        args = cnr.args.Restore(run.state)
        # Programs that restore are compiled now.
        manager.restore(None, args=args)
    with opened(root).manager as manager, damage.flip_bit(newest.path, 8):
        found = calls.of(lambda: manager.restore(None, args=args))
    return found


class writing_stopped:
    """Holds up all threads but this one where they sync files, until the end."""

    def __enter__(self) -> None:
        self._fsync, self._may = os.fsync, threading.Event()
        main = threading.current_thread()

        def fsync(descriptor: int) -> None:
            if threading.current_thread() is not main:
                self._may.wait(60)
            self._fsync(descriptor)

        os.fsync = fsync

    def __exit__(self, *_: object) -> None:
        os.fsync = self._fsync
        self._may.set()


def _is_value(each: object) -> bool:
    """Whether an object never changes: what is made once and handed on holds no state."""
    made = getattr(type(each), "__dataclass_params__", None)
    return isinstance(each, tuple) or bool(made and made.frozen)


Seen = dict[int, tuple[Any, dict[str, Any]]]


def reachable(start: object) -> Seen:
    """Objects of the package by their id, each with what its attributes are."""
    seen: Seen = {}
    waiting: list[object] = [start]
    others: dict[int, object] = {}
    while waiting:
        each = waiting.pop()
        if id(each) in seen or id(each) in others:
            continue
        if _is_ours(each):
            attributes = dict(_attributes(each))
            seen[id(each)] = each, {n: _value(v) for n, v in attributes.items()}
            waiting += attributes.values()
        else:
            others[id(each)] = each
            waiting += _inside(each)
    return seen


def _is_ours(value: object) -> bool:
    ours = type(value).__module__.startswith(cnr.__name__)
    return ours and not isinstance(value, type | os.PathLike)


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name) and not name.startswith("__"):
                yield name, getattr(value, name)
    if isinstance(value, tuple):
        yield from zip(getattr(value, "_fields", ()), value, strict=False)


def _inside(value: object) -> list[object]:
    """What a container holds, or a function is bound to."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    bound = getattr(value, "__self__", None)
    closure = getattr(value, "__closure__", None) or ()
    return [] if bound is None and not closure else [bound, *map(_in_cell, closure)]


def _in_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _value(value: object) -> object:
    """What tells whether an attribute is another one now."""
    if isinstance(value, str | int | float | bool | None | bytes):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(map(_value, value))
    if isinstance(value, Mapping):
        return type(value), tuple((_value(k), _value(v)) for k, v in value.items())
    return _Same(value)


class _Same:
    """Equal for one object alone; holds it, so that no other gets its id."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def of_the_flight(
    before: Seen, during: Seen, after: Seen, of_orbax: set[str]
) -> dict[str, list[str]]:
    """Attributes that are others only during a save, by class of the object that has them.

    Left out are those `of_orbax`'s manager on ours, which inherits from it.
    """
    found: dict[str, list[str]] = {}
    for number, (each, values) in during.items():
        name = type(each).__qualname__
        if isinstance(each, Derived | Gate):
            continue
        then = after[number][1] if number in after else {}
        if number not in before:
            # What is kept of it once the save has ended is its outcome.
            if then != values and not _is_value(each):
                found[f"{name} (new)"] = sorted(values)
            continue
        others = [
            attribute
            for attribute, value in values.items()
            if value != before[number][1].get(attribute)
            and value != then.get(attribute)
            and not (attribute in of_orbax and isinstance(each, ocp.CheckpointManager))
        ]
        if others:
            found[name] = sorted(others)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
