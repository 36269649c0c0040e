"""Which steps may lack rows, as an audit found later: noted in the root, for whoever restores.

An audit that fails writes no step, but it tells something about deltas that are committed: rows
that changed without being recorded are not in them. The steps are whole as far as anybody can
read, so that nothing else would tell. The note is advice: a root without it, or with one that
cannot be understood, is read and written as any other.
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
# Far more than a root has steps to name; a file that is larger is none of ours.
_MOST_BYTES = 1 << 20
# No file system has longer names.
_NAME_BYTES = 255
_SHOWN = 10


class Suspect(NamedTuple):
    """A step that may lack rows.

    Attributes:
        directory: of the step.
        uuid: of the checkpoint in it.
        since: the step in which the rows were last seen right; None if it is not known.
    """

    directory: str
    uuid: str
    since: int | None

    @property
    def step(self) -> int:
        """Its number."""
        return names.step_number(self.directory)


def explain(
    error: errors.AuditError,
    root: AnyPath,
    committed: Sequence[Entry],
    clocks: Mapping[str, int],
) -> None:
    """Says in the error of an audit which steps may lack rows, and notes them in the root.

    Args:
        error: tells since when rows are missed.
        root: of the run.
        committed: checkpoints of the root, newest last.
        clocks: of the checkpoints that the run may rest on, by uuid.
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
    """Whether a checkpoint holds what was recorded in a time in which other rows changed."""
    made = entry.known
    if made is None or entry.kind != "delta" or made.lineage != error.lineage:
        return False
    return made.recorded_clock is not None and made.recorded_clock > error.clock


def note(root: AnyPath, suspects: Iterable[Suspect]) -> None:
    """Adds steps to those that are noted.

    Raises:
        OSError: if that is not possible.
    """
    known = {each.uuid: each for each in (*_read(root), *suspects)}
    _write(root, known.values())


def copy(root: AnyPath, other: AnyPath) -> None:
    """Notes in another root, which is new, what is noted in this one.

    Raises:
        OSError: if that is not possible.
    """
    noted = _read(root)
    if noted:
        _write(other, noted)


def forget_gone(root: AnyPath, ledger: Ledger) -> bool:
    """Drops what is noted of steps that are surely not there any more.

    Returns:
        Whether anything is noted still, as far as is known.
    """
    noted = read(root)
    # One that storage does not give out may be the step that is meant.
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
    """Says in the log which steps may lack rows.

    Args:
        noted: in the root.
        root: from which a step was restored.
        ledger: of the root.
        step: that was restored.
    """
    found = [each for each in noted if _is_there(each, ledger)]
    if not found:
        return
    steps = [each.step for each in found]
    known = [each.since for each in found if each.since is not None]
    _log.warning(
        "of the steps in %s, %s may lack rows: an audit found later that rows had changed%s"
        " without being recorded. Deltas before cannot be excluded, full checkpoints lack none."
        " Step %d, which is restored, is %s of them",
        os.fspath(root),
        _listed(steps),
        f" after step {min(known)}" if known else "",
        step,
        "one" if step in steps else "none",
    )


def read(root: AnyPath) -> tuple[Suspect, ...]:
    """What is noted in a root; nothing where it cannot be read, with a warning."""
    try:
        return _read(root)
    except OSError as error:
        _log.warning("which steps may lack rows is not known: %s", error)
        return ()


def _read(root: AnyPath) -> tuple[Suspect, ...]:
    """What is noted in a root; nothing where it cannot be understood, with a warning.

    Raises:
        OSError: if storage does not give it out.
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
    # Its number is asked for, and a number of thousands of digits is none for Python.
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
    entry = ledger.entries.get(suspect.directory)
    return entry is not None and entry.uuid == suspect.uuid


def _write(root: AnyPath, suspects: Iterable[Suspect]) -> None:
    document = {"steps": [each._asdict() for each in suspects]}
    data = json.dumps(document, indent=1, sort_keys=True) + "\n"
    replace_durably(root / names.SUSPECTS, data.encode())


def _listed(steps: Iterable[int]) -> str:
    """The newest steps of some, and how many there are."""
    known = sorted(steps)
    shown = ", ".join(map(str, known[-_SHOWN:]))
    return (
        shown if len(known) <= _SHOWN else f"{shown} and {len(known) - _SHOWN} before"
    )
