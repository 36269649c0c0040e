"""Lazy Adam: Adam's moments, kept up for the rows of a batch only."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cnr_jax.optim.base import LearningRate, RowOptimizer, Tree, require, row_optimizer


class LazyAdamState(NamedTuple):
    """State of `lazy_adam`: trees of the structure of the tables.

    Attributes:
        count: int32[] by table, updates so far.
        lazy_mu: float32[rows, dim] by table, average of the row's gradients.
        lazy_nu: float32[rows, dim] by table, average of their squares.
    """

    # Not `mu` and `nu`: in a tree that has lost its classes (an `nnx.State`, a dict)
    # these are dense Adam's, and an `AuditError` would blame them for other rows' moves.
    count: Tree
    lazy_mu: Tree
    lazy_nu: Tree


def lazy_adam(
    learning_rate: LearningRate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> RowOptimizer:
    """Adam whose moments change only for the rows of a batch.

    A looked-up row with the gradient g, summed over the batch, changes in the table's
    update number t (from 1) by

        lazy_mu = b1 * lazy_mu + (1 - b1) * g
        lazy_nu = b2 * lazy_nu + (1 - b2) * g * g
        row -= learning_rate * (lazy_mu / (1 - b1**t))
                             / (sqrt(lazy_nu / (1 - b2**t)) + eps)

    If every batch looks up every row, this is `optax.adam`. Else it is another method:
    in steps that do not look a row up, its moments do not decay and it does not coast.
    The bias is corrected by t, which counts the table's updates and not the row's. So a
    row first met late is treated as one that always had gradients of zero, and its
    first step is (1 - b1) / sqrt(1 - b2) times the learning rate, 3.2 by default. Lower
    `b2` where this hurts.

    Args:
        learning_rate: a number, or a schedule of the table's count of earlier updates.
        b1: decay of the average of gradients, 0 to below 1.
        b2: decay of the average of squared gradients, 0 to below 1.
        eps: added to the root, above 0.

    Returns:
        The optimizer; its state is a `LazyAdamState`.

    Raises:
        OptionError: if an argument is out of its range.

    Example:
        >>> optimizer = lazy_adam(0.1)
        >>> table = jnp.zeros((3, 2))
        >>> state = optimizer.init(table)
        >>> ids, grads = jnp.array([0, 2]), jnp.array([[5.0, 5.0], [7.0, 7.0]])
        >>> where = jnp.array([True, False])
        >>> table, state = optimizer.update(grads, ids, table, state, where=where)
        >>> [f"{x:.2f}" for x in table[:, 0]], int(state.count)
        (['-0.10', '0.00', '0.00'], 1)

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015
    (arXiv:1412.6980), algorithm 1. The lazy variant, corrected by the count of all
    steps, is that of TensorFlow's `LazyAdam` and PyTorch's `SparseAdam`.
    """
    require(0 <= b1 < 1, "b1", "at least 0 and below 1")
    require(0 <= b2 < 1, "b2", "at least 0 and below 1")
    require(eps > 0, "eps", "above 0")

    def rule(
        grads: jax.Array, slots: list[jax.Array], count: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        mu = b1 * slots[0] + (1 - b1) * grads
        nu = b2 * slots[1] + (1 - b2) * jnp.square(grads)
        t = count.astype(grads.dtype)
        root = jnp.sqrt(nu / (1 - b2**t))
        return mu / (1 - b1**t) / (root + eps), [mu, nu]

    slots = {"lazy_mu": (2, 0.0), "lazy_nu": (2, 0.0)}
    return row_optimizer(LazyAdamState, slots, rule, learning_rate)
