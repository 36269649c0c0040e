"""Row-wise Adagrad: one accumulator for each row of a table."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cnr_jax.optim.base import LearningRate, RowOptimizer, Tree, require, row_optimizer


class RowwiseAdagradState(NamedTuple):
    """State of `rowwise_adagrad`: trees of the structure of the tables.

    Attributes:
        count: int32[] by table, updates so far.
        sum_of_squares: float32[rows] by table: what it started from, plus the mean
            square of the row's gradient in each update.
    """

    count: Tree
    sum_of_squares: Tree


def rowwise_adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
) -> RowOptimizer:
    """Adagrad with one accumulator for each row, so slots cost 1 / dim of the table.

    A looked-up row with the gradient g, summed over the batch, changes by

        sum_of_squares += mean(g * g)
        row -= learning_rate * g / sqrt(sum_of_squares + eps)

    With one column this is `optax.adagrad`, whose defaults these are.

    Args:
        learning_rate: a number, or a schedule of the table's count of earlier updates.
        initial_accumulator_value: initial value of every row's accumulator, at least 0.
        eps: added under the root, above 0.

    Returns:
        The optimizer; its state is a `RowwiseAdagradState`.

    Raises:
        OptionError: if an argument is out of its range.

    Example:
        A train state in which `find_tables` finds the slots: they lie in a branch with
        an optimizer's name, in which the tables' paths are those below `params`.

        >>> from cnr_jax.state.find import find_tables
        >>> params = {"user": {"embedding": jnp.ones((4, 2))}}
        >>> optimizer = rowwise_adagrad(0.5)
        >>> state = {"params": params, "opt_state": optimizer.init(params)}
        >>> [slot.name for slot in find_tables(state, ["user"])["user"].slots]
        ['opt_state/sum_of_squares']

        One step: row 2 is looked up twice and has the gradient 1 + 2.

        >>> ids = {"user": {"embedding": jnp.array([2, 2])}}
        >>> grads = {"user": {"embedding": jnp.array([[1.0, 1.0], [2.0, 2.0]])}}
        >>> params, slots = optimizer.update(grads, ids, params, state["opt_state"])
        >>> [f"{x:.3f}" for x in params["user"]["embedding"][:, 0]]
        ['1.000', '1.000', '0.503', '1.000']
        >>> [f"{x:.1f}" for x in slots.sum_of_squares["user"]["embedding"]]
        ['0.1', '0.1', '9.1', '0.1']

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization", JMLR 12 (2011). One accumulator a row, of the mean
    square, is the row-wise Adagrad with which DLRM (Naumov et al., arXiv:1906.00091,
    2019) is trained. Differs from its PyTorch code in: 1. `eps` is added under the root;
    2. accumulators do not start from 0. Both as in optax.
    """
    require(initial_accumulator_value >= 0, "initial_accumulator_value", "at least 0")
    require(eps > 0, "eps", "above 0")

    def rule(
        grads: jax.Array, slots: list[jax.Array], count: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        sums = slots[0] + jnp.mean(jnp.square(grads), axis=1)
        return grads * jax.lax.rsqrt(sums + eps)[:, None], [sums]

    slots = {"sum_of_squares": (1, initial_accumulator_value)}
    return row_optimizer(RowwiseAdagradState, slots, rule, learning_rate)
