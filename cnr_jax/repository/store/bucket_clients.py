"""Clients of buckets: which service, region and keys they use, and what their errors mean."""

from __future__ import annotations

import datetime
import errno
import functools
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any

from cnr_jax import errors
from cnr_jax.repository.causes import RefusedError, StoreError
from cnr_jax.repository.store.base import AnyPath

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# How long a request may take, and how long one that fails is tried again.
_REQUEST_SECS, RETRY_SECS = 60, 60
_CONNECT_SECS = 10
# As many as fit into that: the pauses between them grow to some seconds.
_RETRIES, _PAUSE_SECS = 100, 5
# Before a put is tried again that met another: not all at the same time.
MEETING_SECS = 0.2
# Keys may be replaced by new ones as long as a run goes on.
_KEYS_SECS = 300
# What says nothing about an object: the service did not answer, or not with what was asked for.
NO_ANSWER = getattr(errno, "EREMOTEIO", errno.EPROTO)
_KEYS_HINT = (
    "are the keys the right ones, and may they do this? docs/guides/buckets.md says which rights"
    " are needed"
)
# What to do, by the code of an error.
_HINTS = {
    "NoSuchBucket": "make the bucket, or correct its name or AWS_ENDPOINT_URL",
    "PermanentRedirect": "set AWS_REGION to the region of the bucket",
    "AuthorizationHeaderMalformed": "set AWS_REGION to the region of the bucket",
    "InvalidObjectState": "the object is archived: bring it back, and let no rule archive a run",
    "AccessDenied": _KEYS_HINT,
    "InvalidAccessKeyId": _KEYS_HINT,
    "SignatureDoesNotMatch": _KEYS_HINT,
    "ExpiredToken": "the keys have expired: make new ones",
    # A look is answered by a number alone.
    "400": "have the keys expired, and is AWS_REGION the region of the bucket?",
    "301": "set AWS_REGION to the region of the bucket",
    "403": _KEYS_HINT,
    "401": _KEYS_HINT,
    "SlowDown": "the service asks for fewer requests: let fewer programs use it at a time",
    "RequestTimeTooSkewed": "set the clock of this machine",
}
_OTHER_HINT = (
    "is the service up, and AWS_ENDPOINT_URL right? What is saved is there still"
)
# What is said where a client tells of no code, and what to do if not the above.
_WITHOUT_CODE = {
    "InvalidCertificate(": (
        "no connection, as the certificate of the service is not known",
        "set AWS_CA_BUNDLE to a file with the certificates of its authority",
    ),
    "dns error": ("no connection, as no host has this name", _OTHER_HINT),
    "kind: Connect": ("no connection", _OTHER_HINT),
    "kind: Timeout": ("no answer in time", _OTHER_HINT),
    "": ("no whole answer", _OTHER_HINT),
}


def check_reachable(root: AnyPath) -> None:
    """Checks that a client can be made for a root: packages, services and profiles are there.

    Raises:
        OptionError: if not.
    """
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise errors.OptionError(
            f"{os.fspath(root)} is no root here, as obstore is not installed;"
            ' hint: pip install "cnr-jax[s3]"',
            kind="not_installed",
        ) from error
    for name in _ENDPOINTS:
        endpoint = os.environ.get(name)
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise errors.OptionError(
                f"{os.fspath(root)} is no root here, as {name} is no URL of a service\n"
                f"  got {endpoint!r}, expected http://HOST:PORT or https://HOST\n"
                "  hint: correct or unset it"
            )
    profile = os.environ.get("AWS_PROFILE")
    if profile and not _asks_boto3():
        raise errors.OptionError(
            f"{os.fspath(root)} is no root here, as boto3 is not installed, which finds the"
            f" keys of the profile {profile!r} that AWS_PROFILE names; hint: pip install boto3",
            kind="not_installed",
        )
    if profile:
        import boto3

        try:
            boto3.Session()
        except Exception as error:  # of botocore, which is imported with it
            raise errors.OptionError(
                f"{os.fspath(root)} is no root here, as AWS_PROFILE names no profile\n"
                f"  got {profile!r}: {error}\n"
                "  hint: correct or unset it"
            ) from error


def _endpoint() -> str | None:
    """Of the service, if it is not that of AWS."""
    return next(filter(None, map(os.environ.get, _ENDPOINTS)), None)


def _region() -> str:
    env = os.environ
    found = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    return found or _region_of(env.get("AWS_PROFILE")) or "us-east-1"


@functools.cache
def _region_of(profile: str | None) -> str | None:
    """The region of a profile, as boto3 finds it."""
    if not _asks_boto3():
        return None
    import boto3

    return boto3.Session(profile_name=profile).region_name


def _asks_boto3() -> bool:
    """Whether keys are those that boto3 finds: it knows profiles, which the client does not."""
    env = os.environ
    has_keys = env.get("AWS_ACCESS_KEY_ID") and not env.get("AWS_PROFILE")
    if has_keys:
        return False
    try:
        import boto3  # noqa: F401
    except ImportError:
        return False
    return True


