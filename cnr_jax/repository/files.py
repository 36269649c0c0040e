"""Files on any storage: paths, what is there, digests, and the order in which they are durable.

Paths are what Orbax hands over (`etils.epath` objects, which behave like `pathlib.Path`); local
paths get `fsync`, others are durable when their write returns.

Whether something is there is asked here, and nowhere by a path's own `exists` and `is_dir`: these
take every error for absence, as of a server that does not answer, and a root that cannot be seen
would look empty.

Writers of rows and manifests sync what they write. Orbax syncs nothing: neither its own files, nor
directories it renames, nor the root. What is missing is done here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import FileDigest
from cnr_jax.texts import logger

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl: Any = None

_log = logger(__name__)

# To write a file that somebody else removes before it has its name.
_TRIES = 10

# What is said where folders cannot be synced, or not be opened for it. Linux says EINVAL where a
# file system has no such operation (vboxsf, CIFS before 4.17), file systems that are programs say
# what they like, other systems that only what is open for writing can be synced. PostgreSQL,
# coreutils, restic and Dovecot pass over most of these too. Not EIO, ENOSPC and the like, which
# tell of data that is lost, nor EACCES: who may not list a folder cannot restore from it either.
_NO_SYNC = {
    *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY),
    *(errno.EBADF, errno.EISDIR),
}
# By device, whether folders can be synced there, and files be locked.
_syncs: dict[int, bool] = {}
_locks: dict[int, bool] = {}


# What Orbax hands over behaves like a path of Python, on any storage.
AnyPath = Path | epath.Path


def is_local(path: AnyPath) -> bool:
    """Whether the path is in a local (or mounted) file system."""
    return "://" not in os.fspath(path)


def exists(path: AnyPath) -> bool:
    """Whether something is there; links are followed.

    Raises:
        OSError: if that cannot be seen.

    Example:
        >>> from pathlib import Path
        >>> exists(Path("/")), exists(Path("/no such folder/file"))
        (True, False)
    """
    return mode_of(path) is not None if is_local(path) else path.exists()


def is_directory(path: AnyPath) -> bool:
    """Whether a directory is there; links are followed.

    Raises:
        OSError: if that cannot be seen.
    """
    if not is_local(path):
        return path.is_dir()
    mode = mode_of(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_named(path: AnyPath) -> bool:
    """Whether there is something of this name, be it a link that leads nowhere.

    Raises:
        OSError: if that cannot be seen.
    """
    if not is_local(path):
        return path.exists()
    return mode_of(path, follow=False) is not None


def is_gone(path: AnyPath) -> bool:
    """Whether a local path is seen to lead to nothing, not even a link; False in doubt."""
    try:
        return is_local(path) and not is_named(path)
    except OSError:
        return False


# No such name, or one that can lead nowhere: nothing that storage may show the next time.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def mode_of(path: AnyPath, *, follow: bool = True) -> int | None:
    """What is at a local path, as the system tells it; None: nothing.

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


def names_in(folder: AnyPath) -> list[str]:
    """Names of all that lies in a folder of a root, sorted; none where it is gone, or no folder.

    A run may be saving in the root: whatever is seen there may be removed before it is listed.

    Raises:
        OSError: if it cannot be listed, though it is there.
    """
    try:
        if is_local(folder):
            return sorted(os.listdir(os.fspath(folder)))  # `epath` leaves out `x~`
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def size_of(path: AnyPath) -> int:
    """Bytes of a file."""
    if is_local(path):
        return os.stat(os.fspath(path)).st_size
    with path.open("rb") as stream:
        return int(stream.seek(0, os.SEEK_END))


def read_small(path: AnyPath, limit_bytes: int) -> bytes:
    """The contents of a file that no digest vouches for.

    Whatever is in its place, this neither waits for ever nor fills the memory.

    Raises:
        FormatError: if it is no file, such as a pipe or a device, or has more than
            `limit_bytes`.
        OSError: if it is not there or cannot be read.
    """
    where = os.fspath(path)
    if is_local(path):
        try:
            # A pipe is opened at once this way, whether or not somebody writes to it.
            descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ELOOP):
                raise
            raise errors.FormatError(f"{where} is not a file", path=where) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise errors.FormatError(f"{where} is not a file", path=where)
        stream = open(descriptor, "rb")
    else:
        stream = path.open("rb")
    with stream:
        data = stream.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise errors.FormatError(
            f"{where} is too large: more than {limit_bytes:,} bytes", path=where
        )
    return data


def write_durably(path: AnyPath, data: bytes) -> FileDigest:
    """Writes a file so that it survives a power cut once its directory is synced.

    Returns:
        Its digest, with the file's name as path.
    """
    with naming(path), path.open("wb") as file:
        file.write(data)
        if is_local(path):
            file.flush()
            os.fsync(file.fileno())
    return digest_of(path.name, data)


