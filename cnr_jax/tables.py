"""Which leaves of a train state are embedding tables, their per-row slots, or dense.

`find_tables` decides it once, `split` and `merge` take a state apart and put it
together again by key path. Works on any pytree, concrete or abstract; it reads shapes,
dtypes and shardings, never values.

To remember: every leaf of a state is in exactly one place, a table (with its slots) or
the dense rest, so that a checkpoint holds all of it, once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.errors import StateMismatchError, TableError
from cnr_jax.layouts import Identity, ModSharded, RowLayout
from cnr_jax.paths import Entry, Mirror, PathIndex, flatten_paths, normalise

__all__ = [
    "Leaf",
    "Table",
    "TableSpec",
    "Tables",
    "find_tables",
    "flatten_paths",
    "merge",
    "split",
]

_TABLE_DTYPES = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
_PRINTED_DENSE_LEAVES = 12  # arbitrary: enough to spot a table that was missed
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a table: the table itself, or a slot with the same rows.

    Attributes:
        name: "table", or the slot's prefix in the state, such as
            "opt_state/0/sum_of_squares"; unique in its table.
        path: the key path, exactly as it occurs in the state.
        shape: of the whole array, `(padded_rows, ...)`.
        dtype: of the array.
        sharding: of the array it was found from, if any; not compared.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Size of the whole array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{'/'.join(self.path)}  {_describe(self.shape, self.dtype, self.nbytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table `[padded_rows, dim]` and the slots that go with its rows.

    Attributes:
        name: as given to `find_tables`.
        leaf: the parameter.
        slots: the optimizer's arrays with one entry per row, in the order of paths.
        rows: logical rows; the others are padding.
        layout: where logical rows lie in the array.
        row_sparse: whether the user vouches that only looked-up rows change.
    """

    name: str
    leaf: Leaf
    slots: tuple[Leaf, ...]
    rows: int
    layout: RowLayout
    row_sparse: bool

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameter, then its slots."""
        return (self.leaf, *self.slots)

    @property
    def padded_rows(self) -> int:
        """Rows of the stored array."""
        return self.leaf.shape[0]

    @property
    def dim(self) -> int:
        """Elements per row of the parameter."""
        return self.leaf.shape[1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the parameter."""
        return self.leaf.dtype

    @property
    def path(self) -> tuple[str, ...]:
        """Key path of the parameter."""
        return self.leaf.path


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How to find one table, where its name alone does not say it all.

    Attributes:
        path: the parameter's path or the end of it; default: the table's name.
        rows: logical rows, at most those of the array; default: all of them.
        slots: paths of the slots; default: find them; empty: none.
        layout: where logical rows lie in the array.
        row_sparse: the optimizer changes no rows but those looked up, whatever its
            slots look like: skips `check_row_sparse` for this table. If it is not
            true, deltas miss rows.
    """

    path: str | None = None
    _: KW_ONLY
    rows: int | None = None
    slots: Sequence[str] | None = None
    layout: RowLayout = field(default_factory=Identity)
    row_sparse: bool = False


class Tables(Mapping[str, Table]):
    """The tables of a state by name, and the paths of all other leaves.

    Printing it shows what was matched: look at it once before a long run.

    Attributes:
        dense: paths of the leaves that belong to no table, in the state's order.
    """

    __slots__ = ("_dense_lines", "_tables", "dense")

    def __init__(
        self,
        tables: Mapping[str, Table],
        dense: Sequence[tuple[str, ...]] = (),
        dense_lines: Sequence[str] = (),
    ) -> None:
        """Makes a mapping of tables; `dense_lines` describe dense leaves in print."""
        self._tables = dict(tables)
        self.dense = tuple(dense)
        self._dense_lines = tuple(dense_lines)

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tables):
            return NotImplemented
        return self._tables == other._tables and self.dense == other.dense

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Tables {', '.join(self)}; {len(self.dense)} dense leaves>"

    def __str__(self) -> str:
        leaves = [leaf for table in self.values() for leaf in table.leaves]
        lines = [
            f"{len(self)} tables, {len(leaves) - len(self)} slots: "
            f"{sum(leaf.nbytes for leaf in leaves) / _MIB:.2f} MiB; "
            f"{len(self.dense)} dense leaves"
        ]
        for table in self.values():
            lines.append(f"table {table.name!r}: {_rows(table)}")
            lines += [
                f"  {'table' if leaf is table.leaf else 'slot '}  {leaf}"
                for leaf in table.leaves
            ]
        lines += [f"dense    {line}" for line in self._dense_lines]
        hidden = len(self.dense) - len(self._dense_lines)
        return "\n".join(lines + [f"dense    {hidden} more"] * (hidden > 0))


def find_tables(
    state: Any, spec: Sequence[str] | Mapping[str, str | TableSpec]
) -> Tables:
    """Finds embedding tables and their per-row optimizer slots in a train state.

    Paths are compared without the parts that Flax adds (`params`, `value`), so
    "user", "user/embedding" and "params/user/embedding" may all name the same leaf. A
    slot is a leaf with the table's number of rows whose path ends with the table's.

    Args:
        state: a train state, concrete or abstract (`jax.ShapeDtypeStruct` leaves).
        spec: names of tables, each also its path; or name -> path or `TableSpec`.

    Returns:
        The tables in the order of `spec`. Print it to see what was matched.

    Raises:
        TableError: if a name matches nothing, or several leaves; if the leaf is not a
            float32, bfloat16 or float16 array `[rows, dim]`; if a leaf would belong to
            two tables; if explicit rows or slots do not fit.

    Example:
        >>> state = {
        ...     "params": {"user": jnp.zeros((8, 2)), "bias": jnp.zeros(2)},
        ...     "opt_state": {"sum_of_squares": {"user": jnp.zeros((8, 2))}},
        ... }
        >>> print(find_tables(state, ["user"]))
        1 tables, 1 slots: 0.00 MiB; 1 dense leaves
        table 'user': 8 rows
          table  params/user  float32[8, 2] 0.00 MiB
          slot   opt_state/sum_of_squares/user  float32[8, 2] 0.00 MiB
        dense    params/bias  float32[2] 0.00 MiB
    """
    specs = _specs(spec)
    index = PathIndex(state)
    chosen = {name: _choose(index, name, s.path or name) for name, s in specs.items()}
    parameters = {entry.path for entry in chosen.values()}
    tables = {
        name: _table(index, name, specs[name], entry, parameters)
        for name, entry in chosen.items()
    }
    owner = _owners(tables)
    dense = [(p, x) for p, x in flatten_paths(state) if p not in owner]
    return Tables(tables, [path for path, _ in dense], _dense_lines(dense))


def _owners(tables: Mapping[str, Table]) -> dict[tuple[str, ...], str]:
    """Maps the paths of all tables' leaves to their tables, each to one only."""
    owners: dict[tuple[str, ...], str] = {}
    for name, table in tables.items():
        for leaf in table.leaves:
            if leaf.path in owners:
                raise TableError(
                    f"leaf {'/'.join(leaf.path)} is named twice\n"
                    f"  got it for tables {owners[leaf.path]!r} and {name!r}\n"
                    "  hint: name each leaf once; TableSpec(slots=...) lists slots."
                )
            owners[leaf.path] = name
    return owners


