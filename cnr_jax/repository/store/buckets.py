"""Buckets, through `obstore`: objects whose names read like paths, and puts under a condition.

A bucket has no folders, links or locks. Once a write returns, its object is durable and whole. The
answer to a put may be lost although the put was done. The store then reads the object to find out.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from cnr_jax.format import names
from cnr_jax.repository.causes import StoreError
from cnr_jax.repository.store import bucket_clients, once
from cnr_jax.repository.store.base import AnyPath, Capabilities, Objects

# Tries of a put under a condition. The client does not repeat it, as its outcome is not known.
_PUTS = 3
# Bytes of an object that are read at a time, where it is not read as a whole.
_BLOCK_BYTES = 1 << 20
# Numbers of objects that are copied, and fetched, at the same time.
_COPIES, _AT_ONCE = 8, 16


class BucketStore(Objects):
    """Store of objects in buckets, whose names are like those of files in folders."""

    can = Capabilities(
        renames=False,
        conditions=True,
        locks=False,
        appends=False,
        cheap_looks=False,
        paths=False,
    )

    # Looks.

    def exists(self, path: AnyPath) -> bool:
        if (held := once.known("listing", path.parent)) is not None:
            return path.name in held[1] or self._has_below(path)
        if names.is_file(path.name):
            return self._head(path) is not None
        # Other names are mostly those of folders.
        return self._has_below(path) or (
            bool(_split(path)[1]) and self._head(path) is not None
        )

    def is_directory(self, path: AnyPath) -> bool:
        return self._has_below(path)

    def is_named(self, path: AnyPath) -> bool:
        return self.exists(path)

    def names_in(self, folder: AnyPath) -> list[str]:
        folders, objects = self._listing(folder)
        return sorted({*folders, *objects})

    def folders_in(
        self,
        folder: AnyPath,
        may_be: Callable[[str], bool],
        known: Collection[str] = (),
    ) -> list[str]:
        return [name for name in self._listing(folder)[0] if may_be(name)]

    def size_of(self, path: AnyPath) -> int:
        return int(self._headed(path)["size"])

    def modified_unix_secs(self, path: AnyPath) -> float:
        found = self._head(path)
        times = [found] if found else self._below(path)
        return max((each["last_modified"].timestamp() for each in times), default=0.0)

    def amiss(
        self, folder: AnyPath, files: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[str, int]]:
        _, key = _split(folder)
        sizes = {each["path"]: each["size"] for each in self._below(folder)}
        start = f"{key}/" if key else ""
        for name, size in files:
            if sizes.get(start + name) != size:
                yield name, size

    def bytes_below(self, folder: AnyPath) -> int:
        return sum(each["size"] for each in self._below(folder))

    def forget_listings(self) -> None:
        once.forget()

    def fetch(self, paths: Iterable[AnyPath]) -> None:
        if not once.is_asking_once():
            return

        def get(path: AnyPath) -> bytes | None:
            try:
                return self._read(path)[0]
            except OSError:
                return None  # the later `read` raises the error

        wanted = list(paths)
        with ThreadPoolExecutor(_AT_ONCE, "cnr_fetch") as pool:
            for path, found in zip(wanted, pool.map(get, wanted), strict=True):
                once.keep("fetched", path, found)

    # Reading and writing files.

    def open_file(self, path: AnyPath) -> BinaryIO:
        _, key = _split(path)
        found = bucket_clients.asked(
            path, lambda: bucket_clients.client_of(path).get(key)
        )
        return io.BufferedReader(_Stream(path, found), _BLOCK_BYTES)

    def read(self, path: AnyPath) -> bytes:
        found = once.known("fetched", path)
        once.keep("fetched", path, None)
        return self._read(path)[0] if found is None else found

    def read_end(self, path: AnyPath, count: int) -> bytes:
        _, key = _split(path)
        options: Any = {"range": {"suffix": count}}
        got = bucket_clients.asked(
            path,
            lambda: bucket_clients.client_of(path).get(key, options=options).bytes(),
        )
        return bytes(got)

    def write(self, path: AnyPath, data: bytes, *, replaces: bool) -> None:
        once.forget()
        if not replaces:
            # An object that another program has written must stay.
            self.write_new(path, data)
            return
        _, key = _split(path)
        # Not in parts, which a killed program would leave in the bucket.
        bucket_clients.asked(
            path, bucket_clients.client_of(path).put, key, data, use_multipart=False
        )

    def write_new(self, path: AnyPath, data: bytes) -> None:
        self.swap(path, data, None)

    def read_version(self, path: AnyPath) -> tuple[bytes, Any] | None:
        def read() -> tuple[bytes, Any] | None:
            try:
                return self._read(path)
            except FileNotFoundError:
                return None

        return once.once("version", path, read)

    def swap(self, path: AnyPath, data: bytes, version: Any) -> Any:
        once.forget()
        _, key = _split(path)
        mode: Any = "create" if version is None else version
        last = time.monotonic() + bucket_clients.RETRY_SECS
        for left in reversed(range(_PUTS)):
            try:
                put = bucket_clients.client_of(path).put
                done = bucket_clients.asked(
                    path, put, key, data, mode=mode, use_multipart=False
                )
                return _version(done)
            except OSError as error:
                if isinstance(error, PermissionError):
                    raise
                # The put may have been done, and only its answer lost.
                once.forget()
                found = self.read_version(path)
                if found is not None and found[0] == data:
                    return found[1]
                is_as_before = (found[1] if found else None) == version
                if isinstance(error, FileNotFoundError) and version is not None:
                    text = "it is gone that was to be replaced"
                    raise FileExistsError(errno.EEXIST, text, os.fspath(path)) from None
                if not is_as_before:
                    if isinstance(error, FileExistsError):
                        raise
                    # No answer says that the condition failed, but the object has changed.
                    text = "another one is there by now"
                    raise FileExistsError(errno.EEXIST, text, os.fspath(path)) from None
                left = left and time.monotonic() < last
                if not left and isinstance(error, FileExistsError):
                    hint = bucket_clients.service_of(path).CONDITIONS_HINT
                    text = f"a condition is said not to hold that holds; hint: {hint}"
                    raise StoreError(
                        bucket_clients.NO_ANSWER, text, os.fspath(path)
                    ) from None
                if not left:
                    raise
                # Also if the service wrongly said that the condition failed: two puts met.
                time.sleep(random.uniform(0, bucket_clients.MEETING_SECS))
        raise AssertionError  # the last try has returned or raised

    # Names.

    def make_folder(self, path: AnyPath, mode: int | None = None) -> None:
        pass  # there are no folders: a name exists once an object is below it

    def move(self, path: AnyPath, target: AnyPath) -> None:
        once.forget()
        # Object by object. The objects that commit a step are copied last and deleted first, so of
        # the two places the one that has them is whole.
        (bucket, source), (into, goal) = _split(path), _split(target)
        if bucket != into:
            raise OSError(errno.EXDEV, "another bucket", os.fspath(target))
        last, rest = self._keys(path)

        def copy(key: str) -> None:
            bucket_clients.asked(
                path,
                bucket_clients.client_of(path).copy,
                key,
                goal + key[len(source) :],
            )

        with ThreadPoolExecutor(_COPIES, "cnr_copy") as pool:
            list(pool.map(copy, rest))
        list(map(copy, reversed(last)))
        self._delete(path, last)
        self._delete(path, rest)

    def remove_file(self, path: AnyPath) -> None:
        once.forget()
        _, key = _split(path)
        with contextlib.suppress(FileNotFoundError):
            bucket_clients.asked(path, bucket_clients.client_of(path).delete, key)

    def remove_tree(
        self, path: AnyPath, threads: int = 1, attempt: Any = None
    ) -> list[OSError]:
        try:
            markers, rest = self._keys(path)
            # Manifests go first: a child is then read from the step that stands for this one.
            first = [key for key in rest if key.endswith(f"/{names.MANIFEST}")]
            rest = [key for key in rest if not key.endswith(f"/{names.MANIFEST}")]
            note = path / names.ATTEMPT
            last = [key for key in markers if key.endswith(f"/{names.ATTEMPT}")]
            if not last and attempt is None:
                for keys in (markers, first + rest):
                    self._delete(path, keys)
                return []
            # The note is written first and removed last, so that what a killed program leaves is
            # known. Another program may take the folder over meanwhile, by another note.
            held = self.read_version(note) or (b"", None)
            if attempt not in (None, held[1]):
                return []
            if held[0] != names.REMOVED:
                held = names.REMOVED, self.swap(note, names.REMOVED, held[1])
            for keys in (first, [k for k in markers + rest if k not in last]):
                self._delete(path, keys)
                if self.read_version(note) != held:
                    return []
            self._delete(path, last)
        except FileNotFoundError:
            pass
        except OSError as error:
            return [error]
        return []

    def _keys(self, path: AnyPath) -> tuple[list[str], list[str]]:
        """Keys of an object, or of all below a name: those that commit a step, and the others.

        Raises:
            FileNotFoundError: if there are none.
        """
        _, key = _split(path)
        keys = [each["path"] for each in self._below(path)]
        if not keys:
            self._headed(path)
            return [], [key]
        markers = [f"{key}/{name}" for name in names.MARKERS]
        return [m for m in markers if m in keys], [k for k in keys if k not in markers]

    def _delete(self, path: AnyPath, keys: list[str]) -> None:
        """Deletes objects, up to a thousand by one request where the service can."""
        once.forget()
        client = bucket_clients.client_of(path)
        try:
            if keys:
                bucket_clients.asked(path, client.delete, keys)
        except FileNotFoundError:
            # Where each is a request, an object that is gone may have stopped the ones after it.
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    bucket_clients.asked(path, client.delete, key)

    # TensorStore.

    def kvstore(self, folder: AnyPath) -> None:
        return None

    def check_usable(self, root: AnyPath) -> None:
        bucket_clients.check_reachable(root)

    # Requests.

    def _read(self, path: AnyPath) -> tuple[bytes, Any]:
        _, key = _split(path)

        def get() -> tuple[bytes, Any]:
            found = bucket_clients.client_of(path).get(key)
            return bytes(found.bytes()), _version(found.meta)

        return bucket_clients.asked(path, get)

    def _head(self, path: AnyPath) -> Any:
        """Metadata of an object; None if there is none."""
        try:
            return self._headed(path)
        except FileNotFoundError:
            return None

    def _headed(self, path: AnyPath) -> Any:
        _, key = _split(path)
        return bucket_clients.asked(path, bucket_clients.client_of(path).head, key)

    def _has_below(self, path: AnyPath) -> bool:
        held = once.known("listing", path.parent)
        if held is not None and path.name not in held[0]:
            return False
        if once.is_asking_once():
            folders, objects = self._listing(path)
            if objects or not folders:
                return bool(objects)
        # Some services go on listing a folder for minutes after its last object is gone.
        return bool(self._below(path, first=True))

    def _below(self, path: AnyPath, *, first: bool = False) -> list[Any]:
        """Metadata of all objects below a name, by their keys; or of the first ones only."""
        _, key = _split(path)

        def pages() -> list[Any]:
            found = bucket_clients.client_of(path).list(key or None)
            return list(itertools.islice(found, 1) if first else found)

        return [each for page in bucket_clients.asked(path, pages) for each in page]

    def _listing(self, folder: AnyPath) -> tuple[list[str], list[str]]:
        """Names right below a folder: of what looks like folders, and of objects."""
        return once.once("listing", folder, lambda: self._listed(folder))

    def _listed(self, folder: AnyPath) -> tuple[list[str], list[str]]:
        _, key = _split(folder)
        found = bucket_clients.asked(
            folder, bucket_clients.client_of(folder).list_with_delimiter, key or None
        )
        folders = [each.rpartition("/")[2] for each in found["common_prefixes"]]
        return folders, [each["path"].rpartition("/")[2] for each in found["objects"]]


class _Stream(io.RawIOBase):
    """Stream of an object, which does not fill the memory, whatever the size of the object."""

    def __init__(self, path: AnyPath, found: Any) -> None:
        self._path = path
        self._blocks = iter(found.stream(min_chunk_size=_BLOCK_BYTES))
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            # Asked once: after an error, the stream would seem to be at its end.
            block = bucket_clients.asked_once(self._path, next, self._blocks, b"")
            self._rest = memoryview(bytes(block))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _split(path: AnyPath) -> tuple[str, str]:
    """Bucket and key of a URL."""
    _, _, rest = os.fspath(path).partition("://")
    bucket, _, key = rest.partition("/")
    return bucket, key.rstrip("/")


def _version(said: Any) -> Any:
    """Version of an object, which a later `swap` compares."""
    return {key: said[key] for key in ("e_tag", "version") if said.get(key)}
