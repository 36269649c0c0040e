"""How the processes of a run talk to each other: texts in the key-value store of the run.

No device computation takes part. Every wait is bounded, and ends in an error that names the
process that was waited for. Keys are deleted once all processes have read them.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Sequence

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat import distributed_client
from cnr_jax.checkpointer.save_errors import in_one_line, save_error

# Process 0 waits for all others before it answers; so whoever waits for process 0 waits longer.
_PATIENCE = 2.0
# Kinds of errors after which waiting for a process again would be in vain.
_UNHEARD = ("process_silent", "coordination_lost")


class Channel:
    """Tells process 0 what all say, and all what process 0 says.

    Channels of a name are matched by their first use, in which process 0 meets those of the
    others that wait for it; messages by their order in the channel. A channel that is made and
    never used, say to look at a root on one process alone, is matched with none. Nothing may be
    told by `broadcast` while a `settle` is under way on the same channel: process 0 deletes its
    answers once all have come to settle, whether or not they have been read.

    Args:
        timeout_secs: how long process 0 waits for the others; these wait twice as long for it.

    Attributes:
        name: alike on all processes; to be set before the first use.
        silent: why a process was given up that did not come to settle something.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self.name = ""
        self._prefix: str | None = None
        self._matching = threading.Lock()
        self._count = 0
        self._topics: collections.Counter[str] = collections.Counter()
        # Keys that process 0 has set and that others may still have to read.
        self._unread: list[str] = []
        self.silent: errors.SaveError | None = None

    def broadcast(self, text: str | None) -> str:
        """Returns the text that process 0 passed; others pass None.

        Raises:
            SaveError: if process 0 says nothing.
        """
        if jax.process_count() == 1:
            assert text is not None
            return text
        key = self._key(str(self._count))
        self._count += 1
        if jax.process_index() == 0:
            assert text is not None
            self._answer(key, text)
            return text
        return self._hear(key, 0, self.timeout_secs * _PATIENCE)

    def gather(self, text: str) -> list[str]:
        """Returns what every process passed, on process 0; an empty list on others.

        Raises:
            SaveError: on process 0, if another process says nothing.
        """
        if jax.process_count() == 1:
            return [text]
        return self._collect(self._key(f"gather/{self._count}"), text)

    def settle(
        self,
        topic: str,
        failure: errors.SaveError | None,
        timeout_secs: float,
        *,
        again: bool = False,
    ) -> None:
        """Tells all processes whether this one has done its part, and hears of the others.

        Args:
            topic: what was to be done.
            failure: why this process has not done its part.
            timeout_secs: how long process 0 waits for the others once it is here itself.
            again: the topic may come again. All processes count alike how often it has, for
                as long as there is the channel.

        Raises:
            SaveError: on all processes alike, if any has failed or says nothing. It names
                the first of them. The very `failure` where that is the one.
        """
        if jax.process_count() == 1:
            if failure is not None:
                raise failure
            return
        if again:
            self._topics[topic] += 1
            topic = f"{topic}/{self._topics[topic]}"
        key = self._key(topic)
        mine = json.dumps(failure.to_json() if failure else {})
        if jax.process_index() == 0:
            answer = self._verdict(key, mine, timeout_secs)
            self._answer(f"{key}/all", answer)
        else:
            answer = self._verdict_of_first(key, mine, timeout_secs)
        found = json.loads(answer)
        if failure is not None and answer == mine:
            raise failure
        if found:
            error = errors.CnrError.from_json(found)
            if isinstance(error, errors.SaveError) and error.kind in _UNHEARD:
                self.silent = error
            raise error

    def check(self, topic: str) -> None:
        """Looks whether process 0 has already failed in a topic, without waiting.

        Raises:
            SaveError: if it has.
        """
        if jax.process_index() == 0 or self._prefix is None:
            return
        text = try_get(f"{self._prefix}/{topic}/0")
        if text is not None:
            raise errors.CnrError.from_json(json.loads(text))

    def _key(self, rest: str) -> str:
        """A key of this channel alone, the same on all processes."""
        with self._matching:
            if self._prefix is None:
                self._prefix = self._match()
        return f"{self._prefix}/{rest}"

    def _match(self) -> str:
        """What the keys of this channel begin with: process 0 says it to those who ask.

        Raises:
            SaveError: if a process does not come. Then it can be tried again.
        """
        client, here = distributed_client(), jax.process_index()
        mine = f"cnr_jax/{secrets.token_hex(8)}"
        name = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        asking = [f"cnr_jax/asking/{name}/{i}" for i in range(jax.process_count())]
        if here != 0:
            # It may have given up waiting before.
            client.key_value_set(asking[here], mine, allow_overwrite=True)
            try:
                return self._hear(mine, 0, self.timeout_secs * _PATIENCE)
            except errors.SaveError:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    client.key_value_delete(asking[here])
                raise
            finally:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    client.key_value_delete(mine)
        deadline = time.monotonic() + self.timeout_secs
        theirs: list[str] = []
        for process, key in enumerate(asking[1:], start=1):
            left = deadline - time.monotonic()
            theirs.append(self._hear(key, process, self.timeout_secs, left_secs=left))
        # All are here: nobody has been answered by one who then gives up on another.
        for key, asked in zip(asking[1:], theirs, strict=True):
            client.key_value_delete(key)
            client.key_value_set(asked, mine)
        return mine

    def _verdict(self, key: str, mine: str, timeout_secs: float) -> str:
        """On process 0: the first failure of any process, or an empty document."""
        if mine != "{}":
            # For those who wait for something that will now never come.
            self._answer(f"{key}/0", mine)
        try:
            found = self._collect(key, mine, timeout_secs)
        except errors.SaveError as silent:
            found = [mine, json.dumps(silent.to_json())]
        return next((text for text in found if text != "{}"), "{}")

    def _verdict_of_first(self, key: str, mine: str, timeout_secs: float) -> str:
        """On other processes: what process 0 has found, or that it says nothing."""
        try:
            self._collect(key, mine)
            return self._hear(f"{key}/all", 0, timeout_secs * _PATIENCE)
        except errors.SaveError as silent:
            return json.dumps(silent.to_json())

    def _collect(
        self, key: str, mine: str, timeout_secs: float | None = None
    ) -> list[str]:
        client, here = distributed_client(), jax.process_index()
        if here != 0:
            client.key_value_set(f"{key}/{here}", mine)
            return []
        limit_secs = timeout_secs or self.timeout_secs
        deadline = time.monotonic() + limit_secs
        found, unread = [mine], list(self._unread)
        for process in range(1, jax.process_count()):
            other, left = f"{key}/{process}", deadline - time.monotonic()
            found.append(self._hear(other, process, limit_secs, left_secs=left))
            client.key_value_delete(other)
        # Whoever has come here has read all that was answered before.
        for old in unread:
            client.key_value_delete(old)
            self._unread.remove(old)
        return found

    def _answer(self, key: str, text: str) -> None:
        distributed_client().key_value_set(key, text)
        self._unread.append(key)

    def _hear(
        self,
        key: str,
        process: int,
        timeout_secs: float,
        *,
        left_secs: float | None = None,
    ) -> str:
        """The text that a process sets; `left_secs` of the timeout may be left."""
        left_secs = timeout_secs if left_secs is None else left_secs
        left_ms = max(1, int(left_secs * 1000))
        try:
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
                f"  it was waited for {timeout_secs:.0f} s: it may have been killed, hang,"
                " or be late\n"
                "  hint: look at its log; Options(timeout_secs=...) says how long processes"
                " wait for each other",
                kind="process_silent",
                process=process,
            ) from error


