"""Items of steps: which folders this library wrote, and which of them holds the state.

Anybody may leave copies of an item beside it. The note of Orbax in a step, and the items of the
other steps, tell which is which.
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

# How many of the newest steps are asked for their items; a root may have thousands of steps.
_ASKED = 8
# Name that Orbax gives to an item which is saved without one.
_DEFAULT = "default"


def find_item(root: AnyPath) -> str | None:
    """Name of the item that holds the checkpoints of this library in a root; None if none does.

    It is the item that most of the newest steps have. Of several such items it is `default`, or
    else one that Orbax noted in the newest step. An item that holds a manifest goes before one that
    holds only other files. If the catalogue knows a step of the root, its item is taken.

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
            continue  # the steps that can be listed are enough
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
    """Names of the items of each step that this library wrote, without copies beside them.

    A copy is in fewer steps than the main item. If Orbax noted items of the step that are there, it
    is none of those. If Orbax noted none of them, it is the same checkpoint as the main item.

    Args:
        root: root that holds the steps.
        steps: names of the step directories.
        main: name of the item that holds the state, or that the user asks for. None: not known.

    Raises:
        OSError: if the steps cannot be seen or listed.
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
    """Whether an item that few steps have is a copy of another item of its step."""
    noted = items_of_orbax(root / step)
    if not noted.isdisjoint(items):
        return name not in noted
    if main not in items:
        return False
    uuid = uuid_of_step(root, step, main)
    return uuid is not None and uuid_of_step(root, step, name) == uuid


def _by_number(directory: str) -> tuple[int, str]:
    return names.step_number(directory), directory
