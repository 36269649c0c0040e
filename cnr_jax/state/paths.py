"""Key paths of a train state: flattening, normalising, and finding what mirrors a leaf.

An optimizer state repeats the tree of the parameters under names of its own, so a
parameter's slots are the leaves whose path *ends* with the parameter's path. This
module answers such questions about paths; which leaves are tables is decided in
`find.py`, and nothing here looks at values.

To remember: a leaf wrongly left out of a table's slots is saved in full with the dense
leaves and costs bytes; a leaf wrongly taken for a slot is saved by the stamps of other
rows and costs data. In doubt, a leaf is not a slot.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from cnr_jax.state.table import Path, flatten_paths, key_strings

# Parts that frameworks add around a leaf: Linen's collection, and the attribute under
# which a Flax variable or partitioning box holds its array (it differs by version).
_WRAPPERS = frozenset({"params", "value", "raw_value", "get_value"})
# Words which tell, in the name of a branch, that it holds an optimizer's state.
_OPTIMIZER_WORDS = frozenset({"opt", "optim", "optimizer", "tx"})


class StateLeaf(NamedTuple):
    """One leaf of a state.

    `parts` is the normalised path; `starts[i]` is the index in `path` of the key that
    `parts[i]` came from (a key with slashes, as Haiku has, gives several parts).
    """

    path: Path
    parts: Path
    starts: tuple[int, ...]
    value: Any
    is_param: bool  # held by an nnx.Param: never an optimizer's slot

    @property
    def key(self) -> str:
        """The normalised path, joined."""
        return "/".join(self.parts)

    @property
    def ndim(self) -> int:
        """Number of dimensions; 0 for what is not an array."""
        return len(getattr(self.value, "shape", ()))


class Mirror(NamedTuple):
    """A leaf that repeats another one's path below a prefix of its own."""

    entry: StateLeaf
    prefix: Path  # normalised, such as ("opt_state", "0", "mu")
    holder: Path  # the same prefix as it occurs in the tree


def normalise(path: Sequence[str]) -> Path:
    """Drops the parts of a path that frameworks add, and splits keys at slashes.

    Example:
        >>> normalise(("params", "user", "embedding", "value"))
        ('user', 'embedding')
    """
    return tuple(part for key in path for part in _split(key))


def _split(key: str) -> list[str]:
    return [part for part in key.split("/") if part and part not in _WRAPPERS]


def _is_nnx_param(node: Any) -> bool:
    # By name: importing flax.nnx takes a second that a state without it need not spend.
    return any(
        base.__name__ == "Param" and base.__module__.startswith("flax.nnx")
        for base in type(node).__mro__
    )


def _entry(path: Path, value: Any, params: Collection[Path]) -> StateLeaf:
    parts = [(part, i) for i, key in enumerate(path) for part in _split(key)]
    return StateLeaf(
        path=path,
        parts=tuple(part for part, _ in parts),
        starts=tuple(i for _, i in parts),
        value=value,
        is_param=bool(params)
        and any(path[:end] in params for end in range(1, len(path) + 1)),
    )


def _is_optimizer_branch(path: Path) -> bool:
    return any(_OPTIMIZER_WORDS & set(part.lower().split("_")) for part in path)


class _Root(NamedTuple):
    """Where the parameters of a leaf's model may lie: an optimizer repeats what is below.

    That is `params` in a TrainState, `0` in `(model, optimizer)`, and the top of a bare
    dict of parameters.
    """

    path: Path
    depth: int  # parts of the normalised path that belong to it
    above: Path  # the tree that holds both the root and the optimizer's state
    named: bool  # a Linen collection
    guessed: bool  # only names tell an optimizer's state from a module


def _roots(entry: StateLeaf) -> Iterator[_Root]:
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
        if not _is_optimizer_branch(path):
            yield _Root(path, depth, path[:last], named, guessed=True)


def _below(path: Path, root: Path) -> bool:
    return path[: len(root)] == root


