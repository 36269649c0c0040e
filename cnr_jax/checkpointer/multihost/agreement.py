"""How the processes of a run take one decision, or come out of one attempt alike.

Each process reads shards of its own, so each may meet other damage. What one of them meets, all
raise: nobody goes on with a step that another cannot read, or waits for one that has given up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost.channel import Channel

T = TypeVar("T")


def decide(channel: Channel, decision: Callable[[], Any]) -> Any:
    """What process 0 decides, of JSON types; or on all processes the error it raised.

    Raises:
        CnrError: what `decision` raised on process 0.
    """
    if jax.process_count() == 1:
        return decision()
    if jax.process_index() != 0:
        document = json.loads(channel.broadcast(None))
        if "decision" not in document:
            raise _error_of(document)
        return document["decision"]
    try:
        found = decision()
    except BaseException as error:
        channel.broadcast(json.dumps(_told(error)))
        raise
    channel.broadcast(json.dumps({"decision": found}))
    return found


def alike(channel: Channel, attempt: Callable[[], T]) -> T:
    """What an attempt gives on this process, once it has succeeded on all of them.

    Raises:
        BaseException: as `come_out_alike`, on all processes, if it failed on one.
    """
    try:
        found = attempt()
    except BaseException as error:
        come_out_alike(channel, error)
        raise
    come_out_alike(channel, None)
    return found


def come_out_alike(channel: Channel, error: BaseException | None) -> None:
    """Ends an attempt of all processes: returns if it succeeded on all of them.

    Errors that do not mean damage come first: whoever meets one must not be answered with
    another step.

    Args:
        channel: through which the processes talk.
        error: why the attempt failed on this process; None if it did not.

    Raises:
        BaseException: `error`, or what stands for that of another process and names it.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    mine = json.dumps(_told(error))
    if jax.process_index() == 0:
        try:
            verdict = _verdict(channel, mine)
        except errors.CnrError as silent:
            channel.broadcast(json.dumps({**_told(silent), "process": 0}))
            raise
        channel.broadcast(json.dumps(verdict))
    else:
        channel.gather(mine)
        verdict = json.loads(channel.broadcast(None))
    own = verdict.get("process") == jax.process_index()
    if error is not None and (own or not isinstance(error, Exception)):
        raise error
    if verdict:
        raise _error_of(verdict) from error


def _verdict(channel: Channel, mine: str) -> dict[str, Any]:
    """On process 0: what all raise; empty if all have succeeded.

    Raises:
        SaveError: if a process says nothing.
    """
    told = channel.gather(mine)
    failed = [
        {**document, "process": process}
        for process, document in enumerate(map(json.loads, told))
        if document
    ]
    failed.sort(key=lambda document: document["damage"])
    return failed[0] if failed else {}


def _told(error: BaseException | None) -> dict[str, Any]:
    """What a process says about its attempt."""
    if error is None:
        return {}
    if isinstance(error, errors.CnrError):
        return {"error": error.to_json(), "damage": isinstance(error, errors.DAMAGE)}
    return {"raised": f"{type(error).__name__}: {error}", "damage": False}


def _error_of(document: Mapping[str, Any]) -> errors.CnrError:
    """The error of another process, of its class where it is one of ours."""
    process = document.get("process", 0)
    if "raised" in document:
        return errors.CnrError(
            f"process {process} has failed: {document['raised']}", kind="process_failed"
        )
    error = errors.CnrError.from_json(document["error"])
    error.args = (f"on process {process}: {error}",)
    return error
