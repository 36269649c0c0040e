"""Finds the tables of a train state and their per-row slots; all other leaves are dense.

`find_tables` decides this once. It works on any pytree, concrete or abstract, and reads shapes,
dtypes and shardings, never values.

To remember: every leaf of a state is in exactly one place, a table (with its slots) or the dense
rest. So a checkpoint holds all of the state, once.
"""

from __future__ import annotations

import itertools
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.errors import TableError
from cnr_jax.integers import integer
from cnr_jax.state.doubts import find_doubts
from cnr_jax.state.layouts import ModSharded, RowLayout
from cnr_jax.state.mirrors import Mirror, Mirrors
from cnr_jax.state.paths import PathIndex, StateLeaf, normalise
from cnr_jax.state.structure import form_of
from cnr_jax.state.table import (
    Leaf,
    Table,
    Tables,
    TableSpec,
    dense_lines,
    flatten_paths,
)
from cnr_jax.texts import count_of

# Dtypes of numbers that TensorStore stores in zarr v3, and that rows can be hashed in. Elements of
# fewer bits than a byte are stored as a byte each.
_TABLE_DTYPES = frozenset(
    jnp.dtype(name)
    for name in """
    bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64
    float4_e2m1fn float8_e3m4 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz
    float8_e5m2 float8_e5m2fnuz bfloat16 float16 float32 float64
    """.split()
)

# Fewer are cheap to save whole.
_MANY_ROWS = 10_000
# Names that optimizers give to a mean of gradients, and to the mean of their squares.
_SQUARES = {"mu": "nu", "lazy_mu": "lazy_nu"}


def find_tables(
    state: Any, spec: Sequence[str] | Mapping[str, str | TableSpec]
) -> Tables:
    """Finds tables and their per-row optimizer slots in a train state.

    A table is any array with a leading row axis: an embedding `[rows, dim]`, the weights of experts
    `[experts, in, out]`, a kernel `[in, out]`, a vector `[rows]`. Names are compared with paths
    without the parts that Flax adds (`params`, `value`), so "user", "user/embedding" and
    "params/user/embedding" may all name the same leaf. The name of a module means its matrix, not
    the biases and counters beside it; name those by their own paths. A slot is a leaf with the
    table's number of rows whose path ends with the path of the table.

    Args:
        state: train state, concrete or abstract (`jax.ShapeDtypeStruct` leaves).
        spec: names of tables, where each name is also the path; or a dict from names to paths or
            `TableSpec`.

    Returns:
        The tables in the order of `spec`. Print them to see what was matched, and which other
        leaves look like a missing table, or like a slot.

    Raises:
        TableError: if a name matches no leaf, or several; if the leaf is not an array with a row
            and an element, or has a dtype that rows cannot have, such as complex numbers; if a leaf
            would belong to two tables; if it is in doubt whether a leaf is a slot; or if the rows
            or slots of a `TableSpec` do not fit.

    Example:
        >>> state = {
        ...     "params": {"user": jnp.zeros((8, 2)), "bias": jnp.zeros(2)},
        ...     "opt_state": {"sum_of_squares": {"user": jnp.zeros((8, 2))}},
        ... }
        >>> print(find_tables(state, ["user"]))
        1 table, 1 slot: 0.00 MiB; 1 dense leaf
        table 'user': 8 rows
          table  params/user  float32[8, 2] 0.00 MiB
          slot   opt_state/sum_of_squares/user  float32[8, 2] 0.00 MiB
        dense    params/bias  float32[2] 0.00 MiB
    """
    specs = _specs(spec)
    index = PathIndex(state)
    mirrors = Mirrors(index)
    chosen = {n: _choose(index, mirrors, n, s.path or n) for n, s in specs.items()}
    parameters = {entry.path for entry in chosen.values()}
    tables = {
        name: _table(index, name, specs[name], entry, mirrors.of(entry, parameters))
        for name, entry in chosen.items()
    }
    owner = _owners(tables)
    dense = [(p, x) for p, x in flatten_paths(state) if p not in owner]
    unlisted = [table for n, table in tables.items() if specs[n].slots is None]
    doubts = find_doubts(index, mirrors, unlisted, dense)
    missed = _perhaps_tables(index, mirrors, dense)

    def question(path: tuple[str, ...], leaf: Any) -> str:
        return " Or ".join(x[path] for x in (doubts.questions, missed) if path in x)

    lines = dense_lines(dense, question)
    forms = {path: form_of(leaf) for path, leaf in dense}
    return Tables(tables, list(forms), lines, doubts.texts, forms)


