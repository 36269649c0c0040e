"""Check of one item of one step: its files, and what they hold.

`verify` checks the parents.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from cnr_jax import errors
from cnr_jax.format import names, rowids
from cnr_jax.format.manifest import FileDigest, Manifest
from cnr_jax.format.tiles import (
    ArrayEntry,
    ProcessManifest,
    Segment,
    Tile,
    check_cover,
    lacking_rows,
)
from cnr_jax.repository.step import check_dense, files_of, read_process
from cnr_jax.repository.store import AnyPath, checked, names_in

# Modules that decode rows need TensorStore and jax, so they are imported in functions: to read
# manifests, and to know what a root holds, takes neither.
if TYPE_CHECKING:
    from cnr_jax.repository.store.arrays import ArrayReader

Reach = Literal["none", "step", "chain"]

# Files that are read at the same time: enough to keep a disk busy while others are checked.
_AT_ONCE = 8
# Most problems of an array that are listed: a manifest of some megabytes can name more missing
# chunks than anybody would read about. The chunks of an array are checked in so many portions.
_LISTED = 32
_PORTIONS = 1024
# Files that Orbax puts into an item beside those of the item's handler.
_BY_ORBAX = {names.ORBAX_COMMITTED}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Finding: something that is wrong with an item.

    Attributes:
        file: path of the file below the item.
        kind: stable identifier of the trouble, as in `Problem`.
        message: text for people that says what is wrong.
        harms: what cannot be restored because of it: nothing, the step alone, or also everything
            that rests on the step.
    """

    file: str
    kind: str
    message: str
    harms: Reach

    @classmethod
    def of(
        cls, error: Exception, file: str, item: AnyPath, harms: Reach = "chain"
    ) -> Finding:
        """Makes a finding of an error that was met in `file`, or in a file that the error names."""
        kind, path = "not_readable", None
        if isinstance(error, errors.CnrError):
            kind, path = error.kind, error.path
        above = os.fspath(item).rstrip("/") + "/"
        if path is not None and path.startswith(above):
            file = path.removeprefix(above)
        return cls(file, kind, str(error), harms)


# A file, what cannot be restored if it is damaged, and a function that raises if it is. The
# function may also return other findings.
Check = tuple[str, Reach, Callable[[], list[Finding] | None]]


def inspect_item(item: AnyPath, manifest: Manifest, *, data: bool) -> list[Finding]:
    """Findings about an item whose manifest is intact.

    Args:
        item: directory of the item.
        manifest: manifest of the item.
        data: whether to read every byte.
    """
    found: list[Finding] = []
    processes: list[ProcessManifest] = []
    for i, expected in enumerate(manifest.processes):
        with _noted(found, item, expected.path):
            processes.append(read_process(item, manifest, i))
    if len(processes) == len(manifest.processes):
        with _noted(found, item, names.MANIFEST):
            tiles = (tile for process in processes for tile in process.tiles)
            check_cover(manifest.tables, tiles, os.fspath(item))
    with _noted(found, item, names.MANIFEST, "step"):
        known = len(processes) == len(manifest.processes)
        check_dense(item, manifest, processes if known else None)
    checks: list[Check] = []
    passed: list[tuple[str, int]] = []
    for process in processes:
        rows = names.rows_directory(process.process)
        for name, entry in process.arrays.items():
            checks += _array_checks(item, f"{rows}/{name}", entry, passed, data)
        if process.dense is not None:
            dense, entry = names.dense_array(process.process), process.dense.array
            holds = partial(_leaves_in, manifest, process)
            checks += _array_checks(item, dense, entry, passed, data, "step", holds)
        look = partial(_check_tiles, item, manifest, process, data)
        checks.append((names.process_manifest(process.process), "chain", look))
    for digest in manifest.dense_files:
        look = partial(_check_dense, item, digest, data)
        checks.append((digest.path, "step", look))
    look = partial(_check_unnamed, item, manifest, processes)
    checks.append(("", "none", look))
    if processes:
        # Threads that import modules which import each other may deadlock.
        for module in ("repository.store.arrays", "rows.codecs"):
            importlib.import_module(f"cnr_jax.{module}")
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "cnr_verify") as pool:
        for findings in pool.map(partial(_findings, item), checks):
            found += findings
    return _listed(dict.fromkeys(found), passed)


