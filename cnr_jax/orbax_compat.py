"""The parts of Orbax that are relied on beyond its documented interface, in one place.

tests/test_orbax_assumptions.py names and tests each of them: the shape of temporary paths, that
a standard handler can be nested below an item, that directories are created while `async_save`
runs and what tells when they are there, and which client the processes of a run coordinate
through.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import hashlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_manager
from orbax.checkpoint._src.futures import future as signals
from orbax.checkpoint._src.futures import signaling_client, synchronization

from cnr_jax.format import names
from cnr_jax.format.names import step_number as step_number
from cnr_jax.repository.files import AnyPath
from cnr_jax.repository.ledger import Ledger
from cnr_jax.repository.removal import children_first

_log = logging.getLogger(__name__)

DEFAULT_ITEM = "default"
# Where Orbax waits for all processes before and after the commit of a save.
COMMIT_BARRIERS = ("async_write_complete", "async_commit_complete")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where an item of a step lies, or will lie once it is committed.

    Attributes:
        root: holds the step directories.
        directory: name of the step directory.
        item: name of the item's directory in it.
    """

    root: AnyPath
    directory: str
    item: str

    @property
    def path(self) -> AnyPath:
        """The item's directory."""
        return self.root / self.directory / self.item


def place_of(directory: AnyPath) -> Place:
    """The final place of an item from the path that Orbax hands to its handler.

    Example:
        >>> from pathlib import Path
        >>> tmp = ".orbax-checkpoint-tmp"
        >>> place = place_of(Path(f"/ckpt/12{tmp}/state{tmp}"))
        >>> place.directory, place.item
        ('12', 'state')
    """
    step = directory.parent
    return Place(
        root=step.parent,
        directory=names.final_name(step.name),
        item=names.final_name(directory.name),
    )


def step_names(
    options: ocp.CheckpointManagerOptions | None,
) -> Callable[[str], bool] | None:
    """Tells the names of a manager's step directories from others.

    Returns:
        None where a format of the user's own names them: it may read names that it would not
        write.

    Example:
        >>> is_step = step_names(ocp.CheckpointManagerOptions(step_prefix="ck"))
        >>> is_step("ck_12"), is_step("ck_012"), is_step("lost+found0")
        (True, False, False)
    """
    options = options or ocp.CheckpointManagerOptions()
    if options.step_name_format is not None:
        return None
    written = ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )
    return lambda name: written.build_name(step_number(name)) == name


def checkpoint_infos(manager: Any, skip_metadata_read: bool) -> list[Any]:
    """The steps of a root as Orbax's manager tracks them, sorted.

    As the manager's own `_load_checkpoint_infos`, but what Orbax wrote beside the state (times
    and metrics) may be damaged: it is left out then, with a warning.
    """
    found: list[Any] = []
    for step in manager._step_name_format.find_all(manager.directory):
        time, metrics = datetime.datetime.min, None
        if not skip_metadata_read:
            # Whatever stands in those files, and of whatever type it is.
            try:
                time = step.commit_timestamp
            except Exception as error:
                _warn_of_metadata(step.path, "its time", error)
                secs = float(step.path.stat().mtime)
                time = datetime.datetime.fromtimestamp(secs, tz=datetime.UTC)
            try:
                metrics = manager.metrics(step.step)
            except Exception as error:
                _warn_of_metadata(step.path, "its metrics", error)
        found.append(
            checkpoint_manager.CheckpointInfo(
                step=step.step, time=time, metrics=metrics
            )
        )
    return sorted(found, key=lambda info: info.step)


def _warn_of_metadata(step: Any, what: str, error: Exception) -> None:
    _log.warning(
        "step %s goes without %s: what Orbax wrote there cannot be read (%s)",
        step,
        what,
        error,
    )


def distributed_client() -> Any:
    """The client through which the processes of a run coordinate.

    Raises:
        ValueError: if the run has not called `jax.distributed.initialize`.
    """
    return ocp.multihost.get_jax_distributed_client()


def is_distributed() -> bool:
    """Whether the run has called `jax.distributed.initialize`."""
    return ocp.multihost.is_jax_distributed_client_initialized()


