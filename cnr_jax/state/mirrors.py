"""Leaves that repeat a parameter: its slots in an optimizer's state, averages, accumulators.

An optimizer's state repeats the tree of the parameters under names of its own, so a
parameter's slots are the leaves whose path *ends* as the parameter's does. The names of the
roots alone do not tell which tree they repeat. Names or classes show that a tree is an
optimizer's state; its paths and its shapes show to which model it belongs.

To remember: a leaf wrongly left out of a table's slots is saved whole with the dense leaves,
and costs bytes. A leaf wrongly taken for a slot is saved by the stamps of other rows, and
costs data. In doubt, a leaf is not a slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp

from cnr_jax.state.paths import PathIndex, StateLeaf
from cnr_jax.state.table import Path
from cnr_jax.state.trees import (
    Trees,
    can_be_slot,
    common,
    is_copy,
    rest_of,
    shape_of,
)


class Mirror(NamedTuple):
    """A leaf that repeats another one's path below a prefix of its own."""

    entry: StateLeaf
    prefix: Path  # normalised, such as ("opt_state", "0", "mu")
    holder: Path  # the same prefix as it occurs in the tree


class _Root(NamedTuple):
    """Possible root of the parameters of a leaf's model: an optimizer repeats what is below.

    That is `params` in a TrainState, `0` in `(model, optimizer)`, and the top of a bare
    dict of parameters.
    """

    path: Path
    depth: int  # parts of the normalised path that belong to it
    above: Path  # the tree that holds both the root and the optimizer's state
    named: bool  # a Linen collection
    guessed: bool  # only names and classes tell an optimizer's state from a module


def _below(path: Path, root: Path) -> bool:
    return path[: len(root)] == root


