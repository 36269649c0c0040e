"""States that plain Orbax saved, read leaf by leaf through Orbax's own handler."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from cnr_jax.checkpointer.orbax_compat.leaves import abstract_dense, as_stored, restored
from cnr_jax.checkpointer.orbax_compat.places import ExactPath
from cnr_jax.repository.store import AnyPath
from cnr_jax.state.table import Path, flatten_paths, key_strings

_Leaf = ocp.metadata.value.Metadata


def is_number(stored: Any) -> bool:
    """Whether Orbax saved a leaf as a number, not as an array."""
    return isinstance(stored, ocp.metadata.value.ScalarMetadata)


class PlainState:
    """The state in one item of a step of plain Orbax.

    `StandardSave`, `PyTreeSave` and Orbax's v1 write it alike. Nothing is read before it is asked
    for, and nothing is ever written.

    Args:
        directory: directory of the item.
    """

    def __init__(self, directory: AnyPath) -> None:
        self._directory: Any = ExactPath(directory)
        self._handler = ocp.PyTreeCheckpointHandler()

    @functools.cached_property
    def metadata(self) -> Any:
        """What Orbax says of the state: dicts and lists, with shape and dtype for each leaf."""
        # Cached, as Orbax opens every array for it.
        return self._handler.metadata(self._directory)

    def leaves(self) -> dict[Path, _Leaf]:
        """What Orbax says of each leaf, by the path that `flatten_paths` gives it."""
        return dict(flatten_paths(self.metadata.tree))

    def restore(self, wanted: Mapping[Path, Any]) -> dict[Path, Any]:
        """Restores leaves as Orbax would restore them into a state.

        Args:
            wanted: what each leaf is restored into, by path: an array, abstract or concrete, a
                number or a string. An abstract array without a sharding gets that of the save, or
                `fallback_sharding` if the devices of the save are not here.
        """

        def target(keys: Any, stored: _Leaf) -> Any:
            path = key_strings(keys)
            if path not in wanted:
                return ocp.PLACEHOLDER
            leaf = wanted[path]
            where = _sharding_of(stored)
            if isinstance(leaf, jax.ShapeDtypeStruct) and not leaf.sharding and where:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
            return abstract_dense(leaf)

        # In the structure of the stored leaves, so that the two are certainly the same.
        tree = jax.tree_util.tree_map_with_path(target, self.metadata.tree)
        asked = ocp.checkpoint_utils.construct_restore_args(tree)
        found = self._restored(tree, asked)
        return {path: x for path, x in flatten_paths(found) if path in wanted}

    def restore_all(self) -> Any:
        """Restores all leaves, as `as_stored` says, in the dicts and lists that are stored."""
        tree = self.metadata.tree
        return self._restored(None, jax.tree.map(as_stored, tree))

    def _restored(self, tree: Any, asked: Any) -> Any:
        return restored(self._handler, self._directory, tree, asked)

    def close(self) -> None:
        """Frees what the handler holds."""
        self._handler.close()


def _sharding_of(stored: _Leaf) -> jax.sharding.Sharding | None:
    """Sharding of an array when it was saved; None if not all of its devices are here."""
    saved = getattr(stored, "sharding", None)
    try:
        return saved.to_jax_sharding() if saved is not None else None
    except ValueError:
        return None
