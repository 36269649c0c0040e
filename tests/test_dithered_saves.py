"""Codes of a run that was restored are dithered: small motion survives, unmoved rows keep codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.checkpointer.saving import capture
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.codecs.dither import dither_seed, row_keys

ROWS, DIM = 400, 16


def make_state(across: tuple[int, int] = (1, 1), seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    mesh = jax.make_mesh(across, ("r", "c"), axis_types=(AxisType.Auto,) * 2)
    rows = rng.normal(0, 0.1, (ROWS, DIM)).astype(np.float32)
    slots = rng.uniform(0, 1, (ROWS, DIM)).astype(np.float32)
    where = NamedSharding(mesh, P("r", "c"))
    return {
        "user": jax.device_put(rows, where),
        "acc": {"user": jax.device_put(slots, where)},
    }


def opened(root: Path, state: Any, **options: Any) -> cnr.CheckpointManager:
    given = {"policy": cnr.Consecutive(), "tracking": "fingerprint"} | options
    tables = cnr.find_tables(state, ["user"])
    return cnr.CheckpointManager(root, tables=tables, options=cnr.Options(**given))


def save(manager: cnr.CheckpointManager, step: int, state: Any, **how: Any) -> None:
    manager.save(step, args=cnr.args.Save(state, **how))
    manager.wait_until_finished()


def restore(manager: cnr.CheckpointManager, state: Any, step: int | None = None) -> Any:
    return manager.restore(step, args=cnr.args.Restore(state)).state


def codes_in(root: Path, step: int) -> bytes:
    files = sorted((root / str(step)).glob("default/rows.p*/*.codes.*/c/*"))
    return b"".join(path.read_bytes() for path in files)


def moved_on(root: Path, times: int, **options: Any) -> np.ndarray:
    """Share of its way that each element has gone, of small steps with a restore after each."""
    state = make_state()
    first = np.asarray(state["user"])
    reach = first.max(1, keepdims=True) - first.min(1, keepdims=True)
    inner = (first > first.min(1, keepdims=True) + 0.2 * reach) & (
        first < first.max(1, keepdims=True) - 0.2 * reach
    )
    # A tenth of a step of 4 bits from restore to restore, in elements that no end bounds.
    signs = np.random.default_rng(1).choice([-1, 1], first.shape)
    by = np.where(inner, 0.1 * signs * reach / 15, 0).astype(np.float32)
    for step in range(times + 1):
        with opened(root, state, **options) as manager:
            if step:
                state = restore(manager, state)
                state["user"] = state["user"] + by
            save(manager, step, state)
    with opened(root, state, **options) as manager:
        last = np.asarray(restore(manager, state)["user"])
    return (last - first)[inner] / by[inner] / times


def test_motion_that_restores_undid_survives_them(tmp_path: Path) -> None:
    times = 8
    ways = {
        way: moved_on(tmp_path / way, times, rounding=way)
        for way in ("nearest", "auto", "dithered")
    }
    assert abs(ways["nearest"].mean()) < 0.1, "it is put back each time"
    for way in ("auto", "dithered"):
        assert abs(ways[way].mean() - 1) < 0.1, way


def test_a_run_takes_the_nearest_until_it_is_restored(tmp_path: Path) -> None:
    state = make_state()
    roots = {w: tmp_path / w for w in ("nearest", "auto", "dithered")}
    for way, root in roots.items():
        with opened(root, state, rounding=way) as manager:
            save(manager, 0, state)
            restored = restore(manager, state)
            again = restore(manager, state)
            assert np.array_equal(restored["user"], again["user"]), "of one step"
            save(manager, 1, {**state, "user": state["user"]}, full=True)
            save(manager, 2, state, full=True)
            assert codes_in(root, 1) == codes_in(root, 2), "nothing moved"
            restore(manager, state, 2)
            save(manager, 3, state, full=True)
        assert (codes_in(root, 1) == codes_in(root, 3)) == (way == "nearest")
        assert read_manifest(root / "3" / "default").restores == 2
    assert codes_in(roots["auto"], 0) == codes_in(roots["nearest"], 0)
    assert codes_in(roots["auto"], 0) != codes_in(roots["dithered"], 0)
    assert codes_in(roots["auto"], 1) != codes_in(roots["nearest"], 1)


@pytest.mark.parametrize("bits", [3, 8])
def test_a_run_whose_rows_move_far_between_restores_takes_the_nearest(
    tmp_path: Path, bits: int
) -> None:
    """From the second restore on: how far they moved before the first one says nothing."""
    # Rows reach over about 0.35, which is six of the first and a tenth of a step of 8 bits.
    far, little = 0.3, 1e-4
    state, step, found = make_state(), -1, []
    given: Any = {"bits": bits, "codec": "asymmetric"}
    with opened(tmp_path / "auto", state, **given) as manager:
        for moves in [(0, far), (far,), (little, far), (little, little), (far, little)]:
            if step >= 0:
                state = restore(manager, state)
            for by in moves:
                step += 1
                signs = np.random.default_rng(step).choice([-by, by], (ROWS, DIM))
                state["user"] = state["user"] + signs.astype(np.float32)
                save(manager, step, state, full=True)
                nearest = tmp_path / f"nearest{step}"
                with opened(nearest, state, **given, rounding="nearest") as other:
                    save(other, step, state)
                same = codes_in(tmp_path / "auto", step) == codes_in(nearest, step)
                found.append("nearest" if same else "dithered")
    assert found == [*["nearest"] * 2, "dithered", *["nearest"] * 4, *["dithered"] * 2]


@pytest.mark.parametrize("staging", ["host", "device"])
def test_a_row_has_in_a_delta_the_codes_of_a_full_save(
    tmp_path: Path, staging: str
) -> None:
    """Of one lineage: what is chosen beside it has no say, so a row that stays keeps its codes."""
    state = make_state()
    given = {"rounding": "dithered", "staging": staging, "codec": "asymmetric"}
    with opened(tmp_path, state, **given) as manager:
        save(manager, 0, state)
        state["user"] = state["user"].at[37:90:3].add(0.01)
        save(manager, 1, state)
        report = manager.last_report
        assert report is not None and (report.kind, report.rows) == ("delta", 18)
        save(manager, 2, state, full=True)
    rows = [cnr.read_rows(tmp_path, "user", np.arange(ROWS), step) for step in (1, 2)]
    assert np.array_equal(*rows)


def test_host_device_and_meshes_give_the_same_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one lineage: here all have one seed, which is drawn anew otherwise."""
    seed = capture.dither_seed
    asked = set()

    def one_lineage(lineage: str, *where: Any) -> Any:
        asked.add(lineage)
        return seed("1" * 32, *where)

    monkeypatch.setattr(capture, "dither_seed", one_lineage)
    ways = [(s, m) for s in ("host", "device") for m in ((1, 1), (2, 1))]
    found = {}
    for staging, across in ways:
        root, state = tmp_path / f"{staging}{across[0]}", make_state(across)
        given = {"staging": staging, "codec": "asymmetric", "rounding": "dithered"}
        with opened(root, state, **given) as manager:
            save(manager, 0, state)
            found[staging, across] = np.asarray(restore(manager, state)["user"])
    assert len(asked) == 4
    first = found["host", (1, 1)]
    assert all(np.array_equal(first, each) for each in found.values())
    nearest = make_state()
    with opened(tmp_path / "nearest", nearest, codec="asymmetric") as manager:
        save(manager, 0, nearest)
        assert (np.asarray(restore(manager, nearest)["user"]) != first).any()


