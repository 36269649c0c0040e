"""What `harm.py` says is right: restores without files are those of the manager, pairs, marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_jax as cnr

pytestmark = pytest.mark.tools


def test_restores_without_files_are_those_of_the_manager(
    benchmarks: Any, tmp_path: Path
) -> None:
    simulated, managed = (
        benchmarks("simulated_restores"),
        benchmarks("managed_restores"),
    )
    course = simulated.Course(benchmarks("small_trainings").factorization("Adam"), 10)
    stops = [4, 6, 8]
    for bits in (4, None):
        root = tmp_path / str(bits)
        codec: Any = {"codec": "adaptive", "bits": bits} if bits else {"codec": "raw"}
        options = cnr.Options(policy=cnr.Consecutive(), **codec)
        got = managed.restored(course, 3, stops, root, options)
        lineages = {
            stop: json.loads(
                (root / str(stop) / "default" / "manifest.json").read_text()
            )["lineage"]
            for stop in stops
        }
        assert len(set(lineages.values())) == 3
        widths = dict.fromkeys(course.training.tables, bits)
        rounding = simulated.Rounding(
            lambda _, w=widths: w, lineage=lineages.__getitem__
        )
        wanted, restores = course.restored(3, stops, rounding)
        assert [each.step for each in restores] == stops
        for name in course.training.tables:
            a, b = (np.asarray(run.state["params"][name]) for run in (got, wanted))
            np.testing.assert_array_equal(a, b)
        assert course.metrics(3, got) == course.metrics(3, wanted)
        unbroken = course.unbroken(3, 10)
        same = course.metrics(3, unbroken) == course.metrics(3, wanted)
        assert same == (bits is None)


def test_restores_are_where_a_case_says(benchmarks: Any) -> None:
    case = benchmarks("harm_report").Case
    assert case("m", "o", 300, 3, 30, "late").stops() == [210, 240, 270]
    assert case("m", "o", 300, 3, 30, "early").stops() == [30, 60, 90]
    assert case("m", "o", 400, 3, 99, "spread").stops() == [100, 200, 300]
    for one, widths in benchmarks("harm").cases():
        stops = one.stops()
        assert stops == sorted(set(stops)) and len(stops) == one.restores
        assert stops[0] > 0 and stops[-1] < one.steps
        assert 4 in widths and "auto" in widths


def test_more_bits_are_taken_where_rows_moved_by_less_than_codes_err(
    benchmarks: Any,
) -> None:
    harm, restored = benchmarks("harm"), benchmarks("simulated_restores").Restored
    case = benchmarks("harm_report").Case("m", "o", 300, 20, 7, "late")
    sizes = {"big": 10_000, "small": 10}

    def after(steps_moved: float) -> Any:
        # One row of two columns, of a range of 15 steps at 4 bits, that moved by so many.
        figures = {"rows": 1, "motion": 2 * steps_moved**2, "ranges": 2 * 15.0**2}
        return restored(7, {"big": 4, "small": 8}, {"big": figures})

    assert harm.noise(after(1.0)) == pytest.approx(1 / 6)
    # By motion of so many steps it is a half, as is drawn.
    assert harm.MOST_NOISE == 0.5
    least = (1 / 3) ** 0.5
    chosen = harm.widths_of("auto", case, sizes)
    assert chosen([]) == chosen([after(1.0)]) == {"big": 4, "small": 8}
    assert chosen([after(1.0), after(1.01 * least)]) == {"big": 4, "small": 8}
    assert chosen([after(1.0), after(0.99 * least)]) == {"big": 8, "small": 8}
    assert chosen([after(0.01)]) == {"big": None, "small": None}
    assert chosen([after(1.0)] * 21) == {"big": 8, "small": 8}
    assert harm.widths_of(3, case, sizes)([after(0.01)]) == {"big": 3, "small": 3}


def made_up(lost: list[float], bits: Any, noise: list[float]) -> list[dict[str, Any]]:
    """Runs of seeds that lose so many points of AUC, and as many percent of log loss."""
    case = {"model": "m", "optimizer": "o", "steps": 300, "restores": 2}
    case |= {"apart": 7, "where": "late", "bits": bits, "rounding": "auto"}
    runs = []
    for seed, points in enumerate(lost):
        before = {"auc": 0.7 + seed / 10, "log_loss": 0.5 + seed / 10}
        after = {
            "auc": before["auc"] - points / 100,
            "log_loss": before["log_loss"] * (1 + points / 100),
        }
        scopes = {"held_out": after, "lifetime": after}
        both = {"held_out": before, "lifetime": before}
        run = {**case, "seed": seed, "unbroken": both, **scopes}
        runs.append({**run, "noise": noise, "mean_bits": 4.0})
    return runs


def test_harm_is_what_exceeds_a_mark_and_is_told_from_zero(
    benchmarks: Any, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    report, tables = benchmarks("harm_report"), benchmarks("figure_tables")
    runs = made_up([0.30, 0.31], 3, [9.0, 4.0]) + made_up([0.3, -0.2], 4, [9.0, 1.0])
    runs += made_up([0.02, 0.0201], 8, [9.0, 0.01])
    found = {cell.bits: cell for cell in report.cells(runs)}
    assert [cell.harmful for cell in found.values()] == [True, False, True]
    held_out = {bits: cell.harmed("held_out", "auc") for bits, cell in found.items()}
    assert held_out == {3: True, 4: False, 8: False}, "0.02 points are none, 0.02 % are"
    assert found[3].changes["lifetime", "log_loss"].mean == pytest.approx(0.305)
    assert found[4].noise == 1.0, "not that of the first"
    report.present(runs)
    assert "0.305 ± 0.064 !" in capsys.readouterr().out
    summary = tmp_path / "harm.json"
    summary.write_text(json.dumps(report.summary({}, runs, most_noise=0.5)))
    assert tables.harm(summary).splitlines()[2] == (
        "| m | o | 300 | 2 | 7 | late | 1 |  | 0.305 ± 0.064 ! | 0.05 ± 3.18 | 0.020 ± 0.001 ! |  |"
    )


def test_runs_that_are_there_are_not_made_again(
    benchmarks: Any, tmp_path: Path
) -> None:
    report, path = benchmarks("harm_report"), tmp_path / "figures.json"
    first = report.Report(path)
    first.runs.extend(made_up([0.1, 0.2], 4, [1.0, 2.0]))
    first.write()
    again = report.Report(path)
    assert again.found == first.found
    case = report.Case("m", "o", 300, 2, 7, "late")
    assert again.has(case, 4, "auto", 1)
    assert not again.has(case, 4, "auto", 2) and not again.has(case, "auto", "auto", 1)
    assert not again.has(case._replace(apart=8), 4, "auto", 1)
    assert not again.has(case, 4, "nearest", 1) and not again.rounded("nearest")
    assert again.rounded("auto") == first.runs
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_is_the_same_for_the_same_figures(
    benchmarks: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plots, results = benchmarks("figure_plots"), Path(__file__).parent / "results"
    for name in ("one.svg", "two.svg"):
        plots.draw(results / "harm.json", tmp_path / name, plots.harm)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    assert "two towers" in drawn and "noise of a restore" in drawn


def test_a_quick_run_makes_its_pairs_once(
    benchmarks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    harm, found, shown = benchmarks("harm"), tmp_path / "runs", tmp_path / "summary"
    given = ["--quick", "--only", "1 x 30", "--json", str(found)]
    monkeypatch.setattr("sys.argv", ["harm.py", *given, "--summary", str(shown)])
    for _ in range(2):
        harm.main()
        runs = json.loads(found.read_text())["runs"]
        assert [(run["seed"], run["bits"]) for run in runs] == [
            (seed, bits) for seed in (0, 1) for bits in harm.ALL
        ]
    # Auto, for one restore, is 2 bits, and 8 are closer to the unbroken run.
    by_bits = {run["bits"]: run for run in runs if run["seed"] == 0}
    assert by_bits["auto"]["held_out"] == by_bits[2]["held_out"]
    lost = benchmarks("harm_report").lost
    away = {
        bits: abs(lost(run, "held_out", "log_loss")) for bits, run in by_bits.items()
    }
    assert 0 < away[8] < away[4] < away[2]
    cells = json.loads(shown.read_text())["cells"]
    assert [cell["bits"] for cell in cells] == list(harm.ALL)
    assert all(cell["seeds"] == 2 and cell["restores"] == 1 for cell in cells)
    assert "factorization, Adam, 300 steps" in capsys.readouterr().out
