"""Manifest of one process: its arrays, and the place of each tile's rows in them.

All rows of a process are concatenated into a few one-dimensional arrays, by codec, part and
dtype. A *tile* is the part of one leaf that one device owned. Its rows are in *segments*: encoded
rows, with the ids of these rows. A later segment overrides an earlier one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.boxes import Box, box_json, cover_problems
from cnr_jax.format.dense import DenseTile, quick_dense_tile, read_dense_tile
from cnr_jax.format.fields import Fields, dump_document, is_integer, open_document
from cnr_jax.format.manifest import (
    NamedConfiguration,
    SampledMotion,
    TableEntry,
    read_motion,
    read_named,
    to_json,
)
from cnr_jax.texts import count_of

_FORMS = ("all", "none", "bitmap", "gaps")
# The most elements of an array or a chunk: in any dtype, 64 bits can count the bytes.
_MOST_ELEMENTS = 2**59 - 1
# Compressions that a writer may be asked for.
COMPRESSIONS = (names.ZSTD,)
# Codecs of compressed chunks, and the feature that each requires. Which one a writer takes depends
# on the elements, or on the codec of the rows.
CHUNK_CODECS = {
    names.ZSTD: names.ZSTD,
    names.BLOSC: names.BLOSC,
    names.PACKED_ROWS: names.LATTICE,
}
PROCESS_FORMAT = f"{names.FORMAT}.process"
# Fields for the digest of the rows below. Where a segment has both, the first counts.
_DIGESTS = ("below_crc32", "below")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """Compression of an array's chunks.

    Attributes:
        codec: one of `CHUNK_CODECS`.
        bytes: size of each chunk's file, its checksum included.
    """

    codec: str
    bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayEntry:
    """Entry of one zarr v3 array: `[length]` elements in chunks of `chunk`.

    Attributes:
        metadata_sha256: digest of its `zarr.json`.
        crc32c: checksum of each chunk, which its `crc32c` codec stores at its end. Here they tell
            a chunk from a whole one of another place or run.
        compressed: compression of chunks; None: there is none, and the field is not stored.
    """

    dtype: str
    length: int
    chunk: int
    metadata_bytes: int
    metadata_sha256: str
    crc32c: tuple[int, ...]
    compressed: Compressed | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DensePart:
    """Dense leaves of one process: their bytes one after the other, in one array of uint8."""

    array: ArrayEntry
    tiles: tuple[DenseTile, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowIds:
    """Row ids of a segment: `count` ids of rows in its tile, in `form`, in the ids array."""

    form: str
    offset: int
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """Start of one part of a segment: an array, and the offset in its elements."""

    array: str
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Encoded rows: indices into the codecs and row ids of the process, and the parts.

    Attributes:
        below_crc32: CRC-32s of the rows below, to which these are added; None: not stored.
        below: their BLAKE2b digests instead, of earlier revisions; None: not stored.
    """

    codec: int
    row_ids: int
    parts: Mapping[str, PartRef]
    below_crc32: str | None = None
    below: str | None = None

    @property
    def digest(self) -> str | None:
        """Digest of the rows below, of either kind; None: these rows replace those below."""
        return self.below_crc32 or self.below


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The part `box` (start and stop in each dimension) of one leaf of one table.

    Attributes:
        layer: number of its layer. A tile lies over all tiles of the leaf in lower layers.
    """

    table: str
    leaf: str
    box: Box
    segments: tuple[Segment, ...]
    layer: int = 0

    @property
    def width(self) -> int:
        """Elements in one row of the tile."""
        return math.prod(stop - start for start, stop in self.box[1:])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledError:
    """Error of a table's rounded rows: relative l2 errors of a sample of them.

    Attributes:
        rows: number of rows compared, at least one; rows of zeros, which are exact, do not count.
        mean: mean of `||row - read|| / ||row||`.
        worst: the greatest of them.
    """

    rows: int
    mean: float
    worst: float


def joined_error(found: Iterable[SampledError | None]) -> SampledError | None:
    """Joins the errors of several samples; None if there is no sample.

    Example:
        >>> few = SampledError(rows=1, mean=0.3, worst=0.3)
        >>> joined_error([few, None, SampledError(rows=3, mean=0.1, worst=0.2)])
        SampledError(rows=4, mean=0.15, worst=0.3)
    """
    errors = [each for each in found if each is not None]
    rows = sum(each.rows for each in errors)
    if not rows:
        return None
    mean = sum(each.mean * each.rows for each in errors) / rows
    worst = max(each.worst for each in errors)
    return SampledError(rows=rows, mean=float(f"{mean:.6g}"), worst=worst)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessManifest:
    """The contents of `manifest.pNNNNN.json`; see SPEC.md, section 6."""

    uuid: str
    process: int
    arrays: Mapping[str, ArrayEntry]
    codecs: tuple[NamedConfiguration, ...]
    row_ids: tuple[RowIds, ...]
    tiles: tuple[Tile, ...]
    slot_bytes: int
    version: int = names.VERSION
    # By table; None: nothing was sampled.
    row_errors: Mapping[str, SampledError] | None = None
    motion: Mapping[str, SampledMotion] | None = None
    # Tables whose rows have grown out of their step.
    outgrown: tuple[str, ...] = ()
    # None: this process has written no dense leaves as tiles.
    dense: DensePart | None = None

    @property
    def dense_tiles(self) -> tuple[DenseTile, ...]:
        """The tiles of dense leaves that this process has written."""
        return self.dense.tiles if self.dense else ()

    @property
    def features(self) -> frozenset[str]:
        """Features, beyond the version, that a reader needs to know to read this."""
        entries = [*self.arrays.values(), *([self.dense.array] if self.dense else ())]
        found = {CHUNK_CODECS[e.compressed.codec] for e in entries if e.compressed}
        added = [s for tile in self.tiles for s in tile.segments if s.digest]
        if added:
            found.add(names.LATTICE)
        if any(segment.below_crc32 for segment in added):
            found.add(names.CRC32)
        if any(codec.name in names.MOMENT_CODECS for codec in self.codecs):
            found.add(names.MOMENTS)
        return frozenset(found | ({names.DENSE_TILES} if self.dense else set()))


def dump_process(manifest: ProcessManifest) -> bytes:
    """Canonical bytes of a process manifest; boxes become flat lists."""
    document = to_json(dataclasses.replace(manifest, tiles=(), dense=None))
    dense = manifest.dense
    if dense is not None:
        document["dense"] = {
            "array": to_json(dense.array),
            "tiles": [
                {
                    "leaf": tile.leaf,
                    "box": box_json(tile.box),
                    "offset": tile.offset,
                    "bytes": tile.bytes,
                }
                for tile in dense.tiles
            ],
        }
    entries = list(document["arrays"].values())
    for entry in [*entries, *([document["dense"]["array"]] if dense else ())]:
        if entry["compressed"] is None:
            del entry["compressed"]
    for name in ("row_errors", "motion", "outgrown", "dense"):
        if not document[name]:
            del document[name]
    document["tiles"] = [_tile_json(tile) for tile in manifest.tiles]
    return dump_document({"format": PROCESS_FORMAT, **document})


def _tile_json(tile: Tile) -> dict[str, object]:
    # Spelled out, to be quick: nearly all of a manifest of many tables is tiles.
    return {
        "table": tile.table,
        "leaf": tile.leaf,
        "box": box_json(tile.box),
        "segments": [
            {
                "codec": segment.codec,
                "row_ids": segment.row_ids,
                "parts": {
                    name: {"array": part.array, "offset": part.offset}
                    for name, part in segment.parts.items()
                },
                **{
                    name: found
                    for name in _DIGESTS
                    if (found := getattr(segment, name)) is not None
                },
            }
            for segment in tile.segments
        ],
        **({"layer": tile.layer} if tile.layer else {}),
    }


def load_process(data: bytes, where: str) -> ProcessManifest:
    """Parses a process manifest; `where` names the file in errors.

    Raises:
        ManifestError: with every problem found.
    """
    fields = open_document(data, where, PROCESS_FORMAT)
    manifest = ProcessManifest(
        uuid=fields.hexadecimal("uuid", 32),
        process=fields.integer("process"),
        arrays=fields.mapping("arrays", _read_array),
        codecs=fields.objects("codecs", read_named),
        row_ids=fields.objects("row_ids", _read_row_ids, _quick_row_ids),
        tiles=fields.objects("tiles", _read_tile, _quick_tile),
        slot_bytes=fields.integer("slot_bytes"),
        version=fields.integer("version", minimum=1),
        row_errors=fields.mapping("row_errors", _read_error)
        if fields.has("row_errors")
        else None,
        motion=fields.mapping("motion", read_motion) if fields.has("motion") else None,
        outgrown=fields.texts("outgrown") if fields.has("outgrown") else (),
        dense=_read_dense(fields.child("dense")) if fields.has("dense") else None,
    )
    problems = [*fields.problems, *_inconsistencies(manifest)]
    if problems:
        raise errors.ManifestError(
            f"{where} is not valid ({count_of(len(problems), 'problem')})", problems
        )
    return manifest


def _read_error(fields: Fields) -> SampledError:
    return SampledError(
        rows=fields.integer("rows", minimum=1),
        mean=fields.number("mean"),
        worst=fields.number("worst"),
    )


def _read_array(fields: Fields) -> ArrayEntry:
    entry = ArrayEntry(
        dtype=fields.text("dtype"),
        length=fields.integer("length", minimum=1, most=_MOST_ELEMENTS),
        chunk=fields.integer("chunk", minimum=1, most=_MOST_ELEMENTS),
        metadata_bytes=fields.integer("metadata_bytes"),
        metadata_sha256=fields.hexadecimal("metadata_sha256", 64),
        crc32c=fields.integers("crc32c"),
        compressed=_read_compressed(fields.child("compressed"))
        if fields.has("compressed")
        else None,
    )
    chunks = -(-entry.length // entry.chunk)
    if len(entry.crc32c) != chunks:
        fields.problems.append(
            f"{fields.where}.crc32c: expected {chunks} checksums,"
            f" got {len(entry.crc32c)}"
        )
    if entry.compressed is not None and len(entry.compressed.bytes) != chunks:
        fields.problems.append(
            f"{fields.where}.compressed.bytes: expected {chunks} sizes,"
            f" got {len(entry.compressed.bytes)}"
        )
    return entry


def _read_dense(fields: Fields) -> DensePart:
    return DensePart(
        array=_read_array(fields.child("array")),
        tiles=fields.objects("tiles", read_dense_tile, quick_dense_tile),
    )


def _read_compressed(fields: Fields) -> Compressed:
    return Compressed(
        codec=fields.text("codec", choices=tuple(CHUNK_CODECS)),
        bytes=fields.integers("bytes", minimum=1),
    )


def _read_row_ids(fields: Fields) -> RowIds:
    return RowIds(
        form=fields.text("form", choices=_FORMS),
        offset=fields.integer("offset"),
        bytes=fields.integer("bytes"),
        count=fields.integer("count"),
    )


def _quick_row_ids(item: Any) -> RowIds | None:
    """Reads row ids without problems, as `_read_row_ids` does; None for any others."""
    try:
        form, offset = item["form"], item["offset"]
        size, count = item["bytes"], item["count"]
    except (KeyError, TypeError):
        return None
    if form in _FORMS and is_integer(offset) and is_integer(size) and is_integer(count):
        return RowIds(form=form, offset=offset, bytes=size, count=count)
    return None


def _quick_tile(item: Any) -> Tile | None:
    """Reads a tile without problems, as `_read_tile` does; None for any other."""
    try:
        table, leaf, flat = item["table"], item["leaf"], item["box"]
        listed = item["segments"]
        segments = [_quick_segment(segment) for segment in listed]
    except (KeyError, TypeError, AttributeError):
        return None
    named = type(table) is str and type(leaf) is str and type(listed) is list
    if not named or None in segments or type(flat) is not list or "layer" in item:
        return None
    bounds = cast("list[int]", flat)
    if not bounds or len(bounds) % 2 or not all(map(is_integer, bounds)):
        return None
    box = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    if any(start >= stop for start, stop in box):
        return None
    found = cast("list[Segment]", segments)
    return Tile(table=table, leaf=leaf, box=box, segments=tuple(found))


def _quick_segment(item: Any) -> Segment | None:
    codec, row_ids = item["codec"], item["row_ids"]
    if not (is_integer(codec) and is_integer(row_ids)) or any(
        name in item for name in _DIGESTS
    ):
        return None
    parts: dict[str, PartRef] = {}
    for name, part in item["parts"].items():
        array, offset = part["array"], part["offset"]
        if type(array) is not str or not is_integer(offset):
            return None
        parts[name] = PartRef(array=array, offset=offset)
    return Segment(codec=codec, row_ids=row_ids, parts=parts)


def _read_segment(fields: Fields) -> Segment:
    return Segment(
        codec=fields.integer("codec"),
        row_ids=fields.integer("row_ids"),
        parts=fields.mapping(
            "parts",
            lambda f: PartRef(array=f.text("array"), offset=f.integer("offset")),
        ),
        below_crc32=(
            fields.hexadecimal("below_crc32", 16) if fields.has("below_crc32") else None
        ),
        below=fields.hexadecimal("below", 16) if fields.has("below") else None,
    )


def _read_tile(fields: Fields) -> Tile:
    return Tile(
        table=fields.text("table"),
        leaf=fields.text("leaf"),
        box=_read_box(fields),
        segments=fields.objects("segments", _read_segment),
        layer=fields.integer("layer", minimum=1) if fields.has("layer") else 0,
    )


def _read_box(fields: Fields) -> Box:
    flat = fields.integers("box")
    pairs = tuple(zip(flat[::2], flat[1::2], strict=False))
    if not flat or len(flat) % 2 or any(start >= stop for start, stop in pairs):
        fields.problems.append(
            f"{fields.where}.box: expected start and stop of each dimension,"
            f" got {list(flat)}"
        )
        return ((0, 1),)
    return pairs


def _inconsistencies(manifest: ProcessManifest) -> list[str]:
    """Finds references that lead nowhere: checked once here, so readers can follow them."""
    problems = [
        f"arrays.{name}: expected the name of a folder"
        for name in manifest.arrays
        if name.startswith(".") or not names.is_component(name)
    ]
    for i, tile in enumerate(manifest.tiles):
        for segment in tile.segments:
            if segment.codec >= len(manifest.codecs):
                problems.append(f"tiles[{i}]: codec {segment.codec} is not listed")
            if segment.row_ids >= len(manifest.row_ids):
                problems.append(f"tiles[{i}]: row ids {segment.row_ids} not listed")
            elif manifest.row_ids[segment.row_ids].count == 0:
                problems.append(f"tiles[{i}]: a segment without rows")
            problems += [
                f"tiles[{i}]: array {part.array} is not listed"
                for part in segment.parts.values()
                if part.array not in manifest.arrays
            ]
    ids = manifest.arrays.get(names.ROW_IDS_ARRAY)
    for i, row_ids in enumerate(manifest.row_ids):
        if row_ids.bytes and (
            ids is None or row_ids.offset + row_ids.bytes > ids.length
        ):
            problems.append(f"row_ids[{i}]: outside the array of row ids")
    if manifest.dense is not None:
        length = manifest.dense.array.length
        problems += [
            f"dense.tiles[{i}]: outside the array of dense leaves"
            for i, tile in enumerate(manifest.dense.tiles)
            if tile.offset + tile.bytes > length
        ]
        if manifest.dense.array.dtype != "uint8":
            problems.append(
                f"dense.array.dtype: expected uint8, got {manifest.dense.array.dtype}"
            )
    return problems


def lacking_rows(process: ProcessManifest) -> list[Tile]:
    """Finds tiles without a segment of all rows, which each tile of a full checkpoint has."""
    return [
        tile
        for tile in process.tiles
        if not tile.layer
        and all(
            process.row_ids[segment.row_ids].count != tile.box[0][1] - tile.box[0][0]
            for segment in tile.segments
        )
    ]


def check_cover(
    tables: Sequence[TableEntry], tiles: Iterable[Tile], where: str
) -> None:
    """Checks that the tiles of each layer of all processes cover every leaf exactly once.

    A layer above the lowest has to cover only the leaves of which it has tiles.

    Raises:
        ManifestError: naming each leaf that is not covered or covered twice.
    """
    by_leaf: dict[tuple[str, str], dict[int, list[Box]]] = {}
    for tile in tiles:
        layers = by_leaf.setdefault((tile.table, tile.leaf), {})
        layers.setdefault(tile.layer, []).append(tile.box)
    problems: list[str] = []
    for table in tables:
        for leaf in table.leaves:
            name = f"{table.name}.{leaf.name}"
            layers = by_leaf.pop((table.name, leaf.name), {})
            for boxes in (layers.pop(0, []), *layers.values()):
                problems += cover_problems(name, leaf.shape, boxes)
    problems += [f"{table}.{leaf}: not a leaf of this step" for table, leaf in by_leaf]
    if problems:
        raise errors.ManifestError(
            f"the tiles of {where} do not cover its tables", problems
        )
