"""Processes that act a scenario and die of a fault, a second each.

A server imports jax once and forks a child for each order, before jax has started a thread in it.
Called as a program, this module is that server: orders come as lines of JSON on standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cnr_jax.testing import faults
from cnr_jax.testing.faults import Call, Fault

PROJECT = Path(__file__).parents[2]
TIMEOUT_SECS = 60.0
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        status: exit code, negative for a signal; None if it was killed as it hung.
        notes: lines it noted, in order; the last one is the traceback of what it raised.
        calls: by which it changed files below its root.
    """

    status: int | None
    notes: list[Any]
    calls: tuple[Call, ...]

    @property
    def hit(self) -> bool:
        return any(call.hit for call in self.calls)


class Server:
    """Forks children one at a time; leaving the context ends it.

    Args:
        folder: for logs and compiled programs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **faults.environment(below="/nonexistent", log=folder / "unused"),
            "PYTHONPATH": os.pathsep.join(
                [str(PROJECT), os.environ.get("PYTHONPATH", "")]
            ),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            # A thread of BLAS would not survive the fork.
            "OPENBLAS_NUM_THREADS": "1",
            "XLA_FLAGS": "",
        }
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )

    def run(
        self,
        system: str,
        act: str,
        root: Path,
        fault: Fault | None = None,
        timeout_secs: float = TIMEOUT_SECS,
        armed_after: Path | None = None,
        looks: bool = False,
        **arguments: Any,
    ) -> Ended:
        """Acts in a child, with a fault.

        Args:
            system: name of it.
            act: name of a scenario, or of a function of `acts`.
            root: on which files are changed.
            fault: None: only counts.
            timeout_secs: after which the child counts as hanging.
            armed_after: calls count once this file is there; None: from the start on.
            looks: calls that only look count too.
            arguments: for the act, of JSON types.
        """
        notes, calls = self.folder / "notes", self.folder / "calls"
        for file in (notes, calls):
            file.unlink(missing_ok=True)
        order = {
            "system": system,
            "act": act,
            "arguments": arguments,
            "root": str(root),
            "fault": dataclasses.asdict(fault) if fault else None,
            "notes": str(notes),
            "calls": str(calls),
            "after": str(armed_after) if armed_after else None,
            "looks": looks,
            "timeout_secs": timeout_secs,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server is gone, see {self._log.name}")
        lines = notes.read_text().splitlines() if notes.exists() else []
        return Ended(
            json.loads(answer)["status"],
            [json.loads(line) for line in lines],
            faults.read_calls(calls),
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def servers(folder: Path, count: int) -> Iterator[list[Server]]:
    """Several servers, which start side by side."""
    started = [Server(folder / f"server{number}") for number in range(count)]
    try:
        yield started
    finally:
        for server in started:
            server.close()


def serve() -> None:
    """Answers orders until the input ends."""
    import acts  # all that children need, imported once

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _act(order, acts.find(order["act"]))
        status = _ended(child, order["timeout_secs"])
        print(json.dumps({"status": status}), flush=True)


def _act(order: dict[str, Any], act: Any) -> None:
    """Does what was ordered, and ends this process."""
    status = 1
    notes = os.open(order["notes"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: Any) -> None:
        os.write(notes, (json.dumps(what) + "\n").encode())

    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        fault = Fault(**order["fault"]) if order["fault"] else None
        faults.arm(
            below=order["root"],
            log=order["calls"],
            fault=fault,
            after=order["after"],
            looks=order["looks"],
        )
        from systems import SYSTEMS

        act(SYSTEMS[order["system"]], Path(order["root"]), note, **order["arguments"])
        status = 0
    except BaseException:
        note(traceback.format_exc())
    finally:
        os._exit(status)


def _ended(child: int, timeout_secs: float) -> int | None:
    deadline = time.monotonic() + timeout_secs
    pause = 0.005
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    import jax

    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    serve()
