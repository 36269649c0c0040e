"""Stored files that are not what they were: bit flips, and whole files."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import Bench
from children import Ended
from outcomes import Outcome, Tally, Verdict
from reading import Reader
from scenarios import FULL, Note, System, chain_of, save_next, steps_from
from systems import Ours

from cnr_jax.testing import damage
from cnr_jax.testing.damage import Damage, StoredFile

NAME = "damage"
ABOUT = (
    "bit flips by class of file; truncated, extended, missing, copied, exchanged files"
)
# Of restores that name a step, and of those that take the newest one.
EXPLICIT = frozenset({Outcome.EQUAL, Outcome.REFUSED})
NEWEST = frozenset({Outcome.EQUAL, Outcome.OLDER, Outcome.NOTHING})
FLIPS = 1000
# Of a system that checks nothing 200 tell the share of wrong values to 7 %.
PEER_FLIPS = 200
MORE_EVERY = 20
QUICK_FLIPS, QUICK_EVERY = 5, 41
BATCHES = {False: 6, True: 2}
# Two chains, so that there is something to fall back to: full, delta, full, delta, delta.
STEPS, SECOND_CHAIN = 5, 2
TIMEOUT_SECS = 5400.0
FOREIGN = "another run"
# What is damaged, of which step, what is done to it in words, and as a function.
Case = tuple[Path, int, str, Callable[[], Damage]]


def run(bench: Bench) -> Iterator[Tally]:
    for system in bench.systems:
        root = bench.new_root()
        two_chains(system, root)
        parts = [f"flips, {name}" for name in classes(root)]
        parts += [f"files, {name}" for name in OPERATIONS]
        wanted = [part for part in parts if bench.wants(NAME, part, system)]
        shutil.rmtree(root)
        # Of all kinds some in each batch, as those of one kind take about as long.
        count = min(len(wanted), BATCHES[bench.quick])
        batches = [wanted[number::count] for number in range(count)]
        strike = partial(_in_child, bench, system)
        for batch, ended in bench.side_by_side(strike, batches):
            for part in batch:
                yield from _tallies(part, system, ended)
            if ended.status != 0:
                tally = Tally(NAME, "the child itself", system.name, EXPLICIT)
                outcome = Outcome.HANG if ended.status is None else Outcome.UNCLEAR
                tally.add(Verdict(outcome, str(ended.notes[-1:])), str(batch))
                yield tally


def two_chains(system: System, root: Path) -> None:
    chain_of(SECOND_CHAIN)(system, root)
    save_next(policy=FULL)(system, root, print_nothing)
    trainer = system(root)
    trainer.go_on()
    steps_from(trainer, SECOND_CHAIN + 1, STEPS)
    trainer.close()


def print_nothing(note: Any) -> None:
    """Takes a note that nobody reads."""


def _in_child(bench: Bench, system: System, parts: Sequence[str]) -> Ended:
    root, full = bench.new_root(), FLIPS if system is Ours else PEER_FLIPS
    with bench.server() as server:
        ended = server.run(
            system.name,
            "damage",
            root,
            timeout_secs=TIMEOUT_SECS,
            parts=parts,
            count=QUICK_FLIPS if bench.quick else full,
            every=QUICK_EVERY if bench.quick else 1,
        )
    for left in root.parent.glob(f"{root.name}*"):
        shutil.rmtree(left, ignore_errors=True)
    return ended


def _tallies(part: str, system: System, ended: Ended) -> Iterator[Tally]:
    # A file beside those of a step, which Orbax could take for one of them, damages none: the step
    # is refused until somebody moves it away, and no older one is taken in its place.
    newest = NEWEST | EXPLICIT if part.endswith("extra files") else NEWEST
    for how, suffix, allowed in (
        ("explicit", "", EXPLICIT),
        ("newest", "; restore(None)", newest),
        ("verify", "; verify", EXPLICIT),
    ):
        if how == "verify" and system is not Ours:
            continue
        tally = Tally(NAME, part + suffix, system.name, allowed)
        for note in ended.notes:
            if isinstance(note, dict) and (note["part"], note["how"]) == (part, how):
                tally.add(Verdict(Outcome(note["outcome"]), note["detail"]), note["at"])
                tally.secs += note["secs"]
        yield tally


def act(
    system: System,
    root: Path,
    note: Note,
    *,
    parts: Sequence[str],
    count: int,
    every: int,
) -> None:
    """Makes a root, damages it again and again, restores each time; run in a child."""
    two_chains(system, root)
    foreign = root.with_name(root.name + "-foreign")
    if any(FOREIGN in part for part in parts):
        two_chains(system, foreign)
    reader = Reader(system, root, root.with_name(root.name + "-scratch"))
    for part in parts:
        kind, name = part.split(", ", 1)
        if kind == "flips":
            cases = _flips(classes(root)[name], count, name)
        else:
            cases = list(OPERATIONS[name](damage.files_of(root), root, foreign))
            # An odd stride meets files of all kinds.
            cases = cases[::every]
        for number, case in enumerate(cases):
            more = kind == "files" or number % MORE_EVERY == 0
            for told in _tried(reader, case, more):
                note({"part": part, **told})
        # What was undone must be as it was, or the last cases said nothing.
        for step in reader.steps:
            assert reader.explicit(step, root).outcome is Outcome.EQUAL, part


def _tried(reader: Reader, case: Case, more: bool) -> Iterator[dict[str, Any]]:
    """Restores the damaged step by its number; where `more`, the newest, and verifies."""
    path, step, at, apply = case
    with apply():
        ways = [
            ("explicit", partial(reader.explicit, step, path)),
            ("newest", partial(reader.newest, path)),
            ("verify", reader.verified),
        ]
        if reader.system is not Ours:
            ways.pop()
        for how, look in ways if more else ways[:1]:
            started = time.monotonic()
            found = look()
            yield {
                "how": how,
                "at": at,
                "outcome": found.outcome,
                "detail": found.detail,
                "secs": time.monotonic() - started,
            }


def classes(root: Path) -> dict[str, list[StoredFile]]:
    """Files by what they are; of Orbax, by their names."""
    found = defaultdict(list)
    for file in damage.files_of(root):
        name: str = file.kind
        if file.kind == "array":
            name = f"array {file.array}"
        elif file.kind == "orbax":
            name = f"orbax, {_what_of_orbax(file.path)}"
        found[name].append(file)
    return dict(sorted(found.items()))


def _what_of_orbax(path: Path) -> str:
    if path.parent.name == "d":
        return "data"
    return "index" if path.name == "manifest.ocdbt" else "metadata"


def _flips(files: Sequence[StoredFile], count: int, seed: str) -> list[Case]:
    """Single bits at random places of all bytes of these files."""
    rng = Bench.random(seed)
    sizes = [file.path.stat().st_size for file in files]
    found: list[Case] = []
    for file in rng.choices(files, sizes, k=count):
        bit = rng.randrange(8 * file.path.stat().st_size)
        at = f"bit {bit} of {_short(file)}"
        flip = partial(damage.flip_bit, file.path, bit)
        found.append((file.path, file.step, at, flip))
    return found


def _short(file: StoredFile) -> str:
    parts = file.path.parts
    return "/".join(parts[parts.index(str(file.step)) :])


def _each(
    operation: Callable[[StoredFile], Callable[[], Damage] | None], what: str
) -> Callable[..., Iterator[Case]]:
    def cases(files: Sequence[StoredFile], root: Path, foreign: Path) -> Iterator[Case]:
        for file in files:
            apply = operation(file)
            if apply is not None:
                yield file.path, file.step, f"{_short(file)} {what}", apply

    return cases


def _cut(file: StoredFile, share: float) -> Callable[[], Damage] | None:
    size = file.path.stat().st_size
    return partial(damage.truncate, file.path, int(size * share)) if size else None


def _cut_last(file: StoredFile) -> Callable[[], Damage] | None:
    size = file.path.stat().st_size
    return partial(damage.truncate, file.path, size - 1) if size else None


def _between_steps(
    how: Callable[[Path, Path], Damage],
) -> Callable[..., Iterator[Case]]:
    """With the file of the same name, or the same place, in every other step."""

    def cases(files: Sequence[StoredFile], root: Path, foreign: Path) -> Iterator[Case]:
        for file, other in _counterparts(files):
            at = f"{_short(file)} with {_short(other)}"
            yield file.path, file.step, at, partial(how, other.path, file.path)

    return cases


def _counterparts(
    files: Sequence[StoredFile],
) -> Iterator[tuple[StoredFile, StoredFile]]:
    for file in files:
        for other in files:
            if other.step == file.step or other.kind != file.kind:
                continue
            random_names = file.path.parent.name == other.path.parent.name == "d"
            if other.path.name != file.path.name and not random_names:
                continue
            if file.array == other.array:
                yield file, other


def _within_step(files: Sequence[StoredFile], root: Path, _: Path) -> Iterator[Case]:
    """Each with the next one of its kind in its step."""
    for file, other in pairwise(files):
        if (file.step, file.kind) == (other.step, other.kind):
            at = f"{_short(file)} with {_short(other)}"
            swap = partial(damage.exchange, file.path, other.path)
            yield file.path, file.step, at, swap


def _from_other_run(
    files: Sequence[StoredFile], root: Path, foreign: Path
) -> Iterator[Case]:
    """Files of the same place in another run's root."""
    for file in files:
        other = foreign / file.path.relative_to(root)
        if other.exists():
            at = f"{_short(file)} of another run"
            put = partial(damage.duplicate, other, file.path)
            yield file.path, file.step, at, put


