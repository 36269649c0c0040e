"""Who saved a folder of a root, found out by the names in it, without reading manifests.

A folder that cannot be seen is taken for whatever keeps it from being moved or deleted.
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
# Names that Orbax leaves in the folder of a pytree; the first file lists its leaves.
_TREE = "_METADATA"
_BY_ORBAX = {_TREE, "_sharding", "manifest.ocdbt", "array_metadatas"}
FolderKind = Literal["own", "orbax", "other"]
"""Who saved a folder: this library, plain Orbax, or neither."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of a root, described by the names in it.

    Attributes:
        path: path of the folder.
        item: name of the item of this library, which a step holds; None if it is not known.
        held: names in the folder, or only that of the item if that holds a manifest; None if the
            folder cannot be seen.
        below: names in each folder of `held`, by the name of that folder.
        why: why no manifest of the folder can be read; empty if nobody tried.
        doubt: failure of storage when a manifest was read, which may pass. `"withheld"`: storage
            did not give the folder out, which may be whole. `"unread"`: it failed to read it.
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
        """Looks at a folder on storage.

        Args:
            path: path of the folder.
            item: see `Folder`.
            error: error that reading its manifest raised; None if nobody tried to read it.
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
        """Who saved the folder; found out at the first access, since it may read a file.

        A folder that cannot be seen counts as `"own"`, so that it is reported as unreadable.
        """
        return _kind_of(self.path, self.held, self.below)

    @property
    def is_checkpoint(self) -> bool:
        """Whether this library or Orbax saved the folder as a step; True if it cannot be seen.

        Orbax leaves `_CHECKPOINT_METADATA` in each step. No run begins beside what may be a step.
        """
        if self.held is None:
            return True
        return names.ORBAX_METADATA in self.held or _hold_own(self.below)

    @property
    def may_be_a_step(self) -> bool:
        """Whether the folder may be a step, or have been one.

        A folder of the user with such a name, say `2024` with plots, is not: it holds something,
        but neither files of this library or Orbax nor the folder of the item, which may be all
        that is left of a step. An empty folder may have been a step, and so may one that cannot
        be seen. Others may rest on these.
        """
        return not self.held or self.item in self.held or self.is_checkpoint

    @property
    def is_foreign(self) -> bool:
        """Whether it holds something, but nothing that this library writes, and is left alone.

        False if storage failed when its manifest was read; else True if it cannot be seen.
        """
        if self.doubt:
            return False
        if self.held is None or not self.may_be_a_step:
            return True  # so nothing moves or deletes it
        return any(self.below.values()) and not _hold_own(self.below)

    @property
    def states(self) -> list[str]:
        """Names of the items in it that are pytrees saved by plain Orbax."""
        return [
            name
            for name, held in self.below.items()
            if _TREE in held and not any(map(names.is_own, held))
        ]


def _names_below(
    path: store.AnyPath, item: str | None
) -> tuple[tuple[str, ...] | None, Mapping[str, tuple[str, ...]]]:
    """Names in a folder and in the folders below it, as `held` and `below` of `Folder`."""
    try:
        # Most folders hold a manifest, which is enough: a root may have thousands of steps.
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
        # A step of this library of which only this file is left is recognized by its handlers.
        handlers = handlers_of(path).values()
        return "own" if any(each.startswith(_OURS) for each in handlers) else "orbax"
    found = {*held, *(name for inner in below.values() for name in inner)}
    return "orbax" if _BY_ORBAX & found else "other"


def _hold_own(below: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether any of these folders holds a file that only this library writes."""
    return any(names.is_own(name) for held in below.values() for name in held)


def is_own_item(item: store.AnyPath) -> bool:
    """Whether a folder of a step holds a file that only this library writes.

    Raises:
        OSError: if the folder exists, but cannot be listed.
    """
    return any(map(names.is_own, store.names_in(item)))


def is_state_of_orbax(item: store.AnyPath) -> bool:
    """Whether the folder of an item holds a pytree that plain Orbax saved."""
    return store.exists(item / _TREE) and not is_own_item(item)


def folders_in(step: store.AnyPath) -> list[store.AnyPath]:
    """Paths of the folders in a step directory that may be items, sorted."""
    if not store.can(step).cheap_looks:
        kept = store.store_of(step)
        return [step / n for n in sorted(kept.folders_in(step, names.is_component))]
    found = [step / name for name in store.names_in(step) if names.is_component(name)]
    return [path for path in found if store.is_directory(path)]


def is_earlier_run(folder: store.AnyPath) -> bool:
    """Whether a folder of a root is the root of an earlier run, by its name and a step in it.

    A user may give any folder such a name. So it must be known to hold a step before a program
    deletes it.

    Raises:
        OSError: if the folder cannot be seen.
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
    """Step directories that a manager does not list, since it names its steps differently.

    An example is `ck_12` for a manager without a prefix. Looks into each folder that may be one.

    Raises:
        OSError: if the root cannot be seen or listed.
    """
    if is_step is None or not store.exists(root):
        return ()
    found = [name for name in layout.step_directories(root) if not is_step(name)]
    return tuple(n for n in found if Folder.look(root / n).is_checkpoint)


def naming_hint(root: store.AnyPath, is_step: Callable[[str], bool] | None) -> str:
    """Hint at the options that list the checkpoints a manager does not; empty if there are none.

    Args:
        root: root whose steps may be named in another way.
        is_step: as for `other_checkpoints`.
    """
    try:
        return layout.hint_of_names(other_checkpoints(root, is_step))
    except OSError:
        return ""


def items_of_orbax(step: store.AnyPath) -> frozenset[str]:
    """Names of the items of a step, as Orbax noted them; empty if they are not known."""
    return frozenset(handlers_of(step)) - {""}


def handlers_of(step: store.AnyPath) -> Mapping[str, str]:
    """Handler of each item, as Orbax noted it; empty if the note cannot be read or understood."""
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
    # A step without items has a single handler, as a string.
    told = handlers if isinstance(handlers, dict) else {"": handlers}
    return {str(item): str(handler) for item, handler in told.items()}