class Directories:
    """The directories of the save that starts, which Orbax makes in threads of its own.

    To be made in `async_save`. Orbax signals when they are there, and says nothing if they
    cannot be made: whoever waits as Orbax does then waits five minutes.
    """

    def __init__(self) -> None:
        contract = signals.AwaitableSignalsContract
        self._operation = (
            synchronization.OperationIdGenerator.get_current_operation_id()
        )
        self._signals = contract.get_awaitable_signals_from_contract(self._operation)
        self._keys = [
            contract.get_unique_awaitable_singal_key(signal, self._operation)
            for signal in self._signals
        ]
        self._makers = [t for t in self._threads() if t._send_signals]

    def wait(self, timeout_secs: float, check: Callable[[], None]) -> None:
        """Waits until the directories are there.

        Args:
            timeout_secs: how long.
            check: called every second; what it raises ends the wait.

        Raises:
            OSError: what kept Orbax from making them; TimeoutError if it is not done.
        """
        deadline = time.monotonic() + timeout_secs
        for signal, key in zip(self._signals, self._keys, strict=True):
            while not _is_signalled(key):
                check()
                self._check_makers(signal, key)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the directories of the save were not made in {timeout_secs:g} s"
                    )

    def _check_makers(self, signal: Any, key: str) -> None:
        """Raises what kept a signal from being sent: its sender has ended without."""
        makers = [t for t in self._makers if signal in t._send_signals]
        if jax.process_index() != 0 or any(t.is_alive() for t in makers):
            return  # process 0 makes them, and has done so, perhaps, since the last look
        if not _is_signalled(key):
            failed = [t._exception for t in makers if t._exception is not None]
            raise (
                failed[0]
                if failed
                else OSError("Orbax could not make the directories of the save")
            )

    def give_up(self) -> None:
        """Keeps all that waits for the directories from ever beginning."""
        for thread in self._threads():
            if thread._receive_signals:
                thread.cancel()

    def release(self) -> None:
        """Ends the waiting of what was given up; only once it is given up everywhere."""
        waiting = [t for t in self._threads() if t._cancelled]
        signals.set_signals(self._signals, operation_id=self._operation)
        for thread in waiting:
            _end_given_up(thread)

    def _threads(self) -> list[Any]:
        return [
            thread
            for thread in threading.enumerate()
            if isinstance(thread, signals._SignalingThread)
            and thread._operation_id == self._operation
        ]


def _is_signalled(key: str, wait_secs: int = 1) -> bool:
    """Whether a signal comes within a second."""
    try:
        signaling_client.get_signaling_client().blocking_key_value_get(key, wait_secs)
    except TimeoutError:
        return False
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise
    return True


def _end_given_up(thread: Any) -> None:
    """Waits for a cancelled thread and closes the coroutine that it never began."""
    threading.Thread.join(thread)
    target = getattr(thread, "_target", None)
    if target is not None:
        work = inspect.getclosurevars(target).nonlocals["target"]
        inspect.getclosurevars(work).nonlocals["coro"].close()


class ChainDeleter:
    """What an Orbax manager deletes steps through: children first, and only its own.

    Args:
        remove: removes a step directory, by name.
        name_of: the step directory of a step.
        ledger: returns the ledger of the root.
        check: raises `WriterError` if another manager has taken over the root.
        close: frees what `remove` needs.
        primary: whether this process removes anything.
    """

    def __init__(
        self,
        remove: Callable[[str], None],
        *,
        name_of: Callable[[int], str],
        ledger: Callable[[], Ledger],
        check: Callable[[], None],
        close: Callable[[], None],
        primary: bool,
    ) -> None:
        self._remove, self._name_of, self._ledger = remove, name_of, ledger
        self._check, self._close, self._primary = check, close, primary
        self._failed: list[Exception] = []

    def delete(self, step: int) -> None:
        """Removes one step; what fails is kept for `take_failures`."""
        self.delete_steps([step])

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Removes steps, those first that others do not depend on.

        A step that cannot be removed stays, and with it all that it rests on. Nothing is raised:
        the save that made the steps superfluous is committed all the same.
        """
        if not self._primary:
            return
        ledger, stay = self._ledger(), set[str]()
        directories = [self._name_of(step) for step in steps]
        for directory in children_first(ledger, directories):
            try:
                if directory not in stay:
                    self._check()
                    self._remove(directory)
                    continue
            except FileNotFoundError:
                _log.warning("step %s is gone already", directory)
                continue
            except Exception as error:
                self._failed.append(error)
                _log.error("step %s is not removed and stays: %s", directory, error)
            # It counts on, and the next retention decides about it again.
            ledger.doomed.discard(directory)
            stay |= ledger.closure([directory])

    def take_failures(self) -> list[Exception]:
        """Why steps were not removed since this was asked last."""
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Waits for what is being deleted in the background."""
        self._close()


