"""The small examples run as a user would run them; each asserts at its end.

`kill_and_resume.py`, with `train_dlrm.py`, is the README's main job and runs on its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import xla_flags

EXAMPLES = Path(__file__).parents[1] / "examples"


# The last one trains twice, and takes as long as the others together.
NAMES = [
    "quickstart.py",
    # States of Linen are those of tests/state.
    pytest.param("train_linen.py", marks=pytest.mark.slow),
    # As the guides on evaluation and sweeps, whose code runs.
    pytest.param("evaluate.py", marks=pytest.mark.slow),
    pytest.param("sweep.py", marks=pytest.mark.slow),
    pytest.param("drop_in.py", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_to_its_end(name):
    assert ended(name, 240).strip()


def ended(name: str, timeout_secs: float, *words: str) -> str:
    """What an example prints, which ends well."""
    environment = {**os.environ, "XLA_FLAGS": xla_flags()}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_secs,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow  # it trains a model of flights, three times
@pytest.mark.timeout(600)
def test_a_run_in_a_bucket_is_killed_and_resumes(bucket):
    words = ("--root", f"{bucket}/dlrm", "--codec", "raw", "--resume-devices", "8")
    printed = ended("kill_and_resume.py", 600, *words)
    assert "killed while writing" in printed
    assert "the last states are equal bit for bit" in printed
