"""What `accuracy.py` and `entropy.py` say is right: metrics, pairs, real restores, stages."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_jax.format.rowids import decode_rowids

pytestmark = pytest.mark.tools

BATCH = 4096


def test_auc_is_the_share_of_ordered_pairs(benchmarks: Any) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    logits = (rng.normal(labels, 2) * 4).round() / 4  # many are equal
    pairs = itertools.product(logits[labels == 1], logits[labels == 0])
    ordered = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]
    auc = benchmarks("paired").auc
    assert auc(logits, labels) == pytest.approx(np.mean(ordered), abs=1e-12)
    assert auc(-logits, labels) == pytest.approx(1 - np.mean(ordered), abs=1e-12)
    assert auc(np.zeros(200), labels) == 0.5


def test_log_loss_is_that_of_probabilities_and_never_overflows(benchmarks: Any) -> None:
    log_loss = benchmarks("paired").log_loss
    logits, labels = np.float32([0.5, -2, 3, -1]), np.float32([1, 0, 0, 1])
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -np.log(np.where(labels == 1, chance, 1 - chance)).mean()
    assert log_loss(logits, labels) == pytest.approx(expected, rel=1e-12)
    wrong = np.float32([2000, -2000])
    assert log_loss(wrong, np.float32([0, 1])) == 2000
    assert log_loss(wrong, np.float32([1, 0])) == 0


def test_intervals_are_those_of_student(benchmarks: Any) -> None:
    interval = benchmarks("paired").interval
    found = interval([1, 2, 3, 4, 5])
    assert (found.mean, found.count) == (3, 5)
    # The quantile of 4 degrees of freedom, from a printed table.
    assert found.margin == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
    assert (found.low, found.high) == (3 - found.margin, 3 + found.margin)
    assert interval([7]).margin == math.inf


def made_up(changes: dict[int, float]) -> list[dict[str, Any]]:
    """Runs of seeds that differ far more from each other than restores change them."""
    runs = []
    for seed, change in changes.items():
        auc, loss = 0.7 + seed / 100, 0.4 - seed / 100
        for restores, bits, factor in ((0, None, 0.0), (3, 2, change)):
            of = {
                "auc": auc * (1 - factor / 100),
                "log_loss": loss * (1 + factor / 100),
            }
            run = {"seed": seed, "bits": bits, "restores": restores}
            runs.append({**run, "held_out": of, "lifetime": of})
    return runs[::-1]


def test_differences_are_taken_within_a_seed(benchmarks: Any) -> None:
    report = benchmarks("accuracy_report")
    for metric in ("auc", "log_loss"):
        worse = report.changes(made_up({0: 0.5, 1: 0.6, 2: 0.7}), "held_out", metric)
        case = report.Case(bits=2, restores=3)
        assert set(worse) == {case}
        found = worse[case]
        assert found.mean == pytest.approx(0.6)
        assert found.margin == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
        assert report.ways(found) == []
        noisy = report.changes(made_up({0: 0.5, 1: -0.6, 2: 0.7}), "lifetime", metric)
        assert noisy[case].mean > report.MARK
        assert report.ways(noisy[case]) == ["not told from zero"]
        small = report.changes(made_up({0: 0.008, 1: 0.009}), "lifetime", metric)
        assert report.ways(small[case]) == ["mean at most 0.01 %"]
        both = report.changes(made_up({0: 0.001, 1: -0.002}), "lifetime", metric)
        assert len(report.ways(both[case])) == 2


def test_report_says_how_the_mark_is_kept_and_what_noise_hides(
    benchmarks: Any, capsys: pytest.CaptureFixture
) -> None:
    report = benchmarks("accuracy_report")
    for changes, said in (
        ({0: 0.008, 1: 0.0081}, "kept  mean at most 0.01 %; 0.01 % can be resolved"),
        ({0: 0.3, 1: -0.1}, "kept  not told from zero; 0.01 % is hidden by noise"),
        (
            {0: 0.03, 1: 0.031},
            "MISSED  more than 0.01 %, told from zero; 0.01 % can be resolved",
        ),
        ({0: 0.3}, "open  one seed tells nothing of noise"),
    ):
        runs = made_up(changes)
        for run in runs:
            run["bits"] = "auto" if run["restores"] else None
        report.present(runs, report.Setting())
        printed = " ".join(capsys.readouterr().out.split())
        judged, beside = printed.split("held-out flights, AUC: percent")
        said = " ".join(said.split())
        expected = f"auto (3 bits), 3 restores {said}"
        found = judged[judged.index("auto (3") :].split()
        assert expected.split() == found[:5] + found[8 : 8 + len(said.split())]
        assert judged.count(said) == 2 and said not in beside
        assert "restores 1 3 10" not in printed, "tables of fixed bits, without any"


def test_what_is_judged_runs_first_and_can_be_all(benchmarks: Any) -> None:
    report = benchmarks("accuracy_report")
    cases = list(report.Setting().cases())
    judged = [(None, 3), ("auto", 1), ("auto", 3), ("auto", 20), ("auto", 100)]
    judged = [(*case, "raw") for case in judged]
    assert cases[:5] == judged == list(report.Setting().cases(fixed=False))
    widths, restores = (2, 3, 4, 8), (1, 3, 10, 20, 100)
    assert cases[5:] == list(itertools.product(widths, restores, ["raw"]))


def test_a_report_goes_on_where_it_stopped(benchmarks: Any, tmp_path: Path) -> None:
    report = benchmarks("accuracy_report")
    path, setting = tmp_path / "figures.json", report.Setting(dim=8)
    runs = made_up({0: 0.1, 1: 0.2})
    first = report.Report(path, setting)
    for number, run in enumerate(runs, 1):
        first.add(run)
        assert len(json.loads(path.read_text())["runs"]) == number
    again = report.Report(path, setting)
    assert again.runs == runs
    case = report.Case(2, 3)
    assert again.get(1, case) == runs[0] and again.get(2, case) is None
    assert again.get(1, case._replace(bits="auto")) is None
    with pytest.raises(SystemExit, match="another setting"):
        report.Report(path, report.Setting(dim=16))
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def course(benchmarks: Any) -> Any:
    """Flights of two features, whose label depends on the row of the first; it has few."""
    flights = benchmarks("trained_tables").Flights
    rng = np.random.default_rng(0)

    def some(count: int) -> Any:
        ids = rng.integers([0, 6], [6, 606], (count, 2), np.int32)
        label = (ids[:, 0] % 3 == 0) ^ (rng.random(count) < 0.1)
        dense = rng.normal(size=(count, 3)).astype(np.float32)
        return flights(ids, 606, dense, label.astype(np.float32))

    return benchmarks("flights_course").Course(
        some(12 * BATCH + 100),
        some(BATCH + 50),
        dim=8,
        bounds=(0, 6, 606),
    )


def test_only_rounded_tables_change_a_run(
    benchmarks: Any, course: Any, tmp_path: Path
) -> None:
    training = benchmarks("restored_training")
    assert course.steps == 12 and course.stops(2) == [4, 8]
    with pytest.raises(ValueError, match="12 restores in 12 steps"):
        course.stops(12)
    undisturbed, kept = training.train_undisturbed(course, 3, [4])
    assert undisturbed["held_out"]["auc"] > undisturbed["lifetime"]["auc"] > 0.55
    exact, saves = training.train_restored(
        course, kept[4], [4, 8], tmp_path / "exact", bits=None
    )
    assert exact == undisturbed
    assert [save.step for save in saves] == [4, 8]
    rounded, _ = training.train_restored(
        course, kept[4], [4, 8], tmp_path / "auto", bits="auto"
    )
    (path,) = (tmp_path / "auto").glob("8/*/manifest.p00000.json")
    manifest = json.loads(path.read_text())
    assert {
        (tile["table"], manifest["codecs"][segment["codec"]]["configuration"]["bits"])
        for tile in manifest["tiles"]
        for segment in tile["segments"]
        if tile["leaf"] == "table"
    } == {("feature00", 8), ("feature01", 3)}
    for scope, metrics in undisturbed.items():
        for metric, value in metrics.items():
            assert rounded[scope][metric] != value
    other, _ = training.train_undisturbed(course, 4, [])
    assert other != undisturbed


def test_only_rounded_slots_change_a_run(
    benchmarks: Any, course: Any, tmp_path: Path
) -> None:
    training = benchmarks("restored_training")
    course = dataclasses.replace(course, sparse="lazy_adam")
    undisturbed, kept = training.train_undisturbed(course, 3, [4])
    found = {}
    for slots in ("raw", "auto"):
        found[slots], _ = training.train_restored(
            course, kept[4], [4, 8], tmp_path / slots, bits=None, slots=slots
        )
    assert found["raw"] == undisturbed != found["auto"]
    report = benchmarks("accuracy_report")
    cases = report.Setting(restores=(1, 20)).cases(slots=True)
    assert list(cases) == [(None, 3, "raw"), (None, 1, "auto"), (None, 20, "auto")]


def test_a_restore_that_loses_a_slot_stops_the_run(
    benchmarks: Any, course: Any
) -> None:
    check = benchmarks("restored_training")._check
    state = course.saved(course.begin(0).state)
    check(state, state, ())
    slots = state["sparse_optimizer"]
    squares = {**slots.sum_of_squares}
    squares["feature01"] = squares["feature01"].at[5].add(1)
    other = {**state, "sparse_optimizer": slots._replace(sum_of_squares=squares)}
    with pytest.raises(RuntimeError, match="sum_of_squares/feature01, expected equal"):
        check(other, state, ())
    with pytest.raises(RuntimeError, match=r"params/feature01, expected rounded$"):
        check(state, state, ["feature01"])


def test_stages_come_near_the_entropy_and_give_everything_back(benchmarks: Any) -> None:
    stages = benchmarks("stages")
    codes = np.random.default_rng(0).choice(4, 400_000, p=(0.5, 0.25, 0.125, 0.125))
    bits = stages.entropy_bits(codes.astype(np.uint8), bits=2)
    assert bits == pytest.approx(1.75, abs=0.01)
    assert stages.entropy_bits(np.zeros(9, np.uint8), bits=2) == 0
    packed = (codes.reshape(-1, 4) << [0, 2, 4, 6]).sum(axis=1).astype(np.uint8)
    for name, stage in stages.stages(1).items():
        found = stages.apply(stage, packed, turns=1)
        assert found.encode_mb_per_sec > 0 and found.decode_mb_per_sec > 0
        if "lz4" not in name:
            assert bits / 2 < found.share < bits / 2 * 1.02
    floats = np.repeat(np.arange(500, dtype=np.float32), 100).view(np.uint32)
    for stage in stages.stages(4).values():
        assert stages.apply(stage, floats, turns=1).share < 0.1


def test_a_stage_pays_if_it_gains_enough_fast_enough(benchmarks: Any) -> None:
    staged = benchmarks("stages").Staged
    fast = staged(0.9, 501, 900)
    assert fast.gain(part=0.4) == pytest.approx(0.04)
    assert fast.pays(0.051) and not fast.pays(0.049)
    assert not staged(0.9, 499, 900).pays(0.051)
    assert not staged(0.9, 900, 499).pays(0.051)


def test_stages_on_several_arrays_add_up(benchmarks: Any) -> None:
    figures = benchmarks("staged_figures")

    def made(array: str, stage: str, share: float, rate: float) -> dict[str, Any]:
        of = {"encode_mb_per_sec": rate, "decode_mb_per_sec": 2 * rate}
        return {"array": array, "stage": stage, "bytes": 100, "share": share, **of}

    arrays = [
        made("codes", "slow", 0.8, 100),
        made("scale", "slow", 0.5, 100),
        made("codes", "fast", 1.0, 900),
        made("scale", "fast", 0.6, 300),
        made("scale", "own", 0.4, 600),
        made("ids", "slow", 1.1, 100),
        made("ids", "fast", 1.0, 100),
    ]
    found = {f["stage"]: f for f in figures.together({}, arrays, total=400)}
    assert set(found) == {"slow", "fast", "best of each"}
    assert found["slow"]["share"] == pytest.approx(0.8)
    assert found["slow"]["gain"] == pytest.approx(0.15)
    best = found["best of each"]  # codes and scale; ids are not staged
    assert best["bytes"] == 200 and best["gain"] == pytest.approx(0.2)
    assert best["encode_mb_per_sec"] == pytest.approx(200 / (100 / 100 + 100 / 600))


def test_arrays_of_a_delta_are_read_as_they_were_written(
    benchmarks: Any, course: Any, tmp_path: Path
) -> None:
    arrays, total = benchmarks("saved_arrays").saved_delta(course, 4, tmp_path)
    codes, scales = (
        arrays["asymmetric.codes.uint8"],
        arrays["asymmetric.scale.bfloat16"],
    )
    (slots,) = (values for name, values in arrays.items() if name.startswith("raw"))
    rows = len(scales)
    assert (codes.dtype, scales.dtype, slots.dtype) == (np.uint8, np.uint16, np.uint32)
    assert len(codes) == rows * 4 and len(slots) == rows == 606
    assert np.ptp(codes) > 200 and (slots.view(np.float32) > 0).all()
    assert 0 < total - sum(values.nbytes for values in arrays.values()) < 10_000


def test_all_forms_of_row_ids_hold_the_same_rows(benchmarks: Any) -> None:
    id_forms = benchmarks("entropy").id_forms
    for count in (3, 200, 900):
        rng = np.random.default_rng(count)
        ids = np.sort(rng.permutation(1000)[:count]).astype(np.int32)
        forms = id_forms(ids, 1000)
        np.testing.assert_array_equal(forms["ids, int32"], ids)
        np.testing.assert_array_equal(np.cumsum(forms["gaps, int32"] + 1) - 1, ids)
        bitmap = decode_rowids("bitmap", forms["bitmap"], 1000, count)
        np.testing.assert_array_equal(bitmap, ids)
        assert forms["stored"].nbytes <= min(f.nbytes for f in forms.values())


def test_drawings_hold_every_case(benchmarks: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = benchmarks("figure_plots")
    error = {"symmetric": 3.0, "asymmetric": 2.0, "adaptive": 1.0}
    found = {
        "runs": made_up({0: 0.5, 1: 0.6}),
        "mean_errors": [
            {"table": table, "dim": dim, "bits": bits, "error": error}
            for table in ("here", "there")
            for dim in (16, 64)
            for bits in (2, 8)
        ],
    }
    given = tmp_path / "figures.json"
    given.write_text(json.dumps(found))
    for plot, texts in {
        plots.codec_errors: ("here, 2 bits", "there, 8 bits", "symmetric", "adaptive"),
        plots.accuracy_after_restores: ("held-out flights, AUC", "2 bits"),
    }.items():
        one, two = tmp_path / "a" / "one.svg", tmp_path / "two.svg"
        for to in (one, two):
            plots.draw(given, to, plot)
        assert one.read_bytes() == two.read_bytes()
        assert all(text in one.read_text() for text in texts)