def _keys_of_boto3() -> Any:
    """Keys as they are now, in the environment, files, or wherever a profile says."""
    import boto3

    session = boto3.Session()
    found: Any = session.get_credentials()
    keys = found.get_frozen_credentials()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "token": keys.token,
        "expires_at": now + datetime.timedelta(seconds=_KEYS_SECS),
    }


# The process that has used a client: its threads are not there in one that is forked.
_user: int | None = None


@functools.lru_cache(maxsize=16)
def _new_client(
    bucket: str,
    endpoint: str | None,
    region: str,
    certificates: str | None,
    profile: str | None,
    key: str | None,
) -> Any:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    provider = None
    if _asks_boto3():
        import boto3

        if boto3.Session().get_credentials() is not None:
            provider = _keys_of_boto3
    settings: Any = {"region": region}
    if endpoint:
        settings["endpoint"] = endpoint
    options: Any = {
        "allow_http": bool(endpoint and endpoint.startswith("http:")),
        "timeout": datetime.timedelta(seconds=_REQUEST_SECS),
        "connect_timeout": datetime.timedelta(seconds=_CONNECT_SECS),
    }
    try:
        if certificates:
            with open(certificates) as file:
                options["root_certificate"] = file.read()
        return S3Store(
            bucket,
            config=settings,
            client_options=options,
            credential_provider=provider,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": datetime.timedelta(seconds=RETRY_SECS),
                "backoff": {
                    "init_backoff": datetime.timedelta(seconds=0.1),
                    "max_backoff": datetime.timedelta(seconds=_PAUSE_SECS),
                    "base": 2,
                },
            },
        )
    except (OSError, ValueError, BaseError) as error:
        raise errors.OptionError(
            f"s3://{bucket} cannot be reached: no client can be made\n"
            f"  {type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
            "  hint: look at the variables AWS_* of the environment"
        ) from None


def client_of(bucket: str) -> Any:
    """A client of a bucket, with the keys and settings that the environment says now.

    Raises:
        OSError: in a process that was forked from one that has used a client: its requests would
            be waited for, for ever.
    """
    global _user
    if _user not in (None, os.getpid()):
        raise OSError(
            errno.ENOTSUP,
            "process forked from one that has used buckets; hint: start processes by"
            " multiprocessing's spawn or forkserver",
        )
    _user = os.getpid()
    given = map(os.environ.get, ("AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"))
    return _new_client(bucket, _endpoint(), _region(), *given)


def asked(path: AnyPath, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The answer to a request of a client; asks again where it is cut, as the client does not.

    Raises:
        OSError: as `asked_once`.
    """
    last = time.monotonic() + RETRY_SECS
    while True:
        try:
            return asked_once(path, request, *args, **kwargs)
        except StoreError as error:
            is_cut = error.fact == _WITHOUT_CODE[""][0] and "mode" not in kwargs
            if not is_cut or time.monotonic() > last:
                raise
        time.sleep(random.uniform(0, MEETING_SECS))


def asked_once(
    path: AnyPath, request: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The answer to a request of a client.

    What the client says of an error is left out, as it quotes the whole answer: some quote keys.

    Raises:
        OSError: for whatever the client raises; it names the path, and what to do.
    """
    from obstore import exceptions

    try:
        return request(*args, **kwargs)
    except errors.CnrError:
        raise  # no client could be made
    except FileNotFoundError as error:
        text = str(error)
        kind = StoreError if "NoSuchBucket" in text else FileNotFoundError
    except (exceptions.BaseError, ValueError) as error:
        text, kind = str(error), StoreError
        met = exceptions.AlreadyExistsError, exceptions.PreconditionError
        if isinstance(error, met) and "mode" in kwargs:  # which is a condition
            kind = FileExistsError
    # Here, where the other one is no context of this one.
    where = os.fspath(path)
    if kind is StoreError:
        raise _store_error(text, where)
    number = errno.ENOENT if kind is FileNotFoundError else errno.EEXIST
    raise kind(number, os.strerror(number), where)


def _store_error(text: str, where: str) -> StoreError:
    """What a client tells of, in short, and what to do."""
    forms = (
        r"status code:? (\d{3})",
        r"<Code>([\w.]+)</Code>",
        r"\(code: ([\w.]+)\)",
    )
    codes = [found[1] for form in forms if (found := re.search(form, text))]
    if not codes:
        fact, hint = next(to for said, to in _WITHOUT_CODE.items() if said in text)
        return StoreError(NO_ANSWER, f"{fact}; hint: {hint}", where)
    hints = (_HINTS[code] for code in reversed(codes) if code in _HINTS)
    fact = f"answer {' '.join(codes)}; hint: {next(hints, _OTHER_HINT)}"
    if {"401", "403", "AccessDenied"} & {*codes}:
        return RefusedError(errno.EACCES, fact, where)
    return StoreError(NO_ANSWER, fact, where)
