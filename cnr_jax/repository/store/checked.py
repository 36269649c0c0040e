"""Reading files of a step that must be there and be what their digests and checksums say.

Here it is decided which troubles mean that a step is damaged, and which that storage does not
give it out. Only the former let a restore turn to another step.

The checksum that the `crc32c` codec puts at the end of each chunk of an array is read back and
named in the process manifest: so a reader can tell a whole chunk of another array, place or run
from the right one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

# Has numpy know bfloat16 and float8 by name.
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

# What the kernel says of files that are gone or spoilt, beside "no such file". Of everything
# else (no permission, too many open files, a server that does not answer) the files know nothing.
_DAMAGED_ERRNOS = {
    errno.EIO,
    errno.EBADMSG,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
    getattr(errno, "EUCLEAN", errno.EIO),
}


# The kind of an error that a file too many causes: nothing else is wrong.
UNKNOWN = "file_unknown"
# What is said of such a file.
MISTAKABLE = "is not of this checkpoint, but Orbax could take it for a part of it"
# The kind of an error that storage causes: the next time it may read the same file.
UNREAD = "file_unreadable"
# What TensorStore says where storage does not give a file out, whatever is in it.
_NO_DAMAGE = (
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
    "CANCELLED",
    "ABORTED",
)
# Bytes that zstd makes of one at most: a block of 128 KiB takes 4.
_ZSTD_MOST = 1 << 15
# Bytes of the rows that are packed in a chunk at most, however few they are then.
PACKED_MOST_BYTES = 32 << 20


def means_damage(error: Exception) -> bool:
    """Whether what was raised in reading a file says that the file is spoilt or gone.

    Example:
        >>> means_damage(OSError(5, "I/O error")), means_damage(OSError(13, "Denied"))
        (True, False)
    """
    if isinstance(error, errors.CnrError):
        return isinstance(error, errors.DAMAGE)
    if isinstance(error, OSError) and error.errno is not None:
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return gone or error.errno in _DAMAGED_ERRNOS
    # Also jax says "RESOURCE_EXHAUSTED", where memory runs out.
    return not isinstance(error, MemoryError) and not str(error).startswith(_NO_DAMAGE)


def kind_of(error: Exception, kind: str) -> str:
    """The kind of damage that TensorStore tells of; `UNREAD` where storage has failed."""
    return UNREAD if errno_of(error) == errno.EIO else kind


def damage(
    path: AnyPath, fact: str, kind: str = "file_damaged"
) -> errors.IntegrityError:
    """The error that says of a file or folder that it is not what it must be."""
    where = os.fspath(path)
    return errors.IntegrityError(f"{where} {fact}", kind=kind, path=where)


@contextlib.contextmanager
def reading(path: AnyPath) -> Iterator[None]:
    """Reads a file that must be there: an I/O error that means damage says so.

    Raises:
        IntegrityError: if the file is missing, is none, or cannot be read.
        OSError: if the storage does not give it out: that says nothing about the file.
    """
    with accessing(path):
        # Opening a pipe, say, would wait for ever.
        if not store_of(path).is_file(path):
            raise damage(path, "is not a file")
        yield


@contextlib.contextmanager
def accessing(path: AnyPath) -> Iterator[None]:
    """As `reading`, for what need not be a file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damage(path, "is missing", "file_missing") from error
    except OSError as error:
        if isinstance(error, errors.CnrError) or error.errno not in _DAMAGED_ERRNOS:
            raise
        raise damage(path, f"cannot be read: {error.strerror}", UNREAD) from error


def refuse_pipe(path: AnyPath) -> None:
    """Makes sure that whoever reads a file, if it is there, does not wait for ever.

    Raises:
        IntegrityError: if it is a pipe, a socket or a device.
        OSError: if the storage does not say.
    """
    if store_of(path).is_special(path):
        raise damage(path, "is not a file")


@contextlib.contextmanager
def about(path: AnyPath) -> Iterator[None]:
    """Errors of ours that do not say which file they are about are about this one."""
    try:
        yield
    except errors.CnrError as error:
        error.path = error.path or os.fspath(path)
        raise


def read_checked(directory: AnyPath, expected: FileDigest) -> bytes:
    """The contents of a file whose digest is known.

    Raises:
        IntegrityError: if it is missing or its size or SHA-256 differs.
    """
    path = directory / expected.path
    with reading(path):
        data = read_all(path)
    check_digest(digest_of(expected.path, data), expected, path)
    return data


def check_file(directory: AnyPath, expected: FileDigest) -> None:
    """Checks a file against its digest without keeping its contents.

    Raises:
        IntegrityError: if it is missing or its size or SHA-256 differs.
    """
    path = directory / expected.path
    with reading(path):
        got = digest_file(path, expected.path)
    check_digest(got, expected, path)


