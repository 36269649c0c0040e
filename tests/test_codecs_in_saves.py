"""Every codec through the manager: saved, restored, within its error; escaped rows exact."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax.rows.codecs import SharedCodebook

ROWS, DIM = 24, 8
# Root of the mean square of the errors of a table of normal rows, at 2 bits.
TABLE_CODECS = {
    "symmetric": 0.6,
    "greedy": 0.4,
    "kmeans": 0.35,
    "codebook": 0.5,
}
# Of each element, relative.
SLOT_CODECS = {"bfloat16": 2.0**-8, "log": 0.0014, "log8": 0.03}

pytestmark = pytest.mark.usefixtures("unsynced")


def make_state() -> dict:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    table[3], table[4, 1] = 0.5, np.nan
    squares = (rng.normal(size=(ROWS, DIM)) ** 2).astype(np.float32)
    squares[0], squares[1, 2], squares[5, 5] = 0, -1.0, np.inf
    accumulator = rng.exponential(size=ROWS).astype(np.float32)
    accumulator[2] = -3.0
    return {
        "params": {"user": jnp.asarray(table)},
        "opt": {
            "nu": {"user": jnp.asarray(squares)},
            "sum": {"user": jnp.asarray(accumulator)},
        },
    }


def restored(root: Path, state: dict, options: cnr.Options) -> dict:
    """What a save brings back, of which its report must have told the error."""
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, cnr.init_touched(state, tables)))
        manager.wait_until_finished()
        report = manager.last_report
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        back = manager.restore(0, args=cnr.args.Restore(state)).state
    rows, read = (np.asarray(s["params"]["user"], np.float64) for s in (state, back))
    off = np.linalg.norm(rows - read, axis=1) / np.linalg.norm(rows, axis=1)
    assert report is not None and report.sample_rows == ROWS
    # A row with NaN is stored as it is.
    assert report.mean_row_error == pytest.approx(np.nan_to_num(off).mean(), rel=1e-4)
    return back


def test_every_codec_of_tables_and_slots_is_restored_within_its_error(tmp_path) -> None:
    state = make_state()
    table = np.asarray(state["params"]["user"])
    slots = {k: np.asarray(v["user"]) for k, v in state["opt"].items()}
    pairs = zip(TABLE_CODECS, [*SLOT_CODECS, "log"], strict=True)
    for codec, slot_codec in pairs:
        options = cnr.Options(codec=codec, bits=2, slot_codec=slot_codec)
        back = restored(tmp_path / codec, state, options)
        got = np.asarray(back["params"]["user"])
        np.testing.assert_array_equal(got[4], table[4])
        np.testing.assert_allclose(got[3], table[3], rtol=0.01)
        ordinary = np.delete(np.arange(ROWS), [3, 4])
        error = (got - table)[ordinary]
        assert 0 < np.sqrt((error**2).mean()) < TABLE_CODECS[codec], codec
        for name, exact in slots.items():
            got = np.asarray(back["opt"][name]["user"])
            good = np.isfinite(exact) & (exact >= 0)
            allowed = SLOT_CODECS[slot_codec] * exact[good]
            assert (np.abs(got[good] - exact[good]) <= allowed).all(), slot_codec
            np.testing.assert_array_equal(got[~good], exact[~good])
        assert (got != exact).any() or slot_codec == "log8"


def test_levels_fitted_to_a_table_are_kept_in_its_manifests(tmp_path) -> None:
    state = make_state()
    table = np.asarray(state["params"]["user"])
    codec = SharedCodebook.fit(table, bits=3)
    back = restored(tmp_path, state, cnr.Options(codec=codec))
    ordinary = np.delete(np.arange(ROWS), [3, 4])
    error = (np.asarray(back["params"]["user"]) - table)[ordinary]
    assert 0 < np.sqrt((error**2).mean()) < 0.2