def _leaves_in(manifest: Manifest, process: ProcessManifest, chunk: int) -> str:
    """Text that says which dense leaves a chunk of a process holds; for the message."""
    assert process.dense is not None
    size = process.dense.array.chunk
    held = [
        "/".join(manifest.dense_leaves[tile.leaf].path)
        for tile in process.dense_tiles
        if tile.offset < (chunk + 1) * size
        and chunk * size < tile.offset + tile.bytes
        and tile.leaf < len(manifest.dense_leaves)
    ]
    more = [f"and {len(held) - 4} more"] * (len(held) > 4)
    return f"\n  of dense leaves it holds {', '.join(held[:4] + more)}"


def _listed(
    found: Iterable[Finding], passed: Iterable[tuple[str, int]]
) -> list[Finding]:
    """The first findings of each array, and one more that counts those that are not listed.

    Args:
        found: all findings.
        passed: arrays, each with the number of its chunks that were not looked at.
    """
    listed: list[Finding] = []
    unseen = Counter[str]()
    for array, count in passed:
        unseen[array] += count
    seen, last = Counter[str](), dict[str, Finding]()
    for finding in found:
        array, of_chunk, _ = finding.file.partition("/c/")
        if of_chunk:
            seen[array] += 1
        if not of_chunk or seen[array] <= _LISTED:
            listed.append(finding)
            last[array] = finding
    for array, count in seen.items():
        more = max(count - _LISTED, 0) + unseen[array]
        if more:
            text = f"{more:,} more chunks are not listed: "
            text += (
                f"{unseen[array]:,} of them were not looked at, the others are damaged"
            )
            listed.append(dataclasses.replace(last[array], file=array, message=text))
    return listed


def _findings(item: AnyPath, check: Check) -> list[Finding]:
    file, harms, look = check
    found: list[Finding] = []
    with _noted(found, item, file, harms):
        found += look() or []
    return found


@contextlib.contextmanager
def _noted(
    found: list[Finding], item: AnyPath, file: str, harms: Reach = "chain"
) -> Iterator[None]:
    """Adds a finding for an error that is raised, and goes on."""
    try:
        yield
    # TensorStore raises ValueError if storage does not let a file be read.
    except (errors.CnrError, OSError, ValueError) as error:
        found.append(Finding.of(error, file, item, harms))


def _array_checks(
    item: AnyPath,
    array: str,
    entry: ArrayEntry,
    passed: list[tuple[str, int]],
    data: bool,
    harms: Reach = "chain",
    holds: Callable[[int], str] = lambda chunk: "",
) -> Iterator[Check]:
    metadata = FileDigest(
        path=f"{array}/zarr.json",
        bytes=entry.metadata_bytes,
        sha256=entry.metadata_sha256,
    )
    # Only other programs read `zarr.json`: a restore goes by the manifest.
    yield metadata.path, "none", partial(checked.check_file, item, metadata)
    readers: list[ArrayReader] = []
    chunks = range(len(entry.crc32c))
    size = len(chunks) // _PORTIONS + 1
    for first in chunks[::size]:
        some = chunks[first : first + size]
        look = partial(
            _check_chunks,
            item,
            array,
            entry,
            some,
            readers,
            passed,
            data,
            harms,
            holds,
        )
        yield array, harms, look


def _check_chunks(
    item: AnyPath,
    array: str,
    entry: ArrayEntry,
    chunks: range,
    readers: list[ArrayReader],
    passed: list[tuple[str, int]],
    data: bool,
    harms: Reach,
    holds: Callable[[int], str],
) -> list[Finding]:
    """Findings about some chunks of an array, up to the number that is listed."""
    found: list[Finding] = []
    for done, chunk in enumerate(chunks):
        if len(found) > _LISTED:
            passed.append((array, len(chunks) - done))
            break
        with _noted(found, item, f"{array}/c/{chunk}", harms):
            _check_chunk(item / array, entry, chunk, readers, data)
            continue
        text = found[-1].message + holds(chunk)
        found[-1] = dataclasses.replace(found[-1], message=text)
    return found


def _check_chunk(
    array: AnyPath,
    entry: ArrayEntry,
    chunk: int,
    readers: list[ArrayReader],
    data: bool,
) -> None:
    checked.check_chunk_file(array, entry, chunk)
    if data:
        if not readers:
            from cnr_jax.repository.store.arrays import ArrayReader
            from cnr_jax.repository.store.kept_chunks import KeptChunks

            readers.append(ArrayReader(array, entry, kept=KeptChunks(cache_bytes=0)))
        readers[0].chunk(chunk)


def _check_dense(item: AnyPath, digest: FileDigest, data: bool) -> None:
    checked.check_size(item / digest.path, digest.bytes)
    if data:
        checked.check_file(item, digest)


