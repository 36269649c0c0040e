"""The verb `compact --follow` as a program of its own, beside one that saves."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli.app import app
from cnr_jax.cli.exit_codes import Exit
from cnr_jax.repository.compaction import requests
from cnr_jax.repository.store import store_of

from ..conftest import each_of, left_in, merged, requested
from ..test_mirrors import far, mostly_on_disk
from .test_mirror import called

__all__ = ["far"]  # a fixture


@mostly_on_disk
def test_it_merges_for_a_run_until_it_is_interrupted(
    tiny_run: Any, far: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the command takes to start.
    monkeypatch.setattr(requests, "_SILENT_SECS", 600.0)
    run = tiny_run()
    policy = cnr.IncrementLog(merge_at=3, elsewhere=True)
    with run.open(str(far), policy=policy) as manager:
        run.run(manager, [0, 1, 2])
        manager.wait_until_finished()
        with called(far, "--follow", verb="compact") as command:
            baseline = merged(manager)
            assert command.poll() is None, command.communicate()
            assert baseline is not None and baseline.directory == "2"
            assert command.stdout is not None and command.stderr is not None
            assert command.stdout.readline() == "step 2 is merged with its chain\n"
            command.send_signal(signal.SIGINT)
            assert command.wait(120) == 130
            assert command.stdout.read() == command.stderr.read() == ""
        run.run(manager, [3])
        manager.wait_until_finished()
        assert manager.last_report.kind == "full"
        run.check(manager, 3)
    assert left_in(far) == []


@mostly_on_disk
def test_a_request_whose_run_has_ended_harms_nobody(
    tiny_run: Any, far: epath.Path
) -> None:
    run = tiny_run()
    policy, store = cnr.IncrementLog(merge_at=2, elsewhere=True), store_of(far)
    with run.open(str(far), policy=policy) as manager:
        run.run(manager, [0, 1])
        manager.wait_until_finished()
        folder = requested(far)
        request = store.read(far / folder / "request.json")
    assert left_in(far) == []  # the run takes it back
    store.make_folder(far / folder)  # and had it been killed
    store.write(far / folder / "request.json", request, replaces=False)
    with called(far, "--follow", "--json", verb="compact") as command:
        assert command.stdout is not None
        told = json.loads(command.stdout.readline())
    assert told == {"schema": 2, "verb": "compact", "step": 1, "problem": None}
    with run.open(str(far), policy=policy) as manager:
        run.check(manager, 1)
        run.run(manager, [2])
        manager.wait_until_finished()
        run.check(manager, 2)
    assert left_in(far) == [] and cnr.verify(str(far)) == ()


@each_of(
    "option",
    [
        *(["--dry-run"], ["--step", "1"], ["--writer-is-dead"]),
        *(["--single-writer"], ["--item", "state"]),
    ],
)
def test_following_goes_with_no_other_option(tmp_path: Path, option: list[str]) -> None:
    found = CliRunner().invoke(app, ["compact", str(tmp_path), "--follow", *option])
    assert found.exit_code == Exit.USAGE
    assert "--follow merges what runs ask for" in found.stderr


def test_there_has_to_be_a_root(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["compact", str(tmp_path / "none"), "--follow"])
    assert found.exit_code == Exit.NO_ROOT and "none" in found.stderr