def replace_durably(path: AnyPath, data: bytes) -> None:
    """Writes a file that is there whole or as it was before, whatever happens meanwhile."""
    if not is_local(path):
        # Storage services show an object when it is complete.
        write_durably(path, data)
        return
    for left in reversed(range(_TRIES)):
        temporary = path.parent / names.replacing(path.name, secrets.token_hex(4))
        try:
            write_durably(temporary, data)
            os.replace(os.fspath(temporary), os.fspath(path))
            break
        except FileNotFoundError:
            # Another manager that takes over at this moment clears what it finds.
            if not left:
                raise
        except BaseException:
            Path(os.fspath(temporary)).unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


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


def sync_directory(path: AnyPath) -> None:
    """Makes the entries of a local directory durable; storage services need nothing.

    Where a file system cannot do that, a warning says so once, and nothing is done.
    """
    if not is_local(path):
        return
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
                "the file system of %s cannot sync folders (%s): what is saved there is as good"
                " as elsewhere, but a step that was reported as committed may be missing after"
                " a power cut",
                os.fspath(path),
                error.strerror,
            )
        _syncs[device] = False


def syncs_directories(path: AnyPath) -> bool:
    """Whether folders can be synced where a folder is, or will be made.

    Found out once for each file system.
    """
    if not is_local(path):
        return True
    there = _nearest(path)
    device = os.stat(there).st_dev
    if device not in _syncs:
        sync_directory(there)
    return _syncs[device]


def locks_files(path: AnyPath) -> bool:
    """Whether programs can lock files where a folder is, or will be made; found out once."""
    if not is_local(path) or fcntl is None:
        return True  # not for us to know
    there = _nearest(path)
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


def _nearest(path: AnyPath) -> AnyPath:
    """A local folder, or the one above it that is there."""
    while not exists(path) and path.parent != path:
        path = path.parent
    return path


def sync_files(directory: AnyPath, paths: Sequence[str]) -> None:
    """Makes files below a local directory durable, and the folders below it that name them."""
    if not is_local(directory):
        return
    for path in paths:
        with naming(directory / path), (directory / path).open("rb") as file:
            os.fsync(file.fileno())
    parts = [path.split("/") for path in paths]
    folders = {"/".join(each[:i]) for each in parts for i in range(1, len(each))}
    for folder in sorted(folders, reverse=True):
        sync_directory(directory / folder)


def sync_tree(directory: AnyPath, *, deep: bool = True) -> None:
    """Makes all that is below a local directory durable; or the files right in it alone.

    Others may have put something there: links and what else is no file are left out, what is gone
    by now, and what this program may not open, since it has not written it.
    """
    if not is_local(directory):
        return
    for name in names_in(directory):
        entry = directory / name
        mode = mode_of(entry, follow=False) or 0
        if not os.access(entry, os.R_OK):
            continue
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(mode):
                with naming(entry), entry.open("rb") as file:
                    os.fsync(file.fileno())
            elif stat.S_ISDIR(mode) and deep:
                sync_tree(entry)
    sync_directory(directory)


def sync_step(directory: AnyPath, item: str) -> None:
    """Makes all of a step durable before it is renamed to its final name.

    Args:
        directory: of the step, under its temporary name.
        item: that holds our checkpoint. Its arrays and its dense part are durable already, of
            its directory only what Orbax has added is synced.
    """
    if not is_local(directory):
        return
    for path in directory.iterdir():
        if path.name == item:
            sync_tree(path, deep=False)
        elif is_directory(path):
            sync_tree(path)
    sync_tree(directory, deep=False)


def missing_directories(root: AnyPath) -> list[AnyPath]:
    """Which of a root and the directories above it do not exist yet, the root first."""
    found: list[AnyPath] = []
    path = root
    while is_local(root) and not exists(path) and path.parent.name != path.name:
        found.append(path)
        path = path.parent
    return found


def sync_made(made: list[AnyPath]) -> None:
    """Makes directories durable that did not exist before, as `missing_directories` found."""
    for path in made:
        if exists(path):
            try:
                sync_directory(path.parent)
            except PermissionError as error:
                # Making a directory takes no right to read the one it is in.
                _log.warning("that %s was made may not be durable: %s", path, error)


def digest_of(path: str, data: bytes) -> FileDigest:
    """Size and SHA-256 of `data`."""
    return FileDigest(
        path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def digest_file(file: AnyPath, path: str) -> FileDigest:
    """Streams a file of any size through SHA-256, 1 MiB at a time; `path` names it."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
    return FileDigest(path=path, bytes=size, sha256=digest.hexdigest())
