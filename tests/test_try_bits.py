"""Widths of codes tried by the caller's metric: the rows of a restore, paired losses, verdicts."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.checkpointer.trying.restored import restored, row_bytes
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.codecs.dither import Dither

from .conftest import each_of

ROWS, DIM = 96, 16
# Quick to compile; what codecs do is not the question here.
QUICK = cnr.Options(codec="asymmetric")
# Rows of the table that a codec does not hold.
ESCAPED = {3: np.nan, 40: 7.0}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture
def state() -> dict[str, Any]:
    rows = jnp.asarray(normal(0, ROWS, DIM))
    return {"user": rows, "w": jnp.ones(3), "step": 3, "key": jax.random.key(0)}


@pytest.fixture
def tables(state: Any) -> cnr.Tables:
    return cnr.find_tables(state, ["user"])


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(codec: Any, rows: jax.Array) -> jax.Array:
    """Rows as a restore brings them."""
    return codec.decode(codec.encode(rows).parts, dim=DIM, dtype=jnp.float32)


def distance(state: Any, user: jax.Array) -> jax.Array:
    return jnp.abs(state["user"] - user).mean()


# ---- what is tried is what a restore brings ---------------------------------------------------


def sharded_state() -> tuple[dict[str, Any], dict[str, cnr.TableSpec]]:
    """Tables with rows and columns cut, padded, out of order, replicated, and narrow floats."""
    mesh = jax.make_mesh((2, 2), ("rows", "cols"), (AxisType.Auto,) * 2)

    def put(values: Any, *spec: Any) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    user = normal(1, ROWS, 4, 6)
    for row, value in ESCAPED.items():
        user[row] = value
    layout = cnr.ModSharded(shards=4, rows_per_shard=ROWS // 4)
    specs = {
        "user": cnr.TableSpec(rows=ROWS - 10, layout=layout),
        "item": cnr.TableSpec(),
        "kind": cnr.TableSpec(),
    }
    params = {
        "user": put(user, "rows", None, "cols"),
        "item": put(jnp.asarray(normal(3, 64, DIM), jnp.bfloat16), ("rows", "cols")),
        "kind": put(normal(4, 40, DIM), None, "cols"),
    }
    nu = put(np.square(normal(2, ROWS, 4, 6)), "rows")
    return {"params": params, "opt_state": {"nu": {"user": nu}}, "step": 7}, specs


@each_of("rounding", ["auto", "dithered"])
def test_what_is_tried_is_what_a_restore_brings(
    rounding: Any, tmp_path: Path, tiny_limits: Callable[..., None]
) -> None:
    # So that tables are of several chunks, of which the last is not full.
    tiny_limits(gathered_chunk_bytes=1 << 9, gathered_small_rows=8)
    state, specs = sharded_state()
    tables = cnr.find_tables(state, specs)
    own = {"kind": cnr.TableOptions(codec="asymmetric", bits=8)}
    options = cnr.Options(
        codec="asymmetric",
        bits=2,
        rounding=rounding,
        slot_codec="auto",
        tables=own,
    )
    root = tmp_path / rounding
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        report = manager.last_report
        assert report is not None
        want = manager.restore(0, args=cnr.args.Restore(state)).state
    if rounding == "dithered":  # by a seed of its own: as of that lineage
        dither = Dither(read_manifest(root / "0" / "default").lineage, most_bits=8)
        tried, leaves = restored(state, tables, options.encoding, dither)
        off = row_bytes(leaves).off
        mean, worst = off.errors / off.rows, off.worst
    else:
        seen: list[Any] = []

        def evaluate(given: Any) -> float:
            seen.append(given)
            return 0.0

        quick = dataclasses.replace(QUICK, slot_codec="auto", tables=own)
        found = cnr.try_bits(
            state,
            tables,
            evaluate,
            better="lower",
            bits=[2],
            options=quick,
        )
        exact, tried = seen
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, exact, state)))
        (width,) = found.widths
        mean, worst = width.mean_row_error, width.worst_row_error
        # What is stored of rows, and nothing else.
        of_leaves = [table.leaves for table in report.tables]
        assert width.table_bytes == sum(each[0].bytes for each in of_leaves)
        assert width.slot_bytes == sum(x.bytes for each in of_leaves for x in each[1:])
        assert found.state_bytes == report.state_bytes
    jax.tree.map(np.testing.assert_array_equal, tried, want)
    for part in ("params", "opt_state"):
        same = jax.tree.map(
            lambda a, b: a.sharding == b.sharding, tried[part], state[part]
        )
        assert all(jax.tree.leaves(same))
    assert mean == pytest.approx(report.mean_row_error, rel=1e-4)
    assert worst == pytest.approx(report.worst_row_error, rel=1e-4)


# ---- losses -----------------------------------------------------------------------------------


def test_losses_are_differences_in_the_direction_that_is_worse(
    state: Any, tables: cnr.Tables
) -> None:
    weights = jnp.asarray(normal(9, ROWS, DIM))
    linear = jax.jit(lambda state: (state["user"] * weights).sum())
    codec = dataclasses.replace(QUICK, bits=2).codec_for(
        "user", "table", DIM, np.float32
    )
    read = there_and_back(codec, state["user"])
    change = float(((read - state["user"]) * weights).sum())
    assert abs(change) > 0.1
    ways: list[tuple[Any, int]] = [("higher", -1), ("lower", 1)]
    for better, sign in ways:
        found = cnr.try_bits(
            state, tables, linear, better=better, bits=[2, "raw"], options=QUICK
        )
        two, raw = found.widths
        loss = two.losses["metric"]
        assert loss.mean == pytest.approx(sign * change, rel=1e-3)
        assert loss.margin == 0 and len(loss.values) == 1
        assert two.metrics["metric"] - found.metrics["metric"] == sign * loss.mean
        assert raw.losses["metric"].values == (0.0,)
        assert raw.mean_row_error is None and raw.worst_row_error is None
        assert two.verdict == ("harmful" if sign * change > 0 else "harmless")
        # Accepted is the paper's mark, where nothing is said.
        assert loss.within == pytest.approx(1e-4 * abs(found.metrics["metric"]))


def test_the_narrowest_harmless_width_is_recommended(
    state: Any, tables: cnr.Tables
) -> None:
    user = state["user"]
    metrics: Any = {"far": "lower", "near": "higher"}

    def evaluate(state: Any) -> dict[str, Any]:
        off = distance(state, user)
        return {"near": 1 - float(off), "far": np.float32(off)}

    def tried(within: Any, bits: Any = (8, 2, 4)) -> cnr.TriedBits:
        return cnr.try_bits(
            state,
            tables,
            evaluate,
            better=metrics,
            within=within
            if isinstance(within, dict)
            else dict.fromkeys(metrics, within),
            bits=bits,
            options=QUICK,
        )

    losses = [each.losses["far"].mean for each in tried(1.0).widths]
    assert losses == sorted(losses, reverse=True) and losses[-1] > 0
    assert [each.bits for each in tried(1.0).widths] == [2, 4, 8]
    assert tried(1.0).recommended == 2
    assert tried(losses[1] * 1.1).recommended == 4
    # Both have to be met.
    both = {"far": losses[0] * 1.1, "near": losses[1] * 1.1}
    found = tried(both)
    assert found.recommended == 4 and found.within == both
    none = tried(losses[2] / 2)
    assert none.recommended is None
    assert "no width recommended" in none.sentence
    assert str(none).splitlines()[-1] == none.sentence
    assert tried(losses[2] / 2, ["raw", 8]).recommended == "raw"
    assert "4 bits recommended" in found.sentence
    assert "nothing was random, no training" in found.sentence
    document = json.loads(json.dumps(found.asdict(), allow_nan=False))
    assert document["recommended"] == 4 and document["sentence"] == found.sentence
    assert document["widths"][1]["losses"]["far"]["verdict"] == "harmless"
    assert document["widths"][1]["full_bytes"] == found.full_bytes(4)
    # The bytes of the dense leaves are those of the arrays in memory.
    assert found.full_bytes(4) - found.widths[1].table_bytes == found.dense_bytes
    with pytest.raises(KeyError):
        found.full_bytes(3)


@each_of(
    ("values", "within", "verdict"),
    [
        ((0.01, 0.011, 0.009), 0.02, "harmless"),
        # More certain than it needs to be, and a gain.
        ((-1.0, -3.0, -2.0), 0.5, "harmless"),
        # Nothing was random enough to tell.
        ((0.0, 0.2, -0.19), 0.01, "open"),
        ((0.3, 0.0, 0.2), 0.01, "open"),
        ((0.3, 0.31, 0.29), 0.01, "harmful"),
        ((0.3,), 1.0, "open"),
        # Seeds that tell nothing of the spread.
        ((0.3, 0.3, 0.3), 1.0, "open"),
        ((0.3, 0.3, 0.3), 0.1, "open"),
    ],
)
def test_a_loss_is_judged_by_its_interval(
    values: Any, within: float, verdict: str
) -> None:
    loss = cnr.Loss(values, within, random=True)
    assert loss.verdict == verdict
    if len(set(values)) == 1:
        assert loss.margin is None and str(loss) == "0.3 ± ?"
        return
    low, high = stats.t.interval(
        0.95, len(values) - 1, np.mean(values), stats.sem(values)
    )
    assert loss.mean == pytest.approx(np.mean(values))
    assert loss.margin == pytest.approx((high - low) / 2)


def test_what_makes_figures_doubtful_is_said(state: Any, tables: cnr.Tables) -> None:
    def tried(state: Any, better: Any) -> str:
        rows = state["user"]
        far = lambda state: distance(state, rows)  # noqa: E731
        ask = {"better": better, "within": 1e-6, "options": QUICK, "bits": [2, 3, 8]}
        return cnr.try_bits(state, tables, far, **ask).sentence

    assert "better=" not in tried(state, "lower")
    said = tried(state, "higher")
    assert "every width gains in metric: is better= the right way round?" in said
    assert "codes of" not in said
    # As a restore of three bits brings them.
    codec = dataclasses.replace(QUICK, bits=3).codec_for(
        "user", "table", DIM, np.float32
    )
    read = there_and_back(codec, state["user"])
    said = tried({**state, "user": read}, "lower")
    assert "rows lie on codes of 3 bits, as a restore brought them" in said


def test_a_width_that_is_harmless_by_chance_is_not_recommended(
    state: Any, tables: cnr.Tables
) -> None:
    # Of the state as it is, then of 2, 4, 8 bits and raw.
    figures = iter([1.0, 1.1, 1.0, 0.5, 1.0])
    found = cnr.try_bits(
        state,
        tables,
        lambda state: next(figures),
        better="higher",
        bits=[2, 4, 8, "raw"],
        options=QUICK,
    )
    verdicts = [each.verdict for each in found.widths]
    assert verdicts == ["harmless", "harmless", "harmful", "harmless"]
    assert found.recommended == "raw"


# ---- training after the restore ---------------------------------------------------------------


def test_training_is_paired_by_seed_and_leaves_the_state_alone(
    state: Any, tables: cnr.Tables
) -> None:
    before = jax.tree.map(np.asarray, {**state, "key": 0})
    calls: list[tuple[int, int]] = []

    def noise(seed: Any) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (ROWS, DIM))

    def step(state: Any, seed: Any) -> Any:
        user = state["user"] + noise(seed)
        return {**state, "user": user, "w": state["w"] * 2, "step": state["step"] + 1}

    donating = jax.jit(step, donate_argnums=0)

    def train(state: Any, seed: int) -> Any:
        calls.append((int(state["step"]), seed))
        return donating(state, seed)

    def evaluate(state: Any) -> dict[str, Any]:
        # Which the noise moves by thousands, and the rounding by as much at each seed.
        return {"sum": state["user"].sum(), "w": state["w"].sum()}

    found = cnr.try_bits(
        state,
        tables,
        evaluate,
        better={"sum": "higher", "w": "higher"},
        within={"sum": 1.0, "w": 1.0},
        bits=[2, "raw"],
        seeds=4,
        options=QUICK,
        train=train,
        restores=2,
    )
    # Of the state as it is, then of each width: each seed anew, from the same step.
    assert calls == [(n, seed) for _ in range(3) for seed in range(4) for n in (3, 4)]
    assert found.seeds == 4 and found.restores == 2 and found.trained and found.random
    two, raw = found.widths
    assert raw.losses["sum"].values == (0.0,) * 4 == two.losses["w"].values
    assert found.metrics["w"] == 12
    assert len(set(two.losses["sum"].values)) == 4
    assert "on 4 seeds, trained on after each of 2 restores" in found.sentence
    # Nothing of it was donated, nor changed.
    after = jax.tree.map(np.asarray, {**state, "key": 0})
    jax.tree.map(np.testing.assert_array_equal, after, before)
    donating(state, 0)


def test_what_functions_assign_to_is_not_of_the_state(
    state: Any, tables: cnr.Tables
) -> None:
    state["count"] = np.zeros(3)
    leaves = dict(state)

    def evaluate(state: Any) -> dict[str, float]:
        found = {"count": state["count"].sum(), "step": state["step"]}
        state["count"] += 1
        state["step"] = -1
        state["user"] = None
        return found

    def train(state: Any, seed: int) -> Any:
        state["count"] += 1
        state["step"] += 1
        return state

    ways: list[tuple[Any, dict[str, float]]] = [
        ({}, {"count": 0, "step": 3}),
        ({"train": train, "restores": 2}, {"count": 6, "step": 5}),
    ]
    for given, want in ways:
        better = dict.fromkeys(want, "higher")
        asked = {**GOOD, "better": better, "seeds": 2, "bits": [2, "raw"], **given}
        found = cnr.try_bits(state, tables, evaluate, **asked)
        assert found.metrics == want
        assert all(each.metrics == want for each in found.widths)
        assert not state["count"].any()
        assert all(state[name] is leaf for name, leaf in leaves.items())


def test_restores_in_turn_show_what_one_restore_does_not(
    state: Any, tables: cnr.Tables
) -> None:
    # A tenth of a step of 4 bits: rounding to nearest puts each of them back.
    step = 0.1 * float(np.ptp(np.asarray(state["user"]), axis=1).mean()) / 15

    @jax.jit
    def train(state: Any, seed: Any) -> Any:
        return {**state, "user": state["user"] + step * (1 + 0.01 * seed)}

    def tried(rounding: Any, restores: int) -> cnr.TriedBits:
        return cnr.try_bits(
            state,
            tables,
            lambda state: state["user"].mean(),
            better="higher",
            within=step,
            bits=[4, 8],
            options=cnr.Options(codec="symmetric", rounding=rounding),
            train=train,
            restores=restores,
        )

    assert tried("nearest", 1).recommended == 4
    often = tried("nearest", 8)
    assert [each.verdict for each in often.widths] == ["harmful", "harmless"]
    # Of eight steps little more than the last is left; dithered, nearly all are.
    assert often.widths[0].losses["metric"].mean > 5 * step
    for rounding in ("auto", "dithered"):
        loss = tried(rounding, 8).widths[0].losses["metric"]
        assert len(set(loss.values)) == 3 and loss.mean < 2 * step


def test_dither_is_tried_with_several_seeds(state: Any, tables: cnr.Tables) -> None:
    found = cnr.try_bits(
        state,
        tables,
        lambda state: state["user"].mean(),
        better="higher",
        bits=[2, "raw"],
        seeds=4,
        options=dataclasses.replace(QUICK, rounding="dithered"),
    )
    two, raw = found.widths
    assert len(set(two.losses["metric"].values)) == 4 and two.losses["metric"].random
    assert raw.losses["metric"].values == (0.0,) * 4
    assert "on 4 seeds, no training after the restore was tried" in found.sentence


def test_seeds_that_tell_too_little_leave_a_width_open(
    state: Any, tables: cnr.Tables
) -> None:
    @jax.jit
    def train(state: Any, seed: Any) -> Any:
        # Rounded or not, it goes some way that depends on the seed.
        by = jax.random.normal(jax.random.key(seed), (ROWS, 1))
        return {**state, "user": state["user"] + by * jnp.sign(state["user"] - 0.3)}

    found = cnr.try_bits(
        state,
        tables,
        lambda state: state["user"].sum(),
        better="higher",
        within=0.05,
        bits=[2, "raw"],
        options=QUICK,
        train=train,
    )
    two, raw = found.widths
    assert (two.verdict, raw.verdict) == ("open", "harmless")
    assert found.recommended == "raw"
    assert found.sentence.endswith("more seeds would tell of 2 bits")


def test_seeds_that_change_nothing_are_no_evidence(
    state: Any, tables: cnr.Tables
) -> None:
    def tried(train: Any) -> cnr.TriedBits:
        ask = {"better": "lower", "within": 1e3, "options": QUICK, "bits": [2, "raw"]}
        rows = state["user"]
        far = lambda state: distance(state, rows)  # noqa: E731
        return cnr.try_bits(state, tables, far, train=train, **ask)

    found = tried(lambda state, seed: {**state, "user": state["user"] * 2})
    two, raw = found.widths
    assert two.losses["metric"].margin is None and two.verdict == "open"
    # What is stored exactly loses nothing with any seed.
    assert raw.losses["metric"].margin == 0 and raw.verdict == "harmless"
    assert found.recommended == "raw"
    assert "all seeds gave the same loss with 2 bits, so its spread" in found.sentence
    assert "more seeds would tell" not in found.sentence
    assert found.asdict()["widths"][0]["losses"]["metric"]["margin"] is None
    assert "± ?" in str(found)
    found = tried(lambda state, seed: {**state, "user": state["user"] * (2 + seed)})
    assert found.recommended == 2 and "all seeds" not in found.sentence
    # Noise of its own, whatever is restored.
    noise = np.random.default_rng(0)
    found = tried(lambda state, seed: {**state, "user": state["user"] + noise.normal()})
    loss = found.widths[1].losses["metric"]
    assert loss.random and loss.margin is not None and loss.margin > 0


# ---- options, and what is refused -------------------------------------------------------------


def test_what_options_give_for_one_table_is_its_own_at_every_width() -> None:
    state = {name: jnp.asarray(normal(i, 50, DIM)) for i, name in enumerate("abcd")}
    tables = cnr.find_tables(state, list("abcd"))
    options = cnr.Options(
        codec="asymmetric",
        bits="auto",
        expected_restores=3,
        tables={
            "a": cnr.TableOptions(codec="raw"),
            "b": cnr.TableOptions(bits=8),
            "c": cnr.TableOptions(bits="auto"),
        },
    )

    def evaluate(given: Any) -> dict[str, float]:
        return {n: len(np.unique(np.asarray(given[n])[0])) for n in "abcd"}

    ways: dict[str, Any] = dict.fromkeys("abcd", "higher")
    found = cnr.try_bits(
        state, tables, evaluate, better=ways, bits=[2, 4, "raw"], options=options
    )
    levels = {each.bits: each.metrics for each in found.widths}
    for bits, d in ((2, 4), (4, DIM), ("raw", DIM)):
        assert (levels[bits]["a"], levels[bits]["b"]) == (DIM, DIM)
        assert levels[bits]["c"] <= 8
        assert levels[bits]["d"] <= d
    assert levels["raw"]["d"] == DIM
    sizes = [each.table_bytes for each in found.widths]
    # Of table d alone.
    assert sizes[1] - sizes[0] == 50 * DIM * 2 // 8
    assert sizes[2] - sizes[1] == 50 * (DIM * 28 // 8 - 4)


GOOD: Mapping[str, Any] = {"better": "higher", "options": QUICK, "bits": [4]}


@each_of(
    ("given", "said"),
    [
        ({"bits": "raw"}, "expected some of 2, 3, 4, 8, 'raw'"),
        ({"bits": [5]}, "bits is [5]"),
        ({"bits": []}, "expected some of"),
        ({"bits": 4}, "bits=(4, 8, 'raw')"),
        ({"bits": ["auto"]}, "expected some of"),
        ({"better": "more"}, "expected 'higher' or 'lower'"),
        ({"better": {"auc": True}}, "one of these for each metric"),
        ({"better": {"auc": "higher"}}, "expected ['metric']"),
        ({"within": {"auc": 0.1}}, "within is given for other metrics"),
        (
            {"evaluate": lambda state: {"auc": 1.0, "loss": 2.0}},
            "hint: such as better={'auc': 'higher', 'loss': 'higher'}",
        ),
        (
            {"options": cnr.Options(codec="kmeans"), "bits": [8]},
            "bits=8 cannot be tried",
        ),
        ({"within": -1}, "within is -1"),
        ({"within": math.nan}, "within is nan"),
        ({"within": "0.1"}, "expected a finite number"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": 2.0}, "expected an integer of 1 or more"),
        ({"restores": 0}, "restores is 0"),
        ({"restores": 3}, "no effect without train"),
        ({"evaluate": 3}, "hint: evaluate=lambda state: ..."),
        ({"train": 3}, "hint: train=lambda state, seed: ..."),
        ({"tables": ["user"]}, "what find_tables returns"),
        ({"options": 4}, "expected cnr_jax.Options"),
        (
            {"options": cnr.Options(tables={"x": cnr.TableOptions(bits=4)})},
            "unknown tables: x",
        ),
        ({"options": cnr.Options(codec="raw")}, "codec 'raw' has no bits"),
        (
            {"options": cnr.Options(tables={"user": cnr.TableOptions(bits=4)})},
            "bits=4 has no effect: no table would be stored otherwise",
        ),
        ({"evaluate": lambda state: None}, "no number for 'metric' of the state as"),
        ({"evaluate": lambda state: "0.3"}, "got str"),
        ({"evaluate": lambda state: True}, "got bool"),
        ({"evaluate": lambda state: state["w"]}, "got ArrayImpl float32[3]"),
        ({"evaluate": lambda state: jnp.array(True)}, "expected a number"),
        ({"evaluate": lambda state: {}}, "no metrics by name"),
        ({"evaluate": lambda state: {1: 2.0}}, "expected names"),
        (
            {"evaluate": lambda state: {"auc": math.nan}},
            "nan for 'auc' of the state as",
        ),
        ({"evaluate": lambda state: 1j}, "got complex"),
    ],
)
def test_what_cannot_work_is_refused(
    given: dict[str, Any], said: str, state: Any, tables: cnr.Tables
) -> None:
    calls: list[str] = []

    def evaluate(state: Any) -> float:
        calls.append("evaluate")
        return 0.0

    asked = {"tables": tables, "evaluate": evaluate, **GOOD, **given}
    tables, evaluate = asked.pop("tables"), asked.pop("evaluate")
    with pytest.raises(errors.OptionError) as caught:
        cnr.try_bits(state, tables, evaluate, **asked)
    assert said in str(caught.value)
    # Whatever can be known before is refused before anything is computed.
    knows = "other metrics" in said or "expected ['metric']" in said
    assert calls == ["evaluate"] * knows


def test_metrics_that_change_and_states_that_are_none_are_refused(
    state: Any, tables: cnr.Tables
) -> None:
    names = iter(["auc", "loss"])
    with pytest.raises(errors.OptionError, match="as 4 bits would restore it"):
        cnr.try_bits(state, tables, lambda _: {next(names): 1.0}, **GOOD)
    figures = iter([1.0, math.inf])
    with pytest.raises(errors.OptionError, match="inf for 'metric' of the state as 4"):
        cnr.try_bits(state, tables, lambda _: next(figures), **GOOD)

    def refused(given: Any, said: str, **more: Any) -> None:
        with pytest.raises(errors.StateMismatchError, match=said):
            cnr.try_bits(given, tables, lambda _: 1.0, **{**GOOD, **more})

    abstract = jax.eval_shape(lambda x: x, state)
    refused(abstract, "table of table 'user' is ShapeDtypeStruct")
    refused({**state, "user": state["user"][:3]}, "not the array it was found as")
    refused(state, "train returned another kind", train=lambda state, _: {"a": 1})
    refused(
        state,
        r"\n  \['step'\]: not in this state, was int$",
        train=lambda state, _: {k: v for k, v in state.items() if k != "step"},
    )
    refused(
        state, "the same leaves in a OrderedDict", train=lambda s, _: OrderedDict(s)
    )
    jax.jit(lambda _: refused(state | {"w": _}, "is a tracer"))(jnp.ones(3))
    gone = jnp.ones(3)
    gone.delete()
    refused({**state, "w": gone}, r"the state at \['w'\] was donated")

    def donating(state: Any) -> float:
        state["w"].delete()
        return 1.0

    with pytest.raises(errors.StateMismatchError, match="evaluate must not donate"):
        cnr.try_bits(state, tables, donating, **GOOD)


def test_tables_stay_in_the_memory_that_they_are_in() -> None:
    device = jax.devices()[0]
    mesh = jax.make_mesh((1,), ("rows",), (AxisType.Auto,))
    for kind in {memory.kind for memory in device.addressable_memories()}:
        sharding = NamedSharding(mesh, P("rows"), memory_kind=kind)
        state = {"user": jax.device_put(normal(0, ROWS, DIM), sharding)}
        tables = cnr.find_tables(state, ["user"])
        seen: list[str | None] = []

        def evaluate(state: Any, seen: list[str | None] = seen) -> float:
            seen.append(state["user"].sharding.memory_kind)
            return 1.0

        cnr.try_bits(state, tables, evaluate, **GOOD)
        assert seen == [kind, kind]
        seen.clear()
        train = {"train": lambda state, seed: state, "seeds": 1}
        cnr.try_bits(state, tables, evaluate, **GOOD, **train)
        assert seen == [kind, kind]
