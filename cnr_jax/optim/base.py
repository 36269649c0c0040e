"""Base of all row optimizers: the pair of functions, and the walk over tables.

How an optimizer moves a row is a rule of its own file; which rows there are and how they
are read and written is in `rows.py`.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from cnr_jax.errors import OptionError
from cnr_jax.optim.rows import read_rows, slot_dtype, sum_by_row, write_rows
from cnr_jax.rows.lookups import explicit_sharding

# A pytree whose leaves are tables, or that has one value for each table.
Tree: TypeAlias = Any
# A number, or a schedule as in optax: from the count of earlier updates, int32[].
LearningRate: TypeAlias = ArrayLike | Callable[[jax.Array], ArrayLike]
# Turns gradients [n, dim], slots [n, ...] and the number of this update, from 1, into new slots
# and the steps [n, dim] to subtract at a learning rate of 1; all are of n distinct rows.
Rule: TypeAlias = Callable[
    [jax.Array, list[jax.Array], jax.Array], tuple[jax.Array, list[jax.Array]]
]


class RowUpdate(Protocol):
    """The type of `RowOptimizer.update`."""

    def __call__(
        self,
        row_grads: Tree,
        ids: Tree,
        tables: Tree,
        state: Any,
        *,
        where: Tree = None,
    ) -> tuple[Tree, Any]:
        """Returns the new tables and the new state; see `RowOptimizer`."""
        ...


class RowOptimizer(NamedTuple):
    """Optimizer of table rows: pure functions, for use in a jitted train step.

    Attributes:
        init: `init(tables) -> state`. `tables` is an array [rows, dim] or any tree of
            such: a dict by name, or the branch of the parameters that holds them. Outside
            of `jax.jit` the slots are placed as the tables' rows are. Inside of it, give
            their places by `out_shardings`.
        update: `update(row_grads, ids, tables, state, *, where=None) ->
            (tables, state)`. All are trees with the structure of `tables`, in which
            each table has

            * `ids`: integer[...], as they were used in `table[ids]`: they may repeat,
              -rows to -1 wrap, and ids out of bounds are clamped, as in JAX
              and in `record`. None leaves the table and its count alone.
            * `row_grads`: float[..., dim], gradient of the loss by each row looked up. A row
              looked up several times has one gradient, their sum. Several features of
              a table go into one call, concatenated: each call is a step.
            * `where`: bool, broadcast to the ids; entries that are False are ignored,
              whatever their gradients are. None counts all.

            Donate tables and state, and return them in the order of the arguments, as
            here. JAX pairs donated arrays with results of the same shape by order. If it
            pairs an array wrongly (a table with a slot), it copies the whole array.

            Arithmetic and slots are float32 also for bfloat16 and float16 tables, whose
            new rows are rounded once. (On CPU, XLA writes to these by converting the
            whole table to float32 and back.) Shardings are kept; with tables sharded by rows,
            collectives have the size of the batch, never of a table. Equal runs have
            equal bits on CPU; XLA on GPU may add the gradients of a repeated row in
            any order, unless it runs with `--xla_gpu_deterministic_ops=true`.

            Raises `OptionError`, at trace time, for arguments that do not fit.
        advance: `advance(row_grads, slots, count) -> (steps, slots, count)`: what
            `update` does once the n distinct rows of a table are gathered. It is for other
            ways to gather them, such as that of `as_optax`. It takes the summed gradients,
            float32[n, dim], the rows of the slots in the order of the state's fields, and the
            count of earlier updates, int32[]. It returns the steps to subtract from the rows,
            their new slots and the new count.
    """

    init: Callable[[Tree], Any]
    update: RowUpdate
    advance: Callable[
        [jax.Array, list[jax.Array], jax.Array],
        tuple[jax.Array, list[jax.Array], jax.Array],
    ]


def row_optimizer(
    state_type: type[Any],
    slots_of: Mapping[str, tuple[int, float]],
    rule: Rule,
    learning_rate: LearningRate,
) -> RowOptimizer:
    """Returns the optimizer that applies a rule to every table of a tree.

    Args:
        state_type: a NamedTuple of trees: `count`, then the rule's slots in its order.
        slots_of: dimensions of each slot by its name, 1 for [rows] or 2 for [rows, dim], and
            its initial value.
        rule: function by which gradients move rows.
        learning_rate: a number or a schedule.
    """
    given: Any = learning_rate
    is_rate = (
        callable(given) or isinstance(given, numbers.Real) or hasattr(given, "dtype")
    )
    require(is_rate, "learning_rate", f"a number or a schedule, got {given!r}")

    def init(tables: Tree) -> Any:
        count = _slots_like(tables, 0, 0, jnp.int32)
        slots = {name: _slots_like(tables, *each) for name, each in slots_of.items()}
        return state_type(count=count, **slots)

    def advance(
        grads: jax.Array, slots: list[jax.Array], count: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        # As in optax: a count at its limit stays there.
        count = jnp.minimum(count, np.iinfo(np.int32).max - 1) + 1
        step, new = rule(grads, slots, count)
        steps: Any = rate * step
        return steps, new, count

    def update_table(
        table: jax.Array, grads: Any, ids: Any, where: Any, count: Any, *slots: Any
    ) -> tuple[jax.Array, ...]:
        if ids is None:
            return table, count, *slots
        rows, summed = sum_by_row(table, grads, ids, where)
        held = [read_rows(slot, rows) for slot in slots]
        steps, new, count = advance(summed, held, count)
        values = read_rows(table, rows) - steps
        written = [write_rows(s, rows, v) for s, v in zip(slots, new, strict=True)]
        return write_rows(table, rows, values), count, *written

    def update(
        row_grads: Tree, ids: Tree, tables: Tree, state: Any, *, where: Tree = None
    ) -> tuple[Tree, Any]:
        if not isinstance(state, state_type):
            raise OptionError(
                "the state is not of this optimizer\n"
                f"  got {type(state).__name__}, expected {state_type.__name__}\n"
                "  hint: the order is update(row_grads, ids, tables, state)."
            )
        structure = jax.tree.structure(tables)
        given = {"row_grads": row_grads, "ids": ids, "where": where}
        columns = [per_table(structure, tree, name) for name, tree in given.items()]
        columns += slots_by_table(tables, state)
        leaves = jax.tree.leaves(tables)
        updated = [update_table(*table) for table in zip(leaves, *columns, strict=True)]
        trees = [structure.unflatten(c) for c in zip(*updated, strict=True)]
        return (trees[0], state_type(*trees[1:])) if trees else (tables, state)

    return RowOptimizer(init, update, advance)


def slots_by_table(tables: Tree, state: Any) -> list[list[Any]]:
    """Lists what each field of a state has for each table, the count first.

    Raises:
        OptionError: if the state has another structure than the tables, or slots of other shapes.
    """
    structure = jax.tree.structure(tables)
    slots = {f"state.{name}": getattr(state, name) for name in state._fields}
    columns = [per_table(structure, tree, name) for name, tree in slots.items()]
    _check_slots(jax.tree.leaves(tables), dict(zip(slots, columns, strict=True)))
    return columns


# Outside of `jit` the initial value of slots is a transfer.
@jax.transfer_guard("allow")
def _slots_like(tables: Tree, ndim: int, value: float, dtype: Any = None) -> Tree:
    """Returns new slots for every table of a tree.

    Args:
        tables: arrays [rows, dim].
        ndim: 0 for one number a table, 1 for [rows], 2 for [rows, dim].
        value: initial value.
        dtype: dtype of the slots; float32 by default.

    Returns:
        A tree of the same structure. If tables are concrete and on certain devices, the slots
        are on these too, sharded like the axes they share with the table.

    Raises:
        OptionError: if a leaf is not a table of floats.
    """

    def slot(table: Any) -> jax.Array:
        shape = np.shape(table)
        if len(shape) != 2 or not jnp.issubdtype(table.dtype, jnp.floating):
            raise OptionError(
                "a row optimizer was given what is not a table\n"
                f"  got {getattr(table, 'dtype', type(table).__name__)}{list(shape)}, "
                "expected floats[rows, dim]\n"
                "  hint: give dense parameters an optimizer of optax."
            )
        where = _placement(table)
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, P(*where.spec[:ndim]))
        kind = slot_dtype(table) if dtype is None else dtype
        return jnp.full(shape[:ndim], value, kind, device=where)

    return jax.tree.map(slot, tables)


def require(true: bool, name: str, expected: str) -> None:
    """Raises an OptionError about the argument `name` unless `true`."""
    if not true:
        raise OptionError(f"{name} is out of its range, expected {expected}")


def _placement(table: Any) -> Any:
    """Returns the sharding of a table as far as it is known and binding."""
    if isinstance(table, Tracer):
        return explicit_sharding(table)
    if isinstance(table, jax.Array) and table.committed:
        return table.sharding
    return None


def per_table(structure: Any, tree: Tree, name: str) -> list[Any]:
    """Lists what a tree of the tables' structure has for each table."""
    if tree is None:
        return [None] * structure.num_leaves
    try:
        return structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"{name} has another structure than the tables\n"
            f"  got {jax.tree.structure(tree)}, expected {structure}"
        ) from error


def _check_slots(tables: list[Any], slots: dict[str, list[Any]]) -> None:
    # Else rows that a slot lacks would be read as zeros, and their updates dropped.
    for name, values in slots.items():
        for table, slot in zip(tables, values, strict=True):
            shape = np.shape(slot)
            if shape != np.shape(table)[: len(shape)]:
                raise OptionError(
                    f"{name} is that of another table\n"
                    f"  got {list(shape)} for a table{list(table.shape)}"
                )
