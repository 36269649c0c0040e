"""The mirror of a root: each committed step is copied to another root while training goes on.

A thread of its own copies, so no save waits for it. Each report says how far the mirror is behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
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
# Errors after which the mirror copies nothing more: trying again would not help.
_ENDS = errors.WriterError, errors.UsedRootError, errors.OptionError
# How long after a failure the mirror tries again, if no save comes before.
_RETRY_SECS = 20.0
# The mirror warns once its backlog has grown at so many saves in a row.
_GROWN = 4


class Mirror:
    """Mirror of a root: copies the root's steps to another root, one by one.

    Args:
        root: root that is mirrored.
        target: root that the steps are copied to.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        keep: how many of the newest steps stay in the mirror, with those that they rest on; None:
            all stay.
        min_fulls: how many full checkpoints of the newest branch stay there too.
        bytes_per_sec: bytes a second that are written at most; None: no limit.
        item: name of the item of each step; None: the one that is found.
        single: whether to skip the trial of the conditions of both stores, as in `Options`.

    Attributes:
        root: root that is mirrored.
        target: root that the steps are copied to.
        way_back: way of steps from the target back into the root.
        lost: error after which nothing more is copied: another program has the target, it holds
            another run, or its service ignores the conditions of puts. None: the mirror goes on.
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
        # Steps that are committed and not copied yet, by uuid: number, bytes, and since when.
        self._waiting: dict[str, tuple[int, int, float]] = {}
        # Likewise, steps that the root held at the start, until the mirror has been looked at.
        self._unseen: dict[str, tuple[int, int, float]] = {}
        self._there = frozenset[str]()
        self._lock = threading.Lock()
        self._grown: list[int] = []
        self._has_warned = False
        self._done = MirrorReport(root=os.fspath(root), mirror=os.fspath(target))
        # The error that has ended the mirror.
        self.lost: errors.CnrError | None = None
        self._thread: threading.Thread | None = None
        # True wakes the thread to copy; with False it copies, and then ends.
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()

    # For the manager: start, notes, reports, and the end.

    def start(self, held: Sequence[Entry] = ()) -> None:
        """Starts the thread that copies; a program that ends does not wait for it.

        Args:
            held: steps of the root. Reports count all of the newest run as not copied until the
                thread has seen which are.
        """
        run = {entry.run for entry in held[-1:]}
        own = [each for each in held if each.run in run and not each.orbax]
        self._unseen = {each.uuid: _waits(each) for each in own}
        self._thread = threading.Thread(
            target=self._run, name="cnr_mirror", daemon=True
        )
        self._thread.start()
        self._wakes.put(True)

    def note(self, entry: Entry) -> MirrorReport:
        """Notes that a step is committed, so that it is copied; returns the report as of now."""
        with self._lock:
            at = entry.step, Ledger.own_bytes(entry), time.monotonic()
            self._waiting.setdefault(entry.uuid, at)
        self._wakes.put(True)
        found = self.report()
        self._warn_of_growth(found)
        return found

    def _warn_of_growth(self, found: MirrorReport) -> None:
        """Warns that the mirror falls behind; once, until it has caught up."""
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
        """Report of what the mirror has done, and how far it is behind."""
        with self._lock:
            waiting, done = [*(self._unseen | self._waiting).values()], self._done
        since = min((secs for *_, secs in waiting), default=None)
        return dataclasses.replace(
            done,
            lag_steps=len(waiting),
            lag_secs=0.0 if since is None else time.monotonic() - since,
            backlog_bytes=sum(size for _, size, _ in waiting),
        )

    def has(self, uuid: str) -> bool:
        """Whether a step was in the mirror when the mirror looked last."""
        return uuid in self._there

    def close(self, timeout_secs: float) -> None:
        """Copies the steps that are left, as far as the time allows, and ends the thread.

        If steps stay behind, a warning says so; the next manager of the root copies them.
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
        """Gives up the claim on the mirror when the block ends; for one without a thread."""
        return self._copier.writer.for_a_while()

    # Copying, in the thread or on demand.

    def _run(self) -> None:
        pause, goes_on = None, True
        while goes_on:
            try:
                goes_on = self._wakes.get(timeout=pause)
                while not self._wakes.empty():
                    goes_on &= self._wakes.get()
            except queue.Empty:
                pass  # after a failure, it is time to try again
            try:
                self.catch_up()
            except Stopped:
                return
            if self.lost is not None:
                return
            pause = _RETRY_SECS if self.report().problems else None

    def catch_up(self) -> MirrorReport:
        """Copies the steps that the mirror lacks, parents first; returns the report.

        If a step cannot be copied, those that rest on it are not copied either; all others are.

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
            # Whatever the error, training goes on, and the report tells of it.
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
        """Notes which steps are in the mirror, for `has` in other threads."""
        held = self._copier.there.entries.values()
        self._there = frozenset(entry.uuid for entry in held)

    def _compare(
        self, noted: dict[str, tuple[int, int, float]], lacking: list[Entry]
    ) -> None:
        """Notes which steps wait to be copied, and which need not wait any more.

        Args:
            noted: steps that waited before the mirror looked at the root.
            lacking: steps of the root that the mirror lacks.
        """
        source = {e.uuid for e in self._copier.source.entries.values()}
        for entry in lacking:
            with self._lock:
                self._waiting.setdefault(entry.uuid, _waits(entry))
        wanted = {entry.uuid for entry in lacking}
        for uuid, (step, *_) in noted.items():
            if uuid not in wanted and uuid in source:
                self._forget(uuid)  # it is in the mirror, or is not to be kept there
            elif uuid not in wanted:
                self._skip(uuid, step)
        with self._lock:
            self._unseen = {}  # those that are not in the mirror wait by now

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


def _waits(entry: Entry) -> tuple[int, int, float]:
    """Number and bytes of a step that waits to be copied, and since when it does."""
    manifest = entry.manifest
    age = time.time() - manifest.written_at_unix_secs if manifest else 0
    since = time.monotonic() - max(0.0, age)
    return entry.step, Ledger.own_bytes(entry), since
