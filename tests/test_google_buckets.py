"""Runs in a bucket of Google Cloud Storage: what holds for S3 holds there.

The service of these tests is one like S3 behind a proxy that puts Google's headers into its own, so
that the same conditions are asked for in the other form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.cli.app import app

from . import test_bucket_rollbacks, test_buckets, test_catalogue
from .conftest import case_of, each_of

PROMISES: list[Callable[..., None]] = [
    test_buckets.test_a_run_lives_in_a_bucket,
    test_buckets.test_a_killed_save_is_no_step_and_its_number_is_free,
    test_buckets.test_a_step_is_there_before_plain_orbax_lists_it,
    test_buckets.test_one_attempt_at_a_time_holds_a_folder,
    test_buckets.test_an_attempt_that_is_given_up_leaves_nothing,
    test_buckets.test_steps_whose_dense_leaves_orbax_has_written_are_read,
    test_bucket_rollbacks.test_a_save_of_a_number_that_is_taken_has_a_name_of_its_own,
    test_bucket_rollbacks.test_who_takes_a_root_over_sees_what_was_done_there_since,
    test_catalogue.test_who_deletes_without_a_claim_ends_the_catalogue,
    test_buckets.test_what_reads_and_tends_a_root,
    test_buckets.test_every_verb_reads_a_bucket,
]


@pytest.fixture
def root(google: epath.Path) -> epath.Path:
    return google / "runs/lr=[0.1] #1"


@pytest.mark.parametrize(
    "promise",
    [*PROMISES[:5], *(pytest.param(p, marks=pytest.mark.slow) for p in PROMISES[5:])],
    ids=lambda test: test.__name__,
)
def test_what_holds_for_s3_holds_here(
    promise: Callable[..., None], root: epath.Path, request: pytest.FixtureRequest
) -> None:
    names = [*inspect.signature(promise).parameters]
    promise(**{name: request.getfixturevalue(name) for name in names})


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "takes over"])
def test_of_a_commit_and_a_takeover_only_one_takes_place(
    root: epath.Path, commits: bool
) -> None:
    test_buckets.test_of_a_commit_and_a_takeover_only_one_takes_place(root, commits)


@pytest.mark.slow  # as in a bucket of S3, where it is always run
def test_programs_that_race_mix_nothing(root: epath.Path) -> None:
    test_buckets.raced(root, 2, 2)


def test_retention_prunes_and_verifies(tiny_run: Any, root: epath.Path) -> None:
    run = tiny_run()
    with run.open(str(root), {"max_to_keep": 3}, policy=cnr.Full()) as manager:
        run.run(manager, range(5))
        assert manager.all_steps() == [2, 3, 4]
    assert cnr.verify(root) == ()
    assert cnr.prune(root, keep=1, delete=True, writer_is_dead=True).is_done
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [4]
        run.check(manager, 4)


def test_a_step_is_shown_read_and_exported(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run, url = tiny_run(), str(root)
    with run.open(url) as manager:
        run.run(manager, range(2))
    want = run.truth[1]["['params']['user']['embedding']"]
    for words in (["ls", url], ["show", url, "1"], ["verify", url]):
        with case_of(words):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
    assert cnr.read_rows(url, "user", [3, 0]).tolist() == want[[3, 0]].tolist()
    cnr.export(url, 1, tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "out", run.state)
    run.same(found, run.truth[1])
    fresh = tiny_run(salt=1)
    with fresh.open(url, new_run=True) as manager:
        fresh.run(manager, [0])
        assert manager.all_steps() == [0]
        fresh.check(manager, 0)


@each_of("url", ["127.0.0.1:1", "ftp://host", ""])
def test_a_service_that_is_no_url_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    with pytest.raises(errors.OptionError, match=r"STORAGE_EMULATOR_HOST is no URL"):
        cnr.CheckpointManager("gs://bucket/run")
