"""Saves of rows on a lattice: what is restored are the bits that a fresh encode would give."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.checkpointer.saving import launch
from cnr_jax.format.manifest import ParentRef
from cnr_jax.format.names import PACKED_ROWS
from cnr_jax.format.tiles import load_process
from cnr_jax.repository.parent_rows import ParentRows
from cnr_jax.repository.replay.encoded import Held
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.codecs.lattice import Lattice
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault
from cnr_jax.waiting import Job

from . import lattice_reader
from .conftest import each_of, mesh_within
from .summed_run import SummedRun

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")

ROWS, DIM = 256, 16
MESH = mesh_within((2, 2), ("r", "c"))


# Compiled once for all steps of all runs.
@partial(jax.jit, static_argnums=0)
def step_of(codec: Lattice, rows: Any) -> jax.Array:
    return codec.step(rows)


@partial(jax.jit, static_argnums=0)
def encode_on(codec: Lattice, rows: Any, step: Any) -> Any:
    return codec.encode_on(rows, step)


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode(codec: Lattice, parts: Any, dim: int, dtype: Any) -> jax.Array:
    return codec.decode(parts, dim=dim, dtype=dtype)


record = jax.jit(cnr.record)


class Run(SummedRun):
    """A table that is trained: a few rows move a little, some become such as none holds."""

    def __init__(self, root: Path, dtype: Any = np.float32, **options: Any) -> None:
        super().__init__(root, **{"codec": "lattice", **options})
        table = self._rng.normal(size=(ROWS, DIM)) * 0.05
        table[5, 3], table[6], table[7] = np.nan, 6e4, table[7] * 0.02
        self.table = table.astype(dtype)
        self.tables = cnr.find_tables(self.state(), self.spec)
        self.touched = cnr.init_touched(self.state(), self.tables)

    def saved(self) -> np.ndarray:
        return self.table

    def state(self) -> dict[str, jax.Array]:
        return {"t": jax.device_put(self.table, self.sharding)}

    def train(self) -> None:
        ids = self._rng.choice(ROWS, ROWS // 4, replace=False)
        table = self.table.astype(np.float32)
        table[ids] += self._rng.normal(size=(len(ids), DIM)) * 0.01
        table[ids[0]], table[ids[1], 2] = 0, np.inf
        # Some were raw, and are not any more; some become finer, or coarser.
        table[ids[2:4]] = self._rng.normal(size=(2, DIM)) * 0.05
        table[ids[4]] *= 0.05
        table[ids[5]] *= 4
        self.table = table.astype(self.table.dtype)
        self.touched = record(self.touched, {"t": jnp.asarray(ids)})

    def restored(self, step: int, sharding: Any = None) -> np.ndarray:
        like = {
            "t": jax.ShapeDtypeStruct(
                self.table.shape, self.table.dtype, sharding=sharding
            )
        }
        return np.asarray(self.read(step, like)["t"])

    def expected(self, step: int, first: int = 0, bits: int = 4) -> np.ndarray:
        """The rows of a step, encoded without anything below, on the step of the first save."""
        codec = Lattice(bits=bits)
        rows, lattice = self.truths[step], step_of(codec, self.truths[first])
        encoded = encode_on(codec, rows, lattice)
        read = decode(codec, encoded.parts, DIM, rows.dtype)
        return np.where(np.asarray(encoded.escaped)[:, None], rows, np.asarray(read))

    def check(self, steps: Mapping[int, int], sharding: Any = None) -> None:
        """Compares all bits of steps, given on the step of which save each rests."""
        for step, first in steps.items():
            got = self.restored(step, sharding)
            assert got.tobytes() == self.expected(step, first).tobytes(), step
            read = cnr.read_rows(self.root, "t", np.arange(0, ROWS, 3), step=step)
            assert read.tobytes() == got[::3].tobytes()

    def segments(self, step: int) -> Iterator[Any]:
        for tile in self.process(step).tiles:
            yield from tile.segments


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()])
def test_a_chain_of_differences_has_the_bits_of_fresh_rows(
    tmp_path: Path, policy: Any
) -> None:
    run = Run(tmp_path, policy=policy)
    with run.open() as manager:
        for _ in range(4):
            run.save(manager)
            run.train()
    run.check({0: 0, 1: 0, 2: 0, 3: 0})
    assert all(segment.digest is None for segment in run.segments(0))
    assert all(any(s.digest for s in run.segments(step)) for step in (1, 2, 3))
    needed = read_manifest(tmp_path / "1" / "default").required_features
    assert {"lattice", "crc32"} <= set(needed)
    full = read_manifest(tmp_path / "0" / "default").required_features
    assert "crc32" not in full
    assert cnr.verify(tmp_path, level="data") == ()
    for step in range(4):
        read = lattice_reader.read(tmp_path, step, ROWS, DIM)
        assert read.tobytes() == run.restored(step).tobytes()


def test_what_lies_below_is_compared_once_where_later_saves_have_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, compared = Run(tmp_path, policy=cnr.Consecutive()), list[str]()
    check = Held.check_below
    with run.open() as manager:
        for step in range(5):
            if step in (2, 4):
                run.touched = cnr.record(run.touched, {"t": jnp.arange(ROWS)})
            run.save(manager)
            run.train()

    def noting(self: Held, digest: Any) -> None:
        compared.append(self.reader.directory.parent.name)
        check(self, digest)

    monkeypatch.setattr(Held, "check_below", noting)
    for step, steps in ((1, ["1"]), (2, ["2"]), (3, ["2", "3"]), (4, ["4"])):
        compared.clear()
        run.restored(step)
        assert sorted(compared) == steps
    monkeypatch.undo()
    run.check({3: 0, 4: 0})


def test_a_run_goes_on_where_it_was_restored(tmp_path: Path) -> None:
    """What lies below is read back: nothing of it is kept by the program."""
    run = Run(tmp_path, policy=cnr.Consecutive())
    with run.open() as manager:
        run.save(manager)
        run.train()
        run.save(manager)
    with run.open() as manager:
        found = manager.restore(1, args=cnr.args.Restore(run.state()))
        run.table, run.touched = np.asarray(found.state["t"]), found.touched
        for _ in range(2):
            run.train()
            run.save(manager)
    assert any(segment.digest for segment in run.segments(2))
    run.check({1: 0, 2: 0, 3: 0})


def test_a_failed_save_leaves_nothing_that_another_rests_on(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=cnr.Consecutive())
    with run.open() as manager:
        run.save(manager)
        for step in range(1, 4):
            run.train()
            fault = Fault("open", action="ENOSPC", times=0, match=f"{step}.orbax")
            with (
                inprocess.failing(tmp_path, fault),
                pytest.raises(cnr.errors.SaveError),
            ):
                run.save(manager)
            run.truths.pop()
            run.train()
            run.save(manager)
    run.check({1: 0, 2: 0, 3: 0})
    assert all(any(s.digest for s in run.segments(step)) for step in (1, 2, 3))


def test_saves_in_flight_rest_on_one_another(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=cnr.Consecutive(), max_in_flight=3)
    with run.open() as manager:
        for _ in range(5):
            run.save(manager, waits=False)
            run.train()
    run.check(dict.fromkeys(range(5), 0))
    assert all(any(s.digest for s in run.segments(step)) for step in range(1, 5))


def test_a_save_waits_for_one_that_has_yet_to_begin_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may be late: the folder of the other is made, and its rows are there, before."""
    run, asked = Run(tmp_path, policy=cnr.Consecutive(), max_in_flight=3), Event()
    write, of = launch._write_rows, ParentRows.of

    def late(flight: Any, *args: Any) -> None:
        if flight.step == 1:
            assert asked.wait(60)
            time.sleep(0.5)
        write(flight, *args)

    def asks(self: ParentRows, root: Any, item: str, parent: Any, keys: Any) -> Any:
        if parent.directory == "1":
            asked.set()
        return of(self, root, item, parent, keys)

    with run.open() as manager:
        run.save(manager)
        monkeypatch.setattr(launch, "_write_rows", late)
        monkeypatch.setattr(ParentRows, "of", asks)
        for _ in range(2):
            run.train()
            run.save(manager, waits=False)
    run.check(dict.fromkeys(range(3), 0))
    assert all(any(s.digest for s in run.segments(step)) for step in (1, 2))


