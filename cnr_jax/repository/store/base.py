"""Interface of storage: `Store`, which each kind of storage implements, and its capabilities.

Paths are what Orbax hands over: `etils.epath` objects, which behave like `pathlib.Path`. Code asks
the store of a path what it can do there, by `store_of`, and never guesses that from the path.
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
    """Capabilities of a kind of storage.

    Attributes:
        renames: whether a folder can be renamed at once, with all that is in it. Elsewhere a file
            in the folder says what it is.
        conditions: whether a write can require that there is no such file, or that it is as it was
            read before. Elsewhere locks keep programs apart.
        locks: whether a file can be locked until the process that holds the lock ends. Not every
            file system can; only trying shows it.
        appends: whether files can grow.
        cheap_looks: whether it costs next to nothing to find out if a file exists, and its size.
            Elsewhere each look is a request.
        paths: whether paths of `etils`, and with them Orbax, reach this storage.
    """

    renames: bool
    conditions: bool
    locks: bool
    appends: bool
    cheap_looks: bool
    paths: bool


class Store(Protocol):
    """Storage of one kind.

    A store never reports a file as absent unless that is proven. If it cannot see whether a file
    exists, it raises an OSError, since a root that cannot be seen would otherwise look empty.
    """

    can: Capabilities

    # Looks.

    def exists(self, path: AnyPath) -> bool:
        """Whether a path leads to something; links are followed.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def is_directory(self, path: AnyPath) -> bool:
        """Whether a path leads to a folder; links are followed.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def is_named(self, path: AnyPath) -> bool:
        """Whether a path exists, even as a link that leads nowhere.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def is_file(self, path: AnyPath) -> bool:
        """Whether a path leads to a file; links are followed.

        Raises:
            OSError: if that cannot be seen, or the path leads to nothing.
        """
        ...

    def is_link(self, path: AnyPath) -> bool:
        """Whether a path is a link; False also if that cannot be seen."""
        ...

    def is_special(self, path: AnyPath) -> bool:
        """Whether a path leads to a pipe, a socket or a device, where a reader might wait.

        Raises:
            OSError: if that cannot be seen.
        """
        ...

    def link_target(self, path: AnyPath) -> str:
        """Target of a link, as it is stored in the link."""
        ...

    def real(self, path: AnyPath) -> str:
        """Canonical text of a path, the same for all paths to one place; it need not exist."""
        ...

    def names_in(self, folder: AnyPath) -> list[str]:
        """Names of all files and folders in a folder, sorted; empty if it is gone, or no folder.

        Raises:
            OSError: if the folder exists, but cannot be listed.
        """
        ...

    def folders_in(
        self,
        folder: AnyPath,
        may_be: Callable[[str], bool],
        known: Collection[str] = (),
    ) -> list[str]:
        """Names of the folders in a folder that `may_be` accepts, in any order.

        Args:
            folder: folder to list.
            may_be: tells whether the caller looks for a name.
            known: names that were found before, and are not looked at again.

        Raises:
            OSError: if the folder cannot be listed.
        """
        ...

    def size_of(self, path: AnyPath) -> int:
        """Size of a file in bytes."""
        ...

    def state_of(self, path: AnyPath) -> tuple[int, ...] | None:
        """Numbers that change when a file is written or replaced; None where there are none.

        The time of the last change of its inode is left out: a backup that links the file sets it.
        """
        ...

    def modified_unix_secs(self, path: AnyPath) -> float:
        """Unix time of the last change of a file or folder, in seconds."""
        ...

    def amiss(
        self, folder: AnyPath, files: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[str, int]]:
        """Yields the files below a folder that are missing, or do not have the given size.

        It also yields a file that the store cannot see, so the caller looks at it once more.
        """
        ...

    def bytes_below(self, folder: AnyPath) -> int:
        """Bytes of all files below a folder; 0 for a link, since its target would stay."""
        ...

    def free_bytes(self, path: AnyPath) -> int:
        """Bytes of free space for a folder, which need not exist yet."""
        ...

    def quick(self, path: AnyPath) -> AnyPath:
        """The same path in a form that is fast to join with thousands of names."""
        ...

    def forget_listings(self) -> None:
        """Forgets all answers that are kept in memory, such as listings of folders."""
        ...

    def fetch(self, paths: Iterable[AnyPath]) -> None:
        """Reads files side by side that the caller is about to `read`, within `asking_once`.

        Only a store where looks are requests does so. If a file cannot be read, the later `read`
        raises the error.
        """
        ...

    # Reading and writing files.

    def open_file(self, path: AnyPath) -> BinaryIO:
        """Opens a file for reading, without waiting for a pipe.

        Raises:
            FormatError: if it is not a file.
            OSError: if it is missing or cannot be read.
        """
        ...

    def read(self, path: AnyPath) -> bytes:
        """Reads a whole file."""
        ...

    def read_end(self, path: AnyPath, count: int) -> bytes:
        """Reads the last `count` bytes of a file, or all of it if it has fewer."""
        ...

    def write(self, path: AnyPath, data: bytes, *, replaces: bool) -> None:
        """Writes a file, which is durable once its folder is synced.

        Args:
            path: path of the file.
            data: its new contents.
            replaces: whether others may read a file of this name. After a crash it is then whole,
                or as it was before. If False, a crash may leave a part of it.

        Raises:
            FileExistsError: if there is another file, and `replaces` is False; only where the
                store does not rename.
        """
        ...

    def write_new(self, path: AnyPath, data: bytes) -> None:
        """Writes a whole file at a path that does not exist yet.

        Raises:
            FileExistsError: if the path exists; what is there stays.
        """
        ...

    def read_version(self, path: AnyPath) -> tuple[bytes, Any] | None:
        """Reads a file and its version, which tells it from others; None if there is no file."""
        ...

    def swap(self, path: AnyPath, data: bytes, version: Any) -> Any:
        """Writes a file if it is still as it was read; only where the store knows conditions.

        Args:
            path: path of the file.
            data: its new contents.
            version: version from `read_version`; None if there must be no such file.

        If the answer is lost, the file is read back. So no two writers may write the same data.

        Returns:
            New version of the file.

        Raises:
            FileExistsError: if the file has another version.
        """
        ...

    def append(self, path: AnyPath, line: bytes) -> None:
        """Appends a line to a file, after a line break if a killed program left part of one."""
        ...

    def lock(self, path: AnyPath) -> FileLock:
        """Opens a file to lock it, and makes it if it is missing; only where the store can lock."""
        ...

    def sync_file(self, path: AnyPath) -> None:
        """Makes a file durable that another writer, such as Orbax, has written."""
        ...

    def sync_directory(self, path: AnyPath) -> None:
        """Makes the entries of a folder durable."""
        ...

    def sync_tree(self, folder: AnyPath, but: Collection[str] = ()) -> None:
        """Makes everything below a folder durable, except its own entries named in `but`.

        Other programs may have put something there. So this leaves out links and other special
        files, files that are gone by now, and those that this program may not open.
        """
        ...

    def syncs_directories(self, path: AnyPath) -> bool:
        """Whether folders can be synced in the file system of a folder that need not exist yet."""
        ...

    def locks_files(self, path: AnyPath) -> bool:
        """Whether files can be locked in the file system of a folder that need not exist yet."""
        ...

    # Names.

    def make_folder(self, path: AnyPath, mode: int | None = None) -> None:
        """Makes a folder and those above it; does nothing if it exists.

        Args:
            path: path of the folder.
            mode: permissions, where a store has them; None for the default of the system.
        """
        ...

    def move(self, path: AnyPath, target: AnyPath) -> None:
        """Renames a file or folder; atomic only where the store renames."""
        ...

    def remove_file(self, path: AnyPath) -> None:
        """Removes a file or a link, if it exists."""
        ...

    def remove_folder(self, path: AnyPath) -> None:
        """Removes an empty folder.

        Raises:
            OSError: if it is not empty.
        """
        ...

    def remove_tree(
        self, path: AnyPath, threads: int = 1, attempt: Any = None
    ) -> list[OSError]:
        """Removes a folder with its contents, or a link; returns the errors of what remains.

        Args:
            path: path of the folder.
            threads: number of threads that delete at the same time.
            attempt: version of the file of an attempt in the folder. Once it has another one,
                somebody else writes there, and nothing more is removed. None: not known.
        """
        ...

    # TensorStore.

    def kvstore(self, folder: AnyPath) -> str | dict[str, str] | None:
        """TensorStore's spec of a folder; None where TensorStore must not read or write itself.

        Raises:
            OptionError: if TensorStore does not take the path.
        """
        ...

    def check_usable(self, root: AnyPath) -> None:
        """Checks that a root can be at this path, and be made there.

        Raises:
            OptionError: if it cannot.
            OSError: if that cannot be seen.
        """
        ...


