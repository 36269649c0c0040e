"""States that are hard to tell apart."""

from __future__ import annotations

import jax


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node whose children cannot be told apart by path."""

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("x")
        return ((key, 1), (key, 2)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()
