"""`cnr-jax simulate` over traces of failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli.app import app
from cnr_jax.goodput import Failures, Profile, Seconds, plan_of, simulate_job

PROFILE = Profile(
    step=Seconds(fixed=1),
    blocking=Seconds(fixed=0.5),
    write=Seconds(fixed=3, per_byte=1e-6),
    restore=Seconds(fixed=2),
    full_bytes=5_000_000,
    plain_bytes=20_000_000,
    changed_bytes=10_000,
)


def call(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, words)])
    return result.exit_code, result.output


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    # As a document of another verb has it, too.
    path.write_text(json.dumps({"schema": 2, "profile": PROFILE.asdict()}))
    return path


def test_jobs_are_those_of_the_library(tmp_path: Path, profile: Path) -> None:
    (tmp_path / "mine.csv").write_text("secs,nodes\n0,2\n900,1\n1000,2\n5000,2\n")
    words = ["--profile", profile, "--failures", tmp_path / "mine.csv"]
    words += ["--failures", "exponential:2", "--hours", 20, "--every", 60]
    code, said = call(*words, "--json")
    assert code == 0
    jobs = json.loads(said)["jobs"]
    systems = ["intermittent", "consecutive", "full", "orbax", "advised"]
    systems += ["orbax, best", "CheckFreq", "PCcheck"]
    assert [each["plan"] for each in jobs] == 2 * systems
    trace = Failures("mine", ((0, 900), (1000, 5000)), 5000, 2)
    drawn = Failures.drawn(node_mtbf_hours=2, hours=20)
    plan = plan_of(PROFILE, 60, cnr.Intermittent())
    assert jobs[0] == simulate_job(PROFILE, trace, plan).asdict()
    assert jobs[8] == simulate_job(PROFILE, drawn, plan).asdict()
    code, said = call(*words)
    lines = said.splitlines()
    assert lines[0] == "mine: 1 failures in 1 h, and 0 h without all nodes"
    assert lines[2].split()[:5] == [
        "intermittent",
        "60",
        "1",
        f"{100 * jobs[0]['goodput']:.1f}",
        "%",
    ]


def test_saves_of_a_trace_of_look_ups_are_those_that_are_played(
    tmp_path: Path, profile: Path
) -> None:
    ids = np.random.default_rng(0).zipf(1.3, (400, 50)) % 4000
    np.savez(tmp_path / "trace.npz", user=ids)
    words = ["--accesses", tmp_path / "trace.npz", "--every", 20, "--json"]
    words += ["--profile", profile, "--failures", "weibull:1,0.7", "--hours", 1]
    code, said = call(*words)
    assert code == 0
    document = json.loads(said)
    written = document["policies"]["consecutive"]["written"]
    jobs = {each["plan"]: each for each in document["jobs"]}
    assert jobs["consecutive"]["written_bytes"] > sum(written)
    assert jobs["consecutive"]["stored_bytes"] == sum(written)
    assert {"one_shot", "orbax", "advised"} <= set(jobs)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "nothing to simulate: give --accesses or --failures"),
        (["--failures", "exponential:2"], 2, "--failures needs --profile"),
        (
            ["--failures", "exponential:2", "--profile", "nowhere.json"],
            12,
            "no profile",
        ),
        (["--failures", "nowhere.csv", "--profile", "@"], 12, "no trace of failures"),
        (["--failures", "weibull:2", "--profile", "@"], 12, "weibull:HOURS,SHAPE"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    profile: Path, words: list[str], code: int, said: str
) -> None:
    found = call(*(profile if word == "@" else word for word in words))
    assert found[0] == code
    assert said in found[1]
