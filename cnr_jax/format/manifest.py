"""Manifest of a checkpoint: what it is, what it needs, and the digests of its parts.

`manifest.json` is written last: a step without it does not exist. It names the manifests of the
processes by size and digest, and the parent by directory and uuid. It holds what a resumed run
needs to decide about its next save. SPEC.md describes each field.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.encodings import (
    EncodingEntry,
    NamedConfiguration,
    read_encoding,
    read_named,
)
from cnr_jax.format.fields import (
    Fields,
    dump_document,
    is_integer,
    is_path,
    open_document,
    read_alike,
)
from cnr_jax.integers import LARGEST
from cnr_jax.texts import count_of

Kind = Literal["full", "delta"]
Tracking = Literal["recorded", "fingerprint", "audited"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParentRef:
    """The checkpoint that a delta applies to.

    Attributes:
        directory: name of its step directory, relative to the root, so that runs can be moved.
        uuid: identity of the parent; a step of another run in the same place is not the parent.
        clock: clock of the parent, counted in the lineage of the child.
    """

    directory: str
    uuid: str
    clock: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Point where a branch left an older one: the last step of that generation on the branch."""

    generation: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and SHA-256 of one file, its path relative to the item directory."""

    path: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafEntry:
    """One array of a table: the table itself (`"table"`) or a slot."""

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """One table: logical rows, how they map to stored rows, and its leaves."""

    name: str
    rows: int
    padded_rows: int
    layout: NamedConfiguration
    leaves: tuple[LeafEntry, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseLeaf:
    """One leaf that is not part of a table.

    Attributes:
        kind: `array`, `scalar` and `key` are stored in files; `text` is the string in `value`.
        shape: shape of an array, or of a key without the words of its data.
        dtype: dtype of an array, or implementation of a key.
        value: the string itself, for `text`.
        numpy: whether an array is one of numpy rather than of jax; None: it is of jax, or the
            manifest does not say.
    """

    path: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    value: str | None = None
    numpy: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One committed save of the current branch, as the policy sees it, or several in a row.

    Attributes:
        step: step of the last of them.
        kind: kind of all of them.
        bytes: bytes of all of them together; `rows` and `secs` are sums as well.
        saves: how many they are.
    """

    step: int
    kind: Kind
    bytes: int
    rows: int
    secs: float
    saves: int = 1


# The most entries of a history, however many saves a chain has: else manifests would grow.
MAX_HISTORY = 48


