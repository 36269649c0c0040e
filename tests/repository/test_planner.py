from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cnr_jax import errors
from cnr_jax.format.manifest import HistoryEntry, Totals, bounded_history
from cnr_jax.policy import Consecutive, Decision, Intermittent, OneShot, SaveRecord
from cnr_jax.repository.index.entries import Entry, records
from cnr_jax.repository.index.planner import Planner
from cnr_jax.repository.index.save_plan import SavePlan

from ..conftest import each_of

LINEAGE = "a" * 32
OTHER = "b" * 32
NONCE = "5eed" * 6


class Asked:
    """A policy that says what it is told to, and remembers what it saw."""

    name = "asked"

    def __init__(self, decision: Decision | None = None) -> None:
        self.decision = decision
        self.seen: list[list[SaveRecord]] = []

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        self.seen.append(list(history))
        return self.decision or Consecutive().decide(history)


class Run:
    """One lineage of saves against a root, without any state."""

    def __init__(self, root: Any, table: Any, policy: Any = None) -> None:
        self.root, self.ledger, self.table = root, root.ledger, table
        self.policy = policy or Asked()
        self.planner = self.planner_of(self.policy)

    def planner_of(self, policy: Any, min_fulls: int = 1) -> Planner:
        planner = Planner(policy, NONCE, min_fulls, (self.table,))
        planner.guarded = True
        return planner

    def plan(
        self, step: int, clock: int, lineage: str = LINEAGE, **changes: Any
    ) -> SavePlan:
        return self.planner.plan(self.ledger, str(step), (lineage, clock), **changes)

    def save(
        self, step: int, clock: int, lineage: str = LINEAGE, **changes: Any
    ) -> SavePlan:
        """Plans and commits; what stands in the way is moved aside."""
        plan = self.plan(step, clock, lineage, **changes)
        for directory in plan.abandoned:
            self.ledger.forget(directory)
        saved = HistoryEntry(step=step, kind=plan.kind, bytes=100, rows=8, secs=0.5)
        entry = (
            self.root.add(
                step,
                uuid=plan.uuid,
                kind=plan.kind,
                parent=None,
                generation=plan.generation,
                history=(*self.planner.history_before(plan), saved),
                restores=plan.restores,
            )
            if plan.parent is None
            else self.root.add(
                step,
                self.ledger.entries[plan.parent.directory],
                uuid=plan.uuid,
                parent_clock=plan.parent.clock,
                generation=plan.generation,
                history=(*self.planner.history_before(plan), saved),
                restores=plan.restores,
            )
        )
        self.planner.saved(plan, entry)
        return plan

    def restore(
        self, step: int, lineage: str, *, unchanged: bool = True
    ) -> list[Entry]:
        chain = self.ledger.chain(self.ledger.entries[str(step)])[::-1]
        self.planner.restored(lineage, chain, unchanged=unchanged)
        return chain


@pytest.fixture
def run(root: Any, make_table: Any) -> Run:
    return Run(root, make_table())


# Legal parents.


def test_first_save_is_full_without_asking_the_policy(run: Run) -> None:
    plan = run.plan(0, 1)
    assert (plan.kind, plan.parent, plan.generation) == ("full", None, 1)
    assert plan.reason == "no baseline yet"
    assert run.policy.seen == []


def test_delta_rests_on_the_save_before_with_its_clock(run: Run) -> None:
    full = run.save(0, clock=3)
    plan = run.plan(1, clock=5)
    assert plan.kind == "delta" and plan.parent is not None
    assert (plan.parent.directory, plan.parent.uuid) == ("0", full.uuid)
    assert plan.parent.clock == 3


def test_first_save_without_a_lineage_draws_one_and_the_next_go_on_in_it(
    run: Run,
) -> None:
    first = run.save(0, clock=0, lineage="")
    assert len(bytes.fromhex(first.lineage)) == 16
    assert run.plan(1, clock=1, lineage=first.lineage).parent is not None
    other = run.plan(1, clock=1, lineage="")
    assert other.kind == "full" and other.lineage != first.lineage


