"""How the processes of a run come to the same decision about a save, or the same error.

Every process says what only it can know; process 0 compares, decides and tells all. No device
computation takes part, so nothing waits for the train step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost.channel import Channel
from cnr_jax.checkpointer.orbax_compat import digest_of_local, is_host_local
from cnr_jax.checkpointer.save_errors import save_error
from cnr_jax.format.manifest import HistoryEntry, ParentRef, to_json
from cnr_jax.repository.lineage.planner import Plan
from cnr_jax.state.paths import flatten_paths

_log = logging.getLogger(__name__)
# Beside the digests of leaves, of which they cannot be the paths.
_ERROR = "/error"
_TRACKING = "/tracking"
_DOUBT = "/doubt"


def agree(
    channel: Channel,
    obstacle: errors.CnrError | None,
    dense: Mapping[str, Any],
    tracking: str,
    doubt: str,
    decide: Callable[[str], Plan],
    explain: Callable[[errors.CnrError], None],
    step: int | None,
) -> Plan:
    """The plan that process 0 decides on, or on all processes the same error.

    Args:
        channel: through which the processes talk.
        obstacle: why this process cannot save, if it cannot.
        dense: of the state; leaves that are not global must be the same everywhere.
        tracking: how this process finds changed rows; all must do it alike.
        doubt: why this process doubts its stamps; empty if it does not.
        decide: makes the plan, told of the first doubt; called on process 0 alone.
        explain: adds to an error what only process 0 knows; called there alone.
        step: that is to be saved, if it is known.

    Raises:
        CnrError: the obstacle of a process, or what `decide` raised.
        SaveError: if a process does not answer.
        StateMismatchError: if leaves that are not global differ between processes.
        OptionError: if processes find changed rows in different ways.
    """
    said = {_TRACKING: tracking, _DOUBT: doubt}
    if jax.process_index() != 0:
        _tell(channel, obstacle, dense, said)
        document = json.loads(channel.broadcast(None))
        if obstacle is not None and document == _document(obstacle):
            raise obstacle
        return _plan_of(document)
    try:
        told = _tell(channel, obstacle, dense, said)
        if obstacle is not None:
            raise obstacle
        _check_told(told)
        plan = decide(next((t[_DOUBT] for t in told if t[_DOUBT]), doubt))
    except Exception as error:
        # Whatever it is, such as a folder that cannot be renamed: the others wait for a word.
        known = error if isinstance(error, errors.CnrError) else save_error(error, step)
        try:
            explain(known)
        except Exception:
            _log.exception("what only this process knows of an error is not known")
        channel.broadcast(json.dumps(_document(known)))
        if known is error:
            raise
        raise known from error
    if jax.process_count() > 1:
        channel.broadcast(json.dumps(to_json(plan)))
    return plan


def _tell(
    channel: Channel,
    obstacle: errors.CnrError | None,
    dense: Mapping[str, Any],
    said: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Sends process 0 what all must agree on; returns what all sent, on process 0."""
    if jax.process_count() == 1:
        return []
    if obstacle is not None:
        mine = _document(obstacle)
    else:
        mine = {
            "/".join(path): digest_of_local(leaf)
            for path, leaf in flatten_paths(dense)
            if is_host_local(leaf)
        }
        mine.update(said)
    return [json.loads(text) for text in channel.gather(json.dumps(mine))]


def _check_told(told: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all processes can save, and hold the same host-local leaves.

    Raises:
        CnrError: what a process raised.
        StateMismatchError: naming leaves that differ: only one could be saved.
        OptionError: if tracking differs.
    """
    for document in told:
        _raise_failure(document)
    first, *others = told or [{}]
    for process, digests in enumerate(others, start=1):
        if digests.get(_TRACKING) != first.get(_TRACKING):
            raise errors.OptionError(
                "processes find changed rows in different ways\n"
                f"  got {digests.get(_TRACKING)!r} on process {process},"
                f" {first.get(_TRACKING)!r} on process 0\n"
                "  hint: pass the same options, and touched everywhere or nowhere"
            )
        paths = (first.keys() | digests.keys()) - {_DOUBT}
        different = sorted(p for p in paths if digests.get(p) != first.get(p))
        if different:
            raise errors.StateMismatchError(
                f"leaves of the state differ between process 0 and process {process}\n"
                f"  {', '.join(different)}\n"
                "  hint: make them global arrays, or save them as an item of their own"
            )


def _document(error: errors.CnrError) -> dict[str, Any]:
    """An error as it is sent in the place of anything else; as JSON gives it back."""
    return json.loads(json.dumps({_ERROR: error.to_json()}))


def _raise_failure(document: Mapping[str, Any]) -> None:
    """Raises the error that another process sent, if it is one."""
    if _ERROR in document:
        raise errors.CnrError.from_json(document[_ERROR])


def _plan_of(document: dict[str, Any]) -> Plan:
    """The plan that process 0 sent.

    Raises:
        CnrError: the error of process 0, if it could not make one.
    """
    _raise_failure(document)
    parent = document["parent"]
    return Plan(
        **{
            **document,
            "parent": ParentRef(**parent) if parent else None,
            "history": tuple(HistoryEntry(**entry) for entry in document["history"]),
            "abandoned": tuple(document["abandoned"]),
            "known": tuple(document["known"]),
        }
    )
