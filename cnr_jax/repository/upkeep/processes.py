"""Identity of a process on its machine, and whether the process has ended.

A PID alone says little. It is a number of one PID namespace, such as that of a container, and of
one boot of one machine; when its process has ended, another may get it. Containers of one machine
often share a host name, and so do machines made from one image.
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
    """Identity of a process, unique among all processes of all times where Linux says enough.

    Attributes:
        host: name of the host.
        pid: number of the process.
        boot_id: id of the machine's boot; None if it is not known, as is then all that follows.
        namespaces: namespaces in which the number and the start of the process are counted.
        started_ticks: when the process began, in clock ticks since the boot.
    """

    host: str
    pid: int
    boot_id: str | None = None
    namespaces: str | None = None
    started_ticks: int | None = None

    def state(self) -> State:
        """Whether the process is running; `"unknown"` where the caller cannot know.

        A forked child is another process. A process that has ended is dead even if its parent has
        not asked for its exit code yet.
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
            pass  # it may be a process of another user, or no valid number
        # A process that /proc does not show is not taken for dead: it may hide other users' ones.
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
        # The start is counted in the time namespace, if the kernel has such namespaces.
        namespaces = os.readlink("/proc/self/ns/pid")
        if os.path.lexists("/proc/self/ns/time"):
            namespaces += " " + os.readlink("/proc/self/ns/time")
    except (OSError, ValueError):
        return ProcessId(host=host, pid=pid)
    found = _looked_up("self")
    # If /proc belongs to another namespace, this PID is that of another process there.
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
    """What `/proc` shows of a process; `over` means that only its exit code is left."""

    pid: int
    over: bool
    ticks: int


def _looked_up(name: str) -> _Shown | None:
    """Looks up a process by its name in `/proc`; None if that cannot be read."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            text = file.read()
        # The name of the program, in parentheses, may hold spaces and parentheses itself.
        number, _, rest = text.partition(b" (")
        fields = rest.rpartition(b") ")[2].split()
        # Fields 3, 20 and 22 of proc(5): state, number of threads, start. Threads may outlive the
        # first one of the process.
        over = fields[0] in (b"Z", b"X", b"x") and int(fields[17]) <= 1
        return _Shown(int(number), over, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None
