"""Storage that returns errors: the save fails, training and the next save do not."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import Bench
from judging import TwinError
from outcomes import Outcome, Tally, Verdict
from scenarios import CHAIN, Note, Scenario, System
from stages import Stage, Strike
from systems import Trainer

from cnr_jax import errors
from cnr_jax.testing.faults import Call, Fault

NAME = "errors"
ABOUT = "calls that fail, once or for a while: the next save holds the rows of the failed one"
# What a full or failing disk, a full table of files, and a disk that went read-only return.
ERRORS = {
    "ENOSPC": ("open", "write", "mkdir"),
    "EIO": ("write", "fsync", "rename"),
    "EMFILE": ("open",),
    "EROFS": ("open", "mkdir", "rename"),
    "EDQUOT": ("write", "mkdir"),
}
EACH = 16
ALLOWED = frozenset({Outcome.EQUAL, Outcome.FAILED_ONCE})
FOR_EVER = 0
STEPS = 3  # saved before; then one more, the one that fails, and the one after it


def act(system: System, root: Path, note: Note, after: str) -> None:
    """Saves, saves while the fault strikes, saves again; notes what was raised and leaks."""
    trainer = system(root)
    newest = trainer.go_on()
    assert newest is not None
    _save(trainer, newest + 1)
    Path(after).touch()
    raised = [
        f"{call}: {text_of(error)}"
        for call, error in _failing_save(trainer, newest + 2)
    ]
    os.unlink(after)
    disarm()
    note({"raised": raised})
    try:
        _save(trainer, newest + 3)
    except Exception as error:
        note({"stuck": text_of(error)})
        return
    left = sorted(path.name for path in root.iterdir() if "tmp" in path.name)
    note(f"durable {newest + 3}")
    trainer.close()
    del trainer
    gc.collect()
    note({"left": left, "held": _held()})


def disarm() -> None:
    """Lets calls succeed again."""
    from cnr_jax.testing import faults

    faults.arm(
        below=os.environ["CNR_FAULT_GIVEN"], log=os.environ["CNR_FAULT_LOG"] + ".rest"
    )


def _save(trainer: Trainer, step: int) -> None:
    trainer.train(step)
    trainer.save(step)
    trainer.wait()


def _failing_save(trainer: Trainer, step: int) -> Iterator[tuple[str, BaseException]]:
    """What a train loop meets that goes on whatever a save raises."""
    trainer.train(step)
    for name, call in (
        ("save", lambda: trainer.save(step)),
        ("wait", trainer.wait),
        ("wait again", trainer.wait),
    ):
        try:
            call()
        except Exception as error:
            yield name, error


def _held() -> dict[str, int]:
    """Threads and open files, but for the logs of the faults themselves."""
    files = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            files += not Path(target).name.startswith("calls")
    # How many of those that unpack rows have begun depends on who waits when. They stay.
    threads = sum(
        not thread.name.startswith(("cnr_requests", "cnr_unpacking"))
        for thread in threading.enumerate()
    )
    return {"threads": threads, "files": files}


def text_of(error: BaseException) -> str:
    """An error as notes tell of it."""
    ours = "cnr_jax: " if isinstance(error, errors.CnrError) else ""
    return f"{ours}{type(error).__name__}: {error}"


def run(bench: Bench) -> Iterator[Tally]:
    for system in bench.systems:
        stage = None
        for action, kinds in ERRORS.items():
            if not bench.wants(NAME, action, system):
                continue
            tally = Tally(NAME, action, system.name, ALLOWED)
            try:
                stage = stage or _stage(bench, system)
            except TwinError as error:
                tally.add(Verdict(Outcome.UNCLEAR, str(error)), "before any fault")
                yield tally
                continue
            faults = list(_faults(bench, stage.calls, action, kinds))
            for fault, strike in bench.side_by_side(stage.strike, faults):
                times = " for ever" if fault.times == FOR_EVER else ""
                verdict = _verdict(stage, strike, fault)
                tally.add(verdict, f"{fault.call}{times}, {strike}")
                strike.remove()
            yield tally


def _stage(bench: Bench, system: System) -> Stage:
    """The scenario, and what it leaves if nothing happens."""
    scenario = Scenario(
        "failing save",
        CHAIN,
        act,
        # The step that fails; where it does not, it is listed and compared.
        removes=frozenset({STEPS + 1}),
    )
    return bench.stage(system, scenario, arms_later=True)


def _faults(
    bench: Bench, calls: Sequence[Call], action: str, kinds: Sequence[str]
) -> Iterator[Fault]:
    """Each call of these kinds fails once; some, and all after them, for ever."""
    for kind in bench.sample(kinds, 1):
        count = sum(call.call == kind for call in calls)
        numbers = bench.sample(range(1, count + 1), 1, EACH)
        yield from (Fault(kind, n, action) for n in numbers)
        for n in bench.sample(numbers, 0, 3):
            yield Fault(kind, n, action, times=FOR_EVER)


def _verdict(stage: Stage, strike: Strike, fault: Fault) -> Verdict:
    unmet = strike.unmet()
    if unmet is not None:
        return unmet
    usual, found = told(stage.clean.notes)["held"], told(strike.ended.notes)
    if "stuck" in found:
        return Verdict(Outcome.STUCK, f"{found['stuck']} after {found['raised']}")
    if strike.ended.status != 0 or "held" not in found:
        return Verdict(Outcome.UNCLEAR, f"{strike.ended.notes}")
    judged = stage.judge(strike.root, durable=True)
    if judged.outcome is not Outcome.EQUAL:
        return judged
    raised = found["raised"]
    if not raised and fault.call == "fsync":
        return Verdict(Outcome.NOT_RAISED)
    more = {k: n - usual[k] for k, n in found["held"].items() if n > usual[k]}
    if found["left"] or more:
        return Verdict(Outcome.LEAK, f"left {found['left']}, more {more}; {raised}")
    if not raised:
        return judged
    if len(raised) > 1 or not is_clear(raised[0], fault.action):
        return Verdict(Outcome.UNCLEAR, f"{raised}")
    return Verdict(Outcome.FAILED_ONCE)


def told(notes: Sequence[Any]) -> dict[str, Any]:
    """All that a child has noted by name."""
    found: dict[str, Any] = {}
    for note in notes:
        found |= note if isinstance(note, dict) else {}
    return found


def is_clear(text: str, action: str) -> bool:
    """Whether an error says what the operating system said."""
    return os.strerror(getattr(errno, action)).lower() in text.lower() or action in text
