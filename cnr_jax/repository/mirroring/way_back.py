"""The way back from a mirror: brings back steps that a root has lost, and mends damaged ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cnr_jax import errors
from cnr_jax.repository.causes import as_root_errors, in_one_line
from cnr_jax.repository.index.entries import order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import check_is_root
from cnr_jax.repository.mirroring.copier import Copier
from cnr_jax.repository.mirroring.places import is_free
from cnr_jax.repository.store import AnyPath, exists
from cnr_jax.texts import count_of, logger

_log = logger(__name__)


class WayBack:
    """Way of steps from a mirror into the root, which lacks them or holds them damaged.

    Args:
        root: root that is mirrored, and is written to here.
        target: mirror of the root, which is only read here.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        item: name of the item of each step; None: the one that is found.
        single: whether to skip the trial of the store's conditions, see `Options.single_writer`.
    """

    def __init__(
        self,
        root: AnyPath,
        target: AnyPath,
        *,
        is_step: Callable[[str], bool] | None = None,
        item: str | None = None,
        single: bool = False,
    ) -> None:
        self.root, self.target = root, target
        self._is_step, self._item = is_step, item
        self._settings: Any = {"is_step": is_step, "item": item, "single": single}

    def bring(self, step: int | None = None) -> bool:
        """Brings a step, and all steps that it rests on, from the mirror into the root.

        Does nothing if the mirror holds no such step, or another manager may be saving to the root.

        Args:
            step: number of the step. None: the newest one that is whole in the mirror, if it is
                newer than all steps of the root that restore.

        Returns:
            Whether steps came into the root. With a number, ask only for a step that it lacks.

        Raises:
            UsedRootError: if the mirror holds another run than the root.
            RootError: if the mirror cannot be read, or the root cannot be written, and either
                `step` is given or no step of the root restores. A root that lost its steps must
                not look like one in which nothing was ever saved.
        """
        own = None
        item = self._item or find_item(self.root)
        if item is not None:
            own = Ledger.load(self.root, item, self._is_step)
        try:
            return self._bring(own, item, step)
        except errors.RootError as error:
            if step is not None or own is None or own.newest() is None:
                raise
            _log.warning(
                "newer steps that the mirror may hold do not come: %s",
                in_one_line(error),
            )
            return False

    def _bring(self, own: Ledger | None, item: str | None, step: int | None) -> bool:
        with as_root_errors(self.target, "read"):
            check_is_root(self.target)
            item = item or find_item(self.target)
            if item is None or not exists(self.target):
                return False
            theirs = Ledger.load(self.target, item, self._is_step)
        newest = own.newest() if own is not None else None
        tried = set[str]()
        while True:
            found = [e for e in theirs.restorable() if e.directory not in tried]
            if step is not None:
                found = [entry for entry in found if entry.step == step]
            is_other = newest is not None and found and newest.run != found[-1].run
            if not found or (
                step is None
                and newest
                and not is_other
                and order(found[-1]) <= order(newest)
            ):
                return False
            if newest is not None and is_other:
                raise errors.UsedRootError(
                    f"{os.fspath(self.target)} holds another run than"
                    f" {os.fspath(self.root)}, and neither can be the copy of the other\n"
                    f"  got run {found[-1].run}, expected {newest.run}\n"
                    "  hint: choose another folder for one of them"
                )
            if not is_free(self.root):
                return False
            copier = self._copier(item)
            filled = as_root_errors(self.root, "filled from its mirror")
            try:
                with filled, copier.writer.for_a_while():
                    copier.look()
                    brought = copier.copy_chain(found[-1])
            except errors.DAMAGE as error:
                tried.add(found[-1].directory)
                _log.warning(
                    "step %s of the mirror %s is passed over: %s",
                    found[-1].directory,
                    self.target,
                    in_one_line(error),
                )
                continue
            _log.warning(
                "%s lacked %s: %s, copied from the mirror %s",
                self.root,
                count_of(len(brought), "step"),
                ", ".join(brought),
                self.target,
            )
            return True

    def _copier(self, item: str | None) -> Copier:
        """Copier into the root; a manager that saves there goes on with its save afterwards."""
        copier = Copier(self.target, self.root, **self._settings | {"item": item})
        copier.writer.stops = False
        return copier

    def mend(self, directory: str) -> bool:
        """Mends a step of the root, and the steps that it rests on, with files of the mirror.

        Returns:
            Whether anything was mended.
        """
        if not is_free(self.root):
            return False
        copier = self._copier(self._item)
        try:
            with copier.writer.for_a_while():
                if not copier.look() or directory not in copier.source.entries:
                    return False
                chain = copier.source.chain(copier.source.entries[directory])
                mended = copier.mend(reversed(chain))
        except (errors.CnrError, OSError) as error:
            _log.warning(
                "step %s cannot be mended by the mirror: %s",
                directory,
                in_one_line(error),
            )
            return False
        for each in mended:
            _log.warning("%s was damaged, and is mended by the mirror", each)
        return bool(mended)
