"""A small part of the campaign in every run of the tests; all of it with `-m slow`.

Beside it, whether the campaign would notice: its judges look at stores that lie.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_jax.testing import damage, faults

pytestmark = pytest.mark.tools

CAMPAIGN = Path(__file__).parent
SMALL = ("kill: delete", "damage: flips, manifest", "errors: EIO", "once: open")
CASES = (
    *("kill", "damage", "power cut", "errors", "mistakes", "crafted", "random kills"),
    *("once: open", "once: restore", "once: save, delta", "once: save, full"),
)
needs_faults = pytest.mark.skipif(
    not faults.available(), reason=str(faults.why_unavailable())
)


@pytest.fixture
def campaign(modules_in: Any) -> Any:
    """Imports a module of the campaign."""
    return modules_in(CAMPAIGN)


def run(report: Path, *arguments: str, timeout_secs: float) -> list[dict[str, Any]]:
    """Runs the program; returns its tallies."""
    command = [sys.executable, str(CAMPAIGN / "run.py"), "--json", str(report)]
    done = subprocess.run(
        [*command, "--dir", str(report.parent), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_secs,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(report.read_text())["tallies"]


@needs_faults
def test_a_sample_of_faults_ends_as_it_should(tmp_path: Path) -> None:
    arguments = ("--quick", "--systems", "cnr_jax", "--only", *SMALL)
    tallies = run(tmp_path / "report.json", *arguments, timeout_secs=280)
    found = {f"{t['case']}: {t['what']}": t for t in tallies if t["faults"]}
    assert {name.split(";")[0] for name in found} == {*SMALL}
    for tally in found.values():
        assert tally["wrong"] == 0
    kills, flips, failed = (found[name]["outcomes"] for name in SMALL[:3])
    assert kills["restored equal"] >= 3
    assert flips["refused, names the file"] >= 3, "a manifest is all under a digest"
    assert failed["save failed once, rows in the next"] >= 1
    errors = [found[name]["outcomes"] for name in found if name.startswith(SMALL[3])]
    assert len(errors) == 4
    assert sum(outcomes["one error, nothing lost"] for outcomes in errors) >= 1


@needs_faults
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["kill: delta", "damage", "errors", "mistakes: stale"])
def test_faults_on_sums_end_as_they_should(tmp_path: Path, case: str) -> None:
    pytest.importorskip("zstandard")
    arguments = ("--quick", "--sums", "--systems", "cnr_jax", "--only", case)
    tallies = run(tmp_path / "report.json", *arguments, timeout_secs=3500)
    assert sum(tally["faults"] for tally in tallies) > 0
    assert all(tally["wrong"] == 0 for tally in tallies)
    if case == "damage":
        flipped = {t["what"] for t in tallies if t["faults"]}
        for array in ("lattice.integers4.int8", "octave.integers4.int16"):
            assert any(array in what for what in flipped), flipped


@needs_faults
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sums", [(), ("--sums",)])
@pytest.mark.parametrize("case", ["kill: first", "kill: delta", "damage"])
def test_faults_on_merges_end_as_they_should(
    tmp_path: Path, case: str, sums: tuple[str, ...]
) -> None:
    pytest.importorskip("zstandard")
    given = ("--quick", "--merges", *sums, "--systems", "cnr_jax", "--only", case)
    tallies = run(tmp_path / "report.json", *given, timeout_secs=3500)
    assert sum(tally["faults"] for tally in tallies) > 0
    assert all(tally["wrong"] == 0 for tally in tallies)


@needs_faults
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", CASES)
def test_all_faults_of_a_case_end_as_they_should(tmp_path: Path, case: str) -> None:
    report = tmp_path / "report.json"
    tallies = run(report, "--only", case, timeout_secs=7000)
    assert sum(tally["faults"] for tally in tallies) > 0
    assert all(t["wrong"] == 0 for t in tallies if t["system"] == "cnr_jax")


class Honest:
    """A store without any protection: one pickled state for each step."""

    name = "honest"

    def __init__(self, training: Any, root: Path, **_: Any) -> None:
        self._training, self._root = training, root
        self.state, self.step = training.first_state(), -1

    def steps(self) -> list[int]:
        found = self._root.iterdir() if self._root.exists() else ()
        return sorted(int(path.name) for path in found if path.name.isdigit())

    def go_on(self, step: int | None = None) -> int | None:
        step = max(self.steps(), default=None) if step is None else step
        if step is None:
            return None
        self.state = pickle.loads((self._root / str(step) / "state").read_bytes())
        return step

    def train(self, step: int, salt: int = 0) -> None:
        self.state = self._training.trained(self.state, step, salt)

    def save(self, step: int) -> bool:
        (self._root / str(step)).mkdir(parents=True)
        (self._root / str(step) / "state").write_bytes(pickle.dumps(self.state))
        return True

    def wait(self) -> None:
        """Saves are done when `save` returns."""

    def close(self) -> None:
        """Nothing is held."""


class WrongValues(Honest):
    def go_on(self, step: int | None = None) -> int | None:
        found = super().go_on(step)
        self.state["w"] = np.nextafter(self.state["w"], np.float32(9))
        return found


class PassesOver(Honest):
    def go_on(self, step: int | None = None) -> int | None:
        return super().go_on(max(self.steps()) - 1 if step is None else step)


class Unlisted(Honest):
    def steps(self) -> list[int]:
        return super().steps()[1:]


class Unreadable(Honest):
    def go_on(self, step: int | None = None) -> int | None:
        if step == 0:
            raise OSError("no")
        return super().go_on(step)


class Stuck(Honest):
    def save(self, step: int) -> bool:
        raise OSError("no")


class Forgets(Honest):
    """The next save leaves out what was trained since the one before."""

    def train(self, step: int, salt: int = 0) -> None:
        self.state["step"] = step


@pytest.mark.parametrize(
    ("system", "outcome"),
    [
        (Honest, "EQUAL"),
        (WrongValues, "WRONG"),
        (PassesOver, "LOST"),
        (Unlisted, "LOST"),
        (Unreadable, "LISTED"),
        (Stuck, "STUCK"),
        (Forgets, "WRONG"),
    ],
)
def test_the_judge_sees_a_system_that_lies(
    campaign: Any, tmp_path: Path, system: type[Honest], outcome: str
) -> None:
    training, judging = campaign("training"), campaign("judging")
    scenarios, outcomes = campaign("scenarios"), campaign("outcomes")
    honest = partial(Honest, training)
    before, after = tmp_path / "before", tmp_path / "after"
    scenarios.CHAIN(honest, before)
    shutil.copytree(before, after)
    scenarios.BY_NAME["delta"].act(honest, after, lambda note: None)
    twins = [judging.twin_of(honest, x, tmp_path / "x", None) for x in (before, after)]
    judging.check_twins(honest, twins, [{}, {}])
    lying = partial(system, training)
    judge = judging.Judge(lying, scenarios.BY_NAME["delta"], *twins)
    found = judge(after, durable=True)
    assert found.outcome is outcomes.Outcome[outcome], found.detail


def test_the_judge_sees_a_durable_step_that_is_gone(
    campaign: Any, tmp_path: Path
) -> None:
    training, judging = campaign("training"), campaign("judging")
    scenarios, outcomes = campaign("scenarios"), campaign("outcomes")
    honest = partial(Honest, training)
    roots = tmp_path / "before", tmp_path / "after"
    for root, stop in zip(roots, (3, 4), strict=True):
        scenarios.chain_of(stop)(honest, root)
    twins = [judging.twin_of(honest, root, tmp_path / "x", None) for root in roots]
    judge = judging.Judge(honest, scenarios.BY_NAME["delta"], *twins)
    for durable, outcome in ((True, "LOST"), (False, "EQUAL")):
        root = shutil.copytree(roots[0], tmp_path / f"left{durable}")
        assert judge(root, durable=durable).outcome is outcomes.Outcome[outcome]


def test_twins_are_compared_with_what_was_trained(
    campaign: Any, tmp_path: Path
) -> None:
    training, judging = campaign("training"), campaign("judging")
    system = partial(WrongValues, training)
    campaign("scenarios").chain_of(2)(system, tmp_path / "root")
    twin = judging.twin_of(system, tmp_path / "root", tmp_path / "x", None)
    with pytest.raises(judging.TwinError, match=r"step 0: \['w'\] not as trained"):
        judging.check_twins(system, [twin], [{}])


def broken(path: Path) -> Any:
    return damage.truncate(path, 20)


def changed(path: Path) -> Any:
    """The last digit of a pickled array's data."""
    data = path.read_bytes()
    place = data.index(np.float32(0.25).tobytes())
    return damage.flip_bit(path, 8 * place)