def bounded_history(history: Sequence[HistoryEntry]) -> tuple[HistoryEntry, ...]:
    """A history of at most `MAX_HISTORY` entries: neighbouring deltas are put together.

    Entries that stand for the fewest saves are joined first, and of these the oldest, so that all
    parts of a long history keep the same detail. The last entry is always one save.

    Example:
        >>> saves = [HistoryEntry(step=0, kind="full", bytes=90, rows=9, secs=0.5)]
        >>> for step in range(1, 100):
        ...     delta = HistoryEntry(step=step, kind="delta", bytes=10, rows=1, secs=0.1)
        ...     saves = list(bounded_history([*saves, delta]))
        >>> len(saves), sum(entry.saves for entry in saves), saves[1].step, saves[1].bytes
        (48, 100, 4, 40)
    """
    found = list(history)
    while len(found) > MAX_HISTORY:
        pairs = [
            (found[i].saves + found[i + 1].saves, i)
            for i in range(len(found) - 2)  # the last entry stays one save
            if found[i].kind == found[i + 1].kind == "delta"
        ]
        if not pairs:
            break
        _, at = min(pairs)
        older, newer = found[at : at + 2]
        found[at : at + 2] = [
            HistoryEntry(
                step=newer.step,
                kind="delta",
                # Not more than manifests hold, whatever an earlier one says.
                bytes=min(older.bytes + newer.bytes, LARGEST),
                rows=min(older.rows + newer.rows, LARGEST),
                secs=min(round(older.secs + newer.secs, 6), sys.float_info.max),
                saves=min(older.saves + newer.saves, LARGEST),
            )
        ]
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Rows and bytes of a whole step, over all processes.

    Attributes:
        rows: number of rows stored, each counted once for its table, not for its slots.
        table_bytes: bytes of the files of arrays, without those of slots.
        slot_bytes: encoded bytes of slots; in compressed arrays their share of the files.
        dense_bytes: bytes of the files under `dense/`.
        manifest_bytes: bytes of the process manifests.
    """

    rows: int
    table_bytes: int
    slot_bytes: int
    dense_bytes: int
    manifest_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledMotion:
    """Motion of rows since the run began or was restored, from a sample of them.

    Attributes:
        rows: number of rows that had moved, at least one.
        even_bits: about the width of codes whose error equals the motion: the mean over rows of
            `log2(error / motion)`, where `error` is that of dithered codes of one step over the
            range of the row, and `motion` is the distance that the row has moved.
    """

    rows: int
    even_bits: float


def joined_motion(found: Iterable[SampledMotion]) -> SampledMotion | None:
    """Joins the motion of several samples; None if there is none.

    Example:
        >>> few = SampledMotion(rows=1, even_bits=2.0)
        >>> joined_motion([few, SampledMotion(rows=3, even_bits=4.0)])
        SampledMotion(rows=4, even_bits=3.5)
    """
    samples = list(found)
    rows = sum(each.rows for each in samples)
    if not rows:
        return None
    total = sum(each.rows * each.even_bits for each in samples)
    return SampledMotion(rows=min(rows, LARGEST), even_bits=round(total / rows, 4))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`; see SPEC.md, section 5."""

    uuid: str
    step: int
    kind: Kind
    generation: int
    lineage: str
    tracking: Tracking
    recorded_clock: int | None
    fingerprint_clock: int | None
    parent: ParentRef | None
    processes: tuple[FileDigest, ...]
    dense_files: tuple[FileDigest, ...]
    dense_leaves: tuple[DenseLeaf, ...]
    tables: tuple[TableEntry, ...]
    totals: Totals
    policy: str
    reason: str
    history: tuple[HistoryEntry, ...]
    restores: int
    written_at_unix_secs: float
    writer: Mapping[str, Any]
    required_features: tuple[str, ...] = ()
    version: int = names.VERSION
    # None: the run of all steps with manifests that name none.
    run: str | None = None
    # Empty: no step of an older branch is part of this one. None: the manifest does not say.
    forks: tuple[Fork, ...] | None = None
    # None: the manifest does not say.
    encoding: EncodingEntry | None = None
    # None: it is not known.
    motion: SampledMotion | None = None
    # Uuids of the checkpoints of the same state that this one stands for; None: there are none.
    stands_for: tuple[str, ...] | None = None
    # Tables whose rows have grown out of their step, as far as this save has looked.
    outgrown: tuple[str, ...] = ()

    @property
    def has_dense_tiles(self) -> bool:
        """Whether dense leaves are stored as tiles; else by Orbax."""
        return names.DENSE_TILES in self.required_features


_PLAIN = frozenset({str, int, float, bool, type(None)})


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def to_json(value: Any) -> Any:
    """JSON form of the dataclasses of this package: tuples as lists, nothing left out."""
    kind = cast("type[Any]", type(value))
    if dataclasses.is_dataclass(kind):
        value = {name: getattr(value, name) for name in _field_names(kind)}
    # Nearly all is plain, and left as it is: a thousand tables on eight devices are 700,000 values.
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return {key: x if type(x) in _PLAIN else to_json(x) for key, x in items}
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        return [x if type(x) in _PLAIN else to_json(x) for x in items]
    return value


def dump(manifest: Manifest) -> bytes:
    """Canonical bytes of a manifest, with a digest of themselves; see SPEC.md, section 5.1.

    Sorted keys, no spaces, one final newline; `sha256` is the digest of the same document
    without that key, so that any change of any byte shows.
    """
    document: dict[str, Any] = {"format": names.FORMAT, **to_json(manifest)}
    for entry in document["history"]:
        if entry["saves"] == 1:
            del entry["saves"]
    for leaf in document["dense_leaves"]:
        if leaf["numpy"] is None:
            del leaf["numpy"]
    for name in ("forks", "encoding", "motion", "stands_for"):
        if document[name] is None:
            del document[name]
    if not document["outgrown"]:
        del document["outgrown"]
    encoding = document.get("encoding", {})
    if encoding.get("rounding", "") is None:
        del encoding["rounding"]
    return dump_document(document)