def is_host_local(leaf: Any) -> bool:
    """Whether a leaf is one process's own in a run of several processes.

    Such are numbers, strings, numpy arrays, and arrays that no jitted step has returned yet: a
    fresh PRNG key, a counter.
    """
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return not is_global and jax.process_count() > 1


def digest_of_local(leaf: Any) -> str:
    """Digest of the values of a host-local leaf, to compare between processes."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        data = f"{type(leaf).__name__} {leaf!r}".encode()
    else:
        values = np.asarray(_key_data(leaf) if isinstance(leaf, jax.Array) else leaf)
        data = f"{values.dtype}{values.shape}".encode() + values.tobytes()
    return hashlib.sha256(data).hexdigest()


def replicated(leaf: Any) -> Any:
    """A host-local array as a global one, equal on all processes; other leaves as is.

    Orbax saves only global arrays. No communication: every process has the values.
    """
    if not isinstance(leaf, jax.Array) or not is_host_local(leaf):
        return leaf
    data = np.asarray(_key_data(leaf))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_callback(data.shape, everywhere, lambda i: data[i])
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return array


def _key_data(leaf: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _standard_handler() -> ocp.StandardCheckpointHandler:
    """Orbax's standard handler without replica-parallel writes.

    By default each replica of a replicated array writes a slice of it, which compiles a small
    program for each device and shape in the blocking part of the first save: 2.8 s for a small
    model on 8 CPU devices, of 3.0 s in all. The dense part is small; the first replica writes it.
    """
    types = ocp.type_handlers
    arrays: Any = copy.copy(types.get_type_handler(jax.Array))
    arrays._use_replica_parallel = False
    scalars = types.get_type_handler(int)
    registry = types.create_type_handler_registry(
        (int, scalars),
        (float, scalars),
        (np.number, types.get_type_handler(np.number)),
        (np.ndarray, types.get_type_handler(np.ndarray)),
        (jax.Array, arrays),
    )
    handler: Any = ocp.StandardCheckpointHandler()
    handler._impl = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    return handler


class DenseStore:
    """Everything that is not a table, through Orbax's own handler, below the item."""

    def __init__(self) -> None:
        self._handler = _standard_handler()

    async def save(self, directory: AnyPath, dense: Mapping[str, Any]) -> list[Any]:
        """Starts a save; returns futures that complete when it is written."""
        if not dense:
            return []
        args: Any = ocp.args.StandardSave(jax.tree.map(replicated, dict(dense)))
        path: Any = directory / names.DENSE
        return list(await self._handler.async_save(path, args=args) or [])

    def finalize(self, directory: AnyPath) -> None:
        """Completes a save of all processes."""
        path: Any = directory / names.DENSE
        if path.exists():
            self._handler.finalize(path)

    def restore(self, directory: AnyPath, abstract: Mapping[str, Any] | None) -> Any:
        """Restores the leaves of `abstract`, or all of them, on one device, for None."""
        path: Any = directory / names.DENSE
        if abstract is None:
            if not path.exists():
                return {}
            everything: Any = ocp.args.StandardRestore(
                None, fallback_sharding=_fallback_sharding()
            )
            return jax.tree.map(
                _on_one_device, self._handler.restore(path, args=everything)
            )
        if not abstract:
            return {}
        # Leaves that are stored but not asked for are left out, which a standard handler
        # refuses. Shapes may not differ: they are compared before.
        item = dict(abstract)
        handler: Any = self._handler
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        return handler._impl.restore(path, args=args)

    def close(self) -> None:
        """Frees what the handler holds."""
        self._handler.close()


def abstract_dense(leaf: Any) -> Any:
    """A dense leaf as Orbax wants to be told of it: abstract arrays, other leaves as is."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        # As `jax.eval_shape` makes them: the devices of the saving run may not be here.
        where = _fallback_sharding()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    return leaf


def _fallback_sharding() -> jax.sharding.Sharding:
    """Where leaves go of which nothing says where: one device, or all of several processes."""
    if jax.process_count() == 1:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _on_one_device(leaf: Any) -> Any:
    """An array where tables without a state are restored; in one process only."""
    if isinstance(leaf, jax.Array) and jax.process_count() == 1:
        return jax.device_put(leaf, _fallback_sharding())
    return leaf
