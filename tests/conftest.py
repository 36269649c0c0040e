"""Eight CPU devices for every test, set before jax starts, and temporary files in memory."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()

# Thousands of tiny saves spend most of their time on syncing, and no power fails in a test. Where
# memory is short or runs no programs, and where TMPDIR says otherwise, files go to disk as ever.
_MEMORY, _NEEDED_BYTES = "/dev/shm", 4 << 30
# Of a container, which may have less than its machine; older ones do not say.
_LIMIT = "/sys/fs/cgroup/memory.max"


def _has_room() -> bool:
    found = os.statvfs(_MEMORY)
    free_bytes = found.f_bavail * found.f_frsize
    pages = os.sysconf("SC_AVPHYS_PAGES")
    limits = [free_bytes, pages * os.sysconf("SC_PAGE_SIZE")]
    if os.path.exists(_LIMIT):
        with open(_LIMIT) as file:
            limit = file.read().strip()
        limits += [int(limit) // 2] if limit.isdigit() else []
    return min(limits) >= _NEEDED_BYTES and not found.f_flag & os.ST_NOEXEC


if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and _has_room():
    os.environ["TMPDIR"] = tempfile.tempdir = _MEMORY

# Imports of jax must come after the flags above.
import dataclasses  # noqa: E402
import importlib  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import cnr_jax as cnr  # noqa: E402
from cnr_jax.format.manifest import Manifest  # noqa: E402
from cnr_jax.repository.step import read_manifest  # noqa: E402

# Programs of their own: what they import is there when they are run.
collect_ignore_glob = ["data/*.py", "multiprocess/*worker.py"]

_LEFT_BY_ORBAX = (
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The state machine's example fails saves, as marked tests do, but has no mark of its own.

    A failing save leaves coroutines of Orbax unawaited, on event loops that are closed.
    """
    for item in items:
        if item.nodeid.startswith("cnr_jax/testing/machine.py"):
            item.add_marker(pytest.mark.filterwarnings(*_LEFT_BY_ORBAX))


_ROWS = {"user": 64, "item": 32}


@jax.jit
def _tiny_step(arrays: Any, touched: Any, ids: Any, change: Any) -> Any:
    tables, slots, w = arrays
    touched = cnr.record(touched, ids)
    for k, rows in ids.items():
        new = change + jnp.cos(tables[k][rows])
        tables = {**tables, k: tables[k].at[rows].add(new.astype(tables[k].dtype))}
    slots = {k: slots[k].at[ids[k]].add(change) for k in ids}
    return (tables, slots, w + change), touched


@dataclasses.dataclass
class TinyRun:
    """A run of two small tables with slots, on 4 devices, whose every saved state is known.

    Attributes:
        salt: two runs with different salts take different ways from the same state.
        truth: values of all leaves as they were saved, by step.
    """

    state: Any
    touched: cnr.Touched
    tables: cnr.Tables
    salt: int = 0
    truth: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    def train(self, step: int) -> None:
        """One train step: a few rows of each table, the same ones for the same salt."""
        rng = np.random.default_rng((self.salt, step))
        ids = {
            k: rng.integers(0, rows, 5).astype(np.int32) for k, rows in _ROWS.items()
        }
        old = self.state
        arrays = (
            {k: old["params"][k]["embedding"] for k in _ROWS},
            {k: old["acc"][k]["embedding"] for k in _ROWS},
            old["w"],
        )
        change = np.float32(1 + self.salt + step / 8)
        (tables, slots, w), self.touched = _tiny_step(arrays, self.touched, ids, change)
        self.state = {
            "params": {k: {"embedding": v} for k, v in tables.items()},
            "acc": {k: {"embedding": v} for k, v in slots.items()},
            "w": w,
            "step": step,
        }

    def save(self, manager: Any, step: int, **kwargs: Any) -> bool:
        """Saves and remembers what must come back."""
        saved = manager.save(
            step, args=cnr.args.Save(self.state, self.touched), **kwargs
        )
        if saved:
            self.truth[step] = self.values()
        return saved

    def run(self, manager: Any, steps: Any, **kwargs: Any) -> None:
        """Trains and saves at each of the steps, and waits for the last save."""
        for step in steps:
            self.train(step)
            assert self.save(manager, step, **kwargs), f"step {step} was not saved"
        manager.wait_until_finished()

    def values(self, state: Any = None) -> dict[str, np.ndarray]:
        """All leaves by path, on the host."""
        leaves = jax.tree.leaves_with_path(self.state if state is None else state)
        return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}

    def restore(self, manager: Any, step: int | None) -> None:
        """Goes on from a step."""
        restored = manager.restore(step, args=cnr.args.Restore(self.state))
        self.state, self.touched = restored

    def check(self, manager: Any, step: int | None, truth: Any = None) -> None:
        """A step comes back bit for bit. Does not use the manager, whose state it would turn."""
        number = manager.latest_step() if step is None else step
        with cnr.CheckpointManager(manager.directory, tables=self.tables) as reader:
            got = reader.restore(step, args=cnr.args.Restore(self.state)).state
        self.same(got, (truth or self.truth)[number])

    def same(self, state: Any, truth: dict[str, np.ndarray]) -> None:
        """A state has these values, bit for bit."""
        got = self.values(state)
        assert got.keys() == truth.keys()
        for path, want in truth.items():
            np.testing.assert_array_equal(got[path], want, err_msg=path)

    @staticmethod
    def manifest(manager: Any, step: int | str, item: str = "default") -> Manifest:
        """What is on disk about a step."""
        return read_manifest(Path(manager.directory) / str(step) / item)


def _tiny_state(dtype: Any = np.float32) -> dict[str, Any]:
    mesh = jax.make_mesh(
        (4,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
    )
    rng = np.random.default_rng(7)

    def put(values: np.ndarray, *spec: Any) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    params = {k: rng.normal(size=(n, 4)).astype(dtype) for k, n in _ROWS.items()}
    return {
        "params": {k: {"embedding": put(v, "rows", None)} for k, v in params.items()},
        "acc": {
            k: {"embedding": put(np.zeros(n, np.float32), "rows")}
            for k, n in _ROWS.items()
        },
        "w": put(np.ones(3, np.float32)),
        "step": 0,
    }


@pytest.fixture
def tiny_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes fresh `TinyRun`s, all from the same first state.

    Nothing here is about surviving a power cut, and syncing is what such small saves spend
    their time on.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def make(salt: int = 0, dtype: Any = np.float32) -> TinyRun:
        state = _tiny_state(dtype)
        tables = cnr.find_tables(state, list(_ROWS))
        touched = cnr.init_touched(state, tables)
        return TinyRun(state=state, touched=touched, tables=tables, salt=salt)

    return make


@pytest.fixture
def modules_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules of a folder as the programs in it do, for one test."""
    before = set(sys.modules)
    folders: list[str] = []

    def importing(folder: Path) -> Any:
        monkeypatch.syspath_prepend(str(folder))
        folders.append(str(folder))
        return importlib.import_module

    yield importing
    for name in set(sys.modules) - before:
        path = str(getattr(sys.modules[name], "__file__", ""))
        if any(folder in path for folder in folders):
            del sys.modules[name]


@pytest.fixture
def benchmarks(modules_in: Any) -> Any:
    """Imports a module of the benchmarks."""
    return modules_in(Path(__file__).parent / "benchmarks")
