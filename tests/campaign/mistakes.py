"""Slow stores, wrong clocks, runs started anew in used roots, two managers or threads of one."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import judging
import training
from bench import Bench
from children import Ended
from judging import TwinError
from kills import verdict
from outcomes import Outcome, Tally, Verdict
from scenarios import BY_NAME, Note, System, chain_of, steps_from
from stages import Stage
from systems import Trainer

from cnr_jax import errors
from cnr_jax.testing.faults import Fault

NAME = "mistakes"
ABOUT = "slow stores, wrong clocks, stale deltas, two managers, two threads"
ALLOWED = frozenset({Outcome.EQUAL})
YEAR_SECS = 365 * 86400.0
PARTS = ("slow store", "wrong clock", "stale deltas", "two managers", "two threads")
SLOW = (
    Fault("any", 1, "delay", times=0, secs=0.01),
    Fault("fsync", 1, "delay", times=0, secs=0.05),
    Fault("rename", 2, "delay", secs=1.0),
)
# How far the clock is off, and how fast it runs, while a step is saved.
CLOCKS = ((-10 * YEAR_SECS, 1.0), (10 * YEAR_SECS, 1.0), (0.0, -1.0))
RERUN, KEPT = 3, 5
TOGETHER = 6
HANGS_AFTER_SECS = 120.0


def run(bench: Bench) -> Iterator[Tally]:
    for system in bench.systems:
        for part in PARTS:
            if bench.wants(NAME, part, system):
                tally = Tally(NAME, part, system.name, ALLOWED)
                try:
                    for found, label in CASES[part](bench, system):
                        tally.add(found, label)
                except TwinError as error:
                    tally.add(Verdict(Outcome.UNCLEAR, str(error)), "before any fault")
                yield tally


Found = Iterator[tuple[Verdict, str]]


def _slow(bench: Bench, system: System) -> Found:
    for name in ("delta", "full and retention")[: 1 if bench.quick else 2]:
        stage = bench.stage(system, BY_NAME[name])
        for fault, strike in bench.side_by_side(stage.strike, bench.sample(SLOW, 1)):
            yield verdict(stage.judge, strike), f"{name}, {fault}"
            strike.remove()


def _clocks(bench: Bench, system: System) -> Found:
    stage = bench.stage(system, BY_NAME["delta"])
    for shift, speed in bench.sample(CLOCKS, 1):
        for touch in bench.sample((None, 0.0, 4e9), 1):
            yield _under_clock(stage, shift, speed, touch), f"{shift} {speed} {touch}"


def _under_clock(
    stage: Stage, shift: float, speed: float, touch: float | None
) -> Verdict:
    root = stage.play.place.new_root()
    stage.play.copy_to(root)
    if touch is not None:
        for path in root.rglob("*"):
            os.utime(path, (touch, touch))
    with stage.play.place.server() as server:
        ended = server.run(
            stage.play.system.name, "wrong clock", root, shift=shift, speed=speed
        )
    if ended.status != 0:
        return _failed(ended)
    found = stage.judge(root, durable=True)
    shutil.rmtree(root)
    return found


def under_wrong_clock(
    system: System, root: Path, note: Note, *, shift: float, speed: float
) -> None:
    """Saves the next step while the clock is wrong; run in a child."""
    real, start = time.time, time.time()
    time.time = lambda: start + shift + speed * (real() - start)
    time.time_ns = lambda: int(time.time() * 1e9)
    BY_NAME["delta"].act(system, root, note)


def _stale(bench: Bench, system: System) -> Found:
    """Run A saves 5 steps; run B starts anew there, or its root is given A's last deltas."""
    backup = bench.new_root()
    chain_of(KEPT)(system, backup)
    yield _forgets_to_restore(bench, system, backup), "forgot to restore"
    for how in ("started anew in the root of another", "given steps of another"):
        root = bench.new_root()
        if how.startswith("started"):
            shutil.copytree(backup, root)
        try:
            trainer = system(root, new_run=True)
            steps_from(trainer, 0, RERUN, salt=1)
            trainer.close()
        except Exception as error:
            yield Verdict(Outcome.STUCK, f"{type(error).__name__}: {error}"), how
            continue
        if how.startswith("given"):
            for step in range(RERUN, KEPT):
                shutil.copytree(backup / str(step), root / str(step))
        yield _is_second_run(system, root), how
        shutil.rmtree(root)
    shutil.rmtree(backup)


