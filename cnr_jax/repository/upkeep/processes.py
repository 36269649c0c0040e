"""The process that made something, on its machine, and whether it has ended.

A PID alone says little: it is a number of one PID namespace, as of one container, and of one boot
of one machine, and is given to another process when the one that had it has ended. Containers of
one machine often have one host name, and so have machines made from one image.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Literal

State = Literal["alive", "dead", "unknown"]
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process, told from all others of all times where the system, Linux, says enough.

    Attributes:
        host: name of its host.
        pid: its number.
        boot_id: of the boot of the machine; None: not known, as all that follows.
        namespaces: those in which its number and its start are counted.
        started_ticks: when it began, in clock ticks since the boot.
    """

    host: str
    pid: int
    boot_id: str | None = None
    namespaces: str | None = None
    started_ticks: int | None = None

    def state(self) -> State:
        """Whether the process goes on; `"unknown"` where this process cannot know.

        A forked child is another process. One that has ended, and whose parent has not asked for
        its exit code yet, is dead.
        """
        here = this_process()
        known = (here.host, here.boot_id, here.namespaces)
        if None in known or known != (self.host, self.boot_id, self.namespaces):
            return "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "dead"
        except (OSError, OverflowError, ValueError):
            pass  # such as of another user; it is there, or its number is none
        # Not taken for dead where it is not seen: /proc may hide processes of other users.
        found = None if here.started_ticks is None else _looked_up(str(self.pid))
        if found is None or found.pid != self.pid or self.started_ticks is None:
            return "unknown"
        return "dead" if found.over or found.ticks != self.started_ticks else "alive"


def this_process() -> ProcessId:
    """The calling process."""
    pid, host = os.getpid(), socket.gethostname()
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot_id = file.read().strip()
        # The start is counted in the time namespace, if the kernel has these.
        namespaces = os.readlink("/proc/self/ns/pid")
        if os.path.lexists("/proc/self/ns/time"):
            namespaces += " " + os.readlink("/proc/self/ns/time")
    except (OSError, ValueError):
        return ProcessId(host=host, pid=pid)
    found = _looked_up("self")
    # Where /proc is that of another namespace, it shows other processes by these numbers.
    ticks = found.ticks if found is not None and found.pid == pid else None
    return ProcessId(
        host=host,
        pid=pid,
        boot_id=boot_id or None,
        namespaces=namespaces,
        started_ticks=ticks,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Shown:
    """What `/proc` shows of a process; `over`: it has ended, but for its exit code."""

    pid: int
    over: bool
    ticks: int


def _looked_up(name: str) -> _Shown | None:
    """A process by its name in `/proc`; None where nothing can be read of it."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            text = file.read()
        # The name of the program, in parentheses, may hold spaces and parentheses itself.
        number, _, rest = text.partition(b" (")
        fields = rest.rpartition(b") ")[2].split()
        # Fields 3, 20 and 22 of proc(5). Threads may outlive the one that the process began with.
        over = fields[0] in (b"Z", b"X", b"x") and int(fields[17]) <= 1
        return _Shown(int(number), over, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None
