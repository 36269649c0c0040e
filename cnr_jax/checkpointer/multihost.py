"""Messages between the processes of a run, and decisions and outcomes that all share.

Messages are texts in the key-value store of the run; no device computation takes part. Every wait
is bounded, and ends in an error that names the process that was waited for.

Each process reads shards of its own, so each may meet other damage. An error that one of them meets
is raised by all: no process goes on with a step that another cannot read, or waits for one that has
given up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.distributed import distributed_client
from cnr_jax.format.manifest import to_json
from cnr_jax.repository.causes import in_one_line

T = TypeVar("T")
# Process 0 hears all other processes before it answers, so these wait for it longer.
_PATIENCE = 2.0
# Kinds of errors after which it would be in vain to wait for a process again.
UNHEARD = ("process_silent", "coordination_lost")


class Channel:
    """Channel of messages: all processes send theirs to process 0, which answers all.

    About a topic a process sends at most one message, and every process but 0 hears the answer,
    once. Nothing is left of a topic whose answer all have heard, or given up waiting for, so a
    channel may be used for ever. Topics do not wait for each other. Those in the background of a
    save are named by the uuid of that save. They do not disturb the topics of the loop, which are
    numbered in the order that all processes keep.

    Channels of a name are matched by their first use, in which process 0 meets those of the
    processes that wait for it. A channel that is made and never used, say to look at a root on one
    process alone, is matched with none.

    Args:
        timeout_secs: seconds that process 0 waits for another one, which waits twice as long for
            process 0.

    Attributes:
        name: name that is the same on all processes; to be set before the first use.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self.name = ""
        self._prefix: str | None = None
        self._matching = threading.Lock()
        self._count = 0

    def next_topic(self) -> str:
        """Key of the next exchange: a counter that all processes advance alike.

        Raises:
            SaveError: if the channel cannot be matched; then nothing has come to pass.
        """
        self._matched()
        self._count += 1
        return str(self._count)

    def tell(self, topic: str, text: str) -> None:
        """Sends the message of this process about a topic; `peek` shows that of process 0."""
        key = f"{self._key(topic)}/{jax.process_index()}"
        distributed_client().key_value_set(key, text)

    def told(self, topic: str, timeout_secs: float | None = None) -> list[str]:
        """Waits for the messages of all other processes, in their order; for process 0.

        Raises:
            SaveError: if a process sends none.
        """
        key, limit_secs = self._key(topic), timeout_secs or self.timeout_secs
        return self._from_all([f"{key}/{i}" for i in _others()], limit_secs)

    def answer(self, topic: str, text: str) -> None:
        """Sends the answer to all other processes; for process 0."""
        distributed_client().key_value_set(f"{self._key(topic)}/all", text)

    def hear(self, topic: str, timeout_secs: float | None = None) -> str:
        """Waits for the answer of process 0; for another process.

        Args:
            topic: topic, as process 0 names it.
            timeout_secs: how long process 0 waits for other processes.

        Raises:
            SaveError: if process 0 says nothing.
        """
        key, limit_secs = self._key(topic), timeout_secs or self.timeout_secs
        try:
            return _hear(f"{key}/all", 0, limit_secs * _PATIENCE)
        finally:
            client = distributed_client()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                heard = client.key_value_increment(f"{key}/heard", 1)
                # The last one to hear the answer deletes all keys of the topic.
                if heard == jax.process_count() - 1:
                    client.key_value_delete(f"{key}/")

    def peek(self, topic: str) -> str | None:
        """Message of process 0 about a topic so far, without waiting; for another process."""
        if jax.process_index() == 0 or self._prefix is None:
            return None
        try:
            key = f"{self._prefix}/{topic}/0"
            return str(distributed_client().key_value_try_get(key))
        except jax.errors.JaxRuntimeError:
            return None

    def _key(self, topic: str) -> str:
        """Key of this channel alone, the same on all processes."""
        return f"{self._matched()}/{topic}"

    def _matched(self) -> str:
        with self._matching:
            if self._prefix is None:
                self._prefix = self._match()
            return self._prefix

    def _match(self) -> str:
        """Agrees on the prefix of this channel's keys: process 0 sends it to those who ask.

        Raises:
            SaveError: if a process does not come. Then it can be tried again.
        """
        client, here = distributed_client(), jax.process_index()
        mine = f"cnr_jax/{secrets.token_hex(8)}"
        name = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        asking = f"cnr_jax/asking/{name}"
        if here != 0:
            # This process may have asked before, and given up waiting.
            client.key_value_set(f"{asking}/{here}", mine, allow_overwrite=True)
            try:
                return _hear(mine, 0, self.timeout_secs * _PATIENCE)
            except errors.SaveError:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    client.key_value_delete(f"{asking}/{here}")
                raise
            finally:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    client.key_value_delete(mine)
        keys = [f"{asking}/{i}" for i in _others()]
        theirs = self._from_all(keys, self.timeout_secs)
        # Only now, when all are here: process 0 answers none before it could give up on another.
        for key, asked in zip(keys, theirs, strict=True):
            client.key_value_delete(key)
            client.key_value_set(asked, mine)
        return mine

    def _from_all(self, keys: list[str], limit_secs: float) -> list[str]:
        """Waits for the texts that all other processes set, within one limit for all."""
        deadline = time.monotonic() + limit_secs
        return [
            _hear(key, process, limit_secs, deadline - time.monotonic())
            for process, key in zip(_others(), keys, strict=True)
        ]


