"""The claim on a root: which manager saves there, so that two programs do not harm each other.

A claim is a small file in the root with a random id. The newest claim wins: a manager that has lost
the root saves and deletes nothing more. The claim is no lock, so a run that restarts takes the root
over at once, however the program before it ended. Each save, commit and removal first checks that
the claim still has the manager's id. No clock takes part: ids are equal or not.

A manager that has lost the root goes on writing files until it notices, under names that the new
one uses too. So the new manager waits for a lock, which is held while a save is being written. The
system frees the lock when a process ends, however it ends. Where there are no locks, nobody waits.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import json
import os
import secrets
import threading
import time
import traceback
import weakref
from typing import Any, cast

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.fields import Fields
from cnr_jax.repository.store import (
    AnyPath,
    FileLock,
    can,
    exists,
    read_small,
    replace_durably,
    store_of,
)
from cnr_jax.repository.upkeep.processes import ProcessId, this_process
from cnr_jax.texts import logger

_log = logger(__name__)
# The most bytes of a claim that are read. A rollback of 100,000 steps takes about as many.
_LIMIT_BYTES = 16 << 20
# Plain Orbax says of our steps only that they cannot be restored. A user who then opens the files
# of the root finds this text.
_ABOUT = (
    "The steps here were saved by cnr_jax, incremental checkpoints for JAX, and may rest on each"
    " other. cnr_jax.CheckpointManager(<this folder>).restore(None) reads them; so does plain"
    " Orbax by restore(step), in a program that has imported cnr_jax.args. For programs without"
    " cnr_jax, cnr_jax.export(<this folder>, step, directory) writes a checkpoint of plain Orbax."
)
# How long a manager that takes a root over waits for the manager before it to notice.
HAND_OVER_SECS = 60.0
# Seconds between two tries to take the lock.
_POLL_SECS = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """Steps that a rollback has moved out of the way of a save that is not committed yet.

    Attributes:
        uuid: uuid of the save.
        directory: name of the save's step directory.
        item: name of the item that holds the save.
        moved: names of each moved directory, before and now, in the order of moving.
    """

    uuid: str
    directory: str
    item: str
    moved: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A manager that has claimed a root, as its claim describes it.

    Attributes:
        id: random id of the claim.
        process: process of the manager. Claims of older versions lack its namespaces and so on.
        since: when the manager claimed the root, in UTC; for people.
        aside: steps that are moved aside for a save; None: none are.
        epoch: epoch of the catalogue that is valid; empty: none is.
    """

    id: str
    process: ProcessId
    since: str
    aside: Aside | None = None
    epoch: str = ""

    def __str__(self) -> str:
        place = _claimed_at.get(self.id)
        by = f", by the save at {place}" if place else ""
        of = self.process
        return f"process {of.pid} on {of.host}, since {self.since}{by}"

    @property
    def is_here(self) -> bool:
        """Whether the manager is one of this very process."""
        return self.id in _claimed_at and self.process.pid == os.getpid()

    @property
    def is_dead(self) -> bool:
        """Whether the manager's process is known to have ended; False in doubt.

        All code that acts on that asks here: `prune`, `recover`, which brings back what a save has
        moved aside, and the writer, which clears what a save has left.
        """
        return self.process.state() == "dead"


# Lines of the program at which managers of this process claimed roots, by the ids of the claims.
# Two managers of a process have all else in common, so only the line tells a user which is meant.
_claimed_at: dict[str, str] = {}
_OWN_PACKAGES = {"cnr_jax", "orbax"}


# The line of the program that called this package, for threads that work on its behalf.
called_at: contextvars.ContextVar[str] = contextvars.ContextVar("called_at", default="")


def calling_line() -> str:
    """The line of the program that called this package, as `train.py:12`."""
    if known := called_at.get():
        return known
    found, was_own = "a line that is not known", False
    # The walk goes outwards. Frames of other packages, such as decorators of contextlib, may lie
    # between those of this one, so the outermost caller counts.
    for frame, line in traceback.walk_stack(None):
        is_own = frame.f_globals.get("__name__", "").split(".")[0] in _OWN_PACKAGES
        if was_own and not is_own:
            found = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        was_own = is_own
    return found


def other_writer(writer: Writer | None) -> str:
    """Hint for the user on what to do about another manager that saves to a root."""
    if writer is not None and writer.is_here:
        return (
            "it is another manager of this same process: close it, or save through it"
        )
    return "let one program at a time save there"