def test_policy_may_choose_an_older_parent_with_the_clock_of_that(run: Run) -> None:
    run.save(0, clock=3)
    run.save(1, clock=5)
    run.policy.decision = Decision(kind="delta", parent=0, reason="one-shot")
    plan = run.plan(2, clock=9)
    assert plan.parent is not None
    assert (plan.parent.directory, plan.parent.clock) == ("0", 3)


def test_no_rows_changed_is_a_legal_delta(run: Run) -> None:
    run.save(0, clock=3)
    assert run.plan(1, clock=3).kind == "delta"


def test_save_that_was_not_committed_is_no_parent(run: Run) -> None:
    run.save(0, clock=3)
    run.plan(1, clock=5)
    plan = run.plan(2, clock=6)
    assert plan.parent is not None and plan.parent.directory == "0"


def test_unknown_lineage_is_saved_full_in_a_higher_generation(run: Run) -> None:
    run.save(0, clock=3)
    plan = run.plan(1, clock=5, lineage=OTHER)
    assert (plan.kind, plan.parent, plan.generation) == ("full", None, 2)
    assert "not counted from any checkpoint" in plan.reason


def test_restored_chain_is_legal_with_clocks_counted_from_zero(run: Run) -> None:
    for step, clock in ((0, 3), (1, 8), (2, 20)):
        run.save(step, clock)
    run.restore(2, OTHER)
    for parent, clock in ((2, 2), (1, 1), (0, 0)):
        run.policy.decision = Decision(kind="delta", parent=parent, reason="")
        plan = run.plan(3, clock=4, lineage=OTHER)
        assert plan.parent is not None and plan.kind == "delta"
        assert (plan.parent.directory, plan.parent.clock) == (str(parent), clock)


def test_step_beside_the_restored_chain_is_no_legal_parent(run: Run) -> None:
    for step in range(4):
        run.save(step, clock=step)
    run.restore(1, OTHER)
    run.policy.decision = Decision(kind="delta", parent=3, reason="")
    plan = run.plan(9, clock=4, lineage=OTHER)
    assert (plan.kind, plan.reason) == ("full", "step 3 is not a legal parent any more")


def test_state_that_was_not_restored_exactly_is_saved_full(run: Run) -> None:
    run.save(0, clock=3)
    run.restore(0, OTHER, unchanged=False)
    plan = run.plan(1, clock=1, lineage=OTHER)
    assert (plan.kind, plan.generation) == ("full", 1)


def test_clock_that_went_back_makes_the_save_full(run: Run) -> None:
    run.save(0, clock=3)
    run.save(1, clock=8)
    plan = run.plan(2, clock=5)
    assert plan.kind == "full"
    assert plan.reason == "the clock of the stamps went back, from 8 to 5"


def test_checkpoints_before_a_clock_that_went_back_stay_illegal(run: Run) -> None:
    run.save(0, clock=3)
    run.save(1, clock=8)
    run.save(2, clock=5)
    run.policy.decision = Decision(kind="delta", parent=0, reason="")
    plan = run.plan(3, clock=9)
    assert (plan.kind, plan.reason) == ("full", "step 0 is not a legal parent any more")


def test_clock_that_went_back_and_caught_up_while_a_save_failed_is_full(
    run: Run,
) -> None:
    run.save(0, clock=3)
    run.save(1, clock=8)
    run.plan(2, clock=5)  # never committed
    assert run.plan(3, clock=12).kind == "full"


def test_doubt_about_the_stamps_makes_the_save_full(run: Run) -> None:
    run.save(0, clock=1)
    plan = run.plan(1, clock=2, doubt="no audit was possible")
    assert (plan.kind, plan.reason) == ("full", "no audit was possible")


def test_rows_that_have_grown_out_of_their_step_make_the_save_full(run: Run) -> None:
    run.save(0, clock=3)
    (branch,) = run.planner.branches.values()
    assert branch.tip is not None and branch.tip.manifest is not None
    manifest = dataclasses.replace(branch.tip.manifest, outgrown=("user",))
    branch.tip = dataclasses.replace(branch.tip, manifest=manifest)
    plan = run.plan(1, clock=4)
    assert (plan.kind, "steps of user" in plan.reason) == ("full", True)
    assert run.plan(1, clock=4, urgent=True).kind == "delta"


