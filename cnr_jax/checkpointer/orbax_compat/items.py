"""Items of steps, of this library and others: calls their handlers as Orbax would.

Saving asks nothing of Orbax's managers and checkpointers: each handler is called on its own.
Reading goes through Orbax's `CompositeCheckpointHandler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_args

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.places import METRICS, beginning
from cnr_jax.checkpointer.orbax_compat.storage import as_storage_allows
from cnr_jax.format import names
from cnr_jax.repository.store import AnyPath, exists, write_durably

# Name of the single item of a step, if the user does not name it.
DEFAULT = "default"
# How long a failed save waits for what its other handlers have begun.
_STOP_SECS = 60.0


class Items:
    """The handlers of a manager, by item and by what is saved or restored.

    Args:
        registry: registry of handlers; those that are used are added to it, as with Orbax.
        root: root of the manager.
    """

    def __init__(self, registry: Any, root: epath.Path) -> None:
        self._registry, self._root = registry, root
        # Whether steps hold one item without a name; None until a call has shown it.
        self._is_alone: bool | None = None
        self._numbers: ocp.Checkpointer | None = None

    def name(self, item: str | None, args: type, handler: Any) -> None:
        """Registers the handler of an item, before the item is saved or restored."""
        if item is not None and not self._registry.has(item, args):
            self._registry.add(item, args, handler)

    def _handler(self, item: str, args: Any) -> Any:
        """The handler of an item for arguments; it is registered for all arguments it takes."""
        registry = self._registry
        if registry.has(item, args):
            return registry.get(item, args)
        if registry.has(None, args):
            handler = registry.get(None, args)
        else:
            handler = checkpoint_args.get_registered_handler_cls(args)()
        for kind in dict.fromkeys(checkpoint_args.get_registered_args_cls(handler)):
            self.name(item, kind, handler)
        return handler

    def begin(self, args: Any, metrics: Any, custom_metadata: str) -> StepItems:
        """Makes the items of one save, by name.

        Args:
            args: arguments of all items.
            metrics: metrics of the step, which are saved as an item; None: there are none.
            custom_metadata: metadata of the user, as JSON.

        Raises:
            ValueError: if one item without a name was saved before and now there are several, or
                the other way round.
            OptionError: if the name of an item leads out of its step, or to a file of the step.
        """
        is_composite = isinstance(args, ocp.args.Composite)
        if is_composite:
            for item in args.keys():
                _check_name(item)
        if self._is_alone is None:
            self._is_alone = not is_composite
        self._check_form(args)
        given = dict(args.items()) if is_composite else {DEFAULT: args}
        if metrics is not None:
            given[METRICS] = ocp.args.JsonSave(metrics)
        handlers = {item: self._handler(item, given[item]) for item in sorted(given)}
        return StepItems(
            given,
            handlers,
            metrics,
            custom_metadata,
            self._root,
            self._next_operation,
        )

    def _check_form(self, args: Any) -> None:
        if args is None:
            return
        is_composite = isinstance(args, ocp.args.Composite)
        if self._is_alone and is_composite:
            raise errors.OptionError(
                "Cannot provide `args` of type `Composite` when dealing with a single,"
                " unnamed (default) checkpointable object.\n"
                "  got a Composite, expected the arguments of the state alone\n"
                f"  hint: args=Composite({DEFAULT}=ARGS) was saved as args=ARGS"
            )
        if not self._is_alone and not is_composite:
            raise errors.OptionError(
                "Must provide `args` of type `Composite` when dealing with multiple"
                " checkpointable objects.\n"
                f"  got {type(args).__name__}, expected a Composite\n"
                "  hint: args=ocp.args.Composite(ITEM=...), by the names under which they were"
                " saved"
            )

    def _next_operation(self) -> None:
        """Takes a number for the save that begins, of this process alone.

        Handlers of Orbax note the number, and wait for what was promised under it. Under the number
        of another save that could not make its directories, they would wait in vain.
        """
        if self._numbers is None:
            here = jax.process_index()
            only = ocp.options.MultiprocessingOptions(
                primary_host=here,
                active_processes={here},
                barrier_sync_key_prefix=f"cnr_jax_{here}",
            )
            handler = ocp.JsonCheckpointHandler()
            self._numbers = ocp.Checkpointer(handler, multiprocessing_options=only)
        self._numbers.synchronize_next_awaitable_signal_operation_id()

    # Reading.

    def restore(self, folder: epath.Path, args: Any, *, is_own: bool) -> Any:
        """Restores items of a step.

        Args:
            folder: folder of the step.
            args: arguments of one item without a name, or a Composite.
            is_own: whether the step is of this root; another root may differ in naming items.

        Raises:
            ValueError: if the step has named items and `args` has none, or the other way round; or
                if the step is not committed.
        """
        known = self._is_alone
        if not is_own or known is None:
            self._is_alone = exists(folder / DEFAULT)
        try:
            self._check_form(args)
            if not self._is_alone:
                return self.restore_named(folder, args)
            found = self.restore_named(folder, ocp.args.Composite(**{DEFAULT: args}))
            known = self._is_alone if is_own else known
            return found[DEFAULT]
        finally:
            self._is_alone = known

    def restore_named(self, folder: epath.Path, args: Any) -> Any:
        """Restores items by their names, whatever this manager calls its own."""
        if not exists(folder):
            raise FileNotFoundError(f"Checkpoint at {folder} not found.")
        for item, each in args.items():
            if each is not None:
                self._handler(item, each)
        return self._reader().restore(folder, args)

    def metadata(self, folder: epath.Path) -> Any:
        """Reads what Orbax tells of a step."""
        found = self._reader().metadata(folder)
        if self._is_alone is None:
            self._is_alone = exists(folder / DEFAULT)
        changes: dict[str, Any] = {}
        if self._is_alone:
            held: Any = found.item_metadata
            if DEFAULT not in held:
                raise ValueError(f"{folder} holds no item {DEFAULT!r}")
            changes["item_metadata"] = held[DEFAULT]
        if METRICS in (found.item_handlers or {}):
            metrics = metrics_of(folder)
            if metrics is not None:
                changes["metrics"] = dict(metrics)
        return dataclasses.replace(found, **changes)

    def _reader(self) -> ocp.CompositeCheckpointHandler:
        return ocp.CompositeCheckpointHandler(handler_registry=self._registry)

    def close(self) -> None:
        """Closes all handlers."""
        for handler in dict.fromkeys(self._registry.get_all_entries().values()):
            handler.close()


class StepItems:
    """The items of one save.

    Args:
        args: arguments of each item, by name.
        handlers: handler of each item, by name.
        metrics: metrics of the step; None: there are none.
        custom_metadata: metadata of the user, as JSON.
        root: root that the items are saved to.
        next_operation: function that takes a number of Orbax for the save.

    Attributes:
        handlers: as given.
        metrics: as given.
        committed_nsecs: time at which all was written, in ns since 1970; 0 before.
    """

    def __init__(
        self,
        args: Mapping[str, Any],
        handlers: Mapping[str, Any],
        metrics: Any,
        custom_metadata: str,
        root: epath.Path,
        next_operation: Callable[[], None],
    ) -> None:
        self._args: Mapping[str, Any] | None = args
        self.handlers, self.metrics, self._root = handlers, metrics, root
        self._custom_metadata = custom_metadata
        self._next_operation = next_operation
        self._begun_nsecs, self.committed_nsecs = time.time_ns(), 0
        self._cancel: Callable[[], Any] | None = None
        self._is_cancelled = False

    def stage(self, folder: AnyPath) -> Sequence[Any]:
        """Starts to write; returns futures. Frees the arguments afterwards."""
        args, self._args = self._args, None
        assert args is not None
        begun: list[Any] = []
        try:
            with beginning(), as_storage_allows(self._root):
                self._next_operation()
                self._run(self._start(folder, args, begun))
        except BaseException:
            # Handlers that go on would write into a folder that is about to be removed.
            for future in begun:
                with contextlib.suppress(BaseException):
                    future.cancel()
                with contextlib.suppress(BaseException):
                    future.result(timeout=_STOP_SECS)
            raise
        return begun

    async def _start(
        self, folder: AnyPath, args: Mapping[str, Any], begun: list[Any]
    ) -> None:
        for item, handler in self.handlers.items():
            directory: Any = folder / item
            if not isinstance(handler, ocp.AsyncCheckpointHandler):
                handler.save(directory, args=args[item])
                continue
            futures = await handler.async_save(directory, args=args[item])
            begun += [future for future in futures or () if future is not None]

    def _run(self, work: Any) -> None:
        """Runs a coroutine in this thread, which has no event loop, until it ends or `cancel`."""
        loop = asyncio.new_event_loop()
        try:
            task = loop.create_task(work)
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            # `cancel` sets the flag before it looks for `_cancel`, so no call of it is missed.
            if self._is_cancelled:
                task.cancel()
            loop.run_until_complete(task)
        finally:
            self._cancel = None
            loop.close()

    def cancel(self) -> None:
        """Ends staging where it waits, or before it begins; from another thread."""
        self._is_cancelled = True
        cancel = self._cancel
        if cancel is not None:
            with contextlib.suppress(RuntimeError):  # it is over
                cancel()

    def finalize(self, folder: AnyPath) -> None:
        """Ends the save of each item, once all is written to the folder; writes Orbax's note."""
        with as_storage_allows(self._root):
            for item, handler in self.handlers.items():
                directory: Any = folder / item
                handler.finalize(directory)
        now = self.committed_nsecs = time.time_ns()
        document = {
            "item_handlers": {i: _typestr(h) for i, h in self.handlers.items()},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": self._begun_nsecs,
            "commit_timestamp_nsecs": now,
            "custom_metadata": json.loads(self._custom_metadata),
        }
        data = json.dumps(document).encode()
        write_durably(folder / names.ORBAX_METADATA, data)


def metrics_of(folder: AnyPath) -> Any:
    """The metrics that a step was saved with; None if it has none."""
    path: Any = folder / METRICS
    if not exists(path / METRICS):
        return None
    return ocp.JsonCheckpointHandler(filename=METRICS).restore(epath.Path(path))


def _check_name(item: str) -> None:
    """Checks that the folder of an item would lie in its step, beside the step's own files.

    Raises:
        OptionError: if it would not.
    """
    parts = item.split("/")
    taken = parts[0] in names.OF_STEP
    if taken or not {"", ".", ".."}.isdisjoint(parts):
        raise errors.OptionError(
            "an item is saved into a folder of its name, in the folder of the step\n"
            f"  got the name {item!r}, which leads elsewhere or to a file of the step\n"
            "  hint: call it by letters and digits"
        )


def _typestr(handler: Any) -> str:
    named = getattr(handler, "typestr", None)
    kind = type(handler)
    return named() if named else f"{kind.__module__}.{kind.__qualname__}"
