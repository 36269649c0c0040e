"""Runs on a GPU, where there is one: `JAX_PLATFORMS=cuda,cpu` on a machine that has it.

A GPU works while the program goes on, really reuses what is donated, and has memory of its own.
What it saves must be what a CPU restores, and the other way round.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.rows.codecs import Dithering, make_codec
from cnr_jax.rows.tiling import SMALL_SHARD_BYTES

from .conftest import each_of

HERE = jax.devices()[0]
if HERE.platform == "cpu":
    pytest.skip("there is no GPU", allow_module_level=True)

# Shards of these are encoded on the device; those of "few" are copied to the host whole.
ROWS = {"user": (60_000, 32), "item": (50_000, 24), "few": (300, 8)}
DTYPES = {"user": np.float32, "item": jnp.bfloat16, "few": np.float32}
assert ROWS["item"][0] * ROWS["item"][1] * 2 > SMALL_SHARD_BYTES
# Bounds of an element's error, in steps of the range of its row, and of the root mean square.
CODECS = ("asymmetric", "adaptive", "symmetric", "greedy", "kmeans", "codebook")
SLOT_CODECS = ("bfloat16", "log", "log8")

State = dict[str, Any]


def on(device: jax.Device, memory: str | None = None) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=memory)


def first_state(where: Any, seed: int = 0) -> State:
    """Tables with slots, a dense part, a key and a counter."""
    rng = np.random.default_rng(seed)

    def put(values: Any, dtype: Any = np.float32) -> jax.Array:
        return jax.device_put(np.asarray(values).astype(dtype), where)

    tables = {
        name: put(rng.normal(0, 0.1, shape), DTYPES[name])
        for name, shape in ROWS.items()
    }
    nu = {name: put(rng.uniform(0, 1e-3, shape)) for name, shape in ROWS.items()}
    mu = {name: put(rng.normal(0, 1e-3, shape)) for name, shape in ROWS.items()}
    return {
        "params": tables,
        "opt": optax.ScaleByAdamState(count=put(0, np.int32), mu=mu, nu=nu),
        "dense": put(rng.normal(size=(1024, 1024))),
        "key": jax.device_put(jax.random.key(seed), where),
    }


def changing(state: State, ids: dict[str, jax.Array]) -> State:
    """Moves the rows of these ids, their slots, and all that is dense."""

    def move(name: str, leaf: jax.Array, by: float) -> jax.Array:
        rows = leaf.at[ids[name]].get(mode="clip").astype(jnp.float32)
        new = rows + by * jnp.cos(50 * rows + jnp.arange(leaf.shape[1]))
        return leaf.at[ids[name]].set(jnp.abs(new).astype(leaf.dtype), mode="drop")

    opt = state["opt"]
    return {
        "params": {n: move(n, x, 0.05) for n, x in state["params"].items()},
        "opt": opt._replace(
            count=opt.count + 1,
            mu={n: move(n, x, 1e-4) for n, x in opt.mu.items()},
            nu={n: move(n, x, 1e-4) for n, x in opt.nu.items()},
        ),
        "dense": jnp.cos(state["dense"]) + 0.1 * state["dense"][::-1],
        "key": jax.random.split(state["key"])[0],
    }


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(state: State, touched: Any, ids: dict[str, jax.Array]) -> Any:
    if touched is not None:
        touched = cnr.record(touched, ids)
    return changing(state, ids), touched


@functools.partial(jax.jit, donate_argnums=0)
def spoil(state: State) -> State:
    """Writes other values into the memory of a state, all of it."""

    def other(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(leaf)[1]
        return leaf - leaf - jnp.asarray(7, leaf.dtype)

    return jax.tree.map(other, state)


@jax.jit
def copy_of(state: State) -> State:
    """A copy on the device, for which nothing is waited for."""
    return jax.tree.map(jnp.copy, state)


def ids_of(step: int, share: int = 50) -> dict[str, jax.Array]:
    rng = np.random.default_rng(step)
    ids = {n: rng.integers(0, r, r // share) for n, (r, _) in ROWS.items()}
    return {n: jnp.asarray(x.astype(np.int32)) for n, x in ids.items()}


def values(state: State) -> dict[str, np.ndarray]:
    def plain(leaf: Any) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): plain(leaf) for path, leaf in leaves}


def same_bits(got: State, want: State) -> None:
    found, wanted = values(got), values(want)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert found[path].tobytes() == value.tobytes(), path


def is_near(got: State, want: State, bits: int, most: float) -> None:
    """All but tables comes back bit for bit; these within so many steps of their rows' range."""
    found, wanted = values(got), values(want)
    for path, value in wanted.items():
        if "params" not in path:
            assert found[path].tobytes() == value.tobytes(), path
            continue
        rows, read = (x.astype(np.float64) for x in (value, found[path]))
        steps = np.ptp(rows, axis=1, keepdims=True) / (2**bits - 1)
        off = np.abs(rows - read) / np.maximum(steps, 1e-30)
        # A bfloat16 has 8 bits, and a step of the greatest row is as fine as a unit of its last.
        assert off.max() <= most + 0.1, (path, off.max())


