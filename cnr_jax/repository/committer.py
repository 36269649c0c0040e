"""Commits of steps: a folder gets its final name, or a file in it says that it is committed.

A save is written into a folder of its own. Where folders can be renamed, the folder has a name that
no reader lists, and that no other attempt at the step has: a thread that still writes for an
attempt that was given up writes beside the next one. Elsewhere the folder has the final name, and
is no step before it holds a file that says so. Everywhere that file tells attempts apart, so the
store can be asked what became of one, even after an interrupt or a lost answer. Where a store can
put a file on a condition, only one attempt holds the folder, and can commit it while it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.markers import (
    committed,
    is_committed,
    says_committed,
    says_removed,
    stopped,
)
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
        root: root that holds the step directories.
        directory: name of the step directory, once the attempt is committed.
        nonce: hexadecimal digits, the same on all processes, and unique to this attempt.
    """

    root: AnyPath
    directory: str
    nonce: str

    @property
    def path(self) -> AnyPath:
        """The step directory."""
        return self.root / self.directory


class Committer(Protocol):
    """Commits attempts, or abandons them. Only the first process calls methods but `folder`."""

    def folder(self, attempt: Attempt) -> AnyPath:
        """Folder that an attempt is written into, the same on all processes; touches nothing."""
        ...

    def prepare(self, attempt: Attempt, items: Sequence[str]) -> None:
        """Makes the folder of an attempt, and a folder in it for each item, all empty.

        Raises:
            DependentsExistError: if the step is there already.
        """
        ...

    def publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        """Makes an attempt durable, and commits it.

        Args:
            attempt: attempt whose files are all written.
            durable: names of those files and folders in its folder that are durable already.

        Raises:
            DependentsExistError: if somebody else has committed the step.
            OSError: if it is not committed, or storage does not tell; see `is_published`.
        """
        ...

    def settle(self, attempt: Attempt) -> None:
        """Makes the commit of an attempt durable.

        Raises:
            OSError: if that fails; the attempt is committed all the same.
        """
        ...

    def is_published(self, attempt: Attempt) -> bool:
        """Whether the step is committed, and is this attempt.

        Raises:
            OSError: if storage does not tell.
        """
        ...

    def abandon(self, attempt: Attempt) -> None:
        """Removes the files that an attempt has written, unless it is committed."""
        ...


