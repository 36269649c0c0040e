"""Whose a folder of a root is: told by the names in it, without reading manifests.

A folder that cannot be seen is taken for whatever keeps it from harm.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Literal

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository import layout, store
from cnr_jax.repository.store import checked

# Far more than Orbax notes of a step.
ORBAX_NOTE_BYTES = 64 << 20
_OURS = "cnr_jax."
# What Orbax leaves in the folder of a pytree; the first of them says what leaves it has.
_TREE = "_METADATA"
_BY_ORBAX = {_TREE, "_sharding", "manifest.ocdbt", "array_metadatas"}
FolderKind = Literal["own", "orbax", "other"]
"""Who saved a folder: this library, plain Orbax, or neither."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of a root, by the names in it.

    Attributes:
        path: of the folder.
        item: of this library, which is in it if it is a step; None: not known.
        held: names in it, or of these the item alone where that holds a manifest; None: it cannot
            be seen.
        below: of each of these that is a folder the names in that.
        why: no manifest of it can be read; empty where none was asked for.
        doubt: what storage did when that was tried, and may not do again: `"withheld"`: it did
            not give the folder out, which may be whole; `"unread"`: it failed to read it.
    """

    path: store.AnyPath
    item: str | None
    held: tuple[str, ...] | None
    below: Mapping[str, tuple[str, ...]]
    why: str = ""
    doubt: Literal["", "withheld", "unread"] = ""

    @classmethod
    def look(
        cls,
        path: store.AnyPath,
        item: str | None = None,
        error: Exception | None = None,
    ) -> Folder:
        """Looks at what is there.

        Args:
            path: of the folder.
            item: see `Folder`.
            error: with which its manifest could not be read; None: that was not tried.
        """
        why, doubt = "" if error is None else str(error), ""
        if error is not None and not isinstance(error, errors.CnrError):
            doubt = "withheld"
        elif error is not None and error.kind == checked.UNREAD:
            doubt = "unread"
        held, below = _names_below(path, item)
        return cls(
            path=path,
            item=item,
            held=held,
            below=below,
            why=why,
            doubt=doubt,
        )

    @functools.cached_property
    def kind(self) -> FolderKind:
        """Who saved it: found out when it is first asked, as a file may have to be read.

        One that cannot be seen is taken for one of ours, and then said to be unreadable.
        """
        return _kind_of(self.path, self.held, self.below)

    @property
    def is_checkpoint(self) -> bool:
        """Whether this library or Orbax has saved it as a step, as far as can be seen.

        Orbax leaves `_CHECKPOINT_METADATA` in each step. Nothing is begun beside what may be one.
        """
        if self.held is None:
            return True
        return names.ORBAX_METADATA in self.held or _hold_own(self.below)

    @property
    def may_be_a_step(self) -> bool:
        """Whether it may be a step, or have been one.

        Not if it is called so, but is the user's, such as `2024` with plots: it holds something,
        but neither what this library or Orbax saved nor the item's folder, where all else may
        be lost. An empty one may have been a step, and so may what cannot be seen: others may
        rest on it.
        """
        return not self.held or self.item in self.held or self.is_checkpoint

    @property
    def is_foreign(self) -> bool:
        """Whether it holds something, but nothing that this library writes; in doubt it is not."""
        if self.doubt:
            return False
        if self.held is None or not self.may_be_a_step:
            return True  # and so it is left alone
        return any(self.below.values()) and not _hold_own(self.below)

    @property
    def states(self) -> list[str]:
        """The items in it that are pytrees which plain Orbax saved."""
        return [
            name
            for name, held in self.below.items()
            if _TREE in held and not any(map(names.is_own, held))
        ]


def _names_below(
    path: store.AnyPath, item: str | None
) -> tuple[tuple[str, ...] | None, Mapping[str, tuple[str, ...]]]:
    """The names in a folder and in the folders in it, as `Folder` has them."""
    try:
        # Mostly there is one, and it says all: a root has thousands of steps.
        if item is not None and store.exists(path / item / names.MANIFEST):
            return (item,), {item: (names.MANIFEST,)}
        held = store.names_in(path)
        return tuple(held), {
            folder.name: tuple(store.names_in(folder)) for folder in folders_in(path)
        }
    except OSError:
        return None, {}


def _kind_of(
    path: store.AnyPath,
    held: tuple[str, ...] | None,
    below: Mapping[str, tuple[str, ...]],
) -> FolderKind:
    """Who saved a folder; `held` and `below` are names as `Folder` has them."""
    if held is None or _hold_own(below):
        return "own"
    if names.ORBAX_METADATA in held:
        # One of ours; nothing else of it is left.
        handlers = handlers_of(path).values()
        return "own" if any(each.startswith(_OURS) for each in handlers) else "orbax"
    found = {*held, *(name for inner in below.values() for name in inner)}
    return "orbax" if _BY_ORBAX & found else "other"


def _hold_own(below: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether something in these folders is what this library alone writes."""
    return any(names.is_own(name) for held in below.values() for name in held)