def opened(root: Path, state: State, **options: Any) -> cnr.CheckpointManager:
    tables = cnr.find_tables(state, list(ROWS))
    assert all(len(table.slots) == 2 for table in tables.values())
    given = {"codec": "raw", "policy": cnr.Consecutive()} | options
    return cnr.CheckpointManager(root, tables=tables, options=cnr.Options(**given))


def restored(root: Path, like: State, step: int | None = None) -> State:
    """A step, as another manager reads it."""
    tables = cnr.find_tables(like, list(ROWS))
    with cnr.CheckpointManager(root, tables=tables) as reader:
        return reader.restore(step, args=cnr.args.Restore(like)).state


def run(
    root: Path, steps: int, where: Any, state: State | None = None, **options: Any
) -> tuple[State, dict[int, State]]:
    """Trains and saves at each step; what comes after a save spoils its memory at once."""
    state = first_state(where) if state is None else state
    tracked = options.get("tracking", "recorded") != "fingerprint"
    touched = None
    if tracked:
        touched = cnr.init_touched(state, cnr.find_tables(state, list(ROWS)))
    truth: dict[int, State] = {}
    with opened(root, state, **options) as manager:
        for step in range(steps):
            state, touched = train_step(state, touched, ids_of(step))
            truth[step] = copy_of(state)
            manager.save(step, args=cnr.args.Save(state, touched))
            # Donated before anything was waited for: the save may no longer look there.
            state = spoil(state)
            litter = [jnp.full(x.shape, 9, x.dtype) for x in state["params"].values()]
            del litter
            state = copy_of(truth[step])
        manager.wait_until_finished()
        report = manager.last_report
        assert steps == 1 or report.kind == "delta", report
    return state, truth


@each_of("staging", ["auto", "host", "device"])
@pytest.mark.parametrize("tracking", ["recorded", "fingerprint", "audited"])
def test_what_is_donated_after_a_save_is_saved_as_it_was(
    tmp_path: Path, tracking: Any, staging: Any
) -> None:
    root = tmp_path / staging
    _, truth = run(root, 6, on(HERE), tracking=tracking, staging=staging)
    for step, want in truth.items():
        same_bits(restored(root, want, step), want)


@pytest.mark.parametrize("codec", CODECS)
def test_rounded_rows_are_within_their_bounds_and_read_alike_on_a_cpu(
    tmp_path: Path, codec: str
) -> None:
    bits = 4
    _, truth = run(tmp_path, 4, on(HERE), codec=codec, bits=bits)
    cpu = jax.local_devices(backend="cpu")[0]
    most = {"asymmetric": 0.51, "kmeans": 3.0, "codebook": 3.0}.get(codec, 1.5)
    for step, want in truth.items():
        got = restored(tmp_path, want, step)
        is_near(got, want, bits, most)
        same_bits(restored(tmp_path, jax.device_put(want, cpu), step), got)


