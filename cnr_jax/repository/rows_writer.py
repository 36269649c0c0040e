"""Writing the rows of one process: arrays first, then the manifest that names them.

Crash order: a process manifest is written when every array it names is on storage, and
`manifest.json` when every process manifest is. So whatever a manifest names is there.
"""

from __future__ import annotations

import collections
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from cnr_jax.format import names, rowids
from cnr_jax.format.dense import DenseTile
from cnr_jax.format.manifest import FileDigest, NamedConfiguration, SampledMotion
from cnr_jax.format.tiles import (
    ArrayEntry,
    PartRef,
    ProcessManifest,
    RowIds,
    SampledError,
    Segment,
    Tile,
    dump_process,
)
from cnr_jax.repository.dense_writer import DenseWriter
from cnr_jax.repository.parent_rows import TileKey, WrittenTile
from cnr_jax.repository.residual_rows import ResidualRows
from cnr_jax.repository.run_plan import RunPlan
from cnr_jax.repository.staging import DenseBytes, parted
from cnr_jax.repository.store import (
    AnyPath,
    sync_directory,
    sync_tree,
    syncs_directories,
    write_durably,
)
from cnr_jax.repository.store.arrays import COMPRESSED_LEAST_BYTES, ArrayWriter
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.repository.store.packed_arrays import PackedWriter
from cnr_jax.rows.codecs import Codec, Raw
from cnr_jax.rows.codecs.lattice import Parts
from cnr_jax.rows.gather.chunk import Chunk
from cnr_jax.rows.gather.encode import Comparison, RowErrors, encode_chunks
from cnr_jax.rows.gather.motion import Motion
from cnr_jax.rows.tiling import host_device

_T = TypeVar("_T")
_NOTHING: Mapping[TileKey, Parts] = {}


class Written(NamedTuple):
    """A process manifest that was written, and what the writing found out.

    Attributes:
        digest: digest of the manifest's file.
        manifest: the manifest.
        waiting_secs: seconds in which the writing waited for rows to be gathered.
        encode_secs: seconds in which it then waited for their codes.
        row_errors: errors of rounded rows; None if all rows are exact, or errors are not known.
        tiles: rows to which the save that rests on this one takes differences, by tile.
    """

    digest: FileDigest
    manifest: ProcessManifest
    waiting_secs: float
    encode_secs: float
    row_errors: RowErrors | None
    tiles: Mapping[TileKey, WrittenTile]


class PartArray(NamedTuple):
    """Array that holds a part of a codec: its elements and bytes in a row, and compression."""

    part: str
    array: str
    dtype: str
    width: int
    row_bytes: int
    compression: str | None


@functools.cache
def part_arrays(
    codec: Codec, width: int, dtype: np.dtype, *, all_parts: bool = False
) -> tuple[PartArray, ...]:
    """Arrays of the parts of a codec that are stored with its own rows.

    Results are cached, as thousands of tiles ask for a few of them.

    Args:
        codec: codec of the rows.
        width: number of elements of a row.
        dtype: dtype of the leaf.
        all_parts: whether to include parts that are mostly stored with the rows of another leaf.
    """
    found: list[PartArray] = []
    for name, part in codec.parts(width, dtype).items():
        if part.shared and not all_parts:
            continue
        stored = part.dtype.name
        # Only rows of one width can be packed together.
        called = (
            f"{name}{part.width}" if part.compression == names.PACKED_ROWS else name
        )
        array = names.array_name(codec.name, called, stored)
        row_bytes, how = part.width * part.dtype.itemsize, part.compression
        found.append(PartArray(name, array, stored, part.width, row_bytes, how))
    return tuple(found)


def open_part(
    path: AnyPath,
    part: PartArray,
    length: int,
    *,
    compression: str | None,
    syncs: bool,
) -> ArrayWriter | PackedWriter:
    """Opens the array of a part: packed where its codec asks for that, and it is not tiny.

    Args:
        path: path of the array.
        part: part of a codec that the array holds.
        length: number of elements that will be appended.
        compression: compression of arrays whose codec does not ask for another; None: none.
        syncs: whether files are synced as they are written.
    """
    how, nbytes = part.compression, length * numpy_dtype(part.dtype).itemsize
    if how == names.PACKED_ROWS:
        if nbytes > COMPRESSED_LEAST_BYTES:
            return PackedWriter(path, part.dtype, length, part.width)
        how = compression
    return ArrayWriter(
        path, part.dtype, length, compression=how or compression, syncs=syncs
    )


