"""Where Orbax puts steps and items, under which names, and what it knows of them."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_manager

from cnr_jax.format import names
from cnr_jax.repository.checked import refuse_pipe
from cnr_jax.repository.files import AnyPath
from cnr_jax.repository.layout import Place, open_root

_log = logging.getLogger(__name__)
# Item and file of a step's metrics.
METRICS = checkpoint_manager.METRIC_ITEM_NAME


def place_of(directory: AnyPath) -> Place:
    """The final place of an item from the path that Orbax hands to its handler.

    Raises:
        OptionError: if it is in a store that roots cannot be in, though Orbax opens it.

    Example:
        >>> from pathlib import Path
        >>> tmp = ".orbax-checkpoint-tmp"
        >>> place = place_of(Path(f"/ckpt/12{tmp}/state{tmp}"))
        >>> place.directory, place.item
        ('12', 'state')
    """
    step = directory.parent
    open_root(step.parent)
    return Place(
        root=step.parent,
        directory=names.final_name(step.name),
        item=names.final_name(directory.name),
    )


def step_names(
    options: ocp.CheckpointManagerOptions | None,
) -> Callable[[str], bool] | None:
    """Tells the names of a manager's step directories from others.

    Returns:
        None where a format of the user's own names them: it may read names that it would not
        write.

    Example:
        >>> is_step = step_names(ocp.CheckpointManagerOptions(step_prefix="ck"))
        >>> is_step("ck_12"), is_step("ck_012"), is_step("lost+found0")
        (True, False, False)
    """
    options = options or ocp.CheckpointManagerOptions()
    if options.step_name_format is not None:
        return None
    written = ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )
    return lambda name: written.build_name(names.step_number(name)) == name


def refuse_pipes(step: AnyPath) -> None:
    """Makes sure that Orbax can read what it wrote beside the state without waiting for ever.

    Raises:
        IntegrityError: if a pipe, a socket or a device is in the place of such a file.
    """
    refuse_pipe(step / names.ORBAX_METADATA)
    refuse_pipe(step / METRICS / METRICS)


def checkpoint_infos(manager: Any, skip_metadata_read: bool) -> list[Any]:
    """The steps of a root as Orbax's manager tracks them, sorted.

    As the manager's own `_load_checkpoint_infos`, but what Orbax wrote beside the state (times
    and metrics) may be damaged: it is left out then, with a warning.
    """
    found: list[Any] = []
    for step in manager._step_name_format.find_all(manager.directory):
        time, metrics = datetime.datetime.min, None
        if not skip_metadata_read:
            # Whatever stands in those files, and of whatever type it is.
            try:
                refuse_pipes(step.path)
                time = step.commit_timestamp
            except Exception as error:
                _warn_of_metadata(step.path, "its time", error)
                secs = float(step.path.stat().mtime)
                time = datetime.datetime.fromtimestamp(secs, tz=datetime.UTC)
            try:
                refuse_pipes(step.path)
                metrics = manager.metrics(step.step)
            except Exception as error:
                _warn_of_metadata(step.path, "its metrics", error)
        found.append(
            checkpoint_manager.CheckpointInfo(
                step=step.step, time=time, metrics=metrics
            )
        )
    return sorted(found, key=lambda info: info.step)


def _warn_of_metadata(step: Any, what: str, error: Exception) -> None:
    _log.warning(
        "step %s goes without %s: what Orbax wrote there cannot be read (%s)",
        step,
        what,
        error,
    )