@pytest.mark.parametrize(
    ("how", "text", "outcome"),
    [
        (changed, "", "WRONG"),
        (broken, "{path}: ", "REFUSED"),
        (broken, "", "UNCLEAR"),
    ],
)
def test_the_reader_sees_wrong_values_and_unclear_errors(
    campaign: Any,
    tmp_path: Path,
    how: Callable[[Path], Any],
    text: str,
    outcome: str,
) -> None:
    training, reading = campaign("training"), campaign("reading")

    class Reads(Honest):
        def go_on(self, step: int | None = None) -> int | None:
            try:
                return super().go_on(step)
            except Exception as error:
                path = tmp_path / "root" / "1" / "state"
                raise ValueError(text.format(path=path) + "damaged") from error

    system = partial(Reads, training)
    campaign("scenarios").chain_of(2)(system, tmp_path / "root")
    reader = reading.Reader(system, tmp_path / "root", tmp_path / "scratch")
    path = tmp_path / "root" / "1" / "state"
    outcomes = campaign("outcomes").Outcome
    assert reader.explicit(1, path).outcome is outcomes.EQUAL
    with how(path):
        assert reader.explicit(1, path).outcome is outcomes[outcome]
        assert reader.newest(path).outcome is outcomes[outcome]
    assert reader.newest(path).outcome is outcomes.EQUAL


