"""How Orbax opens arrays on a file system that lacks what TensorStore takes for granted."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint._src.serialization import tensorstore_utils

from cnr_jax.repository.store import AnyPath, locks_files, syncs_directories

# TensorStore contexts with which Orbax opens all arrays that it writes.
_CONTEXTS = (
    tensorstore_utils._BASE_TS_CONTEXT,
    tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT,
)
_changing = threading.Lock()
# How many saves that are being begun or ended ask for each change of the contexts.
_asked: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def as_storage_allows(directory: AnyPath) -> Iterator[None]:
    """Context in which Orbax opens arrays so that it can write them where some calls do not work.

    TensorStore expects that folders can be synced and files be locked. If folders cannot, it is
    told to sync nothing, as this library syncs what was written. If files cannot, it is told to
    make lock files.

    Args:
        directory: directory below which the arrays are written.
    """
    wanted: dict[str, Any] = {}
    with contextlib.suppress(OSError):  # whoever writes there tells more
        if not syncs_directories(directory):
            wanted["file_io_sync"] = False
        if not locks_files(directory):
            wanted["file_io_locking"] = {"mode": "lockfile"}
    with _changing:
        _asked.update(wanted.keys())
        for each in _CONTEXTS:
            each.update(wanted)
    try:
        yield
    finally:
        with _changing:
            _asked.subtract(wanted.keys())
            for key in wanted:
                if not _asked[key]:
                    for each in _CONTEXTS:
                        each.pop(key, None)
