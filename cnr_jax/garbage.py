"""Python's search for cyclic garbage, held off while many objects are made that are none."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No search for cyclic garbage meanwhile; also a decorator.

    For what makes many objects in a bounded time: those of a thousand tables are a million, among
    which it would be looked for again and again, a third of the time of a restore.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