@pytest.mark.parametrize("refused", ["begins", "never begins"])
def test_nobody_waits_for_a_save_that_ends_before_it_writes(
    tmp_path: Path, refused: str
) -> None:
    parents, job = ParentRows(), Job()
    parents.begin("ab", lambda: job.is_over)
    parent = ParentRef(directory="1", uuid="ab", clock=1)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(parents.of, tmp_path, "default", parent, {})
        with pytest.raises(TimeoutError):
            asking.result(0.2)
        if refused == "begins":
            job.run(lambda: None)
        else:
            assert job.give_up()
        assert asking.result(30) == {}


def test_closing_frees_the_rows_that_differences_are_taken_to(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=cnr.Consecutive())
    with run.open() as manager:
        for _ in range(2):
            run.save(manager)
            run.train()
        parents = manager._handler._launcher._parents
        held = [
            part for tile in parents._tiles.values() for part in tile.parts.values()
        ]
        rows = [weakref.ref(part) for part in held]
        del held
        assert rows and all(each() is not None for each in rows)
    gc.collect()
    assert all(each() is None for each in rows)


@each_of("later", ["some rows", "all rows"])
def test_differences_on_other_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """Also below a save of all rows, with which alone what lies below is compared."""
    run = Run(tmp_path / later, policy=cnr.Consecutive())
    of = ParentRows.of

    def another(self: ParentRows, *args: Any) -> dict[Any, Any]:
        found = of(self, *args)
        for parts in found.values():
            parts["integers"][ROWS // 2 :, 1] += 1
        return found

    with run.open() as manager:
        run.save(manager)
        run.train()
        monkeypatch.setattr(ParentRows, "of", another)
        run.save(manager)
        monkeypatch.undo()
        run.train()
        if later == "all rows":
            run.touched = cnr.record(run.touched, {"t": jnp.arange(ROWS)})
        run.save(manager)
    for step in (1, 2):
        with pytest.raises(cnr.errors.IntegrityError, match="do not belong") as caught:
            run.restored(step)
        assert caught.value.kind == "foreign_rows"
    run.check({0: 0})


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        (2, jnp.bfloat16),
        pytest.param(4, np.float16, marks=pytest.mark.slow),
        pytest.param(2, np.float32, marks=pytest.mark.slow),
        (8, np.float32),
    ],
)
def test_other_dtypes_and_widths(tmp_path: Path, bits: int, dtype: Any) -> None:
    run = Run(tmp_path, dtype, policy=cnr.Consecutive(), bits=bits)
    with run.open() as manager:
        for _ in range(3):
            run.save(manager)
            run.train()
    assert any(segment.digest for segment in run.segments(2))
    for step in range(3):
        assert run.restored(step).tobytes() == run.expected(step, bits=bits).tobytes()
        if dtype == np.float32:
            read = lattice_reader.read(tmp_path, step, ROWS, DIM)
            assert read.tobytes() == run.restored(step).tobytes()