def check_size(path: AnyPath, expected: int) -> None:
    """Checks that a file is there, is one, and has so many bytes.

    Raises:
        IntegrityError: if not.
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
    """Files in `prefix`, itself included, that are not among `named`.

    Links to folders are not followed, except where named files are behind them. Files of others
    come and go at any time, and need not let anybody look at them: what cannot be looked into is
    one of those that are found, and what is gone is not.

    Args:
        directory: that all paths are relative to.
        prefix: a file or folder in it.
        named: paths of files.
        enters: which folders without named files are looked into, links too; the others count
            as one file. None: all but links.
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
    """What lies below `dense/` and Orbax may take for its own, but for files that are named.

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
    """Checks that `dense/`, which Orbax has written, has the files in which it looks leaves up.

    Orbax writes them last, and does not say so where it finds nothing to be looked up.

    Args:
        manifest: of the checkpoint.
        item: its directory.

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
    """Files that were compared with their digests, to be read afterwards by others.

    Attributes:
        directory: of the checkpoint; the files are in its `dense/`.
        manifest: of it, which names them.
        states: of each file what changes when somebody writes or replaces it.
    """

    directory: AnyPath
    manifest: Manifest
    states: Mapping[str, tuple[int, ...] | None]

    def check(self) -> None:
        """Checks that the files are still those that were compared.

        Raises:
            IntegrityError: if one has changed since, or one came that could be taken for them.
        """
        for path, state in self.states.items():
            if _state(self.directory / path) != state:
                where = self.directory / path
                raise damage(where, "changed while it was read", "file_changed")
        refuse_misleading(self.directory, self.manifest)


def sealed(directory: AnyPath, manifest: Manifest) -> Seal:
    """Compares the files that Orbax has written with their digests, and notes what they are.

    Args:
        directory: of the checkpoint.
        manifest: of it.

    Raises:
        IntegrityError: at the first that is missing or damaged; then, if all are right, at one
            that no digest names and that Orbax could take for one of its own.
    """
    check_dense_index(manifest, directory)
    named = manifest.dense_files
    states = {digest.path: _state(directory / digest.path) for digest in named}
    for digest in named:
        check_file(directory, digest)
    refuse_misleading(directory, manifest)
    return Seal(directory, manifest, states)


def misleading_files(item: AnyPath, manifest: Manifest) -> list[str]:
    """Files that the manifest does not name, and that Orbax would take for dense leaves.

    None where dense leaves are stored as tiles, which Orbax does not read.
    """
    if manifest.has_dense_tiles:
        return []
    return mistakable_files(item, [digest.path for digest in manifest.dense_files])


def refuse_misleading(item: AnyPath, manifest: Manifest) -> None:
    """Checks that no file misleads Orbax.

    Raises:
        IntegrityError: if one does; it names the first.
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
    """Changes when a file is written or replaced; None where that cannot be seen.

    Raises:
        IntegrityError: if it is missing.
        OSError: if it cannot be seen: that says nothing about the file.
    """
    with accessing(path):
        return store_of(path).state_of(path)


def check_digest(got: FileDigest, expected: FileDigest, path: AnyPath) -> None:
    """Compares the digest of a file with that which a manifest tells.

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


# Of numbers of Python, but for `bool`, which numpy calls so too.
_OF_PYTHON = ("int", "float")


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a stored dtype name, bfloat16 and float8 included.

    Raises:
        FormatError: if there is no such dtype.
    """
    try:
        found = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise errors.FormatError(f"dtype {name!r} is not known") from error
    # Not another name for one, such as of swapped bytes, nor one of no numbers; those of numbers of
    # Python are names of their own.
    is_number = found.kind in "biufc" or found.type.__module__ == "ml_dtypes"
    if (found.name != name and name not in _OF_PYTHON) or not is_number:
        raise errors.FormatError(f"dtype {name!r} is not known")
    return found


def file_bytes(entry: ArrayEntry) -> tuple[int, ...]:
    """Size of each chunk's file, as the manifest says."""
    if entry.compressed is not None:
        return entry.compressed.bytes
    size = entry.chunk * numpy_dtype(entry.dtype).itemsize + 4
    return (size,) * len(entry.crc32c)


def check_files(item: AnyPath, files: Iterable[tuple[str, int]]) -> None:
    """Checks that files are there and of the right sizes, which may be thousands.

    Args:
        item: that they are in.
        files: by their paths in it, with their sizes.

    Raises:
        IntegrityError: at the first that is not.
    """
    # Only what is wrong is looked at closely.
    for path, size in store_of(item).amiss(item, files):
        check_size(item / path, size)


def check_chunk_file(path: AnyPath, entry: ArrayEntry, chunk: int) -> None:
    """Checks that a chunk is a file of a size from which what it is to hold can come.

    TensorStore would wait for a pipe for ever. And a manifest of a few bytes may promise rows of
    any size: before memory is taken for them, they must be there.

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
    """The checksum at the end of a chunk's file.

    Raises:
        IntegrityError: if the file is missing or too short to hold one.
    """
    file = path / "c" / str(chunk)
    with reading(file):
        end = read_end(file, 4)
    if len(end) < 4:
        raise damage(file, "is cut short")
    return int.from_bytes(end, "little")
