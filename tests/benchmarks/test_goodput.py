"""The benchmark of goodput: what it plays, and what it says of the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from cnr_jax.goodput import Failures

pytestmark = pytest.mark.tools


def test_all_systems_are_played_and_a_model_that_is_off_is_named(
    benchmarks: Any, tmp_path: Path
) -> None:
    goodput = benchmarks("goodput")
    trace = Failures.drawn(node_mtbf_hours=0.5, hours=5, seed=1)
    found = [goodput.play(goodput.ONE_GB, "mine", trace)]
    assert list(found[0]["systems"]) == list(goodput.SYSTEMS)
    assert found[0]["failures"] == trace.count
    shares = {name: run["goodput"] for name, run in found[0]["systems"].items()}
    assert shares["ours, advised"] > max(shares["orbax, best"], shares["CheckFreq"])
    said = goodput.table(found)
    assert f"| {100 * shares['CheckFreq']:.1f} |" in said
    wrong = copy.deepcopy(found)
    wrong[0]["systems"]["CheckFreq"]["model"] *= 1.2
    assert "mine, CheckFreq: " not in said
    assert "mine, CheckFreq: +" in goodput.table(wrong)
    for name in ("one.svg", "two.svg"):
        goodput.draw(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