def load(data: bytes, where: str) -> Manifest:
    """Parses a manifest; `where` names the file in errors.

    Raises:
        ManifestError: with every problem found.
        UnsupportedVersionError: if the checkpoint needs a newer reader.
    """
    fields = open_document(data, where, names.FORMAT)
    manifest = _read_manifest(fields)
    if manifest.kind == "delta" and manifest.parent is None:
        fields.problems.append("parent: a delta needs a parent, got null")
    if manifest.kind == "full" and manifest.parent is not None:
        fields.problems.append("parent: a full checkpoint has no parent")
    fields.problems += _misplaced(manifest)
    if fields.problems:
        count = count_of(len(fields.problems), "problem")
        raise errors.ManifestError(f"{where} is not valid ({count})", fields.problems)
    return manifest


def _misplaced(manifest: Manifest) -> list[str]:
    """Lists leaves that no state can have: two in one place, or one below another."""
    of_tables = (leaf.path for table in manifest.tables for leaf in table.leaves)
    paths = sorted([*of_tables, *(leaf.path for leaf in manifest.dense_leaves)])
    # In sorted order, what is below a leaf comes right after it.
    return [
        f"path {list(below)}: is at or below another leaf's, {list(path)}"
        for path, below in itertools.pairwise(paths)
        if below[: len(path)] == path
    ]


def _read_manifest(fields: Fields) -> Manifest:
    kind = fields.text("kind", choices=("full", "delta"))
    return Manifest(
        uuid=fields.hexadecimal("uuid", 32),
        step=fields.integer("step"),
        kind=cast("Kind", kind),
        generation=fields.integer("generation", minimum=1),
        lineage=fields.hexadecimal("lineage", 32),
        tracking=cast("Tracking", fields.text("tracking", choices=get_args(Tracking))),
        recorded_clock=_optional_clock(fields, "recorded_clock"),
        fingerprint_clock=_optional_clock(fields, "fingerprint_clock"),
        parent=read_parent(fields.child("parent")) if fields.has("parent") else None,
        processes=fields.objects("processes", _read_digest, _quick_digest),
        dense_files=fields.objects("dense_files", _read_digest, _quick_digest),
        dense_leaves=read_alike(
            fields, "dense_leaves", _read_dense_leaf, lambda leaf: leaf.kind == "text"
        ),
        tables=read_alike(fields, "tables", _read_table),
        totals=read_totals(fields.child("totals")),
        policy=fields.text("policy"),
        reason=fields.text("reason"),
        history=fields.objects("history", _read_history, _quick_history),
        restores=fields.integer("restores"),
        written_at_unix_secs=fields.number("written_at_unix_secs"),
        writer=fields.any("writer") or {},
        required_features=fields.texts("required_features"),
        version=fields.integer("version", minimum=1),
        run=fields.hexadecimal("run", 32) if fields.has("run") else None,
        forks=fields.objects("forks", read_fork) if fields.has("forks") else None,
        encoding=read_encoding(fields.child("encoding"))
        if fields.has("encoding")
        else None,
        motion=read_motion(fields.child("motion")) if fields.has("motion") else None,
        stands_for=read_uuids(fields, "stands_for")
        if fields.has("stands_for")
        else None,
        outgrown=fields.texts("outgrown") if fields.has("outgrown") else (),
    )


def read_uuids(fields: Fields, key: str) -> tuple[str, ...]:
    """Reads a list of uuids."""
    found = fields.texts(key)
    wrong = [each for each in found if not names.is_hex(each, 32)]
    if wrong:
        fields.problems.append(f"{key}: expected uuids, got {wrong[0][:40]!r}")
    return found


def read_motion(fields: Fields) -> SampledMotion:
    """Reads a `SampledMotion`."""
    return SampledMotion(
        rows=fields.integer("rows", minimum=1),
        # Within these bounds powers of two do not overflow.
        even_bits=max(-400.0, min(fields.any_number("even_bits"), 400.0)),
    )


def _optional_clock(fields: Fields, key: str) -> int | None:
    return fields.integer(key) if fields.has(key) else None


def read_parent(fields: Fields) -> ParentRef:
    """Reads a `ParentRef`."""
    return ParentRef(
        directory=fields.name("directory"),
        uuid=fields.hexadecimal("uuid", 32),
        clock=fields.integer("clock"),
    )


def read_fork(fields: Fields) -> Fork:
    """Reads a `Fork`."""
    return Fork(
        generation=fields.integer("generation", minimum=1), step=fields.integer("step")
    )


