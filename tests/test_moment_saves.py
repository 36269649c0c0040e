"""Saves of an optimizer's moments as integers: each step reads as the second reader has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.repository.parent_rows import ParentRows
from cnr_jax.repository.replay.encoded import Merged, Target
from cnr_jax.repository.replay.regions import WantedLeaf
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.step_reader import open_chain
from cnr_jax.state.layouts import layout_from
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from . import lattice_reader
from .conftest import mesh_within
from .summed_run import SummedRun

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")

ROWS, DIM = 256, 16
MESH = mesh_within((2, 2), ("r", "c"))
MU, NU = "opt/mu", "opt/nu"


class Run(SummedRun):
    """A table under dense Adam, of whose rows the upper half is never looked up."""

    def __init__(self, root: Path, dim: int = DIM, **options: Any) -> None:
        given = {
            "codec": "lattice",
            "slot_codec": "moments",
            "tracking": "fingerprint",
            "policy": cnr.Consecutive(),
        }
        super().__init__(root, **{**given, **options})
        shape = (ROWS, dim)
        self.t = (self._rng.normal(size=shape) * 0.05).astype(np.float32)
        self.mu, self.nu = np.zeros((2, *shape), np.float32)
        self.is_odd = False

    def saved(self) -> dict[str, np.ndarray]:
        """What there is to save; once it was trained, with some that no integers hold."""
        t, mu, nu = self.t.copy(), self.mu.copy(), self.nu.copy()
        if self.is_odd:
            nu[3, 0], mu[4, 0], t[5, 0] = -1e-9, np.nan, np.inf
            mu[6], nu[6, -1] = 1.0, 0
        return {"table": t, MU: mu, NU: nu}

    def state(self) -> dict[str, Any]:
        placed = {n: jax.device_put(x, self.sharding) for n, x in self.saved().items()}
        mu, nu = {"t": placed[MU]}, {"t": placed[NU]}
        opt = optax.ScaleByAdamState(jnp.int32(0), mu=mu, nu=nu)
        return {"t": placed["table"], "opt": opt}

    def train(self, steps: int = 20) -> None:
        for _ in range(steps):
            ids = self._rng.choice(ROWS // 2, 8, replace=False)
            grads = np.zeros_like(self.t)
            sizes = np.exp(self._rng.normal(size=(8, 1)) * 2)
            grads[ids] = self._rng.normal(size=(8, grads.shape[1])) * sizes * 1e-3
            self.mu = (0.9 * self.mu + 0.1 * grads).astype(np.float32)
            self.nu = (0.999 * self.nu + 0.001 * grads**2).astype(np.float32)
            step = self.mu / (np.sqrt(self.nu) + 1e-8)
            self.t = (self.t - 1e-3 * step).astype(np.float32)
        self.is_odd = True

    def restored(self, step: int, sharding: Any = None) -> dict[str, np.ndarray]:
        def like(x: Any) -> Any:
            given = sharding if x.ndim == 2 else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=given)

        wanted = jax.tree.map(like, self.state())
        found = self.read(step, wanted)
        leaves = {"table": found["t"], MU: found["opt"].mu["t"]}
        leaves[NU] = found["opt"].nu["t"]
        return {name: np.asarray(leaf) for name, leaf in leaves.items()}

    def check(self, step: int, *, second: bool = True) -> dict[str, np.ndarray]:
        """Compares a step with what was saved, and with what the second reader makes of it."""
        got, truth = self.restored(step), self.truths[step]
        for name, read in got.items():
            if second:
                dim = read.shape[1]
                other = lattice_reader.read(self.root, step, ROWS, dim, name)
                assert other.tobytes() == read.tobytes(), (step, name)
        odd = np.zeros(ROWS, bool)
        odd[3:7] = truth[MU].any()
        for name in (MU, NU):
            assert (got[name][ROWS // 2 :] == 0).all()
        mu, nu = truth[MU][~odd], truth[NU][~odd]
        read = got[NU][~odd]
        assert ((read == 0) == (nu == 0)).all()
        off = np.abs(np.log2(read[nu > 0] / nu[nu > 0]))
        assert off.max(initial=0) <= 0.52
        assert (np.abs(got[MU][~odd] - mu) <= 0.51 / 8 * np.sqrt(read)).all()
        if odd.any() and second:  # not of columns alone
            for name, row in ((NU, 3), (MU, 3), (MU, 4), (MU, 6)):
                assert got[name][row].tobytes() == truth[name][row].tobytes()
        return got

    def merged(self, step: int, *leaves: str) -> list[Merged]:
        """Leaves of a step as one restore reads them, still encoded."""
        chain = open_chain(epath.Path(self.root), f"{step}", "default")
        entry = chain[-1].tables["t"]
        layout = layout_from(entry.layout.name, entry.layout.configuration)
        target = Target(rows=entry.rows, layout=layout, padded_rows=entry.padded_rows)
        dtypes = [chain[-1].dtypes["t", leaf] for leaf in leaves]
        return [
            WantedLeaf(chain, "t", leaf, target, dtype, dtype).merged(
                ((0, ROWS), (0, DIM))
            )
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]

    def adds(self, step: int) -> dict[str, bool]:
        """Whether rows of each leaf are added to those below."""
        found = dict.fromkeys(("table", MU, NU), False)
        for tile in self.process(step).tiles:
            added = any(segment.digest for segment in tile.segments)
            found[tile.leaf] = found.get(tile.leaf, False) or added
        return found


ALL_ADD = {"table": True, MU: True, NU: True}


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()])
def test_a_chain_reads_as_the_second_reader_has_it(tmp_path: Path, policy: Any) -> None:
    run = Run(tmp_path, policy=policy)
    with run.open() as manager:
        for _ in range(4):
            run.train()
            run.save(manager)
    for step in range(4):
        run.check(step)
    assert not any(run.adds(0).values())
    assert all(run.adds(step) == ALL_ADD for step in range(1, 4))
    needed = read_manifest(tmp_path / "1" / "default").required_features
    assert {"lattice", "moments", "crc32"} <= set(needed)
    assert cnr.verify(tmp_path, level="data") == ()
    (table,) = cnr.describe(tmp_path).steps[-1].tables
    assert {leaf.name for leaf in table.leaves} == {"table", MU, NU}
    sizes = {leaf.name: leaf.bytes for leaf in table.leaves}
    # Parts that two leaves share are stored, and counted, once.
    assert sum(sizes[name] for name in (MU, NU)) == table.slot_bytes
    assert table.slot_bytes < table.saved_rows * DIM * 4


def test_a_run_goes_on_where_it_was_restored(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.open() as manager:
        for _ in range(2):
            run.save(manager)
            run.train()
    with run.open() as manager:
        found = manager.restore(1, args=cnr.args.Restore(run.state())).state
        leaves = found["t"], found["opt"].mu["t"], found["opt"].nu["t"]
        run.t, run.mu, run.nu = (np.nan_to_num(x, posinf=0) for x in leaves)
        run.nu = np.abs(run.nu)
        for _ in range(2):
            run.train()
            run.save(manager)
    assert run.adds(2) == ALL_ADD == run.adds(3)
    for step in range(4):
        run.check(step)


def test_a_failed_save_between_two_deltas_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.open() as manager:
        run.train()
        run.save(manager)
        for step in range(1, 3):
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
    assert run.adds(1) == ALL_ADD == run.adds(2)
    for step in range(1, 3):
        run.check(step)


def test_saves_in_flight_rest_on_one_another(tmp_path: Path) -> None:
    run = Run(tmp_path, max_in_flight=3)
    with run.open() as manager:
        for _ in range(4):
            run.save(manager, waits=False)
            run.train()
    assert run.adds(2) == ALL_ADD == run.adds(3)
    for step in range(4):
        run.check(step)


@pytest.mark.parametrize("name", ["integers", "centre"])
def test_moments_on_other_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = Run(tmp_path)
    of = ParentRows.of

    def another(self: ParentRows, *args: Any) -> dict[Any, Any]:
        found = of(self, *args)
        for key, parts in found.items():
            if key[1] == NU:
                parts[name][20, 0] += 1
        return found

    with run.open() as manager:
        run.train()
        run.save(manager)
        run.train()
        monkeypatch.setattr(ParentRows, "of", another)
        run.save(manager)
        monkeypatch.undo()
    run.check(0)
    # Of the means too, which are read by themselves.
    for leaf in (MU, NU):
        with pytest.raises(cnr.errors.IntegrityError, match="do not belong"):
            run.merged(1, leaf)


def test_squares_are_added_up_once_for_both_moments(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.open() as manager:
        for _ in range(4):
            run.save(manager)
            run.train()
    mu, nu = run.merged(3, MU, NU)
    assert nu.parts["integers"] is mu.parts["octaves"]
    assert nu.parts["centre"] is mu.parts["centre"]
    for leaf, found in ((MU, mu), (NU, nu)):
        (alone,) = run.merged(3, leaf)
        assert alone.parts.keys() == found.parts.keys()
        for name, part in alone.parts.items():
            np.testing.assert_array_equal(part, found.parts[name])


@pytest.mark.parametrize("spec", [P("r", "c"), P(None, "c")])
def test_shards_are_read_on_another_mesh(tmp_path: Path, spec: Any) -> None:
    run = Run(tmp_path)
    run.sharding = NamedSharding(MESH, spec)
    with run.open() as manager:
        for _ in range(3):
            run.save(manager)
            run.train()
    assert run.adds(2) == ALL_ADD
    for step in range(3):
        whole = run.check(step, second=False)
        for other in (spec, P("c"), P("c", "r")):
            got = run.restored(step, NamedSharding(MESH, other))
            for name, leaf in whole.items():
                assert got[name].tobytes() == leaf.tobytes(), (other, name)


def test_rows_without_gradients_take_no_bytes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.nu[:] = np.random.default_rng(1).chisquare(1, run.nu.shape) * 1e-6
    with run.open() as manager:
        run.save(manager)
        # All rows of nu decay, so all are saved; of none anything is stored.
        run.nu = (run.nu * 0.999**2000).astype(np.float32)
        run.save(manager)
    process = run.process(1)
    (rows,) = {
        process.row_ids[s.row_ids].count for t in process.tiles for s in t.segments
    }
    assert rows == ROWS
    sizes = {
        name: sum(entry.compressed.bytes)
        for name, entry in process.arrays.items()
        if entry.compressed and not name.startswith("lattice")
    }
    assert set(sizes) == {"octave.integers16.int16", "unit.integers16.int8"}
    assert max(sizes.values()) < 64
    read = run.restored(1)[NU]
    assert np.abs(np.log2(read / run.nu)).max() <= 0.52


@pytest.mark.parametrize("dim", [1, DIM])
def test_pairs_may_be_named(tmp_path: Path, dim: int) -> None:
    run = Run(tmp_path, dim)
    spec = {"t": cnr.TableSpec(moments=[("first", "second")])}

    def state() -> dict[str, Any]:
        slots = {"first": {"t": run.mu}, "second": {"t": run.nu}}
        return jax.tree.map(jnp.asarray, {"t": run.t, "slots": slots})

    tables = cnr.find_tables(state(), spec)
    assert tables["t"].moments == (("slots/first", "slots/second"),)
    options = cnr.Options(**run.options)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(3):
            run.train()
            manager.save(step, args=cnr.args.Save(state()))
            manager.wait_until_finished()
        found = manager.restore(2, args=cnr.args.Restore(state())).state["slots"]
    assert run.adds(2)["slots/first"] and run.adds(2)["slots/second"]
    ordinary = np.r_[7:ROWS]
    off = np.abs(np.asarray(found["first"]["t"]) - run.mu)
    most = 0.1 * np.sqrt(run.nu) + 1e-12
    assert (off <= most)[ordinary].all() and off[ordinary].any()
    for name in ("slots/first", "slots/second"):
        leaf = name.rpartition("/")[2]
        read = lattice_reader.read(tmp_path, 2, ROWS, dim, name)
        assert read.tobytes() == np.asarray(found[leaf]["t"]).tobytes()


def test_accumulators_are_stored_as_differences(tmp_path: Path) -> None:
    rng, spec = np.random.default_rng(0), ["t"]
    table = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    sums = {"wide": rng.random((ROWS, DIM)), "narrow": rng.random(ROWS)}
    options = Run(tmp_path).options

    def state() -> dict[str, Any]:
        slots = {"sum_of_squares": sums["wide"], "accumulator": sums["narrow"]}
        found = {name: {"t": x.astype(np.float32)} for name, x in slots.items()}
        return jax.tree.map(jnp.asarray, {"t": table, **found, "trace": {"t": table}})

    tables = cnr.find_tables(state(), spec)
    with cnr.CheckpointManager(
        tmp_path, tables=tables, options=cnr.Options(**options)
    ) as manager:
        for step in range(3):
            for each in sums.values():
                each[: ROWS // 2] += rng.random(each[: ROWS // 2].shape) * 1e-3
            manager.save(step, args=cnr.args.Save(state()))
            manager.wait_until_finished()
        found = manager.restore(2, args=cnr.args.Restore(state())).state
    np.testing.assert_array_equal(found["trace"]["t"], table)
    for name, saved in (("sum_of_squares", "wide"), ("accumulator", "narrow")):
        read = np.asarray(found[name]["t"])
        assert 0 < np.abs(read / sums[saved] - 1).max() < 0.0029
        dim = DIM if saved == "wide" else 1
        second = lattice_reader.read(tmp_path, 2, ROWS, dim, name)
        assert second.reshape(read.shape).tobytes() == read.tobytes()


def test_means_without_squares_are_stored_exactly(tmp_path: Path) -> None:
    """So they are where the pair is not of one kind: nothing is guessed."""
    run = Run(tmp_path)
    run.train()
    state = run.state()
    opt = optax.ScaleByAdamState(
        state["opt"].count,
        state["opt"].mu,
        {"t": state["opt"].nu["t"].astype("bfloat16")},
    )
    state = {**state, "opt": opt}
    tables = cnr.find_tables(state, ["t"])
    options = cnr.Options(**run.options)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        found = manager.restore(0, args=cnr.args.Restore(state)).state
    for name in ("mu", "nu"):
        got, saved = (np.asarray(getattr(x["opt"], name)["t"]) for x in (found, state))
        assert got.tobytes() == saved.tobytes()


def test_what_was_stored_exactly_goes_over_at_a_delta(tmp_path: Path) -> None:
    run = Run(tmp_path, slot_codec="raw")
    run.train()
    with run.open() as manager:
        run.save(manager)
    run.options["slot_codec"] = "moments"
    with run.open() as manager:
        found = manager.restore(0, args=cnr.args.Restore(run.state())).state
        run.t = np.nan_to_num(found["t"], posinf=0)
        for _ in range(2):
            run.train()
            run.save(manager)
    assert run.adds(1) == {"table": True, MU: False, NU: False}
    for step in (1, 2):
        run.restored(step)
        read = lattice_reader.read(tmp_path, step, ROWS, DIM, MU)
        assert read.tobytes() == run.restored(step)[MU].tobytes()


def test_an_odd_pair_is_refused(tmp_path: Path) -> None:
    state = Run(tmp_path).state()
    for moments, text in (
        ([("mu", "none")], "means 0 slots"),
        ([("mu", "mu")], "are not a pair"),
        ([(0, 1)], "must be pairs of slots"),
        ([(None, "mu")], "must be pairs of slots"),
        ([("mu", "nu"), ("nu", "mu")], "stands in two pairs"),
        ([("mu",)], "must be pairs"),
    ):
        spec = cnr.TableSpec(moments=moments)  # type: ignore[arg-type]
        with pytest.raises(cnr.errors.TableError, match=text):
            cnr.find_tables(state, {"t": spec})


@pytest.mark.parametrize(
    ("optimizer", "is_exact"),
    [
        (optax.adamax(1e-3), True),
        (optax.adamaxw(1e-3), True),
        (optax.adam(1e-3), False),
        (optax.adamw(1e-3), False),
    ],
)
def test_means_beside_no_squares_stay_as_they_are(
    tmp_path: Path, optimizer: Any, is_exact: bool
) -> None:
    """What `adamax` keeps looks like the moments of Adam, but its squares are none."""
    rng = np.random.default_rng(0)
    params = {"t": jnp.asarray(rng.normal(size=(ROWS, DIM)), jnp.float32)}
    state = {"params": params, "opt": optimizer.init(params)}
    tables = cnr.find_tables(state, ["t"])
    options = cnr.Options(
        codec="lattice", slot_codec="moments", tracking="fingerprint", bits=4
    )
    scales = np.exp(rng.normal(size=(ROWS, 1))) * 1e-4
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for _ in range(30):
            grads = {
                "t": jnp.asarray(rng.normal(size=(ROWS, DIM)) * scales, jnp.float32)
            }
            _, opt = optimizer.update(grads, state["opt"], params)
            state = {"params": params, "opt": opt}
        manager.save(1, args=cnr.args.Save(state))
        got = manager.restore(1, args=cnr.args.Restore(state)).state
    want, found = (np.asarray(each["opt"][0].mu["t"]) for each in (state, got))
    assert np.array_equal(want, found) is is_exact
    np.testing.assert_allclose(found, want, atol=float(np.abs(want).max()))
