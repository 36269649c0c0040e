"""What retention deletes, what it keeps for the sake of other steps, and who may delete."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.options import with_retention
from cnr_jax.repository.index.ledger import Entry
from cnr_jax.repository.index.retention import ChainPreservation
from cnr_jax.repository.layout import Place
from cnr_jax.repository.step_reader import open_chain
from cnr_jax.repository.upkeep import aside
from cnr_jax.testing.faults import Fault, FaultNotHitError
from cnr_jax.testing.inprocess import failing

from .conftest import each_of
from .repository.conftest import Root

SAVES = 12
keeping = ocp.checkpoint_managers


def loss(metrics: dict[str, float]) -> float:
    return metrics["loss"]


# Name, what the manager's Orbax options are, and the same rule as a policy of its own.
RULES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], Any]]] = {
    "latest_n": (
        lambda: {"preservation_policy": keeping.LatestN(2)},
        lambda: keeping.LatestN(2),
    ),
    "latest_one": (lambda: {"max_to_keep": 1}, lambda: keeping.LatestN(1)),
    "every_n_steps": (
        lambda: {"preservation_policy": keeping.EveryNSteps(4)},
        lambda: keeping.EveryNSteps(4),
    ),
    "every_n_seconds": (
        lambda: {"preservation_policy": keeping.EveryNSeconds(3600)},
        lambda: keeping.EveryNSeconds(3600),
    ),
    "best_n": (
        lambda: {
            "preservation_policy": keeping.BestN(get_metric_fn=loss, reverse=True, n=2),
            "best_fn": loss,
            "best_mode": "min",
        },
        lambda: keeping.BestN(get_metric_fn=loss, reverse=True, n=2),
    ),
    "best_fn_and_max_to_keep": (
        lambda: {"best_fn": loss, "best_mode": "min", "max_to_keep": 2},
        lambda: keeping.BestN(get_metric_fn=loss, reverse=True, n=2),
    ),
    "custom_steps": (
        lambda: {"preservation_policy": keeping.CustomSteps([1, 6, 7])},
        lambda: keeping.CustomSteps([1, 6, 7]),
    ),
    "any_of_two": (
        lambda: {
            "preservation_policy": keeping.AnyPreservationPolicy(
                [keeping.LatestN(1), keeping.EveryNStepsClosest(5)]
            )
        },
        lambda: keeping.AnyPreservationPolicy(
            [keeping.LatestN(1), keeping.EveryNStepsClosest(5)]
        ),
    ),
    "max_to_keep_and_keep_period": (
        lambda: {"max_to_keep": 2, "keep_period": 5},
        lambda: keeping.AnyPreservationPolicy(
            [keeping.LatestN(2), keeping.EveryNSteps(5)]
        ),
    ),
    "all": (
        lambda: {"preservation_policy": keeping.preservation_policy.PreserveAll()},
        lambda: keeping.preservation_policy.PreserveAll(),
    ),
}


class Arbitrary:
    """A rule of a user's own that minds nothing: some steps go, come back, and go at once."""

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        newest = checkpoints[-1].step
        return [(info.step * 7 + newest * 5) % 4 != 0 for info in checkpoints]


def _same(make: Callable[[], Any]) -> Any:
    # Without best_fn Orbax does not write the metrics that BestN needs after a restart.
    return lambda: {"preservation_policy": make(), "best_fn": loss}, make


def _best(**options: Any) -> Callable[[], Any]:
    return lambda: keeping.BestN(get_metric_fn=loss, **options)


# Further forms of the same; one way of making deltas is enough for them.
MORE_RULES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], Any]]] = {
    "every_n_steps_at_least": _same(
        lambda: keeping.EveryNSteps(3, exact_interval=False, max_to_keep=2)
    ),
    "closest_of_which_two": _same(lambda: keeping.EveryNStepsClosest(4, max_to_keep=2)),
    "no_duration_at_all": _same(lambda: keeping.LatestDuration(datetime.timedelta(0))),
    "best_and_those_without_metrics_go": _same(
        _best(n=2, keep_checkpoints_without_metrics=False)
    ),
    "three_at_once": _same(
        lambda: keeping.AnyPreservationPolicy(
            [keeping.CustomSteps([2, 9]), _best(n=1)(), keeping.EveryNSeconds(3600)]
        )
    ),
    "arbitrary": _same(Arbitrary),
    "classic_options_together": (
        lambda: {
            "best_fn": loss,
            "best_mode": "max",
            "max_to_keep": 1,
            "keep_period": 5,
            "keep_time_interval": datetime.timedelta(hours=1),
        },
        lambda: keeping.AnyPreservationPolicy(
            [_best(n=1)(), keeping.EveryNSteps(5), keeping.EveryNSeconds(3600)]
        ),
    ),
}


