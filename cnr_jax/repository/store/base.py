"""What roots ask of storage: one class for each kind of it, and what that kind can do.

Paths are what Orbax hands over (`etils.epath` objects, which behave like `pathlib.Path`). What
can be done at one is asked of its store, by `store_of`, and never guessed from the path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from etils import epath

from cnr_jax import errors

# What Orbax hands over behaves like a path of Python, on any storage.
AnyPath = Path | epath.Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a kind of storage can do.

    Attributes:
        renames: a folder gets another name at once, with all that is in it. Elsewhere a file in it
            says what it is.
        conditions: a file is written as a whole, on the condition that nothing is there, or what
            was read before. Elsewhere locks keep programs apart.
        locks: a file can be locked, and the lock goes with the process that holds it; not every
            file system can, which trying shows.
        appends: files can grow.
        cheap_looks: whether a file is there, and its size, costs next to nothing; elsewhere each
            look is a request.
        paths: paths of `etils` reach it, and with them Orbax.
    """

    renames: bool
    conditions: bool
    locks: bool
    appends: bool
    cheap_looks: bool
    paths: bool


class Store(Protocol):
    """Storage of one kind.

    Absence is proven or an error: whoever asks whether something is there gets an OSError where
    that cannot be seen, since a root that cannot be seen would look empty.
    """

    can: Capabilities

    # Looks.

    def exists(self, path: AnyPath) -> bool:
        """Whether something is there; links are followed.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def is_directory(self, path: AnyPath) -> bool:
        """Whether a folder is there; links are followed.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def is_named(self, path: AnyPath) -> bool:
        """Whether there is something of this name, be it a link that leads nowhere.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def is_file(self, path: AnyPath) -> bool:
        """Whether a file is there; links are followed.

        Raises:
            OSError: if that cannot be seen, or nothing is there.
        """
        ...

    def is_link(self, path: AnyPath) -> bool:
        """Whether a link is there; False also where that cannot be seen."""
        ...

    def is_special(self, path: AnyPath) -> bool:
        """Whether a pipe, a socket or a device is there, which who reads it may wait for.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def link_target(self, path: AnyPath) -> str:
        """Where a link leads, as it says."""
        ...

    def real(self, path: AnyPath) -> str:
        """One text for all paths that lead to one place, also where nothing is."""
        ...

    def names_in(self, folder: AnyPath) -> list[str]:
        """Names of all that lies in a folder, sorted; none where it is gone, or no folder.

        Raises:
            OSError: if it cannot be listed, though it is there.
        """
        ...

    def folders_in(
        self,
        folder: AnyPath,
        may_be: Callable[[str], bool],
        known: Collection[str] = (),
    ) -> list[str]:
        """Names of the folders in a folder that may be called so, in any order.

        Args:
            folder: to be listed.
            may_be: whether a name is one that is looked for.
            known: names that were found before, and are not looked at again.

        Raises:
            OSError: if it cannot be listed.
        """
        ...

    def size_of(self, path: AnyPath) -> int:
        """Bytes of a file."""
        ...

    def state_of(self, path: AnyPath) -> tuple[int, ...] | None:
        """What changes when a file is written or replaced; None where that cannot be seen.

        The time of the last change of its inode is left out: a backup that links the file sets it.
        """
        ...

    def modified_unix_secs(self, path: AnyPath) -> float:
        """When a file or folder was last changed."""
        ...

    def amiss(
        self, folder: AnyPath, files: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[str, int]]:
        """Which files below a folder are not seen to be there and to have so many bytes.

        Where each look is a request, all: they are looked at one by one.
        """
        ...

    def bytes_below(self, folder: AnyPath) -> int:
        """Bytes of all files in a folder; of a link none, as what it leads to stays."""
        ...

    def free_bytes(self, path: AnyPath) -> int:
        """Bytes for which there is room where a folder is, or will be made."""
        ...

    def quick(self, path: AnyPath) -> AnyPath:
        """The same path, as one that is quickly joined with names, of which there are many."""
        ...

    def forget_listings(self) -> None:
        """Has what lies in folders be asked for anew, wherever it is kept in memory."""
        ...

    def fetch(self, paths: Iterable[AnyPath]) -> None:
        """Reads files side by side which `read` is about to be asked for, in `asking_once`.

        Where looks are requests, and only there. Who then asks for one that cannot be read gets the
        error.
        """
        ...

    # Reading and writing files.

    def open_file(self, path: AnyPath) -> BinaryIO:
        """Opens a file to be read, without waiting for a pipe.

        Raises:
            FormatError: if it is no file.
            OSError: if it is not there or cannot be read.
        """
        ...

    def read(self, path: AnyPath) -> bytes:
        """The contents of a file."""
        ...

    def read_end(self, path: AnyPath, count: int) -> bytes:
        """The last bytes of a file, or all of it if there are fewer."""
        ...

    def write(self, path: AnyPath, data: bytes, *, replaces: bool) -> None:
        """Writes a file, durable once its folder is synced.

        Args:
            path: of the file.
            data: all that is in it.
            replaces: whether there may be one that others read: it is there whole, or as it was
                before, whatever happens meanwhile. Else, in a crash, some of it.

        Raises:
            FileExistsError: if another is there that is not to be replaced; only where the store
                does not rename.
        """
        ...

    def write_new(self, path: AnyPath, data: bytes) -> None:
        """Writes a file, whole, where nothing is.

        Raises:
            FileExistsError: if something else is there; it stays.
        """
        ...

    def read_version(self, path: AnyPath) -> tuple[bytes, Any] | None:
        """The contents of a file, and what tells them from others; None where there is none."""
        ...

    def swap(self, path: AnyPath, data: bytes, version: Any) -> Any:
        """Writes a file if it is still as it was read; only where the store knows conditions.

        Args:
            path: of the file.
            data: all that is in it.
            version: as `read_version` told; None: there must be none.

        Where the answer is lost it is read back: no two writers may write the same.

        Returns:
            What tells it from others from now on.

        Raises:
            FileExistsError: if it is another.
        """
        ...

    def append(self, path: AnyPath, line: bytes) -> None:
        """Adds a line to a file, by one call, after what a killed program has left of one."""
        ...

    def lock(self, path: AnyPath) -> FileLock:
        """Opens a file to lock it, which makes it; only where the store can."""
        ...

    def sync_file(self, path: AnyPath) -> None:
        """Makes a file durable that somebody else has written."""
        ...

    def sync_directory(self, path: AnyPath) -> None:
        """Makes the names in a folder durable."""
        ...

    def sync_tree(self, folder: AnyPath, but: Collection[str] = ()) -> None:
        """Makes all that is below a folder durable, but what is called so right in it.

        Others may have put something there: links and what else is no file are left out, what is
        gone by now, and what this program may not open, since it has not written it.
        """
        ...

    def syncs_directories(self, path: AnyPath) -> bool:
        """Whether folders can be synced where a folder is, or will be made."""
        ...

    def locks_files(self, path: AnyPath) -> bool:
        """Whether programs can lock files where a folder is, or will be made."""
        ...

    # Names.

    def make_folder(self, path: AnyPath, mode: int | None = None) -> None:
        """Makes a folder, and those above it; nothing where it is there.

        Args:
            path: of the folder.
            mode: who may use it, where a store knows of that; None: as the system says.
        """
        ...

    def move(self, path: AnyPath, target: AnyPath) -> None:
        """Gives a file or folder another name; at once only where the store can."""
        ...

    def remove_file(self, path: AnyPath) -> None:
        """Removes a file or a link, if it is there."""
        ...

    def remove_folder(self, path: AnyPath) -> None:
        """Removes an empty folder.

        Raises:
            OSError: if something is in it.
        """
        ...

    def remove_tree(self, path: AnyPath, threads: int = 1) -> list[OSError]:
        """Removes a folder with all that is in it, or a link; returns what kept some of it."""
        ...

    # TensorStore.

    def kvstore(self, folder: AnyPath) -> str | dict[str, str] | None:
        """What TensorStore calls a folder; None where it is not to reach it.

        Raises:
            OptionError: if it does not take its path.
        """
        ...

    def check_usable(self, root: AnyPath) -> None:
        """Checks that a root can be here, and be made.

        Raises:
            OptionError: if not.
            OSError: if that cannot be seen.
        """
        ...


