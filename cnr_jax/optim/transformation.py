"""Row optimizers as gradient transformations of optax.

The update that optax adds to a parameter is usually an array as large as it. Here it is a
`RowSteps`: the rows that change, and by how much. `optax.apply_updates(params, updates)` computes
`params + updates` for each leaf, and a table plus `RowSteps` is the table with these rows changed.
So the other rows are neither read nor written, and keep every bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cnr_jax.errors import OptionError
from cnr_jax.optim.base import RowOptimizer, Tree, per_table, slots_by_table
from cnr_jax.optim.rows import read_rows, slot_dtype, write_rows
from cnr_jax.rows.lookups import Ids, Lookup, StampedTable, lookups, stored_rows
from cnr_jax.state.layouts import Identity
from cnr_jax.state.paths import PathIndex
from cnr_jax.state.table import flatten_paths

if TYPE_CHECKING:
    import optax


# Not a pytree, though it holds arrays: whatever maps a function over updates (a scale, a norm, a
# mean of several steps) would map it over the rows' numbers too. This way it fails.
@dataclasses.dataclass(frozen=True, eq=False)
class RowSteps:
    """Update of some rows of one table, as `as_optax` makes it.

    `table + steps` is the table with these rows changed, so `optax.apply_updates` takes it. It
    exists only within a train step: `jax.jit` does not take it, nor do functions that map over
    updates (`optax.scale`, `optax.global_norm`), and they raise a `TypeError`.

    Attributes:
        name: name of the table, as in the ids.
        rows: integer[n], the distinct rows, ascending, and then `shape[0]` for no row.
        steps: float32[n, dim], to be subtracted from these rows.
        table: parameter that `update` was given, [rows, dim].
    """

    name: str
    rows: jax.Array
    steps: jax.Array
    table: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table, (rows, dim)."""
        return jnp.shape(self.table)

    # Else numpy would add this object to each element of a table that is an array of numpy.
    __array_ufunc__ = None

    def __radd__(self, table: Any) -> jax.Array:
        """Returns the table with these rows changed, in its dtype."""
        # A transformation that sums updates, as `optax.apply_every`, would change rows in a
        # later step than the one that looks them up and records them. Sums are arrays of jax.
        is_sum = isinstance(table, jax.Array) and table is not self.table
        if is_sum or jnp.shape(table) != self.shape:
            raise OptionError(
                f"steps of table {self.name!r} were added to another array than the table that"
                " `update` was given\n"
                f"  got shape {list(jnp.shape(table))}, expected that table"
                f" {list(self.shape)}\n"
                "  hint: as_optax is the last of an optax.chain, and apply_updates takes the"
                " parameters that update took"
            )
        table = jnp.asarray(table)
        return write_rows(table, self.rows, read_rows(table, self.rows) - self.steps)