def test_each_part_of_cut_columns_has_keys_of_its_own() -> None:
    """Else an error would come again and again along a row."""
    table, lineage = cnr.find_tables(make_state(), ["user"])["user"], "1" * 32
    for first in (0, 8):
        box, rows = ((4, ROWS), (first, first + 8)), np.arange(9)
        found = capture.keys_of(table, box, lineage)(rows)
        want = row_keys(dither_seed(lineage, "user", first), rows + 4)
        assert np.array_equal(found, want)


def test_padded_and_dealt_rows_have_the_keys_of_their_logical_ids(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows_of = []
    keys = capture.row_keys

    def noted(seed: Any, rows: np.ndarray) -> np.ndarray:
        rows_of.append(np.array(rows))
        return keys(seed, rows)

    monkeypatch.setattr(capture, "row_keys", noted)
    state = {"user": make_state((4, 1))["user"]}
    layout = cnr.TableSpec(
        rows=398, layout=cnr.ModSharded(shards=4, rows_per_shard=100)
    )
    tables = cnr.find_tables(state, {"user": layout})
    options = cnr.Options(rounding="dithered")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
    told = np.concatenate(rows_of)
    assert sorted(told) == list(range(400))
    table = tables["user"]
    physical = np.asarray(table.layout.to_physical(told))
    assert np.array_equal(physical, np.arange(400)), "shard by shard, as they lie there"


def test_rounding_is_inherited_and_checked(tmp_path: Path) -> None:
    with pytest.raises(cnr.errors.OptionError, match="rounding 'up' is not known"):
        cnr.Options(rounding="up")  # type: ignore[arg-type]
    state = make_state()
    with opened(tmp_path, state, rounding="dithered") as manager:
        save(manager, 0, state)
    with opened(tmp_path, state) as manager:
        restore(manager, state)
        save(manager, 1, {**state, "user": state["user"] + 1})
        assert manager.last_report is not None
        assert "rounding" in manager.last_report.inherited
    encoding = read_manifest(tmp_path / "1" / "default").encoding
    assert encoding is not None and encoding.rounding == "dithered"
    with opened(tmp_path, state, rounding="nearest") as manager:
        restore(manager, state)
        save(manager, 2, {**state, "user": state["user"] + 2})
    assert read_manifest(tmp_path / "2" / "default").encoding.rounding == "nearest"


def test_slots_take_the_nearest(tmp_path: Path) -> None:
    state, found = make_state(), {}
    for way in ("nearest", "dithered"):
        given = {"rounding": way, "slot_codec": "asymmetric"}
        with opened(tmp_path / way, state, **given) as manager:
            save(manager, 0, state)
            found[way] = restore(manager, state)
    slots = [np.asarray(state["acc"]["user"]) for state in found.values()]
    assert (
        np.array_equal(*slots)
        and (slots[0] != np.asarray(make_state()["acc"]["user"])).any()
    )
    assert not jnp.array_equal(found["nearest"]["user"], found["dithered"]["user"])