@pytest.mark.parametrize("slots", ["auto", "moments", "bfloat16"])
def test_integers_and_slots_read_alike_on_a_cpu(tmp_path: Path, slots: str) -> None:
    pytest.importorskip("zstandard")
    _, truth = run(
        tmp_path,
        4,
        on(HERE),
        codec="lattice",
        slot_codec=slots,
        tracking="fingerprint",
    )
    cpu = jax.local_devices(backend="cpu")[0]
    for step, want in truth.items():
        got = restored(tmp_path, want, step)
        same_bits(restored(tmp_path, jax.device_put(want, cpu), step), got)
        for path, value in values(want).items():
            off = np.abs(values(got)[path].astype(float) - value.astype(float))
            assert off.max() < 0.1, path


@each_of("first,then", [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_run_goes_on_on_another_platform(
    tmp_path: Path, first: str, then: str
) -> None:
    where = {"gpu": on(HERE), "cpu": on(jax.local_devices(backend="cpu")[0])}
    root = tmp_path / first
    _, truth = run(root, 3, where[first])
    state = jax.device_put(copy_of(truth[2]), where[then])
    with opened(root, state) as manager:
        state, touched = manager.restore(None, args=cnr.args.Restore(state))
        same_bits(state, truth[2])
        for step in (3, 4):
            ids = jax.device_put(ids_of(step), where[then])
            state, touched = train_step(state, touched, ids)
            truth[step] = copy_of(state)
            manager.save(step, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        assert manager.last_report.kind == "delta"
    for place in where.values():
        for step, want in truth.items():
            same_bits(restored(root, jax.device_put(want, place), step), want)


def test_codes_dithered_after_a_restore_are_within_their_bounds(tmp_path: Path) -> None:
    options = {"codec": "adaptive", "bits": 4, "rounding": "dithered"}
    _, truth = run(tmp_path, 2, on(HERE), **options)
    state = first_state(on(HERE))
    with opened(tmp_path, state, **options) as manager:
        state, touched = manager.restore(None, args=cnr.args.Restore(state))
        for step in (2, 3):
            state, touched = train_step(state, touched, ids_of(step, share=2))
            truth[step] = copy_of(state)
            manager.save(step, args=cnr.args.Save(state, touched))
            state = spoil(state)
            state = copy_of(truth[step])
        manager.wait_until_finished()
    for step in (2, 3):
        is_near(restored(tmp_path, truth[step], step), truth[step], 4, 1.6)


def test_rows_that_were_not_recorded_stop_a_save(tmp_path: Path) -> None:
    state = first_state(on(HERE))
    touched = cnr.init_touched(state, cnr.find_tables(state, list(ROWS)))
    with opened(tmp_path, state, tracking="audited") as manager:
        manager.save(0, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        touched = jax.jit(cnr.record)(touched, ids_of(0))
        state = jax.jit(changing)(state, ids_of(1))
        with pytest.raises(cnr.errors.AuditError):
            manager.save(1, args=cnr.args.Save(state, touched))
    same_bits(restored(tmp_path, state), first_state(on(HERE)))


@each_of("memory", ["pinned_host", "device"])
def test_slots_and_tables_in_host_memory_are_saved_and_come_back_there(
    tmp_path: Path, memory: str
) -> None:
    """As programs keep them there that have no room for them on their device."""
    for number, options in enumerate(
        (
            {"tracking": "fingerprint", "codec": "adaptive", "bits": 4},
            {"tracking": "recorded"},
            {"tracking": "audited", "max_staging_bytes": 1 << 20},
        )
    ):
        root = tmp_path / memory / str(number)
        state = first_state(on(HERE))
        offload = functools.partial(jax.device_put, device=on(HERE, memory))
        touched = None
        if options["tracking"] != "fingerprint":
            touched = cnr.init_touched(state, cnr.find_tables(state, list(ROWS)))

        def placed(state: State, offload: Any = offload) -> State:
            parts = {"opt": jax.tree.map(offload, state["opt"])}
            parts["dense"] = offload(state["dense"])
            item = {"item": offload(state["params"]["item"])}
            return {**state, **parts, "params": state["params"] | item}

        with opened(root, placed(state), **options) as manager:
            for step in range(3):
                state, touched = train_step(state, touched, ids_of(step))
                manager.save(step, args=cnr.args.Save(placed(state), touched))
            manager.wait_until_finished()
            assert manager.last_report.kind == "delta"
        want = placed(state)
        got = restored(root, want)
        kinds = [x.sharding.memory_kind for x in jax.tree.leaves(got)]
        assert kinds == [x.sharding.memory_kind for x in jax.tree.leaves(want)]
        if "codec" in options:
            is_near(got, want, 4, 1.5)
        else:
            same_bits(got, want)


def test_bits_are_chosen_of_rows_in_host_memory() -> None:
    state = first_state(on(HERE))
    user = jax.device_put(state["params"]["user"], on(HERE, "pinned_host"))
    found = []
    for each in (user, state["params"]["user"]):
        given = {"user": each}
        tables = cnr.find_tables(given, ["user"])
        found.append(cnr.tune(given, tables, cnr.Options(codec="adaptive", bits=4)))
    assert repr(found[0]) == repr(found[1])


def test_a_mesh_of_one_gpu_is_as_good_as_the_gpu(tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,), devices=[HERE])
    with jax.set_mesh(mesh):
        _, truth = run(tmp_path, 3, NamedSharding(mesh, P()))
    for step, want in truth.items():
        same_bits(restored(tmp_path, want, step), want)
        same_bits(restored(tmp_path, jax.device_put(want, on(HERE)), step), want)


def test_rows_escape_on_a_device_as_on_the_host(tmp_path: Path) -> None:
    state = first_state(on(HERE))
    odd = jnp.array([np.nan, np.inf, -np.inf, 3e38])[:, None] * jnp.ones((4, 32))
    state["params"]["user"] = state["params"]["user"].at[100:104].set(odd)
    for staging in ("host", "device"):
        options = {"codec": "adaptive", "bits": 4, "tracking": "fingerprint"}
        with opened(tmp_path / staging, state, staging=staging, **options) as manager:
            manager.save(0, args=cnr.args.Save(state))
            manager.wait_until_finished()
        got = restored(tmp_path / staging, state)["params"]["user"]
        found, want = np.asarray(got[100:104]), np.asarray(odd)
        np.testing.assert_array_equal(found[:3], want[:3])
        np.testing.assert_allclose(found[3], want[3], rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*CODECS, *SLOT_CODECS, "lattice"])
def test_a_gpu_and_a_cpu_read_codes_alike(name: str, dtype: str) -> None:
    cpu = jax.local_devices(backend="cpu")[0]
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4096, 48)) * np.exp(rng.normal(size=(4096, 1)) * 4)
    if name in SLOT_CODECS:
        rows = np.abs(rows)
    rows = jnp.asarray(np.clip(rows, -6e4, 6e4)).astype(dtype)
    for bits in (2, 4) if name == "kmeans" else (2, 4, 8):
        codec = make_codec(name, bits)
        if name == "lattice":
            step = jax.jit(codec.step)(rows)
            encoded = jax.jit(codec.encode_on)(rows, step)
        else:
            encoded = jax.jit(codec.encode)(rows)
        decode = functools.partial(codec.decode, dim=48, dtype=np.dtype(dtype))
        found = [
            np.asarray(jax.jit(decode)(jax.device_put(encoded.parts, device)))
            for device in (HERE, cpu)
        ]
        assert found[0].tobytes() == found[1].tobytes(), bits


