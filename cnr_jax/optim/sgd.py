"""Lazy SGD: a momentum that is kept up for the rows of a batch only."""

from __future__ import annotations

from typing import NamedTuple

import jax

from cnr_jax.optim.base import LearningRate, RowOptimizer, Tree, require, row_optimizer


class LazySgdState(NamedTuple):
    """State of `lazy_sgd`: trees of the structure of the tables.

    Attributes:
        count: int32[] by table, updates so far.
        lazy_trace: float32[rows, dim] by table, decaying sum of the row's gradients.
    """

    # Not `trace`, which is that of dense momentum: see LazyAdamState.
    count: Tree
    lazy_trace: Tree


def lazy_sgd(
    learning_rate: LearningRate, momentum: float = 0.9, nesterov: bool = False
) -> RowOptimizer:
    """SGD with a momentum that changes only for the rows of a batch.

    A looked-up row with the gradient g, summed over the batch, changes by

        lazy_trace = g + momentum * lazy_trace
        row -= learning_rate * lazy_trace

    or, by Nesterov's rule, by `learning_rate * (g + momentum * lazy_trace)`. If every
    batch looks up every row, this is `optax.sgd`. Else it is another method: in steps
    that do not look a row up, its momentum does not decay and the row does not coast.

    Args:
        learning_rate: a number, or a schedule of the table's count of earlier updates.
        momentum: decay of the sum of gradients, 0 to below 1.
        nesterov: whether a step looks one decay ahead.

    Returns:
        The optimizer; its state is a `LazySgdState`.

    Raises:
        OptionError: if `momentum` is out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = lazy_sgd(0.5, momentum=0.9)
        >>> table = jnp.zeros((3, 2))
        >>> state = optimizer.init(table)
        >>> for _ in range(2):
        ...     grads, ids = jnp.ones((1, 2)), jnp.array([1])
        ...     table, state = optimizer.update(grads, ids, table, state)
        >>> [f"{x:.2f}" for x in table[:, 0]], [f"{x:.1f}" for x in state.lazy_trace[:, 0]]
        (['0.00', '-1.45', '0.00'], ['0.0', '1.9', '0.0'])

    Source: Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and
    momentum in deep learning", ICML 2013, written as in `optax.sgd`.
    """
    require(0 <= momentum < 1, "momentum", "at least 0 and below 1")

    def rule(
        grads: jax.Array, slots: list[jax.Array], count: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        trace = grads + momentum * slots[0]
        return grads + momentum * trace if nesterov else trace, [trace]

    return row_optimizer(LazySgdState, {"lazy_trace": (2, 0.0)}, rule, learning_rate)
