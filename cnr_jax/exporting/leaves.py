"""Leaves of a step for an export, and their values block by block."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.dense_part import OrbaxDense, open_dense
from cnr_jax.format.manifest import DenseLeaf, LeafEntry, TableEntry
from cnr_jax.repository.compare import logical_rows
from cnr_jax.repository.reading import table_entry
from cnr_jax.repository.replay.dense_tiles import TiledDense
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.repository.table_sizes import codec_text
from cnr_jax.rows.codecs import Raw
from cnr_jax.state.table import few

# Decoded bytes of a leaf that are in memory at a time; also the bytes of a chunk that is written.
BLOCK_BYTES = 8 << 20
# Dtypes in which Python's own numbers are exported, and leaves that are no numbers.
_SCALARS = {"bool": "bool", "int": "int64", "float": "float64"}
_WORDS = {"key": "uint32", "text": "uint8"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExportedLeaf:
    """Leaf that is to be exported.

    Attributes:
        path: path in the state.
        kind: `"row"` for tables and slots, else as in the manifest: `"array"`, `"scalar"`,
            `"key"` or `"text"`. A text is in the metadata alone, unless the form can store strings.
        shape: shape of the values; a table has its rows without padding, keys have the axes of
            their words too.
        dtype: dtype of the values.
        told: metadata of the leaf.
        value: the value itself, if it is not an array: a number, keys or a string.
        cut: function that yields the values in blocks of a number of entries of the first axis; the
            last block may have fewer. An array without axes comes as it is.
    """

    path: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    told: dict[str, Any]
    value: Callable[[], Any]
    cut: Callable[[int], Iterator[np.ndarray]]

    @property
    def name(self) -> str:
        """The path, joined."""
        return "/".join(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        if self.kind == "text":
            return 0
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def block_rows(self) -> int:
        """Entries of the first axis in a block of `BLOCK_BYTES`; one if a single one has more."""
        return max(
            1, BLOCK_BYTES // max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)
        )

    def blocks(self) -> Iterator[np.ndarray]:
        """The values, in blocks of `block_rows`."""
        return self.cut(self.block_rows)

    def widened(self, dtype: np.dtype) -> ExportedLeaf:
        """Copy of the leaf in a dtype that holds all its values; its metadata name the old one."""
        return dataclasses.replace(
            self,
            dtype=dtype,
            told={**self.told, "saved_dtype": self.dtype.name},
            cut=lambda rows: (block.astype(dtype) for block in self.cut(rows)),
        )


def leaves_of(
    chain: Sequence[StepReader],
    tables: Sequence[str] | None,
    patterns: Sequence[str] | None,
) -> tuple[list[ExportedLeaf], TiledDense | OrbaxDense]:
    """Finds the leaves that were asked for, those with the largest elements first.

    In a file that holds the leaves in this order, each begins at a multiple of its element size.
    Also returns the dense part, which reads dense leaves.

    Args:
        chain: chain of the step, the full checkpoint first.
        tables: names of tables, which are taken with their slots.
        patterns: patterns of paths, as `fnmatch` takes them. If neither is given, all leaves are
            taken.

    Raises:
        OptionError: if a table or a pattern fits nothing.
    """
    manifest = chain[-1].manifest
    dense = manifest.dense_leaves
    # Paths of two leaves may read alike, if a key has a slash in it.
    paths: dict[str, list[tuple[str, ...]]] = {}
    for leaf in [*(x for t in manifest.tables for x in t.leaves), *dense]:
        paths.setdefault("/".join(leaf.path), []).append(leaf.path)
    wanted = set[tuple[str, ...]]()
    if tables is None and patterns is None:
        wanted = {path for alike in paths.values() for path in alike}
    for name in tables or ():
        wanted |= {leaf.path for leaf in table_entry(manifest, name).leaves}
    for pattern in patterns or ():
        found = fnmatch.filter(paths, pattern)
        if not found:
            raise errors.OptionError(
                f"no leaf fits {pattern!r} in step {manifest.step}\n"
                f"  got leaves {few(sorted(paths))}\n"
                "  hint: a path, such as 'params/w', or a pattern, such as 'params/*'",
                kind="no_table",
            )
        wanted |= {path for name in found for path in paths[name]}
    rows = [
        _of_table(chain, table, leaf)
        for table in manifest.tables
        for leaf in table.leaves
        if leaf.path in wanted
    ]
    rest = [leaf for leaf in dense if leaf.path in wanted]
    # Sorting is stable, so dense leaves keep their order, in which they are read.
    rest.sort(key=lambda leaf: -_dtype_of(leaf).itemsize)
    part = open_dense(chain[-1], rest)
    found = rows + [_dense(leaf, part) for leaf in rest]
    return sorted(found, key=lambda leaf: -leaf.dtype.itemsize), part


def _of_table(
    chain: Sequence[StepReader], table: TableEntry, leaf: LeafEntry
) -> ExportedLeaf:
    dtype = chain[-1].dtypes[table.name, leaf.name]
    shape = (table.rows, *leaf.shape[1:])

    def cut(rows: int) -> Iterator[np.ndarray]:
        for start in range(0, table.rows, rows):
            stop = min(start + rows, table.rows)
            yield logical_rows(chain, table.name, leaf.name, start, stop)

    # Every codec in the chain, and whether it rounds.
    codecs = {
        codec_text(named.name, named.configuration): named.name != Raw.name
        for reader in chain
        for process in reader.processes
        for tile in process.tiles
        if (tile.table, tile.leaf) == (table.name, leaf.name)
        for named in (process.codecs[segment.codec] for segment in tile.segments)
    }
    return ExportedLeaf(
        path=leaf.path,
        kind="row",
        shape=shape,
        dtype=dtype,
        told={
            "table": table.name,
            "leaf": leaf.name,
            "codecs": list(codecs),
            "lossy": any(codecs.values()),
        },
        value=lambda: None,
        cut=cut,
    )


def _dtype_of(leaf: DenseLeaf) -> np.dtype:
    """Dtype of the values that are written for a leaf; arbitrary for a text."""
    if leaf.kind in _WORDS:
        return np.dtype(_WORDS[leaf.kind])
    return numpy_dtype(_SCALARS.get(leaf.dtype, leaf.dtype))


def _dense(leaf: DenseLeaf, part: TiledDense | OrbaxDense) -> ExportedLeaf:
    told: dict[str, Any] = {"lossy": False}
    shape, dtype = leaf.shape, _dtype_of(leaf)
    if leaf.kind == "text":
        told["text"] = leaf.value
    elif leaf.kind == "key":
        told["key"] = leaf.dtype
        words = jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=leaf.dtype))
        )
        shape = (*shape, *words.shape)

    def value() -> Any:
        return leaf.value if leaf.kind == "text" else part.value(leaf.path)

    def cut(rows: int) -> Iterator[np.ndarray]:
        if leaf.kind == "array" and shape:
            # Only the part that is asked for is read.
            for start in range(0, shape[0], rows):
                stop = min(start + rows, shape[0])
                box = ((start, stop), *((0, size) for size in shape[1:]))
                yield np.asarray(part.part(leaf.path, box), dtype)
            return
        found = value()
        if leaf.kind == "key":
            found = jax.random.key_data(found)
        array = np.asarray(found, dtype)
        if array.shape != shape:
            raise errors.FormatError(
                f"{leaf.kind} {'/'.join(leaf.path)} has the shape {list(array.shape)},"
                f" expected {list(shape)}"
            )
        if not shape:
            yield array
        for start in range(0, shape[0] if shape else 0, rows):
            yield array[start : start + rows]

    return ExportedLeaf(
        path=leaf.path,
        kind=leaf.kind,
        shape=shape,
        dtype=dtype,
        told=told,
        value=value,
        cut=cut,
    )
