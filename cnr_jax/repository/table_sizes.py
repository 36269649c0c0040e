"""Rows, bytes and codecs of a step and of each of its tables, by its manifests alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cnr_jax.format.manifest import FileDigest, Manifest, TableEntry, Totals
from cnr_jax.format.tiles import ArrayEntry, ProcessManifest, joined_error
from cnr_jax.repository.description import LeafDescription, TableDescription
from cnr_jax.repository.store.checked import file_bytes, numpy_dtype

# Stands for the row ids of a table in the place of a leaf's name; no leaf has this name.
_ROW_IDS = ""


def held_tables(
    manifest: Manifest, processes: Sequence[ProcessManifest]
) -> tuple[TableDescription, ...]:
    """What a step holds of each table, as the manifests of its processes tell."""
    rows: Counter[tuple[str, str]] = Counter()
    tiles: Counter[tuple[str, str]] = Counter()
    codecs: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    nbytes: Counter[tuple[str, str]] = Counter()
    # Rows in higher layers are there once more.
    lowest = min((t.layer for each in processes for t in each.tiles), default=0)
    for process in processes:
        listed = [codec_text(each.name, each.configuration) for each in process.codecs]
        sizes = _part_bytes(process)
        counted: set[int] = set()
        for tile in process.tiles:
            leaf = tile.table, tile.leaf
            tiles[leaf] += 1
            is_first = all(start == 0 for start, _ in tile.box[1:])
            if tile.segments and is_first and tile.layer == lowest:
                rows[leaf] += process.row_ids[tile.segments[0].row_ids].count
            for segment in tile.segments:
                ids = process.row_ids[segment.row_ids]
                codecs[leaf][listed[segment.codec]] += ids.count
                for part in segment.parts.values():
                    # A part that several segments share counts for the first of them.
                    nbytes[leaf] += sizes.pop((part.array, part.offset), 0)
                if segment.row_ids not in counted:
                    nbytes[tile.table, _ROW_IDS] += ids.bytes
                    counted.add(segment.row_ids)
    found = (_table(entry, rows, tiles, codecs, nbytes) for entry in manifest.tables)
    return tuple(_with_error(table, processes) for table in found)


def _with_error(
    table: TableDescription, processes: Sequence[ProcessManifest]
) -> TableDescription:
    error = joined_error((p.row_errors or {}).get(table.name) for p in processes)
    if error is None:
        return table
    return dataclasses.replace(
        table,
        sample_rows=error.rows,
        mean_row_error=error.mean,
        worst_row_error=error.worst,
    )


def _table(
    entry: TableEntry,
    rows: Mapping[tuple[str, str], int],
    tiles: Mapping[tuple[str, str], int],
    codecs: Mapping[tuple[str, str], Counter[str]],
    nbytes: Mapping[tuple[str, str], int],
) -> TableDescription:
    leaves = tuple(
        LeafDescription(
            name=leaf.name,
            path="/".join(leaf.path),
            shape=leaf.shape,
            dtype=leaf.dtype,
            codecs=tuple(
                name for name, _ in codecs[entry.name, leaf.name].most_common()
            ),
            rows=rows[entry.name, leaf.name],
            bytes=nbytes[entry.name, leaf.name],
            tiles=tiles[entry.name, leaf.name],
        )
        for leaf in entry.leaves
    )
    return TableDescription(
        name=entry.name,
        rows=entry.rows,
        saved_rows=leaves[0].rows,
        table_bytes=leaves[0].bytes + nbytes[entry.name, _ROW_IDS],
        slot_bytes=sum(leaf.bytes for leaf in leaves[1:]),
        leaves=leaves,
    )


def _part_bytes(process: ProcessManifest) -> dict[tuple[str, int], int]:
    """Bytes of each part of a segment, by its array and offset.

    Parts follow each other in an array, so each ends where the next begins. Codecs know the lengths
    too, but need jax.
    """
    offsets: dict[str, set[int]] = defaultdict(set)
    for tile in process.tiles:
        for segment in tile.segments:
            for part in segment.parts.values():
                offsets[part.array].add(part.offset)
    found: dict[tuple[str, int], int] = {}
    for name, begins in offsets.items():
        entry = process.arrays[name]
        ordered = [*sorted(begins), entry.length]
        for begin, end in itertools.pairwise(ordered):
            elements = max(0, end - begin)
            if entry.compressed is None:
                size = elements * numpy_dtype(entry.dtype).itemsize
            else:
                size = sum(entry.compressed.bytes) * elements // entry.length
            found[name, begin] = size
    return found


def codec_text(name: str, configuration: Mapping[str, Any]) -> str:
    """Name of a stored codec as options have it, and its bits.

    Example:
        >>> codec_text("cnr.asymmetric", {"bits": 4, "refits": 3, "metadata_bits": 16})
        'adaptive 4 bits'
        >>> codec_text("cnr.raw", {})
        'raw'
    """
    short = name.removeprefix("cnr.")
    if short == "asymmetric" and configuration.get("refits"):
        short = "adaptive"
    bits = configuration.get("bits")
    return short if bits is None else f"{short} {bits} bits"


def totals_of(
    processes: Sequence[ProcessManifest], digests: Sequence[FileDigest]
) -> Totals:
    """Adds up the rows and bytes of a step from the manifests of its processes."""
    arrays = sum(
        _bytes_of(entry) for process in processes for entry in process.arrays.values()
    )
    slots = sum(process.slot_bytes for process in processes)
    return Totals(
        rows=sum(rows_of(process) for process in processes),
        table_bytes=arrays - slots,
        slot_bytes=slots,
        dense_bytes=sum(
            _bytes_of(each.dense.array) for each in processes if each.dense
        ),
        manifest_bytes=sum(digest.bytes for digest in digests),
    )


def _bytes_of(entry: ArrayEntry) -> int:
    """Bytes of the files of an array: whole chunks, each with its checksum, and `zarr.json`."""
    return sum(file_bytes(entry)) + entry.metadata_bytes


def rows_of(process: ProcessManifest, layer: int = 0) -> int:
    """Number of rows of tables in a layer; each counts once, however many tiles hold it."""
    return sum(
        process.row_ids[tile.segments[0].row_ids].count
        for tile in process.tiles
        if tile.leaf == "table"
        and tile.layer == layer
        and tile.segments
        and all(start == 0 for start, _ in tile.box[1:])
    )