@pytest.mark.parametrize(
    ("spec", "staging"),
    [
        pytest.param(P(("r", "c")), "device", marks=pytest.mark.slow),
        (P("r", "c"), "auto"),
        (P(None, "c"), "device"),
    ],
)
def test_shards_are_read_on_another_mesh(
    tmp_path: Path, spec: Any, staging: str
) -> None:
    """Each shard has a step of its own, so bits are compared between two ways to read."""
    run = Run(tmp_path, policy=cnr.Consecutive(), staging=staging)
    run.sharding = NamedSharding(MESH, spec)
    run.tables = cnr.find_tables(run.state(), ["t"])
    run.touched = cnr.init_touched(run.state(), run.tables)
    with run.open() as manager:
        for _ in range(3):
            run.save(manager)
            run.train()
    assert any(segment.digest for segment in run.segments(2))
    for step, truth in enumerate(run.truths):
        whole = run.restored(step)
        for other in (spec, P("c"), P(None, ("r", "c")), P("c", "r")):
            got = run.restored(step, NamedSharding(MESH, other))
            assert got.tobytes() == whole.tobytes(), other
        ordinary = np.isfinite(truth).all(axis=1)
        off = np.linalg.norm(whole[ordinary] - truth[ordinary], axis=1)
        assert off.max() < 0.05
        read = cnr.read_rows(tmp_path, "t", np.arange(ROWS), step=step)
        assert read.tobytes() == whole.tobytes()