def read_writer(root: AnyPath) -> Writer | None:
    """Reads the claim on a root; None if there is none, or it cannot be understood.

    Anybody may have written the file, and steps are renamed as it says. So the claim counts only if
    all of it is understood.

    Raises:
        OSError: if the file cannot be read.
    """
    return _read_writer(root)[0]


def _read_writer(root: AnyPath) -> tuple[Writer | None, Any]:
    """Reads the claim on a root, and the version of its file where the store has conditions."""
    version: Any = None
    try:
        path = root / names.WRITER
        if can(root).conditions:
            found = store_of(path).read_version(path)
            if found is None:
                return None, None
            data, version = found
        else:
            data = read_small(path, _LIMIT_BYTES)
        fields = Fields(json.loads(data), "", [])
        writer = Writer(
            id=fields.hexadecimal("id", 32),
            process=_read_process(fields),
            since=fields.text("since"),
            aside=_read_aside(fields.child("aside")) if fields.has("aside") else None,
            epoch=fields.hexadecimal("epoch", 32) if fields.has("epoch") else "",
        )
        if not fields.problems:
            return writer, version
        why = "; ".join(fields.problems[:3])
    except FileNotFoundError:
        return None, None
    except (ValueError, RecursionError) as error:
        why = str(error)
    _log.warning("the claim on %s cannot be understood: %s", os.fspath(root), why)
    return None, version


def _read_process(fields: Fields) -> ProcessId:
    """Reads the process of a claim; claims of older versions lack some of the fields."""
    has = fields.has
    return ProcessId(
        host=fields.text("host"),
        pid=fields.integer("pid", minimum=1),
        boot_id=fields.text("boot_id") if has("boot_id") else None,
        namespaces=fields.text("namespaces") if has("namespaces") else None,
        started_ticks=fields.integer("started_ticks") if has("started_ticks") else None,
    )


def _read_aside(fields: Fields) -> Aside:
    """Reads what was moved aside, as pairs of the two forms of SPEC.md, section 9.6.

    Either a step directory got a name with `.abandoned-`. Or a directory, which may have such a
    name already, lies under the same name in the folder of the earlier run, named by the save.
    """
    moved: list[tuple[str, str]] = []
    uuid = fields.hexadecimal("uuid", 32)
    given = fields.any("moved")
    for pair in cast("list[Any]", given) if isinstance(given, list) else (given,):
        match pair:
            case [str(name), str(now)] if names.is_component(name) and (
                (names.may_be_step(name) and names.abandoned_step(now) == name)
                or now == f"{names.earlier_run(uuid)}/{name}"
            ):
                moved.append((name, now))
            case _:
                fields.problems.append(
                    f"{fields.where}.moved: expected pairs of a step directory and its"
                    f" name with {names.ABANDONED_MARK!r}, or of a name and the same"
                    f" below {names.earlier_run(uuid)}, got {repr(pair)[:80]}"
                )
    return Aside(
        uuid=uuid,
        directory=fields.name("directory"),
        item=fields.name("item"),
        moved=tuple(moved),
    )


