"""Clients of buckets by service: how often and how long they try, and what their errors mean."""

from __future__ import annotations

import concurrent.futures
import datetime
import errno
import functools
import os
import random
import re
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from cnr_jax import errors
from cnr_jax.repository.causes import RefusedError, StoreError
from cnr_jax.repository.store import gs_clients, s3_clients
from cnr_jax.repository.store.base import AnyPath
from cnr_jax.texts import logger

_log = logger(__name__)
# Modules of services by the scheme of a URL.
SERVICES: dict[str, ModuleType] = {"gs": gs_clients, "s3": s3_clients}
# Seconds that a request may take, and for which one that fails is tried again.
_REQUEST_SECS, RETRY_SECS = 60, 60
_CONNECT_SECS = 10
# More retries than fit into that time, since the pauses between them grow to some seconds.
_RETRIES, _PAUSE_SECS = 100, 5
# Seconds after which the log says what a program waits for.
_SILENT_SECS = 5
# Most seconds before a put is tried again that met another; random, so that not all come at once.
MEETING_SECS = 0.2
# `errno` that says nothing about the object: the service did not answer, or not as it should.
NO_ANSWER = getattr(errno, "EREMOTEIO", errno.EPROTO)
# Addresses that a client asks for keys if it has none. Then by words in an error without a code,
# the fact, and the name of its hint among `HINTS` of the service.
_ASKS_FOR_KEYS = re.compile(
    r"://(169\.254\.(169\.254|170\.2|170\.23)|metadata\.google\.internal)[/:]"
)
_NO_KEYS = "no keys were found", "NoKeys"
_WITHOUT_CODE = {
    "InvalidCertificate(": (
        "no connection, as the certificate of the service is not known",
        "InvalidCertificate",
    ),
    "without LOCATION": ("answer 301", "301"),
    "Could not parse path": ("no object can be called so", "Name"),
    "dns error": ("no connection, as no host has this name", ""),
    "kind: Connect": ("no connection", ""),
    "kind: Timeout": ("no answer in time", ""),
    "": ("no whole answer", ""),
}


def service_of(path: AnyPath) -> Any:
    """Module of the service of a URL."""
    return SERVICES[os.fspath(path).partition("://")[0]]


def check_reachable(root: AnyPath) -> None:
    """Checks that a client can be made for a root: packages, service and profile exist.

    Raises:
        OptionError: if it cannot.
    """
    service = service_of(root)
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise errors.OptionError(
            f"{os.fspath(root)} is no root here, as obstore is not installed;"
            f' hint: pip install "cnr-jax[{service.EXTRA}]"',
            kind="not_installed",
        ) from error
    service.check(root)


# Id of the process that has used a client. A process forked from it lacks the client's threads.
_user: int | None = None


@functools.lru_cache(maxsize=16)
def _new_client(scheme: str, bucket: str, *given: Any) -> Any:
    from obstore.exceptions import BaseError

    service: Any = SERVICES[scheme]
    options = {
        "timeout": datetime.timedelta(seconds=_REQUEST_SECS),
        "connect_timeout": datetime.timedelta(seconds=_CONNECT_SECS),
    }
    retries = {
        "max_retries": _RETRIES,
        "retry_timeout": datetime.timedelta(seconds=RETRY_SECS),
        "backoff": {
            "init_backoff": datetime.timedelta(seconds=0.1),
            "max_backoff": datetime.timedelta(seconds=_PAUSE_SECS),
            "base": 2,
        },
    }
    try:
        return service.make(bucket, options, retries, *given)
    except (OSError, ValueError, BaseError) as error:
        raise errors.OptionError(
            f"{scheme}://{bucket} cannot be reached: no client can be made\n"
            f"  {type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
            f"  hint: look at the variables {service.ENVIRONMENT} of the environment"
        ) from None


