"""Files of a step, each with its check: to copy a step, or to mend one copy of it by another.

Manifests name digests of all files that this library has written. Files that other handlers have
written beside them have no digest: they are copied, and read back.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import FileDigest, load
from cnr_jax.format.tiles import ArrayEntry, load_process
from cnr_jax.repository.causes import as_root_errors
from cnr_jax.repository.store import (
    AnyPath,
    can,
    digest_of,
    exists,
    is_directory,
    names_in,
    read_all,
    size_of,
    store_of,
)
from cnr_jax.repository.store.checked import (
    about,
    check_digest,
    damage,
    file_bytes,
    reading,
)

# Function that raises an error if the contents of a file are wrong; the path is for its text.
Check = Callable[[bytes, AnyPath], object]
# Files that are copied at the same time. Each is in memory as a whole.
_AT_ONCE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class StepFile:
    """One file of a step.

    Attributes:
        path: path of the file below the folder of the step.
        bytes: size of the file that a manifest names; None: no manifest does.
        check: function that compares the contents with the digest; None: there is no digest.
    """

    path: str
    bytes: int | None
    check: Check | None


def files_of_step(
    copies: Sequence[AnyPath], *, but: str | None = None
) -> list[StepFile]:
    """All files of a step except those that commit it, the manifests of items last.

    Files in items of this library that no manifest names do not count, as no restore reads them.

    Args:
        copies: folders of copies of the step. If one lacks a manifest, or holds it damaged, that
            of another is read.
        but: name of an item that is left out; None: none is.

    Raises:
        CnrError: if a manifest is damaged in all copies.
        OSError: if storage does not let a manifest be read.
    """
    held = {name for step in copies for name in names_in(step)}
    found: list[StepFile] = []
    for name in sorted(held.difference((*names.MARKERS, but))):
        if any(exists(step / name / names.MANIFEST) for step in copies):
            found += _files_of_item(copies, name)
        else:
            below = {path for step in copies for path in _below(step, name)}
            found += [StepFile(path, None, None) for path in sorted(below)]
    return sorted(found, key=lambda each: each.path.endswith(names.MANIFEST))


def _below(step: AnyPath, path: str) -> Iterator[str]:
    if is_directory(step / path):
        for name in names_in(step / path):
            yield from _below(step, f"{path}/{name}")
    elif exists(step / path):
        yield path


def _files_of_item(copies: Sequence[AnyPath], item: str) -> Iterator[StepFile]:
    path = f"{item}/{names.MANIFEST}"
    data = read_whole(copies, path, _check_manifest)
    manifest = load(data, path)
    # A rollback may put another manifest in its place meanwhile, which this digest does not fit.
    told = digest_of(names.MANIFEST, data)
    yield _by_digest(item, told)
    for index, digest in enumerate(manifest.processes):
        told = _by_digest(item, digest)
        yield told
        process = load_process(read_whole(copies, told.path, told.check), told.path)
        rows = names.rows_directory(index)
        arrays = [(f"{rows}/{name}", entry) for name, entry in process.arrays.items()]
        if process.dense is not None:
            arrays.append((names.dense_array(index), process.dense.array))
        for array, entry in arrays:
            yield from _files_of_array(item, array, entry)
    for digest in manifest.dense_files:
        yield _by_digest(item, digest)


def _files_of_array(item: str, array: str, entry: ArrayEntry) -> Iterator[StepFile]:
    for chunk, size in enumerate(file_bytes(entry)):
        check = functools.partial(_check_chunk, size, entry.crc32c[chunk])
        yield StepFile(f"{item}/{array}/c/{chunk}", size, check)
    told = FileDigest(
        path=f"{array}/zarr.json",
        bytes=entry.metadata_bytes,
        sha256=entry.metadata_sha256,
    )
    yield _by_digest(item, told)


def _check_chunk(size: int, crc32c: int, data: bytes, where: AnyPath) -> None:
    """Checks the bytes in the file of a chunk, without decoding elements of the array."""
    # TensorStore computes the checksum. This module must be importable without it.
    from cnr_jax.repository.store import in_memory
    from cnr_jax.repository.store.arrays import spec_of

    if len(data) != size:
        fact = f"has another size\n  got {len(data)} bytes, expected {size}"
        raise damage(where, fact)
    if (got := int.from_bytes(data[-4:], "little")) != crc32c:
        fact = (
            f"is not the chunk that was saved\n  got {got:08x}, expected {crc32c:08x}"
        )
        raise damage(where, fact, "foreign_chunk")
    # The checksum is over the stored bytes, so they are read as an array of bytes.
    count = len(data) - 4
    spec = spec_of(where, "uint8", count, count) | {"kvstore": in_memory.FOLDER}
    try:
        in_memory.elements(spec, data)
    except ValueError as error:
        text = str(error).splitlines()[0][:300]
        raise damage(where, f"is damaged\n  {text}", "data_damaged") from error


def _by_digest(item: str, digest: FileDigest) -> StepFile:
    def check(data: bytes, where: AnyPath) -> None:
        check_digest(digest_of(digest.path, data), digest, where)

    return StepFile(f"{item}/{digest.path}", digest.bytes, check)


def _check_manifest(data: bytes, where: AnyPath) -> None:
    with about(where):
        load(data, os.fspath(where))


def read_whole(copies: Sequence[AnyPath], path: str, check: Check | None) -> bytes:
    """Contents of a file, from the first copy of its step in which the file is whole.

    Raises:
        CnrError, OSError: the error of the first copy, if the file is whole in none.
    """
    first: Exception | None = None
    for step in copies:
        file = step / path
        try:
            with reading(file):
                data = read_all(file)
            if check is not None:
                check(data, file)
            return data
        except (errors.CnrError, OSError) as error:
            first = first or error
    assert first is not None
    raise first


class Stopped(Exception):
    """Raised in a copy that is to end, as the mirror is closed."""


class Meter:
    """Meter that limits the bytes a second that are copied.

    Args:
        bytes_per_sec: the limit; None: there is none.
    """

    def __init__(self, bytes_per_sec: float | None = None) -> None:
        self._rate, self._lock = bytes_per_sec, threading.Lock()
        self._free_at = 0.0
        self._stop = threading.Event()

    def stop(self) -> None:
        """Makes all calls of `take` raise `Stopped`, those that wait and those to come."""
        self._stop.set()

    def take(self, count: int) -> None:
        """Waits until `count` bytes may be written.

        Raises:
            Stopped: if the meter is stopped.
        """
        wait = 0.0
        if self._rate is not None:
            with self._lock:
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + count / self._rate
                wait = self._free_at - now
        if self._stop.wait(wait) if wait else self._stop.is_set():
            raise Stopped


def _size_of(step: AnyPath, file: StepFile) -> int:
    return size_of(step / file.path) if file.bytes is None else file.bytes


def copy_files(
    source: AnyPath, folder: AnyPath, meter: Meter, *, but: str | None = None
) -> None:
    """Copies the files of a step into a folder, and checks each on the way.

    Files that an earlier call has copied there are not copied again, so the folder must hold no
    files of another step.

    Args:
        source: folder of the step.
        folder: folder to be filled.
        meter: meter that limits the bytes that are written.
        but: name of an item that is not copied; None: all are.

    Raises:
        CnrError: if a file is damaged.
        RootError: if the root of the step cannot be read.
        OSError: if the folder cannot be written.
        Stopped: if the meter is stopped.
    """
    root, store = source.parent, store_of(folder)
    with as_root_errors(root, "read"):
        files = files_of_step([source], but=but)
        sizes = [(each.path, _size_of(source, each)) for each in files]
    lacking = {path for path, _ in store.amiss(folder, sizes)}
    for parent in sorted({each.path.rpartition("/")[0] for each in files} - {""}):
        store.make_folder(folder / parent)

    def copy(each: StepFile) -> None:
        target = folder / each.path
        # A store with conditions puts files as a whole, so a file that is there need not be read.
        if each.path not in lacking and can(folder).conditions:
            return
        with as_root_errors(root, "read"):
            data = read_whole([source], each.path, each.check)
        if each.path not in lacking and read_all(target) == data:
            return
        meter.take(len(data))
        store.write(target, data, replaces=False)
        if each.check is None and read_all(target) != data:
            raise damage(target, f"is not what {os.fspath(source / each.path)} holds")

    last = [each for each in files if each.path.endswith(names.MANIFEST)]
    with ThreadPoolExecutor(_AT_ONCE, "cnr_mirror") as pool:
        list(pool.map(copy, files[: len(files) - len(last)]))
    for each in last:
        copy(each)


def mend_files(copies: Sequence[AnyPath], goals: Sequence[AnyPath]) -> list[AnyPath]:
    """Replaces damaged or missing files in some copies of a step by whole ones of other copies.

    A file that has no digest is copied only where it is missing.

    Args:
        copies: folders of one step, in two roots.
        goals: those of the folders that are mended.

    Returns:
        Paths of the files that were replaced or added.

    Raises:
        CnrError, OSError: if a file is whole in no copy, or cannot be written. Files that were
            mended before stay so.
    """
    mended: list[AnyPath] = []
    # Manifests come last: once one is there, other programs may take the step for whole.
    for each in files_of_step(copies):
        for step in goals:
            file = step / each.path
            try:
                read_whole([step], each.path, each.check)
            except (errors.CnrError, FileNotFoundError):
                others = [other for other in copies if other is not step]
                data = read_whole(others, each.path, each.check)
                store = store_of(file)
                store.make_folder(file.parent)
                store.write(file, data, replaces=True)
                mended.append(file)
    return mended