def metrics_of(step: int) -> dict[str, float]:
    """Neither rising nor falling, so that the best steps are some in the middle."""
    return {"loss": float((step * 7) % 5) + step / 100}


def on_disk(root: Any) -> set[int]:
    return {int(path.name) for path in Path(root).iterdir() if path.name.isdigit()}


class Model:
    """What must be on disk: what the rule keeps, and all that those steps rest on."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.parents: dict[int, int | None] = {}
        self.infos: list[Any] = []

    def saved(self, step: int, parent: int | None) -> set[int]:
        self.parents[step] = parent
        self.infos.append(info_of(step))
        keep = self.rule.should_preserve(self.infos, context=None)
        kept: set[int] = set()
        for info, wanted in zip(self.infos, keep, strict=True):
            at = info.step if wanted else None
            while at is not None:
                kept.add(at)
                at = self.parents[at]
        self.infos = [info for info in self.infos if info.step in kept]
        return kept


def info_of(step: int) -> Any:
    """What Orbax tells of a step, which is a second old: some rules go by the clock."""
    time = datetime.datetime.now(tz=datetime.UTC) - datetime.timedelta(seconds=1)
    return types.SimpleNamespace(step=step, time=time, metrics=metrics_of(step))


def open_manager(
    root: Any, run: Any, policy: Any, **orbax: Any
) -> cnr.CheckpointManager:
    return cnr.CheckpointManager(
        root,
        tables=run.tables,
        options=cnr.Options(codec="raw", policy=policy),
        orbax_options=ocp.CheckpointManagerOptions(**orbax),
    )


def parent_of(run: Any, manager: Any, step: int) -> int | None:
    parent = run.manifest(manager, step).parent
    return int(parent.directory) if parent else None


def check_chains(root: Any, steps: set[int]) -> None:
    """Every manifest of every chain is there and undamaged, and parents are the named ones."""
    for step in steps:
        chain = open_chain(epath.Path(root), str(step), "default")
        assert chain[0].manifest.kind == "full"
        assert chain[-1].manifest.step == step


# What a save rests on, of the chain of the save before, newest first; None: on nothing.
Rests = Callable[[list[Entry]], Entry | None]
WAYS: dict[str, Rests] = {
    "full": lambda chain: None,
    "one_shot": lambda chain: chain[-1],
    "consecutive": lambda chain: chain[0] if len(chain) < 4 else None,
    "intermittent": lambda chain: chain[-1] if chain[0].step % 5 else None,
}


@each_of("rule", RULES | MORE_RULES)
def test_parents_of_what_a_rule_keeps_stay_and_all_else_goes(rule: str) -> None:
    """On the ledger alone, for every way of making deltas."""
    options, alone = (RULES | MORE_RULES)[rule]
    for rests in WAYS.values():
        root, model, infos, tip = Root(), Model(alone()), list[Any](), None
        asked = ocp.CheckpointManagerOptions(**options())
        policy: Any = with_retention(
            asked,
            None,
            lambda own, root=root: ChainPreservation(own, lambda: root.ledger),
        ).preservation_policy
        for step in range(1, SAVES + 1):
            parent = rests(root.ledger.chain(tip)) if tip else None
            new, root.ledger.run = root.add(step, parent), ""
            infos.append(info_of(step))
            keeps = policy.should_preserve(infos)
            kept = {i.step for i, keep in zip(infos, keeps, strict=True) if keep}
            assert kept == model.saved(step, parent.step if parent else None)
            infos = [info for info in infos if info.step in kept]
            for gone in root.ledger.directories() - {str(step) for step in kept}:
                assert gone in root.ledger.doomed
                root.ledger.forget(gone)
            root.ledger.doomed.clear()
            assert {entry.step for entry in root.ledger.restorable()} == kept
            # A rule may drop the newest step at once: then nothing may rest on it.
            tip = new if step in kept else tip
            if tip and tip.step not in kept:
                tip = None


# Each of Orbax's options once, and each way of making deltas with some of them.
THROUGH_ORBAX = {
    "latest_n": cnr.Consecutive(max_chain=3),
    "latest_one": cnr.Intermittent(max_deltas=4),
    "every_n_steps": cnr.OneShot(),
    "best_n": cnr.Consecutive(max_chain=3),
    "best_fn_and_max_to_keep": cnr.Intermittent(max_deltas=4),
    "any_of_two": cnr.OneShot(),
    "max_to_keep_and_keep_period": cnr.Full(),
    "arbitrary": cnr.Consecutive(max_chain=3),
}


@pytest.mark.parametrize("rule", THROUGH_ORBAX)
def test_the_same_with_managers_and_files(
    tiny_run: Any, tmp_path: Path, rule: str
) -> None:
    policy = THROUGH_ORBAX[rule]
    options, alone = (RULES | MORE_RULES)[rule]
    run, model = tiny_run(), Model(alone())
    manager = open_manager(tmp_path, run, policy, **options())
    for step in range(1, SAVES + 1):
        if step == 7:
            # The ledger is read from disk, and the run goes on from what is there.
            manager.close()
            manager = open_manager(tmp_path, run, policy, **options())
            if manager.latest_step() is not None:
                run.restore(manager, None)
        run.run(manager, [step], metrics=metrics_of(step))
        # Some rules drop the newest step at once; then nothing rests on it.
        report = manager.last_report
        assert report is not None and report.step == step
        is_kept = report.outcome == "committed"
        kept = model.saved(step, report.parent if is_kept else None)
        assert is_kept == (step in kept)
        assert on_disk(tmp_path) == kept == set(manager.all_steps())
        check_chains(tmp_path, kept)
        assert manager.latest_step() == max(kept, default=None)
    for step in on_disk(tmp_path):
        run.check(manager, step)
    manager.close()


def kinds_of(policy: Any) -> set[str]:
    inner = getattr(policy, "policies", ())
    return {type(policy).__name__}.union(*(kinds_of(each) for each in inner))


def test_every_public_policy_of_orbax_is_in_the_matrix() -> None:
    public = {
        name
        for module in (keeping, keeping.preservation_policy)
        for name, value in vars(module).items()
        if isinstance(value, type) and hasattr(value, "should_preserve")
    }
    tried = set[str]().union(
        *(kinds_of(alone()) for _, alone in (RULES | MORE_RULES).values())
    )
    assert public - tried == {"PreservationPolicy"}, "the protocol alone"


def test_rules_and_policies_of_the_matrix_do_make_deltas_and_deletions() -> None:
    """Guards the test above: a rule that keeps all, or never a delta, would prove nothing."""
    kept = Model(keeping.LatestN(2))
    parents = {1: None, 2: 1, 3: 2, 4: 3, 5: None, 6: 5}
    history = [kept.saved(step, parent) for step, parent in parents.items()]
    assert history[3] == {1, 2, 3, 4}
    assert history[4] == {1, 2, 3, 4, 5}
    assert history[5] == {5, 6}


def test_a_reopened_manager_deletes_nothing_that_a_kept_step_needs(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with open_manager(tmp_path, run, cnr.Consecutive(), max_to_keep=1) as manager:
        run.run(manager, [1, 2, 3])
    assert on_disk(tmp_path) == {1, 2, 3}
    with open_manager(tmp_path, run, cnr.Consecutive(), max_to_keep=2) as manager:
        run.restore(manager, None)
        # A new lineage: its full save needs none of the old chain, the second latest does.
        run.touched = cnr.init_touched(run.state, run.tables)
        run.run(manager, [4])
        assert on_disk(tmp_path) == {1, 2, 3, 4}
        run.check(manager, 3)
        run.run(manager, [5])
        assert on_disk(tmp_path) == {4, 5}
        run.check(manager, 5)


def test_retention_counts_steps_that_led_to_the_newest_as_the_latest(
    tiny_run: Any, tmp_path: Path
) -> None:
    old, run = tiny_run(), tiny_run(salt=1)
    with open_manager(tmp_path, old, cnr.Full()) as manager:
        old.run(manager, [10, 20, 30])
    with open_manager(tmp_path, run, cnr.Full(), max_to_keep=2) as manager:
        run.restore(manager, 10)
        run.run(manager, [11])
        # 20 and 30 were left behind: they go before what led to 11.
        assert on_disk(tmp_path) == {10, 11}
        run.run(manager, [12, 13])
        assert on_disk(tmp_path) == {12, 13}
        run.check(manager, 13)


@pytest.mark.parametrize(
    "policy",
    [
        lambda: keeping.EveryNSteps(10, exact_interval=False),
        lambda: keeping.EveryNSteps(1, exact_interval=False),
        lambda: keeping.EveryNSeconds(0),
        lambda: keeping.AnyPreservationPolicy(
            [keeping.LatestN(1), keeping.EveryNSteps(10, exact_interval=False)]
        ),
    ],
)
def test_rules_by_intervals_count_from_what_led_to_the_newest(
    tiny_run: Any, tmp_path: Path, policy: Any
) -> None:
    old, run = tiny_run(), tiny_run(salt=1)
    with open_manager(tmp_path, old, cnr.Full()) as manager:
        old.run(manager, [10, 20, 30, 40])
    kept = {"preservation_policy": policy()}
    with open_manager(tmp_path, run, cnr.Full(), **kept) as manager:
        run.restore(manager, 20)
        run.run(manager, [31, 45])
        # After 30 and 40, which were left behind, no interval is over at 10, 20 or 31.
        assert manager.all_steps() == [10, 20, 31, 45]
        assert on_disk(tmp_path) == {10, 20, 30, 31, 40, 45}


def test_a_failed_save_takes_nothing_away_from_the_ledger(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    """Orbax asks what to delete before it knows whether the save will be committed."""
    run = tiny_run()
    manager = open_manager(tmp_path, run, cnr.Full(), max_to_keep=1)
    run.run(manager, [1])
    before = run.manifest(manager, 1)
    with storage.failing():
        run.train(2)
        manager.save(2, args=cnr.args.Save(run.state, run.touched))
        with pytest.raises(OSError, match="No space"):
            manager.wait_until_finished()
    assert on_disk(tmp_path) == {1} == set(manager.all_steps())
    assert manager.latest_step() == 1
    assert run.manifest(manager, 1) == before
    run.same(manager.restore(1, args=cnr.args.Restore(run.state)).state, run.truth[1])
    run.run(manager, [3])
    assert on_disk(tmp_path) == {3} == set(manager.all_steps())
    run.check(manager, 3)
    manager.close()


def test_while_a_save_is_written_the_step_before_stays_the_latest(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    manager = open_manager(tmp_path, run, cnr.Full(), max_to_keep=1)
    run.run(manager, [1])
    with storage.held():
        run.train(2)
        run.save(manager, 2)
        assert manager.latest_step() == 1
    manager.wait_until_finished()
    assert manager.latest_step() == 2
    assert on_disk(tmp_path) == {2}
    manager.close()


def test_nothing_older_than_a_step_without_manifest_is_deleted(
    tiny_run: Any, tmp_path: Path
) -> None:
    """It may depend on any of them."""
    run = tiny_run()
    with open_manager(tmp_path, run, cnr.Full()) as manager:
        run.run(manager, [1, 2, 3])
    (tmp_path / "2" / "default" / "manifest.json").unlink()
    with open_manager(tmp_path, run, cnr.Full(), max_to_keep=1) as manager:
        assert manager.latest_step() == 3
        run.run(manager, [4])
        assert on_disk(tmp_path) == {1, 2, 4}
        with pytest.raises(
            cnr.errors.IntegrityError, match=r"manifest\.json is missing"
        ):
            manager.restore(2)


@pytest.mark.parametrize(
    ("folder", "hint"),
    [
        ("default/theirs", "a name that does not end in a digit"),
        (".", "verify says what"),
        ("default/dense/d", "a name that does not end in a digit"),
    ],
)
def test_retention_that_a_folder_switches_off_says_so_once(
    tiny_run: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    folder: str,
    hint: str,
) -> None:
    run = tiny_run()
    options = cnr.Options(
        codec="raw",
        policy=cnr.Full(),
        preservation_policy=ocp.checkpoint_managers.LatestN(1),
    )
    with cnr.CheckpointManager(tmp_path, tables=run.tables, options=options) as manager:
        run.run(manager, [1, 2])
        (tmp_path / "900" / folder).mkdir(parents=True)
        run.run(manager, [3, 4])
        said = [r.message for r in caplog.records if "retention deletes" in r.message]
        assert [text.partition(" that are")[0] for text in said] == [
            "retention deletes none of 1 steps, 2 to 2,"
        ]
        assert all(": 900; " in text and hint in text for text in said)
        assert {1, 2, 3, 4} & on_disk(tmp_path) == {2, 3, 4}
        shutil.rmtree(tmp_path / "900")
        caplog.clear()
        run.run(manager, [5])
        assert on_disk(tmp_path) == {5}
        assert "retention deletes" not in caplog.text


def test_a_folder_of_others_does_not_stop_retention(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    options = cnr.Options(
        policy=cnr.Full(), preservation_policy=ocp.checkpoint_managers.LatestN(1)
    )
    root = tmp_path / "root"
    for name in ("2024/plot.png", "2025/plots/1.png"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("x")
    with cnr.CheckpointManager(root, tables=run.tables, options=options) as manager:
        run.run(manager, [1, 2])
        (root / "2026" / "plots").mkdir(parents=True)
        run.run(manager, [3, 4])
        assert "retention deletes none" not in caplog.text
        for step in (2024, 2025):
            with pytest.raises(cnr.errors.DependentsExistError):
                manager.save(step, args=cnr.args.Save(run.state, run.touched))
    assert on_disk(root) == {4, 2024, 2025, 2026}
    options = dataclasses.replace(options, preservation_policy=None)
    with cnr.CheckpointManager(root, tables=run.tables, options=options) as manager:
        run.restore(manager, None)
        run.run(manager, [5, 6])
        manager.delete(5)
    assert on_disk(root) == {4, 6, 2024, 2025, 2026}
    assert [fate.step for fate in cnr.prune(root, keep=1).fates if not fate.stays] == [
        4
    ]
    assert (root / "2024" / "plot.png").exists()


@pytest.mark.parametrize(
    "given", [{"primary_host": 1}, {"primary_host": None}, {"active_processes": {0}}]
)
def test_processes_with_other_parts_than_usual_are_refused(
    tiny_run: Any, tmp_path: Path, given: dict[str, Any]
) -> None:
    parts = ocp.options.MultiprocessingOptions(**given)
    (name,) = given
    with pytest.raises(cnr.errors.OptionError, match=f"{name}={given[name]!r}"):
        cnr.CheckpointManager(
            tmp_path / "root",
            tables=tiny_run().tables,
            orbax_options=ocp.CheckpointManagerOptions(multiprocessing_options=parts),
        )
    assert not (tmp_path / "root").exists()


def test_barriers_of_the_user_are_refused_as_no_save_meets_at_one(
    tiny_run: Any, tmp_path: Path
) -> None:
    given = ocp.AsyncOptions(barrier_sync_fn=lambda *, key, timeout_ms: None)
    with pytest.raises(cnr.errors.OptionError, match="barrier_sync_fn is not taken"):
        open_manager(tmp_path / "root", tiny_run(), cnr.Full(), async_options=given)
    assert not (tmp_path / "root").exists()


def test_delete_refuses_a_step_that_others_depend_on(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with open_manager(tmp_path, run, cnr.Consecutive()) as manager:
        run.run(manager, [1, 2, 3])
        with pytest.raises(
            cnr.errors.DependentsExistError,
            match="refusing to delete step 1: 2, 3 depend on it",
        ):
            manager.delete(1)
        assert on_disk(tmp_path) == {1, 2, 3}
        manager.delete(3)
        assert on_disk(tmp_path) == {1, 2}
        assert manager.latest_step() == 2
        # The deleted tip is no parent any more.
        run.run(manager, [4])
        manifest = run.manifest(manager, 4)
        assert manifest.kind == "full"
        assert "step 3 is not a legal parent any more" in manifest.reason
        run.check(manager, 4)
        with pytest.raises(FileNotFoundError):
            manager.delete(3)


def test_retention_given_in_both_options_is_refused(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with pytest.raises(cnr.errors.OptionError, match="given twice"):
        cnr.CheckpointManager(
            tmp_path,
            tables=run.tables,
            options=cnr.Options(preservation_policy=keeping.LatestN(1)),
            orbax_options=ocp.CheckpointManagerOptions(max_to_keep=3),
        )


def test_plain_orbax_without_our_policy_writes_only_fulls(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    with ocp.CheckpointManager(
        tmp_path,
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
        handler_registry=cnr.handler_registry(run.tables, options),
    ) as manager:
        for step in range(1, 5):
            run.run(manager, [step])
            manifest = run.manifest(manager, step)
            assert manifest.kind == "full"
            assert step == 1 or "retention might delete parents" in manifest.reason
        assert on_disk(tmp_path) == {3, 4}
        restored = manager.restore(4, args=cnr.args.Restore(run.state))
        run.same(restored.state, run.truth[4])
        run.check(manager, 3)


def test_plain_orbax_with_our_policy_writes_deltas_and_keeps_their_parents(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, model = tiny_run(), Model(keeping.LatestN(2))
    options = cnr.Options(codec="raw", policy=cnr.Consecutive(max_chain=3))

    def open_plain() -> ocp.CheckpointManager:
        registry = cnr.handler_registry(run.tables, options)
        ours = registry.preservation_policy(keeping.LatestN(2))
        return ocp.CheckpointManager(
            tmp_path,
            options=ocp.CheckpointManagerOptions(preservation_policy=ours),
            handler_registry=registry,
        )

    manager = open_plain()
    for step in range(1, 9):
        if step == 5:
            manager.close()
            manager = open_plain()
            args = cnr.args.Restore(run.state)
            run.state, run.touched = manager.restore(4, args=args)
        run.run(manager, [step])
        # Full until the policy was asked once by this manager, that is, after each opening.
        kind = run.manifest(manager, step).kind
        assert kind == ("full" if step in (1, 5) else "delta"), step
        kept = model.saved(step, parent_of(run, manager, step))
        assert on_disk(tmp_path) == kept
        check_chains(tmp_path, kept)
    assert len(on_disk(tmp_path)) < 8
    for step in on_disk(tmp_path):
        run.check(manager, step)
    manager.close()


def test_one_registry_does_not_serve_two_roots(tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run()
    registry = cnr.handler_registry(run.tables, cnr.Options(codec="raw"))
    with ocp.CheckpointManager(tmp_path / "a", handler_registry=registry) as manager:
        run.run(manager, [1])
    place = Place(root=epath.Path(tmp_path / "b"), directory="2", item="default")
    with pytest.raises(cnr.errors.OptionError, match="one item of one root"):
        registry.handler.plan(place, cnr.args.Save(run.state, run.touched))


@pytest.mark.parametrize("item", ["model", None], ids=["named", "found"])
def test_a_step_holds_state_standard_json_and_grain_items_together(
    tiny_run: Any, tmp_path: Path, item: str | None
) -> None:
    run = tiny_run()

    def batches() -> Any:
        return iter(grain.MapDataset.range(100).shuffle(seed=3).batch(4))

    def open_named(policy: Any) -> cnr.CheckpointManager:
        return cnr.CheckpointManager(
            tmp_path,
            tables=run.tables,
            options=cnr.Options(codec="raw", policy=policy),
            orbax_options=ocp.CheckpointManagerOptions(max_to_keep=2),
            item=item,
        )

    def items(iterator: Any, step: int) -> Any:
        return ocp.args.Composite(
            model=cnr.args.Save(run.state, run.touched),
            extra=ocp.args.StandardSave({"average": np.arange(3.0) + step}),
            meta=ocp.args.JsonSave({"epoch": step}),
            data=grain.checkpoint.CheckpointSave(iterator),
        )

    iterator, following = batches(), {}
    with open_named(cnr.Consecutive(max_chain=2)) as manager:
        for step in range(1, 6):
            run.train(step)
            next(iterator)
            assert manager.save(step, args=items(iterator, step))
            run.truth[step] = run.values()
            manager.wait_until_finished()
        # 1 full, 2 and 3 deltas, 4 full, 5 delta.
        assert on_disk(tmp_path) == {4, 5}
        following = [next(iterator).tolist() for _ in range(3)]
    assert run.manifest(manager, 5, item="model").kind == "delta"
    assert {p.name for p in (tmp_path / "5").iterdir() if p.is_dir()} == {
        *("model", "extra", "meta", "data")
    }

    with open_named(cnr.Consecutive()) as manager:
        iterator = batches()
        extra = {"average": np.zeros(3)}
        restored = manager.restore(
            None,
            args=ocp.args.Composite(
                model=cnr.args.Restore(run.state),
                extra=ocp.args.StandardRestore(extra),
                meta=ocp.args.JsonRestore(),
                data=grain.checkpoint.CheckpointRestore(iterator),
            ),
        )
        run.same(restored.model.state, run.truth[5])
        np.testing.assert_array_equal(restored.extra["average"], np.arange(3.0) + 5)
        assert restored.meta == {"epoch": 5}
        assert [next(iterator).tolist() for _ in range(3)] == following
        run.state, run.touched = restored.model
        run.train(6)
        assert manager.save(6, args=items(iterator, 6))
        manager.wait_until_finished()
        manifest = run.manifest(manager, 6, item="model")
        assert manifest.kind == "delta" and manifest.parent.directory == "5"
        restored = manager.restore(6).model
        np.testing.assert_array_equal(
            restored.state["params"]["user"]["embedding"],
            run.state["params"]["user"]["embedding"],
        )


def test_a_composite_of_orbax_takes_the_state_alone(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    run.train(1)
    more = {"average": np.arange(3.0)}
    with open_manager(tmp_path, run, cnr.Full()) as manager:
        args = ocp.args.Composite(
            model=cnr.args.Save(run.state, run.touched),
            more=ocp.args.StandardSave(more),
        )
        manager.save(1, args=args)
    # As a program asks that saved both by plain Orbax.
    asked = ocp.args.Composite(
        model=ocp.args.StandardRestore(run.state), more=ocp.args.StandardRestore(more)
    )
    for step in (1, None):
        with open_manager(tmp_path, run, cnr.Full()) as manager:
            got = manager.restore(step, args=asked)
            assert set(got.keys()) == {"model", "more"}
            jax.tree.map(np.testing.assert_array_equal, got.model, run.state)
            np.testing.assert_array_equal(got.more["average"], more["average"])
    assert type(asked.model) is ocp.args.StandardRestore, "it is the caller's"


def test_a_state_saved_as_another_item_than_the_managers_is_refused(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with cnr.CheckpointManager(tmp_path, tables=run.tables, item="model") as manager:
        state = cnr.args.Save(run.state, run.touched)
        with pytest.raises(cnr.errors.OptionError, match="expected 'model'"):
            manager.save(1, args=ocp.args.Composite(other=state))
        with pytest.raises(cnr.errors.OptionError, match="expected 'model'"):
            manager.save(1, args=state)
    assert on_disk(tmp_path) == set()


def test_what_a_save_of_other_items_drops_goes_children_first(
    tiny_run: Any, tmp_path: Path
) -> None:
    """By the names of their folders the parent, 9, would come before the delta, 10."""
    run, others = tiny_run(), ocp.args.Composite(extra=ocp.args.JsonSave({"epoch": 1}))

    def items(step: int) -> ocp.args.Composite:
        run.train(step)
        given = cnr.args.Save(run.state, run.touched, full=step == 11)
        return ocp.args.Composite(state=given)

    orbax = {"preservation_policy": keeping.LatestN(1)}
    with run.open(tmp_path, orbax) as manager:
        for step, args in ((9, items(9)), (10, items(10))):
            manager.save(step, args=args)
        manager.wait_until_finished()
        assert manager.last_report is not None and manager.last_report.kind == "delta"
        for step, args, left in (
            (11, items(11), {9, 10, 11}),
            (12, others, {9, 10, 11}),
            (13, others, {11}),
        ):
            fault = Fault("rename", action="EIO", match=f"{tmp_path}/10")
            with failing(tmp_path, fault) if step < 13 else contextlib.nullcontext():
                manager.save(step, args=args)
                manager.wait_until_finished()
            found = {int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()}
            assert found == left
        assert manager.all_steps() == [11]


def test_an_item_in_the_place_of_the_state_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not saved by this library does not make itself durable."""
    synced = set[str]()
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    with cnr.CheckpointManager(tmp_path, item="state") as manager:
        monkeypatch.setattr(os, "fsync", note)
        args = ocp.args.Composite(state=ocp.args.JsonSave({"epoch": 1}))
        manager.save(1, args=args)
        manager.wait_until_finished()
    assert {"metadata", "state"} <= synced


