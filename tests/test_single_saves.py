"""Saves of another kind than the run's others: full because that was asked for, or of all bits."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr

from .conftest import each_of, flip

ROUNDED: dict[str, Any] = {
    "codec": "adaptive",
    "bits": 4,
    "slot_codec": "bfloat16",
    "tables": {"item": cnr.TableOptions(codec="symmetric", bits=8)},
}


def save(run: Any, manager: Any, step: int, **asked: bool) -> Any:
    """Trains, saves, and returns what the manifest says."""
    run.train(step)
    args = cnr.args.Save(run.state, run.touched, **asked)
    assert manager.save(step, args=args)
    manager.wait_until_finished()
    run.truth[step] = run.values()
    found = run.manifest(manager, step)
    assert manager.last_report.reason == found.reason
    return found


def is_same(run: Any, manager: Any, step: int) -> bool:
    """Whether a step comes back bit for bit."""
    try:
        run.check(manager, step)
    except AssertionError:
        return False
    return True


@each_of("policy", [cnr.Consecutive(), cnr.OneShot(), cnr.Intermittent()])
def test_a_full_save_that_was_asked_for_is_the_baseline_of_later_deltas(
    tiny_run: Any, opened: Any, tmp_path: Path, policy: Any
) -> None:
    run = tiny_run()
    manager = opened(run, tmp_path / policy.name, policy=policy)
    run.run(manager, range(2))
    asked = save(run, manager, 2, full=True)
    assert (asked.kind, asked.parent) == ("full", None)
    assert asked.reason == "a full save was asked for"
    assert [each.step for each in asked.history] == [2]
    after = save(run, manager, 3)
    assert after.kind == "delta" and after.parent.directory == "2"
    assert [(each.step, each.kind) for each in after.history] == [
        (2, "full"),
        (3, "delta"),
    ]
    for step in range(4):
        run.check(manager, step)


def test_a_save_of_all_bits_is_full_and_later_deltas_of_few_bits_rest_on_it(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    manager = opened(run, **ROUNDED)
    save(run, manager, 0)
    save(run, manager, 1)
    assert not is_same(run, manager, 1)
    with caplog.at_level(logging.INFO, "cnr_jax"):
        exact = save(run, manager, 2, exact=True)
    assert exact.kind == "full"
    assert exact.reason == "all bits were asked for, and the chain has rounded rows"
    assert manager.last_report.mean_row_error is None
    # 64 and 32 rows of 4 float32, and a float32 for each in the slots. Rounded: 2 or 4 bytes of
    # codes a row with their 16-bit metadata, and 2 bytes of the slot.
    said = [line for line in caplog.messages if "exactly" in line]
    assert len(said) == 1 and said[0].startswith("step 2 is saved exactly: ")
    assert " 1,920 bytes" in said[0], said
    assert exact.totals.table_bytes + exact.totals.slot_bytes >= 1920
    run.check(manager, 2)
    after = save(run, manager, 3)
    assert after.kind == "delta" and after.parent.directory == "2"
    assert manager.last_report.mean_row_error > 0
    with cnr.CheckpointManager(manager.directory, tables=run.tables) as reader:
        got = run.values(reader.restore(3, args=cnr.args.Restore(run.state)).state)
    for name in ("user", "item"):
        path = f"['params']['{name}']['embedding']"
        want, before = run.truth[3][path], run.truth[2][path]
        touched = (want != before).any(axis=1)
        np.testing.assert_array_equal(got[path][~touched], want[~touched])
        assert touched.any() and (got[path][touched] != want[touched]).any()


def test_a_save_of_all_bits_is_a_delta_where_its_chain_holds_all_bits(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run, **ROUNDED)
    first = save(run, manager, 0, exact=True)
    assert first.reason == "no baseline yet; all bits were asked for"
    second = save(run, manager, 1, exact=True)
    assert (second.kind, second.parent.directory) == ("delta", "0")
    assert second.reason == "rows since the last save (step 0); all bits were asked for"
    run.check(manager, 1)
    save(run, manager, 2)
    assert not is_same(run, manager, 2)
    third = save(run, manager, 3, exact=True)
    assert third.kind == "full" and "rounded" in third.reason
    run.check(manager, 3)
    both = save(run, manager, 4, exact=True, full=True)
    assert both.kind == "full"
    assert both.reason == "a full save was asked for; all bits were asked for"


@each_of("option", [{"slot_codec": "bfloat16"}, {"compression": "zstd"}, {}])
def test_what_a_run_rounds_decides_whether_its_chain_holds_all_bits(
    tiny_run: Any, opened: Any, tmp_path: Path, option: dict[str, Any]
) -> None:
    run = tiny_run()
    root = tmp_path / "-".join(["root", *option])
    manager = opened(run, root, **option)
    save(run, manager, 0)
    exact = save(run, manager, 1, exact=True)
    assert exact.kind == ("full" if "slot_codec" in option else "delta")
    run.check(manager, 1)


def test_a_run_that_was_restored_knows_whether_its_chain_holds_all_bits(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run, **ROUNDED)
    save(run, manager, 0, exact=True)
    save(run, manager, 1)
    manager.close()
    for step, kind in ((0, "delta"), (1, "full")):
        again = opened(run, codec="raw")
        run.restore(again, step)
        exact = save(run, again, 10 + step, exact=True)
        assert exact.kind == kind
        run.check(again, 10 + step)
        again.close()


def test_a_chain_that_cannot_be_read_does_not_hold_all_bits(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    manager = opened(run)
    save(run, manager, 0)
    flip(Path(manager.directory) / "0" / "default" / "manifest.p00000.json")
    exact = save(run, manager, 1, exact=True)
    assert exact.kind == "full"
    assert any("manifest.p00000.json" in line for line in caplog.messages)
    run.check(manager, 1)


class Names:
    """A policy that has the codec of its own."""

    name = "names"

    def decide(self, history: Any) -> cnr.Decision:
        return cnr.Decision(kind="full", parent=None, codec="asymmetric", reason="mine")


@each_of(
    "options",
    [
        {"policy": Names(), "codec": "adaptive", "bits": 2},
        {"codec": "asymmetric", "bits": "auto", "expected_restores": 1.0},
        {"codec": "codebook", "bits": 4, "tracking": "fingerprint"},
        {"codec": "asymmetric", "tracking": "audited", "drop_unchanged": True},
    ],
)
def test_all_bits_are_saved_whatever_else_decides_on_codecs(
    tiny_run: Any, opened: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = tiny_run()
    root = tmp_path / str(options["codec"]) / str(options.get("tracking"))
    manager = opened(run, root / str(options.get("bits")), **options)
    save(run, manager, 0)
    save(run, manager, 1, exact=True)
    run.check(manager, 1)
    save(run, manager, 2)
    assert not is_same(run, manager, 2)


@each_of("asked", [{}, {"full": True}, {"exact": True}])
def test_a_last_save_is_full_or_of_all_bits_if_that_was_asked_for(
    tiny_run: Any, opened: Any, tmp_path: Path, asked: dict[str, bool]
) -> None:
    run = tiny_run()
    root = tmp_path / "-".join(["root", *asked])
    manager = opened(run, root, save_on_sigterm=True, policy=cnr.Full(), **ROUNDED)
    save(run, manager, 0)
    signal.raise_signal(signal.SIGTERM)
    assert manager.reached_preemption(1)
    assert save(run, manager, 1, **asked).kind == ("full" if asked else "delta")
    assert is_same(run, manager, 1) == ("exact" in asked)
    manager.close()


def test_a_plain_manager_of_orbax_saves_so_too(tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run()
    options = cnr.Options(policy=cnr.Consecutive(), **ROUNDED)
    registry = cnr.handler_registry(run.tables, options)
    orbax_options = ocp.CheckpointManagerOptions(
        preservation_policy=registry.preservation_policy()
    )
    reasons = []
    with ocp.CheckpointManager(
        tmp_path / "plain", options=orbax_options, handler_registry=registry
    ) as manager:
        for step, asked in enumerate([{}, {"exact": True}, {"full": True}, {}]):
            run.train(step)
            manager.save(step, args=cnr.args.Save(run.state, run.touched, **asked))
            manager.wait_until_finished()
            run.truth[step] = run.values()
            reasons.append(run.manifest(manager, step).reason)
        assert run.manifest(manager, 2).kind == "full"
        run.check(manager, 1)
    assert "all bits were asked for" in reasons[1]
    assert reasons[2] == "a full save was asked for"


@each_of("wrong", [1, "yes", None, np.ones(1), jnp.array(True)])
def test_what_is_neither_true_nor_false_is_refused_by_name(wrong: Any) -> None:
    for name in ("full", "exact"):
        with pytest.raises(cnr.errors.OptionError, match=f"^{name} is .*, expected"):
            cnr.args.Save({"w": 1.0}, **{name: wrong})
    with pytest.raises(TypeError):
        cnr.args.Save({"w": 1.0}, None, True)  # type: ignore[call-arg]
    assert cnr.args.Save({"w": 1.0}, full=np.bool_(True)).full


def test_odd_values_come_back_from_a_save_of_all_bits(
    tmp_path: Path, unsynced: None
) -> None:
    odd = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38, 0.0]
    values = np.array([odd] * 8, np.float32)
    values[0, 0] = np.array([0x7FC12345], np.uint32).view(np.float32)[0]
    state = {"user": jax.device_put(values), "half": jnp.array(odd * 2, jnp.bfloat16)}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="adaptive", bits=2, tracking="fingerprint")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, exact=True))
        manager.wait_until_finished()
        got = manager.restore(0, args=cnr.args.Restore(state)).state
    for name, value in state.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name
