"""Runs in a bucket of Google Cloud Storage: what holds for S3 holds there.

The service of these tests is one like S3 behind a proxy that puts Google's headers into its own, so
that the same conditions are asked for in the other form.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
import os
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
from .bucket_proxy import Proxy
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


# ---- credentials --------------------------------------------------------------------------------


def account_file(path: Path, email: str) -> Any:
    """Writes the file of a service account; returns its key."""
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives import serialization

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(*form, serialization.NoEncryption()).decode()
    account = {"type": "service_account", "client_email": email}
    account |= {"private_key_id": "of a test", "private_key": private}
    path.write_text(json.dumps(account))
    return key


def of_token(token: str, key: Any) -> dict[str, Any]:
    """What a signed token says, once its signature was seen to be of a key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    said, _, signature = token.rpartition(".")

    def decoded(part: str) -> bytes:
        return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))

    to_check = said.encode(), padding.PKCS1v15(), hashes.SHA256()
    key.public_key().verify(decoded(signature), *to_check)
    return json.loads(decoded(said.partition(".")[2]))


class Before(Proxy):
    """Stands before another proxy, which hears its own name as the one of the host."""

    def ask(
        self, command: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        return super().ask(command, path, body, {**headers, "host": self._target})


def test_a_service_account_signs_what_it_asks_for(
    tiny_run: Any,
    root: epath.Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = pytest.importorskip("obstore.store")
    proxy = Before(os.environ["STORAGE_EMULATOR_HOST"])
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    real, run = stores.GCSStore, tiny_run()

    def here(*told: Any, config: Any, client_options: Any, **others: Any) -> Any:
        """The client as it is made for Google, but for where it asks."""
        config = {**config, "base_url": proxy.url}
        options = {**client_options, "allow_http": True}
        return real(*told, config=config, client_options=options, **others)

    monkeypatch.setattr(stores, "GCSStore", here)
    with contextlib.closing(proxy):
        for step, email in enumerate(("one@project.iam", "two@project.iam")):
            file = tmp_path / f"{step}.json"
            key = account_file(file, email)
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
            proxy.signed.clear()
            with run.open(str(root)) as manager:
                if step:
                    run.restore(manager, None)
                run.run(manager, [step])
                run.check(manager, step)
            tokens = {each.removeprefix("Bearer ") for each in proxy.signed}
            assert len(proxy.signed) > 20
            for token in tokens:
                told = of_token(token, key)
                assert told["iss"] == email
                assert (
                    "devstorage" in told["scope"] or "cloud-platform" in told["scope"]
                )


@each_of("written", [None, "external_account", "impersonated_service_account"])
def test_credentials_that_the_client_does_not_know_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None
) -> None:
    """Of a federation of identities, or to act for another account; None: there is no file."""
    pytest.importorskip("obstore")
    file = tmp_path / f"{written}.json"
    if written is not None:
        file.write_text(json.dumps({"type": written, "audience": "any"}))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(errors.OptionError, match="no client can be made") as caught:
        cnr.CheckpointManager("gs://bucket/run")
    assert "hint: look at the variables GOOGLE_*" in str(caught.value)