# Names of parts that are stored with the rows of another leaf, and their names there.
SHARED = {"octaves": "integers", "centre": "centre"}


def _shared_parts(plan: RunPlan, beside: Mapping[str, PartRef]) -> dict[str, PartRef]:
    """Where the shared parts of rows are, which are stored with the rows of another leaf."""
    parts = plan.codec.parts(plan.width, plan.dtype)
    return {name: beside[SHARED[name]] for name, part in parts.items() if part.shared}


@functools.cache
def _escape_array(dtype: np.dtype) -> tuple[str, str]:
    """Name and dtype of the array for rows of this dtype that their codecs cannot hold."""
    return names.array_name("escaped", "rows", dtype.name), dtype.name


def part_of_array(entry: ArrayEntry, encoded_bytes: int) -> int:
    """Bytes that some of the encoded bytes of an array take in its files.

    In a compressed array they take their share, as if all of it were packed equally well: slots and
    tables may lie in one chunk.
    """
    if entry.compressed is None:
        return encoded_bytes
    whole_bytes = entry.length * numpy_dtype(entry.dtype).itemsize
    return sum(entry.compressed.bytes) * encoded_bytes // whole_bytes


def write_process(
    directory: AnyPath, manifest: ProcessManifest, *, syncs: bool
) -> FileDigest:
    """Writes a process manifest durably, once all arrays of rows that it names are durable.

    Args:
        directory: directory of the item.
        manifest: manifest of a process.
        syncs: whether arrays were synced with their folders as they were written.
    """
    rows = directory / names.rows_directory(manifest.process)
    if manifest.arrays and not syncs:
        sync_tree(rows)
    elif manifest.arrays:
        # TensorStore syncs each file and its directory, but not the directories above.
        for name in manifest.arrays:
            sync_directory(rows / name)
        sync_directory(rows)
    path = directory / names.process_manifest(manifest.process)
    digest = write_durably(path, dump_process(manifest))
    sync_directory(directory)
    return digest