class Claim:
    """The claim of one manager on a root, from its first save on."""

    def __init__(self, root: AnyPath) -> None:
        self._root = root
        self._own: Writer | None = None
        self._other: Writer | None = None
        # Version of the claim as it was read or written last. A write fails if another manager has
        # written the claim since.
        self._version: Any = None
        # One save may check the claim while another changes it.
        self._turn = threading.RLock()
        # The epoch that this manager drew last.
        self._epoch = ""
        _inherited.add(self)

    @property
    def is_taken(self) -> bool:
        """Whether this manager has claimed the root and has not given it up."""
        return self._own is not None

    def take(self) -> Writer | None:
        """Claims the root for this manager.

        Returns:
            The claim before, which says what that manager had moved aside; None: there was none.
        """
        before, self._version = _read_writer(self._root)
        own = Writer(
            id=secrets.token_hex(16),
            process=this_process(),
            since=_now(),
            aside=before.aside if before else None,
            epoch=self._new_epoch(),
        )
        self._write(own)
        _claimed_at[own.id] = calling_line()
        return before

    def stand_in(self, other: Writer, *, alone: bool) -> Writer:
        """Acts for a while in the place of a manager that may still be running.

        `withdraw` leaves the root to that manager again. If this process is killed before, the
        claim still names that manager's process.

        Args:
            other: claim of that manager.
            alone: whether a lock keeps that manager from saving meanwhile. If so, its claim stays
                as it is.

        Returns:
            The claim of that manager as it now is: a save may have moved steps aside since.

        Raises:
            WriterError: if somebody else has claimed the root meanwhile.
        """
        if alone:
            self._own = self._other = other
            return other
        found, self._version = _read_writer(self._root)
        if found is not None and found.id != other.id:
            raise _taken_over(self._root, found, other)
        self._other = found or other
        own = dataclasses.replace(
            self._other,
            id=secrets.token_hex(16),
            since=_now(),
            epoch=self._new_epoch(),
        )
        self._write(own)
        return self._other

    def check(self) -> None:
        """Checks that no other manager has claimed the root meanwhile.

        Raises:
            WriterError: if one has.
        """
        if (
            self._own is not None
        ):  # unlike in a forked child, where the lock may be held
            with self._turn:
                self._check(self._own)

    def _check(self, own: Writer) -> None:
        found, self._version = _read_writer(self._root)
        if found is None and not exists(self._root / names.WRITER):
            # Somebody deleted the file, or claimed the root for a while; nobody claims it now.
            self._write(own)
            return
        if found is None or found.id != own.id:
            raise _taken_over(self._root, found, own)
        # What is moved aside may differ: a manager that stood in for this one may have settled it.
        self._own = found

    def withdraw(self) -> None:
        """Leaves the root to the manager that this one stood in for, or else to nobody.

        The claim stays if steps are moved aside, as nothing else notes them.

        Raises:
            WriterError: if another manager has claimed the root meanwhile.
        """
        self.check()
        own, other = self._own, self._other
        if own is None:
            return
        if other is not None:
            if own.id != other.id:
                back = dataclasses.replace(
                    other, aside=own.aside, epoch=self._new_epoch()
                )
                self._write(back)
            self._own = None
        elif own.aside is None:
            store_of(self._root).remove_file(self._root / names.WRITER)
            self._own = None

    def is_alone(self) -> None:
        """Makes a new lock in a forked child, where the thread that may hold it does not exist."""
        self._turn = threading.RLock()

    def give_up(self) -> None:
        """Forgets the claim, so that the next save takes the root over again."""
        self._own = None

    @property
    def epoch(self) -> str:
        """Epoch of the catalogue that this manager may write.

        Empty if it may write none, for example after another manager stood in for it.
        """
        own = self._own
        return self._epoch if own is not None and own.epoch == self._epoch else ""

    def begin_epoch(self) -> None:
        """Makes the catalogue invalid, as what it says of a step is about to be wrong.

        After the manager has given the root up, this does nothing: the next claim makes the
        catalogue invalid, and until then nobody saves a step in the place of one that is gone.

        Raises:
            WriterError: if another manager has claimed the root.
        """
        with self._turn:
            if self._own is None:
                return
            self._write(dataclasses.replace(self._own, epoch=self._new_epoch()))

    def _new_epoch(self) -> str:
        self._epoch = secrets.token_hex(16) if can(self._root).conditions else ""
        return self._epoch

    @property
    def aside(self) -> Aside | None:
        """Steps that are moved aside for a save that is not known to be committed."""
        return self._own.aside if self._own else None

    def note_aside(self, aside: Aside | None) -> None:
        """Stores in the claim which steps are about to be moved aside; None: none are any more."""
        with self._turn:
            assert self._own is not None
            if aside != self._own.aside:
                self._write(dataclasses.replace(self._own, aside=aside))

    def forget(self, aside: Aside) -> bool:
        """Stores that steps are moved aside no more, in the name of whoever has the claim.

        Args:
            aside: what the claim says that is moved aside.

        Returns:
            Whether that is stored; False if the claim says something else by now.

        Raises:
            WriterError: if the claim was this manager's, and another has claimed the root.
        """
        with self._turn:
            if self._own is not None:
                self.note_aside(None)
                return True
            found, version = _read_writer(self._root)
            if found is None or found.aside != aside:
                return False
            path = self._root / names.WRITER
            data = _dumped(dataclasses.replace(found, aside=None))
            if not can(self._root).conditions:
                replace_durably(path, data)
                return True
            try:
                store_of(path).swap(path, data, version)
            except FileExistsError:
                return False
            return True

    def _write(self, own: Writer) -> None:
        data, path = _dumped(own), self._root / names.WRITER
        try:
            if can(self._root).conditions:
                self._swap(path, data, own)
            else:
                replace_durably(path, data)
        except IsADirectoryError as error:
            raise _in_the_way(path, error) from error
        self._own = own

    def _swap(self, path: AnyPath, data: bytes, own: Writer) -> None:
        """Writes the claim, unless another manager has written it since this one last saw it."""
        try:
            self._version = store_of(path).swap(path, data, self._version)
        except FileExistsError as error:
            raise _taken_over(self._root, read_writer(self._root), own) from error


