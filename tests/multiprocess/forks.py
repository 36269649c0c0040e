"""Processes that have imported jax, Orbax and the library: a second less for each.

A server imports them once and forks a child for each order, before a thread has started in it.
Called as a program, this module is that server: orders come as lines of JSON on standard input,
and on standard output it says whom it has started, and how whoever ended did. A child is a
process like any other: it returns from its program as an interpreter does, or dies of a signal.
"""

from __future__ import annotations

import atexit
import collections
import functools
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2]


class Child:
    """A process that was started by a server, told of as `subprocess.Popen` does."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid = server, pid

    @property
    def returncode(self) -> int | None:
        return self._server.ended.get(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._server.listen(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.returncode) is None:
            left = None if until is None else until - time.monotonic()
            if timeout is not None and left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._server.listen(left)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """Starts children that run programs of this folder.

    Args:
        environment: of all of them.

    Attributes:
        ended: exit codes of children that have ended, negative for a signal, by pid.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.ended: dict[int, int] = {}
        self._started: collections.deque[int] = collections.deque()
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A thread of BLAS would not survive the fork.
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        )

    def start(self, program: Path, arguments: Sequence[str], log: Path) -> Child:
        """Starts a program, which writes to a log what it prints."""
        order = {"program": str(program), "arguments": arguments, "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        while not self._started:
            self.listen(None)
        return Child(self, self._started.popleft())

    def listen(self, secs: float | None) -> None:
        """Takes in what the server says, once it says something; None: however long that takes."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        if not select.select([output], [], [], secs)[0]:
            return
        said = os.read(output, 1 << 16)
        if not said:
            raise RuntimeError("the server of processes is gone")
        *lines, self._unread = (self._unread + said).split(b"\n")
        for pid, code in map(json.loads, lines):
            if code is None:
                # The number may be that of one who is long gone.
                self.ended.pop(pid, None)
                self._started.append(pid)
            else:
                self.ended[pid] = code

    def close(self) -> None:
        """Ends the server; not its children."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def compiled() -> str:
    """Where children keep what they compile: they train and save the same tables."""
    folder = tempfile.mkdtemp(prefix="cnr-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def server_of(process: int) -> Server:
    """Forks the processes of a number.

    Not all, as these hash alike: processes that went through a set in different orders would
    show only if they were lucky.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(PROJECT), env.get("PYTHONPATH", "")])
    env["JAX_PLATFORMS"] = "cpu"
    # But for that they compile as the tests do.
    count = "--xla_force_host_platform_device_count"
    others = (flag for flag in env["XLA_FLAGS"].split() if count not in flag)
    env["XLA_FLAGS"] = " ".join((f"{count}=4", *others))
    env["JAX_COMPILATION_CACHE_DIR"] = compiled()
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    server = Server(env)
    atexit.register(server.close)
    return server


def _serve() -> dict[str, object] | None:
    """Answers orders until there are no more; in a child, returns its own."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    unread = b""
    while True:
        ready = select.select([0, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 16)
            _say_who_ended()
        if 0 not in ready:
            continue
        got = os.read(0, 1 << 16)
        if not got:
            return None
        *lines, unread = (unread + got).split(b"\n")
        for line in lines:
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(waker)
                return json.loads(line)
            _say(child, None)


def _say(pid: int, code: int | None) -> None:
    os.write(1, json.dumps([pid, code]).encode() + b"\n")


def _say_who_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(pid, os.waitstatus_to_exitcode(status))


def _run(order: dict[str, object]) -> None:
    """Runs a program in this process, as if this had been started for it."""
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    program = str(order["program"])
    sys.argv[:] = [program, *order["arguments"]]  # type: ignore[misc]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    import worker  # noqa: F401  all that programs need, imported once

    tasks = "/proc/self/task"
    if os.path.isdir(tasks) and len(os.listdir(tasks)) > 1:
        raise RuntimeError("a thread has started, which would not survive a fork")
    found = _serve()
    if found is not None:
        _run(found)
