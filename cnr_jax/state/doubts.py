"""Dense leaves that may be slots of a table: `find_tables` cannot tell, and asks the user.

A slot that is taken for dense is saved whole. It costs bytes at every save, and nothing else shows
it. A leaf that is wrongly taken for a slot may cost data. So the user has to decide, in
`TableSpec(slots=...)`; this module writes the text for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cnr_jax.state.layouts import Identity
from cnr_jax.state.mirrors import Mirrors
from cnr_jax.state.paths import PathIndex, StateLeaf, normalise
from cnr_jax.state.table import Path, Table, few
from cnr_jax.state.trees import Trees, is_copy, shape_of

# Arbitrary: leaves may have fewer rows than this in common by chance.
_TELLING_ROWS = 256
# Share of the bytes of a table below which leaves in doubt are not worth a word.
_SHARE = 0.01


class Doubts(NamedTuple):
    """Dense leaves that may be slots, with a question about each, and texts for the user.

    Attributes:
        questions: question about a leaf, by its path.
        texts: advice for each table whose leaves in doubt cost more than a little.
    """

    questions: Mapping[Path, str]
    texts: tuple[str, ...]


def perhaps_slot(path: tuple[str, ...], leaf: Any, table: Table) -> bool:
    """Whether a dense leaf looks like a slot of a table: by its name, and a row for each row.

    It was not found as one: the paths of slots end with the whole path of the table.
    """
    is_alike = shape_of(leaf)[:1] in {(table.rows,), (table.padded_rows,)}
    return is_alike and normalise(path)[-1:] == normalise(table.path)[-1:]


def find_doubts(
    index: PathIndex,
    mirrors: Mirrors,
    tables: Sequence[Table],
    dense: Sequence[tuple[Path, Any]],
) -> Doubts:
    """Finds the dense leaves that may be slots.

    Args:
        index: index of the state.
        mirrors: mirrors of the same state.
        tables: tables whose slots nobody has listed.
        dense: leaves of no table, by path.
    """
    tables = sorted(tables, key=lambda table: index.order[table.path])
    by_rows: dict[int, list[Table]] = defaultdict(list)
    for table in tables:
        by_rows[table.padded_rows].append(table)
    leaves = [index.by_path[path] for path, x in dense if shape_of(x)[:1] != ()]
    leaves = [entry for entry in leaves if shape_of(entry.value)[0] in by_rows]
    trees = mirrors.trees
    of = {e.path: mirrors.of(e) for e in leaves if not trees.in_optimizer(e.path)}
    # What surely is a parameter of its own, and what repeats it.
    known = [e for e in leaves if e.path in of and not is_copy(e.path)]
    others = [e for e in known if of[e.path] or e.is_param or "params" in e.path]
    taken = {m.entry.path for entry in others for m in of[entry.path]}
    taken |= {entry.path for entry in others}
    possible: dict[tuple[str, ...], list[StateLeaf]] = defaultdict(list)
    for entry in leaves:
        if entry.path not in taken:
            alike = by_rows[shape_of(entry.value)[0]]
            possible[_owners(entry, alike, others, trees)].append(entry)
    found: dict[str, list[StateLeaf]] = defaultdict(list)
    for owners, entries in possible.items():
        # Tables that are alike share the leaves, in the order of the state.
        entries.sort(key=lambda entry: index.order[entry.path])
        for i, name in enumerate(owners):
            part = slice(
                i * len(entries) // len(owners), (i + 1) * len(entries) // len(owners)
            )
            found[name] += entries[part]
    guessed = {
        e.path for owners, entries in possible.items() if owners[1:] for e in entries
    }
    questions: dict[Path, str] = {}
    texts = []
    for table in tables:
        entries = found.get(table.name, [])
        written = _written(table, entries)
        for entry in entries:
            questions[entry.path] = f"a slot of table {table.name!r}? {written}"
        size = sum(_nbytes(entry.value) for entry in entries)
        if size > _SHARE * table.leaf.nbytes:
            is_guess = any(entry.path in guessed for entry in entries)
            texts.append(_text(table, entries, size, written, is_guess))
    return Doubts(questions, tuple(texts))


def _owners(
    entry: StateLeaf,
    tables: Sequence[Table],
    others: Sequence[StateLeaf],
    trees: Trees,
) -> tuple[str, ...]:
    """Names of the tables that a leaf may be a slot of, among those of as many rows."""
    if not isinstance(entry.value, jax.Array | jax.ShapeDtypeStruct):
        return ()
    shape = shape_of(entry.value)
    if jax.dtypes.issubdtype(entry.value.dtype, jax.dtypes.extended) or 0 in shape:
        return ()
    scores = {}
    for table in tables:
        named = _common_end(entry.parts, normalise(table.path))
        alike = shape == table.leaf.shape
        if (
            named
            or alike
            or table.rows >= _TELLING_ROWS
            or trees.in_optimizer(entry.path)
        ):
            scores[table.name] = (named, alike)
    best = max(scores.values(), default=(0, False))
    if any(_common_end(entry.parts, other.parts) > best[0] for other in others):
        return ()  # a slot of a parameter that is no table
    return tuple(name for name, score in scores.items() if score == best)


def _common_end(one: Path, other: Path) -> int:
    """Number of parts at the end that two normalised paths share."""
    same = [a == b for a, b in zip(reversed(one), reversed(other), strict=False)]
    return [*same, False].index(False)


def _nbytes(value: Any) -> int:
    return int(np.prod(value.shape, dtype=np.int64)) * np.dtype(value.dtype).itemsize


def _written(table: Table, more: Sequence[StateLeaf]) -> str:
    """Source of the `TableSpec` of a table with more slots."""
    slots = [leaf.path for leaf in table.slots] + [entry.path for entry in more]
    parts = [repr("/".join(table.path))]
    parts += [f"rows={table.rows}"] * (table.rows != table.padded_rows)
    parts += [f"slots={['/'.join(path) for path in slots]}"]
    parts += [f"layout={table.layout}"] * (table.layout != Identity())
    return f"TableSpec({', '.join(parts)})"


def _text(
    table: Table,
    entries: Sequence[StateLeaf],
    size: int,
    written: str,
    is_guess: bool,
) -> str:
    names = few("/".join(entry.path) for entry in entries)
    text = (
        f"each save holds all of {names}, which may be slots of table {table.name!r}:"
        f" {size:,} bytes, the table has {table.leaf.nbytes:,}. If they are, pass"
        f" find_tables(state, {{{table.name!r}: {written}}}); if not, name them as tables, or"
        f" say {_written(table, ())}"
    )
    if is_guess:
        text += (
            ". Other tables are alike: whose slots they are is guessed by their order"
        )
    if any(is_copy(entry.path) for entry in entries):
        text += ". Of a copy that follows the parameters most rows change at each step"
    return text
