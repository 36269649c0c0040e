"""What commits a step where folders cannot be renamed, and what tells plain Orbax of it.

A file of this library in the folder of a step commits it. Orbax's own follows: it lists the steps
that have that one. Without the first, as in older roots and where nothing is put under a condition,
the second one commits.
"""

from __future__ import annotations

from cnr_jax.format import names
from cnr_jax.repository.store import AnyPath, can, exists, read_all, store_of


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


def show(step: AnyPath) -> None:
    """Has plain Orbax list a committed step.

    Raises:
        OSError: if that cannot be stored.
    """
    marker = step / names.ORBAX_COMMITTED
    store_of(marker).write(marker, names.COMMITTED.encode(), replaces=True)


def hide(step: AnyPath) -> None:
    """Has plain Orbax not list a committed step, which stays committed.

    Raises:
        OSError: if that cannot be stored.
    """
    own, shown = (step / marker for marker in names.MARKERS)
    if not exists(own):
        store_of(own).write(own, read_all(shown), replaces=True)
    store_of(shown).remove_file(shown)
