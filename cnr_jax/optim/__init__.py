"""Optimizers that read and change only the rows a batch looked up; optax has none of that kind.

They take the ids, and gradients with respect to the gathered rows, `table[ids]`, never
a gradient as large as the table. As in optax, an optimizer is a pair of pure functions
`init` and `update`. Its state is a NamedTuple of trees with the structure of the tables, so
`find_tables` finds the slots by their paths. Dense layers keep an optimizer of
optax. `as_optax` turns an optimizer into a transformation of optax, which takes the gradients
that `jax.grad` gives.

To remember: a row that is not in the ids, or is only at masked entries, keeps every bit,
in the table and in the slots. So `record`, given the same ids and masks, misses nothing.
"""

from cnr_jax.optim.adagrad import RowwiseAdagradState as RowwiseAdagradState
from cnr_jax.optim.adagrad import rowwise_adagrad as rowwise_adagrad
from cnr_jax.optim.adam import LazyAdamState as LazyAdamState
from cnr_jax.optim.adam import lazy_adam as lazy_adam
from cnr_jax.optim.base import LearningRate as LearningRate
from cnr_jax.optim.base import RowOptimizer as RowOptimizer
from cnr_jax.optim.sgd import LazySgdState as LazySgdState
from cnr_jax.optim.sgd import lazy_sgd as lazy_sgd
from cnr_jax.optim.transformation import RowSteps as RowSteps
from cnr_jax.optim.transformation import as_optax as as_optax
from cnr_jax.optim.transformation import moved_rows as moved_rows
