"""A checkpoint of plain Orbax whose arrays are written by somebody else, block by block.

Orbax wants whole arrays in memory. So it is given small ones in their places, and whoever calls
puts the real ones there: each array is a folder of its own where Orbax does not pack them
(`use_ocdbt=False`), and how long it is Orbax reads there and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cnr_jax.checkpointer.orbax_compat.places import beginning
from cnr_jax.checkpointer.orbax_compat.storage import as_storage_allows
from cnr_jax.state.table import Path as LeafPath
from cnr_jax.state.table import key_strings, nest


def array_folder(path: LeafPath) -> str:
    """The folder in which Orbax looks for the array of a leaf.

    Example:
        >>> array_folder(("params", "user"))
        'params.user'
    """
    return ".".join(path)


def save_skeleton(
    directory: Path,
    leaves: Mapping[LeafPath, Any],
    metadata: Mapping[str, Any],
    like: Any,
) -> None:
    """Writes a checkpoint, as `ocp.PyTreeCheckpointer` does.

    Args:
        directory: to be made.
        leaves: by path.
        metadata: that Orbax keeps with it.
        like: a state of the structure it is to have; None: dicts, and lists where the keys of a
            dict are 0, 1, 2 and so on. It has the leaves that are given, and no others.
    """
    tree = listed(nest(leaves.items())) if like is None else _shaped(like, leaves)
    args = ocp.args.PyTreeSave(tree, custom_metadata=dict(metadata))
    log = logging.getLogger("absl")
    with beginning(), as_storage_allows(directory):
        log.addFilter(_tells_something)
        try:
            handler = ocp.PyTreeCheckpointHandler(
                use_ocdbt=False, use_zarr3=True, type_handler_registry=_registry()
            )
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(directory, args=args)
        finally:
            log.removeFilter(_tells_something)


def _registry() -> Any:
    """Orbax's own handlers; that of texts keeps what arrays are opened with when it is made."""
    types = ocp.type_handlers
    kinds = (int, float, np.number, np.ndarray, jax.Array)
    known = [(kind, types.get_type_handler(kind)) for kind in kinds]
    return types.create_type_handler_registry(*known, (str, types.StringHandler()))


def _tells_something(record: logging.LogRecord) -> bool:
    """Not that Orbax finds nothing packed, of a checkpoint that is not to be."""
    return "Skipping merge of OCDBT" not in str(record.msg)


def _shaped(like: Any, leaves: Mapping[LeafPath, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: leaves[key_strings(keys)], like
    )


def listed(tree: Any) -> Any:
    """Nested dicts with lists in the places of those whose keys are 0, 1, 2 and so on.

    Example:
        >>> listed({"layers": {"0": 5, "1": {"w": 6}}, "other": {"1": 7}})
        {'layers': [5, {'w': 6}], 'other': {'1': 7}}
    """
    if not isinstance(tree, dict):
        return tree
    found = {key: listed(value) for key, value in tree.items()}
    if found and set(found) == {str(i) for i in range(len(found))}:
        return [found[str(i)] for i in range(len(found))]
    return found
