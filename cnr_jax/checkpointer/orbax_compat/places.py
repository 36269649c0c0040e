"""Where Orbax puts steps and items: their names and paths, and when they are there."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_manager, future

from cnr_jax.format import names
from cnr_jax.integers import checked_step
from cnr_jax.repository.layout import Place, open_root
from cnr_jax.repository.store import (
    AnyPath,
    exists,
    is_directory,
    names_in,
)
from cnr_jax.repository.store.checked import refuse_pipe
from cnr_jax.repository.store.paths import StorePath
from cnr_jax.waiting import Gate

# Item and file of a step's metrics.
METRICS = checkpoint_manager.METRIC_ITEM_NAME


class ExactPath(StorePath):
    """Path for Orbax that answers exactly, or raises; paths made from it do so too.

    If Orbax's own paths cannot see something, they say that it is not there. Then Orbax goes on
    without it: it leaves a step out of its list, or the values out of a step that it finalizes.
    They also take `[1]` in the name of a folder above for a pattern.

    Example:
        >>> import tempfile
        >>> root = ExactPath(tempfile.mkdtemp()) / "lr=[0.1]"
        >>> (root / "part_1").mkdir(parents=True)
        >>> [path.name for path in root.glob("part_*")]
        ['part_1']
    """

    def exists(self) -> bool:
        """Whether something is there; raises OSError if that cannot be seen."""
        return exists(self)

    def is_dir(self) -> bool:
        """Whether a directory is there; raises OSError if that cannot be seen."""
        return is_directory(self)

    def glob(self, pattern: str) -> Iterator[Any]:
        """Paths below that fit a pattern; raises OSError if that cannot be seen."""
        return iter(_fitting(self, pattern))


def _fitting(path: Any, pattern: str) -> list[Any]:
    """Paths below a path that fit a pattern, part by part."""
    found: list[Any] = [path]
    for part in pattern.split("/"):
        found = [
            folder / name
            for folder in found
            if is_directory(folder)
            for name in names_in(folder)
            if fnmatch.fnmatchcase(name, part)
        ]
    return found


class DensePath(ExactPath):
    """Path of a folder `dense` that shows Orbax only what can be its own.

    Orbax reads whatever has a name that begins like one of its files, such as a copy that an editor
    or a synced folder has left beside the file.

    Example:
        >>> import tempfile
        >>> dense = DensePath(tempfile.mkdtemp()) / "dense"
        >>> (dense / "array_metadatas").mkdir(parents=True)
        >>> for name in ("process_0", "process_0~", "process_0 (1)"):
        ...     _ = (dense / "array_metadatas" / name).write_text("")
        >>> [path.name for path in dense.glob("array_metadatas/process_*")]
        ['process_0']
    """

    def glob(self, pattern: str) -> Iterator[Any]:
        """Paths that `ExactPath.glob` gives, if they have a name of Orbax's."""
        for found in _fitting(self, pattern):
            path = found.relative_to(self).as_posix()
            if names.is_looked_up(path) or names.leads_to_looked_up(path):
                yield found


def place_of(directory: AnyPath, *, opened: bool = False) -> Place:
    """The final place of an item, from the path that Orbax hands to its handler.

    Args:
        directory: directory of the item; it may have a temporary name.
        opened: whether a manager of this library has opened the root, and so checked its place.

    Raises:
        OptionError: if the root is in a store that Orbax opens and this library does not, or the
            step is out of range.

    Example:
        >>> from pathlib import Path
        >>> tmp = ".orbax-checkpoint-tmp"
        >>> place = place_of(Path(f"/ckpt/12{tmp}/state{tmp}"))
        >>> place.directory, place.item
        ('12', 'state')
    """
    step = directory.parent
    if not opened:
        open_root(step.parent)
    checked_step(names.step_number(names.final_name(step.name)))
    return Place(
        root=step.parent,
        directory=names.final_name(step.name),
        item=names.final_name(directory.name),
    )


def step_names(
    options: ocp.CheckpointManagerOptions | None,
) -> Callable[[str], bool] | None:
    """Returns a function that tells the names of a manager's step directories from others.

    Returns:
        The function; None if a format of the user's own names steps, as it may read names that it
        would not write.

    Example:
        >>> is_step = step_names(ocp.CheckpointManagerOptions(step_prefix="ck"))
        >>> is_step("ck_12"), is_step("ck_12.g2.branch"), is_step("lost+found0")
        (True, True, False)
    """
    options = options or ocp.CheckpointManagerOptions()
    if options.step_name_format is not None:
        return None
    written = ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )

    def is_step(name: str) -> bool:
        return written.build_name(names.step_number(name)) == names.plain(name)

    return is_step


def refuse_pipes(step: AnyPath) -> None:
    """Checks that Orbax's note of a step, and its metrics, can be read without waiting for ever.

    Raises:
        IntegrityError: if a pipe, a socket or a device is in the place of such a file.
    """
    refuse_pipe(step / names.ORBAX_METADATA)
    refuse_pipe(step / METRICS / METRICS)


# Reentrant for signal handlers, which begin a save where they have interrupted another.
_beginning = threading.RLock()


def _after_fork() -> None:
    global _beginning
    # The thread that would release the old lock is not in the child.
    _beginning = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def beginning() -> contextlib.AbstractContextManager[Any]:
    """Context in which a save of Orbax's begins, one at a time in this process.

    Orbax keeps the number of the save that begins in one place for all threads, and asks for it
    again for each thing that the save waits for. If two saves began at once, one would wait for the
    directories of the other. Saves by plain Orbax in other threads are not kept apart: they may
    fail, and so may the save here.

    In a run of several processes saves may begin at once. There processes wait for each other in a
    beginning, and might wait for ever if their threads took a lock in different orders.
    """
    return contextlib.nullcontext() if jax.process_count() > 1 else _beginning


class Directories:
    """The directories of a save that Orbax carries out; Orbax makes them in threads of its own.

    Make this object in `async_save`. Orbax signals when the directories are there, and says nothing
    if they cannot be made.
    """

    def __init__(self) -> None:
        self._made = Gate()

        async def note() -> None:
            self._made.open()

        future.CommitFutureAwaitingContractedSignals(note(), name="cnr_directories")

    def wait(self, timeout_secs: float, check: Callable[[], None]) -> None:
        """Waits until the directories are there.

        Args:
            timeout_secs: how long to wait.
            check: function that is called every second; an error that it raises ends the wait.

        Raises:
            TimeoutError: if the directories are not there in time.
        """
        deadline = time.monotonic() + timeout_secs
        while not self._made.wait(1.0):
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the directories of the save were not made in {timeout_secs:g} s"
                )
