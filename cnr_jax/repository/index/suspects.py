"""Suspects: steps that may lack rows, as an audit found later, noted in the root for restores.

A save whose audit fails writes no step, but the audit says something about committed deltas: they
lack the rows that changed without being recorded. These steps look whole to every reader, so
nothing else would tell. The note is advice: a root without one, or with one that cannot be
understood, is read and written like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.store import AnyPath, read_small, replace_durably
from cnr_jax.texts import logger

_log = logger(__name__)
# Far more than the steps of a root take; this library writes no larger file.
_MOST_BYTES = 1 << 20
# No file system has longer names.
_NAME_BYTES = 255
_SHOWN = 10


class Suspect(NamedTuple):
    """A step that may lack rows.

    Attributes:
        directory: name of the step directory.
        uuid: uuid of the checkpoint in it.
        since: number of the step in which the rows were last seen right; None if not known.
    """

    directory: str
    uuid: str
    since: int | None

    @property
    def step(self) -> int:
        """Number of the step."""
        return names.step_number(self.directory)


def explain(
    error: errors.AuditError,
    root: AnyPath,
    committed: Sequence[Entry],
    clocks: Mapping[str, int],
) -> None:
    """Adds to the error of an audit which steps may lack rows, and notes them in the root.

    Args:
        error: error of the audit, with the clock at which the rows were last seen right.
        root: root of the run.
        committed: checkpoints of the root, newest last.
        clocks: clocks of the checkpoints that the run may rest on, by uuid.
    """
    found = [entry for entry in committed if _may_lack(entry, error)]
    right = [
        entry
        for entry in committed
        if clocks.get(entry.uuid, error.clock + 1) <= error.clock
    ]
    error.since = right[-1].step if right else None
    error.steps = tuple(entry.step for entry in found)
    text = "\n  steps that may lack rows: "
    text += _listed(error.steps) if found else "none that is known"
    if error.since is not None:
        text += f"; these rows were right in step {error.since}"
    if found:
        try:
            note(root, [Suspect(e.directory, e.uuid, error.since) for e in found])
        except OSError as trouble:
            text += f"; this could not be noted in the root: {trouble}"
    text += "\n    where a save compares a part of the rows only, deltas before cannot be excluded"
    error.args = (f"{error}{text}",)


def _may_lack(entry: Entry, error: errors.AuditError) -> bool:
    """Whether a checkpoint of the audited lineage has deltas that came after the error's clock."""
    made = entry.known
    if made is None or not entry.has_deltas or made.lineage != error.lineage:
        return False
    return made.recorded_clock is not None and made.recorded_clock > error.clock


def note(root: AnyPath, suspects: Iterable[Suspect]) -> None:
    """Adds steps to the note in a root.

    Raises:
        OSError: if the note cannot be read or written.
    """
    known = {each.uuid: each for each in (*_read(root), *suspects)}
    _write(root, known.values())


def copy(root: AnyPath, other: AnyPath) -> None:
    """Copies the note of this root to another one, which is new.

    Raises:
        OSError: if the note cannot be read or written.
    """
    noted = _read(root)
    if noted:
        _write(other, noted)


def forget_gone(root: AnyPath, ledger: Ledger) -> bool:
    """Drops from the note the steps that certainly do not exist any more.

    Returns:
        Whether any step is still noted, as far as is known.
    """
    noted = read(root)
    # A folder that storage does not give out may be the noted step.
    left = [
        each
        for each in noted
        if _is_there(each, ledger) or each.directory in ledger.folders
    ]
    if len(left) < len(noted):
        try:
            _write(root, left)
        except OSError as error:
            _log.warning("steps that are gone stay noted as suspect: %s", error)
    return bool(left)


def warn(noted: Iterable[Suspect], root: AnyPath, ledger: Ledger, step: int) -> None:
    """Warns in the log which steps may lack rows.

    Args:
        noted: suspects noted in the root.
        root: root from which a step was restored.
        ledger: ledger of the root.
        step: number of the restored step.
    """
    found = [each for each in noted if _is_there(each, ledger)]
    if not found:
        return
    steps = [each.step for each in found]
    known = [each.since for each in found if each.since is not None]
    _log.warning(
        "of the steps in %s, %s may lack rows: an audit found later that rows had changed%s"
        " without being recorded. Deltas before cannot be excluded. Full checkpoints lack none,"
        " unless they were merged from deltas."
        " Step %d, which is restored, is %s of them",
        os.fspath(root),
        _listed(steps),
        f" after step {min(known)}" if known else "",
        step,
        "one" if step in steps else "none",
    )


def read(root: AnyPath) -> tuple[Suspect, ...]:
    """Suspects noted in a root; none, with a warning, if the note cannot be read."""
    try:
        return _read(root)
    except OSError as error:
        _log.warning("which steps may lack rows is not known: %s", error)
        return ()


def _read(root: AnyPath) -> tuple[Suspect, ...]:
    """Suspects noted in a root; none, with a warning, if the note cannot be understood.

    Raises:
        OSError: if storage does not give the note out.
    """
    path = root / names.SUSPECTS
    try:
        data = read_small(path, _MOST_BYTES)
        return tuple(_suspect_of(each) for each in json.loads(data)["steps"])
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning(
            "which steps may lack rows is not known: %s cannot be understood: %s",
            os.fspath(path),
            error,
        )
    return ()


def _suspect_of(document: object) -> Suspect:
    if not isinstance(document, dict):
        raise TypeError(f"expected an object, got {document!r:.60}")
    directory, uuid = document["directory"], document["uuid"]
    since = document["since"]
    if not isinstance(directory, str) or not isinstance(uuid, str):
        raise TypeError("expected the name of a step and its uuid")
    # `step` turns the name into a number, and Python refuses thousands of digits.
    if len(directory) > _NAME_BYTES or not (
        names.is_component(directory) and names.may_be_step(directory)
    ):
        raise ValueError(f"expected the name of a step, got {directory[:60]!r}")
    if not names.is_hex(uuid, 32):
        raise ValueError(f"expected 32 hexadecimal digits, got {uuid[:60]!r}")
    if since is not None and (type(since) is not int or since < 0):
        raise ValueError(f"expected a step, got {repr(since)[:60]}")
    return Suspect(directory, uuid, since)


def _is_there(suspect: Suspect, ledger: Ledger) -> bool:
    """Whether a step is there, or one that stands for it and so lacks the same rows."""
    entry = ledger.entries.get(suspect.directory)
    if entry is not None and entry.uuid == suspect.uuid:
        return True
    return any(suspect.uuid in each.stands_for for each in ledger.entries.values())


def _write(root: AnyPath, suspects: Iterable[Suspect]) -> None:
    document = {"steps": [each._asdict() for each in suspects]}
    data = json.dumps(document, indent=1, sort_keys=True) + "\n"
    replace_durably(root / names.SUSPECTS, data.encode())


def _listed(steps: Iterable[int]) -> str:
    """Text of the newest steps, at most ten, and of how many came before."""
    known = sorted(steps)
    shown = ", ".join(map(str, known[-_SHOWN:]))
    return (
        shown if len(known) <= _SHOWN else f"{shown} and {len(known) - _SHOWN} before"
    )
