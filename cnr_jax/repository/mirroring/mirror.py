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
from cnr_jax.repository.causes import in_one_line
from cnr_jax.repository.description import amount
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.mirroring.copier import Copier
from cnr_jax.repository.mirroring.places import check_apart
from cnr_jax.repository.mirroring.report import MirrorReport
from cnr_jax.repository.mirroring.step_files import Meter, Stopped
from cnr_jax.repository.mirroring.way_back import WayBack
from cnr_jax.repository.store import AnyPath
from cnr_jax.texts import count_of, logger

_log = logger(__name__)
# What copying on does not mend.
_ENDS = errors.WriterError, errors.UsedRootError, errors.OptionError
# How long after a failure it is tried again, if no save comes before.
_RETRY_SECS = 20.0
# Saves by which a backlog has grown, one after the other, when it is warned of.
_GROWN = 4


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
        way_back: from the target into the root.
        lost: why nothing more is copied: somebody else has the target, or its service cannot tell
            programs that write there apart.
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
        self._meter = Meter(bytes_per_sec)
        settings: Any = {"is_step": is_step, "item": item, "single": single}
        self._copier = Copier(root, target, meter=self._meter, **settings)
        self.way_back = WayBack(root, target, **settings)
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
            if isinstance(error, _ENDS):
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
            except (*_ENDS, Stopped):
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
