"""Clients of buckets of Google Cloud Storage: which service and credentials they use.

Credentials are found as Google's own programs find them: a file that GOOGLE_APPLICATION_CREDENTIALS
names, that of `gcloud auth application-default login`, or the service account of the machine.
"""

from __future__ import annotations

import os
import re
from typing import Any

from cnr_jax import errors
from cnr_jax.repository.store.base import AnyPath

EXTRA = "gs"
ENVIRONMENT = "GOOGLE_*"
# As in Google's own clients, an emulator at this address asks for no credentials.
_EMULATOR = "STORAGE_EMULATOR_HOST"
_RIGHTS_HINT = (
    "are the credentials the right ones, and may they do this? docs/guides/buckets.md says which"
    " rights are needed"
)
# Hints what to do, by the code of an error.
HINTS = {
    "NoSuchBucket": "make the bucket, or correct its name",
    "AccessDenied": _RIGHTS_HINT,
    "InvalidAccessKeyId": _RIGHTS_HINT,
    "403": _RIGHTS_HINT,
    "401": _RIGHTS_HINT,
    "SlowDown": "the service asks for fewer requests: let fewer programs use it at a time",
    "429": "the service asks for fewer requests: let fewer programs use it at a time",
    "NoKeys": "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "Name": "call the root otherwise",
}
OTHER_HINT = (
    "is the service up, and are there credentials? What is saved is there still"
)
CONDITIONS_HINT = (
    "does the service know x-goog-if-generation-match? Else use another one"
)


def check(root: AnyPath) -> None:
    """Checks that the address of an emulator in the environment, if any, is a URL.

    Raises:
        OptionError: if it is not.
    """
    endpoint = os.environ.get(_EMULATOR)
    if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
        raise errors.OptionError(
            f"{os.fspath(root)} is no root here, as {_EMULATOR} is no URL of a service\n"
            f"  got {endpoint!r}, expected http://HOST:PORT or https://HOST\n"
            "  hint: correct or unset it"
        )


def given() -> tuple[Any, ...]:
    """Settings that the environment has now, from which `make` makes clients."""
    return tuple(map(os.environ.get, (_EMULATOR, "GOOGLE_APPLICATION_CREDENTIALS")))


def make(
    bucket: str,
    client_options: dict[str, Any],
    retries: Any,
    endpoint: str | None,
    *_: str | None,
) -> Any:
    """Makes a client of a bucket from the settings that `given` returns.

    Raises:
        OSError: if a file that the environment names cannot be read.
        ValueError: if the environment names no service.
    """
    from obstore.store import GCSStore

    settings: Any = {}
    if endpoint:
        settings = {"base_url": endpoint.rstrip("/"), "bearer_token": "emulator"}
    options: Any = {
        **client_options,
        "allow_http": bool(endpoint and endpoint.startswith("http:")),
    }
    return GCSStore(
        bucket, config=settings, client_options=options, retry_config=retries
    )
