"""Checked reads of files of a step, which must exist and match their digests and checksums.

This module decides which errors mean that a step is damaged, and which mean that storage does not
give it out. Only damage lets a restore turn to another step.

The process manifest repeats the checksum that the `crc32c` codec puts at the end of each chunk of
an array. So a reader can tell the right chunk from a whole chunk of another array, place or run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

# Imported so that numpy knows bfloat16 and float8 by name.
import ml_dtypes  # noqa: F401
import numpy as np

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import FileDigest, Manifest
from cnr_jax.format.tiles import ArrayEntry
from cnr_jax.repository.causes import errno_of
from cnr_jax.repository.store import (
    AnyPath,
    digest_file,
    digest_of,
    exists,
    is_directory,
    names_in,
    read_all,
    read_end,
    size_of,
    store_of,
)
from cnr_jax.texts import count_of

# Errors of the kernel for files that are gone or spoilt, beside "no such file". All others (no
# permission, too many open files, a server that does not answer) say nothing about the files.
_DAMAGED_ERRNOS = {
    errno.EIO,
    errno.EBADMSG,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
    getattr(errno, "EUCLEAN", errno.EIO),
}


# Kind of the error for a file that no manifest names, while nothing else is wrong.
UNKNOWN = "file_unknown"
# Text of that error.
MISTAKABLE = "is not of this checkpoint, but Orbax could take it for a part of it"
# Kind of the error for a file that storage failed to read; a later read may work.
UNREAD = "file_unreadable"
# Errors of TensorStore where storage does not give a file out, whatever is in it.
_NO_DAMAGE = (
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
    "CANCELLED",
    "ABORTED",
)
# Most bytes that zstd makes of one byte: a block of 128 KiB takes 4.
_ZSTD_MOST = 1 << 15
# Most bytes of the rows of a packed chunk, however few bytes they take when packed.
PACKED_MOST_BYTES = 32 << 20


def means_damage(error: Exception) -> bool:
    """Whether an error of reading a file says that the file is damaged or missing.

    Example:
        >>> means_damage(OSError(5, "I/O error")), means_damage(OSError(13, "Denied"))
        (True, False)
    """
    if isinstance(error, errors.CnrError):
        return isinstance(error, errors.DAMAGE)
    if isinstance(error, OSError) and error.errno is not None:
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return gone or error.errno in _DAMAGED_ERRNOS
    # jax says "RESOURCE_EXHAUSTED" too, when memory runs out.
    return not isinstance(error, MemoryError) and not str(error).startswith(_NO_DAMAGE)


def kind_of(error: Exception, kind: str) -> str:
    """Kind of damage for an error of TensorStore: `UNREAD` if storage failed, else `kind`."""
    return UNREAD if errno_of(error) == errno.EIO else kind


def damage(
    path: AnyPath, fact: str, kind: str = "file_damaged"
) -> errors.IntegrityError:
    """Makes the error that a file or folder is not what it must be."""
    where = os.fspath(path)
    return errors.IntegrityError(f"{where} {fact}", kind=kind, path=where)


@contextlib.contextmanager
def reading(path: AnyPath) -> Iterator[None]:
    """Context for reading a file that must exist; turns I/O errors that mean damage into that.

    Raises:
        IntegrityError: if the file is missing, is not a file, or cannot be read.
        OSError: if storage does not give it out, which says nothing about the file.
    """
    with accessing(path):
        # To open a pipe, say, would wait for ever.
        if not store_of(path).is_file(path):
            raise damage(path, "is not a file")
        yield


@contextlib.contextmanager
def accessing(path: AnyPath) -> Iterator[None]:
    """As `reading`, for paths that need not be files."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damage(path, "is missing", "file_missing") from error
    except OSError as error:
        if isinstance(error, errors.CnrError) or error.errno not in _DAMAGED_ERRNOS:
            raise
        raise damage(path, f"cannot be read: {error.strerror}", UNREAD) from error


def refuse_pipe(path: AnyPath) -> None:
    """Checks that a path leads to nothing for whose data a reader would wait for ever.

    Raises:
        IntegrityError: if it leads to a pipe, a socket or a device.
        OSError: if storage does not say.
    """
    if store_of(path).is_special(path):
        raise damage(path, "is not a file")


@contextlib.contextmanager
def about(path: AnyPath) -> Iterator[None]:
    """Adds the path to errors of this library that do not name a file."""
    try:
        yield
    except errors.CnrError as error:
        error.path = error.path or os.fspath(path)
        raise


def read_checked(directory: AnyPath, expected: FileDigest) -> bytes:
    """Reads a file, and compares it with its digest.

    Raises:
        IntegrityError: if it is missing or its size or SHA-256 differs.
    """
    path = directory / expected.path
    with reading(path):
        data = read_all(path)
    check_digest(digest_of(expected.path, data), expected, path)
    return data


