"""Which folders of a step are items of this library, and which of these is the state.

Anybody may leave copies of an item beside it: what Orbax noted of a step, and what the other steps
hold, tells which is which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cnr_jax.format import names
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.index.folders import folders_in, is_own_item, items_of_orbax
from cnr_jax.repository.layout import step_directories
from cnr_jax.repository.step import uuid_of_step
from cnr_jax.repository.store import AnyPath, exists

# Steps that are asked for their items, the newest: a root may have thousands.
_ASKED = 8
# As Orbax calls the item of a step that was saved as nothing else.
_DEFAULT = "default"


def find_item(root: AnyPath) -> str | None:
    """The item of a root's steps that holds a checkpoint of this library, if any does.

    The one that most of the newest steps have; of several, rather `default`, or what Orbax noted
    of the newest of these. Rather one that holds a manifest than one that holds other files
    alone.

    Raises:
        OSError: if the root, or the newest steps in it, cannot be seen or listed.
    """
    if not exists(root):
        return None
    found: list[tuple[AnyPath, list[str]]] = []
    rest: list[AnyPath] = []
    directories = step_directories(root)
    known = catalogue.read(root)
    if not known.entries.keys().isdisjoint(directories):
        return known.item
    for name in sorted(directories, key=_by_number, reverse=True):
        try:
            folders = folders_in(root / name)
            held = [path for path in folders if exists(path / names.MANIFEST)]
        except OSError:
            if not found:
                raise
            continue  # those that can be seen tell
        if held:
            found.append((root / name, [path.name for path in held]))
        elif not found:
            rest += folders
        if len(found) == _ASKED:
            break
    if not found:
        return next((item.name for item in rest if is_own_item(item)), None)
    count = Counter(item for _, items in found for item in items)
    most = max(count.values())
    likely = sorted(item for item, steps in count.items() if steps == most)
    if len(likely) > 1 and _DEFAULT not in likely:
        likely = sorted(items_of_orbax(found[0][0]).intersection(likely)) or likely
    return _DEFAULT if _DEFAULT in likely else likely[0]


def items_of(
    root: AnyPath, steps: Iterable[str], main: str | None
) -> dict[str, list[str]]:
    """By step, the items that this library wrote, without copies that somebody left beside them.

    A copy is in fewer steps than the main item, and is none that Orbax noted of its step, where it
    noted another one that is there; or, where it noted none, it is the same checkpoint as the main
    item.

    Args:
        root: holds the steps.
        steps: the step directories.
        main: the item that holds the state, or is asked for. None: not known.

    Raises:
        OSError: if they cannot be seen or listed.
    """
    own = {
        step: [path.name for path in folders_in(root / step) if is_own_item(path)]
        for step in steps
    }
    count = Counter(item for items in own.values() for item in items)
    rare = {item for item in count if main is not None and count[item] < count[main]}
    return {
        step: [
            n
            for n in items
            if n not in rare or not _is_copy(root, step, items, n, main)
        ]
        for step, items in own.items()
    }


def _is_copy(
    root: AnyPath, step: str, items: list[str], name: str, main: str | None
) -> bool:
    """Whether an item that few steps have is a copy of another one of its step."""
    noted = items_of_orbax(root / step)
    if not noted.isdisjoint(items):
        return name not in noted
    if main not in items:
        return False
    uuid = uuid_of_step(root, step, main)
    return uuid is not None and uuid_of_step(root, step, name) == uuid


def _by_number(directory: str) -> tuple[int, str]:
    return names.step_number(directory), directory
