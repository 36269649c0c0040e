"""The mirror of a root: whatever is committed there is copied to another place, behind training.

A thread of its own copies, so no save waits for it; how far it is behind is told by each report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from cnr_jax import errors
from cnr_jax.repository import layout
from cnr_jax.repository.causes import as_root_errors, in_one_line
from cnr_jax.repository.description import amount
from cnr_jax.repository.index.entries import Entry, order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.mirroring.copier import Copier, may_hold
from cnr_jax.repository.mirroring.step_files import Meter, Stopped, mend_files
from cnr_jax.repository.store import AnyPath, exists
from cnr_jax.repository.upkeep.claim import read_writer
from cnr_jax.repository.upkeep.prune import claimed
from cnr_jax.texts import count_of, logger

_log = logger(__name__)
# How long after a failure it is tried again, if no save comes before.
_RETRY_SECS = 20.0
# Saves by which a backlog has grown, one after the other, when it is warned of.
_GROWN = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """What a mirror has done since it was opened, and how far it is behind its root.

    Attributes:
        root: that is mirrored.
        mirror: where to.
        copied_steps: number of steps that were copied.
        removed_steps: number of older steps that `mirror_keep` has let go of in the mirror.
        skipped_steps: steps that retention removed from the root before they were copied.
        mended: paths of files that were mended, and of steps that were brought back.
        problems: why steps are not copied, one line each; those that rest on them are not either.
        lag_steps: number of committed steps that are not in the mirror: lost with the root.
        lag_secs: seconds since the oldest of these was committed; 0 if there is none.
        backlog_bytes: bytes of these.
    """

    root: str
    mirror: str
    copied_steps: int = 0
    removed_steps: int = 0
    skipped_steps: tuple[int, ...] = ()
    mended: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    lag_steps: int = 0
    lag_secs: float = 0.0
    backlog_bytes: int = 0

    def __str__(self) -> str:
        """A line."""
        done = f"{count_of(self.copied_steps, 'step')} copied to {self.mirror}"
        if self.mended:
            done += f", {count_of(len(self.mended), 'file or step', 'files or steps')} mended"
        if self.removed_steps:
            done += f", {count_of(self.removed_steps, 'step')} removed there"
        if self.skipped_steps:
            done += f", {count_of(len(self.skipped_steps), 'step')} skipped"
        if self.lag_steps:
            done += (
                f"; behind by {count_of(self.lag_steps, 'step')}, {self.lag_secs:.1f} s,"
                f" {amount(self.backlog_bytes)}"
            )
        return done


class Mirror:
    """Copies of a root's steps in another one, made step by step.

    Args:
        root: that is mirrored.
        target: where to.
        is_step: tells names of step directories; None: all that end in a digit.
        keep: steps that stay in the mirror, the newest ones, and what they rest on; None: all.
        min_fulls: full checkpoints of the newest branch that stay there too.
        bytes_per_sec: that are written at most; None: as many as there can be.
        item: of each step; None: the one that is found.
        single: whether it is not tried that two programs that write to one of both are told apart.

    Attributes:
        root: the same.
        target: the same.
        lost: why nothing more is copied: somebody else has the target.
    """

    def __init__(
        self,
        root: AnyPath,
        target: AnyPath,
        *,
        is_step: Callable[[str], bool] | None = None,
        keep: int | None = None,
        min_fulls: int = 1,
        bytes_per_sec: float | None = None,
        item: str | None = None,
        single: bool = False,
    ) -> None:
        check_apart(root, target)
        self.root, self.target = root, target
        self._keep, self._min_fulls = keep, min_fulls
        self._is_step, self._item = is_step, item
        self._meter = Meter(bytes_per_sec)
        self._settings: Any = {"is_step": is_step, "item": item, "single": single}
        self._copier = Copier(root, target, meter=self._meter, **self._settings)
        # By uuid: steps that are committed and not copied; number, bytes, and since when.
        self._waiting: dict[str, tuple[int, int, float]] = {}
        self._there = frozenset[str]()
        self._lock = threading.Lock()
        self._grown: list[int] = []
        self._has_warned = False
        self._done = MirrorReport(root=os.fspath(root), mirror=os.fspath(target))
        # Why it does nothing any more.
        self.lost: errors.CnrError | None = None
        self._thread: threading.Thread | None = None
        # True: copy what there is; False: and then end.
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()

    # What is told.

    def start(self) -> None:
        """Lets a thread copy from now on; a program that ends does not wait for it."""
        self._thread = threading.Thread(
            target=self._run, name="cnr_mirror", daemon=True
        )
        self._thread.start()
        self._wakes.put(True)

    def note(self, entry: Entry) -> MirrorReport:
        """Notes that a step is committed, and has it copied; returns how things stand then."""
        with self._lock:
            at = entry.step, Ledger.own_bytes(entry), time.monotonic()
            self._waiting.setdefault(entry.uuid, at)
        self._wakes.put(True)
        found = self.report()
        self._warn_of_growth(found)
        return found

    def _warn_of_growth(self, found: MirrorReport) -> None:
        """Says once that the mirror falls behind, until it has caught up."""
        if found.lag_steps <= 1:
            self._grown, self._has_warned = [], False
        self._grown = [*self._grown[-_GROWN:], found.backlog_bytes]
        grows = all(a < b for a, b in zip(self._grown, self._grown[1:], strict=False))
        if len(self._grown) > _GROWN and grows and not self._has_warned:
            self._has_warned = True
            why = f"; {found.problems[-1]}" if found.problems else ""
            _log.warning(
                "the mirror %s falls behind: %s of %s are not there, the oldest for %.0f s%s",
                found.mirror,
                count_of(found.lag_steps, "step"),
                amount(found.backlog_bytes),
                found.lag_secs,
                why,
            )

    def report(self) -> MirrorReport:
        """What it has done, and how far it is behind."""
        with self._lock:
            waiting, done = [*self._waiting.values()], self._done
        since = min((secs for *_, secs in waiting), default=None)
        return dataclasses.replace(
            done,
            lag_steps=len(waiting),
            lag_secs=0.0 if since is None else time.monotonic() - since,
            backlog_bytes=sum(size for _, size, _ in waiting),
        )

    def has(self, uuid: str) -> bool:
        """Whether a step is seen to be committed in the mirror."""
        return uuid in self._there

    def close(self, timeout_secs: float) -> None:
        """Copies what is left, as far as that goes within a time, and ends.

        Steps that cannot be copied stay behind, which a warning says; the next manager of the root
        copies them.
        """
        thread = self._thread
        if thread is not None:
            self._wakes.put(False)
            thread.join(timeout_secs)
        self._meter.stop()
        if thread is None or not thread.is_alive():
            self._copier.close()
        self._thread, found = None, self.report()
        if thread is not None and found.lag_steps:
            why = f": {found.problems[-1]}" if found.problems else ""
            _log.warning(
                "%s of %s are not in the mirror %s%s; the next manager of the root, or cnr-jax"
                " mirror, copies them",
                count_of(found.lag_steps, "step"),
                found.root,
                found.mirror,
                why,
            )

    def for_a_while(self) -> contextlib.AbstractContextManager[None]:
        """Leaves the mirror to nobody in the end; for one to which no thread copies."""
        return self._copier.writer.for_a_while()

    # What is done, in the thread.

    def _run(self) -> None:
        pause, goes_on = None, True
        while goes_on:
            try:
                goes_on = self._wakes.get(timeout=pause)
                while not self._wakes.empty():
                    goes_on &= self._wakes.get()
            except queue.Empty:
                pass  # it is tried again
            try:
                self.catch_up()
            except Stopped:
                return
            if self.lost is not None:
                return
            pause = _RETRY_SECS if self.report().problems else None

    def catch_up(self) -> MirrorReport:
        """Copies what the mirror lacks, parents first; returns what it has done.

        A step that fails keeps those from being copied that rest on it, and no other.

        Raises:
            Stopped: if the mirror is closed meanwhile.
        """
        problems, before = list[str](), self._done
        try:
            self._copy_all(problems)
            if self._keep is not None and self._copier.item is not None:
                gone = self._copier.retire(self._keep, self._min_fulls)
                self._add(removed_steps=self._done.removed_steps + len(gone))
            if self._done != before:
                self._copier.writer.put_catalogue()
        except Stopped:
            raise
        except Exception as error:
            # Whatever it is, training goes on, and who asks is told.
            if isinstance(error, errors.WriterError | errors.UsedRootError):
                self.lost = error
            problems.append(in_one_line(error))
        new = [each for each in problems if each not in self._done.problems]
        for each in new:
            _log.warning("the mirror %s: %s", self.target, each)
        if self.lost is not None:
            _log.error("nothing more is copied to the mirror %s", self.target)
        self._add(problems=tuple(problems))
        return self.report()

    def _copy_all(self, problems: list[str]) -> None:
        with self._lock:
            noted = dict(self._waiting)
        copier = self._copier
        if not copier.look():
            return
        self._see()
        lacking = copier.lacking(self._keep, self._min_fulls)
        self._compare(noted, lacking)
        failed = set[str]()
        for entry in lacking:
            if entry.parent is not None and entry.parent.directory in failed:
                failed.add(entry.directory)
                continue
            try:
                copier.copy(entry)
            except (errors.WriterError, errors.UsedRootError, Stopped):
                raise
            except (errors.CnrError, OSError) as error:
                failed.add(entry.directory)
                if copier.is_gone(entry):
                    self._skip(entry.uuid, entry.step)
                else:
                    problems.append(f"step {entry.directory}: {in_one_line(error)}")
            else:
                self._see()
                self._forget(entry.uuid)
                self._add(copied_steps=self._done.copied_steps + 1)

    def _see(self) -> None:
        """Notes what is in the mirror, for other threads."""
        held = self._copier.there.entries.values()
        self._there = frozenset(entry.uuid for entry in held)

    def _compare(
        self, noted: dict[str, tuple[int, int, float]], lacking: list[Entry]
    ) -> None:
        """Notes what waits to be copied, and what does so in vain.

        Args:
            noted: what waited before the root was looked at.
            lacking: what the mirror lacks of it.
        """
        now, unix = time.monotonic(), time.time()
        source = {e.uuid for e in self._copier.source.entries.values()}
        for entry in lacking:
            size = self._copier.source.own_bytes(entry)
            age = unix - entry.manifest.written_at_unix_secs if entry.manifest else 0
            with self._lock:
                at = entry.step, size, now - max(0.0, age)
                self._waiting.setdefault(entry.uuid, at)
        wanted = {entry.uuid for entry in lacking}
        for uuid, (step, *_) in noted.items():
            if uuid not in wanted and uuid in source:
                self._forget(uuid)  # it is there, or not among those that are kept
            elif uuid not in wanted:
                self._skip(uuid, step)

    def _skip(self, uuid: str, step: int) -> None:
        self._forget(uuid)
        self._add(skipped_steps=(*self._done.skipped_steps, step))
        _log.warning(
            "step %d is not copied to the mirror %s: it has left the root before",
            step,
            self.target,
        )

    def _forget(self, uuid: str) -> None:
        with self._lock:
            self._waiting.pop(uuid, None)

    def _add(self, **found: Any) -> None:
        with self._lock:
            self._done = dataclasses.replace(self._done, **found)

    # The way back.

    def bring_back(self, step: int | None = None) -> bool:
        """Brings a step, and all it rests on, from the mirror into the root.

        Nothing where the root has what the mirror has, and where another manager may be saving.

        Args:
            step: its number; None: the newest that is whole in the mirror, if that is newer than
                all that restore in the root.

        Returns:
            Whether steps came.

        Raises:
            RootError: if the mirror cannot be read, or the root not be written, and the step was
                asked for by its number, or the root holds nothing either: it must not look like
                one in which nothing was ever saved.
        """
        own = None
        item = self._item or find_item(self.root)
        if item is not None:
            own = Ledger.load(self.root, item, self._is_step)
        try:
            return self._bring_back(own, item, step)
        except errors.RootError as error:
            if step is not None or own is None or own.newest() is None:
                raise
            _log.warning(
                "newer steps that the mirror may hold do not come: %s",
                in_one_line(error),
            )
            return False

    def _bring_back(
        self, own: Ledger | None, item: str | None, step: int | None
    ) -> bool:
        with as_root_errors(self.target, "read"):
            item = item or find_item(self.target)
            if item is None or not exists(self.target):
                return False
            theirs = Ledger.load(self.target, item, self._is_step)
        newest = own.newest() if own is not None else None
        tried = set[str]()
        while True:
            found = [e for e in theirs.restorable() if e.directory not in tried]
            if step is not None:
                found = [entry for entry in found if entry.step == step]
            is_other = newest is not None and found and newest.run != found[-1].run
            if not found or (
                step is None
                and newest
                and not is_other
                and order(found[-1]) <= order(newest)
            ):
                return False
            if newest is not None and is_other:
                raise errors.UsedRootError(
                    f"{os.fspath(self.target)} holds another run than"
                    f" {os.fspath(self.root)}, and neither can be the copy of the other\n"
                    f"  got run {found[-1].run}, expected {newest.run}\n"
                    "  hint: choose another folder for one of them"
                )
            if not _is_free(self.root):
                return False
            copier = Copier(self.target, self.root, **self._settings | {"item": item})
            filled = as_root_errors(self.root, "filled from its mirror")
            try:
                with filled, copier.writer.for_a_while():
                    copier.look()
                    brought = copier.copy_chain(found[-1])
            except errors.DAMAGE as error:
                tried.add(found[-1].directory)
                _log.warning(
                    "step %s of the mirror %s is passed over: %s",
                    found[-1].directory,
                    self.target,
                    in_one_line(error),
                )
                continue
            _log.warning(
                "steps %s came from the mirror %s: %s lacked them",
                ", ".join(brought),
                self.target,
                self.root,
            )
            return True

    def mend(self, directory: str) -> bool:
        """Mends a step of the root, and what it rests on, by the mirror.

        Returns:
            Whether anything was mended.
        """
        if not _is_free(self.root):
            return False
        copier = Copier(self.target, self.root, **self._settings)
        try:
            with copier.writer.for_a_while():
                if not copier.look() or directory not in copier.source.entries:
                    return False
                chain = copier.source.chain(copier.source.entries[directory])
                mended = copier.mend(reversed(chain))
        except (errors.CnrError, OSError) as error:
            _log.warning(
                "step %s cannot be mended by the mirror: %s",
                directory,
                in_one_line(error),
            )
            return False
        for each in mended:
            _log.warning("%s was damaged, and is mended by the mirror", each)
        return bool(mended)


def mirror(
    root: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    keep: int | None = None,
    repair: bool = False,
    bytes_per_sec: int | None = None,
    writer_is_dead: bool = False,
    item: str | None = None,
    follows: Callable[[MirrorReport], bool] | None = None,
) -> MirrorReport:
    """Copies the committed steps of a root to another one, parents first.

    Each file is checked on the way. What is there already is not copied again, and what a killed
    program has copied of a step neither. A run may be saving in the root meanwhile. Needs no
    device.

    Args:
        root: directory of the checkpoints.
        url: of the mirror, which is made if missing.
        keep: how many steps stay in the mirror, the newest ones, and what they rest on; None: all.
        repair: whether files of steps that are in both, and damaged or missing in one, are
            replaced by those of the other. This reads every byte of both, and no program may save
            to either.
        bytes_per_sec: that are written at most; None: no limit.
        writer_is_dead: for `repair`: the managers that saved to either have ended, though that
            cannot be seen.
        item: of each step; None: the one that holds a checkpoint of this library.
        follows: called with the report each time that all is copied; whether to look
            for more. None: once.

    Returns:
        What was done, and what could not be.

    Raises:
        NoStepError: if there is no such root.
        OptionError: if one root lies in the other, or checkpoints cannot be kept there.
        UsedRootError: if the mirror holds another run.
        WriterError: if another program copies to the mirror; for `repair`, saves to either.
        RootError: if a root cannot be seen, such as one in a bucket that is not there.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root, far = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> state = {"user": jnp.zeros((8, 4))}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        >>> cnr.mirror(root, far).copied_steps, cnr.describe(far).latest_step
        (1, 0)
    """
    path, target = layout.open_root(root), layout.open_root(url)
    with as_root_errors(path, "mirrored"):
        layout.check_can_be_read(path, item)
        held = item or find_item(path)
    mended, problems = list[str](), list[str]()
    with as_root_errors(target, "mirrored to"):
        if repair:
            if held := held or find_item(target):
                mended = _repair(path, target, held, problems, writer_is_dead)
        elif not _is_free(target):
            raise errors.WriterError(
                f"another program copies to {os.fspath(target)}: nothing was copied\n"
                f"  got {read_writer(target)}\n"
                "  hint: end it, or mirror to another folder",
                kind="writer_busy",
            )
        found = Mirror(path, target, keep=keep, bytes_per_sec=bytes_per_sec, item=item)
    with found.for_a_while():
        while True:
            report = found.catch_up()
            if found.lost is not None:
                raise found.lost
            if follows is None or not follows(report):
                break
    return dataclasses.replace(
        report, mended=tuple(mended), problems=(*problems, *report.problems)
    )


def _repair(
    root: AnyPath, target: AnyPath, item: str, problems: list[str], is_dead: bool
) -> list[str]:
    """Mends each of two roots by the other; returns what was mended."""
    check_apart(root, target)
    mended = list[str]()
    told: Any = {"writer_is_dead": is_dead, "not_done": "mended"}
    with claimed(root, item, **told) as own, claimed(target, item, **told) as far:
        ledgers = own[1], far[1]
        known = [e for held in ledgers for e in held.committed() if not e.orbax]
        for entry in sorted({e.directory: e for e in known}.values(), key=order):
            if not all(may_hold(held, entry) for held in ledgers):
                continue
            copies = [place / entry.directory for place in (root, target)]
            try:
                mended += map(os.fspath, mend_files(copies, copies))
            except (errors.CnrError, OSError) as error:
                problems.append(f"step {entry.directory}: {in_one_line(error)}")
            for place, held in zip((root, target), ledgers, strict=True):
                held.read(place, entry.directory, item)
        for source, goal, writer in ((target, root, own[0]), (root, target, far[0])):
            copier = Copier(source, goal, item=item, writer=writer)
            copier.look()
            for entry in copier.needed():
                copier.copy(entry)
                mended.append(os.fspath(goal / entry.directory))
    return mended


def check_apart(root: AnyPath, target: AnyPath) -> None:
    """Checks that of two roots neither lies in the other, and that the second can be one.

    Raises:
        OptionError: if not.
        OSError: if that cannot be seen.
    """
    if layout.lies_in(root, target) or layout.lies_in(target, root):
        raise errors.OptionError(
            f"{os.fspath(target)} is no mirror of {os.fspath(root)}: one lies in the other\n"
            "  hint: another folder, on another disk, or a bucket"
        )
    layout.check_is_no_file(target)
    layout.check_is_root(target)


def _is_free(root: AnyPath) -> bool:
    """Whether no other program is seen to save to a root."""
    writer = read_writer(root)
    return writer is None or writer.is_here or writer.process.state() != "alive"
