"""Builds the fault library once for each version of its source, and keeps it in a cache."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cnr_jax import errors

_SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-pthread")


@functools.cache
def compiled() -> Path:
    """Returns the path of the fault library, and builds it if this version is not there.

    `CC` names another compiler than `cc`, and `XDG_CACHE_HOME` another cache than `~/.cache`.

    Raises:
        OptionError: if this is not Linux, or there is no C compiler, or it fails.
    """
    if not sys.platform.startswith("linux"):
        raise _unavailable(f"faults need Linux, this is {sys.platform}")
    source = _SOURCE.read_bytes()
    key = source + "\0".join((platform.machine(), *platform.libc_ver())).encode()
    name = f"shim-{hashlib.sha256(key).hexdigest()[:16]}.so"
    for folder in _folders():
        if (folder / name).exists():
            return folder / name
    return _build(name)


def _folders() -> list[Path]:
    """Folders for the library: the user's cache, and one of the user's among temporary files."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    private = Path(tempfile.gettempdir(), f"cnr_jax-{os.getuid()}")
    folders = [Path(cache, "cnr_jax"), private]
    return [folder for folder in folders if _is_own(folder)]


def _is_own(folder: Path) -> bool:
    """Whether nobody else can have put a library there for us to load."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    stat = folder.stat()
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


def _build(name: str) -> Path:
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise _unavailable(
            f"faults need a C compiler, {compiler!r} is not on the PATH\n"
            "  hint: install one, or name one in the environment variable CC"
        )
    failures = []
    for folder in _folders():
        target = folder / f"{name}.{os.getpid()}"
        command = [compiler, *_FLAGS, "-o", str(target), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            # Whole or not at all for whoever builds it at the same time.
            os.replace(target, folder / name)
            return folder / name
        target.unlink(missing_ok=True)
        failures.append(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    raise _unavailable(
        "the fault library could not be built\n"
        + ("\n".join(failures) or "  no folder of one's own to put it in")
    )


def _unavailable(message: str) -> errors.OptionError:
    return errors.OptionError(message, kind="faults_unavailable")