def test_unguarded_saves_are_full(run: Run) -> None:
    run.save(0, clock=3)
    run.planner.guarded = False
    plan = run.plan(1, clock=4)
    assert plan.kind == "full" and "retention" in plan.reason


def test_urgent_save_is_a_delta_if_one_is_legal_whatever_the_policy(run: Run) -> None:
    full = Asked(Decision(kind="full", parent=None, reason="asked"))
    run.planner = run.planner_of(full)
    assert run.save(0, 0).kind == "full"
    assert run.save(10, 1).kind == "full"
    plan = run.plan(20, 2, urgent=True)
    assert plan.parent is not None
    assert (plan.kind, plan.parent.directory, plan.parent.clock) == ("delta", "10", 1)
    assert "about to end" in plan.reason
    assert run.plan(20, 2, urgent=True, doubt="doubt").kind == "full"
    assert run.plan(20, 2, OTHER, urgent=True).kind == "full"
    run.ledger.forget("10")
    assert run.plan(20, 2, urgent=True).kind == "full"
    assert run.plan(20, 2).kind == "full"


def test_the_last_save_is_a_delta_though_full_ones_are_too_few(run: Run) -> None:
    run.planner = run.planner_of(OneShot(), min_fulls=2)
    assert run.save(0, 0).kind == "full"
    assert run.plan(10, 1, urgent=True).kind == "delta"
    plan = run.save(10, 1)
    assert plan.kind == "full" and plan.reason.startswith("min_fulls=2")
    assert run.plan(20, 2).kind == "delta"


def test_changed_tables_make_the_save_full(run: Run, make_table: Any) -> None:
    run.save(0, clock=3)
    run.planner.tables = (make_table(16),)
    plan = run.plan(1, clock=4)
    assert plan.kind == "full" and "tables are not those" in plan.reason


def test_parent_that_was_deleted_is_not_used(run: Run) -> None:
    run.save(0, clock=3)
    run.ledger.forget("0")
    assert run.plan(1, clock=4).kind == "full"


def test_parent_whose_chain_is_broken_is_not_used(run: Run) -> None:
    run.save(0, clock=3)
    run.save(1, clock=4)
    run.ledger.forget("0")
    assert run.plan(2, clock=5).kind == "full"


def test_step_of_another_run_in_the_place_of_the_parent_is_not_used(run: Run) -> None:
    run.save(0, clock=3)
    run.root.add(0, uuid="e" * 32)
    assert run.plan(1, clock=4).kind == "full"


# What a plan carries on.


def test_policy_sees_the_saves_since_the_latest_full(run: Run) -> None:
    policy = run.policy
    run.save(0, clock=1)
    run.save(1, clock=2)
    policy.decision = Decision(kind="full", parent=None, reason="enough")
    run.save(2, clock=3)
    policy.decision = None
    run.save(3, clock=4)
    run.plan(4, clock=5)
    assert [record.step for record in policy.seen[-1]] == [2, 3]
    assert [record.kind for record in policy.seen[-1]] == ["full", "delta"]


def test_policy_sees_what_a_restore_of_each_save_reads(run: Run) -> None:
    def seen(step: int) -> list[tuple[int, int | None, int | None]]:
        run.plan(step, clock=9)
        return [(r.step, r.depth, r.restore_bytes) for r in run.policy.seen[-1]]

    run.save(0, clock=1)
    run.save(1, clock=2)
    run.policy.decision = Decision(kind="delta", parent=0, reason="one-shot")
    run.save(2, clock=3)
    run.policy.decision = None
    run.save(3, clock=4)
    # Rows of each save take 100 bytes, dense leaves none.
    assert seen(4) == [(0, 1, 100), (1, 2, 200), (2, 2, 200), (3, 3, 300)]
    run.ledger.note_damage("2/state/rows.p00000/codes/c/0", "it is cut")
    run.ledger.forget("1")
    assert seen(4) == [(0, 1, 100), (1, None, None), (2, None, None), (3, None, None)]