@pytest.mark.parametrize("deletes", ["by itself", "for a save"])
def test_what_is_listed_is_there_if_all_storage_fails_while_a_step_is_removed(
    tiny_run: Any, tmp_path: Path, deletes: str
) -> None:
    """Also if the step can be renamed, and then neither synced nor renamed back."""
    removed = 0
    for nth in range(1, 60):
        run, root = tiny_run(), tmp_path / str(nth)
        with open_manager(root, run, cnr.Full(), max_to_keep=2) as manager:
            run.run(manager, [1, 2])
            run.train(3)
            fault = Fault("any", nth=nth, action="EIO", times=0)
            try:
                with failing(root, fault):
                    if deletes == "by itself":
                        manager.delete(1)
                    else:
                        manager.save(3, args=cnr.args.Save(run.state, run.touched))
                        manager.wait_until_finished()
            except FaultNotHitError:
                break
            except (OSError, errors.CnrError):
                pass
            listed, held = manager.all_steps(), on_disk(root)
            assert set(listed) == held
            if any(".removed-" in path.name for path in root.iterdir()):
                removed += 1
                assert 1 not in held
            for step in listed:
                manager.restore(step, args=cnr.args.Restore(run.state))
            # The next save goes on as if nothing had been.
            run.run(manager, [5])
            assert set(manager.all_steps()) == on_disk(root)
    else:
        raise AssertionError("there are more calls than were tried")
    assert removed, "the step is renamed at some of these calls"


