"""Which step a restore takes, and what is said where one cannot be restored.

A restore of a given step never substitutes. One of the newest step passes over those that turn
out damaged, and over what rests on them: each is named in the log with the reason.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.checked import accessing, refuse_pipe
from cnr_jax.repository.files import AnyPath, exists, is_directory
from cnr_jax.repository.lineage import suspects
from cnr_jax.repository.lineage.entries import Entry
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.step import read_step

_log = logging.getLogger(__name__)
_SHOWN = 10


class StepChooser:
    """Which step of a root a restore takes, and what is said of those that are passed over.

    Args:
        root: holds the step directories.
        item: name of the item in them.
        ledger: reads what is known of them, when that is needed first; what it returns is told
            of the damage that is found.
    """

    def __init__(self, root: AnyPath, item: str, ledger: Callable[[], Ledger]) -> None:
        self._root, self._item, self._read = root, item, ledger

    @functools.cached_property
    def ledger(self) -> Ledger:
        """What is known of the steps."""
        return self._read()

    def newest(self) -> int:
        """The newest step of which no damage is known.

        Raises:
            NoStepError: if there is none.
        """
        self._ask_again()
        restorable = self.ledger.restorable()
        if restorable:
            return restorable[-1].step
        raise errors.NoStepError(
            "\n  ".join(
                [
                    f"no step in {os.fspath(self._root)} can be restored",
                    *(f"{name}: {why}" for name, why in self._obstacles()[:_SHOWN]),
                ]
            )
        )

    def note(self, step: int, error: errors.CnrError) -> None:
        """Notes that a step is damaged; adds to the error what only the root tells.

        Args:
            step: that could not be restored.
            error: why; one of `errors.DAMAGE`. It gets the chain of the step, and the steps
                that could be restored instead.
        """
        entry = self.ledger.by_step(step)
        self._note(entry, error)
        self._explain(step, entry, error)

    def warn(self, step: int, *, asked_for: bool) -> None:
        """Says in the log what is to be known of a step that was restored.

        Args:
            step: the one.
            asked_for: by its number; else also newer ones are named, which were passed over.
        """
        if not asked_for:
            for directory, reason in self._passed_over(step):
                _log.warning(
                    "step %s is passed over, and step %d restored: %s",
                    directory,
                    step,
                    reason,
                )
        noted = suspects.read(self._root)
        if step in [each.step for each in noted] or (noted and not asked_for):
            suspects.warn(noted, self._root, self.ledger, step)

    def _ask_again(self) -> None:
        """Reads steps that storage did not give out; they may be the newest.

        Raises:
            OSError: if it still does not, and no newer step is known to be whole.
        """
        restorable = self.ledger.restorable()
        newest = restorable[-1].step if restorable else -1
        for directory in sorted(self.ledger.withheld):
            if names.step_number(directory) > newest:
                self.ledger.read(self._root, directory, self._item)
                if directory in self.ledger.withheld:
                    read_step(self._root, directory, self._item)

    def _note(self, entry: Entry | None, error: errors.CnrError) -> None:
        """Notes the damage where it is, or else with the step itself."""
        reason = str(error).partition("\n")[0]
        above = os.fspath(self._root).rstrip("/") + "/"
        if error.path is not None and error.path.startswith(above):
            self.ledger.note_damage(error.path.removeprefix(above), reason)
        if entry is None:
            return
        if any(entry.directory == each.directory for each in self.ledger.restorable()):
            self.ledger.note_damage(entry.directory, reason)

    def _explain(self, step: int, entry: Entry | None, error: errors.CnrError) -> None:
        """Adds to an error what only the root tells: the chain, and other steps."""
        text = str(error)
        if "cannot be restored" not in text.partition("\n")[0]:
            text = f"checkpoint {step} cannot be restored: {text}"
        if entry is not None and "\n  chain: " not in text:
            chain = reversed(self.ledger.chain(entry))
            kinds = [
                f"{e.directory} ({'delta' if e.parent else 'full'})" for e in chain
            ]
            text += f"\n  chain: {' <- '.join(kinds)}"
        text = text.replace(", or restore another step", "")
        others = [str(each.step) for each in reversed(self.ledger.restorable())]
        if others:
            more = f"; also {', '.join(others[1:_SHOWN])}" if others[1:] else ""
            text += (
                f"\n  hint: restore step {others[0]}, the newest of which no damage is"
                f" known{more}"
            )
        else:
            text += "\n  no other step can be restored"
        error.args = (text,)

    def _passed_over(self, step: int) -> list[tuple[str, str]]:
        """Step directories newer than a restored one, each with what is wrong with it."""
        taken = self.ledger.by_step(step)
        return [
            (name, why)
            for name, why in self._obstacles()
            if taken is None
            or (
                self.ledger.entries[name].order > taken.order
                if name in self.ledger.entries
                else names.step_number(name) > step
            )
        ]

    def _obstacles(self) -> list[tuple[str, str]]:
        """Every step directory that cannot be restored, newest first, and why."""
        ledger = self.ledger
        good = {entry.directory for entry in ledger.restorable()}
        bad = [e for e in reversed(ledger.committed()) if e.directory not in good]
        found = [(entry.directory, ledger.obstacle(entry)) for entry in bad]
        found += [
            (name, reason.partition("\n")[0])
            for name, reason in sorted(
                ledger.unreadable.items(),
                key=lambda each: names.step_number(each[0]),
                reverse=True,
            )
        ]
        return found


def no_such_step(
    root: AnyPath, step: int, known: list[int], restorable: list[int]
) -> errors.NoStepError:
    """The error for a step that is not there."""
    return errors.NoStepError(
        f"step {step} does not exist in {os.fspath(root)}\n"
        f"  steps: {', '.join(map(str, known)) or 'none'}\n"
        f"  that can be restored: {', '.join(map(str, restorable)) or 'none'}"
    )


def check_ours(step_directory: AnyPath, item: str) -> None:
    """Tells a step of another kind from ours.

    Raises:
        IntegrityError: if it is not there, holds nothing that this library could restore, or
            what Orbax reads first is no file.
    """
    held = step_directory / item
    with accessing(held):
        refuse_pipe(step_directory / names.ORBAX_METADATA)
        if exists(held / names.MANIFEST):
            return
        if not exists(step_directory):
            where = os.fspath(step_directory)
            raise errors.IntegrityError(
                f"{where} is not there", kind="file_missing", path=where
            )
        if not exists(held) or not any(
            names.is_own(path.name) for path in held.iterdir()
        ):
            raise _not_ours(step_directory, item)


def _not_ours(step_directory: AnyPath, item: str) -> errors.IntegrityError:
    """The error for a step that holds no checkpoint of this library."""
    where = os.fspath(step_directory)
    held = sorted(path.name for path in step_directory.iterdir() if is_directory(path))
    return errors.IntegrityError(
        f"{where} holds no checkpoint of cnr_jax\n"
        f"  got items {', '.join(held) or 'none'}, expected {item!r} with"
        f" {names.MANIFEST}\n"
        "  if plain Orbax has saved it: ocp.CheckpointManager(root).restore(step,"
        " args=ocp.args.StandardRestore(state))",
        kind="not_ours",
        path=where,
    )