class RenameCommitter:
    """Commits by giving a folder its final name.

    Args:
        discard: function that removes a folder of the root that no reader lists, given its name.
        mode: mode of the folders that are made; None: as the system makes them.
    """

    def __init__(self, discard: Callable[[str], None], mode: int | None = None) -> None:
        self._discard, self._mode = discard, mode

    def folder(self, attempt: Attempt) -> AnyPath:
        return attempt.root / _temporary(attempt)

    def prepare(self, attempt: Attempt, items: Sequence[str]) -> None:
        _make(self.folder(attempt), items, self._mode)

    def publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        # A rename would replace an empty folder, but nobody may replace what was committed.
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

    An attempt puts that file first. If the file of another attempt is there, and the root is still
    claimed, the attempt takes the folder over by a swap. The other attempt may still be writing,
    but it puts no file where one is, and can neither commit nor remove anything. So of a commit and
    a takeover only one takes place.

    Args:
        check_claim: function that raises an error if the root was taken over.
    """

    def __init__(self, check_claim: Callable[[], None]) -> None:
        self._check_claim = check_claim
        # By nonce, what the file of each attempt says of it, and the version of that file.
        self._held: dict[str, tuple[str, Any]] = {}

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
            raise _taken(
                attempt
            )  # another attempt has committed it since the look above
        text = attempt.nonce
        if is_own := data.startswith(text.encode()) and not says_removed(data):
            # Another text, as some services take files of the same contents for the same version:
            # who has put it before could commit what this one is about to write.
            text = f"{attempt.nonce}-{secrets.token_hex(8)}"
        try:
            version = store_of(note).swap(note, text.encode(), version)
        except FileExistsError as error:
            raise _lost(attempt, text) from error
        self._held[attempt.nonce] = text, version
        # An attempt that is taken up again keeps the files that it has put there.
        if not is_own:
            _clear(attempt, held, text)

    def publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        note, (text, version) = attempt.path / names.ATTEMPT, self._held[attempt.nonce]
        try:
            store_of(note).swap(note, committed(text), version)
        except FileExistsError as error:
            if _noted(attempt) == stopped(text):
                self._check_claim()
            raise _lost(attempt, text) from error

    def settle(self, attempt: Attempt) -> None:
        self._held.pop(attempt.nonce, None)  # a put is durable at once

    def is_published(self, attempt: Attempt) -> bool:
        text, _ = self._held.get(attempt.nonce, (attempt.nonce, None))
        return _noted(attempt) == committed(text)

    def abandon(self, attempt: Attempt) -> None:
        self._check_claim()
        text, _ = self._held.pop(attempt.nonce, (attempt.nonce, None))
        note = attempt.path / names.ATTEMPT
        found = store_of(note).read_version(note)
        if found is not None and found[0] == text.encode():
            # Another attempt that takes the folder over writes there: its files must stay.
            with contextlib.suppress(FileExistsError, errors.CnrError):
                store_of(note).swap(note, names.REMOVED, found[1])
                held = [*names_in(attempt.path), names.ATTEMPT]
                _clear(attempt, held, names.REMOVED.decode())


def committer_for(
    root: AnyPath,
    discard: Callable[[str], None],
    check_claim: Callable[[], None],
    mode: int | None = None,
) -> Committer:
    """Committer of a root: commits by a rename where its store has renames, else by a file.

    Args:
        root: root that holds the steps.
        discard: function that removes a folder of the root that no reader lists, given its name.
        check_claim: function that raises an error if another writer has taken over the root.
        mode: mode of the folders that are made; None: as the system makes them.
    """
    if can(root).renames:
        return RenameCommitter(discard, mode)
    return ConditionalCommitter(check_claim)


def _noted(attempt: Attempt) -> bytes:
    """Contents of the file that says which attempt holds the folder; empty if there is none."""
    note = attempt.path / names.ATTEMPT
    found = store_of(note).read_version(note)
    return b"" if found is None else found[0]


def _clear(attempt: Attempt, held: Collection[str], text: str) -> None:
    """Removes names from the folder of an attempt, as long as its note there reads `text`.

    The note itself stays, except if `text` says that the folder is removed: then it goes last.

    Raises:
        CnrError: if another attempt has taken the folder over.
    """
    noted = text.encode()
    for name in sorted(held, key=lambda name: name == names.ATTEMPT):
        if name == names.ATTEMPT and noted != names.REMOVED:
            continue
        if _noted(attempt) != noted:
            raise _lost(attempt, text)
        for error in store_of(attempt.path).remove_tree(attempt.path / name):
            raise error


def _lost(attempt: Attempt, text: str) -> errors.CnrError:
    """Error that says that another attempt holds the folder, or has committed the step.

    Args:
        attempt: attempt that does not hold the folder.
        text: what its note there would read.
    """
    found = _noted(attempt)
    if says_committed(found):
        return _taken(attempt)
    if found == stopped(text):
        return errors.SaveError(
            f"another program has had the root for a while, and stopped the save of"
            f" {os.fspath(attempt.path)}\n"
            "  hint: save again; delete and merge steps while nobody saves",
            step=names.step_number(attempt.directory),
            path=os.fspath(attempt.path),
        )
    got = found[:64].decode(errors="replace") or "none"
    return errors.WriterError(
        f"another attempt at this step holds {os.fspath(attempt.path)}\n"
        f"  got {got} in {names.ATTEMPT}, expected {text}: this one\n"
        "  hint: let one program at a time save there",
        path=os.fspath(attempt.path),
    )


def _temporary(attempt: Attempt) -> str:
    """Name of the folder of an attempt; ends in digits, as other programs expect of such names."""
    # The hash is of the whole nonce, since the nonces of one run begin alike.
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
