"""Trees in a state: those of optimizers, and the models that they belong to.

Names or the classes of optax show that a tree is an optimizer's. Its paths and shapes, which are
those of a model or of a part of it, show to which model it belongs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from cnr_jax.state.paths import PathIndex, StateLeaf
from cnr_jax.state.table import Path

# Words in the name of a branch that mark it as an optimizer's state.
_OPTIMIZER_WORDS = frozenset({"opt", "optim", "optimizer", "tx"})
# Names of fields that do the same in states that lost their classes. A name that is also a
# common word needs its companion beside it.
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
    """Whether a name in a path marks an optimizer's state."""
    return bool(_OPTIMIZER_WORDS & set(name.lower().split("_")))


def is_copy(path: Path) -> bool:
    """Whether the names in a path mark values that follow others, as an EMA does."""
    return any(_COPY_WORDS & set(part.lower().split("_")) for part in path)


def shape_of(value: Any) -> tuple[int, ...]:
    """Shape of a leaf; empty if it is not an array."""
    return tuple(getattr(value, "shape", ()))


def rest_of(entry: StateLeaf, root: Path) -> Path:
    """Normalised path of a leaf below a root."""
    pairs = zip(entry.parts, entry.starts, strict=True)
    return tuple(part for part, start in pairs if start >= len(root))


def can_be_slot(slot: tuple[int, ...], owner: tuple[int, ...]) -> bool:
    """Whether an array of one shape may be a slot of a parameter of the other.

    A slot has the parameter's shape, or leaves axes out, or adds some, or has one entry for each
    row. Or it has one element, as in optimizers that need no slot there.
    """
    fewer, more = iter(slot), iter(owner)
    return (
        math.prod(slot) == 1
        or all(size in more for size in slot)
        or all(size in fewer for size in owner)
        or slot[:1] == owner[:1]
    )


class Trees:
    """Index of the trees of one state: optimizers' states and models.

    Args:
        index: index of the state.
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
        """Whether names or classes mark the node at a path as an optimizer's.

        Args:
            path: path of a leaf or node.
            outer: number of its first parts that are not looked at.
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
        """Chooses the model that a tree of slots belongs to; None if it cannot be told.

        It is the model that the tree repeats best, and not a copy of another. If there are several,
        it is the nearest one, or the one with a name that is also in the path of the tree.
        """
        fits = {root: self.fit(root, holder) for root in dict.fromkeys(roots)}
        # Leaves out, in turn: copies, worse fits, farther models, and those of other names.
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
        """Grades how well a tree of slots repeats a model: 0 not, 1 a part of it, 2 all of it."""
        known = self._fits.get((root, holder))
        if known is None:
            model, slots = self.model(root), _shapes(self._below[holder], holder)
            owners = [_owner_in(model, path) for path in slots]
            fits = all(
                owner is not None and can_be_slot(shape, model[owner])
                for shape, owner in zip(slots.values(), owners, strict=True)
            )
            # All of it: each parameter of the model has a slot.
            known = fits + (fits and set(owners) == model.keys())
            self._fits[root, holder] = known
        return known

    def model(self, root: Path) -> dict[Path, tuple[int, ...]]:
        """Shapes of the arrays below a node outside of optimizers, by the path from there."""
        known = self._models.get(root)
        if known is None:
            below = self._below[root]
            known = _shapes([e for e in below if not self.in_optimizer(e.path)], root)
            self._models[root] = known
        return known

    def repeats(self, root: Path, holder: Path) -> bool:
        """Tells whether every array below `holder` has a counterpart below `root`.

        This is so in an optimizer's state; a module that happens to contain a module of
        the same name usually has something of its own.
        """
        names = {rest_of(entry, root): () for entry in self._below[root]}
        slots = _shapes(self._below[holder], holder)
        return all(_owner_in(names, path) for path in slots)


def _shapes(entries: Iterable[StateLeaf], node: Path) -> dict[Path, tuple[int, ...]]:
    """Shapes of the arrays among leaves below a node, by the path from there."""
    return {rest_of(e, node): shape_of(e.value) for e in entries if e.ndim}


def _owner_in(model: Mapping[Path, Any], path: Path) -> Path | None:
    """Path in a model that a slot's path equals or continues."""
    ends = range(len(path), -1, -1)
    return next((path[:end] for end in ends if path[:end] in model), None)


def common(one: Path, other: Path) -> int:
    """Number of parts at the beginning that two paths share."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)
