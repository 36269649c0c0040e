"""Once a manager is made, saving compiles nothing: not for any number of touched rows."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

ROWS = {"user": 8192, "item": 1024, "tag": 16}
DIMS = {"user": 16, "item": 8, "tag": 8}
_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the name of an event for each program that XLA compiles."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _sharding(*spec: Any, across: int = 2) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[: 2 * across]).reshape(2, across), ("r", "c"))
    return NamedSharding(mesh, P(*spec))


def make_state(across: int = 2) -> dict[str, Any]:
    """Three tables in three shardings, slots sharded unlike them, all sorts of dense leaves.

    Args:
        across: devices to which columns are dealt out; rows are dealt out to two.
    """
    rng = np.random.default_rng(0)

    def put(shape: Any, *spec: Any, dtype: Any = np.float32) -> jax.Array:
        values = rng.normal(size=shape).astype(dtype)
        return jax.device_put(values, _sharding(*spec, across=across))

    def table(name: str, *spec: Any, dtype: Any = np.float32) -> jax.Array:
        return put((ROWS[name], DIMS[name]), *spec, dtype=dtype)

    rows, columns, both = (("r", "c"),), (None, "c"), ("r", "c")
    return {
        "params": {
            "user": table("user", *rows),
            "item": table("item", *both, dtype=jnp.bfloat16),
            "tag": table("tag", *columns, dtype=np.float16),
        },
        "opt_state": {
            # Replicated, ZeRO over the other order of the axes, and like its table.
            "acc": {"user": put(ROWS["user"]), "item": put(ROWS["item"], ("c", "r"))},
            "mean": {"user": put((ROWS["user"], DIMS["user"]), "c", None)},
            "count": {"tag": put(ROWS["tag"])},
        },
        "dense": {"kernel": put((16, 8), "r", "c"), "bias": put(8)},
        "key": jax.random.key(0),
        "step": 0,
        "rate": 0.5,
        "name": "run",
        "nothing": None,
    }


def stamped(touched: cnr.Touched, counts: Mapping[str, int]) -> cnr.Touched:
    """Touched rows after a train step that looked up `counts` rows of each table."""
    rng = np.random.default_rng(0)
    clock = np.int32(np.asarray(touched.clock) + 1)
    stamps = {}
    for name, array in touched.stamps.items():
        host = np.array(array)
        host[rng.choice(len(host), counts[name], replace=False)] = clock
        stamps[name] = jax.device_put(host, array.sharding)
    return dataclasses.replace(
        touched, stamps=stamps, clock=jax.device_put(clock, touched.clock.sharding)
    )


class InTurn:
    """A policy that takes full checkpoints and deltas as it is told."""

    name = "in_turn"

    def __init__(self, kinds: str) -> None:
        self._kinds = iter(kinds)

    def decide(self, history: Any) -> cnr.Decision:
        if next(self._kinds) == "f" or not history:
            return cnr.Decision(kind="full", parent=None, reason="told so")
        return cnr.Decision(kind="delta", parent=history[-1].step, reason="told so")


# From none to all; around 512 rows, where a larger program takes over; full in between.
FRACTIONS = [0.0, 0.0, 0.0005, 0.01, 0.1249, 0.1251, 0.5, 0.0, 0.9999, 1.0, 0.25]
KINDS = "fdddddfdddd"


# On a device programs are compiled for each shard shape and device: one table will do, on two.
ON_DEVICE = {"user": cnr.TableSpec(slots=["opt_state/acc/user"])}
ON_HOST = {name: cnr.TableSpec() for name in ROWS}


# Slots are raw whatever the codec, so that of the table may be the one that compiles soonest:
# how many programs there are is a matter of staging, not of what a codec does in them.
@pytest.mark.parametrize(
    ("staging", "codec"),
    [
        ("device", "asymmetric"),
        pytest.param("host", "raw", marks=pytest.mark.slow),
        pytest.param("host", "asymmetric", marks=pytest.mark.slow),
        pytest.param("host", "adaptive", marks=pytest.mark.slow),
        pytest.param("device", "raw", marks=pytest.mark.slow),
        pytest.param("device", "adaptive", marks=pytest.mark.slow),
    ],
)
def test_saves_compile_nothing_after_the_manager_is_made(
    codec: str, staging: Any, tmp_path: Path
) -> None:
    specs, slots = (ON_HOST, [2, 1, 1]) if staging == "host" else (ON_DEVICE, [1])
    state = make_state(across=2 if staging == "host" else 1)
    tables = cnr.find_tables(state, specs)
    assert [len(table.slots) for table in tables.values()] == slots
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(
        codec=codec,
        staging=staging,
        policy=InTurn(KINDS[1:]),  # the first is full without being asked
        max_staging_bytes=100_000,
        # Of the rows that are audited all, or another part each time.
        audit_bytes=(4 << 20) if codec == "raw" else 5000,
    )
    jax.clear_caches()  # what other tests compiled must not be of help
    _clear_own_caches()
    with compilations() as warm:
        manager = cnr.CheckpointManager(tmp_path, tables=tables, options=options)
    assert warm or (codec, staging) == ("raw", "host")
    kinds = []
    for step, fraction in enumerate(FRACTIONS):
        counts = {name: round(ROWS[name] * fraction) for name in tables}
        touched = stamped(touched, counts)
        state = {**state, "step": step}
        with compilations() as found:
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
        assert not found, f"{len(found)} compilations for {fraction:.2%} of the rows"
        assert manager.last_report is not None
        kinds.append(manager.last_report.kind[0])
    assert "".join(kinds) == KINDS
    manager.close()


def _clear_own_caches() -> None:
    from cnr_jax.rows.fingerprints import tiles
    from cnr_jax.rows.gather import device, encode, host

    for module in (encode, host, device, tiles):
        own = [each for each in vars(module).values() if hasattr(each, "cache_clear")]
        assert own, f"{module.__name__} keeps no programs: where are they now?"
        for cached in own:
            cached.cache_clear()


def test_counting_sees_a_compilation() -> None:
    with compilations() as found:
        jax.jit(lambda x: x * 3 + 1)(np.arange(5.0)).block_until_ready()
    assert found


def test_saves_after_a_restore_compile_nothing(tmp_path: Path) -> None:
    state = make_state()
    tables = cnr.find_tables(state, ON_DEVICE)
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(policy=cnr.Consecutive(), staging="host")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))
        state, touched = manager.restore(0, args=cnr.args.Restore(state))
        with compilations() as found:
            for step in (1, 2):
                touched = stamped(touched, dict.fromkeys(tables, 10))
                manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
        assert not found
        assert manager.last_report is not None
        assert manager.last_report.kind == "delta"


def test_what_the_motion_of_rows_decides_is_compiled_with_the_manager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the second restore on rows that move far are not dithered, as can be foreseen."""
    state = {"user": jax.device_put(np.zeros((200, 19), np.float32))}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="asymmetric", bits=3, tracking="fingerprint")

    def opened() -> cnr.CheckpointManager:
        return cnr.CheckpointManager(tmp_path, tables=tables, options=options)

    def moved(seed: int) -> dict[str, jax.Array]:
        rows = np.random.default_rng(seed).normal(size=(200, 19))
        return {"user": jax.device_put(rows.astype(np.float32))}

    with opened() as manager:
        manager.save(0, args=cnr.args.Save(moved(0)))
        manager.restore(0, args=cnr.args.Restore(state))
        manager.save(1, args=cnr.args.Save(moved(1)))
    jax.clear_caches()
    _clear_own_caches()
    caplog.set_level(logging.INFO, logger="cnr_jax")
    with opened() as manager:
        manager.restore(1, args=cnr.args.Restore(state))
        with compilations() as found:
            manager.save(2, args=cnr.args.Save(moved(2)))
            manager.wait_until_finished()
    assert not found
    assert "compiling" not in caplog.text


