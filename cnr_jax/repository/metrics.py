"""Metrics of a run: a file of JSON in its root, with one line for each save or restore.

The file is no part of any checkpoint: whoever loses it loses no step. A line is appended by one
call. So a killed program leaves whole lines, and perhaps the beginning of one more.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, cast

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.layout import check_can_be_read, open_root
from cnr_jax.repository.store import AnyPath, can, read_all, store_of
from cnr_jax.repository.store.checked import reading

# Phases of a save, in their order. Its report, and so its line, has `find_secs` and so on.
PHASES = ("find", "gather", "encode", "write", "commit")


def check_can_append(root: AnyPath) -> None:
    """Checks that metrics can be kept in a root.

    Raises:
        OptionError: if the root is in a store, where nothing can be appended.
    """
    if not can(root).appends:
        raise errors.OptionError(
            f"metrics cannot be kept in {os.fspath(root)}\n"
            "  got metrics=True and a root in a store, where files cannot grow; expected a local"
            " root\n"
            "  hint: on_save= is called with each report, and may write it anywhere"
        )


def append_event(root: AnyPath, event: str, facts: Mapping[str, Any]) -> None:
    """Adds a line to the metrics of a root.

    Args:
        root: a local root.
        event: kind of event, `"save"` or `"restore"`.
        facts: values of JSON.

    Raises:
        OSError: if the line cannot be written; a part of it may be left.
    """
    document = {
        "event": event,
        "written_at_unix_secs": round(time.time(), 3),
        **facts,
    }
    line = json.dumps(document, separators=(",", ":"), default=str).encode() + b"\n"
    path = root / names.METRICS
    store_of(path).append(path, line)


def read_metrics(root: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads what a run with `Options(metrics=True)` has noted in its root, the oldest first.

    It imports neither jax nor Orbax, and a run may be saving there. It passes over lines that tell
    of neither a save nor a restore, such as the beginning of a line that a killed program has left.
    If a root holds runs one after the other (`Options(new_run=True)`), all of them are in one file:
    `run` tells them apart.

    Args:
        root: directory of the checkpoints, a local path.

    Returns:
        A dict for each save and restore: `event`, which is `"save"` or `"restore"`;
        `written_at_unix_secs`; and what `asdict()` of the `SaveReport` or `RestoreReport` gives,
        without the leaves of tables. The list is empty if there are no metrics.

    Raises:
        NoStepError: if there is no such folder; it is a FileNotFoundError too.
        OptionError: if the path is a file, or a step of a root.
        IntegrityError: if something other than a file is in the place of the metrics.
        OSError: if the metrics cannot be read.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root, state = tempfile.mkdtemp(), {"user": jnp.zeros((8, 4))}
        >>> tables, options = cnr.find_tables(state, ["user"]), cnr.Options(metrics=True)
        >>> with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        >>> [(line["event"], line["step"], line["rows"]) for line in cnr.read_metrics(root)]
        [('save', 0, 8)]
    """
    folder = open_root(root)
    check_can_be_read(folder)
    path = folder / names.METRICS
    try:
        with reading(path):
            data = read_all(path)
    except errors.IntegrityError as error:
        if error.kind != "file_missing":
            raise
        return []  # a run may be saving there, and somebody may tidy up
    found: list[dict[str, Any]] = []
    for line in data.split(b"\n"):
        try:
            document: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict) and document.get("event") in ("save", "restore"):
            found.append(cast("dict[str, Any]", document))
    return found
