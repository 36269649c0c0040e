"""Rows of one table: which ones a batch looked up, reading them, writing them.

To remember: rows are distinct once they are summed, and `len(table)` stands for no row:
reading it gives zeros, and what is written to it is dropped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.errors import OptionError
from cnr_jax.rows.lookups import (
    as_array,
    broadcasts_to,
    explicit_sharding,
    in_range,
    replicated,
)


def sum_by_row(
    table: jax.Array, grads: Any, ids: Any, where: Any
) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of each row looked up.

    Args:
        table: float[rows, dim].
        grads: float[..., dim], one for each id.
        ids: integer[...], as in `table[ids]`.
        where: bool to be broadcast to the ids, or None.

    Returns:
        The distinct rows, integer[m], ascending, and then `len(table)` to fill up; their
        sums, float32[m, dim]. m is static: the number of ids, or one more than the table's
        rows if that is less.

    Raises:
        OptionError: if the arguments do not fit each other.
    """
    grads, ids, where = _checked(table, grads, ids, where)
    # More rows than int32 can tell apart need x64, as the look-up itself did.
    wide = len(table) > np.iinfo(np.int32).max
    rows = in_range(ids, len(table), jnp.int64 if wide else jnp.int32)
    if where is not None:
        rows = jnp.where(where, rows, len(table))
    distinct, position = jnp.unique(
        rows.reshape(-1),
        size=min(rows.size, len(table) + 1),
        fill_value=len(table),
        return_inverse=True,
    )
    flat = grads.reshape(-1, table.shape[1]).astype(slot_dtype(table))
    # Masked gradients may be NaN: they are summed apart, not multiplied by zero.
    sums = jnp.zeros((len(distinct), table.shape[1]), flat.dtype)
    return distinct, sums.at[position].add(flat, out_sharding=explicit_sharding(flat))


def read_rows(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns rows of a table or slot, as float32; zeros for rows that are none."""
    where = explicit_sharding(leaf)
    out = where and NamedSharding(where.mesh, P(None, *where.spec[1:]))
    read = leaf.at[rows].get(mode="fill", fill_value=0, out_sharding=out)
    return read.astype(slot_dtype(leaf))


def write_rows(leaf: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Returns a table or slot with new values in distinct rows."""
    # `set`, though one could `add` the change: so rows of 16 bits are rounded once, after an
    # addition in 32 bits. And XLA may split an `add`, but not a `set`, by the batch, and
    # all-reduce whole tables.
    return leaf.at[rows].set(
        values.astype(leaf.dtype), mode="drop", out_sharding=explicit_sharding(leaf)
    )


def slot_dtype(table: Any) -> Any:
    """Returns the dtype of a table's slots and arithmetic: at least 32 bits."""
    narrow = jnp.finfo(table.dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(table.dtype)


def _checked(
    table: jax.Array, grads: Any, ids: Any, where: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns gradients, ids and mask as arrays that fit, or raises."""
    ids = as_array(ids, "ids", OptionError)
    grads = as_array(grads, "row_grads", OptionError)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise OptionError(f"ids are {ids.dtype}, expected integers")
    expected = (*ids.shape, table.shape[1])
    if grads.shape != expected or not jnp.issubdtype(grads.dtype, jnp.floating):
        raise OptionError(
            "row_grads do not fit the ids and the table\n"
            f"  got {grads.dtype}{list(grads.shape)}, expected floats{list(expected)} "
            f"for ids{list(ids.shape)} of a table{list(table.shape)}\n"
            "  hint: differentiate with respect to table[ids], not to the table."
        )
    sharding = explicit_sharding(table)
    columns = sharding.spec[1:2] if sharding else ()
    grads, ids = replicated(grads, columns), replicated(ids)
    if where is None:
        return grads, ids, None
    where = replicated(as_array(where, "where", OptionError))
    if where.dtype != jnp.bool_ or not broadcasts_to(where.shape, ids.shape):
        raise OptionError(
            "where does not fit the ids\n"
            f"  got {where.dtype}{list(where.shape)}, "
            f"expected bool that broadcasts to {list(ids.shape)}"
        )
    return grads, ids, where