def _read_digest(fields: Fields) -> FileDigest:
    return FileDigest(
        path=fields.path("path"),
        bytes=fields.integer("bytes"),
        sha256=fields.hexadecimal("sha256", 64),
    )


def _quick_digest(item: Any) -> FileDigest | None:
    """Reads a digest without problems, as `_read_digest` does; None for any other."""
    try:
        path, size, digest = item["path"], item["bytes"], item["sha256"]
    except (KeyError, TypeError):
        return None
    if type(path) is str and is_integer(size) and type(digest) is str:
        if is_path(path) and names.is_hex(digest, 64):
            return FileDigest(path=path, bytes=size, sha256=digest)
    return None


def _read_leaf(fields: Fields) -> LeafEntry:
    return LeafEntry(
        name=fields.text("name"),
        path=fields.texts("path"),
        shape=fields.integers("shape"),
        dtype=fields.text("dtype"),
    )


def _read_table(fields: Fields) -> TableEntry:
    table = TableEntry(
        name=fields.text("name"),
        rows=fields.integer("rows", minimum=1),
        padded_rows=fields.integer("padded_rows", minimum=1),
        layout=read_named(fields.child("layout")),
        leaves=fields.objects("leaves", _read_leaf),
    )
    where = fields.where
    if table.rows > table.padded_rows:
        fields.problems.append(
            f"{where}.rows: expected at most padded_rows "
            f"({table.padded_rows}), got {table.rows}"
        )
    if not table.leaves or table.leaves[0].name != "table":
        fields.problems.append(f"{where}.leaves: expected `table` as the first leaf")
    for leaf in table.leaves:
        if not leaf.shape or leaf.shape[0] != table.padded_rows:
            fields.problems.append(
                f"{where}.leaves.{leaf.name}.shape: expected {table.padded_rows} rows,"
                f" got {list(leaf.shape)}"
            )
    return table


def _read_dense_leaf(fields: Fields) -> DenseLeaf:
    kind = fields.text("kind", choices=("array", "scalar", "key", "text"))
    path, shape = fields.texts("path"), fields.integers("shape")
    if not path:
        fields.problems.append(f"{fields.where}.path: expected keys, got none")
    if 0 in shape or (shape and kind in ("scalar", "text")):
        fields.problems.append(
            f"{fields.where}.shape: expected one with elements, of a {kind} none,"
            f" got {list(shape)}"
        )
    return DenseLeaf(
        path=path,
        kind=kind,
        shape=shape,
        dtype=fields.text("dtype"),
        value=fields.text("value") if kind == "text" else None,
        numpy=fields.boolean("numpy") if fields.has("numpy") else None,
    )


def _read_history(fields: Fields) -> HistoryEntry:
    return HistoryEntry(
        step=fields.integer("step"),
        kind=cast("Kind", fields.text("kind", choices=("full", "delta"))),
        bytes=fields.integer("bytes"),
        rows=fields.integer("rows"),
        secs=fields.number("secs"),
        saves=fields.integer("saves", minimum=1) if fields.has("saves") else 1,
    )


def _quick_history(item: Any) -> HistoryEntry | None:
    """Reads an entry without problems, as `_read_history` does; None for any other."""
    try:
        step, kind, saves = item["step"], item["kind"], item.get("saves", 1)
        size, rows, secs = item["bytes"], item["rows"], item["secs"]
    except (KeyError, TypeError, AttributeError):
        return None
    # Types alone: values are checked once for all manifests that list a save.
    if type(kind) is str and type(secs) is float and type(saves) is int:
        if type(step) is type(size) is type(rows) is int:
            return _history_entry(step, kind, size, rows, secs, saves)
    return None


@functools.lru_cache(maxsize=4096)
def _history_entry(
    step: int, kind: str, size: int, rows: int, secs: float, saves: int
) -> HistoryEntry | None:
    if not (is_integer(step) and is_integer(size) and is_integer(rows)):
        return None
    if not is_integer(saves, 1) or not 0 <= secs < float("inf"):
        return None
    if kind != "full" and kind != "delta":
        return None
    return HistoryEntry(
        step=step, kind=kind, bytes=size, rows=rows, secs=secs, saves=saves
    )


def read_totals(fields: Fields) -> Totals:
    """Reads `Totals`."""
    return Totals(**{name: fields.integer(name) for name in _field_names(Totals)})