def as_optax(
    optimizer: RowOptimizer, paths: Mapping[str, str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Turns a row optimizer into a transformation for `optax.multi_transform` and NNX.

    The transformation takes, beside the gradients, the ids that the batch looked up:
    `update(grads, state, params, ids={"user": ids})`. Gradients are those of the whole
    tables, as `jax.grad` and `nnx.grad` give them. It reads only the rows of gradients and slots
    that are in the ids, and changes no others. Rows and slots get the bits that
    `optimizer.update` gives them, compiled alike, except that `jax.grad` sums the gradients
    of a repeated row in the table's own dtype. It has to be the last of an `optax.chain`: a
    transformation after it that changes updates, or adds them up, raises.

    A gradient as large as the table has to be filled with zeros, which `optimizer.update`
    does not need. And if tables are sharded by rows and batches too, XLA may sum whole
    gradients over the devices. For tables too large for that, use `optimizer.update`.

    Args:
        optimizer: one of `cnr_jax.optim`.
        paths: path of a table among the parameters, by its name in the ids; a name that is
            not here is a path itself, as in `find_tables`.

    Returns:
        The transformation. All its parameters are tables, so it is usually one group of
        `optax.multi_transform`. `init` returns the optimizer's own state. `update` returns
        `RowSteps` for the tables; `moved_rows` hands their rows to `record`. Its `ids` are
        those of `record`: by table, integers of any shape, lists of features, `Lookup`.
        None leaves a table alone, and names that no parameter has are ignored. Tables with
        a layout other than the default need ids of stored rows.

    Raises:
        OptionError: if optax is not installed, or the optimizer is not one of ours. At trace
            time, `update` raises it if there are no params or no ids of a table, a name fits
            several tables, or gradients or state are not those of the tables. It raises
            `TouchedError` for ids that `record` refuses.

    Example:
        >>> import optax
        >>> from cnr_jax.optim import rowwise_adagrad
        >>> params = {"user": jnp.ones((4, 2)), "bias": jnp.ones(2)}
        >>> tx = optax.multi_transform(
        ...     {"rows": as_optax(rowwise_adagrad(0.5)), "dense": optax.adam(0.1)},
        ...     {"user": "rows", "bias": "dense"},
        ... )
        >>> state = tx.init(params)
        >>> ids = jnp.array([2, 2, 0])
        >>> loss = lambda params: jnp.sum(params["user"][ids] * params["bias"])
        >>> grads = jax.grad(loss)(params)
        >>> updates, state = tx.update(grads, state, params, ids={"user": ids})
        >>> [f"{x:.3f}" for x in optax.apply_updates(params, updates)["user"][:, 0]]
        ['0.523', '1.000', '0.506', '1.000']
        >>> moved_rows(updates)["user"].ids
        Array([0, 2, 4], dtype=int32)
    """
    try:
        import optax
    except ImportError as error:
        raise OptionError(
            "as_optax needs optax, which is not installed\n  hint: pip install optax"
        ) from error
    given: Any = optimizer
    if not isinstance(given, RowOptimizer):
        raise OptionError(
            f"optimizer is {given!r}, expected one of cnr_jax.optim\n"
            "  hint: as_optax(cnr_jax.optim.rowwise_adagrad(0.1))"
        )
    named = dict(paths or {})

    def init(params: Tree) -> Any:
        return optimizer.init(params)

    def update(
        updates: Tree, state: Any, params: Tree = None, *, ids: Any = None, **_: Any
    ) -> tuple[Tree, Any]:
        return _update(optimizer, named, updates, state, params, ids)

    return optax.GradientTransformationExtraArgs(init, update)


def moved_rows(updates: Tree) -> dict[str, Lookup]:
    """Returns the rows that the updates of `as_optax` change, by table, as `record` takes them.

    So you give ids once, to the optimizer, and `record` stamps the rows that it changes.

    Args:
        updates: a tree with `RowSteps` at tables, as from `tx.update` or from
            `nnx.Optimizer.update`; other leaves are passed over.

    Returns:
        By table, a `Lookup` of its distinct rows, with a mask of the entries that are rows.

    Raises:
        OptionError: if there are no `RowSteps`: recording nothing would lose rows.

    Example:
        >>> from cnr_jax import find_tables, init_touched, record
        >>> from cnr_jax.optim import rowwise_adagrad
        >>> params = {"user": jnp.ones((4, 2))}
        >>> tx = as_optax(rowwise_adagrad(0.5))
        >>> touched = init_touched(params, find_tables(params, ["user"]))
        >>> updates, state = tx.update(
        ...     params, tx.init(params), params, ids={"user": jnp.array([3, 1])}
        ... )
        >>> record(touched, moved_rows(updates)).stamps["user"].tolist()
        [0, 1, 0, 1]
    """
    steps = [leaf for leaf in jax.tree.leaves(updates) if isinstance(leaf, RowSteps)]
    if not steps:
        raise OptionError(
            "these updates change rows of no table\n"
            f"  got {type(updates).__name__}, expected a tree with RowSteps, as as_optax makes"
            " them\n"
            "  hint: nnx.Optimizer.update of some versions of Flax returns None: there give"
            " `record` the ids themselves."
        )
    return {s.name: Lookup(s.rows, where=s.rows < s.shape[0]) for s in steps}


def _update(
    optimizer: RowOptimizer,
    paths: Mapping[str, str],
    updates: Tree,
    state: Any,
    params: Tree,
    ids: Mapping[str, Ids | None] | None,
) -> tuple[Tree, Any]:
    """Returns the steps of all tables, and the new state: `update` of the transformation."""
    if params is None or not isinstance(ids, Mapping):
        given = "no params" if params is None else f"ids of {type(ids).__name__}"
        raise OptionError(
            f"a row optimizer needs params, and ids by table\n  got {given}\n"
            '  hint: update(grads, state, params, ids={"user": ids}), or '
            'nnx.Optimizer.update(model, grads, ids={"user": ids})'
        )
    _check_state(optimizer, params, state)
    structure = jax.tree.structure(params)
    columns = [
        per_table(structure, updates, "grads"),
        *slots_by_table(params, state),
    ]
    looked_up = _ids_by_table(params, ids, paths)
    tables = zip(looked_up, jax.tree.leaves(params), *columns, strict=True)
    # For each table its steps, count and slots; then for each of these a tree of all tables.
    moved = [_move(optimizer, *found, *table) for found, *table in tables]
    trees = [structure.unflatten(column) for column in zip(*moved, strict=True)]
    return (trees[0], type(state)(*trees[1:])) if trees else (updates, state)


def _move(
    optimizer: RowOptimizer,
    name: str,
    ids: Ids | None,
    table: jax.Array,
    grads: Any,
    count: jax.Array,
    *slots: jax.Array,
) -> tuple[Any, ...]:
    """Returns the steps of a table's looked-up rows, the new count and the new slots."""
    if jnp.shape(grads) != table.shape or not jnp.issubdtype(grads.dtype, jnp.floating):
        raise OptionError(
            f"grads of table {name!r} are not those of the whole table\n"
            f"  got {getattr(grads, 'dtype', type(grads).__name__)}{list(jnp.shape(grads))}, "
            f"expected floats{list(table.shape)}\n"
            "  hint: with gradients of table[ids] call `update` of the row optimizer itself."
        )
    known = StampedTable(
        name=name, padded_rows=len(table), lookup_rows=len(table), layout=Identity()
    )
    features = [] if ids is None else list(lookups(ids, f"ids of table {name!r}"))
    if not features:
        nothing = jnp.zeros((0, table.shape[1]), slot_dtype(table))
        steps = RowSteps(name, jnp.zeros(0, jnp.int32), nothing, table)
        return steps, count, *slots
    # `len(table)` stands for no row: at masked entries, and to fill up.
    rows = jnp.concatenate([stored_rows(lookup, known, at) for at, lookup in features])
    rows = jnp.unique(rows, size=min(rows.size, len(table) + 1), fill_value=len(table))
    held = [read_rows(slot, rows) for slot in slots]
    steps, new, count = optimizer.advance(read_rows(grads, rows), held, count)
    written = [write_rows(s, rows, v) for s, v in zip(slots, new, strict=True)]
    return RowSteps(name, rows, steps, table), count, *written


def _ids_by_table(
    params: Tree, ids: Mapping[str, Ids | None], paths: Mapping[str, str]
) -> list[tuple[str, Ids | None]]:
    """Lists for each parameter the name by which it is in the ids, and its ids."""
    index = PathIndex(params)
    found: dict[tuple[str, ...], str] = {}
    for name in ids:
        matches = index.match(paths.get(name, name))
        if len(matches) > 1 or (matches and matches[0].path in found):
            raise OptionError(
                f"ids of {name!r} may be those of several tables, or several are of one\n"
                f"  got {', '.join('/'.join(entry.path) for entry in matches)}; "
                f"ids of {sorted(ids)}\n"
                f"  hint: as_optax(optimizer, {{{name!r}: path of its table}})"
            )
        if matches:
            found[matches[0].path] = name
    every = [path for path, _ in flatten_paths(params)]
    missing = ["/".join(path) for path in every if path not in found]
    if missing:
        raise OptionError(
            f"there are no ids of table {missing[0]}\n"
            f"  got ids of {sorted(ids)}\n"
            "  hint: None for a table that this step does not look up; and give parameters"
            " that are no tables another optimizer, by optax.multi_transform."
        )
    return [(found[path], ids[found[path]]) for path in every]


def _check_state(optimizer: RowOptimizer, params: Tree, state: Any) -> None:
    expected = type(jax.eval_shape(optimizer.init, params))
    if not isinstance(state, expected):
        raise OptionError(
            "the state is not of this optimizer\n"
            f"  got {type(state).__name__}, expected {expected.__name__}\n"
            "  hint: the order is update(grads, state, params, ids=ids)."
        )