def is_own_item(item: store.AnyPath) -> bool:
    """Whether a folder of a step holds anything that this library alone writes.

    Raises:
        OSError: if it cannot be listed, though it is there.
    """
    return any(map(names.is_own, store.names_in(item)))


def is_state_of_orbax(item: store.AnyPath) -> bool:
    """Whether the folder of an item holds a pytree that plain Orbax saved."""
    return store.exists(item / _TREE) and not is_own_item(item)


def folders_in(step: store.AnyPath) -> list[store.AnyPath]:
    """The folders in a step directory that may be items, sorted."""
    if not store.can(step).cheap_looks:
        kept = store.store_of(step)
        return [step / n for n in sorted(kept.folders_in(step, names.is_component))]
    found = [step / name for name in store.names_in(step) if names.is_component(name)]
    return [path for path in found if store.is_directory(path)]


def is_earlier_run(folder: store.AnyPath) -> bool:
    """Whether a folder of a root is the root of an earlier run: called so, and a step is in it.

    Anybody may call a folder so: before it is deleted, it must be seen to be one.

    Raises:
        OSError: if that cannot be seen.
    """
    if names.kind_of_folder(folder.name) != "earlier_runs" or not store.is_directory(
        folder
    ):
        return False
    steps = [*layout.step_directories(folder), *layout.beside(folder)["abandoned"]]
    return any(Folder.look(folder / name).is_checkpoint for name in steps)


def other_checkpoints(
    root: store.AnyPath, is_step: Callable[[str], bool] | None
) -> tuple[str, ...]:
    """Step directories that a manager does not list, since it would name them otherwise.

    Such as `ck_12` for one without a prefix. Looks into each folder that may be one.

    Raises:
        OSError: if the root cannot be seen or listed.
    """
    if is_step is None or not store.exists(root):
        return ()
    found = [name for name in layout.step_directories(root) if not is_step(name)]
    return tuple(n for n in found if Folder.look(root / n).is_checkpoint)


def naming_hint(root: store.AnyPath, is_step: Callable[[str], bool] | None) -> str:
    """Which options list the checkpoints that a manager does not; empty if there are none.

    Args:
        root: whose steps are named in another way, if any are.
        is_step: as for `other_checkpoints`.
    """
    try:
        return layout.hint_of_names(other_checkpoints(root, is_step))
    except OSError:
        return ""


def items_of_orbax(step: store.AnyPath) -> frozenset[str]:
    """Names of the items of a step, as Orbax noted them; empty where they are not known."""
    return frozenset(handlers_of(step)) - {""}


def handlers_of(step: store.AnyPath) -> Mapping[str, str]:
    """What handles which item, as Orbax noted it; nothing where that cannot be understood."""
    try:
        text = store.read_small(step / names.ORBAX_METADATA, ORBAX_NOTE_BYTES)
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