def _specs(spec: Sequence[str] | Mapping[str, str | TableSpec]) -> dict[str, TableSpec]:
    if isinstance(spec, str):
        raise TableError(
            f"tables must be a list or a mapping of names, got {spec!r}\n"
            f"  hint: pass [{spec!r}]."
        )
    pairs = spec.items() if isinstance(spec, Mapping) else [(n, n) for n in spec]
    specs: dict[str, TableSpec] = {}
    for name, value in pairs:
        if not isinstance(name, str) or not name.strip("/"):
            raise TableError(f"a table's name must be a non-empty string, got {name!r}")
        if name in specs:
            raise TableError(f"table {name!r} is named twice")
        if not isinstance(value, str | TableSpec):
            raise TableError(
                f"table {name!r} is specified by {value!r}\n"
                "  expected a path or a TableSpec"
            )
        specs[name] = TableSpec(value) if isinstance(value, str) else value
    return specs


def _choose(index: PathIndex, name: str, path: str) -> Entry:
    """Finds the one parameter that a table's path means."""
    matches = index.match(path)
    # A module's table is its matrix: biases and counters beside it are not meant.
    pool = [entry for entry in matches if entry.ndim == 2] or matches
    mirrored = {m.entry.path for entry in pool for m in index.mirrors(entry)}
    left = [entry for entry in pool if entry.path not in mirrored] or pool
    if len(left) == 1:
        return left[0]
    if left:
        found = "".join(f"\n  {'/'.join(entry.path)}" for entry in left[:8])
        raise TableError(
            f"table {name!r}: path {path!r} matches {len(left)} leaves{found}\n"
            f"  hint: give the full path of one, as in {{{name!r}: "
            f"{'/'.join(left[0].path)!r}}}."
        )
    close = index.close_to(path)
    hint = f"did you mean {', '.join(close)}?" if close else "print the state's paths."
    raise TableError(
        f"table {name!r}: no leaf of the state matches path {path!r}\n"
        f"  got {len(index.entries)} leaves\n  hint: {hint}"
    )


