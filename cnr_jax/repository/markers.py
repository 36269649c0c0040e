"""What commits a step where folders cannot be renamed, and what tells plain Orbax of it.

A file of this library in the folder of a step names the attempt that holds it, and says whether
that has committed the step. Orbax's own file follows: it lists the steps that have that one. Where
the first does not commit, as in older roots and where nothing is put under a condition, the second
one does.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from cnr_jax.format import names
from cnr_jax.repository.store import AnyPath, exists, read_all, store_of

_COMMITTED = b" committed"
# Orbax's file where ours commits. Who puts it may have slept until the step was removed.
_FOLLOWS = names.ATTEMPT.encode()
# Steps that are hidden at a time.
_AT_ONCE = 16


def committed(nonce: str) -> bytes:
    """What the file of an attempt holds once that is committed.

    Example:
        >>> says_committed(committed("00ff")), says_committed(b"00ff")
        (True, False)
    """
    return nonce.encode() + _COMMITTED


def says_committed(attempt: bytes) -> bool:
    """Whether the file of an attempt says that it is committed."""
    return attempt.endswith(_COMMITTED)


def is_committed(step: AnyPath, held: Collection[str] | None = None) -> bool:
    """Whether a folder is that of a committed step; for stores that cannot rename it.

    Args:
        step: the folder.
        held: names of what it holds; None: not known.

    Raises:
        OSError: if that cannot be seen.
    """
    # The likelier one first: each look is a request.
    found = (m for m in names.MARKERS if held is None or m in held)
    return any(_commits(step / marker) for marker in found)


def _commits(marker: AnyPath) -> bool:
    """Whether one of the two files is there and commits its step."""
    try:
        data = read_all(marker)
    except FileNotFoundError:
        return False
    return says_committed(data) if marker.name == names.ATTEMPT else data != _FOLLOWS


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
    marker = root / directory / names.ORBAX_COMMITTED
    store_of(root).write(marker, _FOLLOWS, replaces=True)


def _hide(step: AnyPath) -> None:
    """Has plain Orbax not list a committed step, which stays committed."""
    own, shown = (step / marker for marker in names.MARKERS)
    if not exists(shown):
        return
    if not _commits(own):
        # Of a folder that was copied here, or was made by an older version.
        nonce = read_all(shown).decode(errors="replace")
        store_of(own).write(own, committed(nonce), replaces=True)
    store_of(shown).remove_file(shown)