class FileLock(Protocol):
    """A file that is open, to be locked."""

    def acquire(self) -> bool | None:
        """Takes the lock, without waiting: whether that worked; None where there are none."""
        ...

    def close(self, *, unlocks: bool = True) -> None:
        """Closes the file; `unlocks`: also for whoever has inherited it."""
        ...


@contextlib.contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Has errors name the path, which the system leaves out of what is done to open files."""
    try:
        yield
    except OSError as error:
        # One without a number is of no call, and would lose its text, as ours would.
        ours = isinstance(error, errors.CnrError)
        if error.filename is None and error.errno is not None and not ours:
            error.filename = os.fspath(path)
        raise


class Streams:
    """Reading files as streams, for stores that open them so."""

    def read(self, path: AnyPath) -> bytes:
        with path.open("rb") as stream:
            return stream.read()

    def read_end(self, path: AnyPath, count: int) -> bytes:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - count))
            return stream.read()


class Objects:
    """What is alike for all objects of buckets: no links, no locks, no folders, all durable."""

    def is_file(self, path: AnyPath) -> bool:
        return True  # reading shows it

    def is_link(self, path: AnyPath) -> bool:
        return False

    def is_special(self, path: AnyPath) -> bool:
        return False

    def link_target(self, path: AnyPath) -> str:
        raise OSError(errno.EINVAL, "no link", os.fspath(path))

    def real(self, path: AnyPath) -> str:
        return os.fspath(path)

    def state_of(self, path: AnyPath) -> tuple[int, ...] | None:
        return None

    def free_bytes(self, path: AnyPath) -> int:
        return sys.maxsize

    def quick(self, path: AnyPath) -> AnyPath:
        return path

    def append(self, path: AnyPath, line: bytes) -> None:
        raise OSError(errno.ENOTSUP, "objects cannot grow", os.fspath(path))

    def lock(self, path: AnyPath) -> FileLock:
        raise OSError(errno.ENOTSUP, "objects cannot be locked", os.fspath(path))

    def sync_file(self, path: AnyPath) -> None:
        pass

    def sync_directory(self, path: AnyPath) -> None:
        pass

    def sync_tree(self, folder: AnyPath, but: Collection[str] = ()) -> None:
        pass

    def syncs_directories(self, path: AnyPath) -> bool:
        return True

    def locks_files(self, path: AnyPath) -> bool:
        return True  # TensorStore needs none there

    def remove_folder(self, path: AnyPath) -> None:
        pass  # there are none
