"""Files of roots on any storage: looking, reading, digests, and writing in a durable order.

All code that looks at files below a root, or writes, renames or removes them, calls these
functions, or those of the store of the path.

Writers of rows and manifests sync what they write. Orbax syncs nothing: neither its own files, nor
directories it renames, nor the root. Functions here do the rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence

from cnr_jax import errors
from cnr_jax.format.manifest import FileDigest
from cnr_jax.repository.store.base import AnyPath as AnyPath
from cnr_jax.repository.store.base import Capabilities as Capabilities
from cnr_jax.repository.store.base import FileLock as FileLock
from cnr_jax.repository.store.base import Store as Store
from cnr_jax.repository.store.buckets import BucketStore
from cnr_jax.repository.store.local import LocalStore
from cnr_jax.repository.store.once import asking_once as asking_once
from cnr_jax.texts import logger

_log = logger(__name__)
_PART_BYTES = 64 << 10  # bytes of a small file that are read at once
_LOCAL = LocalStore()
# Stores by the scheme of a URL. A new kind of storage takes a module beside these, and a line here.
REMOTE: dict[str, Store] = {
    "gs": BucketStore(),
    "s3": BucketStore(),
}


def store_of(path: AnyPath) -> Store:
    """The store that a path is in.

    Example:
        >>> from etils import epath
        >>> store_of(epath.Path("/ckpt/run")).can.renames
        True
        >>> store_of(epath.Path("gs://bucket/run")).can.renames
        False
    """
    scheme, found, _ = os.fspath(path).partition("://")
    return REMOTE.get(scheme, REMOTE["gs"]) if found else _LOCAL


def can(path: AnyPath) -> Capabilities:
    """Capabilities of the store that a path is in."""
    return store_of(path).can


def exists(path: AnyPath) -> bool:
    """Whether a path leads to something; links are followed.

    Raises:
        OSError: if that cannot be seen.

    Example:
        >>> from pathlib import Path
        >>> exists(Path("/")), exists(Path("/no such folder/file"))
        (True, False)
    """
    return store_of(path).exists(path)


def is_directory(path: AnyPath) -> bool:
    """Whether a path leads to a directory; links are followed.

    Raises:
        OSError: if that cannot be seen.
    """
    return store_of(path).is_directory(path)


def is_named(path: AnyPath) -> bool:
    """Whether a path exists, even as a link that leads nowhere.

    Raises:
        OSError: if that cannot be seen.
    """
    return store_of(path).is_named(path)


def is_gone(path: AnyPath) -> bool:
    """Whether a path certainly does not exist; False in doubt, and where a look is a request."""
    try:
        return can(path).cheap_looks and not is_named(path)
    except OSError:
        return False


def names_in(folder: AnyPath) -> list[str]:
    """Names of all files and folders in a folder, sorted; empty if it is gone, or no folder.

    It may be gone although the caller has just seen it: a run may be saving in the root.

    Raises:
        OSError: if the folder exists, but cannot be listed.
    """
    return store_of(folder).names_in(folder)


def size_of(path: AnyPath) -> int:
    """Size of a file in bytes."""
    return store_of(path).size_of(path)


def read_small(path: AnyPath, limit_bytes: int) -> bytes:
    """Reads a file that no digest vouches for.

    Whatever is in its place, this neither waits for ever nor fills the memory.

    Raises:
        FormatError: if it is not a file, but say a pipe or a device, or has more than
            `limit_bytes`.
        OSError: if it is missing or cannot be read.
    """
    parts, left = list[bytes](), limit_bytes + 1
    with store_of(path).open_file(path) as stream:
        # A read of `limit_bytes` would allocate them all, which the system clears first: 10 ms.
        while left and (part := stream.read(min(left, _PART_BYTES))):
            parts.append(part)
            left -= len(part)
    if not left:
        where = os.fspath(path)
        raise errors.FormatError(
            f"{where} is too large: more than {limit_bytes:,} bytes", path=where
        )
    return b"".join(parts)


def read_all(path: AnyPath) -> bytes:
    """Reads a whole file."""
    return store_of(path).read(path)


def read_end(path: AnyPath, count: int) -> bytes:
    """Reads the last `count` bytes of a file, or all of it if it has fewer."""
    return store_of(path).read_end(path, count)


def write_durably(path: AnyPath, data: bytes) -> FileDigest:
    """Writes a file so that it survives a power cut once its directory is synced.

    Returns:
        Digest of the file, with its name as path.
    """
    store_of(path).write(path, data, replaces=False)
    return digest_of(path.name, data)


def replace_durably(path: AnyPath, data: bytes) -> None:
    """Writes a file durably; after a crash it is either whole or as it was before."""
    store_of(path).write(path, data, replaces=True)


def sync_directory(path: AnyPath) -> None:
    """Makes the entries of a directory durable."""
    store_of(path).sync_directory(path)


def syncs_directories(path: AnyPath) -> bool:
    """Whether folders can be synced in the file system of a folder, which need not exist yet."""
    return store_of(path).syncs_directories(path)


def locks_files(path: AnyPath) -> bool:
    """Whether files can be locked in the file system of a folder, which need not exist yet."""
    return store_of(path).locks_files(path)


def sync_tree(directory: AnyPath, but: Collection[str] = ()) -> None:
    """Makes everything below a directory durable, except its own entries named in `but`."""
    store_of(directory).sync_tree(directory, but)


def missing_directories(root: AnyPath) -> list[AnyPath]:
    """Paths of the root and the directories above it that do not exist yet, the root first."""
    found: list[AnyPath] = []
    path, store = root, store_of(root)
    while (
        can(root).renames and not store.exists(path) and path.parent.name != path.name
    ):
        found.append(path)
        path = path.parent
    return found


def sync_made(made: Sequence[AnyPath]) -> None:
    """Makes directories durable that did not exist before, as `missing_directories` found."""
    for path in made:
        if exists(path):
            try:
                sync_directory(path.parent)
            except PermissionError as error:
                # A program may make a directory without the right to read the one above it.
                _log.warning("that %s was made may not be durable: %s", path, error)


def make_root(root: AnyPath) -> None:
    """Makes a root and the folders above it, durably; does nothing if the root exists."""
    made = missing_directories(root)
    if made or not can(root).renames:
        store_of(root).make_folder(root)
    sync_made(made)


def digest_of(path: str, data: bytes) -> FileDigest:
    """Size and SHA-256 of `data`."""
    return FileDigest(
        path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def digest_file(file: AnyPath, path: str) -> FileDigest:
    """Streams a file of any size through SHA-256, 1 MiB at a time; `path` names it."""
    digest, size = hashlib.sha256(), 0
    with store_of(file).open_file(file) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
    return FileDigest(path=path, bytes=size, sha256=digest.hexdigest())