def _check_unnamed(
    item: AnyPath, manifest: Manifest, processes: Sequence[ProcessManifest]
) -> list[Finding]:
    """Findings about files that no manifest names."""
    found: list[Finding] = []
    never_read = "is not of this checkpoint; it is never read"
    # If the manifest of a process cannot be read, nobody knows which files are of that process.
    known = {process.process for process in processes}
    unknown = set(range(len(manifest.processes))) - known
    hidden = {names.dense_array(process) for process in unknown}
    named = files_of(manifest, processes).paths
    with _noted(found, item, names.DENSE, "step"):
        harmful = checked.misleading_files(item, manifest)
        found += [
            Finding(file, checked.UNKNOWN, checked.MISTAKABLE, "step")
            for file in harmful
        ]
        for file in checked.unnamed_files(item, names.DENSE, named):
            # A folder may be in the place of such a file: files in it are skipped too.
            if not any(
                f"{file}/".startswith(f"{each}/") for each in (*harmful, *hidden)
            ):
                found.append(Finding(file, checked.UNKNOWN, never_read, "none"))
    others = {names.MANIFEST, names.DENSE, *map(names.rows_directory, unknown)}
    with _noted(found, item, "", "none"), checked.accessing(item):
        for name in names_in(item):
            if name not in others | _BY_ORBAX:
                for file in checked.unnamed_files(item, name, named):
                    found.append(Finding(file, checked.UNKNOWN, never_read, "none"))
    return found


def _check_tiles(
    item: AnyPath, manifest: Manifest, process: ProcessManifest, data: bool
) -> list[Finding]:
    """Checks that codecs are known, rows lie within their arrays, and row ids can be read."""
    found: list[Finding] = []
    file = names.process_manifest(process.process)
    dtypes = {
        (table.name, leaf.name): leaf.dtype
        for table in manifest.tables
        for leaf in table.leaves
    }
    rows = f"{names.rows_directory(process.process)}/{names.ROW_IDS_ARRAY}"
    ids = process.arrays.get(names.ROW_IDS_ARRAY)
    reader: ArrayReader | None = None
    if data and ids:
        from cnr_jax.repository.store.arrays import ArrayReader
        from cnr_jax.repository.store.kept_chunks import KeptChunks

        reader = ArrayReader(item / rows, ids, kept=KeptChunks(cache_bytes=0))
    done: set[tuple[int, int]] = set()
    for tile in lacking_rows(process) if manifest.kind == "full" else ():
        text = f"{tile.table}.{tile.leaf}: a full checkpoint lacks rows of a tile"
        found.append(Finding(file, "rows_missing", text, "chain"))
    for tile in process.tiles:
        size = tile.box[0][1] - tile.box[0][0]
        for segment in tile.segments:
            with _noted(found, item, file):
                dtype = dtypes.get((tile.table, tile.leaf), "")
                _check_parts(process, tile, segment, dtype, os.fspath(item / file))
            key = (segment.row_ids, size)
            if reader is not None and key not in done:
                done.add(key)
                with _noted(found, item, rows):
                    _check_row_ids(process, segment.row_ids, size, reader)
    return found


def _check_parts(
    process: ProcessManifest, tile: Tile, segment: Segment, dtype: str, where: str
) -> None:
    from cnr_jax.rows.codecs import codec_from

    named = process.codecs[segment.codec]
    codec = codec_from(named.name, named.configuration)
    count = process.row_ids[segment.row_ids].count
    for name, part in codec.parts(tile.width, checked.numpy_dtype(dtype)).items():
        ref = segment.parts.get(name)
        array = process.arrays[ref.array] if ref is not None else None
        if (
            ref is None
            or array is None
            or checked.numpy_dtype(array.dtype) != part.dtype
        ):
            raise errors.FormatError(
                f"{where}: part {name!r} of a segment of {tile.table}.{tile.leaf} does"
                " not fit its codec",
                path=where,
            )
        if ref.offset + count * part.width > array.length:
            raise errors.FormatError(
                f"{where}: rows of {tile.table}.{tile.leaf} are outside the array"
                f" {ref.array}",
                path=where,
            )


def _check_row_ids(
    process: ProcessManifest, index: int, rows: int, reader: ArrayReader
) -> None:
    ids = process.row_ids[index]
    if (ids.form, ids.count, ids.bytes) == ("all", rows, 0):
        return  # there is nothing to decode, and no stored data that bounds the number of rows
    data = reader.read(ids.offset, ids.offset + ids.bytes)
    rowids.decode_rowids(ids.form, data, rows, ids.count)
