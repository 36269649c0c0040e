"""Merging of chains beside a run: another process makes the baselines of later saves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable

from cnr_jax.repository.compaction import baseline
from cnr_jax.repository.compaction.baseline import Request
from cnr_jax.repository.compaction.requests import await_merge
from cnr_jax.repository.index.save_plan import MergedBaseline, SavePlan
from cnr_jax.repository.store import AnyPath
from cnr_jax.texts import logger

_log = logger(__name__)
# Below that of training, but not so low that a merge never ends where all cores are busy.
_NICE = 10
# How long `close` waits for the process, which is killed, and for its folder to be removed.
_STOP_SECS = 10.0
# The process merges on the host, whatever accelerators there are.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TPU_VISIBLE_DEVICES": "",
}
# With an arena for each thread the process would hold twice as much memory, and be no faster.
_MEMORY = {"MALLOC_ARENA_MAX": "1"}
# It imports what this process would, and not the user's program. It ends soon after this process:
# pipes would not tell, as workers that are forked meanwhile hold their ends too.
_PROGRAM = f"""
import json, os, sys, threading, time
def watch(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
parent, paths, *given = sys.argv[1:]
threading.Thread(target=watch, args=(int(parent),), daemon=True).start()
sys.path[:] = json.loads(paths)
from {baseline.__name__} import main
main(given)
"""


class Merging:
    """Merges the chain of one step at a time, on process 0 of the run.

    A process of low priority does it, or a program that somebody has started elsewhere.

    Args:
        offer: function that gets each baseline that is made.
        elsewhere: whether another program makes them, such as `cnr-jax compact --follow`.
    """

    def __init__(
        self, offer: Callable[[MergedBaseline], None], *, elsewhere: bool = False
    ) -> None:
        self._offer, self._elsewhere = offer, elsewhere
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a chain is being merged."""
        return self._thread is not None and self._thread.is_alive()

    def merge(self, root: AnyPath, plan: SavePlan, item: str, process: int) -> None:
        """Begins to merge the chain of a committed save, unless one is being merged already.

        Args:
            root: root that holds the step.
            plan: plan of the save.
            item: name of the item.
            process: number of the process whose rows they become.
        """
        with self._lock:
            if self._closing.is_set() or self.is_busy:
                return
            folder = baseline.folder_for(plan.directory)
            request = Request(plan.directory, item, folder, process)
            thread = threading.Thread(
                target=self._run, args=(root, request), name="cnr_merge", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                return  # the interpreter exits, or the system has no more threads
            self._thread = thread

    def close(self) -> None:
        """Ends the process, and removes what it has written."""
        with self._lock:
            self._closing.set()
            running, thread = self._running, self._thread
        if running is not None:
            running.kill()
        if thread is not None:
            thread.join(_STOP_SECS)

    def _run(self, root: AnyPath, request: Request) -> None:
        try:
            if self._elsewhere:
                made = await_merge(root, request, self._closing)
            else:
                made = self._made(root, request)
        except Exception as error:  # only a shorter chain depends on it
            if not self._closing.is_set():
                text = "the chain of step %s is not merged: %s"
                _log.warning(text, request.directory, error)
            made = None
        if made is None or self._closing.is_set():
            baseline.remove_baseline(root, request.folder)
        else:
            self._offer(made)

    def _made(self, root: AnyPath, request: Request) -> MergedBaseline:
        """Runs the process; returns its baseline.

        Raises:
            ValueError, OSError: if there is none.
        """
        given = os.fspath(root), json.dumps(dataclasses.asdict(request))
        # Outside the lock, as this waits for workers that another thread forks meanwhile.
        running = subprocess.Popen(
            [
                *(sys.executable, "-c", _PROGRAM, str(os.getpid())),
                *(json.dumps(sys.path), *given),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**_MEMORY, **os.environ, **_ENVIRONMENT},
            start_new_session=True,  # Ctrl-C is for the run, which then ends it
        )
        with contextlib.suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, running.pid, _NICE)
        with self._lock:
            self._running = running
            if self._closing.is_set():
                running.kill()
        if code := running.wait():
            raise ValueError(f"the process that merges ended with code {code}")
        return baseline.take_note(root, request)
