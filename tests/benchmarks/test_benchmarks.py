"""The benchmarks' own machinery: runs, failures and figures, and what the workload draws."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import cnr_jax as cnr

pytestmark = pytest.mark.tools

BENCHMARKS = Path(__file__).parent

SCRIPT = """
    '''A benchmark of nothing.'''
    import json, sys
    from pathlib import Path

    sys.path.insert(0, {folder!r})
    import harness
    from harness import Case

    LOG = Path(__file__).with_name("log")


    def plan(quick):
        cases = [Case("a", {{"value": 1}}, "g"), Case("b", {{"value": 5}}, "g")]
        cases.append(Case("once", {{"value": 7}}, "h", once=True))
        cases.append(Case("absent", {{}}, needs=("no_such_package",)))
        return cases if quick else [*cases, Case("bad", {{"value": 0}})]


    def child(params, root):
        assert not list(root.iterdir()), "not empty"
        assert list(root.parent.iterdir()) == [root], "an earlier folder is still there"
        (root / "file").write_bytes(b"x" * 10)
        files, size = harness.files_and_bytes(root)
        with LOG.open("a") as log:
            log.write(json.dumps([params["value"], str(root)]) + "\\n")
        count = len(LOG.read_text().splitlines())
        return {{"size": size, "count": count, "inverse": 1 / params["value"]}}


    def present(results):
        print("medians", [case.median("count") for case in results.group("g")])


    if __name__ == "__main__":
        harness.main(__doc__, plan, child, present, repeats=(2, 3))
