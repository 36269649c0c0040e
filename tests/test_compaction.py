"""A merged step restores to the bits of the chain that it stands for."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.checkpointer.restoring import attempts
from cnr_jax.format import names
from cnr_jax.format.tiles import load_process
from cnr_jax.repository import ids_in_blocks
from cnr_jax.repository.compaction import rows
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import is_directory
from cnr_jax.testing import damage, inprocess

from .bucket_proxy import GoogleProxy, Proxy
from .conftest import mesh_within, skip_below

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")

ROWS = 96
DIMS = {"t": 8, "u": 16}
MESH = mesh_within((2, 2), ("r", "c"))
# How rows and columns are cut: the second of tables, the third over one device, and so on.
CUTS = [P(None), P("r"), P(None, "c"), P("r", "c"), P(("r", "c"))]
CODECS = ["adaptive", "asymmetric", "lattice", "raw", "symmetric", "kmeans", "bfloat16"]
Flat = dict[str, np.ndarray]
# Of managers that only restore: each way to cut a table would be compiled for saves too.
READING = cnr.Options(codec="raw", tracking="recorded", audit_bytes=0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are merged a few at a time, as those of large tables are."""
    _set_blocks(monkeypatch, 700)


def _set_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(rows, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(rows, "_BESIDE_BYTES", block_bytes // 4)
    monkeypatch.setattr(ids_in_blocks, "READ_BYTES", 10)


class Run:
    """Two tables under Adam, of which some rows change between two saves."""

    def __init__(self, root: epath.PathLike, seed: int = 0) -> None:
        self.root, self._rng = root, np.random.default_rng(seed)
        self.step = 0
        self.values: dict[str, np.ndarray] = {}
        for name, dim in DIMS.items():
            made = self._rng.normal(size=(ROWS, dim)).astype(np.float32)
            made[5, 3], made[6], made[7] = np.nan, 0, made[7] * 1e-3
            self.values[name] = made
            self.values[f"mu {name}"] = made * 0.1
            self.values[f"nu {name}"] = np.abs(made) * 0.01
        self.cut = P(None)
        self.touched: Any = None
        self.tables = cnr.find_tables(self.state(), [*DIMS])

    def state(self) -> dict[str, Any]:
        sharding = NamedSharding(MESH, self.cut)
        placed = {n: jax.device_put(x, sharding) for n, x in self.values.items()}
        mu, nu = ({n: placed[f"{k} {n}"] for n in DIMS} for k in ("mu", "nu"))
        opt = optax.ScaleByAdamState(jnp.int32(self.step), mu=mu, nu=nu)
        tables = {n: placed[n] for n in DIMS}
        dense = jnp.arange(5.0) + self.step
        return {**tables, "opt": opt, "dense": dense, "text": "a", "n": self.step}

    def train(self) -> None:
        for name, value in self.values.items():
            ids = self._rng.choice(ROWS, ROWS // 4, replace=False)
            value[ids] += self._rng.normal(size=(len(ids), value.shape[1])) * 0.01
            if name.startswith("nu"):
                np.abs(value, out=value)
            value[ids[0]] = 0
            value[ids[1], 2] = np.inf
            value[ids[2]] *= 0.05

    def save(self, options: dict[str, Any], kinds: Any = None, saves: int = 1) -> None:
        """Saves by a manager of its own, which goes on from what is there."""
        given = {"tracking": "fingerprint", "policy": cnr.Consecutive(), **options}
        with cnr.CheckpointManager(
            self.root, tables=self.tables, options=cnr.Options(**given)
        ) as manager:
            if manager.latest_step() is not None:
                manager.restore(None, args=cnr.args.Restore(self.state()))
            for _ in range(saves):
                self.train()
                manager.save(self.step, args=cnr.args.Save(self.state()))
                manager.wait_until_finished()
                self.step += 1

    def restored(
        self, step: int | None, cut: Any = None, root: Path | None = None
    ) -> Flat:
        """All that a restore gives, bit for bit."""
        self.cut = cut if cut is not None else P(None)
        with cnr.CheckpointManager(
            root or self.root, tables=self.tables, options=READING
        ) as manager:
            found = manager.restore(step, args=cnr.args.Restore(self.state()))
        leaves, _ = jax.tree_util.tree_flatten_with_path(found.state)
        return {jax.tree_util.keystr(k): np.asarray(x) for k, x in leaves}


def assert_same(got: Flat, expected: Flat) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].tobytes() == value.tobytes(), name


def kinds(root: epath.PathLike) -> dict[str, str]:
    return {each.directory: each.kind for each in cnr.describe(root).steps}


# Random chains have these codecs too.
_OTHERS = ("asymmetric", "symmetric", "kmeans", "bfloat16")
_SLOW = [pytest.param(codec, marks=pytest.mark.slow) for codec in _OTHERS]


@pytest.mark.parametrize(
    "codec",
    [
        *(codec for codec in CODECS if codec not in _OTHERS),
        *_SLOW,
        "lattice moments",
        "lattice moments whole",
    ],
)
def test_a_merged_step_restores_to_the_bits_of_its_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    run = Run(tmp_path)
    if codec.endswith("whole"):
        _set_blocks(monkeypatch, 32 << 20)
    codec, *slots = codec.split()
    options = {"codec": codec, **({"slot_codec": "moments"} if slots else {})}
    run.cut = P("r")
    run.save(options, saves=4)
    chain = [run.restored(step) for step in range(4)]
    plan = cnr.plan_compaction(tmp_path)
    assert (plan.step, plan.chain) == (3, ("0", "1", "2", "3"))
    done = plan.execute(writer_is_dead=True)
    assert done.merged_directory == "3.g1.branch"
    assert kinds(tmp_path) == {
        "0": "full",
        "1": "delta",
        "2": "delta",
        "3.g1.branch": "full",
    }
    for cut in CUTS:
        assert_same(run.restored(3, cut), chain[3])
    assert_same(run.restored(None), chain[3])
    assert_same(run.restored(2), chain[2])
    assert cnr.verify(tmp_path, level="data") == ()
    # It needs no other.
    for step in range(3):
        shutil.rmtree(tmp_path / str(step))
    assert_same(run.restored(None), chain[3])
    assert cnr.compact(tmp_path, writer_is_dead=True).step is None


def test_an_error_in_ids_that_are_read_in_blocks_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save({"codec": "raw"}, saves=2)

    def wrong(ids: Any, first: int, last: int) -> Any:
        raise errors.FormatError("row ids are wrong", kind="row_ids")

    monkeypatch.setattr(ids_in_blocks.IdsInBlocks, "between", wrong)
    found = r"1/default/rows\.p00000/row_ids: entry \d+: row ids are wrong"
    with pytest.raises(errors.FormatError, match=found):
        cnr.compact(tmp_path, writer_is_dead=True)
    assert sorted(kinds(tmp_path)) == ["0", "1"]


def test_deltas_that_rest_on_a_merged_step_go_on_to_do_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    options = {"codec": "lattice", "slot_codec": "moments"}
    run.save(options, saves=5)
    chain = [run.restored(step) for step in range(5)]
    done = cnr.compact(tmp_path, step=2, writer_is_dead=True)
    assert done.merged_directory == "2.g1.branch"
    for step in range(5):
        assert_same(run.restored(step), chain[step])
    for step in range(2):
        shutil.rmtree(tmp_path / str(step))
    for step in (2, 3, 4):
        assert_same(run.restored(step), chain[step])
        for name in DIMS:
            read = cnr.read_rows(tmp_path, name, np.arange(0, ROWS, 3), step=step)
            assert read.tobytes() == chain[step][f"['{name}']"][::3].tobytes()
    assert cnr.verify(tmp_path, level="data") == ()
    # And a run goes on from there: a delta on one that rests on it, and on itself.
    run.save(options, saves=2)
    assert kinds(tmp_path)["5"] == "delta"
    last = run.restored(6)
    cnr.compact(tmp_path, writer_is_dead=True)
    assert_same(run.restored(6), last)
    run.save(options)
    assert kinds(tmp_path)["7"] == "delta"
    last = run.restored(7)
    cnr.compact(tmp_path, writer_is_dead=True)
    assert_same(run.restored(None), last)


def test_layers_hold_what_other_meshes_have_cut_otherwise(tmp_path: Path) -> None:
    """Also where exact rows lie, cut, between rows that are added."""
    skip_below(4)
    run = Run(tmp_path)
    for cut, codec in (
        (P("r"), "lattice"),
        (P("r", "c"), "raw"),
        (P(None), "lattice"),
        (P(None, "c"), "adaptive"),
        (P("r"), "kmeans"),
    ):
        run.cut = cut
        run.save({"codec": codec, "slot_codec": "log"}, saves=2)
        if codec in ("raw", "adaptive"):
            expected = run.restored(None)
            shutil.copytree(tmp_path, merged := tmp_path.with_name(codec + str(cut)))
            cnr.compact(merged, writer_is_dead=True)
            assert_same(run.restored(None, P("r"), merged), expected)
    expected = run.restored(None)
    done = cnr.compact(tmp_path, writer_is_dead=True)
    for cut in (P(None), P("r", "c")):
        assert_same(run.restored(None, cut), expected)
    item = tmp_path / done.merged_directory / "default"
    process = load_process((item / "manifest.p00000.json").read_bytes(), "here")
    assert {tile.layer for tile in process.tiles} > {0, 1}
    assert "merged" in read_manifest(item).required_features
    read = cnr.read_rows(tmp_path, "u", np.arange(ROWS))
    assert read.tobytes() == expected["['u']"].tobytes()


def test_a_root_is_listed_again_if_a_step_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, look, merged = Run(tmp_path), Ledger._look, list[int]()
    run.save({}, saves=4)
    expected = run.restored(3)

    def merging(self: Ledger, *told: Any) -> Any:
        if not merged:
            merged.append(3)
            cnr.compact(tmp_path, writer_is_dead=True)
        return look(self, *told)

    monkeypatch.setattr(Ledger, "_look", merging)
    assert_same(run.restored(None), expected)
    assert merged and not (tmp_path / "3").exists()


def test_a_run_that_goes_back_behind_merged_steps_again_and_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.save({}, saves=6)
    for step in (4, 5):
        cnr.compact(tmp_path, step=step, writer_is_dead=True)
    options = cnr.Options(tracking="fingerprint", policy=cnr.Consecutive(), codec="raw")
    truths = {}
    with cnr.CheckpointManager(tmp_path, tables=run.tables, options=options) as manager:
        for saved in ((4, 5), (4, 5, 6)):
            manager.restore(3, args=cnr.args.Restore(run.state()))
            for step in saved:
                run.train()
                manager.save(step, args=cnr.args.Save(run.state()))
                manager.wait_until_finished()
                truths[step] = run.restored(step)
    with cnr.CheckpointManager(tmp_path) as reader:
        assert reader.all_steps() == [0, 1, 2, 3, 4, 5, 6]
    for step, truth in truths.items():
        assert_same(run.restored(step), truth)


def test_a_merged_step_stands_for_one_that_is_there_without_its_chain(
    tmp_path: Path,
) -> None:
    """So it is if a merge is killed before it removes the step, and retention what that needs."""
    root = tmp_path / "root"
    run = Run(root)
    run.save({}, saves=5)
    expected = run.restored(4)
    shutil.copytree(root / "3", tmp_path / "3")
    cnr.compact(root, step=3, writer_is_dead=True)
    shutil.copytree(tmp_path / "3", root / "3")
    for step in (4, None):
        assert_same(run.restored(step), expected)
    shutil.rmtree(root / "2")
    for step in (4, None):
        assert_same(run.restored(step), expected)
    read = cnr.read_rows(root, "u", np.arange(ROWS), step=4)
    assert read.tobytes() == expected["['u']"].tobytes()


def test_a_run_that_goes_back_before_a_merged_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save({}, saves=4)
    kept = run.restored(1)
    cnr.compact(tmp_path, writer_is_dead=True)
    run.save({})
    options = cnr.Options(tracking="fingerprint", policy=cnr.Consecutive())
    with cnr.CheckpointManager(tmp_path, tables=run.tables, options=options) as manager:
        manager.restore(1, args=cnr.args.Restore(run.state()))
        for run.step in (2, 3, 4):
            run.train()
            manager.save(run.step, args=cnr.args.Save(run.state()))
            manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 2, 3, 4]
    truth = run.restored(4)
    assert_same(run.restored(1), kept)
    cnr.compact(tmp_path, writer_is_dead=True)
    assert_same(run.restored(None), truth)
    assert all(not each.consequence for each in cnr.verify(tmp_path))


def test_retention_and_prune_take_a_merged_step_for_one_that_stands_alone(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.save({}, saves=4)
    cnr.compact(tmp_path, step=2, writer_is_dead=True)
    expected = run.restored(3)
    going = cnr.prune(tmp_path, keep=1).going
    assert [fate.step for fate in going] == [0, 1]
    cnr.prune(tmp_path, keep=1, delete=True, writer_is_dead=True)
    assert kinds(tmp_path) == {"2.g1.branch": "full", "3": "delta"}
    assert_same(run.restored(None), expected)
    latest = {"preservation_policy": ocp.checkpoint_managers.LatestN(1)}
    run.save(latest, saves=2)
    assert kinds(tmp_path) == {
        "2.g1.branch": "full",
        "3": "delta",
        "4": "delta",
        "5": "delta",
    }
    cnr.compact(tmp_path, writer_is_dead=True)
    run.save(latest)
    assert kinds(tmp_path) == {"5.g1.branch": "full", "6": "delta"}


def test_a_step_that_is_merged_in_part_or_twice_is_none(tmp_path: Path) -> None:
    """Whatever moment a kill comes at, the step restores, and the next call merges it."""
    root, copies = tmp_path / "root", tmp_path / "copies"
    run = Run(root)
    run.save({"codec": "lattice"}, saves=3)
    expected = run.restored(None)
    seen = set[tuple[str, ...]]()

    def copy(call: Any) -> None:
        held = sorted(str(p.relative_to(root)) for p in root.rglob("*"))
        key = tuple(name for name in held if name.count("/") < 3)
        if key not in seen:
            seen.add(key)
            shutil.copytree(root, copies / str(call.number))

    with inprocess.watching(root, before=copy, alone=True):
        cnr.compact(root, writer_is_dead=True)
    found = sorted(copies.iterdir(), key=lambda path: int(path.name))
    assert len(found) > 5
    for number, each in enumerate(found):
        assert_same(run.restored(None, None, each), expected)
        if number % 3 == 0:
            cnr.compact(each, writer_is_dead=True)
            assert_same(run.restored(2, None, each), expected)
            # What is renamed to be removed the next save deletes.
            left = {n for n in os.listdir(each) if names.may_be_step(n)}
            assert left == {"0", "1", "2.g1.branch"}


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    """In what is merged nothing is written then; in what was, as in any step."""
    run = Run(tmp_path)
    run.cut = P(None, "c")
    run.save({"codec": "lattice"}, saves=2)
    run.cut = P("r")
    run.save({"codec": "lattice", "compression": "zstd"})
    expected, rng = run.restored(None), np.random.default_rng(0)
    read = {"array", "process_manifest", "manifest", "dense"}
    for file in damage.files_of(tmp_path):
        if file.kind not in read or file.path.name == "zarr.json":
            continue
        if file.kind == "dense" and file.step != 2:
            continue
        bit = int(rng.integers(file.path.stat().st_size * 8))
        with damage.flip_bit(file.path, bit):
            with pytest.raises(cnr.errors.CnrError):
                cnr.compact(tmp_path, step=2, writer_is_dead=True)
            assert "2.g1.branch" not in os.listdir(tmp_path)
    cnr.compact(tmp_path, writer_is_dead=True)
    for file in damage.files_of(tmp_path):
        if "branch" not in str(file.path) or file.path.name == "zarr.json":
            continue
        if file.kind not in read:
            continue
        bit = int(rng.integers(file.path.stat().st_size * 8))
        with damage.flip_bit(file.path, bit):
            with pytest.raises((cnr.errors.CnrError, ValueError)):
                run.restored(2)
    assert_same(run.restored(2), expected)


def test_a_root_in_a_bucket(bucket: epath.Path) -> None:
    """Where no folder is renamed, and a catalogue tells of steps."""
    root = bucket / "root"
    run = Run(root)
    options = {"codec": "lattice"}
    run.save(options, saves=5)
    chain = [run.restored(step) for step in range(5)]
    done = cnr.compact(root, step=2, writer_is_dead=True)
    assert done.merged_directory == "2.g1.branch"
    assert kinds(root) == {
        "0": "full",
        "1": "delta",
        "2.g1.branch": "full",
        "3": "delta",
        "4": "delta",
    }
    assert not is_directory(root / "2")
    for step in range(5):
        assert_same(run.restored(step), chain[step])
    assert cnr.verify(root, level="data") == ()
    # A run goes on from there, and without what was merged.
    run.save(options)
    last = run.restored(5)
    cnr.prune(root, keep=1, delete=True, writer_is_dead=True)
    assert kinds(root) == {
        "2.g1.branch": "full",
        "3": "delta",
        "4": "delta",
        "5": "delta",
    }
    assert_same(run.restored(None), last)
    cnr.compact(root, writer_is_dead=True)
    assert_same(run.restored(None), last)
    run.save(options)
    assert kinds(root)["6"] == "delta"


@pytest.mark.parametrize("step", [2, 3, None])
def test_a_step_that_is_merged_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    run, merges = Run(tmp_path), iter([2])
    run.save({"codec": "lattice"}, saves=4)
    expected = {each: run.restored(each) for each in (2, 3, None)}
    attempt = attempts._attempt

    def met(*args: Any) -> Any:
        for merged in merges:
            cnr.compact(tmp_path, step=merged, writer_is_dead=True)
        return attempt(*args)

    monkeypatch.setattr(attempts, "_attempt", met)
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as manager:
        for each in (step, 2, 3, None):
            found = manager.restore(each, args=cnr.args.Restore(run.state()))
            leaves, _ = jax.tree_util.tree_flatten_with_path(found.state)
            got = {jax.tree_util.keystr(k): np.asarray(x) for k, x in leaves}
            assert_same(got, expected[each])
        assert manager.all_steps() == [0, 1, 2, 3]
    assert kinds(tmp_path)["2.g1.branch"] == "full"


def test_a_rollback_behind_a_merged_step_in_a_bucket(bucket: epath.Path) -> None:
    """The name of the merged step is taken, though no save of that generation was."""
    run = Run(bucket / "root")
    run.save({}, saves=4)
    cnr.compact(run.root, step=2, writer_is_dead=True)
    options = cnr.Options(tracking="fingerprint", policy=cnr.Consecutive())
    with cnr.CheckpointManager(run.root, tables=run.tables, options=options) as manager:
        manager.restore(1, args=cnr.args.Restore(run.state()))
        run.step = 2
        run.train()
        manager.save(2, args=cnr.args.Save(run.state()))
    assert [*kinds(run.root)] == ["0", "1", "2.g2.branch"]
    assert run.restored(None)["['n']"] == 2
    assert not [each for each in cnr.verify(run.root) if each.consequence]


def test_a_kill_in_a_bucket(bucket: epath.Path, proxy: Proxy) -> None:
    """Whatever request is the first that changes nothing any more, all steps restore."""
    run = Run(bucket / "root")
    run.save({"codec": "lattice"}, saves=4)
    chain = [run.restored(step) for step in range(4)]
    left, kills, replaced = 0, 0, set[tuple[str, ...]]()

    def harm(kind: str, path: str, number: int) -> int | None:
        nonlocal left
        left -= kind in ("PUT", "DELETE")
        return 403 if kind in ("PUT", "DELETE") and left < 0 else None

    while (plan := cnr.plan_compaction(run.root, step=2)).step or plan.replaced:
        replaced.add(plan.replaced)
        left, proxy.harm = kills, harm
        with contextlib.suppress(cnr.errors.CnrError):
            plan.execute(writer_is_dead=True)
        proxy.harm = lambda *_: None
        kills += 5
        for step in (2, 3):
            assert_same(run.restored(step), chain[step])
    assert kills > 20 and replaced == {(), ("2",)}
    run.save({"codec": "lattice"})
    assert kinds(bucket / "root")["4"] == "delta"
    assert not is_directory(bucket / "root" / "2")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("refused", ["/manifest.json", "zarr.json"])
def test_a_removal_in_a_bucket_that_is_cut_short(
    s3: str,
    make_bucket: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
) -> None:
    """Where each file is removed by a request of its own: what rests on the step restores."""
    make_bucket(name := f"bucket-{secrets.token_hex(8)}")
    with contextlib.closing(GoogleProxy(s3)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        run = Run(root := epath.Path(f"gs://{name}/root"))
        run.save({"codec": "lattice"}, saves=3)
        chain = [run.restored(step) for step in range(3)]

        proxy.harm = lambda kind, path, number: (
            403 if kind == "DELETE" and unquote(path).endswith(refused) else None
        )
        cnr.compact(root, step=1, writer_is_dead=True)
        assert proxy.harmed and is_directory(root / "1")
        proxy.harm = lambda *_: None
        for step in (1, 2):
            assert_same(run.restored(step), chain[step])
        run.save({"codec": "lattice"})
        assert kinds(root)["3"] == "delta"
        assert not is_directory(root / "1")
        for step in (1, 2):
            assert_same(run.restored(step), chain[step])


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(cnr.errors.OptionError, match="is no root"):
        cnr.plan_compaction(tmp_path)
    run.save({}, saves=3)
    with pytest.raises(cnr.errors.NoStepError, match="step 7 does not exist"):
        cnr.plan_compaction(tmp_path, step=7)
    assert str(cnr.plan_compaction(tmp_path, step=0)).startswith("nothing to merge")
    with pytest.raises(cnr.errors.WriterError, match="nothing was merged"):
        cnr.compact(tmp_path)
    plan = cnr.plan_compaction(tmp_path)
    shutil.rmtree(tmp_path / "2")
    with pytest.raises(cnr.errors.NoStepError, match=r"not in .* any more"):
        plan.execute(writer_is_dead=True)
    shutil.rmtree(tmp_path / "0")
    with pytest.raises(cnr.errors.ChainError, match="its parent 0 is missing"):
        cnr.plan_compaction(tmp_path, step=1)


def test_rows_are_added_in_one_encoding_along_a_chain(tmp_path: Path) -> None:
    """A delta holds all rows of a tile, in another codec or on another mesh than those before."""
    run, options = Run(tmp_path, 38), {"rounding": "nearest", "bits": 2}
    for codec, cut, saves in (
        ("adaptive", P(None), 1),
        ("lattice", P(None), 2),
        ("lattice", P("r", "c"), 3),
    ):
        run.cut = cut
        run.save({"codec": codec, **options}, saves=saves)
    expected = {step: run.restored(step) for step in range(6)}
    for merged in (5, 1):
        cnr.compact(tmp_path, step=merged, writer_is_dead=True)
        for step in range(6):
            assert_same(run.restored(step, P(None, "c")), expected[step])
    assert cnr.verify(tmp_path, level="data") == ()


@pytest.mark.parametrize("examples", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_random_chains(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    """Codecs, widths and meshes change along a chain, of which some steps are merged already."""
    quiet = [*HealthCheck]

    @settings(max_examples=examples, deadline=None, suppress_health_check=quiet)
    @given(data=st.data())
    def tried(data: Any) -> None:
        _random_chain(tmp_path_factory, data)

    tried()


def _random_chain(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    root = tmp_path_factory.mktemp("root")
    run = Run(root, data.draw(st.integers(0, 99)))
    rounding = st.sampled_from(["nearest", "dithered"])
    for _ in range(data.draw(st.integers(2, 4))):
        run.cut = data.draw(st.sampled_from(CUTS))
        codec = data.draw(st.sampled_from(CODECS))
        options: dict[str, Any] = {"codec": codec, "rounding": data.draw(rounding)}
        if codec not in ("raw", "bfloat16"):
            widths = [2, 4] if codec == "kmeans" else [2, 3, 4, 8]
            options["bits"] = data.draw(st.sampled_from(widths))
        slots = ["raw", "log", "moments", "bfloat16"]
        options["slot_codec"] = data.draw(st.sampled_from(slots))
        options["compression"] = data.draw(st.sampled_from([None, "zstd"]))
        run.save(options, saves=data.draw(st.integers(1, 3)))
        if data.draw(st.booleans()):
            expected = run.restored(None)
            cnr.compact(root, writer_is_dead=True)
            assert_same(run.restored(None), expected)
    steps = [each.step for each in cnr.describe(root).steps]
    expected = {step: run.restored(step) for step in steps}
    merged = data.draw(st.sampled_from(steps))
    cnr.compact(root, step=merged, writer_is_dead=True)
    cut = data.draw(st.sampled_from(CUTS))
    for step in steps:
        assert_same(run.restored(step, cut), expected[step])
    assert cnr.verify(root, level="data") == ()