def _extra(files: Sequence[StoredFile], root: Path, _: Path) -> Iterator[Case]:
    """Copies beside the file, and of every other step's files in this step."""
    for file in files:
        beside = file.path.with_name(file.path.name + ".copy")
        yield (
            beside,
            file.step,
            f"copy of {_short(file)}",
            partial(damage.duplicate, file.path, beside),
        )
        for step in range(STEPS):
            target = root / str(step) / file.path.relative_to(root / str(file.step))
            if not target.exists():
                at = f"{_short(file)} also in step {step}"
                yield target, step, at, partial(damage.duplicate, file.path, target)


def _directories(files: Sequence[StoredFile], root: Path, _: Path) -> Iterator[Case]:
    """Whole step directories: missing, exchanged, emptied of one item."""
    for step in range(STEPS):
        here = root / str(step)
        yield here, step, f"step {step} missing", partial(damage.remove, here)
        item = here / "default"
        yield item, step, f"item of step {step} missing", partial(damage.remove, item)
        other = root / str((step + 1) % STEPS)
        at = f"steps {here.name} and {other.name} exchanged"
        # What rests on either finds the other one in its place, and the later comes first.
        yield other, step, at, partial(damage.exchange, here, other)


OPERATIONS: dict[str, Callable[..., Iterator[Case]]] = {
    "cut to nothing": _each(lambda file: _cut(file, 0), "cut to nothing"),
    "cut in half": _each(lambda file: _cut(file, 0.5), "cut in half"),
    "last byte cut off": _each(_cut_last, "without its last byte"),
    "a byte more": _each(lambda file: partial(damage.extend, file.path), "a byte more"),
    "missing": _each(lambda file: partial(damage.remove, file.path), "missing"),
    "extra files": _extra,
    "copied from another step": _between_steps(damage.duplicate),
    "exchanged with another step": _between_steps(damage.exchange),
    "exchanged within a step": _within_step,
    f"copied from {FOREIGN}": _from_other_run,
    "whole directories": _directories,
}
