"""Settings of codecs chosen on a sample: which one, on which rows, and that it is used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.checkpointer.tuning import Variant, cheapest, mean_error, variants
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.codecs import Asymmetric, Greedy, KMeans, Symmetric

from ..conftest import each_of

ROWS, DIM = 6000, 16
# Tunings of one width and dim share their programs, a second each to compile.
BITS = 3


def trained_like(rows: int, dim: int, seed: int = 0) -> np.ndarray:
    """Rows of different scales and tails."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, dim)) * np.exp(rng.normal(size=(rows, 1)))
    values[::3] += rng.standard_t(3, size=values[::3].shape)
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return trained_like(ROWS, DIM)


def tuned(
    array: Any, caplog: pytest.LogCaptureFixture, spec: Any = None
) -> tuple[cnr.Options, str]:
    """The options tuned for one table, and what was logged, errors included."""
    state = {"user": array}
    tables = cnr.find_tables(state, {"user": spec} if spec else ["user"])
    caplog.clear()
    with caplog.at_level(logging.INFO, "cnr_jax.checkpointer.tuning"):
        options = cnr.tune(state, tables, cnr.Options(bits=BITS))
    (record,) = caplog.records
    return options, record.getMessage()


@pytest.mark.slow
@each_of("codec", [Asymmetric(bits=2), KMeans(bits=2)])
@each_of("within", [0.0, 0.01, 0.1, 10.0])
def test_fewest_rounds_within_the_limit_are_chosen(codec: Any, within: float) -> None:
    rows = trained_like(512, 8)
    found = [v for v in variants(codec) if v.rounds in (0, 1, 3)]
    choice = cheapest(rows, found, within)
    errors = {v.rounds: mean_error(v.codec, rows) for v in found}
    limit = min(errors.values()) * (1 + within)
    assert choice.chosen.rounds == min(r for r, e in errors.items() if e <= limit)
    assert choice.chosen.error == errors[choice.chosen.rounds]
    assert choice.best_error == min(errors.values())


def test_error_counts_every_row_and_escaped_ones_as_exact() -> None:
    # More rows than are encoded at a time, and a rest.
    rows = trained_like(4500, 8)
    rows[7, 3], rows[4400, 0] = np.nan, np.inf
    codec = Asymmetric(bits=2, refits=0)
    finite = np.isfinite(rows).all(axis=1)
    levels = np.where(finite[:, None], rows, 0).astype(np.float64)
    low = levels.min(axis=1, keepdims=True)
    step = (levels.max(axis=1, keepdims=True) - low) / 3
    back = low + np.rint((levels - low) / np.where(step, step, 1)) * step
    want = np.linalg.norm(back - levels, axis=1).sum() / len(rows)
    assert mean_error(codec, rows) == pytest.approx(want, rel=0.01)


def test_of_equal_rounds_the_better_setting_is_taken() -> None:
    rows = trained_like(256, 8)
    coarse, fine = Greedy(bits=2, bins=2, ratio=0.5), Greedy(bits=2, bins=12, ratio=0.1)
    assert mean_error(coarse, rows) != mean_error(fine, rows)
    better = min((coarse, fine), key=lambda codec: mean_error(codec, rows))
    for order in ((coarse, fine), (fine, coarse)):
        found = [Variant(codec, 1) for codec in order]
        assert cheapest(rows, found, within=10.0).chosen.codec == better


def test_variants_keep_what_reading_needs() -> None:
    for codec in (Asymmetric(bits=3, metadata_bits=32), Greedy(bits=2), KMeans(bits=3)):
        found = variants(codec)
        assert len({v.codec for v in found}) == len(found) > 4
        assert all(
            v.codec.parts(16, np.float32) == codec.parts(16, np.float32) for v in found
        )
    greedy = [v for v in variants(Greedy(bits=2)) if isinstance(v.codec, Greedy)]
    assert all(v.rounds == int(v.codec.bins * v.codec.ratio + 1e-9) > 0 for v in greedy)
    assert not variants(Symmetric(bits=2))
    assert not variants(Asymmetric(refits=0)), "plain quantization is asked for"


