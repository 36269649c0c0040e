"""`bits="auto"`: the width follows the expected restores, and is 8 after more than these.

Through managers of which each knows only what is on disk, as after a failure; the widths are read
from the manifests that say how every row is stored.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax.format.tiles import load_process
from cnr_jax.rows.codecs import Asymmetric

# Compiles sooner than "adaptive", which takes its widths in the same way.
QUICK = "asymmetric"


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Opens managers of one root, after closing the one before."""
    managers: list[cnr.CheckpointManager] = []

    def open_(run: Any, root: str = "root", **options: Any) -> Any:
        for manager in managers:
            manager.close()
        given = {"codec": QUICK, "policy": cnr.Consecutive(), **options}
        managers.append(
            cnr.CheckpointManager(
                tmp_path / root, tables=run.tables, options=cnr.Options(**given)
            )
        )
        return managers[-1]

    yield open_
    for manager in managers:
        manager.close()


def widths(manager: Any, step: int) -> dict[str, set[int]]:
    """Bits of the codes of each table in one step, by its manifests."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in Path(manager.directory).glob(f"{step}/*/manifest.p*.json"):
        manifest = load_process(path.read_bytes(), str(path))
        for tile in manifest.tiles:
            for segment in tile.segments:
                codec = manifest.codecs[segment.codec]
                if tile.leaf == "table" and codec.name != "cnr.raw":
                    found[tile.table].add(codec.configuration["bits"])
    return dict(found)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of widths."""
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "cnr_jax.checkpointer.saving.widening"
    ]


def both(bits: int) -> dict[str, set[int]]:
    return {"user": {bits}, "item": {bits}}


def restart(run: Any, opened: Any, step: int | None = None, **options: Any) -> Any:
    """Goes on with a manager of its own."""
    manager = opened(run, **options)
    run.restore(manager, step)
    return manager


