"""How the processes of a run talk to each other: texts in the key-value store of the run.

No device computation takes part. Every wait is bounded, and ends in an error that names the
process that was waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.seams import distributed_client
from cnr_jax.checkpointer.save_errors import in_one_line

# Process 0 waits for all others before it answers; so whoever waits for process 0 waits longer.
_PATIENCE = 2.0
# Kinds of errors after which waiting for a process again would be in vain.
UNHEARD = ("process_silent", "coordination_lost")


class Channel:
    """Tells process 0 what all say of a topic, and all what process 0 answers.

    Of a topic a process tells one thing at most, and each but process 0 hears the answer, once.
    Nothing is left of a topic that all of these have heard, or given up waiting for, so a
    channel may be used for ever. Topics do not wait for each other: what goes on in the
    background of a save is named by the uuid of that save, and does not disturb what the loop
    asks for meanwhile, which is numbered in the order that all processes keep.

    Channels of a name are matched by their first use, in which process 0 meets those of the
    others that wait for it. A channel that is made and never used, say to look at a root on one
    process alone, is matched with none.

    Args:
        timeout_secs: how long process 0 waits for the others; these wait twice as long for it.

    Attributes:
        name: alike on all processes; to be set before the first use.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self.name = ""
        self._prefix: str | None = None
        self._matching = threading.Lock()
        self._count = 0

    def next_topic(self) -> str:
        """What the loop comes to next, on all processes in the same order.

        Raises:
            SaveError: if the channel cannot be matched; then nothing has come to pass.
        """
        self._matched()
        self._count += 1
        return str(self._count)

    def tell(self, topic: str, text: str) -> None:
        """Says something of a topic; what process 0 says can be seen by `peek`."""
        key = f"{self._key(topic)}/{jax.process_index()}"
        distributed_client().key_value_set(key, text)

    def told(self, topic: str, timeout_secs: float | None = None) -> list[str]:
        """What all others have told, in their order; for process 0.

        Raises:
            SaveError: if one says nothing.
        """
        key, limit_secs = self._key(topic), timeout_secs or self.timeout_secs
        return self._from_all([f"{key}/{i}" for i in _others()], limit_secs)

    def answer(self, topic: str, text: str) -> None:
        """Answers all others; for process 0."""
        distributed_client().key_value_set(f"{self._key(topic)}/all", text)

    def hear(self, topic: str, timeout_secs: float | None = None) -> str:
        """The answer of process 0, for the others.

        Args:
            topic: as process 0 names it.
            timeout_secs: how long process 0 waits for the others.

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
                if heard == jax.process_count() - 1:
                    client.key_value_delete(f"{key}/")

    def peek(self, topic: str) -> str | None:
        """What process 0 has told of a topic so far, for the others; does not wait."""
        if jax.process_index() == 0 or self._prefix is None:
            return None
        try:
            key = f"{self._prefix}/{topic}/0"
            return str(distributed_client().key_value_try_get(key))
        except jax.errors.JaxRuntimeError:
            return None

    def _key(self, topic: str) -> str:
        """A key of this channel alone, the same on all processes."""
        return f"{self._matched()}/{topic}"

    def _matched(self) -> str:
        with self._matching:
            if self._prefix is None:
                self._prefix = self._match()
            return self._prefix

    def _match(self) -> str:
        """What the keys of this channel begin with: process 0 says it to those who ask.

        Raises:
            SaveError: if a process does not come. Then it can be tried again.
        """
        client, here = distributed_client(), jax.process_index()
        mine = f"cnr_jax/{secrets.token_hex(8)}"
        name = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        asking = f"cnr_jax/asking/{name}"
        if here != 0:
            # It may have given up waiting before.
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
        # All are here: nobody has been answered by one who then gives up on another.
        for key, asked in zip(keys, theirs, strict=True):
            client.key_value_delete(key)
            client.key_value_set(asked, mine)
        return mine

    def _from_all(self, keys: list[str], limit_secs: float) -> list[str]:
        """The texts that all others set, each its own, within one limit for all of them."""
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
    """The text that a process sets; `left_secs` of the limit may be left."""
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
