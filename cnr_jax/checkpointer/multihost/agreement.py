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
from cnr_jax.format.manifest import to_json

T = TypeVar("T")


def on_primary(channel: Channel, decide: Callable[[], Any]) -> Any:
    """What process 0 decides, or on all processes the error it raised.

    Args:
        channel: through which the processes talk.
        decide: gives JSON types, or a dataclass or an error of `cnr_jax`, of which other processes
            get the JSON form; called on process 0 alone.

    Raises:
        CnrError: what `decide` raised on process 0.
    """
    if jax.process_count() == 1:
        return decide()
    if jax.process_index() == 0:
        return _decided(channel, "", decide, named=True)
    answer = json.loads(channel.hear(channel.next_topic()))
    if "error" in answer:
        raise errors.CnrError.from_json(answer["error"])
    return answer["found"]


def all_succeed(channel: Channel, attempt: Callable[[], T]) -> T:
    """What an attempt gives on this process, once it has succeeded on all of them.

    Raises:
        BaseException: as `settle`, on all processes, if it failed on one.
    """
    try:
        found = attempt()
    except BaseException as error:
        settle(channel, error, named=True)
        raise
    settle(channel, None, named=True)
    return found


def settle(
    channel: Channel,
    error: BaseException | None,
    found: Any = None,
    decide: Callable[[list[Any]], Any] | None = None,
    *,
    topic: str = "",
    timeout_secs: float | None = None,
    named: bool = False,
) -> Any:
    """Ends an attempt of all processes: returns if it succeeded on all of them.

    Errors that do not mean damage come first: whoever meets one must not be answered with
    another step.

    Args:
        channel: through which the processes talk.
        error: why the attempt failed on this process; None if it did not.
        found: by this process, of JSON types.
        decide: what process 0 makes of what all have found, as in `on_primary`.
        topic: what was attempted, if that goes on in the background.
        timeout_secs: how long process 0 waits for the others; None: as long as ever.
        named: an error says on which process it was raised.

    Returns:
        What `decide` does on process 0, if it is given.

    Raises:
        BaseException: `error`, or what stands for that of another process.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return decide([found]) if decide else None
    topic = topic or channel.next_topic()
    mine = {"found": found} if error is None else _failed(error, named=named)
    mine = json.loads(json.dumps(mine))  # as it comes back: with lists for tuples
    if jax.process_index() != 0:
        channel.tell(topic, json.dumps(mine))
        answer = json.loads(channel.hear(topic, timeout_secs))
    else:
        if error is not None:
            # For those who wait for something that will now never come; see `check`.
            channel.tell(topic, json.dumps(mine))
        said = [mine]
        try:
            said += map(json.loads, channel.told(topic, timeout_secs))
        except errors.SaveError as silent:
            # Beside what failed here, not in its place: that is why others may be silent.
            said.append(_failed(silent, named=False))
        failed = [document for document in said if "error" in document]
        if not failed:
            of_all = [document["found"] for document in said]
            return _decided(
                channel, topic, lambda: decide and decide(of_all), named=named
            )
        answer = min(failed, key=_is_damage)
        channel.answer(topic, json.dumps(answer))
    if error is not None and (answer == mine or not isinstance(error, Exception)):
        raise error
    if "error" in answer:
        raise errors.CnrError.from_json(answer["error"]) from error
    return answer["found"]


def check(channel: Channel, topic: str) -> None:
    """Looks whether process 0 has already failed in what is to be settled; does not wait.

    Raises:
        CnrError: what it has failed with.
    """
    told = channel.peek(topic)
    if told is not None:
        raise errors.CnrError.from_json(json.loads(told)["error"])


def _decided(
    channel: Channel, topic: str, decide: Callable[[], Any], *, named: bool
) -> Any:
    """On process 0: what it decides, once other processes can hear it too."""
    try:
        found = decide()
        answer = json.dumps({"found": found}, default=_plain)
    except BaseException as error:
        failed = json.dumps(_failed(error, named=named))
        channel.answer(topic or channel.next_topic(), failed)
        raise
    channel.answer(topic or channel.next_topic(), answer)
    return found


def _plain(value: Any) -> Any:
    return value.to_json() if isinstance(value, errors.CnrError) else to_json(value)


def _failed(error: BaseException, *, named: bool) -> dict[str, Any]:
    """What a process tells of its error, in the place of what it would have found."""
    here = jax.process_index()
    if not isinstance(error, errors.CnrError):
        text = f"process {here} has failed: {type(error).__name__}: {error}"
        return {"error": errors.CnrError(text, kind="process_failed").to_json()}
    document = error.to_json()
    if named:
        document["message"] = f"on process {here}: {error}"
    return {"error": document}


def _is_damage(document: Mapping[str, Any]) -> bool:
    return isinstance(errors.CnrError.from_json(document["error"]), errors.DAMAGE)