def _with_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Key in the place of a shape: a matrix of as many rows, whatever its columns."""
    return (*shape[:1], -1)


class Mirrors:
    """Index of the leaves of one state that repeat other leaves.

    Args:
        index: index of the state.

    Attributes:
        trees: trees of the same state.

    Example:
        >>> index = PathIndex({"params": {"user": 1}, "opt": {"mu": {"user": 2}}})
        >>> [m.prefix for m in Mirrors(index).of(index.by_path["params", "user"])]
        [('opt', 'mu')]
    """

    def __init__(self, index: PathIndex) -> None:
        self._index = index
        self.trees = Trees(index)
        # Arrays by their shape, matrices by their rows too. Leaves in fields of optimizers' states,
        # by the path below the field; a field that is a single array, by `_shape_of_owner`.
        self._arrays: dict[tuple[int, ...], list[StateLeaf]] = defaultdict(list)
        self._in_fields: dict[tuple, list[Mirror]] = defaultdict(list)
        self._owners: dict[Path, Path | None] = {}
        self._slots: dict[Path, list[StateLeaf]] = {}
        for entry in index.entries:
            if entry.ndim:
                shape = shape_of(entry.value)
                self._arrays[shape].append(entry)
                if len(shape) == 2:
                    self._arrays[_with_rows(shape)].append(entry)
            field = self._field(entry.path)
            if field is not None:
                rest = rest_of(entry, field)
                prefix = entry.parts[: len(entry.parts) - len(rest)]
                key = rest or self._shape_of_owner(entry)
                self._in_fields[key].append(Mirror(entry, prefix, field))
        self._flat = self._flat_states()

    def of(self, entry: StateLeaf, parameters: Collection[Path] = ()) -> list[Mirror]:
        """Lists the leaves that repeat a parameter.

        Args:
            entry: the parameter's leaf.
            parameters: paths of leaves known to be parameters themselves.

        Returns:
            The mirrors with the shortest prefix first; empty if there are none.
        """
        if self._field(entry.path) is not None:
            return []  # a slot
        known = frozenset(parameters)
        found: dict[Path, Mirror] = {}
        for root in self._roots(entry):
            mirrors = self._by_paths(entry, root, known)
            if mirrors:
                found = {mirror.entry.path: mirror for mirror in mirrors}
                break
        for mirror in (*self._by_classes(entry), *self._by_flat_names(entry)):
            if mirror.entry.path not in known:
                found.setdefault(mirror.entry.path, mirror)
        return list(found.values())

    # ---- by the ends of paths ----

    def _roots(self, entry: StateLeaf) -> Iterator[_Root]:
        """Lists the roots that a leaf's path allows, the surest first."""
        for depth in range(len(entry.parts)):
            path = entry.path[: entry.starts[depth]]
            named = path[-1:] == ("params",)
            if "params" in entry.path and not named:
                continue
            if depth and entry.starts[depth] == entry.starts[depth - 1]:
                continue  # within a key that has slashes
            if not depth:
                yield _Root(path, depth, (), named, guessed=False)
                continue
            last = entry.starts[depth - 1]
            if named:
                yield _Root(path, depth, path[: last + 1], named, guessed=False)
            # What lies in an optimizer's state is a slot, and has no slots of its own.
            if not self.trees.in_optimizer(path):
                yield _Root(path, depth, path[:last], named, guessed=True)

    def _by_paths(
        self, entry: StateLeaf, root: _Root, parameters: frozenset[Path]
    ) -> list[Mirror]:
        suffix, rivals = entry.parts[root.depth :], []
        if root.guessed and not self._in_optimizers(suffix):
            return []
        found: list[Mirror] = []
        outer = sum(start < len(root.above) for start in entry.starts)
        taken = {entry.path}
        for other in self._index.by_suffix.get(suffix, []):
            cut = len(other.parts) - len(suffix)
            holder = other.path[: other.starts[cut]]
            if (
                other.path in taken
                or (other.path in parameters and not root.guessed)
                or cut <= outer
                or not _below(other.path, root.above)
                or (root.path and _below(other.path, root.path))
                or other.starts[cut] == other.starts[cut - 1]
                or (other.is_param and not root.path)
                or self._belongs_to_another(other, entry, root, taken)
            ):
                continue
            if root.guessed and (
                other.is_param or not self.trees.in_optimizer(holder, len(root.above))
            ):
                rivals.append(holder)  # a second model
                continue
            if other.path in parameters:
                continue
            if root.named and not root.guessed:
                repeats = not self._is_of_another_model(holder, root, suffix)
            elif root.guessed:
                repeats = self.trees.fit(root.path, holder) > 0
            else:
                repeats = self.trees.repeats(root.path, holder)
            if repeats:
                found.append(Mirror(other, other.parts[:cut], holder))
                taken.add(other.path)
        if not rivals:
            return found
        models = [root.path, *rivals]
        return [m for m in found if self.trees.owner(models, m.holder) == root.path]

    def _in_optimizers(self, suffix: Path) -> list[StateLeaf]:
        """Leaves in optimizers' states whose paths have a given end."""
        if suffix not in self._slots:
            alike = self._index.by_suffix.get(suffix, [])
            self._slots[suffix] = [e for e in alike if self.trees.in_optimizer(e.path)]
        return self._slots[suffix]

    def _is_of_another_model(self, holder: Path, root: _Root, suffix: Path) -> bool:
        """Tells whether a leaf lies in, or beside, other `params` with the same path.

        All of `critic` does so in `{"params": ..., "critic": TrainState}`.
        """
        extra = len(root.path) - len(root.above) - 1
        inner = holder[len(root.above) : len(holder) - extra]
        if "params" in inner and not self.trees.in_optimizer(inner):
            return True
        models = {
            entry.path[:end]
            for entry in self._index.by_suffix[suffix]
            for end, part in enumerate(entry.path)
            if part == "params" and not self.trees.in_optimizer(entry.path[:end])
        }
        ends = range(len(root.above) + 1, len(holder) - extra)
        return any(holder[:end] in models for end in ends)

    def _belongs_to_another(
        self, other: StateLeaf, entry: StateLeaf, root: _Root, taken: set[Path]
    ) -> bool:
        """Tells whether a longer path than `entry`'s is repeated by `other`.

        `opt/mu/wide/user` ends with the parameter `user` but is a slot of `wide/user`.
        """
        by_parts = self._index.by_parts
        for size in range(len(entry.parts) - root.depth + 1, len(other.parts)):
            tail = other.parts[-size:]
            rooted = by_parts.get(entry.parts[: root.depth] + tail, [])
            owners = [owner for owner in rooted if _below(owner.path, root.path)]
            owners += by_parts.get(tail, [])
            if any(x.path not in taken and x is not other for x in owners):
                return True
        return False

    # ---- by classes of optax ----

    def _by_classes(self, entry: StateLeaf) -> Iterator[Mirror]:
        """Lists the slots that are known by a field of an optimizer's state, wherever it lies.

        Below a field lies a tree like the one that the optimizer was made for. So the whole path
        of a leaf there is the end of its parameter's path, or empty if that was a single array.
        """
        shape = shape_of(entry.value)
        if self.trees.in_optimizer(entry.path) or not shape:
            return
        for size in range(len(entry.parts) + 1):
            rest = entry.parts[len(entry.parts) - size :]
            root = self._root_of(entry, rest)
            keys = [rest] if rest else [shape, _with_rows(shape)]
            for mirror in [m for key in keys for m in self._in_fields.get(key, [])]:
                slot = mirror.entry.value
                if shape_of(slot)[:1] != shape[:1]:
                    continue
                if not rest and not jnp.issubdtype(slot.dtype, jnp.inexact):
                    continue  # keys and counters
                if root is not None and self._owner(rest, mirror) == root:
                    yield mirror

    def _owner(self, rest: Path, slot: Mirror) -> Path | None:
        """Path of the model that a slot in an optimizer's field belongs to; None if unknown."""
        path = slot.entry.path
        if path not in self._owners:
            models = self._models(rest, slot.entry)
            self._owners[path] = self.trees.owner(models, slot.holder)
        return self._owners[path]

    def _field(self, path: Path) -> Path | None:
        """Path of the field of the innermost optax state that holds a leaf."""
        for end in range(len(path) - 1, -1, -1):
            if path[:end] in self._index.optimizer_states:
                return path[: end + 1]
        return None

    def _shape_of_owner(self, slot: StateLeaf) -> tuple[int, ...]:
        """Key of the parameter's shape, for a slot whose state has this one array.

        It is the shape of the slot itself. But row optimizers take matrices only, and may keep one
        number for each row. Then it stands for any matrix of as many rows.
        """
        shape, field = shape_of(slot.value), self._field(slot.path)
        by_row = field is not None and field[:-1] in self._index.row_optimizer_states
        return _with_rows(shape) if by_row and len(shape) == 1 else shape

    def _models(self, rest: Path, slot: StateLeaf) -> list[Path]:
        """Roots of models with a parameter at a path that the slot may belong to."""
        shape = shape_of(slot.value)
        alike = (
            self._index.by_suffix.get(rest, [])
            if rest
            else self._arrays[self._shape_of_owner(slot)]
        )
        return [
            root
            for other in alike
            if not self.trees.in_optimizer(other.path)
            and can_be_slot(shape, shape_of(other.value))
            and (root := self._root_of(other, rest)) is not None
        ]

    def _root_of(self, entry: StateLeaf, rest: Path) -> Path | None:
        """Path of a leaf without its end; None if that begins within a key."""
        if not rest:
            return entry.path
        cut = len(entry.parts) - len(rest)
        if cut and entry.starts[cut] == entry.starts[cut - 1]:
            return None
        return entry.path[: entry.starts[cut]]

    # ---- by names made of paths ----

    def _flat_states(self) -> dict[Path, list[StateLeaf]]:
        """Arrays of optimizers that keep all in one folder, as Keras does, by that folder.

        The name of an array is the path of its parameter, joined by `_`, then its own name, such as
        `adam/user_embeddings_velocity`. A counter of the steps lies beside it.
        """
        found: dict[Path, list[StateLeaf]] = defaultdict(list)
        for entry in self._index.entries:
            folder = entry.parts[:-1]
            if entry.ndim and (*folder, "iteration") in self._index.by_parts:
                found[folder].append(entry)
        return found

    def _by_flat_names(self, entry: StateLeaf) -> Iterator[Mirror]:
        """Lists the slots that are named after a parameter's path."""
        if self.trees.in_optimizer(entry.path):
            return
        for folder, members in self._flat.items():
            for depth in range(len(entry.parts)):
                rest = entry.parts[depth:]
                root = self._root_of(entry, rest)
                owners = self._flat_owners(root, members) if root is not None else None
                if owners is None:
                    continue
                own = [slot for slot, owner in owners if owner == rest]
                if own and self._is_nearest(entry, rest, members, folder):
                    for slot in own:
                        yield Mirror(slot, slot.parts, slot.path)
                    break

    def _flat_owners(
        self, root: Path, members: Iterable[StateLeaf]
    ) -> list[tuple[StateLeaf, Path]] | None:
        """Pairs each member of a folder with its parameter's path; None if one has none."""
        model = self.trees.model(root)
        names = {"_".join(rest): rest for rest in model}
        found = []
        for slot in members:
            words = slot.parts[-1].split("_")
            if slot.parts[-1] in names:
                return None  # a tree that repeats the model's
            # The longest name of a parameter with which the slot's name begins.
            ends = range(len(words) - 1, 0, -1)
            name = next((n for e in ends if (n := "_".join(words[:e])) in names), None)
            owner = names.get(name or "")
            if not owner or not can_be_slot(shape_of(slot.value), model[owner]):
                return None
            found.append((slot, owner))
        return found

    def _is_nearest(
        self, entry: StateLeaf, rest: Path, members: list[StateLeaf], folder: Path
    ) -> bool:
        """Whether no other parameter of this name is as near to an optimizer's folder."""
        rivals = [
            common(other.parts, folder)
            for other in self._index.by_suffix[rest]
            if other is not entry
            and not self.trees.in_optimizer(other.path)
            and not is_copy(other.path)
            and (root := self._root_of(other, rest)) is not None
            and self._flat_owners(root, members) is not None
        ]
        return common(entry.parts, folder) > max(rivals, default=-1)