def _dumped(writer: Writer) -> bytes:
    """The file of a claim."""
    document: dict[str, Any] = {"about": _ABOUT, **dataclasses.asdict(writer)}
    told = document.pop("process")
    if not writer.epoch:
        del document["epoch"]
    document |= {key: value for key, value in told.items() if value is not None}
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def _taken_over(root: AnyPath, found: Writer | None, own: Writer) -> errors.WriterError:
    hint = other_writer(found)
    if found is not None and found.process == own.process and not found.is_here:
        hint = "prune, compact or a repair acts in its place for now: save when that is over"
    return errors.WriterError(
        f"another manager has taken over {os.fspath(root)}\n"
        f"  got {found or 'a claim that cannot be read'}\n"
        f"  expected {own}: this one\n"
        f"  hint: {hint}; reload() lets this manager take the root over again"
    )


def _now() -> str:
    """The time, in UTC."""
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")


def _in_the_way(path: AnyPath, error: OSError) -> errors.WriterError:
    """Error that says that a folder lies where a manager writes a file."""
    return errors.WriterError(
        f"{os.fspath(path)} is in the way of who saves here\n"
        f"  got a folder, expected a file or nothing ({error.strerror})\n"
        "  hint: move it out of the root",
        kind="in_the_way",
        path=os.fspath(path),
    )


class WritingLock:
    """Lock that a manager holds on a root while it writes a save."""

    def __init__(self, root: AnyPath) -> None:
        self._path = root / names.WRITER_LOCK
        self._supported = can(root).locks
        self._held: FileLock | None = None

    def acquire(self, timeout_secs: float) -> bool:
        """Waits until no other manager is writing.

        Returns:
            Whether this manager may write: False if another one is still writing after
            `timeout_secs`. Where the file system has no locks, True without waiting.
        """
        if self._held is not None or not self._supported:
            return True
        try:
            lock = store_of(self._path).lock(self._path)
        except IsADirectoryError as error:
            raise _in_the_way(self._path, error) from error
        deadline = time.monotonic() + timeout_secs
        try:
            while (found := lock.acquire()) is False:
                if time.monotonic() >= deadline:
                    lock.close(unlocks=False)
                    return False
                time.sleep(_POLL_SECS)
        except BaseException:
            lock.close(unlocks=False)
            raise
        self._supported = found is not None
        if self._supported:
            self._held = lock
            _inherited.add(self)
        else:
            lock.close(unlocks=False)
        return True

    def wait(self, other: Writer | None) -> None:
        """Waits until no other manager is writing, but not for ever.

        Args:
            other: manager that is likely to hold the lock, which the error names.

        Raises:
            WriterError: if another manager is still writing after `HAND_OVER_SECS`.
            OSError: if the lock cannot be opened.
        """
        if not self.acquire(HAND_OVER_SECS):
            raise errors.WriterError(
                f"another manager is writing a save in {os.fspath(self._path.parent)}\n"
                f"  it is {other or 'not known which'}; waited {HAND_OVER_SECS:g} s\n"
                f"  hint: {other_writer(other)}; then save again",
                kind="writer_busy",
            )

    @property
    def is_held(self) -> bool:
        """Whether this manager holds the lock."""
        return self._held is not None

    @property
    def is_proof(self) -> bool:
        """Whether the lock keeps others out; False if it is known that there are no locks."""
        return self._supported

    def release(self) -> None:
        """Lets others write; does nothing if the lock is not held."""
        held, self._held = self._held, None
        if held is not None:
            # Unlocks explicitly, since a forked child may have inherited the open file.
            held.close()

    def give_up(self) -> None:
        """Closes the lock's file in a forked child without unlocking it: the parent holds it."""
        held, self._held = self._held, None
        if held is not None:
            held.close(unlocks=False)


_inherited: weakref.WeakSet[Claim | WritingLock] = weakref.WeakSet()


def _give_up_all() -> None:
    for each in list(_inherited):
        if isinstance(each, Claim):
            each.is_alone()
        each.give_up()


# A worker that outlives a killed trainer, such as one that loads data, must not hold the trainer's
# lock or save in its name: once the trainer has ended, other programs may delete its steps.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_all)