def test_a_step_on_which_another_manager_has_saved_since_is_not_deleted(
    tiny_run: Any, opened: Any
) -> None:
    """Also by one that has never saved, and lists the root as it was."""
    run, looks = tiny_run(), tiny_run()
    manager = opened(run, policy=cnr.Consecutive())
    run.run(manager, [1, 2, 3])
    other = opened(looks)
    looks.restore(other, 3)
    run.run(manager, [4])
    with pytest.raises(errors.DependentsExistError, match="step 3: 4 depend"):
        other.delete(3)
    other.reload()
    other.delete(4)
    other.delete(3)
    assert manager.directory.joinpath("2").exists()
    run.run(manager, [5])
    for step in manager.all_steps():
        run.check(manager, step)


def test_a_step_that_another_manager_has_saved_anew_is_not_deleted(
    tiny_run: Any, opened: Any
) -> None:
    run, looks = tiny_run(), tiny_run()
    manager = opened(run, policy=cnr.Full())
    run.run(manager, [1, 2])
    other = opened(looks)
    looks.restore(other, 2)
    run.restore(manager, 1)
    run.run(manager, [2])
    with pytest.raises(errors.WriterError, match="has saved it anew"):
        other.delete(2)
    run.check(manager, 2)
    other.reload()
    other.delete(2)
    run.check(manager, 1)


