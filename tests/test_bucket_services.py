"""What ends real runs on buckets: services that are away, refuse, archive or keep versions."""

from __future__ import annotations

import concurrent.futures
import datetime
import ipaddress
import itertools
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.store import bucket_clients, gs_clients, s3_clients, store_of

from .bucket_proxy import KEY, SECRET, Proxy
from .conftest import case_of, each_of, free_port
from .test_buckets import held

TABLE = "user"


# By others the way is checked that a request has taken, or whom keys are of.
only_moto = pytest.mark.skipif(
    os.environ.get("CNR_S3_SERVER", "moto") != "moto", reason="moto takes any signature"
)


@pytest.fixture
def root(bucket: epath.Path) -> epath.Path:
    return bucket / "run"


# ---- services that do not answer ----------------------------------------------------------------


def test_each_call_says_which_object_code_and_what_to_do_while_a_service_is_away(
    tiny_run: Any, root: epath.Path, proxy: Proxy, impatient: None, tmp_path: Path
) -> None:
    run, url = tiny_run(), str(root)
    proxy.says = b"<Error><Code>SlowDown</Code></Error>"
    with run.open(url) as manager:
        run.run(manager, range(3))
        calls: dict[str, Callable[[], Any]] = {
            "restore(None)": lambda: run.restore(manager, None),
            "restore(1)": lambda: run.restore(manager, 1),
            "reload": manager.reload,
            "all_steps": lambda: manager.all_steps(read=True),
            "verify": manager.verify,
            "metadata": lambda: manager.metadata(1),
            "metrics": lambda: manager.metrics(1),
            "delete": lambda: manager.delete(2),
            "open": lambda: run.open(url),
            "cnr.verify": lambda: cnr.verify(url),
            "describe": lambda: cnr.describe(url),
            "read_rows": lambda: cnr.read_rows(url, TABLE, [1]),
            "export": lambda: cnr.export(url, 1, tmp_path / "out"),
            "prune": lambda: cnr.prune(url, keep=1),
        }
        proxy.harm = lambda *_: 503
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for name, call in calls.items():
                with case_of(name), pytest.raises(errors.RootError) as caught:
                    pool.submit(call).result(60)
                text = str(caught.value)
                assert caught.value.kind == "no_answer", name
                assert "answer 503" in text and f": {url}" in text, name
                assert text.count("hint: ") == 1 and "mounted" not in text, name
        proxy.harm = lambda *_: None
        run.restore(manager, None)
        run.run(manager, [3])
        run.check(manager, None)
        manager.reload()  # which gives the root up
        manager.delete(3)
        assert manager.all_steps() == [0, 1, 2]
    assert cnr.verify(root) == ()