class FileLock(Protocol):
    """An open file that can be locked."""

    def acquire(self) -> bool | None:
        """Tries to take the lock without waiting; returns whether it did, None without locks."""
        ...

    def close(self, *, unlocks: bool = True) -> None:
        """Closes the file; `unlocks` frees the lock even if another process inherited the file."""
        ...


@contextlib.contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Adds the path to errors of calls on open files, from which the system leaves it out."""
    try:
        yield
    except OSError as error:
        # An error without a number, or one of this library, would lose its text by a filename.
        ours = isinstance(error, errors.CnrError)
        if error.filename is None and error.errno is not None and not ours:
            error.filename = os.fspath(path)
        raise


class Streams:
    """Implementation of reads by `path.open`, for stores whose paths have it."""

    def read(self, path: AnyPath) -> bytes:
        with path.open("rb") as stream:
            return stream.read()

    def read_end(self, path: AnyPath, count: int) -> bytes:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - count))
            return stream.read()


class Objects:
    """Implementation for objects of any bucket: no links, locks or folders, and all is durable."""

    def is_file(self, path: AnyPath) -> bool:
        return True  # a read shows whether it is one

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
        return True  # TensorStore needs no locks in buckets

    def remove_folder(self, path: AnyPath) -> None:
        pass  # there are none
