"""Trees in a state: which are an optimizer's, and whose.

That a tree is an optimizer's shows by names or by the classes of optax; whose it is, by its
paths and shapes, which are those of a model or of a part of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from cnr_jax.state.paths import PathIndex, StateLeaf
from cnr_jax.state.table import Path

# Words which tell, in the name of a branch, that it holds an optimizer's state.
_OPTIMIZER_WORDS = frozenset({"opt", "optim", "optimizer", "tx"})
# The same of fields, in states that lost their classes; a name that is also a common word
# needs its companion beside it.
_FIELDS = frozenset(
    """
    sum_of_squares nu_max acc_grads exp_avg exp_avg_sq lazy_mu lazy_nu lazy_trace
    """.split()
)
_FIELDS_TOGETHER = {"mu": "nu", "nu": "mu"}
# Copies of the parameters, whoever keeps them.
_COPY_WORDS = frozenset(
    {"ema", "polyak", "swa", "averaged", "average", "teacher", "target", "momentum"}
)


def names_optimizer(name: str) -> bool:
    """Whether a name in a path says that what is there is an optimizer's."""
    return bool(_OPTIMIZER_WORDS & set(name.lower().split("_")))


def is_copy(path: Path) -> bool:
    """Whether the names in a path say that what is there follows other values, as an EMA does."""
    return any(_COPY_WORDS & set(part.lower().split("_")) for part in path)


def shape_of(value: Any) -> tuple[int, ...]:
    """Shape of a leaf; empty for what is not an array."""
    return tuple(getattr(value, "shape", ()))


def rest_of(entry: StateLeaf, root: Path) -> Path:
    """The normalised path of a leaf below a root."""
    pairs = zip(entry.parts, entry.starts, strict=True)
    return tuple(part for part, start in pairs if start >= len(root))


def can_be_slot(slot: tuple[int, ...], owner: tuple[int, ...]) -> bool:
    """Whether arrays of these shapes may be a slot and its parameter.

    A slot is like it, or leaves axes out, or adds some, or has one entry for each row, or one
    element, as optimizers have that need none.
    """
    fewer, more = iter(slot), iter(owner)
    return (
        math.prod(slot) == 1
        or all(size in more for size in slot)
        or all(size in fewer for size in owner)
        or slot[:1] == owner[:1]
    )


class Trees:
    """The trees of one state.

    Args:
        index: of the state.
    """

    def __init__(self, index: PathIndex) -> None:
        self._index = index
        self._below: dict[Path, list[StateLeaf]] = defaultdict(list)
        self._in_optimizer: dict[Path, bool] = {}
        self._fits: dict[tuple[Path, Path], int] = {}
        self._models: dict[Path, dict[Path, tuple[int, ...]]] = {}
        for entry in index.entries:
            for end in range(len(entry.path) + 1):
                self._below[entry.path[:end]].append(entry)

    def in_optimizer(self, path: Path, outer: int = 0) -> bool:
        """Whether names or classes say that what lies at a path is an optimizer's.

        Args:
            path: of a leaf or node.
            outer: how many of its parts say nothing.
        """
        return any(
            self._is_optimizer(path[:end]) for end in range(outer + 1, len(path) + 1)
        )

    def _is_optimizer(self, node: Path) -> bool:
        known = self._in_optimizer.get(node)
        if known is None:
            *above, name = node
            beside = _FIELDS_TOGETHER.get(name)
            known = self._in_optimizer[node] = (
                names_optimizer(name)
                or node in self._index.optimizer_states
                or (name in _FIELDS and node in self._below)
                or (node in self._below and (*above, beside) in self._below)
            )
        return known

    def owner(self, roots: Iterable[Path], holder: Path) -> Path | None:
        """Which of these models a tree of slots is of; None if it cannot be told.

        The one that it repeats best, and no copy of another; of several the nearest one, or that
        whose name the path of the tree has too.
        """
        fits = {root: self.fit(root, holder) for root in dict.fromkeys(roots)}
        left = [root for root, fit in fits.items() if fit]
        left = [root for root in left if not is_copy(root)] or left
        left = [root for root in left if fits[root] == max(map(fits.__getitem__, left))]
        shared = {root: common(root, holder) for root in left}
        left = [root for root in left if shared[root] == max(shared.values())]
        if len(left) > 1:
            names = set(holder) - set.intersection(*map(set, left))
            left = [root for root in left if names & set(root)]
        return left[0] if len(left) == 1 else None

    def fit(self, root: Path, holder: Path) -> int:
        """How well a tree of slots repeats a model: 0 not, 1 a part of it, 2 all of it."""
        known = self._fits.get((root, holder))
        if known is None:
            model, slots = self.model(root), _shapes(self._below[holder], holder)
            owners = [_owner_in(model, path) for path in slots]
            fits = all(
                owner is not None and can_be_slot(shape, model[owner])
                for shape, owner in zip(slots.values(), owners, strict=True)
            )
            known = fits + (fits and set(owners) == model.keys())
            self._fits[root, holder] = known
        return known

    def model(self, root: Path) -> dict[Path, tuple[int, ...]]:
        """Shapes of the arrays below a node that are no optimizer's, by the path from there."""
        known = self._models.get(root)
        if known is None:
            below = self._below[root]
            known = _shapes([e for e in below if not self.in_optimizer(e.path)], root)
            self._models[root] = known
        return known

    def repeats(self, root: Path, holder: Path) -> bool:
        """Tells whether every array below `holder` has a counterpart below `root`.

        So it is in an optimizer's state; a module that happens to contain a module of
        the same name usually has something of its own.
        """
        names = {rest_of(entry, root): () for entry in self._below[root]}
        slots = _shapes(self._below[holder], holder)
        return all(_owner_in(names, path) for path in slots)


def _shapes(entries: Iterable[StateLeaf], node: Path) -> dict[Path, tuple[int, ...]]:
    """Shapes of the arrays among leaves below a node, by the path from there."""
    return {rest_of(e, node): shape_of(e.value) for e in entries if e.ndim}


def _owner_in(model: Mapping[Path, Any], path: Path) -> Path | None:
    """The path in a model that a slot's path is, or goes on from."""
    ends = range(len(path), -1, -1)
    return next((path[:end] for end in ends if path[:end] in model), None)


def common(one: Path, other: Path) -> int:
    """How many parts two paths begin with alike."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)