def test_width_is_of_the_expectation_until_there_are_more_restores(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    auto = {"bits": "auto", "expected_restores": 1}
    run = tiny_run()
    manager = opened(run, **auto)
    run.run(manager, [0, 1])
    assert widths(manager, 0) == widths(manager, 1) == both(2)
    manager = restart(run, opened, **auto)
    run.run(manager, [2])
    assert widths(manager, 2) == both(2)
    report = manager.last_report
    assert (report.kind, report.auto_bits, report.restores) == ("delta", 2, 1)
    assert "8 bits" not in report.reason
    assert said(caplog) == []

    manager = restart(run, opened, **auto)
    before = run.values()
    run.run(manager, [3, 4])
    assert widths(manager, 3) == widths(manager, 4) == both(8)
    report = manager.last_report
    assert (report.kind, report.auto_bits, report.restores) == ("delta", 8, 2)
    assert " 8 bits," in str(report)
    reason = "rows since the last save (step 3); 8 bits: restored 2 times, 1 expected"
    assert report.reason == run.manifest(manager, 4).reason == reason
    assert said(caplog) == [
        "from step 3 on saves take 8 bits, not 2: the run was restored 2 times,"
        " expected_restores=1"
    ]

    # What rests on rows of two bits comes back as finely as eight allow.
    manager = restart(run, opened, **auto)
    for name in ("user", "item"):
        path = f"['params']['{name}']['embedding']"
        saved, got = run.truth[4][path], run.values()[path]
        touched = (saved != before[path]).any(axis=1)
        assert 0 < touched.sum() < len(touched)
        np.testing.assert_array_equal(got[~touched], before[path][~touched])
        step = np.ptp(saved[touched], axis=1, keepdims=True) / 255
        assert (np.abs(got - saved)[touched] <= 1.01 * step).all()
    # Wider once, wide for good.
    run.run(manager, [5])
    assert widths(manager, 5) == both(8)
    assert run.manifest(manager, 5).restores == 3


def test_width_follows_another_expectation_and_goes_back_with_a_rollback(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    none_expected = {"bits": "auto", "expected_restores": 0.5}
    manager = opened(run, **none_expected)
    run.run(manager, [0])
    assert widths(manager, 0) == both(2)
    for step in (1, 2):
        manager = restart(run, opened, **none_expected)
        run.run(manager, [step])
        assert widths(manager, step) == both(8)
    assert run.manifest(manager, 2).restores == 2
    caplog.clear()
    with caplog.at_level(logging.INFO, "cnr_jax.checkpointer.saving.widening"):
        manager = restart(run, opened, bits="auto", expected_restores=20)
        run.run(manager, [3, 4])
    assert widths(manager, 3) == widths(manager, 4) == both(4)
    assert said(caplog)[1:] == [
        "options were given otherwise than at step 2: expected_restores=20 (was 0.5)",
        "saves take 4 bits, for 20 restores",
    ]
    # Not given again, it is the one of the run; three restores were not too many for that.
    manager = restart(run, opened, bits="auto")
    run.run(manager, [5])
    assert widths(manager, 5) == both(4)
    assert "expected_restores" in manager.last_report.inherited
    # The state of step 0 was never restored: this is the first time.
    caplog.clear()
    with caplog.at_level(logging.INFO, "cnr_jax.checkpointer.saving.warm_up"):
        manager = restart(run, opened, 0, bits="auto", expected_restores=1)
    assert "compiling for dithered codes of 2 bits" in caplog.text, (
        "eight were to be expected"
    )
    run.salt = 1
    run.run(manager, [6])
    assert run.manifest(manager, 6).restores == 1
    assert widths(manager, 6) == both(2)


def test_twenty_restores_are_expected_where_neither_options_nor_run_say_so(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    run.run(opened(run, bits=8), [0])
    with caplog.at_level(logging.INFO, "cnr_jax.checkpointer.saving.widening"):
        manager = restart(run, opened, bits="auto")
        run.run(manager, [1])
    assert widths(manager, 1) == both(4)
    assert said(caplog)[1:] == [
        "options were given otherwise than at step 0: bits='auto' (was 8)",
        "bits='auto' without expected_restores: saves take 4 bits, for up to 20 restores",
    ]


@pytest.mark.parametrize(
    ("options", "at_first", "exceeded"),
    [
        (
            {"bits": "auto", "tables": {"item": cnr.TableOptions(bits=3)}},
            (2, 3),
            (8, 3),
        ),
        (
            {"bits": 4, "tables": {"item": cnr.TableOptions(bits="auto")}},
            (4, 2),
            (4, 8),
        ),
        (
            {
                "bits": "auto",
                "tables": {
                    "item": cnr.TableOptions(codec=Asymmetric(bits=3, refits=0))
                },
            },
            (2, 3),
            (8, 3),
        ),
        (
            {
                "bits": "auto",
                "codec": Asymmetric(bits=4, refits=0),
                "tables": {"item": cnr.TableOptions(codec=QUICK)},
            },
            (4, 2),
            (4, 8),
        ),
    ],
    ids=["fixed table", "auto table", "object for a table", "table of another codec"],
)
def test_tables_go_their_own_ways(
    tiny_run: Any, opened: Any, options: Any, at_first: Any, exceeded: Any
) -> None:
    run = tiny_run()
    options = {"expected_restores": 0, **options}
    manager = opened(run, **options)
    run.run(manager, [0])
    assert widths(manager, 0) == {"user": {at_first[0]}, "item": {at_first[1]}}
    manager = restart(run, opened, **options)
    run.run(manager, [1])
    assert widths(manager, 1) == {"user": {exceeded[0]}, "item": {exceeded[1]}}
    assert manager.last_report.auto_bits == 8


def test_fixed_widths_and_raw_rows_know_nothing_of_restores(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for root, options in (("fixed", {"bits": 3}), ("raw", {"codec": "raw"})):
        run = tiny_run()
        manager = opened(run, root, **options)
        run.run(manager, [0])
        run.restore(manager, 0)
        run.run(manager, [1])
        assert widths(manager, 1) == (both(3) if root == "fixed" else {})
        assert manager.last_report.auto_bits is None
        assert manager.last_report.restores == 1
        assert " bits" not in str(manager.last_report) + manager.last_report.reason
    assert said(caplog) == []


class Symmetric(cnr.Consecutive):
    """A policy that names a codec."""

    def decide(self, history: Any) -> cnr.Decision:
        decided = super().decide(history)
        return cnr.Decision(
            kind=decided.kind, parent=decided.parent, codec="symmetric", reason=""
        )


def test_codec_named_by_a_policy_takes_the_width_too(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    options = {"bits": "auto", "expected_restores": 0, "policy": Symmetric()}
    manager = opened(run, **options)
    run.run(manager, [0, 1])
    run.restore(manager, 1)
    run.run(manager, [2])
    assert [widths(manager, step) for step in (1, 2)] == [both(2), both(8)]


# The state may have been restored though nothing proves it: that costs bytes, never accuracy.


@pytest.mark.parametrize("how", ["touched anew", "only looked at", "from elsewhere"])
def test_restores_count_where_the_lineage_does_not_show_them(
    tiny_run: Any, opened: Any, how: str
) -> None:
    run, auto = tiny_run(), {"bits": "auto", "expected_restores": 0}
    manager = opened(run, "elsewhere" if how == "from elsewhere" else "root", **auto)
    run.run(manager, [0])
    where = manager.directory
    if how == "from elsewhere":
        manager = opened(run, **auto)
        run.run(manager, [0])
    assert widths(manager, 0) == both(2)
    args = cnr.args.Restore(run.state)
    back = manager.restore(
        0, args=args, directory=where if how == "from elsewhere" else None
    )
    if how != "only looked at":
        run.state = back.state
    if how == "touched anew":
        run.touched = cnr.init_touched(run.state, run.tables)
    run.run(manager, [1])
    assert manager.last_report.kind == "full"
    assert manager.last_report.restores == 1
    assert widths(manager, 1) == both(8)


def test_state_that_never_was_restored_takes_few_bits_in_a_root_that_was(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, auto = tiny_run(), {"bits": "auto", "expected_restores": 0}
    run.run(opened(run, **auto), [0])
    manager = restart(run, opened, **auto)
    run.run(manager, [1])
    assert widths(manager, 1) == both(8)
    fresh = tiny_run(salt=1)
    manager = opened(fresh, **auto, new_run=True)
    with caplog.at_level(logging.INFO, "cnr_jax.checkpointer.saving.warm_up"):
        fresh.run(manager, [2])
    assert widths(manager, 2) == both(2)
    assert "compiling" not in caplog.text, "a new run is foreseen"