"""


def run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, list[Any], dict[str, Any]]:
    """Exit code, output, what children logged, and the JSON report."""
    script = tmp_path / "nothing.py"
    script.write_text(textwrap.dedent(SCRIPT).format(folder=str(BENCHMARKS)))
    report = tmp_path / "report.json"
    command = [sys.executable, str(script), "--json", str(report), *arguments]
    code = subprocess.run([*command, "--dir", str(tmp_path)], check=False).returncode
    lines = (tmp_path / "log").read_text().splitlines()
    output = capfd.readouterr().out
    return code, output, [json.loads(x) for x in lines], json.loads(report.read_text())


def test_cases_take_turns_in_fresh_folders(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, output, log, report = run(tmp_path, capfd, "--quick")
    assert code == 0
    assert [value for value, _ in log] == [1, 5, 7, 1, 5, 1, 5]
    roots = [root for _, root in log]
    assert len(set(roots)) == len(roots)
    assert not any(Path(root).exists() for root in roots)
    assert "left out: absent (no_such_package not installed)" in output
    assert "medians [4.0, 5.0]" in output
    a, b, once = report["cases"]
    assert [run["count"] for run in a["runs"]] == [1, 4, 6]
    assert (a["median"]["count"], a["min"]["count"], a["max"]["count"]) == (4, 1, 6)
    assert b["median"] == {**b["median"], "size": 10, "inverse": 0.2}
    assert len(once["runs"]) == 1
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["disk_write_mb_per_sec"] > 0


def test_a_failed_run_is_reported_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, output, log, report = run(tmp_path, capfd, "--repeats", "1")
    assert code == 1
    assert [value for value, _ in log] == [1, 5, 7, 0]
    assert "FAILED bad" in output and "ZeroDivisionError" in output
    bad = report["cases"][-1]
    assert bad["runs"] == [] and "ZeroDivisionError" in bad["failures"]["0"]
    assert report["cases"][0]["runs"][0]["inverse"] == 1


def test_ratios_are_of_runs_of_one_turn(benchmarks: Any) -> None:
    results = benchmarks("results")
    one = results.Measured(label="one", group="", params={})
    two = results.Measured(label="two", group="", params={})
    one.runs.update({0: {"secs": 1.0}, 1: {"secs": 9.0}, 2: {"secs": 3.0}})
    one.runs[3] = {"secs": 1.0}
    two.runs.update({0: {"late": 2.0}, 2: {"late": 12.0}, 3: {"late": -1.0}})
    found = results.Results([one, two])
    assert found.ratios("one", "two", "secs", "late") == [0.5, 0.25]
    assert found.ratios("one", "none", "secs") == []
    assert one.text("secs", "{:.0f}", 10) == "20 (10-90)"
    assert two.text("secs") == "-"


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.26, 1.0])
def test_touched_rows_are_exactly_as_many_as_asked_for(
    benchmarks: Any, kind: str, share: float
) -> None:
    workload = benchmarks("workload")
    rows = 5000
    ids = workload.touched_rows(rows, share, kind, seed=3)
    assert ids.dtype == np.int32 and len(ids) == round(rows * share)
    assert (np.diff(ids) > 0).all()
    assert not len(ids) or (0 <= ids[0] and ids[-1] < rows)
    np.testing.assert_array_equal(ids, workload.touched_rows(rows, share, kind, seed=3))


def test_rows_since_any_baseline_grow_as_in_the_paper(benchmarks: Any) -> None:
    workload = benchmarks("workload")
    rows = 50_000
    lookups = workload.Popularity(rows)
    for _ in range(2):
        since = np.zeros(rows, bool)
        for share in workload.SINCE_BASELINE:
            since[lookups.interval()] = True
            assert abs(since.mean() - share) < 0.01


def test_steps_change_and_record_the_rows_they_look_up(benchmarks: Any) -> None:
    workload = benchmarks("workload")
    state = workload.table_state(2000, 8, devices=2)
    assert len(state["table"].sharding.device_set) == 2
    before = jax.tree.map(np.array, state)
    touched = cnr.init_touched(state, workload.tables_of(state))
    ids = np.arange(0, 2000, 7, dtype=np.int32)
    state, touched = workload.touch(state, touched, ids)
    check_changed(state, touched, before, ids)
    before = jax.tree.map(np.array, state)
    touched = cnr.reset_touched(touched)
    step = workload.make_step(True, products=1, sines=1)
    state, touched = step(state, touched, ids[:50])
    check_changed(state, touched, before, ids[:50])
    assert int(state["dense"]["step"]) == 2


def check_changed(state: Any, touched: Any, before: Any, ids: np.ndarray) -> None:
    """Exactly these rows and their slots differ, and are recorded."""
    table = (np.array(state["table"]) != before["table"]).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(table), ids)
    slot = np.array(state["slot"]) != before["slot"]
    np.testing.assert_array_equal(np.flatnonzero(slot), ids)
    np.testing.assert_array_equal(np.flatnonzero(touched.stamps["table"]), ids)


def test_a_check_of_a_restore_sees_one_wrong_element(benchmarks: Any) -> None:
    checks = benchmarks("checks")
    want = {"table": np.linspace(0, 1, 64, dtype=np.float32).reshape(4, 16)}
    got = {"table": want["table"].copy()}
    checks.check_restored(got, want)
    got["table"][2, 3] = np.nextafter(got["table"][2, 3], 2)
    with pytest.raises(AssertionError, match="table: not what was saved"):
        checks.check_restored(got, want)
    checks.check_restored(got, want, bits=4)
    step = (want["table"][2, 15] - want["table"][2, 0]) / 15
    got["table"][2, 3] = want["table"][2, 3] + 2 * step
    with pytest.raises(AssertionError, match=r"off by 2\.00 steps of 4 bits"):
        checks.check_restored(got, want, bits=4)
    got["table"] = want["table"] + 0.4 * step
    with pytest.raises(AssertionError, match=r"off by 0\.400 steps of 4 bits"):
        checks.check_restored(got, want, bits=4)


def test_a_check_compares_rows_without_a_range_exactly(benchmarks: Any) -> None:
    checks = benchmarks("checks")
    want = np.linspace(-3, 3, 96, dtype=np.float32).reshape(6, 16)
    want[0], want[1], want[2] = 0.013, 0, 1e38
    want[2, ::2] = -3e38
    want[3, 5], want[4, 5] = np.nan, np.inf
    got = want.copy()
    step = (want[5, 15] - want[5, 0]) / 15
    got[5] += 0.3 * step
    got[2, 1] += 1e36
    checks.check_restored({"table": got}, {"table": want}, bits=4)
    got[1] = -0.0
    checks.check_restored({"table": got}, {"table": want}, bits=4)
    for row in (0, 1, 3, 4):
        wrong = got.copy()
        wrong[row, 7] = np.nextafter(wrong[row, 7], 9)
        with pytest.raises(AssertionError, match="rows without a range"):
            checks.check_restored({"table": wrong}, {"table": want}, bits=4)
    checks.check_restored({"table": want[:2]}, {"table": want[:2]}, bits=4)


def test_what_is_saved_is_checked_once(benchmarks: Any, tmp_path: Path) -> None:
    checks = benchmarks("checks")
    first, second = tmp_path / "first", tmp_path / "second"
    assert checks.first_check(first, {"rows": 1, "system": "a"})
    assert checks.first_check(first, {"rows": 2, "system": "a"})
    assert not checks.first_check(second, {"system": "a", "rows": 1})


def test_many_steps_leave_values_of_sane_size(benchmarks: Any) -> None:
    """Batches look popular rows up in every step, some of them many times."""
    workload = benchmarks("workload")
    rows = 2000
    state = workload.table_state(rows, 8)
    step = workload.make_step(False, products=1, sines=1)
    ids = [workload.batch_ids(rows, number) for number in range(4)]
    for number in range(200):
        state, _ = step(state, None, ids[number % 4])
    for leaf in jax.tree.leaves(state):
        assert np.isfinite(leaf).all()
    table = np.array(state["table"])
    assert np.abs(table).max() < 10
    looked_up = np.unique(np.concatenate(ids))
    assert np.ptp(table[looked_up], axis=1).min() > 1e-3


def test_extra_peak_of_memory_is_seen(benchmarks: Any) -> None:
    measures = benchmarks("measures")
    with measures.PeakMemory() as memory:
        held = np.ones(4 << 20, np.uint8)
        del held
    assert memory.extra_bytes >= 3 << 20