# Of widths that no other test has compiled anything for.
@pytest.mark.parametrize(
    ("staging", "dim"),
    [("host", 11), pytest.param("device", 13, marks=pytest.mark.slow)],
)
def test_restores_compile_what_wider_saves_need(
    staging: Any, dim: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `bits="auto"`, before the save that is the first to take more bits.

    Small tables take these from the first save on, in rows as wide as no others.
    """
    rng = np.random.default_rng(0)
    state = {
        name: jax.device_put(rng.normal(size=shape).astype(np.float32))
        for name, shape in (("user", (4000, dim)), ("day", (12, dim + 10)))
    }
    tables = cnr.find_tables(state, ["user", "day"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(
        codec="asymmetric",
        bits="auto",
        expected_restores=0,
        policy=cnr.Consecutive(),
        staging=staging,
    )
    bits = []
    caplog.set_level(logging.INFO, logger="cnr_jax")

    def save(manager: cnr.CheckpointManager, step: int) -> None:
        nonlocal touched
        touched = stamped(touched, {"user": 10, "day": 5})
        with compilations() as found:
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
        assert not found
        assert manager.last_report is not None
        bits.append(manager.last_report.auto_bits)

    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        save(manager, 0)
        state, touched = manager.restore(0, args=cnr.args.Restore(state))
        save(manager, 1)
    # A run that goes on is foreseen to restore; then it will need no two bits.
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        state, touched = manager.restore(1, args=cnr.args.Restore(state))
        save(manager, 2)
    assert bits == [2, 8, 8]
    # Said by the first manager, which had compiled for two bits before, and by no other.
    assert caplog.text.count("compiling for dithered codes of 8 bits") == 1


def test_many_tables_of_distinct_shapes_share_their_programs_on_the_host(
    tmp_path: Path,
) -> None:
    rng, count = np.random.default_rng(0), 12
    state = {
        f"table{i}": jax.device_put(
            rng.normal(size=(8 * (i + 1), 16)).astype(np.float32),
            _sharding(("r", "c")),
        )
        for i in range(count)
    }
    tables = cnr.find_tables(state, list(state))
    touched = cnr.init_touched(state, tables)
    jax.clear_caches()
    options = cnr.Options(staging="host")
    with compilations() as found:
        with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
            manager.save(0, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
    # A small chunk and a large one, encoded and hashed; and the part of the rows that is audited.
    assert len(found) <= 2 + 2 + 1 < count