def test_a_fault_that_was_not_met_is_no_success(campaign: Any, tmp_path: Path) -> None:
    stages, outcomes = campaign("stages"), campaign("outcomes").Outcome
    children, kills = campaign("children"), campaign("kills")
    fault = faults.Fault("any", 3)
    for status, hit, outcome in (
        (0, False, "NOT_HIT"),
        (None, True, "HANG"),
    ):
        call = faults.Call(3, 1, "write", str(tmp_path / "file"), hit)
        ended = children.Ended(status, [], (call,))
        strike = stages.Strike(fault, ended, tmp_path)
        assert kills.verdict(None, strike).outcome is outcomes[outcome]
    assert "write file" in str(strike)


def test_what_is_wrong_is_counted_and_told(campaign: Any, tmp_path: Path) -> None:
    outcomes = campaign("outcomes")
    allowed = frozenset({outcomes.Outcome.EQUAL})
    tally = outcomes.Tally("kill", "delta", "cnr_jax", allowed)
    tally.add(outcomes.Verdict(outcomes.Outcome.EQUAL), "call 1")
    tally.add(outcomes.Verdict(outcomes.Outcome.LOST, "step 3"), "call 2")
    assert (tally.total, tally.wrong) == (2, 1)
    assert tally.details == ["call 2: STEP LOST: step 3"]
    other = outcomes.Tally("damage", "flips", "cnr_jax", allowed)
    report = tmp_path / "report.json"
    outcomes.write_json(report, [other], quick=False)
    outcomes.write_json(report, [tally], quick=False)
    cases = [found["case"] for found in json.loads(report.read_text())["tallies"]]
    assert cases == ["damage", "kill"], "what another run found is kept"
    with pytest.raises(SystemExit, match="1 faults ended as they should not"):
        campaign("run").present([tally], 1.0)