def test_nobody_saves_on_a_step_while_it_is_deleted(
    tiny_run: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    manager = opened(run, policy=cnr.Consecutive())
    run.run(manager, [1, 2, 3])
    again = tiny_run()
    other = opened(again, policy=cnr.Consecutive())
    again.restore(other, 3)
    again.truth = run.truth
    real, saves = aside.keep_away, []

    def meanwhile(*args: Any) -> None:
        if not saves:
            saves.append(threading.Thread(target=again.run, args=(other, [4])))
            saves[0].start()
            saves[0].join(0.5)
            assert not (other.directory / "4").exists()
        real(*args)

    monkeypatch.setattr(aside, "keep_away", meanwhile)
    manager.delete(3)
    saves[0].join()
    assert other.all_steps() == [1, 2, 4]
    for step in (1, 2, 4):
        again.check(other, step)


def test_a_step_is_not_gone_because_the_folder_for_removed_steps_is(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    orbax = {"todelete_subdir": "trash"}
    with run.open(tmp_path, orbax, policy=cnr.Full()) as manager:
        run.run(manager, [1, 2])
        real = os.rename

        def rename(source: Any, target: Any, *args: Any) -> None:
            if "trash" in os.fspath(target):
                shutil.rmtree(tmp_path / "trash")
            real(source, target, *args)

        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", rename)
            with pytest.raises(FileNotFoundError):
                manager.delete(1)
        assert manager.all_steps() == [1, 2]
        run.check(manager, 1)
        manager.delete(1)
        assert manager.all_steps() == [2]


def test_steps_that_come_back_late_after_a_failed_rollback_can_be_restored(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.Full()) as manager:
        run.run(manager, [1, 2, 3])
        run.restore(manager, 1)
        run.train(2)
        fault = Fault("any", nth=8, action="EIO", times=0)
        with failing(tmp_path, fault), pytest.raises((OSError, errors.SaveError)):
            manager.save(2, args=cnr.args.Save(run.state, run.touched))
            manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
        for step in (2, 3):
            restored = manager.restore(step, args=cnr.args.Restore(run.state))
            run.same(restored.state, run.truth[step])