class RowsWriter:
    """Writer of one process: its runs in the order in which chunks come, then its dense leaves.

    Args:
        directory: directory of the item; it must exist.
        uuid: uuid of the checkpoint.
        process: index of this process.
        plans: plan of each tile; those with rows are in the order of the chunks.
        dense: tiles of dense leaves, in the order in which their bytes come.
        compression: compression of arrays whose codec does not ask for another; None: none.
        below: parts of all rows of tiles as they are in the step that the save rests on.
        layer: number of the layer that its tiles are in.
    """

    def __init__(
        self,
        directory: AnyPath,
        uuid: str,
        process: int,
        plans: Sequence[RunPlan],
        dense: Sequence[DenseTile] = (),
        *,
        compression: str | None = None,
        below: Mapping[TileKey, Parts] = _NOTHING,
        layer: int = 0,
    ) -> None:
        self._layer = layer
        self._directory, self._compression = directory, compression
        self._rows = directory / names.rows_directory(process)
        # TensorStore syncs files together with their folders, or not at all.
        self._syncs = syncs_directories(directory)
        self._uuid, self._process, self._plans = uuid, process, plans
        self._with_rows = [plan for plan in plans if plan.count]
        self._run_of = {id(plan): i for i, plan in enumerate(self._with_rows)}
        self._starts = np.cumsum([0, *(plan.count for plan in self._with_rows)])
        self._codecs: dict[Codec, int] = {}
        self._ids: list[RowIds] = []
        self._id_bytes: list[np.ndarray] = []
        self._id_length = 0
        self._known_ids: dict[tuple[int, int], int] = {}
        self._escaped: dict[int, list[tuple[np.ndarray, PartRef]]] = {}
        # Encoded bytes of slots, by array.
        self._slot_bytes: collections.Counter[str] = collections.Counter()
        self._offsets: list[dict[str, PartRef]] = []
        self._writers: dict[str, ArrayWriter | PackedWriter] = {}
        self._residual = ResidualRows(self._with_rows, below, host_device())
        try:
            self._open_writers()
            self._dense = DenseWriter(
                directory, process, dense, compression=compression, syncs=self._syncs
            )
        except BaseException:
            # Some arrays are already being made, in a folder that may be removed next.
            for writer in self._writers.values():
                writer.stop()
            raise

    def _open_writers(self) -> None:
        """Sets where the parts of each run start, and opens the arrays that hold them."""
        lengths: dict[str, int] = {}
        arrays: dict[str, PartArray] = {}
        escapes: dict[tuple[str, str], int] = {}
        places: dict[TileKey, int] = {}
        for plan in self._with_rows:
            refs: dict[str, PartRef] = {}
            for part in part_arrays(plan.codec, plan.width, plan.dtype):
                start = lengths.get(part.array, 0)
                refs[part.part] = PartRef(array=part.array, offset=start)
                lengths[part.array] = start + plan.count * part.width
                arrays[part.array] = part
            if plan.beside is not None:
                refs |= _shared_parts(plan, self._offsets[places[plan.beside]])
            places[plan.key] = len(self._offsets)
            self._offsets.append(refs)
            if not isinstance(plan.codec, Raw):
                key = _escape_array(plan.dtype)
                escapes[key] = escapes.get(key, 0) + plan.count * plan.width
        for array, part in arrays.items():
            self._writers[array] = open_part(
                self._rows / array,
                part,
                lengths[array],
                compression=self._compression,
                syncs=self._syncs,
            )
        for (array, dtype), length in escapes.items():
            self._writers[array] = self._open(array, dtype, length, exact=False)

    def _open(
        self, array: str, dtype: str, length: int, *, exact: bool = True
    ) -> ArrayWriter:
        return ArrayWriter(
            self._rows / array,
            dtype,
            length,
            exact=exact,
            compression=self._compression,
            syncs=self._syncs,
        )

    def write(
        self,
        chunks: Iterable[Chunk | DenseBytes],
        device: jax.Device,
        compared: Comparison,
    ) -> Written:
        """Encodes and writes all chunks, then dense leaves, then the process manifest.

        Args:
            chunks: rows of all runs, in order, then the bytes of dense leaves.
            device: device that encodes chunks which are not encoded yet.
            compared: comparison that gets each chunk with its encoded rows.

        Returns:
            The process manifest, which is durable, and what the writing found out.
        """
        done, waits, codes = 0, [0.0], [0.0]
        rows, dense = parted(chunks)
        encoding = encode_chunks(self._residual.encoded(_timed(rows, waits)), device)
        for chunk, encoded in _timed(encoding, codes):
            stored = self._residual.stored(encoded.parts, done, chunk.count)
            for name, values in stored.items():
                self._writer_of(chunk.codec, name, values).append(values)
            if encoded.rows is not None:
                self._write_escaped(encoded.escaped + done, encoded.rows)
            # The rows are being written meanwhile.
            compared.add(chunk, encoded, done)
            done += chunk.count
        if done != self._starts[-1]:
            raise RuntimeError(f"{done} of {self._starts[-1]} staged rows came through")
        for some in dense:
            self._dense.append(some.data)
        tiles = tuple(self._tile(plan) for plan in self._plans)
        self._write_ids()
        for writer in (*self._writers.values(), self._dense):
            writer.end()
        row_errors, by_table = compared.result()
        arrays, leaves = self._finish_arrays(), self._dense.finish()
        manifest = ProcessManifest(
            uuid=self._uuid,
            process=self._process,
            arrays=arrays,
            codecs=tuple(
                NamedConfiguration(name=c.name, configuration=c.configuration())
                for c in self._codecs
            ),
            row_ids=tuple(self._ids),
            tiles=tiles,
            slot_bytes=sum(
                part_of_array(arrays[name], encoded)
                for name, encoded in self._slot_bytes.items()
            ),
            row_errors=_sampled_errors(by_table),
            motion=_sampled_motions(compared.motions()),
            outgrown=self._residual.outgrown(self._plans),
            dense=leaves,
        )
        digest = write_process(self._directory, manifest, syncs=self._syncs)
        encoding = max(0.0, codes[0] - waits[0])
        written = self._residual.written()
        return Written(digest, manifest, waits[0], encoding, row_errors, written)

    def _writer_of(
        self, codec: Codec, name: str, values: np.ndarray
    ) -> ArrayWriter | PackedWriter:
        dtype = values.dtype.name
        # Packed rows of this width come first. Rows of one element may also be stored unpacked.
        array = names.array_name(codec.name, f"{name}{values.shape[1]}", dtype)
        if array not in self._writers:
            array = names.array_name(codec.name, name, dtype)
        return self._writers[array]

    def stop(self) -> None:
        """Waits until nothing is being written, so that a failed save's folder can be removed."""
        for writer in self._writers.values():
            writer.stop()
        self._dense.stop()

    def _write_escaped(self, at: np.ndarray, rows: np.ndarray) -> None:
        """Stores escaped rows raw, and notes for each run which rows they are, and where."""
        runs = np.searchsorted(self._starts, at, side="right") - 1
        array, _ = _escape_array(rows.dtype)
        writer = self._writers[array]
        assert isinstance(writer, ArrayWriter)
        for run in np.unique(runs).tolist():
            mine = runs == run
            where = PartRef(array=array, offset=writer.position)
            writer.append(rows[mine])
            found = self._escaped.setdefault(run, [])
            found.append((at[mine] - self._starts[run], where))
            plan = self._with_rows[run]
            if plan.is_slot:
                self._slot_bytes[array] += rows[mine].nbytes

    def _tile(self, plan: RunPlan) -> Tile:
        segments: list[Segment] = []
        if plan.count:
            run = self._run_of[id(plan)]
            ids = self._shared_ids(plan)
            segments.append(
                Segment(
                    codec=self._codec(plan.codec),
                    row_ids=ids,
                    parts=self._offsets[run],
                    below_crc32=self._residual.below(run),
                )
            )
            for at, where in self._escaped.get(run, ()):
                positions = at if plan.positions is None else plan.positions[at]
                segments.append(
                    Segment(
                        codec=self._codec(Raw()),
                        row_ids=self._add_ids(positions, plan.rows),
                        parts={"rows": where},
                    )
                )
            if plan.is_slot:
                for part in part_arrays(plan.codec, plan.width, plan.dtype):
                    self._slot_bytes[part.array] += plan.count * part.row_bytes
        return Tile(
            table=plan.table,
            leaf=plan.leaf,
            box=plan.box,
            segments=tuple(segments),
            layer=self._layer,
        )

    def _codec(self, codec: Codec) -> int:
        return self._codecs.setdefault(codec, len(self._codecs))

    def _shared_ids(self, plan: RunPlan) -> int:
        """Index of the row ids of a run; leaves with the same rows share them."""
        key = (id(plan.positions), plan.rows)
        if key not in self._known_ids:
            self._known_ids[key] = self._add_ids(plan.positions, plan.rows)
        return self._known_ids[key]

    def _add_ids(self, positions: np.ndarray | None, rows: int) -> int:
        """Adds row ids of a tile of `rows` rows; returns their index."""
        if positions is None:
            form, data, count = "all", np.empty(0, np.uint8), rows
        else:
            form, data = rowids.encode_rowids(positions, rows)
            count = len(positions)
        offset = self._id_length
        self._ids.append(RowIds(form=form, offset=offset, bytes=len(data), count=count))
        self._id_bytes.append(data)
        self._id_length += len(data)
        return len(self._ids) - 1

    def _write_ids(self) -> None:
        data = np.concatenate([*self._id_bytes, np.empty(0, np.uint8)])
        if len(data):
            name = names.ROW_IDS_ARRAY
            self._writers[name] = self._open(name, "uint8", len(data))
            self._writers[name].append(data)

    def _finish_arrays(self) -> dict[str, ArrayEntry]:
        entries = {name: writer.finish() for name, writer in self._writers.items()}
        return {name: entry for name, entry in entries.items() if entry is not None}


def _timed(source: Iterable[_T], secs: list[float]) -> Iterator[_T]:
    """Yields what a source yields; adds the seconds spent waiting for it to `secs[0]`."""
    items = iter(source)
    while True:
        started = time.perf_counter()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            secs[0] += time.perf_counter() - started
        yield item


def _sampled_errors(errors: Mapping[str, RowErrors]) -> dict[str, SampledError] | None:
    """Errors of each table's rows, as a manifest holds them; None if no table has any."""
    found: dict[str, SampledError] = {}
    for table, (rows, mean, worst) in errors.items():
        # Readers would refuse a manifest with a number that is not finite.
        if mean is not None and worst is not None and math.isfinite(worst):
            mean, worst = float(f"{mean:.6g}"), float(f"{worst:.6g}")
            found[table] = SampledError(rows=rows, mean=mean, worst=worst)
    return found or None


def _sampled_motions(found: Mapping[str, Motion]) -> dict[str, SampledMotion] | None:
    """Motion of each table's rows, as a manifest holds it; None if no motion is known."""
    return {
        table: SampledMotion(rows=rows, even_bits=round(even_bits, 4))
        for table, (rows, even_bits) in found.items()
    } or None