@pytest.mark.parametrize("name", ["asymmetric", "adaptive", "symmetric", "greedy"])
def test_a_gpu_and_a_cpu_choose_codes_that_are_as_near(name: str) -> None:
    """Not the same ones: both may round a sum or a product otherwise, where two are as near."""
    cpu = jax.local_devices(backend="cpu")[0]
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(8192, 32)) * np.exp(rng.normal(size=(8192, 1)))).astype(
        "f4"
    )
    keys = rng.integers(0, 2**32, len(rows), dtype=np.uint32)
    for bits, dithers in ((2, False), (4, False), (8, False), (4, True)):
        codec = make_codec(name, bits)
        if dithers and not isinstance(codec, Dithering):
            continue
        given = (rows, keys) if dithers else (rows,)
        decode = functools.partial(codec.decode, dim=32, dtype=np.dtype("f4"))
        errors = []
        for device in (HERE, cpu):
            encoded = jax.jit(codec.encode)(*jax.device_put(given, device))
            assert not np.asarray(encoded.escaped).any()
            read = np.asarray(jax.jit(decode)(encoded.parts))
            errors.append(
                np.linalg.norm(read - rows, axis=1) / np.linalg.norm(rows, axis=1)
            )
        assert abs(errors[0].mean() / errors[1].mean() - 1) < 1e-3
        assert np.abs(errors[0] - errors[1]).max() < 0.2 * errors[1].max()