def _others() -> range:
    return range(1, jax.process_count())


def _hear(
    key: str, process: int, limit_secs: float, left_secs: float | None = None
) -> str:
    """Waits for the text that a process sets; `left_secs` of the limit may be left."""
    left_secs = limit_secs if left_secs is None else left_secs
    try:
        left_ms = max(1, int(left_secs * 1000))
        return str(distributed_client().blocking_key_value_get(key, left_ms))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise errors.SaveError(
                f"process {process} cannot be heard: the processes of this run do not"
                f" reach each other\n  {in_one_line(error)}\n"
                "  hint: jax.distributed's service runs in process 0; look whether that"
                " has ended, and why",
                kind="coordination_lost",
                process=process,
            ) from error
        raise errors.SaveError(
            f"process {process} does not answer\n"
            f"  it was waited for {limit_secs:.0f} s: it may have been killed, hang,"
            " or be late\n"
            "  hint: look at its log; Options(timeout_secs=...) says how long processes"
            " wait for each other",
            kind="process_silent",
            process=process,
        ) from error


def on_primary(channel: Channel, decide: Callable[[], Any], *, topic: str = "") -> Any:
    """Decides on process 0, and returns the decision, or raises its error, on all processes.

    Args:
        channel: channel between the processes.
        decide: function that is called on process 0 alone. It returns JSON types, or a dataclass
            or an error of `cnr_jax`, which other processes get in its JSON form.
        topic: name of the decision, if it is made in the background.

    Raises:
        CnrError: the error that `decide` raised on process 0.
    """
    if jax.process_count() == 1:
        return decide()
    if jax.process_index() == 0:
        # Only decisions without a topic name the process, as errors of a save do so themselves.
        return _decided(channel, topic, decide, named=not topic)
    answer = json.loads(channel.hear(topic or channel.next_topic()))
    if "error" in answer:
        raise errors.CnrError.from_json(answer["error"])
    return answer["found"]


def all_succeed(
    channel: Channel,
    attempt: Callable[[], T],
    said: Any = None,
    check: Callable[[list[Any]], None] | None = None,
) -> T:
    """Makes an attempt on each process, and returns its result once all have succeeded.

    Args:
        channel: channel between the processes.
        attempt: attempt of this process.
        said: message of this process, of JSON types.
        check: function that raises on process 0 if the messages of all make it a failure.

    Raises:
        BaseException: as `agree`, on all processes, if it failed on one.
    """
    try:
        found = attempt()
    except BaseException as error:
        agree(channel, error, named=True)
        raise
    agree(channel, None, said, check)
    return found


def agree(
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

    Errors that do not mean damage come first: a process that meets one must not go on with
    another step.

    Args:
        channel: channel between the processes.
        error: error of the attempt on this process; None if it succeeded.
        found: findings of this process, of JSON types.
        decide: function that decides on process 0 from the findings of all, as in `on_primary`.
        topic: name of the attempt, if it is made in the background.
        timeout_secs: how long process 0 waits for other processes; None: as long as usual.
        named: whether an error says on which process it was raised.

    Returns:
        Decision of process 0, if `decide` is given.

    Raises:
        BaseException: `error`, or the error of another process as JSON tells it.
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
            # For processes that wait for something that will now never come; see `raise_if_told`.
            channel.tell(topic, json.dumps(mine))
        said = [mine]
        try:
            said += map(json.loads, channel.told(topic, timeout_secs))
        except errors.SaveError as silent:
            # Added to the failure of this process, which may be why the other one is silent.
            said.append(_failed(silent, named=False))
        failed = [document for document in said if "error" in document]
        if not failed:
            of_all = [document["found"] for document in said]
            return _decided(
                channel, topic, lambda: decide and decide(of_all), named=named
            )
        answer = min(failed, key=_is_damage)  # False sorts first: no damage
        channel.answer(topic, json.dumps(answer))
    if error is not None and (answer == mine or not isinstance(error, Exception)):
        raise error
    if "error" in answer:
        raise errors.CnrError.from_json(answer["error"]) from error
    return answer["found"]


def raise_if_told(channel: Channel, topic: str) -> None:
    """Raises the error of process 0 if it has already failed in a topic; does not wait.

    Raises:
        CnrError: the error of process 0.
    """
    told = channel.peek(topic)
    if told is not None:
        raise errors.CnrError.from_json(json.loads(told)["error"])


def _decided(
    channel: Channel, topic: str, decide: Callable[[], Any], *, named: bool
) -> Any:
    """Makes the decision on process 0, and returns it once other processes can hear it."""
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
    """Message of a process whose attempt failed: its error as JSON."""
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