class Barriers:
    """Orbax's barriers of a save, which a process that has failed leaves.

    Orbax would let the other processes wait for it, 20 minutes by default.

    Args:
        channel: through which the processes meet; used by one save at a time.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._next: list[str] = []
        self._save = ""
        self._met: collections.Counter[str] = collections.Counter()

    def begin(self, barriers: Sequence[str], save: str) -> None:
        """Names the barriers of the save that starts, in the order in which they come.

        Args:
            barriers: their keys.
            save: what no other save is called; empty if nothing tells it from another of its
                step.
        """
        self._next, self._channel.silent = list(barriers), None
        self._save = save
        self._met.clear()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are here.

        Raises:
            SaveError: on all processes alike, if one has left or does not come.
        """
        if key in self._next:
            self._next.remove(key)
        self._meet(key, None, timeout_ms / 1000)

    def leave(self, error: BaseException) -> None:
        """Frees the processes that wait, or will wait, for this one at the next barrier."""
        if self._next and jax.process_count() > 1:
            key = self._next.pop(0)
            self._next.clear()
            # It raises what this process has told, or what it has heard instead.
            with contextlib.suppress(errors.SaveError):
                self._meet(key, save_error(error, None), self._channel.timeout_secs)

    def forget(self) -> None:
        """Says that no process will come to the barriers of this save."""
        self._next.clear()

    def _meet(
        self, key: str, failure: errors.SaveError | None, timeout_secs: float
    ) -> None:
        if self._channel.silent is not None:
            raise self._channel.silent
        limit_secs = min(timeout_secs, self._channel.timeout_secs)
        topic = key
        if self._save:
            self._met[key] += 1
            topic = f"{self._save}/{key}/{self._met[key]}"
        self._channel.settle(topic, failure, limit_secs, again=not self._save)


def try_get(key: str) -> str | None:
    """The text of a key; None if there is none."""
    try:
        return str(distributed_client().key_value_try_get(key))
    except jax.errors.JaxRuntimeError:
        return None
