"""One process of two fails, hangs or is killed in a save: the other hears of it, and goes on."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from cnr_jax.repository.step import read_manifest

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes, assert_same, values

EIO = 5


# Ten faults one after the other; the test after it has three of them.
@pytest.mark.slow
def test_a_fault_in_one_process_is_raised_in_both_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    """Each fault takes two steps: the save that fails, and the one that raises its error."""
    where = [
        (2, "rows", 1),
        (4, "gather", 1),
        (6, "dense", 1),
        (8, "manifest", 0),
        (10, "rename", 0),
        (12, "directories", 0),
        (14, "rows", 0),
        (16, "gather", 0),
        (18, "dense", 0),
        (20, "deletion", 0),
    ]
    faults = ",".join(f"{step}:{place}:{process}" for step, place, process in where)
    options = ("--faults", faults, "--timeout-secs", 30)
    with Processes(2, tmp_path / "root", tmp_path / "out", "--stop", 23, *options) as p:
        p.allow(600)
        lines = p.finish()
    failed = {step + more for step, _, _ in where for more in (0, 1)} - {20}
    for process, found in enumerate(lines):
        mine = [f"{step} {place}" for step, place, victim in where if victim == process]
        assert f"hit {', '.join(mine)}" in found, "a fault that was not hit"
        errors = [line for line in found if "process=" in line]
        assert len(errors) == len(where), found
        for line, (step, place, victim) in zip(errors, where, strict=True):
            # Old steps are deleted after the commit, by process 0: it alone knows.
            kind = "after_commit" if place == "deletion" else "save_failed"
            assert line.startswith(f"{step + 1}: {kind} process={victim} ")
            # Why it could not make directories Orbax tells process 0 alone.
            if place != "directories" or victim == process:
                assert f" errno={EIO} OSError: [Errno {EIO}] at {place}" in line
        assert found[-1] == "latest 29"
        assert found[-2] == lines[0][-2], "both leave out the same saves"
        assert found[-2].startswith("back to back [True, False"), found[-2]
        listed = [line for line in found if line.startswith("heard ")]
        heard = [int(step) for step in listed[0][7:-1].split(",")]
        assert heard == sorted(heard) and len(heard) == len(set(heard))
        assert {step for step in heard if step < 23} == set(range(23)) - failed
    kept = {int(p.name) for p in (tmp_path / "root").iterdir() if p.name.isdigit()}
    assert {step for step in kept if step < 23} == set(range(23)) - failed
    assert not list((tmp_path / "root").glob("*tmp*"))
    assert_same(values(tmp_path / "out", 0), values(tmp_path / "out", 1))


def test_all_processes_know_what_became_of_a_save_before_the_next_call(
    tmp_path: Path,
) -> None:
    faults = "2:rows:1,4:manifest:0,6:gather:1"
    options = ("--faults", faults, "--timeout-secs", 30, "--only-look")
    with Processes(2, tmp_path / "root", tmp_path / "out", "--stop", 8, *options) as p:
        p.allow(600)
        first, second = p.finish()
    found = first[1 : first.index("hit 4 manifest")]
    assert found == second[1 : second.index("hit 2 rows, 6 gather")]
    failed = [line for line in found if "process=" in line]
    assert [line.split(" errno")[0] for line in failed] == [
        "2: save_failed process=1",
        "4: save_failed process=0",
        "6: save_failed process=1",
    ]
    assert [line for line in found if "raised" in line] == [
        "3: raised that of 2",
        "5: raised that of 4",
        "7: raised that of 6",
    ]
    reported = [
        line.split()[:2] for line in found if ": full" in line or ": delta" in line
    ]
    assert [step for step, _ in reported] == ["0:", "1:", "3:", "5:", "7:"]
    assert [kind for _, kind in reported] == ["full", *["delta"] * 4]


# Most of it is waiting. That one that lives on but does not come is named, test_alone.py tells.
@pytest.mark.slow
@pytest.mark.parametrize("where", ["kill rows", "hang prepare"])
def test_a_process_that_says_nothing_is_named_in_time(
    tmp_path: Path, where: str
) -> None:
    options = ("--faults", f"2:{where}:1", "--timeout-secs", 3)
    with Processes(2, tmp_path / "root", tmp_path / "out", "--stop", 6, *options) as p:
        assert p.children[0].wait(p.left_secs()) == 0, p.tail()
        p.children[1].kill()
    lines = Path(f"{tmp_path / 'out'}.0.txt").read_text().splitlines()
    (error,) = [line for line in lines if "process_silent" in line]
    assert "process=1" in error, error
    assert not (tmp_path / "root" / "2").exists()
    assert read_manifest(tmp_path / "root" / "1" / "default").step == 1


def test_sigterm_to_one_process_leads_both_to_the_same_last_step(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    options = ("--stop", 0, "--until-preempted")
    with Processes(2, root, tmp_path / "out", *options) as p:
        while not (root / "0").exists():
            p.left_secs()
            time.sleep(0.05)
        time.sleep(0.5)
        p.children[1].send_signal(signal.SIGTERM)
        first, second = p.finish()
    assert first == second
    _, last, saved, latest = first[1].split()
    assert (saved, latest) == ("True", last)
    assert read_manifest(root / last / "default").kind == "delta"
    assert {p.name for p in root.iterdir() if p.name.isdigit()} == {"0", last}