def _forgets_to_restore(bench: Bench, system: System, backup: Path) -> Verdict:
    """Run B restores nothing, and retention keeps two: all of run A must still be there."""
    root = bench.new_root()
    shutil.copytree(backup, root)
    notes: list[Any] = []
    trainer = system(root, keep=2)
    for step in range(RERUN):
        _try_save(trainer, step, 1, notes.append)
    trainer.close()
    try:
        for step in range(KEPT):
            values = judging.restored(system, root, step)
            if digest(values) != digest(training.values_of(training.state_after(step))):
                return Verdict(
                    Outcome.WRONG, f"step {step} is not that of the first run"
                )
    except Exception as error:
        return Verdict(Outcome.LOST, f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(root)
    return Verdict(Outcome.EQUAL)


def _is_second_run(system: System, root: Path) -> Verdict:
    """Whether what is restored, and what is saved next, is of the second run alone."""
    salts = dict.fromkeys(range(RERUN), 1)
    try:
        trainer = system(root)
        newest = trainer.go_on()
        trainer.close()
        if newest != RERUN - 1:
            text = f"newest is {newest}, expected {RERUN - 1}"
            return Verdict(Outcome.FOREIGN, text)
        _, following = judging.go_on(system, root, None)
    except Exception as error:
        return Verdict(Outcome.LISTED, f"{type(error).__name__}: {error}")
    for got, step in ((training.values_of(trainer.state), newest), (following, RERUN)):
        want = training.values_of(training.state_after(step, salts))
        wrong = set(training.differing(got, want)) - training.QUANTIZED
        if wrong or not judging.near(got, want):
            return Verdict(Outcome.WRONG, f"step {step}: {sorted(wrong)}")
    return Verdict(Outcome.EQUAL)


def _two_managers(bench: Bench, system: System) -> Found:
    """Two in one process, one after the other; and two processes at the same time."""
    for keep in bench.sample((None, 1), 1):
        for number in range(1 if bench.quick else 5):
            root = bench.new_root()
            chain_of(2)(system, root)
            if number == 0:
                with bench.server() as server:
                    ends = [server.run(system.name, "two managers", root, keep=keep)]
            else:
                ends = _at_once(bench, system, root, keep)
            label = f"keep {keep}, {'in turns' if number == 0 else 'at once'}"
            yield _judge_two(system, root, ends), label
            shutil.rmtree(root)


def _at_once(
    bench: Bench, system: System, root: Path, keep: int | None
) -> Sequence[Ended]:
    def save(salt: int) -> Ended:
        with bench.server() as server:
            return server.run(system.name, "one of two", root, salt=salt, keep=keep)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(save, (1, 2)))


def one_of_two(
    system: System, root: Path, note: Note, *, salt: int, keep: int | None
) -> None:
    """Goes on from the newest step and saves some, whatever happens; run in a child."""
    trainer = system(root, keep=keep)
    newest = trainer.go_on()
    assert newest is not None
    # Else one may be done before the other begins, which then goes on from its last step.
    here, there = (root.with_name(f"{root.name}-{n}") for n in (salt, 3 - salt))
    here.touch()
    deadline = time.monotonic() + HANGS_AFTER_SECS
    while not there.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    for step in range(newest + 1, newest + 1 + TOGETHER):
        _try_save(trainer, step, salt, note)
    _try(trainer.close, note)


def two_in_turns(system: System, root: Path, note: Note, *, keep: int | None) -> None:
    """Two managers in one process, each of which thinks the root its own; run in a child."""
    trainers = [system(root, keep=keep) for _ in range(2)]
    for trainer in trainers:
        trainer.go_on()
    for step in range(2, 2 + TOGETHER):
        for salt, trainer in enumerate(trainers):
            _try_save(trainer, step, salt, note)
    for trainer in trainers:
        _try(trainer.close, note)


