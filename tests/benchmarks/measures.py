"""What the benchmarks measure beside time: memory, files, the machine.

Nothing here imports jax at the top: children choose their devices first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

_PACKAGES = (
    "jax jaxlib flax orbax-checkpoint tensorstore numpy torch torchsnapshot safetensors"
)
_DISK_TEST_BYTES = 128 << 20


class PeakMemory:
    """Extra peak of resident memory of this process, above what it had on entry.

    Memory that was freed but kept by the allocator is given back first: it would hide as
    much of what is allocated meanwhile. The kernel's high-water mark is reset and read;
    where that is not allowed, a thread samples, and peaks shorter than its period are missed.

    Attributes:
        extra_bytes: the peak above the start; set on exit, at least 0.
        before_bytes: resident at the start.
    """

    _PERIOD_SECS = 0.002

    def __init__(self) -> None:
        self.extra_bytes = self.before_bytes = 0
        self._peak = 0
        self._over = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        self.before_bytes = self._peak = _resident_bytes()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sampler is None:
            self._peak = _status_bytes("VmHWM")
        else:
            self._over.set()
            self._sampler.join()
        self.extra_bytes = max(0, self._peak - self.before_bytes)

    def _sample(self) -> None:
        while not self._over.wait(self._PERIOD_SECS):
            self._peak = max(self._peak, _resident_bytes())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _files(path: Path) -> Iterator[Path]:
    """Files under a folder; those that vanish meanwhile are left out."""
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names)


def files_and_bytes(path: Path | str) -> tuple[int, int]:
    """Number of files under a folder, and the sum of their lengths in bytes."""
    files = size = 0
    for file in _files(Path(path)):
        try:
            size += file.stat().st_size
        except FileNotFoundError:
            continue
        files += 1
    return files, size


def sync_tree(path: Path | str) -> None:
    """Syncs every file and folder under a path, and the folder that holds it.

    What a system has synced by itself costs next to nothing again, so this makes systems
    equally durable before their time is taken.
    """
    path = Path(path)
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_cache(path: Path | str) -> None:
    """Takes all files under a folder out of the page cache, so that reads are cold."""
    for file in _files(Path(path)):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def devices(count: int) -> None:
    """Makes jax, which must not be imported yet, see `count` CPU devices."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = f"--xla_force_host_platform_device_count={count}"
    others = [
        given
        for given in os.environ.get("XLA_FLAGS", "").split()
        if not given.startswith(flag.partition("=")[0])
    ]
    os.environ["XLA_FLAGS"] = " ".join([*others, flag])


def disk_write_rate(folder: Path) -> float:
    """MB/s at which one new file is written and synced in a folder."""
    block = os.urandom(1 << 20)
    path = folder / "disk-test"
    start = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(_DISK_TEST_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _DISK_TEST_BYTES / 1e6 / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)


def machine(folder: Path | None = None) -> dict[str, Any]:
    """What the figures were measured on; `load_at_end` is to be added at the end.

    Args:
        folder: on the disk that is written to; None: that of temporary files.
    """
    folder = folder or Path(tempfile.gettempdir())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": _versions(),
        "jax_platforms": os.environ.get("JAX_PLATFORMS", "cpu"),
        "load_at_start": os.getloadavg()[0],
        "disk_write_mb_per_sec": disk_write_rate(folder),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES.split():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