def _table(
    index: PathIndex,
    name: str,
    spec: TableSpec,
    entry: Entry,
    parameters: Collection[tuple[str, ...]],
) -> Table:
    leaf = _leaf("table", entry, name)
    if len(leaf.shape) != 2 or 0 in leaf.shape or leaf.dtype not in _TABLE_DTYPES:
        raise TableError(
            f"table {name!r} at {'/'.join(leaf.path)} is not a table\n"
            f"  got {leaf.dtype}{list(leaf.shape)}, expected float32, bfloat16 or "
            "float16 [rows, dim] with at least one row and one column"
        )
    rows = leaf.shape[0] if spec.rows is None else spec.rows
    _check_rows(name, rows, leaf, spec.layout)
    mirrors = index.mirrors(entry, parameters)
    if spec.slots is None:
        named = _found_slots(name, leaf, mirrors)
    else:
        named = _listed_slots(index, name, spec.slots, mirrors)
    slots = tuple(_leaf(slot, e, name) for slot, e in _unique(named))
    for slot in slots:
        _check_slot(name, leaf, slot)
    return Table(
        name=name,
        leaf=leaf,
        slots=slots,
        rows=rows,
        layout=spec.layout,
        row_sparse=spec.row_sparse,
    )


def _leaf(name: str, entry: Entry, table: str) -> Leaf:
    value, where = entry.value, "/".join(entry.path)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        hint = "\n  hint: pass it through jax.device_put first."
        raise TableError(
            f"table {table!r}: leaf {where} is not a JAX array\n"
            f"  got {type(value).__name__}, expected jax.Array or jax.ShapeDtypeStruct"
            f"{hint if isinstance(value, np.ndarray) else ''}"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise TableError(
            f"table {table!r}: leaf {where} holds {value.dtype}, expected plain numbers"
        )
    return Leaf(
        name=name,
        path=entry.path,
        shape=tuple(value.shape),
        dtype=np.dtype(value.dtype),
        sharding=getattr(value, "sharding", None),
    )


def _check_rows(name: str, rows: Any, leaf: Leaf, layout: RowLayout) -> None:
    padded = leaf.shape[0]
    if isinstance(rows, bool) or not isinstance(rows, int) or not 0 < rows <= padded:
        raise TableError(
            f"table {name!r} cannot have {rows!r} logical rows\n"
            f"  got rows={rows!r}, expected an int of 1 to {padded}, the array's rows"
        )
    if isinstance(layout, ModSharded):
        covered = layout.shards * layout.rows_per_shard
        if covered != padded:
            raise TableError(
                f"table {name!r}: its layout does not fit its array\n"
                f"  got {layout.shards} shards of {layout.rows_per_shard} rows = "
                f"{covered}, expected {padded}"
            )


def _found_slots(
    name: str, leaf: Leaf, mirrors: Sequence[Mirror]
) -> list[tuple[tuple[str, ...], Entry]]:
    slots = []
    for mirror in mirrors:
        shape = tuple(getattr(mirror.entry.value, "shape", ()))
        if shape[:1] != leaf.shape[:1]:
            continue
        if len(shape) == 1 and leaf.shape[0] == leaf.shape[1]:
            raise TableError(
                f"table {name!r} is square, {list(leaf.shape)}: leaf "
                f"{'/'.join(mirror.entry.path)} of shape {list(shape)} may be one "
                "value per row or one per column\n"
                "  hint: list the slots in TableSpec(slots=[...])."
            )
        if jnp.issubdtype(mirror.entry.value.dtype, jax.dtypes.extended):
            continue  # random keys, one per row: not numbers, saved with the dense rest
        slots.append((mirror.prefix, mirror.entry))
    return slots


def _listed_slots(
    index: PathIndex, name: str, paths: Sequence[str], mirrors: Sequence[Mirror]
) -> list[tuple[tuple[str, ...], Entry]]:
    if isinstance(paths, str):
        raise TableError(
            f"table {name!r}: slots must be a list of paths, got {paths!r}\n"
            f"  hint: pass [{paths!r}]."
        )
    prefixes = {mirror.entry.path: mirror.prefix for mirror in mirrors}
    by_prefix = {mirror.prefix: mirror.entry for mirror in mirrors}
    slots = []
    for path in paths:
        prefixed = by_prefix.get(normalise(path.split("/")))
        matches = [prefixed] if prefixed else index.match(path)
        if len(matches) != 1:
            near = [e.key for e in matches[:4]] or index.close_to(path)
            raise TableError(
                f"table {name!r}: slot path {path!r} matches {len(matches)} leaves, "
                f"expected 1\n  hint: near it are {', '.join(near) or 'no leaves'}."
            )
        slots.append((prefixes.get(matches[0].path, matches[0].parts), matches[0]))
    return slots


def _unique(
    named: Sequence[tuple[tuple[str, ...], Entry]],
) -> list[tuple[str, Entry]]:
    """Names each slot by its prefix, or by its whole path where that clashes."""
    names = ["table", *("/".join(prefix) for prefix, _ in named)]
    return [
        (name if names.count(name) == 1 else "/".join(entry.path), entry)
        for name, (_, entry) in zip(names[1:], named, strict=True)
    ]


def _check_slot(name: str, leaf: Leaf, slot: Leaf) -> None:
    if slot.shape[:1] != leaf.shape[:1]:
        raise TableError(
            f"table {name!r}: slot {'/'.join(slot.path)} has not the table's rows\n"
            f"  got shape {list(slot.shape)}, expected [{leaf.shape[0]}, ...]"
        )
    missing = _uncovered_rows(leaf, slot)
    if missing is not None:
        raise TableError(
            f"table {name!r}: no process holds rows {missing.start} to {missing.stop} "
            f"of both the table and slot {'/'.join(slot.path)}\n"
            f"  got shardings {leaf.sharding} and {slot.sharding}\n"
            "  hint: shard the slot like its table, or replicate it."
        )


def _uncovered_rows(table: Leaf, slot: Leaf) -> range | None:
    """Finds rows of a slot that no process holds together with the table's.

    Stamps are sharded like the table, and saving uses no collectives: some process must
    have the stamps and the slot's values of the same rows. One process always has.
    """
    if table.sharding is None or slot.sharding is None:
        return None
    parts = [
        (device.process_index, leaf is slot, index)
        for leaf, sharding in ((table, table.sharding), (slot, slot.sharding))
        for device, index in sharding.devices_indices_map(leaf.shape).items()
    ]
    if len({process for process, _, _ in parts}) == 1:
        return None
    size = slot.shape[0]
    edges = np.unique(
        [0, size, *(i for _, _, x in parts for i in x[0].indices(size)[:2])]
    )
    known: dict[int, Any] = {process: False for process, _, _ in parts}
    covered: dict[Any, Any] = {}
    for process, is_slot, index in parts:  # the table's parts come first
        start, stop, _ = index[0].indices(size)
        inside = (edges[:-1] >= start) & (edges[1:] <= stop)
        if is_slot:
            columns = str(index[1:])
            covered[columns] = covered.get(columns, False) | (inside & known[process])
        else:
            known[process] = known[process] | inside
    for rows in covered.values():
        if not rows.all():
            first = int(np.argmin(rows))
            return range(int(edges[first]), int(edges[first + 1]))
    return None


def split(state: Any, tables: Tables) -> tuple[dict[str, dict[str, Any]], dict]:
    """Takes a state apart into table leaves and the dense rest.

    Args:
        state: a state like the one `tables` was found in, concrete or abstract.
        tables: from `find_tables`.

    Returns:
        `{table: {leaf name: array}}`, and the dense leaves as nested dicts by part
        of their path. Nodes without leaves (`None`, empty tuples) are in neither.

    Raises:
        StateMismatchError: if a table's leaf is missing or has another shape or dtype.

    Example:
        >>> state = {"user": jnp.zeros((8, 2)), "step": 3}
        >>> leaves, dense = split(state, find_tables(state, ["user"]))
        >>> leaves["user"]["table"].shape, dense
        ((8, 2), {'step': 3})
    """
    leaves = dict(flatten_paths(state))
    rows: dict[str, dict[str, Any]] = {
        name: {leaf.name: _take(leaves, name, leaf) for leaf in table.leaves}
        for name, table in tables.items()
    }
    dense: dict[str, Any] = {}
    for path, value in leaves.items():
        if not path:
            raise StateMismatchError("the state is a single leaf, expected a tree")
        node = dense
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return rows, dense


def _take(leaves: dict[tuple[str, ...], Any], table: str, leaf: Leaf) -> Any:
    where = "/".join(leaf.path)
    if leaf.path not in leaves:
        raise StateMismatchError(
            f"table {table!r}: the state has no leaf {where}\n"
            "  hint: call find_tables again when the model or the optimizer changed."
        )
    value = leaves.pop(leaf.path)
    expected = (leaf.shape, leaf.dtype)
    is_array = isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    if not is_array or (tuple(value.shape), value.dtype) != expected:
        got = f"{type(value).__name__} " * (not is_array)
        if hasattr(value, "dtype"):
            got += f"{value.dtype}{list(value.shape)}"
        raise StateMismatchError(
            f"table {table!r}: leaf {where} is not the array it was found as\n"
            f"  got {got.strip()}, expected {leaf.dtype}{list(leaf.shape)}"
        )
    return value


def merge(
    abstract_state: Any,
    tables: Tables,
    table_leaves: Mapping[str, Mapping[str, Any]],
    dense: Mapping[str, Any],
) -> Any:
    """Puts a state together again: the inverse of `split`.

    Args:
        abstract_state: a state of the wanted structure; its leaves are not used.
        tables: from `find_tables`.
        table_leaves: `{table: {leaf name: value}}`.
        dense: nested dicts by path part.

    Returns:
        A state with the structure of `abstract_state` and the given leaves.

    Raises:
        StateMismatchError: if a leaf of `abstract_state` was not given, or a given leaf
            has no place in it.

    Example:
        >>> state = {"user": jnp.zeros((8, 2)), "step": 3}
        >>> tables = find_tables(state, ["user"])
        >>> merge(state, tables, *split(state, tables))["step"]
        3
    """
    given = dict(_dense_leaves(abstract_state, dense))
    paths = {(n, leaf.name): leaf.path for n, t in tables.items() for leaf in t.leaves}
    for name, leaves in table_leaves.items():
        for leaf, value in leaves.items():
            given[paths.get((name, leaf), (name, leaf))] = value
    wanted = [path for path, _ in flatten_paths(abstract_state)]
    missing = [path for path in wanted if path not in given]
    extra = set(given) - set(wanted)
    if missing or extra:
        raise StateMismatchError(
            "the leaves given and the abstract state disagree\n"
            f"  missing: {_few(missing)}\n  without a place: {_few(sorted(extra))}"
        )
    treedef = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(treedef, [given[path] for path in wanted])


def _dense_leaves(
    abstract_state: Any, dense: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Lists the dense leaves by path; a value may itself be a mapping or None."""
    ends = {path for path, _ in flatten_paths(abstract_state)}
    pending: list[tuple[tuple[str, ...], Any]] = [((), dense)]
    while pending:
        path, node = pending.pop()
        if path in ends or not isinstance(node, Mapping):
            yield path, node
        else:
            pending += [((*path, str(key)), child) for key, child in node.items()]


def _few(paths: Sequence[tuple[str, ...]]) -> str:
    shown = [f"{'/'.join(path)}" for path in paths[:4]]
    return (
        ", ".join(shown + [f"and {len(paths) - 4} more"] * (len(paths) > 4)) or "none"
    )


def _describe(shape: Sequence[int], dtype: Any, nbytes: int) -> str:
    return f"{dtype}{list(shape)} {nbytes / _MIB:.2f} MiB"


def _rows(table: Table) -> str:
    padding = table.padded_rows - table.rows
    return (
        f"{table.rows:,} rows"
        + f" and {padding:,} of padding" * (padding > 0)
        + f", layout {table.layout.name}" * (table.layout != Identity())
        + ", declared row-sparse" * table.row_sparse
    )


def _dense_lines(dense: Sequence[tuple[tuple[str, ...], Any]]) -> list[str]:
    """Describes the largest dense leaves: a table that was missed stands out."""
    lines = []
    for path, value in dense:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            lines.append((0, f"{'/'.join(path)}  {type(value).__name__}"))
            continue
        nbytes = math.prod(shape) * getattr(dtype, "itemsize", 0)
        lines.append((nbytes, f"{'/'.join(path)}  {_describe(shape, dtype, nbytes)}"))
    lines.sort(key=lambda line: -line[0])
    return [text for _, text in lines[:_PRINTED_DENSE_LEAVES]]