def _perhaps_tables(
    index: PathIndex, mirrors: Mirrors, dense: Sequence[tuple[tuple[str, ...], Any]]
) -> dict[tuple[str, ...], str]:
    """Maps the paths of large dense leaves that look like tables to a question about them.

    These are matrices of floats with many short rows, or with "embed" in their path; but not
    what an optimizer keeps for them.
    """
    alike: dict[tuple[str, ...], str] = {}
    for path, leaf in dense:
        shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", object)
        if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.floating):
            continue
        rows, columns = shape
        short = rows > 8 * columns or "embed" in "/".join(path).lower()
        nbytes = rows * columns * np.dtype(dtype).itemsize
        if rows >= _MANY_ROWS and short and nbytes >= 1 << 20:
            size = f"{nbytes / (1 << 20):.2f} MiB"
            alike[path] = f"a table? Each save holds all of its {size}"
    for entry in [index.by_path[path] for path in alike]:
        for mirror in mirrors.of(entry):
            alike.pop(mirror.entry.path, None)
    return alike


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
    # Arrays without axes say that they can be iterated over.
    if not isinstance(spec, Iterable) or getattr(spec, "ndim", 1) == 0:
        raise TableError(
            f"tables must be a list or a mapping of names, got {spec!r}\n"
            "  hint: find_tables(state, ['user', 'item'])."
        )
    pairs = spec.items() if isinstance(spec, Mapping) else [(n, n) for n in spec]
    specs: dict[str, TableSpec] = {}
    for name, value in pairs:
        if not isinstance(name, str) or not name.strip("/"):
            text = f"a table's name must be a non-empty string, got {name!r}"
            if isinstance(name, TableSpec):
                text += "\n  hint: name each: {'user': TableSpec(...)}"
            raise TableError(text)
        if name in specs:
            raise TableError(f"table {name!r} is named twice")
        if not isinstance(value, str | TableSpec):
            raise TableError(
                f"table {name!r} is specified by {reprlib.repr(value)}\n"
                "  expected a path or a TableSpec"
            )
        specs[name] = TableSpec(value) if isinstance(value, str) else value
        layout: Any = specs[name].layout
        if isinstance(layout, type) or not isinstance(layout, RowLayout):
            raise TableError(
                f"table {name!r} has layout {layout!r}\n"
                "  expected a row layout, such as ModSharded(shards=8, rows_per_shard=1000)"
            )
    return specs


def _choose(index: PathIndex, mirrors: Mirrors, name: str, path: str) -> StateLeaf:
    """Finds the one parameter that a table's path means."""
    matches = index.match(path)
    mirrored = {m.entry.path for entry in matches for m in mirrors.of(entry)}
    left = [entry for entry in matches if entry.path not in mirrored] or matches
    # A module's table is its matrix: biases and counters beside it are not meant.
    least = min(2, max((entry.ndim for entry in left), default=0))
    left = [entry for entry in left if entry.ndim >= least]
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
        f"  got {count_of(len(index.entries), 'leaf', 'leaves')}\n  hint: {hint}"
    )


