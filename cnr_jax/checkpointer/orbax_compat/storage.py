"""How Orbax is to open arrays where a file system lacks what TensorStore takes for granted."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint._src.serialization import tensorstore_utils

from cnr_jax.repository.store import AnyPath, locks_files, syncs_directories

# What Orbax opens all arrays with that it writes.
_CONTEXTS = (
    tensorstore_utils._BASE_TS_CONTEXT,
    tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT,
)
_changing = threading.Lock()
# How many saves that are being begun or ended ask for each of them.
_asked: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def as_storage_allows(directory: AnyPath) -> Iterator[None]:
    """Has Orbax's arrays be opened so that they can be written where some calls do not work.

    TensorStore takes syncing of folders and locks of the system for granted. Without the former
    it is to sync nothing: what is written there is synced by us. The latter it can replace.

    Args:
        directory: below which they are written.
    """
    wanted: dict[str, Any] = {}
    with contextlib.suppress(OSError):  # of which who writes there says more
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
