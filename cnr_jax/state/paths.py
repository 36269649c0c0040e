"""Key paths of a train state: flattening, normalising, and what a user's path means.

`mirrors.py` finds the leaves that repeat a parameter's path, and `find.py` decides which leaves
are tables and slots. Nothing here looks at values.
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
        """Number of dimensions; 0 if the leaf is not an array."""
        return len(getattr(self.value, "shape", ()))


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


def named_tuples(tree: Any, prefix: Path = ()) -> Iterator[tuple[Path, type]]:
    """Lists the NamedTuples in a tree: path, class."""
    if _is_named_tuple(tree):
        yield prefix, type(tree)
    flat = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree and _is_named_tuple(node)
    )[0]
    for keys, node in flat:
        if _is_named_tuple(node):
            yield from named_tuples(node, (*prefix, *key_strings(keys)))


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _maker(kind: type) -> str:
    """Library that a class of optimizer state comes from: `optax`, `cnr_jax`, or neither."""
    # By name: a state need not have been made in this program. `LookaheadParams` is no state.
    made_by = kind.__module__.split(".")
    known = made_by[0] == "optax" or made_by[:2] == ["cnr_jax", "optim"]
    return made_by[0] if known and not kind.__name__.endswith("Params") else ""


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


class PathIndex:
    """The leaves of one state, indexed by path.

    Args:
        tree: a state, concrete or abstract.

    Attributes:
        entries: all leaves, those with the shortest paths first.
        by_path: leaves by path.
        order: number of each path in the order of the state.
        by_parts: leaves by normalised path.
        by_suffix: leaves by each end of the normalised path except the empty one.
        optimizer_states: paths of nodes whose classes are states of optax or of `cnr_jax.optim`.
        row_optimizer_states: paths of those of `cnr_jax.optim` alone.

    Example:
        >>> index = PathIndex({"params": {"user": {"w": 1}}, "opt": {"user": 2}})
        >>> [entry.key for entry in index.match("user")]
        ['opt/user', 'user/w']
    """

    def __init__(self, tree: Any) -> None:
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_nnx_param)[0]
        params = {key_strings(keys) for keys, node in flat if _is_nnx_param(node)}
        makers = {path: _maker(kind) for path, kind in named_tuples(tree)}
        self.optimizer_states = frozenset(p for p, maker in makers.items() if maker)
        self.row_optimizer_states = frozenset(
            path for path, maker in makers.items() if maker == "cnr_jax"
        )
        self.entries = [_entry(p, leaf, params) for p, leaf in flatten_paths(tree)]
        # The shortest path first: parameters before the slots that repeat them.
        self.order = {entry.path: i for i, entry in enumerate(self.entries)}
        self.entries.sort(key=lambda entry: len(entry.parts))
        self.by_path = {entry.path: entry for entry in self.entries}
        self.by_suffix: dict[Path, list[StateLeaf]] = defaultdict(list)
        self.by_parts: dict[Path, list[StateLeaf]] = defaultdict(list)
        self._by_part: dict[str, list[StateLeaf]] = defaultdict(list)
        for entry in self.entries:
            self.by_parts[entry.parts].append(entry)
            for part in set(entry.parts):
                self._by_part[part].append(entry)
            for begin in range(len(entry.parts)):
                self.by_suffix[entry.parts[begin:]].append(entry)

    def match(self, text: str) -> list[StateLeaf]:
        """Lists the leaves that a user's path may mean, nearest meaning only.

        In this order: the leaf of this very path; leaves of this very normalised path;
        leaves with a path that ends so, if it has several parts; leaves with these parts
        in a row somewhere in their paths.
        """
        raw = tuple(text.split("/"))
        parts = normalise(raw) or raw
        if raw in self.by_path:
            return [self.by_path[raw]]
        if parts in self.by_parts:
            return list(self.by_parts[parts])
        if len(parts) > 1 and parts in self.by_suffix:
            return list(self.by_suffix[parts])
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
