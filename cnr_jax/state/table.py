"""Tables of a train state, and taking it apart into table leaves and the dense rest.

A table is a parameter `[rows, ...]` with its per-row slots. `find_tables` makes these values;
everything else reads them. They hold shapes, dtypes and shardings, never arrays.

Every leaf of a state is either of a table or dense, so a checkpoint holds all of it, once.
"""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from cnr_jax import errors
from cnr_jax.state.layouts import Identity, RowLayout
from cnr_jax.texts import count_of

Path = tuple[str, ...]
_PRINTED_DENSE_LEAVES = 12  # arbitrary: enough to spot a table that was missed
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Leaf of a table: the table itself, or a slot with the same rows.

    Attributes:
        name: "table", or the slot's prefix in the state, such as "opt_state/0/sum_of_squares";
            unique in its table.
        path: key path, exactly as it occurs in the state.
        shape: shape of the whole array, `(padded_rows, ...)`.
        dtype: dtype of the array.
        sharding: sharding of the array that the leaf was found from, if it has one; not compared.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding | None = field(default=None, compare=False)

    def __getstate__(self) -> list[Any]:
        # For pickle: devices are those of this process, and cannot go to another.
        return [self.name, self.path, self.shape, self.dtype, None]

    def __copy__(self) -> Leaf:
        return self  # nothing of it changes, and the sharding stays

    def __deepcopy__(self, memo: Any) -> Leaf:
        return self

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
    """A table `[padded_rows, ...]`, and the slots that go with its rows.

    It may be an embedding, the experts of a layer, a kernel, a vector: any array that changes by
    rows.

    Attributes:
        name: name that was given to `find_tables`.
        leaf: leaf of the parameter.
        slots: leaves of the optimizer's arrays with one entry per row, in the order of paths.
        rows: number of logical rows; further rows of the array are padding.
        layout: layout of the logical rows in the array.
        moments: pairs of slots by name: a mean of gradients, and the mean of their squares.
    """

    name: str
    leaf: Leaf
    slots: tuple[Leaf, ...]
    rows: int
    layout: RowLayout
    moments: tuple[tuple[str, str], ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameter, then its slots."""
        return (self.leaf, *self.slots)

    def moment(self, name: str) -> Literal["mean", "squares"] | None:
        """Which of a pair of moments a leaf is; None: it is in no pair."""
        for mean, squares in self.moments:
            if name in (mean, squares):
                return "mean" if name == mean else "squares"
        return None

    @property
    def padded_rows(self) -> int:
        """Number of rows of the stored array."""
        return self.leaf.shape[0]

    @property
    def dim(self) -> int:
        """Number of elements per row of the parameter, whatever its trailing shape."""
        return math.prod(self.leaf.shape[1:])

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
    """Specification of one table, if its name alone does not say everything.

    Attributes:
        path: path of the parameter, or the end of it; default: the table's name.
        rows: number of logical rows, at most those of the array; default: all of them.
        slots: paths of the slots; default: `find_tables` searches for them; empty: there are none.
        layout: layout of the logical rows in the array.
        moments: pairs of slots, a mean of gradients and the mean of their squares, by their paths
            or the ends of these; default: `mu` and `nu` of one optimizer, as optax calls them. Only
            `slot_codec="moments"` uses them.
    """

    path: str | None = None
    _: KW_ONLY
    rows: int | None = None
    slots: Sequence[str] | None = None
    layout: RowLayout = field(default_factory=Identity)
    moments: Sequence[tuple[str, str]] | None = None


class Tables(Mapping[str, Table]):
    """Tables of a state by name, and the paths of all other leaves.

    Print it to see what was matched, and look at that once before a long run. If you pickle it for
    another process, it is equal there, but without the shardings of leaves.

    Attributes:
        dense: paths of the leaves that belong to no table, in the state's order.
        doubts: texts about leaves that may be slots of a table but were not taken for such, and
            what to write. The first save logs them, and the hint of each report has them.
        forms: forms of the dense leaves, by path; None: not known, and not compared.
    """

    __slots__ = ("_dense_lines", "_tables", "dense", "doubts", "forms")

    def __init__(
        self,
        tables: Mapping[str, Table],
        dense: Sequence[tuple[str, ...]] = (),
        dense_lines: Sequence[str] = (),
        doubts: Sequence[str] = (),
        forms: Mapping[Path, Any] | None = None,
    ) -> None:
        """Makes a mapping of tables; `dense_lines` describe the dense leaves when it is printed."""
        self._tables = dict(tables)
        self.forms = forms
        self.doubts = tuple(doubts)
        self.dense = tuple(dense)
        self._dense_lines = tuple(dense_lines)

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    # The methods of `Mapping` look each table up on its own, and there may be thousands.

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def keys(self) -> KeysView[str]:
        """Names of tables."""
        return self._tables.keys()

    def values(self) -> ValuesView[Table]:
        """The tables."""
        return self._tables.values()

    def items(self) -> ItemsView[str, Table]:
        """The tables with their names."""
        return self._tables.items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tables):
            return NotImplemented
        return self._tables == other._tables and self.dense == other.dense

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Tables, (self._tables, self.dense, self._dense_lines)

    def __repr__(self) -> str:
        return f"<Tables {', '.join(self)}; {self._dense_count()}>"

    def _dense_count(self) -> str:
        return count_of(len(self.dense), "dense leaf", "dense leaves")

    def __str__(self) -> str:
        leaves = [leaf for table in self.values() for leaf in table.leaves]
        lines = [
            f"{count_of(len(self), 'table')}, {count_of(len(leaves) - len(self), 'slot')}: "
            f"{sum(leaf.nbytes for leaf in leaves) / _MIB:.2f} MiB; {self._dense_count()}"
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


def index_dtype(name: str, rows: int) -> Any:
    """Dtype of indices into the stored rows of a table.

    Raises:
        TouchedError: if the table has more rows than available indices can tell apart.
    """
    # int32 holds every row and `padded_rows` itself, the mark for "drop". XLA reads
    # uint32 indices past 2^31 as negative and drops them, so the next step is int64.
    if rows <= np.iinfo(np.int32).max:
        return np.int32
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:  # x64 is enabled
        return np.int64
    raise errors.TouchedError(
        f"table {name!r} has {rows:,} rows, more than 32-bit indices can tell apart\n"
        "  hint: enable jax_enable_x64, or split the table"
    )


def check_tables(tables: object) -> None:
    """Checks that `tables` is what `find_tables` returns.

    Raises:
        OptionError: if it is something else, such as names of tables.
    """
    if isinstance(tables, Tables):
        return
    given: Any = tables
    kinds: Any = str
    if isinstance(tables, Mapping):
        given, kinds = tables.values(), str | TableSpec
    is_spec = isinstance(given, Collection) and all(
        isinstance(each, kinds) for each in given
    )
    wanted = f"find_tables(state, {tables!r})" if is_spec else ""
    raise errors.OptionError(
        f"tables is {type(tables).__name__}, expected what find_tables returns\n"
        f"  hint: tables=cnr_jax.{wanted or 'find_tables(state, names)'}"
    )


def _describe(shape: Sequence[int], dtype: Any, nbytes: int) -> str:
    return f"{dtype}{list(shape)} {nbytes / _MIB:.2f} MiB"


def _rows(table: Table) -> str:
    padding = table.padded_rows - table.rows
    return (
        f"{table.rows:,} rows"
        + f" and {padding:,} of padding" * (padding > 0)
        + f", layout {table.layout.name}" * (table.layout != Identity())
    )


def dense_lines(
    dense: Sequence[tuple[Path, Any]], question: Callable[[Path, Any], str]
) -> list[str]:
    """Describes the largest dense leaves: a table that was missed stands out.

    Args:
        dense: leaves by path.
        question: returns a question about a leaf, such as whether it is a table, or nothing;
            leaves with a question come first.
    """
    lines = []
    for path, value in dense:
        if asked := question(path, value):
            lines.append((math.inf, f"{'/'.join(path)}  {asked}"))
            continue
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            lines.append((0, f"{'/'.join(path)}  {type(value).__name__}"))
            continue
        nbytes = math.prod(shape) * getattr(dtype, "itemsize", 0)
        lines.append((nbytes, f"{'/'.join(path)}  {_describe(shape, dtype, nbytes)}"))
    lines.sort(key=lambda line: -line[0])
    return [text for _, text in lines[:_PRINTED_DENSE_LEAVES]]


def flatten_paths(tree: Any) -> list[tuple[Path, Any]]:
    """Lists the leaves of a pytree with their key paths as strings.

    Args:
        tree: any pytree. `None` is not a leaf, as everywhere in JAX.

    Returns:
        (path, leaf) in the order of `jax.tree.leaves`; a path's parts are dict keys,
        attribute names and sequence indices.

    Raises:
        TableError: if paths do not tell all leaves apart.

    Example:
        >>> flatten_paths({"b": [1.0, None], "a": "text"})
        [(('a',), 'text'), (('b', '0'), 1.0)]
    """
    leaves, structure = jax.tree.flatten(tree)
    try:
        paths = _paths.get(structure)
    except TypeError:
        structure = paths = None  # a node has static data that cannot be hashed
    if paths is None:
        paths = _paths_in(tree)
        if structure is not None:
            if len(_paths) == _KEPT_STRUCTURES:
                _paths.clear()
            _paths[structure] = paths
    return list(zip(paths, leaves, strict=True))


# Paths by tree structure: a loop saves states of one structure, and paths are slow to make.
_paths: dict[Any, tuple[Path, ...]] = {}
_KEPT_STRUCTURES = 8


def _paths_in(tree: Any) -> tuple[Path, ...]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = tuple(key_strings(keys) for keys, _ in flat)
    seen: set[Path] = set()
    for path in paths:
        if path in seen or any(path[:end] in seen for end in range(len(path))):
            raise errors.TableError(
                f"two leaves of the state have the path {'/'.join(path)!r}, or one "
                "path continues another\n"
                "  hint: a pytree node must give each child a key of its own."
            )
        seen.add(path)
    return paths


def key_strings(keys: Sequence[Any]) -> Path:
    """Turns JAX's key entries into strings: dict keys, attribute names, indices."""
    parts = []
    for key in keys:
        for name in ("key", "name", "idx"):
            if hasattr(key, name):
                key = getattr(key, name)
                break
        parts.append(str(key))
    return tuple(parts)


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
        >>> import jax.numpy as jnp
        >>> from cnr_jax.state.find import find_tables
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
    if () in leaves:
        raise errors.StateMismatchError("the state is a single leaf, expected a tree")
    return rows, nest(leaves.items())


def nest(leaves: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """Nests leaves in dicts by the parts of their paths.

    Example:
        >>> nest([(("a", "b"), 1), (("a", "c"), 2)])
        {'a': {'b': 1, 'c': 2}}
    """
    root: dict[str, Any] = {}
    for path, value in leaves:
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return root


def _take(leaves: dict[tuple[str, ...], Any], table: str, leaf: Leaf) -> Any:
    where = "/".join(leaf.path)
    if leaf.path not in leaves:
        raise errors.StateMismatchError(
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
        raise errors.StateMismatchError(
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
        >>> import jax.numpy as jnp
        >>> from cnr_jax.state.find import find_tables
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
        raise errors.StateMismatchError(
            "the leaves given and the abstract state disagree\n"
            f"  missing: {few(map('/'.join, missing))}\n"
            f"  without a place: {few(map('/'.join, sorted(extra)))}"
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


def few(names: Iterable[str]) -> str:
    """Lists the first of some names, and says how many more there are."""
    names = list(names)
    more = [f"and {len(names) - 4} more"] * (len(names) > 4)
    return ", ".join(names[:4] + more) or "none"
