"""Clients of buckets of S3 and services like it: which service, region and keys they use."""

from __future__ import annotations

import datetime
import functools
import os
import re
from typing import Any, NamedTuple

from cnr_jax import errors
from cnr_jax.repository.store.base import AnyPath

EXTRA = "s3"
ENVIRONMENT = "AWS_*"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# Seconds after which keys are asked for again: they may be replaced while a run goes on.
_KEYS_SECS = 300
_KEYS_HINT = (
    "are the keys the right ones, and may they do this? docs/guides/buckets.md says which rights"
    " are needed"
)
# Hints what to do, by the code of an error.
HINTS = {
    "NoSuchBucket": "make the bucket, or correct its name or AWS_ENDPOINT_URL",
    "PermanentRedirect": "set AWS_REGION to the region of the bucket",
    "AuthorizationHeaderMalformed": "set AWS_REGION to the region of the bucket",
    "InvalidObjectState": "the object is archived: bring it back, and let no rule archive a run",
    "AccessDenied": _KEYS_HINT,
    "InvalidAccessKeyId": _KEYS_HINT,
    "SignatureDoesNotMatch": _KEYS_HINT,
    "ExpiredToken": "the keys have expired: make new ones",
    # The answer to a HEAD request has only a number.
    "400": "have the keys expired, and is AWS_REGION the region of the bucket?",
    "301": "set AWS_REGION to the region of the bucket",
    "403": _KEYS_HINT,
    "401": _KEYS_HINT,
    "SlowDown": "the service asks for fewer requests: let fewer programs use it at a time",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "NoKeys": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, which takes"
    " pip install boto3",
    "InvalidCertificate": "set AWS_CA_BUNDLE to a file with the certificates of its authority",
    "Name": "call the root otherwise",
}
OTHER_HINT = (
    "is the service up, and AWS_ENDPOINT_URL right? What is saved is there still"
)
CONDITIONS_HINT = (
    "does the service know If-Match and If-None-Match? Else use another one"
)


def check(root: AnyPath) -> None:
    """Checks the address of a service and the profile in the environment, if it names any.

    Raises:
        OptionError: if one of them is wrong, or a profile needs boto3, which is not installed.
    """
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
        except Exception as error:  # an error of botocore, which boto3 imports
            raise errors.OptionError(
                f"{os.fspath(root)} is no root here, as AWS_PROFILE names no profile\n"
                f"  got {profile!r}: {error}\n"
                "  hint: correct or unset it"
            ) from error


def _endpoint() -> str | None:
    """URL of the service; None for that of AWS."""
    found = next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
    return found or _profile().endpoint


def _region() -> str:
    found = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return found or _profile().region or "us-east-1"


class _Profile(NamedTuple):
    """What a profile says of the service, as boto3 reads it."""

    region: str | None = None
    endpoint: str | None = None


def _profile() -> _Profile:
    """The profile that the environment names, or the default one, where boto3 is asked."""
    env = os.environ
    if not _asks_boto3():
        return _Profile()
    return _read_profile(env.get("AWS_PROFILE"), env.get("AWS_CONFIG_FILE"))


@functools.cache
def _read_profile(profile: str | None, config: str | None) -> _Profile:
    """Reads a profile from the file that `config` names, or else from its usual place."""
    import botocore.session

    session = botocore.session.Session(profile=profile)
    told, services = session.get_scoped_config(), session.full_config.get("services")
    own = (services or {}).get(told.get("services"), {}).get("s3", {})
    endpoint = own.get("endpoint_url") or told.get("endpoint_url")
    return _Profile(session.get_config_variable("region"), endpoint)


def _asks_boto3() -> bool:
    """Whether boto3 finds the keys: it knows profiles, which the client does not."""
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
    """Keys that boto3 finds now, in the environment, in files, or where a profile says."""
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


def given() -> tuple[Any, ...]:
    """Settings that the environment has now, from which `make` makes clients."""
    names = ("AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_ACCESS_KEY_ID")
    secrets = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    # A hash tells secrets apart without keeping them.
    told = hash(tuple(map(os.environ.get, secrets)))
    return _endpoint(), _region(), *map(os.environ.get, names), told


def make(
    bucket: str,
    client_options: dict[str, Any],
    retries: Any,
    endpoint: str | None,
    region: str,
    certificates: str | None,
    *_: str | int | None,
) -> Any:
    """Makes a client of a bucket from the settings that `given` returns.

    Raises:
        OSError: if a file that the environment names cannot be read.
        ValueError: if the environment names no service.
    """
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
        **client_options,
        "allow_http": bool(endpoint and endpoint.startswith("http:")),
    }
    if certificates:
        with open(certificates) as file:
            options["root_certificate"] = file.read()
    return S3Store(
        bucket,
        config=settings,
        client_options=options,
        credential_provider=provider,
        retry_config=retries,
    )