def check_file(directory: AnyPath, expected: FileDigest) -> None:
    """Compares a file with its digest, without keeping its contents.

    Raises:
        IntegrityError: if it is missing or its size or SHA-256 differs.
    """
    path = directory / expected.path
    with reading(path):
        got = digest_file(path, expected.path)
    check_digest(got, expected, path)


def check_size(path: AnyPath, expected: int) -> None:
    """Checks that a path is a file of the expected size in bytes.

    Raises:
        IntegrityError: if it is not.
    """
    with reading(path):
        got = size_of(path)
    if got != expected:
        raise damage(path, f"has another size\n  got {got} bytes, expected {expected}")


def unnamed_files(
    directory: AnyPath,
    prefix: str,
    named: Collection[str],
    enters: Callable[[str], bool] | None = None,
) -> list[str]:
    """Paths of the files in `prefix`, itself included, that are not among `named`.

    Links to folders are not followed, unless named files are behind them. Files of other programs
    come and go at any time, and may be unreadable. The result includes folders that this cannot
    look into, and leaves out files that are gone.

    Args:
        directory: directory that all paths are relative to.
        prefix: path of a file or folder in it.
        named: paths of files to leave out.
        enters: tells which folders without named files to look into, links included. The others
            count as one file. None looks into all but links.
    """
    files = set(named)
    parents = {path[:i] for path in files for i, x in enumerate(path) if x == "/"}
    found: list[str] = []
    left = [prefix]
    while left:
        path = left.pop()
        entry = directory / path
        if path in files:
            continue
        is_known = path in parents or (enters is not None and enters(path))
        try:
            with accessing(entry):
                linked = store_of(entry).is_link(entry)
                if is_directory(entry) and (is_known or not (enters or linked)):
                    left += [f"{path}/{name}" for name in names_in(entry)]
                elif linked or exists(entry):
                    found.append(path)
        except (OSError, errors.IntegrityError):
            if is_known:
                raise
            found.append(path)
    return sorted(found)


def mistakable_files(item: AnyPath, named: Collection[str] = ()) -> list[str]:
    """Paths below `dense/` that Orbax may take for its own files, except those that are named.

    Args:
        item: directory of a checkpoint.
        named: paths of its files.

    Returns:
        Paths relative to the item, also of folders in the place of such files.
    """
    above = f"{names.DENSE}/"

    def enters(path: str) -> bool:
        return path == names.DENSE or names.leads_to_looked_up(path.removeprefix(above))

    found = unnamed_files(item, names.DENSE, named, enters)
    return [path for path in found if names.is_looked_up(path.removeprefix(above))]