def _try_save(trainer: Trainer, step: int, salt: int, note: Note) -> None:
    trainer.train(step, salt)
    note({"step": step, "digest": digest(training.values_of(trainer.state))})
    _try(partial(trainer.save, step), note)
    _try(trainer.wait, note)


def _try(call: Callable[[], Any], note: Note) -> None:
    try:
        call()
    except Exception as error:
        note({"error": f"{type(error).__name__}: {error}"})


def digest(values: training.Values) -> str:
    """Of all leaves that are stored exactly."""
    found = hashlib.sha256()
    for path in sorted(values.keys() - training.QUANTIZED):
        found.update(path.encode() + values[path].tobytes())
    return found.hexdigest()


def _judge_two(system: System, root: Path, ends: Sequence[Ended]) -> Verdict:
    """Every listed step is one that either saved, the next save works, and it was noticed."""
    for ended in ends:
        if ended.status != 0:
            return _failed(ended)
    notes = [note for ended in ends for note in ended.notes]
    saved = {(n["step"], n["digest"]) for n in notes if "digest" in n}
    for step in range(2):
        values = training.values_of(training.state_after(step))
        saved.add((step, digest(values)))
    try:
        for step in judging.listed(system, root):
            if (step, digest(judging.restored(system, root, step))) not in saved:
                return Verdict(Outcome.WRONG, f"step {step} was saved by neither")
    except Exception as error:
        return Verdict(Outcome.LISTED, f"{type(error).__name__}: {error}")
    try:
        judging.go_on(system, root, None)
    except Exception as error:
        return Verdict(Outcome.STUCK, f"{type(error).__name__}: {error}")
    raised = [note["error"] for note in notes if "error" in note]
    if not any(text.startswith(errors.WriterError.__name__) for text in raised):
        return Verdict(Outcome.UNCLEAR, f"not noticed; raised {raised[:3]}")
    return Verdict(Outcome.EQUAL)


def _two_threads(bench: Bench, system: System) -> Found:
    """Two threads save one state on one manager, each its own steps."""
    for number in range(1 if bench.quick else 10):
        root = bench.new_root()
        trainer = system(root)
        trainer.train(0)
        saved, raised = set[int](), list[str]()

        def save(first: int, trainer: Trainer = trainer, saved: Any = saved) -> None:
            for step in range(first, 2 * TOGETHER, 2):
                if trainer.save(step):
                    saved.add(step)

        def attempt(call: Callable[[], Any], raised: list[str] = raised) -> None:
            _try(call, lambda note: raised.append(note["error"]))

        threads = [
            # Those that hang must not keep the campaign from ending.
            threading.Thread(target=attempt, args=(partial(save, i),), daemon=True)
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_AFTER_SECS)
        label = f"number {number}"
        if any(thread.is_alive() for thread in threads):
            yield Verdict(Outcome.HANG, f"raised {raised[:3]}"), label
            continue
        attempt(trainer.close)
        yield _judge_threads(system, root, saved, raised), label
        shutil.rmtree(root)


def _judge_threads(
    system: System, root: Path, saved: set[int], raised: list[str]
) -> Verdict:
    """Every save that returned True is a step that restores, and nothing was raised."""
    want = digest(training.values_of(training.state_after(0)))
    try:
        listed = set(judging.listed(system, root))
        for step in sorted(listed):
            if digest(judging.restored(system, root, step)) != want:
                return Verdict(Outcome.WRONG, f"step {step}")
    except Exception as error:
        return Verdict(Outcome.LISTED, f"{type(error).__name__}: {error}")
    if listed != saved:
        text = f"{len(saved)} saves, {len(listed)} steps; raised {raised[:3]}"
        return Verdict(Outcome.LOST, text)
    if raised or not saved:
        return Verdict(Outcome.UNCLEAR, f"raised {raised[:3]}")
    return Verdict(Outcome.EQUAL)


def _failed(ended: Ended) -> Verdict:
    outcome = Outcome.HANG if ended.status is None else Outcome.UNCLEAR
    return Verdict(outcome, "\n".join(map(str, ended.notes[-2:])))


CASES = dict(
    zip(PARTS, (_slow, _clocks, _stale, _two_managers, _two_threads), strict=True)
)