def test_a_table_that_was_coded_otherwise_goes_over_at_its_next_full(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, policy=cnr.Consecutive(), codec="adaptive")
    with run.open() as manager:
        run.save(manager)
    run.options["codec"] = "lattice"
    with run.open() as manager:
        found = manager.restore(0, args=cnr.args.Restore(run.state()))
        run.table, run.touched = np.asarray(found.state["t"]), found.touched
        for _ in range(2):
            run.train()
            run.save(manager)
    assert not any(s.digest for step in (1, 2) for s in run.segments(step))
    for step in (1, 2):
        ordinary = np.isfinite(run.truths[step]).all(axis=1)
        off = run.restored(step)[ordinary] - run.truths[step][ordinary]
        assert np.linalg.norm(off, axis=1).max() < 0.05


def test_who_has_no_zstandard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(cnr.errors.OptionError, match="not installed") as caught:
        cnr.Options(codec="lattice")
    assert caught.value.kind == "not_installed"
    cnr.Options(codec="adaptive")


def test_dithered_rows_that_stay_are_not_stored_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=cnr.Consecutive(), rounding="dithered", tracking=None)
    with run.open() as manager:
        run.save(manager)
        # All rows are recorded, and none has moved.
        run.touched = cnr.record(run.touched, {"t": jnp.arange(ROWS)})
        run.save(manager)
    assert run.restored(0).tobytes() == run.restored(1).tobytes()
    item = tmp_path / "1" / "default"
    process = load_process((item / "manifest.p00000.json").read_bytes(), "process")
    (packed,) = [
        a.compressed for n, a in process.arrays.items() if n.startswith("lattice.int")
    ]
    assert packed is not None and packed.codec == PACKED_ROWS
    assert sum(packed.bytes) < 64  # zeros


def test_steps_that_need_a_package_are_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an older step would be restored, and those after it be set aside."""
    run = Run(tmp_path)
    with run.open() as manager:
        for _ in range(2):
            run.train()
            run.save(manager)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as manager:
        for step in (None, 1):
            with pytest.raises(cnr.errors.OptionError, match="not installed") as caught:
                manager.restore(step, args=cnr.args.Restore(run.state()))
            assert caught.value.kind == "not_installed"
    monkeypatch.undo()
    assert cnr.verify(tmp_path) == ()


@pytest.mark.parametrize("codec", ["lattice", Lattice()])
def test_slots_are_not_put_on_a_lattice(codec: Any) -> None:
    with pytest.raises(cnr.errors.OptionError, match="is for tables"):
        cnr.Options(slot_codec=codec)


@each_of("bits", [2, 4])
def test_rows_that_are_not_trained_stay_from_restore_to_restore(
    tmp_path: Path, bits: int
) -> None:
    rng, root = np.random.default_rng(0), tmp_path / str(bits)
    table = rng.normal(size=(2_000, 16)).astype(np.float32)
    state = {"t": jnp.asarray(table)}
    tables = cnr.find_tables(state, ["t"])
    options = cnr.Options(codec="lattice", bits=bits, policy=cnr.Full())
    first, moved = None, 400
    for step in range(4):
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            if first is not None:
                state = manager.restore(None, args=cnr.args.Restore(state)).state
                state["t"] = state["t"].at[:moved].add(0.05)
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
            read = np.asarray(
                manager.restore(step, args=cnr.args.Restore(state)).state["t"]
            )
        first = read if first is None else first
        np.testing.assert_array_equal(read[moved:], first[moved:])


@each_of(("limit", "adds"), [(0, False), (100, False), (1 << 20, True)])
def test_integers_of_the_parent_take_no_more_memory_than_they_may(
    tmp_path: Path, limit: int, adds: bool
) -> None:
    run = Run(tmp_path / str(limit), policy=cnr.Consecutive(), max_parent_bytes=limit)
    with run.open() as manager:
        for _ in range(3):
            run.save(manager)
            run.train()
        manager.wait_until_finished()
        parents = manager._handler._launcher._parents
        assert bool(parents._tiles or parents._last[2]) == adds
    assert any(s.digest for step in (1, 2) for s in run.segments(step)) == adds
    if adds:
        run.check({0: 0, 1: 0, 2: 0})
    run.check({0: 0})
    assert cnr.verify(run.root, level="data") == ()
    # Without the parent's step, rows of a delta are on one of their own.
    got, want = run.restored(2), run.expected(2, 0)
    small = np.isfinite(want).all(axis=1) & (np.abs(want).max(axis=1) < 1)
    np.testing.assert_allclose(got[small], want[small], atol=0.05)
