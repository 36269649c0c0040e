"""What it means that a step is committed: a folder gets its name, or a file in it says so.

A save is written into a folder of its own. Where folders can be renamed, that has a name which no
reader lists, other than that of any other attempt at the step: whoever still writes for an attempt
that was given up writes beside the next one. Elsewhere the folder has the final name, and is no
step before it holds a file that says so. That file tells attempts apart everywhere, so what became
of one can be asked of the store, whoever was interrupted or did not answer. Stores that put a file
on a condition let one attempt alone have such a folder, and commit it as long as it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.markers import committed, is_committed, says_committed
from cnr_jax.repository.store import (
    AnyPath,
    can,
    exists,
    is_directory,
    is_named,
    names_in,
    read_all,
    store_of,
    sync_directory,
    sync_tree,
    write_durably,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at saving a step.

    Attributes:
        root: holds the step directories.
        directory: name of the step directory, once it is committed.
        nonce: hexadecimal digits, alike on all processes and of no other attempt.
    """

    root: AnyPath
    directory: str
    nonce: str

    @property
    def path(self) -> AnyPath:
        """The step directory."""
        return self.root / self.directory


class Committer(Protocol):
    """Commits attempts, or abandons them. Only the first process calls what is not `folder`."""

    def folder(self, attempt: Attempt) -> AnyPath:
        """Where an attempt is written; touches nothing, and is alike on all processes."""
        ...

    def prepare(self, attempt: Attempt, items: Sequence[str]) -> None:
        """Makes the folder of an attempt and of each item in it, empty.

        Raises:
            DependentsExistError: if the step is there already.
        """
        ...

    def publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        """Makes an attempt durable, and commits it.

        Args:
            attempt: that is written as a whole.
            durable: names of what is durable already, of all that lies in its folder.

        Raises:
            DependentsExistError: if somebody else has committed the step.
            OSError: if it is not committed, or that cannot be seen; see `is_published`.
        """
        ...

    def settle(self, attempt: Attempt) -> None:
        """Makes it durable that an attempt is committed.

        Raises:
            OSError: if it cannot; it is committed all the same.
        """
        ...

    def is_published(self, attempt: Attempt) -> bool:
        """Whether the step is there, and is this attempt.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def abandon(self, attempt: Attempt) -> None:
        """Removes what an attempt has written; never what is committed."""
        ...


class RenameCommitter:
    """Commits by giving a folder its final name.

    Args:
        discard: removes a folder of the root, by its name, that no reader lists.
        mode: of the folders that are made; None: as the system makes them.
    """

    def __init__(self, discard: Callable[[str], None], mode: int | None = None) -> None:
        self._discard, self._mode = discard, mode

    def folder(self, attempt: Attempt) -> AnyPath:
        return attempt.root / _temporary(attempt)

    def prepare(self, attempt: Attempt, items: Sequence[str]) -> None:
        _make(self.folder(attempt), items, self._mode)

    def publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        # The system would replace an empty folder, and what was committed is nobody's to replace.
        if is_named(attempt.path):
            raise _taken(attempt)
        folder = self.folder(attempt)
        marker = names.ORBAX_COMMITTED
        write_durably(folder / marker, attempt.nonce.encode())
        sync_tree(folder, but=[*durable, marker])
        store_of(folder).move(folder, attempt.path)

    def settle(self, attempt: Attempt) -> None:
        sync_directory(attempt.root)

    def is_published(self, attempt: Attempt) -> bool:
        return _is_marked(attempt)

    def abandon(self, attempt: Attempt) -> None:
        self._discard(_temporary(attempt))


class ConditionalCommitter:
    """Commits by a swap of the file that says which attempt holds the folder.

    It is put there first. Who finds it put by another takes the folder over, if the root is its
    own, by a swap: the other may still be writing, but puts no file where one is, commits no more,
    and removes nothing. So of a commit and a takeover only one takes place.

    Args:
        check_claim: raises if the root was taken over.
    """

    def __init__(self, check_claim: Callable[[], None]) -> None:
        self._check_claim = check_claim
        # Of the file of each attempt, by nonce.
        self._versions: dict[str, Any] = {}

    def folder(self, attempt: Attempt) -> AnyPath:
        return attempt.path

    def prepare(self, attempt: Attempt, items: Sequence[str]) -> None:
        self._check_claim()
        held, note = names_in(attempt.path), attempt.path / names.ATTEMPT
        if is_committed(attempt.path, held):
            raise _taken(attempt)
        found = store_of(note).read_version(note) if held else None
        data, version = found or (b"", None)
        if says_committed(data):
            raise _taken(attempt)  # since it was looked at
        if data == attempt.nonce.encode():
            # It is taken up again, and goes on with what it has put there.
            self._versions[attempt.nonce] = version
            return
        try:
            version = store_of(note).swap(note, attempt.nonce.encode(), version)
        except FileExistsError as error:
            raise _lost(attempt) from error
        self._versions[attempt.nonce] = version
        _clear(attempt, held, attempt.nonce.encode())

    def publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        note, version = attempt.path / names.ATTEMPT, self._versions[attempt.nonce]
        try:
            store_of(note).swap(note, committed(attempt.nonce), version)
        except FileExistsError as error:
            raise _lost(attempt) from error

    def settle(self, attempt: Attempt) -> None:
        self._versions.pop(attempt.nonce, None)  # what was written is durable

    def is_published(self, attempt: Attempt) -> bool:
        return _noted(attempt) == committed(attempt.nonce)

    def abandon(self, attempt: Attempt) -> None:
        self._check_claim()
        self._versions.pop(attempt.nonce, None)
        note = attempt.path / names.ATTEMPT
        found = store_of(note).read_version(note)
        if found is not None and found[0] == attempt.nonce.encode():
            # Whoever takes the folder over writes there: nothing of that is to be removed.
            with contextlib.suppress(FileExistsError, errors.CnrError):
                store_of(note).swap(note, names.REMOVED, found[1])
                _clear(attempt, [*names_in(attempt.path), names.ATTEMPT], names.REMOVED)


def committer_for(
    root: AnyPath,
    discard: Callable[[str], None],
    check_claim: Callable[[], None],
    mode: int | None = None,
) -> Committer:
    """How steps of a root are committed: by a rename where its store can, else by a file.

    Args:
        root: that holds the steps.
        discard: removes a folder of the root that no reader lists.
        check_claim: raises if the root was taken over by another writer.
        mode: of the folders that are made; None: as the system makes them.
    """
    if can(root).renames:
        return RenameCommitter(discard, mode)
    return ConditionalCommitter(check_claim)


def _noted(attempt: Attempt) -> bytes:
    """Which attempt holds the folder, as the file there says; of nothing if there is none."""
    note = attempt.path / names.ATTEMPT
    found = store_of(note).read_version(note)
    return b"" if found is None else found[0]


def _clear(attempt: Attempt, held: Collection[str], noted: bytes) -> None:
    """Removes what lies in the folder as long as it is noted so who has it.

    The file that notes it stays, unless it is named too: it goes last.

    Raises:
        CnrError: if somebody else has taken it over.
    """
    for name in sorted(held, key=lambda name: name == names.ATTEMPT):
        if name == names.ATTEMPT and noted != names.REMOVED:
            continue
        if _noted(attempt) != noted:
            raise _lost(attempt)
        for error in store_of(attempt.path).remove_tree(attempt.path / name):
            raise error


def _lost(attempt: Attempt) -> errors.CnrError:
    """The error that says that another attempt has the folder, or has committed the step."""
    found = _noted(attempt)
    if says_committed(found):
        return _taken(attempt)
    got = found[:64].decode(errors="replace") or "none"
    return errors.WriterError(
        f"another attempt at this step holds {os.fspath(attempt.path)}\n"
        f"  got {got} in {names.ATTEMPT}, expected {attempt.nonce}: this one\n"
        "  hint: let one program at a time save there",
        path=os.fspath(attempt.path),
    )


def _temporary(attempt: Attempt) -> str:
    """The name of the folder of an attempt; of digits behind, since others read it too."""
    # Of all of the nonce: those of one run begin alike.
    number = int(hashlib.sha256(attempt.nonce.encode()).hexdigest()[:12], 16)
    return f"{attempt.directory}{names.TEMPORARY_SUFFIX}-{number}"


def _make(folder: AnyPath, items: Sequence[str], mode: int | None) -> None:
    store = store_of(folder)
    for path in (folder, *(folder / item for item in items)):
        store.make_folder(path, mode)


def _is_marked(attempt: Attempt) -> bool:
    marker = attempt.path / names.ORBAX_COMMITTED
    return exists(marker) and read_all(marker) == attempt.nonce.encode()


def _taken(attempt: Attempt) -> errors.DependentsExistError:
    where = os.fspath(attempt.path)
    held, hint = "a file", "save another step, or move that folder out of the root"
    if is_directory(attempt.path):
        held = ", ".join(names_in(attempt.path)[:5]) or "an empty folder"
    if not can(attempt.path).renames:
        hint = (
            "let one program at a time save there. To go on in this one: reload(), then"
            " restore(None), which takes the newest step of both; or save another step"
        )
    return errors.DependentsExistError(
        f"{where} is there already: somebody else has saved this step\n"
        f"  got {held}, expected nothing\n"
        f"  hint: {hint}",
        kind="step_exists",
    )
