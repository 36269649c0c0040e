"""Whose a folder of a root is: told by the names in it, without reading manifests.

A folder that cannot be seen is taken for whatever keeps it from harm.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Literal

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.layout import beside, hint_of_names, step_directories
from cnr_jax.repository.store import (
    AnyPath,
    exists,
    is_directory,
    names_in,
    read_small,
)

# Far more than Orbax notes of a step.
_MOST_BYTES = 64 << 20
_OURS = "cnr_jax."
# What Orbax leaves in the folder of a pytree; the first of them says what leaves it has.
_TREE = "_METADATA"
_BY_ORBAX = {_TREE, "_sharding", "manifest.ocdbt", "array_metadatas"}


@dataclasses.dataclass(frozen=True, slots=True)
class Folder:
    """What is seen of a folder of a root.

    Attributes:
        path: of the folder.
        held: names in it; None: it cannot be seen.
        below: of each folder in it the names in that.
    """

    path: AnyPath
    held: tuple[str, ...] | None
    below: Mapping[str, tuple[str, ...]]

    @classmethod
    def look(cls, path: AnyPath) -> Folder:
        """Looks at what is there."""
        try:
            held = names_in(path)
            folders = [name for name in held if is_directory(path / name)]
            below = {name: tuple(names_in(path / name)) for name in folders}
        except OSError:
            return cls(path, None, {})
        return cls(path, tuple(held), below)

    @property
    def is_own(self) -> bool:
        """Whether something in it is what this library alone writes."""
        return any(names.is_own(name) for held in self.below.values() for name in held)

    @property
    def is_checkpoint(self) -> bool:
        """Whether this library or Orbax has saved it as a step, as far as can be seen.

        Orbax leaves `_CHECKPOINT_METADATA` in each step. Nothing is begun beside what may be one.
        """
        if self.held is None:
            return True
        return names.ORBAX_METADATA in self.held or self.is_own

    @property
    def is_foreign(self) -> bool:
        """Whether it holds something, but nothing that this library writes."""
        if self.held is None:
            return True  # and so it is left alone
        return any(self.below.values()) and not self.is_own

    def is_of_others(self, item: str) -> bool:
        """Whether it is called as a step, but is the user's, such as `2024` with plots.

        It holds something, but neither what this library or Orbax saved nor the item's folder, of
        which all else may be lost. An empty one may have been a step, and so may what cannot be
        seen: others may rest on it.
        """
        held = self.held
        return bool(held) and item not in (held or ()) and not self.is_checkpoint

    @property
    def saved_by(self) -> Literal["own", "orbax"] | None:
        """Whether this library (`"own"`) or plain Orbax saved it; None: neither.

        One that cannot be seen is taken for one of ours, and then said to be unreadable.
        """
        if self.held is None or self.is_own:
            return "own"
        if names.ORBAX_METADATA in self.held:
            # One of ours of which nothing else is left.
            handlers = handlers_of(self.path).values()
            return (
                "own" if any(each.startswith(_OURS) for each in handlers) else "orbax"
            )
        found = {*self.held, *(name for held in self.below.values() for name in held)}
        return "orbax" if _BY_ORBAX & found else None


def saved_by(step: AnyPath, item: str) -> Literal["own", "orbax"] | None:
    """Whether this library (`"own"`) or plain Orbax saved a folder; None: neither.

    Args:
        step: the step directory.
        item: of this library, in it.
    """
    try:
        if exists(step / item / names.MANIFEST):
            return "own"
    except OSError:
        return "own"
    return Folder.look(step).saved_by


def is_own_item(item: AnyPath) -> bool:
    """Whether a folder of a step holds anything that this library alone writes.

    Raises:
        OSError: if it cannot be listed, though it is there.
    """
    return any(map(names.is_own, names_in(item)))


def is_state_of_orbax(item: AnyPath) -> bool:
    """Whether the folder of an item holds a pytree that plain Orbax saved."""
    return exists(item / _TREE) and not is_own_item(item)


def folders_in(step: AnyPath) -> list[AnyPath]:
    """The folders in a step directory that may be items, sorted."""
    found = [step / name for name in names_in(step) if names.is_component(name)]
    return [path for path in found if is_directory(path)]


def is_checkpoint(step: AnyPath) -> bool:
    """Whether this library or Orbax has saved a step directory, as far as can be seen."""
    return Folder.look(step).is_checkpoint


def is_earlier_run(folder: AnyPath) -> bool:
    """Whether a folder of a root is the root of an earlier run: called so, and a step is in it.

    Anybody may call a folder so: before it is deleted, it must be seen to be one.

    Raises:
        OSError: if that cannot be seen.
    """
    if names.kind_of_folder(folder.name) != "earlier_runs" or not is_directory(folder):
        return False
    steps = [*step_directories(folder), *beside(folder)["abandoned"]]
    return any(is_checkpoint(folder / name) for name in steps)


def other_checkpoints(
    root: AnyPath, is_step: Callable[[str], bool] | None
) -> tuple[str, ...]:
    """Step directories that a manager does not list, since it would name them otherwise.

    Such as `ck_12` for one without a prefix. Looks into each folder that may be one.

    Raises:
        OSError: if the root cannot be seen or listed.
    """
    if is_step is None or not exists(root):
        return ()
    found = [name for name in step_directories(root) if not is_step(name)]
    return tuple(name for name in found if is_checkpoint(root / name))


def naming_hint(root: AnyPath, is_step: Callable[[str], bool] | None) -> str:
    """Which options list the checkpoints that a manager does not; empty if there are none.

    Args:
        root: whose steps are named in another way, if any are.
        is_step: as for `other_checkpoints`.
    """
    try:
        return hint_of_names(other_checkpoints(root, is_step))
    except OSError:
        return ""


def items_of_orbax(step: AnyPath) -> frozenset[str]:
    """Names of the items of a step, as Orbax noted them; empty where they are not known."""
    return frozenset(handlers_of(step)) - {""}


def handlers_of(step: AnyPath) -> Mapping[str, str]:
    """What handles which item, as Orbax noted it; nothing where that cannot be understood."""
    try:
        text = read_small(step / names.ORBAX_METADATA, _MOST_BYTES)
        handlers = json.loads(text)["item_handlers"]
    except (
        errors.CnrError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ):
        return {}
    # Of a step without items there is one handler.
    told = handlers if isinstance(handlers, dict) else {"": handlers}
    return {str(item): str(handler) for item, handler in told.items()}