def check_dense_index(manifest: Manifest, item: AnyPath) -> None:
    """Checks that `dense/`, which Orbax wrote, has the files in which Orbax looks up leaves.

    Orbax writes these files last, and does not report it if they are missing.

    Args:
        manifest: manifest of the checkpoint.
        item: directory of the checkpoint.

    Raises:
        IntegrityError: if a leaf cannot be looked up.
    """
    stored = sum(leaf.kind != "text" for leaf in manifest.dense_leaves)
    named = {file.path for file in manifest.dense_files}
    missing = [path for path in names.DENSE_INDEX if path not in named]
    if stored and missing:
        raise damage(
            item / missing[0],
            f"was not written: none of {stored} dense leaves can be read without\n"
            f"  got {len(named)} files in {names.DENSE}/, expected this among them",
            "dense_unfinished",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Seal:
    """Record of dense files that were compared with their digests before Orbax reads them.

    Attributes:
        directory: directory of the checkpoint; the files are in its `dense/`.
        manifest: manifest of the checkpoint, which names the files.
        states: state of each file by path, which changes when a program writes or replaces it.
    """

    directory: AnyPath
    manifest: Manifest
    states: Mapping[str, tuple[int, ...] | None]

    def check(self) -> None:
        """Checks that the files are still those that were compared.

        Raises:
            IntegrityError: if one has changed since, or a new one could mislead Orbax.
        """
        for path, state in self.states.items():
            if _state(self.directory / path) != state:
                where = self.directory / path
                raise damage(where, "changed while it was read", "file_changed")
        refuse_misleading(self.directory, self.manifest)


def sealed(directory: AnyPath, manifest: Manifest) -> Seal:
    """Compares the files that Orbax has written with their digests, and seals them.

    Args:
        directory: directory of the checkpoint.
        manifest: manifest of the checkpoint.

    Raises:
        IntegrityError: at the first file that is missing or damaged. If all are right, at one that
            no digest names and that Orbax could take for its own.
    """
    check_dense_index(manifest, directory)
    named = manifest.dense_files
    states = {digest.path: _state(directory / digest.path) for digest in named}
    for digest in named:
        check_file(directory, digest)
    refuse_misleading(directory, manifest)
    return Seal(directory, manifest, states)


def misleading_files(item: AnyPath, manifest: Manifest) -> list[str]:
    """Paths of files that the manifest does not name, and that Orbax would take for dense leaves.

    Empty if dense leaves are stored as tiles, which Orbax does not read.
    """
    if manifest.has_dense_tiles:
        return []
    return mistakable_files(item, [digest.path for digest in manifest.dense_files])


def refuse_misleading(item: AnyPath, manifest: Manifest) -> None:
    """Checks that no file could mislead Orbax.

    Raises:
        IntegrityError: if one could; it names the first.
    """
    found = misleading_files(item, manifest)
    if found:
        raise damage(
            item / found[0],
            f"{MISTAKABLE}\n  {count_of(len(found), 'such file')}, which {names.MANIFEST} does not"
            " name; all that it names are right\n  hint: move them away",
            UNKNOWN,
        )


def _state(path: AnyPath) -> tuple[int, ...] | None:
    """State of a file, which changes when it is written or replaced; None where there is none.

    Raises:
        IntegrityError: if the file is missing.
        OSError: if it cannot be seen, which says nothing about the file.
    """
    with accessing(path):
        return store_of(path).state_of(path)


def check_digest(got: FileDigest, expected: FileDigest, path: AnyPath) -> None:
    """Compares the digest of a file with the one in the manifest.

    Raises:
        IntegrityError: if they differ.
    """
    if got != expected:
        raise damage(
            path,
            "is damaged\n"
            f"  got {got.bytes} bytes, sha256 {got.sha256[:16]}...,"
            f" expected {expected.bytes} bytes, sha256 {expected.sha256[:16]}...,"
            f" as {names.MANIFEST} of its step says",
        )


# Names of dtypes for numbers of Python, except `bool`, which numpy gives the same name.
_OF_PYTHON = ("int", "float")


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """Numpy dtype of a stored dtype name, bfloat16 and float8 included.

    Raises:
        FormatError: if there is no such dtype.
    """
    try:
        found = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise errors.FormatError(f"dtype {name!r} is not known") from error
    # Refuses other names of a dtype, such as one with swapped bytes, and dtypes that hold no
    # numbers. The names for numbers of Python differ from numpy's, but are stored.
    is_number = found.kind in "biufc" or found.type.__module__ == "ml_dtypes"
    if (found.name != name and name not in _OF_PYTHON) or not is_number:
        raise errors.FormatError(f"dtype {name!r} is not known")
    return found


def file_bytes(entry: ArrayEntry) -> tuple[int, ...]:
    """Size in bytes of the file of each chunk, as the manifest says."""
    if entry.compressed is not None:
        return entry.compressed.bytes
    size = entry.chunk * numpy_dtype(entry.dtype).itemsize + 4
    return (size,) * len(entry.crc32c)


def check_files(item: AnyPath, files: Iterable[tuple[str, int]]) -> None:
    """Checks that files exist and have the right sizes; there may be thousands.

    Args:
        item: directory that they are in.
        files: their paths in it, with their sizes in bytes.

    Raises:
        IntegrityError: at the first that is missing or has another size.
    """
    # Only files that seem wrong are looked at one by one.
    for path, size in store_of(item).amiss(item, files):
        check_size(item / path, size)


def check_chunk_file(path: AnyPath, entry: ArrayEntry, chunk: int) -> None:
    """Checks that a chunk is a file, and large enough for the elements that it must hold.

    TensorStore would wait for a pipe for ever. And a manifest of a few bytes may promise any number
    of rows, so the file must be there before memory is taken for them.

    Raises:
        IntegrityError: if it is not.
    """
    file = path / "c" / str(chunk)
    elements = entry.chunk * numpy_dtype(entry.dtype).itemsize
    if entry.compressed is None:
        check_size(file, elements + 4)
        return
    stored = entry.compressed.bytes[chunk]
    check_size(file, stored)
    is_packed = entry.compressed.codec == names.PACKED_ROWS
    most = PACKED_MOST_BYTES if is_packed else stored * _ZSTD_MOST
    if elements > most:
        raise damage(
            file,
            "cannot hold its chunk\n"
            f"  got {stored} bytes for {elements:,}, of which"
            f" {entry.compressed.codec} makes at most {most:,}",
        )


def stored_crc32c(path: AnyPath, chunk: int) -> int:
    """Reads the checksum at the end of the file of a chunk.

    Raises:
        IntegrityError: if the file is missing or too short to hold one.
    """
    file = path / "c" / str(chunk)
    with reading(file):
        end = read_end(file, 4)
    if len(end) < 4:
        raise damage(file, "is cut short")
    return int.from_bytes(end, "little")