def test_dense_leaves_count_for_the_step_itself_alone(root: Any) -> None:
    totals = Totals(
        rows=8, table_bytes=90, slot_bytes=10, dense_bytes=1000, manifest_bytes=1
    )
    parent = root.add(0, totals=totals)
    child = root.add(1, parent, totals=totals)
    assert [root.ledger.restore_bytes(e) for e in (parent, child)] == [1100, 1200]


def test_full_plan_starts_a_history_and_delta_goes_on(run: Run) -> None:
    run.plan(0, clock=1)
    assert run.planner.history_before(run.save(0, clock=1)) == ()
    delta = run.plan(1, clock=2)
    assert [h.step for h in run.planner.history_before(delta)] == [0]
    run.save(1, clock=2)
    assert [h.step for h in run.planner.history_before(run.plan(2, clock=3))] == [0, 1]


def test_history_survives_the_deletion_of_its_steps_and_a_restore(run: Run) -> None:
    run.save(0, clock=1)
    run.policy.decision = Decision(kind="delta", parent=0, reason="one-shot")
    run.save(1, clock=2)
    run.save(2, clock=3)
    run.ledger.forget("1")
    run.restore(2, OTHER)
    run.plan(3, clock=4, lineage=OTHER)
    assert [record.step for record in run.policy.seen[-1]] == [0, 1, 2]


def growing(policy: Any, sizes: Sequence[int], bounded: bool) -> int:
    """How many deltas a policy writes before it wants a full again; at most all."""
    history = (HistoryEntry(step=0, kind="full", bytes=10**9, rows=9, secs=1.0),)
    for step, size in enumerate(sizes, start=1):
        decided = policy.decide(records(history))
        if decided.kind == "full":
            return step - 1
        assert decided.parent == (0 if policy.name != "consecutive" else step - 1)
        saved = HistoryEntry(step=step, kind="delta", bytes=size, rows=9, secs=1.0)
        history = (*history, saved)
        if bounded:
            history = bounded_history(history)
    return len(sizes)


@pytest.mark.slow
@each_of(
    "policy",
    [
        OneShot(),
        Consecutive(),
        Consecutive(max_chain=7),
        Consecutive(max_chain=201),
        Intermittent(max_deltas=130),
        Intermittent(),
        Intermittent(predictor="history"),
    ],
)
@each_of("power", [0.3, 0.75, 1.0])
@each_of("first_bytes", [10**4, 10**6, 10**7])
def test_long_history_is_decided_upon_as_if_it_were_all_there(
    policy: Any, power: float, first_bytes: int
) -> None:
    rng = np.random.default_rng(3)
    noise = rng.uniform(0.97, 1.03, 300)
    sizes = [int(first_bytes * (i + 1) ** power * noise[i]) for i in range(300)]
    whole = growing(policy, sizes, bounded=False)
    assert growing(policy, sizes, bounded=True) == whole


def test_parents_that_are_gone_are_forgotten(run: Run) -> None:
    for step in range(100):
        run.save(step, clock=step)
        if step >= 2:
            run.policy.decision = Decision(
                kind="full", parent=None, reason="short chains"
            )
            run.ledger.forget(str(step - 2))
    (branch,) = run.planner.branches.values()
    assert len(branch.parents) < 40
    run.policy.decision = None
    plan = run.plan(100, clock=100)
    assert plan.parent is not None and plan.parent.directory == "99"


def test_restores_are_counted_along_the_branch(run: Run) -> None:
    assert run.save(0, clock=1).restores == 0
    run.restore(0, OTHER)
    assert run.save(1, clock=2, lineage=OTHER).restores == 1
    run.restore(1, "c" * 32)
    assert run.plan(2, clock=2, lineage="c" * 32).restores == 2