def test_what_kind_of_a_connection_fails_is_said(
    root: epath.Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(errors.RootError, match=r"\n  no connection: s3://"):
        cnr.CheckpointManager(str(root))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://nobody.invalid")
    with pytest.raises(errors.RootError, match="no host has this name"):
        cnr.verify(root)


def test_an_answer_that_takes_too_long_is_given_up(
    root: epath.Path, proxy: Proxy, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_clients, "_REQUEST_SECS", 0.3)
    proxy.harm = lambda *_: 1.5
    with pytest.raises(errors.RootError, match="no answer in time: s3://"):
        cnr.verify(root)


def test_a_service_that_asks_for_less_is_asked_at_growing_distances(
    root: epath.Path, proxy: Proxy, patient: None
) -> None:
    store, asked = store_of(root), list[float]()
    store.write(root / "file", b"1", replaces=True)
    proxy.says = b"<Error><Code>SlowDown</Code></Error>"

    def harm(*_: Any) -> int | None:
        asked.append(time.monotonic())
        return 503 if len(asked) < 6 else None

    proxy.harm = harm
    assert store.read(root / "file") == b"1"
    pauses = [b - a for a, b in itertools.pairwise(asked)]
    assert len(asked) == 6 and pauses[0] >= 0.1 and sum(pauses) > 0.6


@each_of("harm", ["truncate", "drop", "reset", 500, 0.2])
def test_a_read_that_is_disturbed_once_is_made_again(
    bucket: epath.Path, proxy: Proxy, harm: Any
) -> None:
    store, path = store_of(bucket), bucket / "file"
    data = os.urandom(3 << 20)
    store.write(path, data, replaces=True)
    for read in (store.read, lambda path: store.open_file(path).read()):
        harms = iter([harm])
        proxy.harm = lambda *_: next(harms, None)  # noqa: B023
        assert read(path) == data
    for look in (store.names_in, store.is_directory, store.bytes_below):
        harms = iter([harm])
        proxy.harm = lambda *_: next(harms, None)  # noqa: B023
        assert look(bucket), "what lists"


@each_of("code", [409, 412])
def test_a_condition_that_is_said_not_to_hold_is_tried_again(
    bucket: epath.Path, proxy: Proxy, impatient: None, code: int
) -> None:
    """Two puts may meet, of which the service refuses both."""
    store, path = store_of(bucket), bucket / "file"
    for data in (b"1", b"2"):  # where nothing is, and where something is
        known = store.read_version(path)
        proxy.harm = lambda kind, *_: code if kind == "PUT" else None
        with pytest.raises(OSError, match="hint: does the service know If-Match"):
            store.swap(path, data, known and known[1])
        harms = iter([code])
        proxy.harm = lambda kind, *_: next(harms, None) if kind == "PUT" else None  # noqa: B023
        store.swap(path, data, known and known[1])
        assert store.read(path) == data
    proxy.harm = lambda *_: None
    with pytest.raises(FileExistsError):
        store.write_new(path, b"3")
    # Of a read it says nothing of that kind.
    proxy.harm = lambda *_: code
    with pytest.raises(OSError, match=f"answer {code}") as caught:
        store.read(path)
    assert not isinstance(caught.value, FileExistsError)
    proxy.harm = lambda *_: None
    store.remove_file(path)


def test_a_root_without_a_bucket_is_refused() -> None:
    for url in ("s3://", "s3:///run", "gs://"):
        with pytest.raises(errors.OptionError, match="it names no bucket\n  expected"):
            cnr.CheckpointManager(url)
        with pytest.raises(errors.OptionError, match="it names no bucket"):
            cnr.verify(url)


# ---- services that refuse -----------------------------------------------------------------------


def test_who_may_not_list_learns_nothing_from_403(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    """Without ListBucket a service says 403 where nothing is: that is no proof of absence."""
    run = tiny_run()
    proxy.harm = lambda kind, *_: "veil" if kind != "LIST" else 403
    with pytest.raises(errors.RootError, match="which rights are needed") as caught:
        run.open(str(root))
    assert caught.value.kind == "refused"
    for call in (lambda: cnr.verify(root), lambda: cnr.describe(root)):
        with pytest.raises(errors.RootError, match="answer 403"):
            call()
    with pytest.raises(PermissionError):
        store_of(root).exists(root / names.WRITER)


def refused(asked: bytes) -> bytes:
    """What a service says of objects that it is asked to delete, and does not."""
    keys = re.findall(rb"<Key>(.*?)</Key>", asked)
    each = b"<Error><Key>%s</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    told = b"".join(each % key for key in keys) or each % b""
    return b'<DeleteResult xmlns="%s">%s</DeleteResult>' % (
        b"http://s3.amazonaws.com/doc/2006-03-01/",
        told,
    )


@pytest.mark.parametrize("code", [403, 200])
def test_a_refused_delete_is_no_damage_and_saves_go_on(
    tiny_run: Any,
    root: epath.Path,
    proxy: Proxy,
    code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As under a lock on objects, or by who may not delete; 200: refused object by object."""
    run = tiny_run()
    proxy.says = refused
    proxy.harm = lambda kind, *_: code if kind == "DELETE" else None
    with run.open(str(root), {"max_to_keep": 1}, policy=cnr.Full()) as manager:
        for step in range(3):
            run.run(manager, [step])
            run.check(manager, None)
            assert manager.all_steps() == [step], "no other is whole any more"
            assert [each.step for each in cnr.describe(root).steps] == [step]
        assert "0 is removed, but not all of its files could be deleted" in caplog.text
        assert "AccessDenied" in caplog.text
        assert {"0", "1", "2"} <= {*held(root)}
        proxy.harm = lambda *_: None
        run.run(manager, [3])
        assert {*"0123"} & {*held(root)} == {"3"}, "they go when they may"
        run.check(manager, None)
    assert cnr.verify(root) == ()


def test_an_archived_parent_is_no_damage(
    tiny_run: Any, root: epath.Path, proxy: Proxy
) -> None:
    """A rule that archives objects by their age takes what a chain rests on."""
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
    proxy.says = b"<Error><Code>InvalidObjectState</Code></Error>"
    proxy.harm = lambda kind, path, *_: (
        403 if kind == "GET" and "/run/0/default/rows." in path else None
    )
    with run.open(str(root)) as manager:
        for step in (None, 1):
            with pytest.raises(errors.RootError, match="is archived: bring it back"):
                run.restore(manager, step)
        proxy.harm = lambda *_: None
        assert manager.all_steps() == [0, 1], "nothing is taken for damaged"
        run.restore(manager, None)
        run.same(run.state, run.truth[1])


# ---- what a bucket may do -----------------------------------------------------------------------


@pytest.mark.slow  # as a run in any other bucket
def test_a_bucket_may_keep_versions(
    tiny_run: Any, bucket: epath.Path, s3: str, benchmarks: Any
) -> None:
    benchmarks("object_stores").client(s3).put_bucket_versioning(
        Bucket=str(bucket)[5:], VersioningConfiguration={"Status": "Enabled"}
    )
    run, root = tiny_run(), bucket / "run"
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
        run.restore(manager, 1)
        run.run(manager, [2, 3])  # one number is taken
        for step in range(4):
            run.check(manager, step)
    with run.open(str(root), {"max_to_keep": 1}, policy=cnr.Full()) as manager:
        run.restore(manager, None)
        run.run(manager, [4, 5])
        assert manager.all_steps() == [5]
        run.check(manager, None)
    assert [each for each in cnr.verify(root) if each.consequence] == []


def test_no_object_is_so_large_that_it_must_be_put_in_parts(
    root: epath.Path, proxy: Proxy
) -> None:
    state = {"user": jnp.ones((80_000, 64)), "dense": jnp.ones(6 << 20)}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(str(root), tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
    sizes = [len(body) for body in proxy.bodies]
    assert max(sizes) <= (16 << 20) + 64 < sum(sizes)
    assert not [path for _, path in proxy.log if "upload" in path]


# ---- the way to a service -----------------------------------------------------------------------


def test_a_certificate_of_an_authority_of_ones_own_is_named(
    root: epath.Path,
    proxy: Proxy,
    impatient: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cryptography")
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(own_certificate())
    secured = Proxy(proxy.url, certificate)
    monkeypatch.setenv("AWS_ENDPOINT_URL", secured.url)
    try:
        with pytest.raises(errors.RootError, match="hint: set AWS_CA_BUNDLE"):
            cnr.verify(root)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        store_of(root).write(root / "file", b"1", replaces=True)
        assert store_of(root).read(root / "file") == b"1"
    finally:
        secured.close()


def test_a_region_that_is_not_that_of_the_bucket_is_said_at_once(
    root: epath.Path, proxy: Proxy
) -> None:
    """As S3 itself answers: it says to go elsewhere, and not where."""
    proxy.says, proxy.harm = b"", lambda *_: 301
    with pytest.raises(
        errors.RootError, match=r"answer 301(?s:.*)hint: set AWS_REGION"
    ):
        cnr.verify(root)
    assert len(proxy.log) == 1


def test_that_no_keys_are_found_is_said() -> None:
    """What a client says that has asked the machine for keys, in vain."""
    for url in ("http://169.254.169.254/latest", "http://metadata.google.internal/"):
        for end in ("status code: 403 Forbidden", "kind: Connect"):
            text = f"Error performing PUT {url} in 6 ms - {end}"
            for service in (s3_clients, gs_clients):
                found = bucket_clients._store_error(text, "s3://b/run", service)
                assert "no keys were found (" in str(found), text
                assert service.HINTS["NoKeys"] in str(found), text


@each_of(
    "url",
    [
        "s3://bucket/../run",
        "gs://bucket/a/../run",
        "s3://bucket/run/..",
    ],
)
def test_urls_with_dots_are_no_roots(url: str) -> None:
    with pytest.raises(errors.OptionError, match="leads nowhere in a bucket"):
        cnr.verify(url)


def own_certificate() -> bytes:
    """A key, and a certificate of this machine that no authority has signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([here]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(*form, plain) + made.public_bytes(form[0])


@only_moto
def test_requests_go_through_a_proxy_that_the_environment_names(
    root: epath.Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://storage.invalid")
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    bucket_clients._new_client.cache_clear()
    store_of(root).write(root / "file", b"1", replaces=True)
    ((kind, path),) = proxy.log
    assert kind == "PUT" and path == f"http://storage.invalid/{str(root)[5:]}/file"
    bucket_clients._new_client.cache_clear()


@only_moto
@each_of("style", ["false", "true"])
def test_the_bucket_is_in_the_path_or_in_the_host(
    root: epath.Path, proxy: Proxy, style: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", style)
        bucket_clients._new_client.cache_clear()
        proxy.harm = lambda *_: 404
        assert store_of(root).read_version(root / "file") is None
    bucket = str(root)[5:].partition("/")[0]
    _, path = proxy.log[-1]
    assert path == ("/run/file" if style == "true" else f"/{bucket}/run/file")
    bucket_clients._new_client.cache_clear()


# ---- keys ---------------------------------------------------------------------------------------


@only_moto
def test_keys_of_a_token_that_is_renewed_are_taken_up(
    root: epath.Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster, where a file holds a token that is replaced while a run goes on."""
    pytest.importorskip("boto3")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    token = tmp_path / "token"
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    monkeypatch.setattr(s3_clients, "_KEYS_SECS", 0)  # they are old at once
    bucket_clients._new_client.cache_clear()
    keys = set[str]()
    for each in ("one", "two"):
        token.write_text(f"the token {each}")
        begun = len(proxy.bodies)
        store_of(root).write(root / "file", b"1", replaces=True)
        assert [b for b in proxy.bodies[begun:] if f"the+token+{each}".encode() in b]
        keys.add(proxy.signed[-1].partition("Credential=")[2].partition("/")[0])
        assert proxy.headers["x-amz-security-token"]
    assert len(keys) == 2 and KEY not in keys
    bucket_clients._new_client.cache_clear()


def test_a_secret_that_is_set_right_is_taken_up(
    root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bucket_clients.client_of(root)
    assert bucket_clients.client_of(root) is right
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            assert bucket_clients.client_of(root) is not right
    assert bucket_clients.client_of(root) is right


@only_moto
def test_keys_and_tokens_are_in_nothing_that_a_run_leaves(
    tiny_run: Any,
    root: epath.Path,
    proxy: Proxy,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-of-a-session")
    secrets = [KEY, SECRET, "a-token-of-a-session", proxy.url]
    bucket_clients._new_client.cache_clear()
    caplog.set_level("DEBUG")
    run, reports, raised = tiny_run(), list[Any](), list[BaseException]()
    # Some services repeat what they were sent.
    proxy.says = (
        f"<Error><Code>ExpiredToken</Code><Token>{secrets[2]}</Token>{KEY}</Error>"
    ).encode()
    with run.open(str(root), on_save=reports.append) as manager:
        run.run(manager, range(2))
        proxy.harm = lambda kind, *_: 400 if kind == "PUT" else None
        for call in (
            lambda: run.run(manager, [2]),
            lambda: cnr.CheckpointManager(f"{root}\0"),
        ):
            with pytest.raises(OSError) as caught:
                call()
            raised.append(caught.value)
        proxy.harm = lambda *_: 400
        with pytest.raises(errors.RootError, match=r"the keys (have )?expired") as of:
            run.restore(manager, None)
        raised.append(of.value)
        proxy.harm = lambda *_: None
        run.run(manager, [3])
        reports.append(manager.last_report)
    told = [*map(str, reports), caplog.text, *capfd.readouterr()]
    told += ["".join(traceback.format_exception(each)) for each in raised]
    told += [body.decode("latin-1") for body in proxy.bodies]
    assert len(told) > 20
    for text in told:
        for secret in secrets:
            assert secret not in text
    assert KEY in proxy.signed[-1], "though they are used"
    bucket_clients._new_client.cache_clear()
