"""Storage faults at exact places: the k-th write, fsync, rename or stat of a program fails.

A program is run with a small library in front of libc (`LD_PRELOAD`; `shim.c` beside this file,
compiled with `cc` when first used). It counts the calls that change files below a folder, and at
a chosen one kills the process, returns an error, writes half, or waits. Linux only.

Kinds of calls: `"open"` (for writing, or that creates), `"write"`, `"fsync"`, `"rename"`,
`"mkdir"`, `"unlink"`, `"rmdir"`, `"truncate"` and `"link"`, each with all its variants. Calls that
only look count where they are asked for: `"stat"`, `"scandir"` (a listing is begun), `"open_read"`.

Example:
    >>> import sys, tempfile
    >>> from pathlib import Path
    >>> root = Path(tempfile.mkdtemp())
    >>> script = "import sys; open(sys.argv[1] + '/file', 'wb').write(b'12')"
    >>> program = [sys.executable, "-c", script, str(root)]
    >>> [call.call for call in run(program, below=root).calls]
    ['open', 'write']
    >>> ran = run(program, below=root, fault=Fault("write", action="kill"))
    >>> ran.returncode, ran.hits[0].path == str(root.resolve() / "file")
    (-9, True)
    >>> (root / "file").read_bytes()
    b''
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from cnr_jax import errors
from cnr_jax.testing._compiling import compiled

CALLS = (
    "open",
    "write",
    "fsync",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "truncate",
    "link",
)
# They change nothing; `"any"` does not mean them.
LOOKS = ("stat", "scandir", "open_read")
_PARTIAL = ("short_write", "kill_midway")
_ACTIONS = ("kill", "kill_after", *_PARTIAL, "delay")


class FaultNotHitError(errors.CnrError):
    """A fault was armed, but the program ended without meeting it: nothing was tested."""

    kind = "fault_not_hit"


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What happens at which call. Numbers count per process, from 1.

    Attributes:
        call: kind of call, one of `CALLS` or of `LOOKS`, or `"any"` of `CALLS`.
        nth: which of the calls of this kind (whose path has `match` in it).
        action: `"kill"` (SIGKILL before the call), `"kill_after"`, the name of an error
            number such as `"EIO"`, `"ENOSPC"`, `"EDQUOT"`, `"EROFS"` or `"EMFILE"` (the call
            is not made and fails), `"delay"` (before the call). For writes also
            `"short_write"` (half is written, as the call then says) and `"kill_midway"`
            (half is written, then SIGKILL).
        times: how many calls in turn; 0: all from the nth on.
        secs: length of a delay.
        match: part of the path, or of the new path of a rename or link; "": any.
        folders: whether it strikes at folders alone, as where these cannot be synced.
        process: `"NAME=VALUE"`: strikes only in processes with this environment variable;
            "": in every one that the program starts.

    Raises:
        OptionError: if a value is not known.
    """

    call: str = "any"
    nth: int = 1
    action: str = "kill"
    times: int = 1
    secs: float = 0.0
    match: str = ""
    process: str = ""
    folders: bool = False

    def __post_init__(self) -> None:
        if self.call not in ("any", *CALLS, *LOOKS):
            raise errors.OptionError(
                f"call {self.call!r} is not known, expected 'any' or one of"
                f" {', '.join((*CALLS, *LOOKS))}"
            )
        if self.action not in _ACTIONS and not hasattr(errno, self.action):
            raise errors.OptionError(
                f"action {self.action!r} is not known, expected one of"
                f" {', '.join(_ACTIONS)} or the name of an error number"
            )
        if self.action in _PARTIAL and self.call != "write":
            raise errors.OptionError(
                f"action {self.action!r} needs call 'write', got {self.call!r}"
            )
        if self.nth < 1 or self.times < 0 or self.secs < 0:
            raise errors.OptionError(
                f"nth must be at least 1, times and secs at least 0, got {self}"
            )
        if self.process and "=" not in self.process:
            raise errors.OptionError(
                f"process must be 'NAME=VALUE', got {self.process!r}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One counted call.

    Attributes:
        number: number of the call among the counted ones of its process, from 1.
        pid: id of the process.
        call: kind of the call, one of `CALLS` or of `LOOKS`.
        path: absolute path, with symbolic links of the watched folder resolved.
        hit: whether the fault struck here.
        to: new path of a rename or link, else "".
    """

    number: int
    pid: int
    call: str
    path: str
    hit: bool
    to: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended, and its calls, in the order they were begun."""

    returncode: int
    stdout: str
    stderr: str
    calls: tuple[Call, ...]

    @property
    def hits(self) -> tuple[Call, ...]:
        """The calls at which the fault struck."""
        return tuple(call for call in self.calls if call.hit)


@functools.cache
def why_unavailable() -> str | None:
    """Why faults cannot be used here; None where they can.

    Example:
        >>> why_unavailable() is None or "Linux" in why_unavailable()
        True
    """
    if not sys.platform.startswith("linux"):
        return f"faults need Linux, this is {sys.platform}"
    try:
        compiled()
    except errors.OptionError as error:
        return f"on Linux, but {error}"
    return None


def available() -> bool:
    """Whether faults can be used here: on Linux, with a C compiler."""
    return why_unavailable() is None


def environment(
    *,
    below: str | os.PathLike[str],
    log: str | os.PathLike[str],
    fault: Fault | None = None,
    after: str | os.PathLike[str] | None = None,
    looks: bool = False,
) -> dict[str, str]:
    """Environment variables for programs that you start yourself; `run` does it for you.

    Args:
        below: calls on this folder and what is below it count; it need not exist yet.
        log: file to which counted calls are appended; see `read_calls`.
        fault: what happens; None: calls are only counted.
        after: nothing counts before this file exists, so that a program can say from when on.
        looks: calls that only look count too; they do if the fault is one of these.

    Raises:
        OptionError: if faults are not available here.
    """
    preloaded = os.environ.get("LD_PRELOAD")
    library = str(compiled())
    found = {
        "LD_PRELOAD": f"{library}:{preloaded}" if preloaded else library,
        "CNR_FAULT_BELOW": os.path.realpath(below),
        "CNR_FAULT_GIVEN": os.path.abspath(below),
        "CNR_FAULT_LOG": os.path.realpath(log),
    }
    if looks or (fault is not None and fault.call in LOOKS):
        found["CNR_FAULT_LOOKS"] = "1"
    if after is not None:
        found["CNR_FAULT_AFTER"] = os.path.abspath(after)
    if fault is not None:
        number = getattr(errno, fault.action, fault.action)
        found |= {
            "CNR_FAULT_CALL": fault.call,
            "CNR_FAULT_NTH": str(fault.nth),
            "CNR_FAULT_ACTION": str(number),
            "CNR_FAULT_TIMES": str(fault.times),
            "CNR_FAULT_SECS": str(fault.secs),
            "CNR_FAULT_MATCH": fault.match,
        }
        if fault.folders:
            found["CNR_FAULT_FOLDERS"] = "1"
        if fault.process:
            found["CNR_FAULT_PROCESS"] = fault.process
    return found


def arm(
    *,
    below: str | os.PathLike[str],
    log: str | os.PathLike[str],
    fault: Fault | None = None,
    after: str | os.PathLike[str] | None = None,
    looks: bool = False,
) -> None:
    """Arms a fault in this process, which was started with the variables of `environment`.

    For servers that import much once and then fork a child for each fault. The numbers of calls
    start at 1 again.

    Raises:
        OptionError: if the process was started without the library.
    """
    for name in [name for name in os.environ if name.startswith("CNR_FAULT_")]:
        del os.environ[name]
    os.environ.update(
        environment(below=below, log=log, fault=fault, after=after, looks=looks)
    )
    try:
        configure = ctypes.CDLL(None).cnr_faults_configure
    except AttributeError:
        raise errors.OptionError(
            "the fault library is not loaded in this process\n"
            "  hint: start it with the variables that environment() gives"
        ) from None
    configure()


def read_calls(log: str | os.PathLike[str]) -> tuple[Call, ...]:
    """The calls of all processes that used this log; none if there was none."""
    try:
        text = Path(log).read_text("utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ()
    calls = []
    for line in text.split("\n")[:-1]:
        number, pid, call, hit, path, to = line.split("\t", 5)
        calls.append(Call(int(number), int(pid), call, path, hit == "1", to))
    return tuple(calls)


def check_hit(calls: Iterable[Call], fault: Fault | None) -> None:
    """Checks that an armed fault has struck.

    Raises:
        FaultNotHitError: saying how many calls there were instead.
    """
    calls = tuple(calls)
    if fault is None or any(call.hit for call in calls):
        return
    fitting = [
        call
        for call in calls
        if fault.call in ("any", call.call)
        and (fault.match in call.path or fault.match in call.to)
    ]
    raise FaultNotHitError(
        f"{fault} was not hit: the program made {len(fitting)} such calls,"
        f" {len(calls)} of any kind"
    )


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    below: str | os.PathLike[str],
    fault: Fault | None = None,
    env: Mapping[str, str] | None = None,
    timeout_secs: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    after: str | os.PathLike[str] | None = None,
    looks: bool = False,
) -> Ran:
    """Runs a program to its end, with a fault or, to learn its calls, without.

    Args:
        argv: the program and its arguments.
        below: calls on this folder and what is below it count; it need not exist yet.
        fault: what happens; None: calls are only counted.
        env: variables in addition to those of this process.
        timeout_secs: after this the program and those it started are killed.
        cwd: its working directory.
        after: nothing counts before this file exists, so that the program can say from when on.
        looks: calls that only look count too; they do if the fault is one of these.

    Programs that it leaves running are killed. Its input is empty.

    Raises:
        FaultNotHitError: if a fault was armed and not hit.
        subprocess.TimeoutExpired: if it did not end in time.
        OptionError: if faults are not available here.
    """
    with tempfile.TemporaryDirectory(prefix="cnr_jax_faults_") as folder:
        log = Path(folder, "calls")
        armed = environment(below=below, log=log, fault=fault, after=after, looks=looks)
        variables = {**os.environ, **(env or {}), **armed}
        # Files, not pipes: a program's children may outlive it and keep pipes open.
        with open(f"{folder}/out", "w+b") as out, open(f"{folder}/err", "w+b") as err:
            process = subprocess.Popen(
                [os.fspath(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                cwd=cwd,
                start_new_session=True,
            )
            try:
                returncode = process.wait(timeout_secs)
            except subprocess.TimeoutExpired as error:
                raise subprocess.TimeoutExpired(
                    error.cmd, error.timeout, _contents(out), _contents(err)
                ) from None
            finally:
                _kill_group(process)
            ran = Ran(returncode, _contents(out), _contents(err), read_calls(log))
    try:
        check_hit(ran.calls, fault)
    except FaultNotHitError as error:
        error.add_note(f"it returned {ran.returncode}; stderr:\n{ran.stderr[-4000:]}")
        raise
    return ran


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _contents(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")