def test_restores_of_a_lineage_from_nowhere_are_the_most_that_may_be(run: Run) -> None:
    run.save(0, clock=1)
    assert run.planner.restores == 0
    for lineage in ("b" * 32, "c" * 32, "d" * 32):
        run.restore(0, lineage)
        assert run.planner.restores == 1
        step = len(run.ledger.committed())
        run.save(step, clock=2, lineage=lineage)
        run.restore(step, "e" * 32)
        assert run.planner.restores == 2
        # A rollback goes back in the count too, but only for what provably went back.
        assert run.plan(9, clock=3, lineage="f" * 32).restores == 2
        assert run.plan(9, clock=3, lineage="e" * 32).restores == 2
    run.restore(0, "1" * 32)
    assert run.plan(9, clock=3, lineage="1" * 32).restores == 1
    assert run.plan(9, clock=3, lineage=LINEAGE).restores == 2


def test_restores_of_a_state_from_elsewhere_are_counted_on(run: Run) -> None:
    run.save(0, clock=1)
    run.planner.end_lineages(7)
    assert run.planner.restores == 7
    assert run.save(1, clock=2, lineage=OTHER).restores == 7
    # Every process notes what was saved, also those that do not plan.
    other = Planner(Asked())
    plan = run.plan(2, clock=3, lineage=OTHER)
    other.saved(plan, run.ledger.entries["1"])
    assert other.restores == 7


def test_uuids_are_of_the_run_and_never_repeat(run: Run) -> None:
    uuids = [run.plan(0, 1).uuid for _ in range(3)]
    assert uuids == [f"{NONCE}{i:08x}" for i in (1, 2, 3)]
    stamps = LINEAGE, 1
    others = [Planner(Asked()).plan(run.ledger, "0", stamps).uuid for _ in range(2)]
    assert len({uuid[: len(NONCE)] for uuid in (*others, *uuids)}) == 3


def test_codec_and_name_of_the_policy_are_passed_on(run: Run) -> None:
    run.save(0, clock=1)
    run.policy.decision = Decision(
        kind="delta", parent=0, codec="raw", reason="because"
    )
    plan = run.plan(1, clock=2)
    assert (plan.codec, plan.policy, plan.reason) == ("raw", "asked", "because")


# Generations.


def test_saves_of_one_branch_stay_in_its_generation(run: Run) -> None:
    assert [run.save(step, clock=step).generation for step in range(3)] == [1, 1, 1]
    run.restore(2, OTHER)
    assert run.plan(3, clock=9, lineage=OTHER).generation == 1


def test_save_after_a_rollback_starts_a_higher_generation(run: Run) -> None:
    for step in range(4):
        run.save(step, clock=step)
    run.restore(1, OTHER)
    plan = run.save(9, clock=2, lineage=OTHER)
    assert (plan.kind, plan.generation, plan.abandoned) == ("delta", 2, ())
    assert run.save(10, clock=3, lineage=OTHER).generation == 2


def test_steps_in_the_way_after_a_rollback_go_aside_with_their_dependents(
    run: Run,
) -> None:
    for step in range(5):
        run.save(step, clock=step)
    run.restore(1, OTHER)
    plan = run.plan(3, clock=2, lineage=OTHER)
    assert plan.abandoned == ("4", "3")
    assert plan.parent is not None and plan.parent.directory == "1"


def test_step_that_the_restored_chain_needs_is_not_moved_aside(run: Run) -> None:
    for step in range(3):
        run.save(step, clock=step)
    run.restore(1, OTHER)
    for step in (0, 1):
        with pytest.raises(errors.DependentsExistError, match="restored chain"):
            run.plan(step, clock=2, lineage=OTHER)


def test_step_of_this_generation_is_not_overwritten(run: Run) -> None:
    run.save(0, clock=1)
    run.save(1, clock=2)
    with pytest.raises(errors.DependentsExistError) as caught:
        run.plan(1, clock=3)
    assert caught.value.kind == "step_exists"


def test_error_leaves_the_planner_as_it_was(run: Run) -> None:
    run.save(0, clock=1)
    with pytest.raises(errors.DependentsExistError):
        run.plan(0, clock=2)
    plan = run.plan(1, clock=2)
    assert plan.parent is not None and plan.parent.directory == "0"


def test_plan_is_plain_data(run: Run) -> None:
    run.save(0, clock=1)
    plan = run.plan(1, clock=2)
    assert dataclasses.replace(plan) == plan
