"""The small examples run as a user would run them; each asserts at its end.

`kill_and_resume.py`, with `train_dlrm.py`, is the README's main job and runs on its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


# The last one trains twice, and takes as long as the others together.
NAMES = [
    "quickstart.py",
    "train_linen.py",
    # As the guides on evaluation and sweeps, whose code runs.
    pytest.param("evaluate.py", marks=pytest.mark.slow),
    pytest.param("sweep.py", marks=pytest.mark.slow),
    pytest.param("drop_in.py", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_to_its_end(name):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
