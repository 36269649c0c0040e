"""Programs that no test runs where they will run: at least they can be lowered for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "platforms_worker.py"


# Lowering takes as long as compiling does. To be run by whoever changes what is jitted.
@pytest.mark.slow
def test_every_program_of_a_save_and_a_restore_lowers_for_gpus_and_tpus() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    told = {name: text for name, text in found.items() if not text.isdigit()}
    assert told.keys() == {"schur"}, told
    # Hashes, choices, gathering, encoding, decoding on devices, `record`, and each codec.
    assert len(found) > 20
    assert {name for name in found if "on_device" in name and "decode" in name}
    assert {"cnr_jax.rows.touched.record", "Asymmetric.decode"} <= found.keys()
