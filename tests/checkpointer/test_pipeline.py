"""Saves on their way: their order, failures, interrupts and what they leave, with real files.

What is saved is a file a process, written by work of this module: it can be held up and made to
fail at each stage, and several saves can be in flight, of which a manager has one. What a manager
does at each stage is tested with managers: `test_failing_saves.py`, `test_interrupts.py`,
`test_storage.py`, `test_retention.py` and `multiprocess/`.

Threads stand for processes where there are several: each has a pipeline of its own, and all have
one root.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import dataclasses
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import Channel
from cnr_jax.checkpointer.saving.pipeline import PipelinedSave, SavePipeline
from cnr_jax.format.names import ORBAX_COMMITTED, REMOVED_MARK, TEMPORARY_SUFFIX
from cnr_jax.repository.committer import (
    Attempt,
    Committer,
    RenameCommitter,
)
from cnr_jax.repository.store import sync_directory, write_durably
from cnr_jax.repository.upkeep.removal import Remover
from cnr_jax.testing import inprocess
from cnr_jax.testing.interrupts import interrupting

from .test_agreement import Processes

ITEM = "state"
COMMITTERS = ["rename", "marker"]


class Stop:
    """A point at which a save waits, once it is shut, or meets an error."""

    def __init__(self) -> None:
        self.reached, self._may_pass = threading.Event(), threading.Event()
        self._may_pass.set()
        self.error: BaseException | None = None

    def shut(self) -> Stop:
        self._may_pass.clear()
        return self

    def open(self, error: BaseException | None = None) -> None:
        self.error = error
        self._may_pass.set()

    def pass_(self) -> None:
        self.reached.set()
        assert self._may_pass.wait(60), "nobody has opened it"
        if self.error is not None:
            raise self.error


class Files:
    """A save of one file a process, which is written in the background.

    Attributes:
        at: where it can be held up or fail.
        events: what happened, on which process.
    """

    def __init__(self, writer: Writer, step: int) -> None:
        self.writer, self.step = writer, step
        names = "stage", "write", "seal", "published", "retire"
        self.at = {name: Stop() for name in names}
        self.why: BaseException | None = None
        self.error: errors.CnrError | None = None

    def note(self, what: str) -> None:
        self.writer.events.append((what, self.step))

    def items(self, save: Any) -> list[str]:
        return [ITEM]

    def stage(self, save: Any, folder: Any) -> Sequence[Any]:
        self.at["stage"].pass_()
        return [self.writer.pool.submit(self._write, Path(folder))]

    def _write(self, folder: Path) -> None:
        path = folder / ITEM / f"{self.writer.process}.txt"
        with path.open("w") as file:
            self.at["write"].pass_()
            if self.why is not None:
                raise concurrent.futures.CancelledError
            file.write(str(self.step))

    def cancel(self, save: Any, why: BaseException) -> None:
        self.why = self.why or why
        self.at["stage"].open(self.at["stage"].error)
        self.at["write"].open(self.at["write"].error)

    def seal(self, save: Any, folder: Any) -> list[str]:
        self.at["seal"].pass_()
        held = sorted(path.name for path in (Path(folder) / ITEM).iterdir())
        (Path(folder) / ITEM / "whole").write_text(" ".join(held))
        return []

    def make_durable(self, save: Any) -> None:
        self.note("durable")

    def published(self, save: Any) -> Any:
        self.note("published")
        self.at["published"].pass_()
        return {"goes": self.writer.superfluous()}

    def committed(self, save: Any, told: Any) -> None:
        self.note("committed" if told is not None else "committed, unheard")

    def retire(self, save: Any, told: Any) -> Any:
        self.at["retire"].pass_()
        for step in told["goes"]:
            self.writer.remove(step)
            self.note(f"removed {step}")
        return told

    def retired(self, save: Any, told: Any) -> None:
        self.note("retired" if told is not None else "retired, unheard")

    def failed(self, save: Any, error: errors.CnrError) -> None:
        self.error = error
        self.note("failed")

    def ended(self, save: Any) -> None:
        self.note("ended")


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Saved(PipelinedSave):
    """A save of files, maybe on top of another one."""

    files: Files
    parent: Saved | None = None

    @property
    def rests_on(self) -> str | None:
        return self.parent.attempt.nonce if self.parent else None


class Work:
    """Lets the files of a save do what a pipeline asks for."""

    def __getattr__(self, name: str) -> Any:
        return lambda save, *given: getattr(save.files, name)(save, *given)


class MarkedFolders:
    """A committer of folders that have their final names, committed by a file, as in a service."""

    def folder(self, attempt: Attempt) -> Any:
        return attempt.path

    def prepare(self, attempt: Attempt, items: Sequence[str]) -> None:
        if (attempt.path / ORBAX_COMMITTED).exists():
            raise self._taken(attempt)
        shutil.rmtree(attempt.path, ignore_errors=True)
        for path in (attempt.path, *(attempt.path / item for item in items)):
            path.mkdir()

    def publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        if (attempt.path / ORBAX_COMMITTED).exists():
            raise self._taken(attempt)
        write_durably(attempt.path / ORBAX_COMMITTED, attempt.nonce.encode())

    def settle(self, attempt: Attempt) -> None:
        sync_directory(attempt.root)

    def is_published(self, attempt: Attempt) -> bool:
        marker = attempt.path / ORBAX_COMMITTED
        return marker.exists() and marker.read_text() == attempt.nonce

    def abandon(self, attempt: Attempt) -> None:
        if not (attempt.path / ORBAX_COMMITTED).exists():
            shutil.rmtree(attempt.path, ignore_errors=True)

    def _taken(self, attempt: Attempt) -> errors.DependentsExistError:
        return errors.DependentsExistError(f"got {ORBAX_COMMITTED} in {attempt.path}")


class Writer:
    """One process that saves to a root, and keeps its two newest steps."""

    def __init__(
        self,
        root: Path,
        kind: str,
        most: int = 1,
        channel: Channel | None = None,
        process: int = 0,
    ) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.process, self.kept = root, process, 2
        self.events: list[tuple[str, int]] = []
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.remover = Remover(root)
        self.committer: Committer = (
            RenameCommitter(self.remover.discard)
            if kind == "rename"
            else MarkedFolders()
        )
        self.pipeline = SavePipeline[Saved](
            self.committer, channel or Channel(30.0), Work(), most
        )
        self.saves: list[Saved] = []

    def save(
        self,
        step: int,
        prepare: Callable[[Files], Any] = lambda _: None,
        parent: Saved | None = None,
        nonce: str = "",
    ) -> Files:
        work = Files(self, step)
        prepare(work)
        attempt = Attempt(self.root, str(step), nonce or secrets.token_hex(16))

        def plan() -> Saved:
            self.saves.append(Saved(attempt=attempt, files=work, parent=parent))
            return self.saves[-1]

        self.pipeline.begin(plan)
        return work

    def superfluous(self) -> list[int]:
        return self.steps()[: -self.kept]

    def remove(self, step: int) -> None:
        if isinstance(self.committer, MarkedFolders):
            (self.root / str(step) / ORBAX_COMMITTED).unlink()
        self.remover.remove(str(step))

    def steps(self) -> list[int]:
        return sorted(
            int(path.name)
            for path in self.root.iterdir()
            if path.name.isdigit() and (path / ORBAX_COMMITTED).exists()
        )

    def end(self) -> list[Saved]:
        self.pipeline.wait()
        found = self.pipeline.ended()
        for save in found:
            self.pipeline.forget(save)
        # Of others the call that began them has told.
        return [save for save in found if save.has_begun]

    def close(self) -> None:
        self.pipeline.wait()
        self.pipeline.close()
        self.pool.shutdown()
        self.remover.close()

    def left(self) -> list[str]:
        """What lies in the root beside committed steps."""
        self.remover.wait(30)
        steps = {str(step) for step in self.steps()}
        return sorted(
            path.name for path in self.root.iterdir() if path.name not in steps
        )

    def of(self, step: int) -> list[str]:
        return [what for what, other in self.events if other == step]


@pytest.fixture(params=COMMITTERS)
def kind(request: Any) -> str:
    return request.param


@pytest.fixture
def writer(tmp_path: Path, kind: str) -> Iterator[Callable[..., Writer]]:
    made: list[Writer] = []

    def make(most: int = 1) -> Writer:
        made.append(Writer(tmp_path / "root", kind, most))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---- order ----------------------------------------------------------------------------------


def test_a_save_goes_through_all_its_stages_in_order(writer: Any) -> None:
    saving = writer()
    saving.save(1)
    (save,) = saving.end()
    assert save.is_committed and save.error is None and saving.steps() == [1]
    stages = ["durable", "published", "committed", "retired", "ended"]
    assert saving.of(1) == stages
    held = sorted(path.name for path in (saving.root / "1" / ITEM).iterdir())
    assert held == ["0.txt", "whole"] and saving.left() == []
    assert not saving.pipeline.is_busy and saving.pipeline.ended() == []


def test_saves_written_at_once_are_committed_in_the_order_of_their_beginning(
    writer: Any,
) -> None:
    saving, stops = writer(3), dict[int, Stop]()
    for step in (1, 2, 3):
        saving.save(
            step, lambda work: stops.update({work.step: work.at["write"].shut()})
        )
    assert [save.step for save in saving.pipeline.in_flight()] == [1, 2, 3]
    for step in (3, 2):
        stops[step].open()
    time.sleep(0.05)
    assert saving.steps() == [], "the first is not written yet"
    stops[1].open()
    assert [save.step for save in saving.end()] == [1, 2, 3]
    order = [step for what, step in saving.events if what == "published"]
    assert order == [1, 2, 3]


def test_a_save_waits_for_room(writer: Any) -> None:
    saving, stops = writer(2), list[Stop]()
    for step in (1, 2):
        saving.save(step, lambda work: stops.append(work.at["write"].shut()))
    begun = threading.Event()

    def begin() -> None:
        saving.save(3)
        begun.set()

    thread = threading.Thread(target=begin)
    thread.start()
    assert not begun.wait(0.1), "two are the most"
    stops[0].open()
    assert begun.wait(30)
    stops[1].open()
    thread.join()
    saving.end()
    assert saving.steps() == [2, 3], "retention has kept two"


def test_the_commit_is_told_before_anything_goes_in_its_favour(writer: Any) -> None:
    """A slow deletion must not make a committed step look like a failed one."""
    saving = writer()
    for step in (1, 2):
        saving.save(step)
        saving.end()
    held = list[Stop]()
    saving.save(3, lambda work: held.append(work.at["retire"].shut()))
    assert held[0].reached.wait(30)
    assert saving.of(3) == ["durable", "published", "committed"]
    assert saving.steps() == [1, 2, 3] and saving.pipeline.is_busy
    held[0].open()
    (save,) = saving.end()
    assert save.is_committed and saving.steps() == [2, 3]


def test_a_save_is_committed_while_the_one_before_retires_and_goes_on_after_it(
    writer: Any,
) -> None:
    saving, held = writer(2), Stop().shut()
    saving.save(1, lambda work: work.at.update(retire=held))
    assert held.reached.wait(30)
    saving.save(2)
    second = saving.saves[-1]
    assert second.known.wait(30) and second.is_committed and saving.steps() == [1, 2]
    time.sleep(0.05)
    assert saving.of(2) == ["durable"], "what comes after the commit keeps the order"
    held.open()
    assert [save.step for save in saving.end()] == [1, 2]
    assert saving.of(2) == ["durable", "published", "committed", "retired", "ended"]


def test_what_rests_on_a_failed_save_is_not_written_to_its_end(writer: Any) -> None:
    saving, stop = writer(4), Stop().shut()
    saving.save(1, lambda work: work.at.update(write=stop))
    below = saving.saves[-1]
    for step in (2, 3):
        saving.save(step, lambda work: work.at["write"].shut(), below)
        below = saving.saves[-1]
    saving.save(4)
    first, second, third, fourth = saving.saves
    stop.open(OSError(28, "no space left"))
    assert second.files.at["write"].reached.wait(30)
    assert [save.step for save in saving.end()] == [1, 2, 3, 4]
    assert saving.pipeline.fallen_with(first) == [first]  # all are forgotten
    assert fourth.is_committed and saving.steps() == [4] and saving.left() == []
    for save, under in ((second, 1), (third, 2)):
        assert f"it rests on step {under}, whose save failed" in str(save.error)
        assert save.error is not None and save.error.kind == "save_failed"


def test_those_that_fall_with_a_save_are_known_until_they_are_noted(
    writer: Any,
) -> None:
    saving = writer(4)
    saving.save(1, lambda work: work.at["write"].open(OSError(28, "no space left")))
    first = saving.saves[-1]
    first.thread.wait(30)
    saving.save(2, parent=first)
    saving.save(3)
    saving.save(4, parent=saving.saves[1])
    saving.pipeline.wait()
    _, second, third, fourth = saving.saves
    assert saving.pipeline.fallen_with(first) == [first, second, fourth]
    assert saving.pipeline.fallen_with(third) == [third] and third.is_committed


# ---- failures -------------------------------------------------------------------------------

NO_SPACE = OSError(28, "no space")


@pytest.mark.parametrize("where", ["write", "seal"])
def test_a_failure_is_told_once_and_takes_its_files_away(
    writer: Any, where: str
) -> None:
    saving = writer()
    saving.save(1)
    saving.save(2, lambda work: work.at[where].open(NO_SPACE))
    good, bad = saving.end()
    assert good.is_committed and not bad.is_committed
    assert isinstance(bad.error, errors.SaveError) and "step 2 failed" in str(bad.error)
    assert bad.error.errno == 28 and bad.error.step == 2
    assert saving.of(2) == ["failed", "ended"]
    assert saving.steps() == [1] and saving.left() == []
    assert saving.end() == []
    saving.save(2)
    assert saving.end()[0].is_committed, "the step can be saved again"


def test_a_failure_takes_down_what_rests_on_it_and_no_other(writer: Any) -> None:
    """Also if it fails after they began; none of them is an error of its own, later."""
    saving, stop = writer(4), Stop().shut()
    saving.kept = 9
    saving.save(1, lambda work: work.at.update(write=stop))
    first = saving.saves[-1]
    saving.save(2, parent=first)
    second = saving.saves[-1]
    saving.save(3, parent=second)
    saving.save(4)
    stop.open(NO_SPACE)
    first.thread.wait()
    found = saving.pipeline.ended()
    while len(found) < 4:
        found = saving.pipeline.ended()
        assert [save.step for save in found[:3]] == [1, 2, 3], "all that fell, at once"
    assert [save.is_committed for save in found] == [False, False, False, True]
    assert "no space" in str(found[0].error)
    assert "it rests on step 1" in str(found[1].error)
    assert saving.steps() == [4] and saving.left() == []


def test_a_failure_in_staging_comes_out_of_the_call_and_leaves_nothing(
    writer: Any,
) -> None:
    saving = writer(2)
    stop = Stop().shut()
    saving.save(1, lambda work: work.at.update(write=stop))
    with pytest.raises(OSError, match="no space") as caught:
        saving.save(2, lambda work: work.at["stage"].open(NO_SPACE))
    assert caught.value is NO_SPACE
    assert saving.of(2) == ["failed", "ended"]
    assert [save.step for save in saving.pipeline.in_flight()] == [1]
    stop.open()
    assert [save.step for save in saving.end()] == [1], "told already"
    assert saving.left() == []


def test_a_plan_that_is_refused_leaves_nothing_at_all(writer: Any) -> None:
    saving = writer()

    def refuse() -> Saved:
        raise errors.OptionError("no")

    with pytest.raises(errors.OptionError):
        saving.pipeline.begin(refuse)
    assert not saving.pipeline.is_busy and saving.end() == []


@pytest.mark.parametrize("where", ["published", "retire"])
def test_what_fails_after_the_commit_says_so_and_the_step_stays(
    writer: Any, where: str
) -> None:
    saving = writer()
    saving.save(1, lambda work: work.at[where].open(NO_SPACE))
    (save,) = saving.end()
    assert save.is_committed and save.error is not None
    assert (save.error.kind, save.error.step) == ("after_commit", 1)
    assert saving.steps() == [1]
    assert saving.of(1)[-2:] == ["failed", "ended"]


def test_nothing_goes_in_favour_of_a_step_of_which_the_commit_may_not_last(
    writer: Any,
) -> None:
    saving = writer()
    saving.kept = 1
    saving.save(1)
    saving.save(2, lambda work: work.at["published"].open(NO_SPACE))
    saving.end()
    assert saving.steps() == [1, 2]


def test_a_step_that_somebody_else_has_saved_meanwhile_is_not_replaced(
    writer: Any,
) -> None:
    saving, stop = writer(), Stop().shut()
    saving.save(1, lambda work: work.at.update(seal=stop))
    assert stop.reached.wait(30)
    (saving.root / "1").mkdir(exist_ok=True)
    (saving.root / "1" / ORBAX_COMMITTED).write_text("theirs")
    stop.open()
    (save,) = saving.end()
    assert not save.is_committed and f"got {ORBAX_COMMITTED}" in str(save.error)
    assert (saving.root / "1" / ORBAX_COMMITTED).read_text() == "theirs"


def test_an_empty_folder_in_the_place_of_a_step_is_not_replaced(tmp_path: Path) -> None:
    """The system itself would let a folder take its name."""
    saving = Writer(tmp_path / "root", "rename")
    (saving.root / "1").mkdir()
    saving.save(1)
    (save,) = saving.end()
    assert not save.is_committed and "got an empty folder" in str(save.error)
    saving.close()


def test_a_commit_of_which_the_answer_is_lost_is_one(tmp_path: Path) -> None:
    """The store is asked: by what the attempt has left there, and no other could."""
    saving = Writer(tmp_path / "root", "rename")

    def lose(call: inprocess.Call) -> None:
        if call.call == "rename" and call.path.endswith(TEMPORARY_SUFFIX) is False:
            if TEMPORARY_SUFFIX in call.path:
                raise OSError(5, "the answer is lost")

    with inprocess.watching(saving.root, after=lose):
        saving.save(1)
        (save,) = saving.end()
    assert save.is_committed and save.error is None and saving.steps() == [1]
    saving.close()


def test_what_still_writes_for_an_attempt_that_was_given_up_harms_no_other(
    tmp_path: Path,
) -> None:
    """Such as a thread of which the future was lost: each attempt has a folder of its own."""
    saving = Writer(tmp_path / "root", "rename")
    folders = [
        saving.committer.folder(Attempt(saving.root, "1", secrets.token_hex(16)))
        for _ in range(2)
    ]
    assert folders[0] != folders[1]
    stop = Stop().shut()
    work = saving.save(1, lambda work: work.at.update(seal=stop))
    assert stop.reached.wait(30)
    stray = Path(saving.committer.folder(saving.saves[-1].attempt))
    stop.open(NO_SPACE)
    assert not saving.end()[0].is_committed and work.error is not None
    (stray / ITEM).mkdir(parents=True)
    (stray / ITEM / "stray.txt").write_text("of the first attempt")
    saving.save(1)
    assert saving.end()[0].is_committed
    held = sorted(path.name for path in (saving.root / "1" / ITEM).iterdir())
    assert held == ["0.txt", "whole"]
    saving.close()


# ---- interrupts -----------------------------------------------------------------------------


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_staging_runs_where_no_interrupt_comes_and_ends_soon_after_one(
    writer: Any,
) -> None:
    saving = writer()
    stop = Stop().shut()

    def prepare(work: Files) -> None:
        work.at["stage"] = stop

    def shoot() -> None:
        assert stop.reached.wait(30)
        interrupt()

    threading.Thread(target=shoot).start()
    with pytest.raises(KeyboardInterrupt):
        saving.save(1, prepare)
    assert not saving.pipeline.is_busy and saving.steps() == []
    assert saving.of(1) == ["failed", "ended"] and saving.end() == []
    assert saving.left() == []
    saving.save(1)
    assert saving.end()[0].is_committed


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_leaves_the_rest_to_the_next_call(writer: Any) -> None:
    saving, stop, told = writer(), Stop().shut(), threading.Event()

    def prepare(work: Files) -> None:
        work.at["stage"] = stop
        work.cancel = lambda save, why: told.set()  # type: ignore[method-assign]

    def shoot() -> None:
        assert stop.reached.wait(30)
        interrupt()
        assert told.wait(30)
        time.sleep(0.1)
        interrupt()

    threading.Thread(target=shoot).start()
    with pytest.raises(KeyboardInterrupt):
        saving.save(1, prepare)
    assert saving.pipeline.is_busy
    threading.Timer(0.1, stop.open).start()
    saving.save(2)
    saving.end()
    assert saving.steps() == [2] and saving.left() == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_wait_loses_no_save(writer: Any) -> None:
    saving, stop = writer(), Stop().shut()
    saving.save(1, lambda work: work.at.update(write=stop))
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, interrupt).start()
        saving.pipeline.wait()
    stop.open()
    assert [save.step for save in saving.end()] == [1]


@pytest.mark.usefixtures("interruptible")
def test_after_an_interrupt_at_any_moment_the_next_calls_work(
    tmp_path: Path, kind: str
) -> None:
    nth = 1
    while True:
        saving = Writer(tmp_path / str(nth), kind)
        saving.save(1)
        raised = False
        try:
            with interrupting(nth) as found:
                saving.save(2)
        except KeyboardInterrupt:
            raised = True
        ended = saving.end()
        steps = saving.steps()
        assert steps in ([1], [1, 2]), found.where
        assert sum(save.is_committed for save in ended) == len(steps), found.where
        assert [s for s in ended if not s.is_committed] == [], "told by the interrupt"
        saving.save(3)
        assert saving.end()[0].is_committed
        assert saving.left() == [], found.where
        saving.close()
        if not raised:
            return
        nth += 1


# ---- several processes ----------------------------------------------------------------------


class Run:
    """A pipeline a process, in one root."""

    def __init__(
        self, root: Path, kind: str, count: int, patch: Any, secs: float
    ) -> None:
        self.processes = Processes(count, patch)
        self.writers = [
            Writer(root, kind, 3, channel, process)
            for process, channel in enumerate(self.processes.channels(secs))
        ]

    def save(
        self, step: int, prepare: Callable[[int, Files], Any] | None = None
    ) -> Any:
        nonce = secrets.token_hex(16)

        def one(process: int) -> Files:
            def prepared(work: Files) -> None:
                if prepare is not None:
                    prepare(process, work)

            return self.writers[process].save(step, prepared, nonce=nonce)

        return self.processes.all(one)

    def end(self) -> list[list[Saved]]:
        found = self.processes.all(lambda process: self.writers[process].end())
        assert not [each for each in found if isinstance(each, BaseException)], found
        return found


@pytest.fixture
def run(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Run] = []

    def make(count: int = 2, secs: float = 30.0) -> Run:
        made.append(Run(tmp_path / "root", kind, count, monkeypatch, secs))
        return made[-1]

    yield make
    for each in made:
        for writer in each.writers:
            writer.pipeline.close()
            writer.pool.shutdown()
            writer.remover.close()


def test_all_processes_commit_the_same_saves_in_the_same_order(run: Any) -> None:
    both = run(3)
    for step in (1, 2, 3, 4):
        both.save(step)
    found = both.end()
    for saves in found:
        assert [save.step for save in saves] == [1, 2, 3, 4]
        assert all(save.is_committed for save in saves)
    assert both.writers[0].steps() == [3, 4]
    held = sorted(path.name for path in (both.writers[0].root / "4" / ITEM).iterdir())
    assert held == ["0.txt", "1.txt", "2.txt", "whole"]
    for writer in both.writers[1:]:
        assert writer.of(3) == ["committed", "retired", "ended"]
    # Nothing is left of what they told each other.
    keys = [key for key in both.processes.store.texts if "asking" not in key]
    assert keys == []


@pytest.mark.parametrize("where", ["stage", "write"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_failure_of_one_process_is_the_same_error_on_all(
    run: Any, where: str, victim: int
) -> None:
    both = run()

    def prepare(process: int, work: Files) -> None:
        if process == victim:
            work.at[where].open(NO_SPACE)

    works = both.save(1, prepare)
    assert all(isinstance(work, Files) for work in works), "it comes out later, on all"
    both.save(2)
    first, second = both.end()
    assert [save.is_committed for save in first] == [False, True]
    assert str(first[0].error) == str(second[0].error)
    assert "no space" in str(first[0].error)
    assert both.writers[0].steps() == [2] and both.writers[0].left() == []


def test_files_of_a_failed_save_go_only_when_no_process_writes_any_more(
    run: Any,
) -> None:
    both, stop = run(), Stop().shut()

    def prepare(process: int, work: Files) -> None:
        if process == 1:
            work.at["write"] = stop
        else:
            work.at["write"].open(NO_SPACE)

    both.save(1, prepare)
    assert stop.reached.wait(30)
    time.sleep(0.2)
    root = both.writers[0].root
    (folder,) = [p for p in root.iterdir() if REMOVED_MARK not in p.name]
    assert (folder / ITEM).is_dir(), "process 1 is writing there"
    stop.open()
    both.end()
    assert both.writers[0].left() == []


def test_what_process_0_cannot_do_for_all_is_the_same_error_on_all(run: Any) -> None:
    both = run()

    def prepare(process: int, work: Files) -> None:
        work.at["seal"].open(NO_SPACE)  # only process 0 comes there

    both.save(1, prepare)
    first, second = both.end()
    assert "no space" in str(first[0].error) and "no space" in str(second[0].error)
    assert not first[0].is_committed and not second[0].is_committed
    assert both.writers[0].left() == []


def test_a_commit_that_process_0_does_not_tell_is_seen_in_the_store(run: Any) -> None:
    both, stop = run(secs=2.0), Stop().shut()

    def prepare(process: int, work: Files) -> None:
        work.at["published"] = stop

    both.save(1, prepare)
    assert stop.reached.wait(30)
    other = both.writers[1]
    while "committed, unheard" not in other.of(1):
        time.sleep(0.01)
    stop.open()
    _, (save,) = both.end()
    assert save.is_committed and save.error is None
    assert both.writers[0].steps() == [1]


def test_a_process_that_says_nothing_is_named_and_its_folder_is_left_alone(
    run: Any,
) -> None:
    both, stop = run(secs=2.0), Stop().shut()

    def prepare(process: int, work: Files) -> None:
        if process == 1:
            work.at["write"] = stop

    both.save(1, prepare)
    (save,) = both.processes.start(0, both.writers[0].end)()
    assert isinstance(save.error, errors.SaveError)
    assert (save.error.kind, save.error.process) == ("process_silent", 1)
    assert len(both.writers[0].left()) == 1, "process 1 may still write there"
    stop.open()
    both.processes.start(1, both.writers[1].end)()


def test_threads_of_a_save_see_what_the_caller_has_set(writer: Any) -> None:
    asked = contextvars.ContextVar("asked", default="nobody")
    saving, seen = writer(), list[str]()

    def prepare(work: Files) -> None:
        work.seal = lambda save, folder: seen.append(asked.get())  # type: ignore[method-assign]

    asked.set("the caller")
    saving.save(1, prepare)
    saving.end()
    assert seen == ["the caller"]