def _table(
    index: PathIndex,
    name: str,
    spec: TableSpec,
    entry: StateLeaf,
    mirrors: Sequence[Mirror],
) -> Table:
    leaf = _leaf("table", entry, name)
    if not leaf.shape or 0 in leaf.shape:
        raise TableError(
            f"table {name!r} at {'/'.join(leaf.path)} is not a table\n"
            f"  got {leaf.dtype}{list(leaf.shape)}, expected [rows, ...], at least one row and"
            " one element"
        )
    if leaf.dtype not in _TABLE_DTYPES:
        hint = "leave it out: it is saved whole then, with the dense leaves"
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            hint = "keep real and imaginary parts as two columns of floats; or " + hint
        raise TableError(
            f"table {name!r} at {'/'.join(leaf.path)} cannot be a table of {leaf.dtype}\n"
            f"  got {leaf.dtype}{list(leaf.shape)}, expected floats of 4 to 64 bits, signed"
            " integers of 2 to 64, unsigned ones of 8 to 64, or bool\n"
            f"  hint: {hint}"
        )
    given = leaf.shape[0] if spec.rows is None else spec.rows
    rows = _checked_rows(name, given, leaf, spec.layout)
    if spec.slots is None:
        named = _found_slots(name, leaf, mirrors)
    else:
        named = _listed_slots(index, name, spec.slots, mirrors)
    # A slot is named by its prefix, or by its whole path where that clashes.
    names = ["table", *("/".join(prefix) for prefix, _ in named)]
    slots = tuple(
        _leaf(n if names.count(n) == 1 else "/".join(slot.path), slot, name)
        for n, (_, slot) in zip(names[1:], named, strict=True)
    )
    for slot in slots:
        _check_slot(name, leaf, slot)
    return Table(
        name=name,
        leaf=leaf,
        slots=slots,
        rows=rows,
        layout=spec.layout,
        moments=_moments(name, slots, spec.moments),
    )


def _moments(
    name: str, slots: Sequence[Leaf], given: Sequence[tuple[str, str]] | None
) -> tuple[tuple[str, str], ...]:
    """Pairs of slots by name: those that are given, else those of one optimizer of optax."""
    if given is None:
        shapes = {slot.name: slot.shape for slot in slots}
        pairs = [(mu, _sibling(mu)) for mu in shapes]
        return tuple((a, b) for a, b in pairs if b and shapes.get(b) == shapes[a])
    found: list[tuple[str, str]] = []
    for pair in given:
        if isinstance(pair, str) or [type(path) for path in pair] != [str, str]:
            raise TableError(
                f"table {name!r}: moments must be pairs of slots, got {pair!r}\n"
                "  hint: TableSpec(moments=[('mean', 'squares')])"
            )
        both = [_named_slot(name, slots, path) for path in pair]
        if both[0].shape != both[1].shape or both[0] is both[1]:
            raise TableError(
                f"table {name!r}: moments {pair!r} are not a pair\n"
                f"  got {both[0].name} of shape {list(both[0].shape)} and {both[1].name} of"
                f" shape {list(both[1].shape)}, expected two slots of one shape"
            )
        found.append((both[0].name, both[1].name))
    again = [each for each, n in Counter(itertools.chain(*found)).items() if n > 1]
    if again:
        raise TableError(
            f"table {name!r}: {again[0]!r} stands in two pairs of moments, expected one"
        )
    return tuple(found)


def _sibling(mu: str) -> str | None:
    """Name of the squares that go with a slot, if it is the mean of an optimizer of optax."""
    parts = mu.split("/")
    at = [i for i, part in enumerate(parts) if part in _SQUARES]
    if not at:
        return None
    parts[at[-1]] = _SQUARES[parts[at[-1]]]
    return "/".join(parts)


def _named_slot(name: str, slots: Sequence[Leaf], path: str) -> Leaf:
    """The one slot that a path means."""
    wanted = tuple(path.split("/"))
    found = [
        slot
        for slot in slots
        if slot.name == path
        or slot.path[-len(wanted) :] == wanted
        or tuple(slot.name.split("/"))[-len(wanted) :] == wanted
    ]
    if len(found) != 1:
        raise TableError(
            f"table {name!r}: {path!r} of moments means {len(found)} slots, expected 1\n"
            f"  slots: {', '.join(slot.name for slot in slots) or 'none'}"
            + "\n  hint: "
            + (
                f"name one by the end of its path, such as {'/'.join(slots[0].path[-2:])!r}"
                if slots
                else "TableSpec(slots=[...]) names them"
            )
        )
    return found[0]