# Each of the searches that it compares is compiled for all rows.
@pytest.mark.slow
def test_optimum_of_a_sample_is_that_of_all_rows_within_one_percent(
    values: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    options, said = tuned(jnp.asarray(values), caplog)
    assert "on 4,096 of 6,000 rows" in said
    chosen = options.tables["user"].codec
    assert isinstance(chosen, Asymmetric)
    assert chosen.bits == BITS
    errors = {v.codec: mean_error(v.codec, values) for v in variants(chosen)}
    assert errors[chosen] <= 1.01 * 1.01 * min(errors.values())
    # Not merely the longest search.
    assert chosen.refits < max(v.rounds for v in variants(chosen))


@pytest.mark.slow
def test_choice_is_the_same_for_every_sharding(
    values: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    found = [tuned(jnp.asarray(values), caplog)]
    for spec in (P("a"), P(None, "b"), P("a", "b"), P(("a", "b")), P()):
        placed = jax.device_put(values, NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            found.append(tuned(placed, caplog))
    assert all(each == found[0] for each in found)


@pytest.mark.slow
def test_only_logical_rows_are_sampled_where_their_layout_puts_them(
    values: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    layout = cnr.ModSharded(shards=4, rows_per_shard=2000)
    dealt = np.full((8000, DIM), 1e20, np.float32)
    dealt[:, 0] = 0
    dealt[layout.to_physical(np.arange(ROWS))] = values
    spec = cnr.TableSpec(rows=ROWS, layout=layout)
    assert tuned(jnp.asarray(dealt), caplog, spec) == tuned(jnp.asarray(values), caplog)


def test_tables_whose_codec_does_not_search_keep_theirs() -> None:
    state = {
        "user": jnp.asarray(trained_like(64, 16)),
        "plain": jnp.asarray(trained_like(64, 16)),
        "counts": jnp.zeros((64, 16), jnp.int32),
        "narrow": jnp.zeros((64, 1)),
    }
    tables = cnr.find_tables(state, list(state))
    own = {
        "user": cnr.TableOptions(bits=BITS, slot_codec="bfloat16"),
        "plain": cnr.TableOptions(codec="asymmetric"),
    }
    options = cnr.Options(bits=2, tables=own, slot_codec="log")
    got = cnr.tune(state, tables, options)
    assert got.tables.keys() == {"user", "plain"}
    assert got.tables["plain"] == own["plain"]
    user = got.tables["user"]
    assert isinstance(user.codec, Asymmetric)
    assert (user.codec.bits, user.slot_codec) == (BITS, "bfloat16")
    assert (got.bits, got.slot_codec, options.tables) == (2, "log", own)


def test_tables_whose_bits_follow_the_restores_keep_their_codec(
    values: np.ndarray,
) -> None:
    state = {"user": jnp.asarray(values), "item": jnp.asarray(values)}
    tables = cnr.find_tables(state, ["user", "item"])
    fixed = {"item": cnr.TableOptions(bits=BITS)}
    options = cnr.tune(state, tables, cnr.Options(bits="auto", tables=fixed))
    widths = {
        (name, options.codec_for(name, "table", DIM, np.float32, auto_bits=bits).bits)
        for name in tables
        for bits in (4, 8)
    }
    assert widths == {("user", 4), ("user", 8), ("item", BITS)}
    assert "user" not in options.tables
    assert isinstance(options.tables["item"].codec, Asymmetric)


def test_what_cannot_be_tuned_is_refused() -> None:
    state = {"user": jnp.ones((8, 16))}
    tables = cnr.find_tables(state, ["user"])
    with pytest.raises(cnr.errors.OptionError, match=r"within is -0\.1, expected 0 or"):
        cnr.tune(state, tables, within=-0.1)
    with pytest.raises(cnr.errors.OptionError, match="unknown tables: item"):
        cnr.tune(state, tables, cnr.Options(tables={"item": cnr.TableOptions()}))
    with pytest.raises(cnr.errors.StateMismatchError, match=r"expected a jax\.Array"):
        cnr.tune(jax.eval_shape(lambda: state), tables)
    with pytest.raises(cnr.errors.StateMismatchError, match="user"):
        cnr.tune({"item": jnp.ones((8, 16))}, tables)


def test_saves_use_and_store_what_was_chosen(tmp_path: Path) -> None:
    rows = trained_like(256, 16)
    state = {"user": jnp.asarray(rows), "step": 1}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.tune(state, tables, cnr.Options(bits=BITS), within=0.2)
    chosen = options.tables["user"].codec
    assert isinstance(chosen, Asymmetric)
    default = Asymmetric(bits=BITS).at_dim(16)
    assert chosen != default, "the default would prove nothing"
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(1, args=cnr.args.Save(state))
        manager.wait_until_finished()
        restored = manager.restore(1, args=cnr.args.Restore(state)).state
    assert read_manifest(tmp_path / "1" / "default").kind == "full"
    text = (tmp_path / "1" / "default" / "manifest.p00000.json").read_text()
    assert f'"refits":{chosen.refits}' in text
    encoded = jax.jit(chosen.encode)(state["user"])
    want = chosen.decode(encoded.parts, dim=16, dtype=np.float32)
    np.testing.assert_array_equal(restored["user"], want)