def client_of(path: AnyPath) -> Any:
    """Client of the bucket of a URL, with the keys and settings that the environment now has.

    Raises:
        OSError: in a process that was forked from one that has used a client. Its requests would
            wait for ever.
    """
    global _user
    if _user not in (None, os.getpid()):
        raise OSError(
            errno.ENOTSUP,
            "process forked from one that has used buckets; hint: start processes by"
            " multiprocessing's spawn or forkserver",
        )
    _user = os.getpid()
    scheme, _, rest = os.fspath(path).partition("://")
    return _new_client(scheme, rest.partition("/")[0], *SERVICES[scheme].given())


def asked(path: AnyPath, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Answer to a request of a client; asks again if the answer is cut, as the client does not.

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
    """Answer to a request of a client.

    Errors leave out the text of the client, which quotes the whole answer: some answers hold keys.

    Raises:
        OSError: for any error of the client; it names the path, and says what to do.
    """
    from obstore import exceptions

    try:
        if threading.current_thread() is threading.main_thread():
            return _in_a_thread(path, request, *args, **kwargs)
        return request(*args, **kwargs)
    except errors.CnrError:
        raise  # no client could be made
    except FileNotFoundError as error:
        text = str(error)
        kind = StoreError if "NoSuchBucket" in text else FileNotFoundError
    except (exceptions.BaseError, ValueError) as error:
        text, kind = str(error), StoreError
        met = exceptions.AlreadyExistsError, exceptions.PreconditionError
        if isinstance(error, met) and "mode" in kwargs:  # `mode` is the condition
            kind = FileExistsError
    # Raised outside `except`, so that the error of the client does not become its context.
    where = os.fspath(path)
    if kind is StoreError:
        raise _store_error(text, where, service_of(path))
    number = errno.ENOENT if kind is FileNotFoundError else errno.EEXIST
    raise kind(number, os.strerror(number), where)


def _in_a_thread(
    path: AnyPath, request: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Answer to a request that another thread makes; a warning says so if it takes long.

    While the client waits, for minutes if no service answers, it lets no interrupt through.
    """
    answer = concurrent.futures.Future[Any]()

    def ask() -> None:
        try:
            answer.set_result(request(*args, **kwargs))
        except BaseException as error:
            answer.set_exception(error)

    # A daemon, so that a program that ends does not wait for it.
    threading.Thread(target=ask, name="cnr_request", daemon=True).start()
    if not concurrent.futures.wait([answer], _SILENT_SECS).done:
        _log.warning(
            "waiting for an answer about %s, for %g s by now: its service is slow or away. A"
            " request that fails is tried again for %g s",
            os.fspath(path),
            _SILENT_SECS,
            RETRY_SECS,
        )
    return answer.result()


def _store_error(text: str, where: str, service: Any) -> StoreError:
    """Error that says briefly what the text of a client means, and what to do."""
    forms = (
        r"status code:? (\d{3})",
        r"<Code>([\w.]+)</Code>",
        r"\(code: ([\w.]+)\)",
    )
    codes = [found[1] for form in forms if (found := re.search(form, text))]
    is_of_keys = _ASKS_FOR_KEYS.search(text) is not None
    if is_of_keys or not codes:
        known = (to for said, to in _WITHOUT_CODE.items() if said in text)
        fact, hint = next(known)
        if is_of_keys:
            fact, hint = f"{_NO_KEYS[0]} ({' '.join(codes) or fact})", _NO_KEYS[1]
        said = f"{fact}; hint: {service.HINTS.get(hint, service.OTHER_HINT)}"
        if is_of_keys:
            return RefusedError(errno.EACCES, said, where)
        return StoreError(NO_ANSWER, said, where)
    hints = (service.HINTS[code] for code in reversed(codes) if code in service.HINTS)
    fact = f"answer {' '.join(codes)}; hint: {next(hints, service.OTHER_HINT)}"
    if {"401", "403", "AccessDenied"} & {*codes}:
        return RefusedError(errno.EACCES, fact, where)
    return StoreError(NO_ANSWER, fact, where)
