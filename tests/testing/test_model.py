"""The model says what must be, and its comparison notices what is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.testing import damage, model, playing
from cnr_jax.testing.comparing import WrongError
from cnr_jax.testing.faults import Fault
from cnr_jax.testing.model import Model, Saved, differences
from cnr_jax.testing.setup import Setup

pytestmark = pytest.mark.tools

NOTHING: dict[str, np.ndarray] = {}


def saved(keeps: Any, *steps: tuple[int, int | None]) -> Model:
    made = Model(keeps)
    for step, parent in steps:
        made.saved(step, NOTHING, parent)
    return made


def test_retention_keeps_what_it_says_and_what_that_rests_on() -> None:
    made = saved(model.latest(1), (0, None), (1, 0), (2, 1), (3, None))
    assert set(made.steps) == {3}
    made = saved(model.latest(1), (0, None), (1, 0), (2, 1))
    assert set(made.steps) == {0, 1, 2}
    made = saved(model.multiples(2), (0, None), (1, 0), (2, 0), (3, 0))
    assert set(made.steps) == {0, 2}  # 3 itself was not kept
    either = model.any_of(model.latest(1), model.chosen({1}))
    assert set(saved(either, *[(i, None) for i in range(4)]).steps) == {1, 3}


def test_a_rollback_makes_a_later_branch_that_puts_steps_aside() -> None:
    made = saved(model.everything, (0, None), (1, 0), (2, 1), (3, 2))
    made.restored(1)
    assert made.legal_parents() == {0, 1}
    made.saved(2, NOTHING, 1)
    assert set(made.steps) == {0, 1, 2} and made.latest() == {2}
    made = saved(model.everything, (0, None), (5, 0))
    made.restored(0)
    made.saved(1, NOTHING, 0)
    assert set(made.steps) == {0, 1, 5} and made.latest() == {1}


def test_saves_in_flight_count_full_steps_that_retention_drops_meanwhile() -> None:
    def two(needed: tuple[int, ...]) -> Model:
        made = Model(model.chosen({2}), min_fulls=2)
        made.steps[8] = made.tip = Saved(8, NOTHING, None, 1)  # as a crash has left it
        made.run = made.owner = made.steps[8].run
        made.saved(9, NOTHING, None, needed=needed)
        return made

    made = two((9,))
    assert set(made.steps) == {9} and made.legal_parents() == {9}
    made.saved(10, NOTHING, 9)
    assert made.steps == {} and made.legal_parents() == set()
    assert two(()).legal_parents() == set()


def test_no_delta_may_rest_on_what_the_state_was_not_counted_from() -> None:
    made = saved(model.everything, (0, None), (1, 0))
    made.started_anew(recorded=True)
    with pytest.raises(errors.ChainError, match="rests on step 1"):
        made.saved(2, NOTHING, 1)
    with pytest.raises(errors.ChainError, match="rests on step 7"):
        made.saved(2, NOTHING, 7)
    with pytest.raises(errors.DependentsExistError):
        made.deleted(0)


@pytest.mark.parametrize(
    ("committed", "there", "right"),
    [
        (False, {0, 1}, True),
        (False, {1}, False),  # gone before anything replaced it
        (False, {0, 1, 2}, False),  # there, but not committed
        (True, {0, 1, 2}, True),  # deletion did not come to its end
        (True, {1, 2}, True),
        (True, {2}, False),
    ],
)
def test_after_an_interrupted_save_only_what_it_replaces_may_be_gone(
    committed: bool, there: set[int], right: bool
) -> None:
    made = saved(model.latest(2), (0, None), (1, None))
    arguments: Any = {"committed": committed, "parent": None, "there": there}
    if right:
        made.interrupted(2, NOTHING, **arguments)
        assert set(made.steps) == there
        assert made.leaving == ({0} & there if committed else set())
    else:
        with pytest.raises(errors.ChainError, match="interrupted save of step 2"):
            made.interrupted(2, NOTHING, **arguments)


def test_a_delta_may_be_dropped_as_soon_as_it_is_committed_by_what_is_killed_then() -> (
    None
):
    made = Model(model.multiples(3), 2)
    for step, parent in ((0, None), (1, None)):
        made.saved(step, NOTHING, parent)
    # Killed before its retention, so that step 4 stays for once; then after that of step 5.
    made.interrupted(4, NOTHING, committed=True, parent=1, there={0, 1, 4})
    made.reopened()
    for there in ({0}, {1, 4}):
        with pytest.raises(errors.ChainError, match="interrupted save of step 5"):
            made.interrupted(5, NOTHING, committed=False, parent=None, there=there)
    made.interrupted(5, NOTHING, committed=False, parent=None, there={0, 1})
    assert set(made.steps) == {0, 1}


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.complex128]
)
def test_every_bit_counts_in_a_comparison(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)
    other = array.copy()
    other.view(np.uint8)[1, -1] = 0x80
    assert differences({"a": array}, {"a": array}) == []
    (line,) = differences({"a": array}, {"a": other})
    assert line.startswith("a: 1 of 6 elements differ, first at (1, 2)")


def test_nans_are_equal_to_themselves_and_shapes_and_names_count() -> None:
    nan = np.array([np.nan], np.float32)
    assert model.same({"a": nan}, {"a": nan.copy()})
    got = differences({"a": nan, "b": nan}, {"a": nan.astype(np.float64), "c": nan})
    assert got == [
        "a: got (1,) float32, expected (1,) float64",
        "b: not expected",
        "c: only expected",
    ]


# ---- a player notices a checkpointer that lies --------------------------------------------


@pytest.fixture
def player(tmp_path: Any) -> Any:
    state = {"user": jnp.zeros((8, 2)), "step": jnp.int32(0)}

    def train(state: Any, touched: Any, seed: int) -> Any:
        touched = cnr.record(touched, {"user": jnp.array([seed % 8])})
        user = state["user"].at[seed % 8].add(1 + seed)
        return {"user": user, "step": state["step"] + 1}, touched

    setup = Setup(
        state=jax.device_put(state, jax.devices()[0]),
        tables=cnr.find_tables(state, ["user"]),
        train=train,
        options=cnr.Options(
            codec="raw",
            policy=cnr.Consecutive(),
            preservation_policy=ocp.checkpoint_managers.LatestN(2),
        ),
        keeps=model.latest(2),
    )
    with playing.Player(tmp_path / "root", setup) as player:
        for seed in range(3):
            player.train(seed)
            player.save()
        yield player


def test_a_wrong_value_is_noticed(player: Any) -> None:
    player.model.steps[1].values["['user']"][0, 0] += 1
    with pytest.raises(WrongError, match=r"step 1 restored other values.*\n.*user"):
        player.check_all()


def test_a_lost_step_is_noticed(player: Any) -> None:
    with damage.remove(player.root / "2"):
        with pytest.raises(WrongError, match=r"stored in .* are steps"):
            player.check_all()
    player.check_all()


def test_retention_that_keeps_too_much_or_too_little_is_noticed(player: Any) -> None:
    player.model.keeps = model.latest(1)
    player.model.steps[2] = dataclasses.replace(player.model.steps[2], parent=None)
    player.model._prune()
    with pytest.raises(WrongError, match="got steps"):
        player.check_listing()


def test_damage_that_goes_unseen_is_noticed(player: Any, monkeypatch: Any) -> None:
    files = damage.files_of(player.root)
    index = next(i for i, file in enumerate(files) if file.kind == "array")
    player.damaged(index, lambda path: damage.flip_bit(path, 0))
    assert player.counts["damage detected"] == 1
    monkeypatch.setattr(cnr, "verify", lambda root: ())
    with pytest.raises(WrongError, match="verify names"):
        player.damaged(index, lambda path: damage.flip_bit(path, 0))


def test_faults_and_crashes_are_counted_as_what_they_were(player: Any) -> None:
    player.fail_while_saving(Fault("rename", action="EIO"))
    player.crash_while_saving(nth=10)
    player.fail_while_saving(Fault("rename", nth=1000, action="EIO"))
    player.crash_while_saving(nth=1000)
    assert player.counts["failed save"] == player.counts["crash"] == 1
    assert player.counts["full"] + player.counts["delta"] == 5
    player.check_all()


@pytest.mark.parametrize("kind", ["killed", "fails"])
def test_a_new_run_whose_only_step_is_dropped_at_once_leaves_the_earlier_run_aside(
    tmp_path: Any, player: Any, kind: str
) -> None:
    """Wherever its save ends; the calls after the removal of its step are those that matter."""
    multiples = ocp.checkpoint_managers.EveryNSteps(5)
    options = dataclasses.replace(
        player.setup.options, preservation_policy=multiples, codec="raw"
    )
    setup = dataclasses.replace(player.setup, options=options, keeps=model.multiples(5))
    dropped = 0
    for nth in range(20, 100):
        root = tmp_path / f"{kind} {nth}"
        with playing.Player(root, setup) as new:
            new.save()
            new.reopen(anew=True)
            new.train(3)
            if kind == "killed":
                new.crash_while_saving(nth=nth, gap=2)
            else:
                fault = Fault("any", nth=nth, action="EDQUOT", times=0)
                new.fail_while_saving(fault, gap=2)
            new.check_all()
            dropped += bool(new.model.earlier and not new.model.steps)
            if not new.counts.keys() & {
                "crash",
                "failed save",
                "failure without consequence",
            }:
                break
            new.train(4)
            new.save()
            new.check_all()
    else:
        raise AssertionError("there are more calls than were tried")
    assert dropped > 1


def test_an_older_step_is_not_taken_for_the_save_that_was_killed(player: Any) -> None:
    """Whatever its generation: real ones may be higher than those of the model."""
    for saved in player.model.steps.values():
        object.__setattr__(saved, "generation", 0)
    player._next = 2
    player.manager.close()
    player.manager = player.setup.open(player.root)
    player.model.reopened()
    player._restore(1, 1)
    player.train(5)
    player.crash_while_saving(nth=5)
    assert player.counts["crash"] == 1
    player.check_all()
