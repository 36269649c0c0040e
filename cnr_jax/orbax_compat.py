"""The parts of Orbax that are relied on beyond its documented interface, in one place.

tests/test_orbax_assumptions.py names and tests each of them: the shape of temporary paths, that
a standard handler can be nested below an item, that directories are created while `async_save`
runs, and which client the processes of a run coordinate through.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Coroutine, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future as ocp_future

from cnr_jax.format import names
from cnr_jax.repository.files import AnyPath

DEFAULT_ITEM = "default"
_channels = itertools.count()


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


def step_number(directory: str) -> int:
    """The step that a step directory's name ends in; 0 for a name without digits.

    Example:
        >>> step_number("ck_000120")
        120
    """
    digits = directory[len(directory.rstrip("0123456789")) :]
    return int(digits) if digits else 0


def in_background(work: Coroutine[Any, Any, None], name: str) -> Any:
    """Runs a coroutine in a thread of its own once the item's directory exists."""
    return ocp_future.CommitFutureAwaitingContractedSignals(work, name=name)


class Channel:
    """Tells all processes what the first one says, without any device computation.

    Channels are matched by the order in which each process makes them, messages by their
    order in the channel.
    """

    def __init__(self) -> None:
        self._prefix = f"cnr_jax/{next(_channels)}"
        self._count = 0

    def broadcast(self, text: str | None) -> str:
        """Returns the text that process 0 passed; others pass None."""
        if jax.process_count() == 1:
            assert text is not None
            return text
        client = ocp.multihost.get_jax_distributed_client()
        key = f"{self._prefix}/{self._count}"
        self._count += 1
        if jax.process_index() == 0:
            assert text is not None
            client.key_value_set(key, text)
            return text
        timeout_ms = ocp.multihost.coordination_timeout() * 1000
        return str(client.blocking_key_value_get(key, timeout_ms))

    def gather(self, text: str) -> list[str]:
        """Returns what every process passed, on process 0; an empty list on others."""
        if jax.process_count() == 1:
            return [text]
        client = ocp.multihost.get_jax_distributed_client()
        key = f"{self._prefix}/gather/{self._count}"
        client.key_value_set(f"{key}/{jax.process_index()}", text)
        if jax.process_index() != 0:
            return []
        timeout_ms = ocp.multihost.coordination_timeout() * 1000
        return [
            str(client.blocking_key_value_get(f"{key}/{i}", timeout_ms))
            for i in range(jax.process_count())
        ]


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
