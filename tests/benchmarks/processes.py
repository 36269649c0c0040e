"""Children of several processes that are one run of jax, on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from harness import Figures

_DEADLINE_SECS = 600.0


def run_together(
    script: str, params: dict[str, Any], root: Path, count: int
) -> list[Figures]:
    """Calls a script's child in `count` processes at once.

    Args:
        script: path of the script, whose `child` calls `join` first.
        params: for all of them; `process`, `processes` and `port` are added.
        root: one folder for all.
        count: of processes.

    Returns:
        The figures of each process, in order.

    Raises:
        RuntimeError: with the last lines of a process that failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [tempfile.TemporaryFile("w+") for _ in range(count)]
    running = []
    for number, log in enumerate(logs):
        own = {**params, "process": number, "processes": count, "port": port}
        given = json.dumps({"params": own, "root": str(root)})
        command = [sys.executable, script, "--child", given]
        running.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        for process in running:
            process.wait(_DEADLINE_SECS)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [_figures(log, p.returncode) for log, p in zip(logs, running, strict=True)]


def join(params: dict[str, Any], devices: int) -> None:
    """Makes this process one of a run, with so many devices of its own.

    To be called before jax is used. Processes talk through gloo, on the loopback.
    """
    harness.devices(devices)
    import jax

    if "port" in params:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{params['port']}", params["processes"], params["process"]
        )


def _figures(log: Any, code: int) -> Figures:
    log.seek(0)
    lines = log.read().splitlines()
    log.close()
    found = [line for line in lines if line.startswith(harness.MARKER)]
    if code or not found:
        tail = "\n".join(lines[-20:])
        raise RuntimeError(f"a process ended with exit code {code}\n{tail}")
    return json.loads(found[-1][len(harness.MARKER) :])
