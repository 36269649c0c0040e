"""A checkpoint of plain Orbax whose arrays are written by somebody else, block by block.

Orbax wants whole arrays in memory. So it is given small arrays, and the caller puts the real ones
in their places. If Orbax does not pack arrays (`use_ocdbt=False`), each is a folder of its own, and
only there does Orbax read how long the array is.
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
    """Name of the folder in which Orbax looks for the array of a leaf.

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
        directory: directory that is made for it.
        leaves: leaves by path.
        metadata: metadata that Orbax keeps with it.
        like: state with the wanted structure, which has the given leaves and no others; None: the
            structure is made of dicts, and of lists where the keys of a dict are 0, 1, 2 and so on.
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
    """Orbax's own handlers, with a new one for texts, which keeps the context it is made with."""
    types = ocp.type_handlers
    kinds = (int, float, np.number, np.ndarray, jax.Array)
    known = [(kind, types.get_type_handler(kind)) for kind in kinds]
    return types.create_type_handler_registry(*known, (str, types.StringHandler()))


def _tells_something(record: logging.LogRecord) -> bool:
    """Whether a record tells something: not that nothing is packed, which is on purpose here."""
    return "Skipping merge of OCDBT" not in str(record.msg)


def _shaped(like: Any, leaves: Mapping[LeafPath, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: leaves[key_strings(keys)], like
    )


def listed(tree: Any) -> Any:
    """Nested dicts, with lists in the places of dicts whose keys are 0, 1, 2 and so on.

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