class PathIndex:
    """The leaves of one state, indexed by path.

    Args:
        tree: a state, concrete or abstract.

    Example:
        >>> index = PathIndex({"params": {"user": {"w": 1}}, "opt": {"user": 2}})
        >>> [entry.key for entry in index.match("user")]
        ['opt/user', 'user/w']
    """

    def __init__(self, tree: Any) -> None:
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_nnx_param)[0]
        params = {key_strings(keys) for keys, node in flat if _is_nnx_param(node)}
        self.entries = [_entry(p, leaf, params) for p, leaf in flatten_paths(tree)]
        # The shortest path first: parameters before the slots that repeat them.
        self.entries.sort(key=lambda entry: len(entry.parts))
        self.by_path = {entry.path: entry for entry in self.entries}
        self._by_part: dict[str, list[StateLeaf]] = defaultdict(list)
        self._by_suffix: dict[Path, list[StateLeaf]] = defaultdict(list)
        self._by_parts: dict[Path, list[StateLeaf]] = defaultdict(list)
        for entry in self.entries:
            self._by_parts[entry.parts].append(entry)
            for part in set(entry.parts):
                self._by_part[part].append(entry)
            for begin in range(len(entry.parts)):
                self._by_suffix[entry.parts[begin:]].append(entry)
        self._names: dict[Path, frozenset[Path]] = {}
        self._repeats: dict[tuple[Path, Path], bool] = {}

    def match(self, text: str) -> list[StateLeaf]:
        """Lists the leaves that a user's path may mean, nearest meaning only.

        In this order: the very path, the very normalised path, then (one part) every
        leaf below such a part, or (several) every leaf whose path ends so, or has the
        parts in a row.
        """
        raw = tuple(text.split("/"))
        parts = normalise(raw) or raw
        if raw in self.by_path:
            return [self.by_path[raw]]
        if parts in self._by_parts:
            return list(self._by_parts[parts])
        if len(parts) > 1 and parts in self._by_suffix:
            return list(self._by_suffix[parts])
        return [
            entry
            for entry in self._by_part.get(next(iter(parts)), [])
            if any(
                entry.parts[i : i + len(parts)] == parts
                for i in range(len(entry.parts) - len(parts) + 1)
            )
        ]

    def close_to(self, text: str) -> list[str]:
        """Lists up to four paths or names much like `text`, for an error message."""
        names = {entry.key for entry in self.entries}
        names |= {part for entry in self.entries for part in entry.parts}
        parts = normalise(text.split("/")) or (text,)
        near = difflib.get_close_matches("/".join(parts), sorted(names), n=3)
        return near or difflib.get_close_matches(parts[-1], sorted(names), n=4)

    def mirrors(
        self, entry: StateLeaf, parameters: Collection[Path] = ()
    ) -> list[Mirror]:
        """Lists the leaves that repeat a parameter: its slots, averages, accumulators.

        Args:
            entry: the parameter's leaf.
            parameters: paths of leaves known to be parameters themselves.

        Returns:
            The mirrors with the shortest prefix first; empty if there are none.
        """
        known = frozenset(parameters)
        for root in _roots(entry):
            found = self._mirrors_of(entry, root, known)
            if found:
                return found
        return []

    def _mirrors_of(
        self, entry: StateLeaf, root: _Root, parameters: frozenset[Path]
    ) -> list[Mirror]:
        suffix, found = entry.parts[root.depth :], []
        outer = sum(start < len(root.above) for start in entry.starts)
        taken = {entry.path}
        for other in self._by_suffix.get(suffix, []):
            cut = len(other.parts) - len(suffix)
            holder = other.path[: other.starts[cut]]
            if (
                other.path in taken
                or other.path in parameters
                or cut <= outer
                or not _below(other.path, root.above)
                or (root.path and _below(other.path, root.path))
                or other.starts[cut] == other.starts[cut - 1]
                or (other.is_param and not root.path)
                or self._belongs_to_another(other, entry, root, taken)
            ):
                continue
            if root.guessed and (
                other.is_param or not _is_optimizer_branch(holder[len(root.above) :])
            ):
                return []  # a second model: whose optimizer state it is cannot be told
            if root.named and not root.guessed:
                repeats = not self._is_of_another_model(holder, root, suffix)
            else:
                repeats = self._repeats_tree(root.path, holder)
            if repeats:
                found.append(Mirror(other, other.parts[:cut], holder))
                taken.add(other.path)
        return found

    def _is_of_another_model(self, holder: Path, root: _Root, suffix: Path) -> bool:
        """Tells whether a leaf lies in, or beside, other `params` with the same path.

        As all of `critic` does in `{"params": ..., "critic": TrainState}`.
        """
        extra = len(root.path) - len(root.above) - 1
        inner = holder[len(root.above) : len(holder) - extra]
        if "params" in inner and not _is_optimizer_branch(inner):
            return True
        models = {
            entry.path[:end]
            for entry in self._by_suffix[suffix]
            for end, part in enumerate(entry.path)
            if part == "params" and not _is_optimizer_branch(entry.path[:end])
        }
        ends = range(len(root.above) + 1, len(holder) - extra)
        return any(holder[:end] in models for end in ends)

    def _belongs_to_another(
        self, other: StateLeaf, entry: StateLeaf, root: _Root, taken: set[Path]
    ) -> bool:
        """Tells whether a longer path than `entry`'s is repeated by `other`.

        `opt/mu/wide/user` ends with the parameter `user` but is a slot of `wide/user`.
        """
        for size in range(len(entry.parts) - root.depth + 1, len(other.parts)):
            tail = other.parts[-size:]
            rooted = self._by_parts.get(entry.parts[: root.depth] + tail, [])
            owners = [owner for owner in rooted if _below(owner.path, root.path)]
            owners += self._by_parts.get(tail, [])
            if any(x.path not in taken and x is not other for x in owners):
                return True
        return False

    def _repeats_tree(self, root: Path, holder: Path) -> bool:
        """Tells whether every array below `holder` has a counterpart below `root`.

        So it is in an optimizer's state; a module that happens to contain a module of
        the same name usually has something of its own.
        """
        known = self._repeats.get((root, holder))
        if known is None:
            names = self._relative(root)
            known = all(
                any(parts[:end] in names for end in range(1, len(parts) + 1))
                for parts in self._relative(holder, arrays=True)
            )
            self._repeats[root, holder] = known
        return known

    def _relative(self, root: Path, *, arrays: bool = False) -> frozenset[Path]:
        if not arrays and root in self._names:
            return self._names[root]
        paths = frozenset(
            tuple(p for p, i in zip(e.parts, e.starts, strict=True) if i >= len(root))
            for e in self.entries
            if _below(e.path, root) and (e.ndim > 0 or not arrays)
        )
        if not arrays:
            self._names[root] = paths
        return paths
