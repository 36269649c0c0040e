"""Python's search for cyclic garbage, held off while many objects are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Holds off the search for cyclic garbage; also a decorator.

    For code that makes many objects in a bounded time. A thousand tables make a million objects.
    To search them again and again would take a third of the time of a restore.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
