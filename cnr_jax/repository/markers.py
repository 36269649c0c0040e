"""What commits a step where folders cannot be renamed, and what tells plain Orbax of it.

A file of this library in the folder of a step commits it. Orbax's own follows: it lists the steps
that have that one. Without the first, as in older roots and where nothing is put under a condition,
the second one commits.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from cnr_jax.format import names
from cnr_jax.repository.store import AnyPath, can, exists, read_all, store_of

# Steps that are hidden at a time.
_AT_ONCE = 16


def is_committed(step: AnyPath) -> bool:
    """Whether a folder is that of a committed step; for stores that cannot rename it.

    Raises:
        OSError: if that cannot be seen.
    """
    # The likelier one first: each look is a request.
    markers = names.MARKERS if can(step).conditions else reversed(names.MARKERS)
    return any(exists(step / marker) for marker in markers)


def is_shown(step: AnyPath) -> bool:
    """Whether plain Orbax lists a committed step.

    Raises:
        OSError: if that cannot be seen.
    """
    return exists(step / names.ORBAX_COMMITTED)


def show_alone(root: AnyPath, directory: str, left: Collection[str]) -> None:
    """Has plain Orbax list a committed step, and none of those that it leaves behind.

    Those first: rather neither of two steps of a number than the wrong one.

    Args:
        root: holds the steps.
        directory: of the step.
        left: directories of the others.

    Raises:
        OSError: if that cannot be stored.
    """
    with ThreadPoolExecutor(_AT_ONCE, "cnr_hide") as pool:
        list(pool.map(_hide, (root / name for name in left)))
    if can(root).conditions:  # else that is what has committed it
        marker = root / directory / names.ORBAX_COMMITTED
        store_of(root).write(marker, names.COMMITTED.encode(), replaces=True)


def _hide(step: AnyPath) -> None:
    """Has plain Orbax not list a committed step, which stays committed."""
    own, shown = (step / marker for marker in names.MARKERS)
    if not exists(shown):
        return
    if not exists(own):
        store_of(own).write(own, read_all(shown), replaces=True)
    store_of(shown).remove_file(shown)