def start(code: str, *args: Any, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


_RUN = """
import sys, jax, jax.numpy as jnp, numpy as np, cnr_jax as cnr
from functools import partial
rng = np.random.default_rng(0)
state = {"user": jnp.asarray(rng.normal(size=(100_000, 32)).astype(np.float32)),
         "few": jnp.asarray(rng.normal(size=(64, 8)).astype(np.float32)), "n": jnp.int32(0)}
tables = cnr.find_tables(state, ["user", "few"])
touched = cnr.init_touched(state, tables)

@partial(jax.jit, donate_argnums=(0, 1))
def step(state, touched, ids):
    touched = cnr.record(touched, {"user": ids, "few": ids % 64})
    n = state["n"] + 1
    # What a row holds says when it was changed last.
    user = state["user"].at[ids].set(n.astype(jnp.float32) + ids[:, None] / 2**20)
    few = state["few"].at[ids % 64].set(n.astype(jnp.float32))
    return {"user": user, "few": few, "n": n}, touched

options = cnr.Options(codec=sys.argv[2], policy=cnr.Intermittent())
with cnr.CheckpointManager(sys.argv[1], tables=tables, options=options) as manager:
    if manager.latest_step() is not None:
        state, touched = manager.restore(None, args=cnr.args.Restore(state))
    begin = int(state["n"])
    for number in range(begin, begin + int(sys.argv[3])):
        ids = np.random.default_rng(number).integers(0, 100_000, 4000).astype(np.int32)
        state, touched = step(state, touched, ids)
        manager.save(number, args=cnr.args.Save(state, touched))
        print("saved", number, flush=True)
print("done", jax.devices()[0].platform, flush=True)
"""


def last_change(count: int) -> np.ndarray:
    """For each row of the program's table the number of its last change, 0 if there was none."""
    found = np.zeros(100_000, np.float32)
    for number in range(count):
        ids = np.random.default_rng(number).integers(0, 100_000, 4000)
        found[ids] = number + 1
    return found


@pytest.mark.parametrize("codec", ["raw", "adaptive"])
def test_a_program_that_is_killed_loses_no_step(tmp_path: Path, codec: str) -> None:
    rng = np.random.default_rng(len(codec))
    for _ in range(3):
        child = start(_RUN, tmp_path, codec, 100_000)
        assert child.stdout is not None
        told: list[str] = []
        for line in child.stdout:
            told.append(line)
            if line.startswith("saved"):
                break
        else:
            raise AssertionError("".join(told))
        time.sleep(rng.uniform(0.3, 1.5))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert not [p for p in cnr.verify(tmp_path) if p.consequence]
        with cnr.CheckpointManager(tmp_path) as reader:
            state = reader.restore(None).state
        count = int(state["n"])
        assert count
        changed, want = np.asarray(state["user"]), last_change(count)
        some = want > 0
        np.testing.assert_allclose(changed[some].mean(axis=1), want[some], atol=0.2)


def test_a_program_whose_jax_has_no_cpu_saves_and_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        child = start(_RUN, tmp_path, "adaptive", 3, JAX_PLATFORMS="cuda")
        output, _ = child.communicate(timeout=200)
        assert child.returncode == 0 and "done gpu" in output, output
    assert not [p for p in cnr.verify(tmp_path) if p.consequence]
