"""Traces of failures: files in all their forms, and draws of stated parameters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cnr_jax.errors import OptionError
from cnr_jax.goodput import Failures, failures_from, read_failures

CSV = "secs,nodes\n100,4\n160,3\n190,4\n300,4\n400,0\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.csv", CSV),
        ("mine.json", '{"secs": [0, 60, 90, 200, 300], "nodes": [4, 3, 4, 4, 0]}'),
    ],
)
def test_all_forms_say_when_the_nodes_are_there(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    found = read_failures(tmp_path / name)
    # The last row ends the trace, whatever its number.
    assert found == Failures("mine", ((0, 60), (90, 300)), 300, 4)
    assert (found.count, found.up_secs, found.mtbf_secs) == (1, 270, 270)
    fewer = read_failures(tmp_path / name, nodes=3)
    assert (fewer.up, fewer.count, fewer.nodes) == (((0, 300),), 0, 3)
    assert fewer.mtbf_secs == float("inf")


def test_samples_at_equal_distances_last_as_long_as_their_distance(
    tmp_path: Path,
) -> None:
    document = {"metadata": {"gap_seconds": 300}, "data": [0, 2, 2, 1, 2]}
    (tmp_path / "spot.json").write_text(json.dumps(document))
    found = read_failures(tmp_path / "spot.json")
    assert (found.up, found.secs) == (((300, 900), (1200, 1500)), 1500)
    # The stretch that ends with the trace does not end by a failure.
    assert found.count == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{}", "is no trace of failures\n  KeyError: 'secs'"),
        ("a.json", "[1, 2]", "is no trace of failures"),
        ("a.json", "{", "is no trace of failures"),
        ("a.json", '{"data": [1], "metadata": {}}', "KeyError: 'gap_seconds'"),
        ("a.csv", "secs,nodes\n1,2,3\n", "is no trace of failures"),
        ("a.csv", "secs,nodes\n1,one\n", "is no trace of failures"),
        ("a.csv", "", "is no trace of failures"),
        ("a.csv", "0,4\n100,3\n", "its first row is no header, got 0,4"),
        ("a.csv", "secs,nodes\n1,2\n", "has 1 times and 1 numbers of nodes"),
        ("a.csv", "secs,nodes\n2,2\n1,2\n", "the times of trace 'a' do not rise"),
        ("a.csv", "secs,nodes\n1,2\ninf,2\n", "do not rise"),
        ("a.csv", "secs,nodes\n1,0\n2,0\n", "never has the 0 nodes"),
    ],
)
def test_what_is_no_trace_is_named(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError) as caught:
        read_failures(tmp_path / name)
    assert said in str(caught.value)


def test_more_nodes_than_there_ever_are_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(CSV)
    with pytest.raises(OptionError, match="never has the 5 nodes that the job needs"):
        failures_from(str(tmp_path / "mine.csv"), nodes=5)


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_draws_have_the_mean_and_the_shape_that_is_stated(shape: float) -> None:
    found = Failures.drawn(node_mtbf_hours=1, hours=4000, shape=shape, seed=1)
    lives = np.diff([0, *(end for _, end in found.up)])[1:-1] / 3600
    assert np.mean(lives) == pytest.approx(1, rel=0.06)
    # Of a Weibull distribution log(-log(1 - F)) is a line, whose slope is the shape.
    ranks = (np.arange(len(lives)) + 0.5) / len(lives)
    inner = slice(len(lives) // 20, -len(lives) // 20)
    slope = np.polyfit(
        np.log(np.sort(lives))[inner], np.log(-np.log1p(-ranks))[inner], 1
    )[0]
    assert slope == pytest.approx(shape, rel=0.08)


def test_nodes_fail_each_by_itself_and_the_job_with_any() -> None:
    drawn = {"node_mtbf_hours": 4000, "nodes": 1000, "hours": 2000, "seed": 3}
    one = Failures.drawn(**drawn, shape=0.7)  # type: ignore[arg-type]
    # As often as the nodes together, and no less at first, when all would be new.
    assert one.count == pytest.approx(500, rel=0.15)
    early = sum(end < 1000 * 3600 for _, end in one.up)
    assert early == pytest.approx(250, rel=0.25)
    assert one == Failures.drawn(**drawn, shape=0.7)  # type: ignore[arg-type]
    waits = Failures.drawn(**drawn, shape=0.7, down_secs=600)  # type: ignore[arg-type]
    assert waits.up_secs == pytest.approx(waits.secs - 600 * one.count, rel=0.01)


@pytest.mark.parametrize(
    "text", ["weibull:4", "exponential:4,2", "weibull:", "exponential:four"]
)
def test_distributions_are_named_with_their_numbers(text: str) -> None:
    with pytest.raises(OptionError, match="is no distribution of failures"):
        failures_from(text)


def test_a_distribution_is_drawn_from_as_a_command_line_says_it() -> None:
    drawn = Failures.drawn(node_mtbf_hours=40, nodes=8, hours=90, shape=0.7, seed=5)
    assert failures_from("weibull:40,0.7", nodes=8, hours=90, seed=5) == drawn
    assert failures_from("exponential:40").nodes == 1
    for wrong in ("exponential:0", "exponential:-1", "exponential:nan"):
        with pytest.raises(OptionError, match="expected a number above 0"):
            failures_from(wrong)
    with pytest.raises(OptionError, match="failures would be drawn"):
        failures_from("exponential:0.001", nodes=1000, hours=10**6)
