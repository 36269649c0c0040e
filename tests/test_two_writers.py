"""Two programs that save to one root at a time, each insisting: no step is ever a mixture."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr

PROJECT = Path(__file__).parents[1]
ROWS, SAVES = 64, 12


def values_at(salt: int, step: int) -> np.ndarray:
    """The table of the program `salt` after a step; each step changes a few rows."""
    table = np.zeros((ROWS, 4), np.float32)
    for done in range(step + 1):
        rows = np.random.default_rng((salt, done)).integers(0, ROWS, 6)
        table[rows] = 1000 * salt + done
    return table


def main(root: str, salt: int) -> None:
    """Saves step after step; takes the root over again whenever it has lost it."""
    import jax.numpy as jnp

    state: dict[str, Any] = {"user": jnp.asarray(values_at(salt, 0)), "salt": salt}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    told = saved = 0
    pauses = random.Random(salt)
    with cnr.CheckpointManager(
        root,
        tables=tables,
        options=cnr.Options(
            codec="raw", policy=cnr.Consecutive(max_chain=3), new_run=True
        ),
        orbax_options=ocp.CheckpointManagerOptions(max_to_keep=3),
    ) as manager:
        print("ready", flush=True)
        sys.stdin.readline()
        for step in range(1, SAVES + 1):
            rows = np.random.default_rng((salt, step)).integers(0, ROWS, 6)
            state["user"] = state["user"].at[rows].set(1000 * salt + step)
            touched = cnr.record(touched, {"user": jnp.asarray(rows)})
            try:
                manager.save(step, args=cnr.args.Save(state, touched), force=True)
                manager.wait_until_finished()
                saved += 1
            except cnr.errors.WriterError:
                told += 1
                time.sleep(pauses.uniform(0, 0.3))  # else neither gets anywhere
                manager.reload()
            except cnr.errors.DependentsExistError:
                pass  # the other has saved this step
    print(f"told {told} saved {saved}", flush=True)


@pytest.fixture
def programs(tmp_path: Path) -> Any:
    """Both, ready to start."""
    from .conftest import (
        xla_flags,
    )  # of which the programs, this same file, know nothing

    found: list[subprocess.Popen[str]] = []
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = xla_flags()
    for salt in (1, 2):
        with (tmp_path / f"{salt}.log").open("w") as log:
            program = subprocess.Popen(
                [sys.executable, __file__, str(tmp_path / "root"), str(salt)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )
        found.append(program)
    yield found
    for program in found:
        program.kill()
        program.wait()
        for stream in (program.stdin, program.stdout):
            if stream is not None:
                stream.close()


def test_two_programs_that_take_the_root_from_each_other_never_mix_their_steps(
    programs: Any, tmp_path: Path
) -> None:
    for program in programs:
        assert program.stdout.readline() == "ready\n", logs(tmp_path)
    for program in programs:
        program.stdin.write("\n")
        program.stdin.flush()
    notes = [program.communicate(timeout=200)[0].split() for program in programs]
    assert [program.returncode for program in programs] == [0, 0], logs(tmp_path)
    told, saved = (sum(int(note[i]) for note in notes) for i in (1, 3))
    assert told and saved, "they were in each other's way, and went on"
    with cnr.CheckpointManager(tmp_path / "root") as manager:
        steps = manager.all_steps()
        assert steps and manager.latest_step() in steps
        for step in steps:
            state = manager.restore(step).state
            want = values_at(int(state["salt"]), step)
            np.testing.assert_array_equal(np.asarray(state["user"]), want)


def logs(folder: Path) -> str:
    return "\n----\n".join(p.read_text()[-3000:] for p in folder.glob("*.log"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
