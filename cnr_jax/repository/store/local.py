"""Local and mounted file systems: `fsync`, links, locks, and what not all of them can do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.store.base import (
    AnyPath,
    Capabilities,
    Streams,
    naming,
)
from cnr_jax.texts import logger

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl: Any = None

_log = logger(__name__)

# Tries to write a file that another manager may remove before it has its final name.
_TRIES = 10

# Errors that prove that a path leads to nothing, and will not pass by themselves.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

# Errors of `link` where there are no hard links.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}

# Errors where folders cannot be synced, or not be opened for it. Linux says EINVAL if a file system
# has no such operation (vboxsf, CIFS before 4.17). File systems that are programs say what they
# like. Other systems say that only files open for writing can be synced. PostgreSQL, coreutils,
# restic and Dovecot ignore most of these too. EIO, ENOSPC and the like are not among them, since
# they mean lost data, nor EACCES: a program that may not list a folder cannot restore from it.
_NO_SYNC = {
    *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY),
    *(errno.EBADF, errno.EISDIR),
}
# By device, whether folders can be synced on it, and files be locked.
_syncs: dict[int, bool] = {}
_locks: dict[int, bool] = {}


class LocalStore(Streams):
    """Store of files on this machine, or on a file system that is mounted here."""

    can = Capabilities(
        renames=True,
        conditions=False,
        locks=fcntl is not None,
        appends=True,
        cheap_looks=True,
        paths=True,
    )

    # Looks.

    def exists(self, path: AnyPath) -> bool:
        return _mode_of(path) is not None

    def is_directory(self, path: AnyPath) -> bool:
        mode = _mode_of(path)
        return mode is not None and stat.S_ISDIR(mode)

    def is_named(self, path: AnyPath) -> bool:
        return _mode_of(path, follow=False) is not None

    def is_file(self, path: AnyPath) -> bool:
        return stat.S_ISREG(os.stat(os.fspath(path)).st_mode)

    def is_link(self, path: AnyPath) -> bool:
        return os.path.islink(os.fspath(path))

    def is_special(self, path: AnyPath) -> bool:
        mode = _mode_of(path)
        return mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)

    def link_target(self, path: AnyPath) -> str:
        return os.readlink(os.fspath(path))

    def real(self, path: AnyPath) -> str:
        return os.path.realpath(os.fspath(path))

    def names_in(self, folder: AnyPath) -> list[str]:
        # Another program may remove the folder after the caller has seen it.
        try:
            return sorted(os.listdir(os.fspath(folder)))  # `epath` leaves out `x~`
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders_in(
        self,
        folder: AnyPath,
        may_be: Callable[[str], bool],
        known: Collection[str] = (),
    ) -> list[str]:
        with os.scandir(os.fspath(folder)) as entries:
            return [
                e.name
                for e in entries
                if e.name in known or (may_be(e.name) and self._is_folder(folder, e))
            ]

    def _is_folder(self, folder: AnyPath, entry: os.DirEntry[str]) -> bool:
        # Only a link takes another system call.
        if entry.is_symlink():
            return self.is_directory(folder / entry.name)
        return entry.is_dir()

    def size_of(self, path: AnyPath) -> int:
        return os.stat(os.fspath(path)).st_size

    def state_of(self, path: AnyPath) -> tuple[int, ...] | None:
        found = os.stat(os.fspath(path))
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def modified_unix_secs(self, path: AnyPath) -> float:
        return os.stat(os.fspath(path)).st_mtime

    def amiss(
        self, folder: AnyPath, files: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[str, int]]:
        # Plain calls of `os`, which are fast: there may be thousands of files.
        above = os.fspath(folder)
        for path, size in files:
            try:
                found = os.stat(f"{above}/{path}")
            except OSError:
                yield path, size
                continue
            if found.st_size != size or not stat.S_ISREG(found.st_mode):
                yield path, size

    def bytes_below(self, folder: AnyPath) -> int:
        if self.is_link(folder):
            return 0
        total = 0
        for at, _, files in os.walk(os.fspath(folder)):
            for name in files:
                # A run that saves there may be deleting the files.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    total += os.lstat(f"{at}/{name}").st_size
        return total

    def free_bytes(self, path: AnyPath) -> int:
        found = os.statvfs(os.fspath(self._nearest(path)))
        return found.f_bavail * found.f_frsize

    def quick(self, path: AnyPath) -> AnyPath:
        return Path(os.fspath(path))

    def fetch(self, paths: Iterable[AnyPath]) -> None:
        pass

    def forget_listings(self) -> None:
        pass  # nothing is kept

    # Reading and writing files.

    def open_file(self, path: AnyPath) -> BinaryIO:
        where = os.fspath(path)
        try:
            # O_NONBLOCK opens a pipe at once, whether or not a program writes to it.
            descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ELOOP):
                raise
            raise errors.FormatError(f"{where} is not a file", path=where) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise errors.FormatError(f"{where} is not a file", path=where)
        return open(descriptor, "rb")

    def write(self, path: AnyPath, data: bytes, *, replaces: bool) -> None:
        if not replaces:
            self._write(path, data)
            return
        for left in reversed(range(_TRIES)):
            temporary = path.parent / names.replacing(path.name, secrets.token_hex(4))
            try:
                self._write(temporary, data)
                os.replace(os.fspath(temporary), os.fspath(path))
                break
            except FileNotFoundError:
                # Another manager that takes over the root at this moment removes such files.
                if not left:
                    raise
            except BaseException:
                Path(os.fspath(temporary)).unlink(missing_ok=True)
                raise
        self.sync_directory(path.parent)

    def _write(self, path: AnyPath, data: bytes) -> None:
        with naming(path), path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def write_new(self, path: AnyPath, data: bytes) -> None:
        temporary = path.parent / names.replacing(path.name, secrets.token_hex(4))
        try:
            self._write(temporary, data)
            with naming(path):
                os.link(os.fspath(temporary), os.fspath(path))
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A reader may find it cut short, but no two writers make it.
            with naming(path), open(os.fspath(path), "xb") as file:
                file.write(data)
        finally:
            Path(os.fspath(temporary)).unlink(missing_ok=True)

    def read_version(self, path: AnyPath) -> tuple[bytes, Any] | None:
        try:
            return self.read(path), None
        except FileNotFoundError:
            return None

    def swap(self, path: AnyPath, data: bytes, version: Any) -> Any:
        raise OSError(errno.ENOTSUP, "no condition can be given", os.fspath(path))

    def append(self, path: AnyPath, line: bytes) -> None:
        # Never through a link or into a pipe, which another program has put there.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(os.fspath(path), flags | os.O_CLOEXEC, 0o666)
        try:
            with naming(path):
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    # A part of a line that a killed program left becomes a line of its own.
                    line = b"\n" + line
                while line:
                    line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)

    def lock(self, path: AnyPath) -> LocalLock:
        return LocalLock(path)

    def sync_file(self, path: AnyPath) -> None:
        with naming(path), path.open("rb") as file:
            os.fsync(file.fileno())

    def sync_directory(self, path: AnyPath) -> None:
        """Makes the entries of a folder durable.

        If the file system cannot do that, this does nothing, and a warning says so once.
        """
        try:
            with naming(path):
                descriptor = os.open(os.fspath(path), os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                    _syncs.setdefault(os.fstat(descriptor).st_dev, True)
                finally:
                    os.close(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
            device = os.stat(path).st_dev
            if _syncs.get(device, True):
                _log.warning(
                    "the file system of %s cannot sync folders (%s): what is saved there is as"
                    " good as elsewhere, but a step that was reported as committed may be missing"
                    " after a power cut",
                    os.fspath(path),
                    error.strerror,
                )
            _syncs[device] = False

    def sync_tree(self, folder: AnyPath, but: Collection[str] = ()) -> None:
        for entry in (folder / n for n in self.names_in(folder) if n not in but):
            mode = _mode_of(entry, follow=False) or 0
            if not os.access(entry, os.R_OK):
                continue
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(mode):
                    self.sync_file(entry)
                elif stat.S_ISDIR(mode):
                    self.sync_tree(entry)
        self.sync_directory(folder)

    def syncs_directories(self, path: AnyPath) -> bool:
        # Tried once on each file system.
        there = self._nearest(path)
        device = os.stat(there).st_dev
        if device not in _syncs:
            self.sync_directory(there)
        return _syncs[device]

    def locks_files(self, path: AnyPath) -> bool:
        # Tried once on each file system.
        if fcntl is None:
            return True  # without fcntl, this cannot be tried
        there = self._nearest(path)
        device = os.stat(there).st_dev
        if device not in _locks:
            with tempfile.TemporaryFile(dir=there) as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _locks[device] = True
                except OSError as error:
                    _log.info("no locks in %s: %s", os.fspath(there), error)
                    _locks[device] = False
        return _locks[device]

    def _nearest(self, path: AnyPath) -> AnyPath:
        """The folder itself, or the nearest one above it that exists."""
        while not self.exists(path) and path.parent != path:
            path = path.parent
        return path

    # Names.

    def make_folder(self, path: AnyPath, mode: int | None = None) -> None:
        path.mkdir(0o777 if mode is None else mode, parents=True, exist_ok=True)

    def move(self, path: AnyPath, target: AnyPath) -> None:
        os.rename(os.fspath(path), os.fspath(target))

    def remove_file(self, path: AnyPath) -> None:
        Path(os.fspath(path)).unlink(missing_ok=True)

    def remove_folder(self, path: AnyPath) -> None:
        os.rmdir(os.fspath(path))

    def remove_tree(
        self, path: AnyPath, threads: int = 1, attempt: Any = None
    ) -> list[OSError]:
        failed: list[OSError] = []
        folders, files = self._walk(path, failed)
        try:
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                failed += [error for error in pool.map(_unlink, files) if error]
        except RuntimeError:  # the system has no more threads
            failed += [error for error in map(_unlink, files) if error]
        for folder in folders:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                failed.append(error)
        return failed

    def _walk(
        self, path: AnyPath, failed: list[OSError]
    ) -> tuple[list[str], list[str]]:
        """Folders of a tree, innermost first, and its files, which include all links."""
        if self.is_link(path):
            return [], [os.fspath(path)]  # `os.walk` would follow this link
        folders: list[str] = []
        files: list[str] = []

        def note(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                failed.append(error)

        for at, inner, held in os.walk(os.fspath(path), topdown=False, onerror=note):
            folders.append(at)
            files += [f"{at}/{name}" for name in held]
            files += [
                f"{at}/{name}" for name in inner if os.path.islink(f"{at}/{name}")
            ]
        return folders, files

    # TensorStore.

    def kvstore(self, folder: AnyPath) -> str | dict[str, str]:
        where = os.fspath(folder)
        if any("\ud800" <= letter <= "\udfff" for letter in where):
            raise errors.OptionError(
                f"{where!r} holds no arrays: TensorStore takes only paths of UTF-8\n"
                "  hint: rename the folder that is called so"
            )
        return {"driver": "file", "path": f"{os.path.abspath(where)}/"}

    def check_usable(self, root: AnyPath) -> None:
        path = root
        while not self.exists(path) and path != path.parent:
            path = path.parent
        if not self.is_directory(path):
            raise errors.OptionError(
                f"{os.fspath(root)} is no root: {os.fspath(path)} is a file\n"
                "  got a file, expected a folder, or a path at which to make one"
            )


class LocalLock:
    """An open file that can be locked by `flock`.

    The system frees the lock when the process ends, however it ends.
    """

    def __init__(self, path: AnyPath) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(os.fspath(path), flags, 0o666)
        self._where = os.fspath(path.parent)

    def acquire(self) -> bool | None:
        """Tries to take the lock without waiting; returns whether it did, None without locks."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return False
            _log.info("no locks in %s: %s", self._where, error)
            return None
        return True

    def close(self, *, unlocks: bool = True) -> None:
        """Closes the file; `unlocks` frees the lock even if another process inherited the file."""
        if unlocks:
            # If this fails, say since the file server was restarted, there is no lock to free.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _mode_of(path: AnyPath, *, follow: bool = True) -> int | None:
    """Mode of the file or folder at a path, as `stat` has it; None if there is nothing.

    Raises:
        OSError: if that cannot be seen.
    """
    where = os.fspath(path)
    try:
        return (os.stat(where) if follow else os.lstat(where)).st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def _unlink(path: str) -> OSError | None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        return error
    return None