def _leaf(name: str, entry: StateLeaf, table: str) -> Leaf:
    value, where = entry.value, "/".join(entry.path)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        got, hint = type(value).__name__, ""
        if isinstance(value, np.ndarray):
            got += f" {value.dtype}{list(value.shape)}"
            hint = "\n  hint: pass it through jax.device_put first."
            narrow = jax.dtypes.canonicalize_dtype(value.dtype)
            if narrow != value.dtype:
                hint = (
                    f"\n  hint: jax has no {value.dtype}, and jax.device_put makes {narrow} of"
                    " it, unless x64 is enabled: jax.config.update('jax_enable_x64', True), or"
                    " JAX_ENABLE_X64=1, before the state is made or restored"
                )
        raise TableError(
            f"table {table!r}: leaf {where} is not a JAX array\n"
            f"  got {got}, expected jax.Array or jax.ShapeDtypeStruct{hint}"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise TableError(
            f"table {table!r}: leaf {where} holds {value.dtype}, expected plain numbers"
        )
    if 0 in value.shape[1:]:
        raise TableError(
            f"table {table!r}: rows of leaf {where} are empty\n"
            f"  got {value.dtype}{list(value.shape)}, expected one element a row or more\n"
            "  hint: leave it out of the state that is saved"
        )
    return Leaf(
        name=name,
        path=entry.path,
        shape=tuple(value.shape),
        dtype=np.dtype(value.dtype),
        sharding=getattr(value, "sharding", None),
    )


def _checked_rows(name: str, given: Any, leaf: Leaf, layout: RowLayout) -> int:
    padded, rows = leaf.shape[0], integer(given)
    if rows is None or not 0 < rows <= padded:
        raise TableError(
            f"table {name!r} cannot have {given!r} logical rows\n"
            f"  got rows={given!r}, expected an int of 1 to {padded}, the array's rows"
        )
    if isinstance(layout, ModSharded):
        covered = layout.shards * layout.rows_per_shard
        if covered != padded:
            raise TableError(
                f"table {name!r}: its layout does not fit its array\n"
                f"  got {layout.shards} shards of {layout.rows_per_shard} rows = "
                f"{covered}, expected {padded}"
            )
    return rows


def _found_slots(
    name: str, leaf: Leaf, mirrors: Sequence[Mirror]
) -> list[tuple[tuple[str, ...], StateLeaf]]:
    slots = []
    for mirror in mirrors:
        shape = tuple(getattr(mirror.entry.value, "shape", ()))
        if shape[:1] != leaf.shape[:1]:
            continue
        # Factored slots, as Adafactor's, leave axes out and keep the order of the others: is
        # this the table's shape without its rows, or a part of it?
        columns = iter(leaf.shape[1:])
        if len(shape) < len(leaf.shape) and all(size in columns for size in shape):
            raise TableError(
                f"table {name!r} of shape {list(leaf.shape)} has as many columns as rows: "
                f"leaf {'/'.join(mirror.entry.path)} of shape {list(shape)} may belong "
                "to either\n  hint: list the slots in TableSpec(slots=[...])."
            )
        if jnp.issubdtype(mirror.entry.value.dtype, jax.dtypes.extended):
            continue  # random keys, one per row: not numbers, saved with the dense rest
        slots.append((mirror.prefix, mirror.entry))
    return slots


def _listed_slots(
    index: PathIndex, name: str, paths: Sequence[str], mirrors: Sequence[Mirror]
) -> list[tuple[tuple[str, ...], StateLeaf]]:
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


def _check_slot(name: str, leaf: Leaf, slot: Leaf) -> None:
    if slot.shape[:1] != leaf.shape[:1]:
        raise TableError(
            f"table {name!r}: slot {'/'.join(slot.path)} does not have the table's rows\n"
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

    Stamps are sharded like the table, and saving uses no collectives. So for each row some
    process must hold both the stamp and the slot's values. A single process always does.
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
    # Between two edges rows are on the same devices, so one look at each interval is enough.
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
