"""Buckets reached by `obstore`: objects whose names read like paths, and puts under a condition.

There are no folders, links or locks; what a write has returned from is durable, and is shown whole.
An answer may be lost though what it tells of was done: then it is asked what is there.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import io
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.causes import RefusedError, StoreError
from cnr_jax.repository.store import once
from cnr_jax.repository.store.base import AnyPath, Capabilities, Objects

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# How long a request may take, and how long one that fails is tried again.
_REQUEST_SECS, _RETRY_SECS = 60, 60
_CONNECT_SECS = 10
# As many as fit into that: the pauses between them grow to some seconds.
_RETRIES, _PAUSE_SECS = 100, 5
# Puts under a condition are not tried again by the client: what became of them is not known.
_PUTS = 3
# Before a put is tried again that met another: not all at the same time.
_MEETING_SECS = 0.2
# Keys may be replaced by new ones as long as a run goes on.
_KEYS_SECS = 300
# What is read of an object at a time, where it is not read as a whole.
_BLOCK_BYTES = 1 << 20
# Objects copied at a time, and fetched.
_COPIES, _AT_ONCE = 8, 16
# What says nothing about an object: the service did not answer, or not with what was asked for.
_NO_ANSWER = getattr(errno, "EREMOTEIO", errno.EPROTO)
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
_CONDITIONS = "does the service know If-Match and If-None-Match? Else use another one"
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


class BucketStore(Objects):
    """Objects of buckets of one kind, which have names like files of a folder.

    Args:
        scheme: of the URLs, such as `"s3"`.
    """

    can = Capabilities(
        renames=False,
        locks=False,
        appends=False,
        cheap_looks=False,
        conditions=True,
        paths=False,
    )

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    # Looks.

    def exists(self, path: AnyPath) -> bool:
        if (held := once.known("listing", path.parent)) is not None:
            return any(path.name in each for each in held)
        if names.is_file(path.name):
            return self._head(path) is not None
        # Mostly a folder is meant.
        return self._has_below(path) or (
            bool(_split(path)[1]) and self._head(path) is not None
        )

    def is_directory(self, path: AnyPath) -> bool:
        return self._has_below(path)

    def is_named(self, path: AnyPath) -> bool:
        return self.exists(path)

    def names_in(self, folder: AnyPath) -> list[str]:
        folders, objects = self._listing(folder)
        return sorted({*folders, *objects})

    def folders_in(
        self,
        folder: AnyPath,
        may_be: Callable[[str], bool],
        known: Collection[str] = (),
    ) -> list[str]:
        return [name for name in self._listing(folder)[0] if may_be(name)]

    def size_of(self, path: AnyPath) -> int:
        return int(self._headed(path)["size"])

    def modified_unix_secs(self, path: AnyPath) -> float:
        found = self._head(path)
        times = [found] if found else self._below(path)
        return max((each["last_modified"].timestamp() for each in times), default=0.0)

    def amiss(
        self, folder: AnyPath, files: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[str, int]]:
        _, key = _split(folder)
        sizes = {each["path"]: each["size"] for each in self._below(folder)}
        start = f"{key}/" if key else ""
        for name, size in files:
            if sizes.get(start + name) != size:
                yield name, size

    def bytes_below(self, folder: AnyPath) -> int:
        return sum(each["size"] for each in self._below(folder))

    def forget_listings(self) -> None:
        once.forget()

    def fetch(self, paths: Iterable[AnyPath]) -> None:
        if not once.is_asking_once():
            return

        def get(path: AnyPath) -> bytes | None:
            try:
                return self._read(path)[0]
            except OSError:
                return None  # of which who reads it hears

        wanted = list(paths)
        with ThreadPoolExecutor(_AT_ONCE, "cnr_fetch") as pool:
            for path, found in zip(wanted, pool.map(get, wanted), strict=True):
                once.keep("fetched", path, found)

    # Reading and writing files.

    def open_file(self, path: AnyPath) -> BinaryIO:
        bucket, key = _split(path)
        found = _asked(path, lambda: self._client(bucket).get(key))
        return io.BufferedReader(_Stream(path, found), _BLOCK_BYTES)

    def read(self, path: AnyPath) -> bytes:
        found = once.known("fetched", path)
        once.keep("fetched", path, None)
        return self._read(path)[0] if found is None else found

    def read_end(self, path: AnyPath, count: int) -> bytes:
        bucket, key = _split(path)
        options: Any = {"range": {"suffix": count}}
        got = _asked(
            path, lambda: self._client(bucket).get(key, options=options).bytes()
        )
        return bytes(got)

    def write(self, path: AnyPath, data: bytes, *, replaces: bool) -> None:
        once.forget()
        if not replaces:
            # Whoever else may write there has not written this.
            self.write_new(path, data)
            return
        bucket, key = _split(path)
        # Not in parts, which would be left where a program is killed.
        _asked(path, self._client(bucket).put, key, data, use_multipart=False)

    def write_new(self, path: AnyPath, data: bytes) -> None:
        self.swap(path, data, None)

    def read_version(self, path: AnyPath) -> tuple[bytes, Any] | None:
        def read() -> tuple[bytes, Any] | None:
            try:
                return self._read(path)
            except FileNotFoundError:
                return None

        return once.once("version", path, read)

    def swap(self, path: AnyPath, data: bytes, version: Any) -> Any:
        once.forget()
        bucket, key = _split(path)
        mode: Any = "create" if version is None else version
        last = time.monotonic() + _RETRY_SECS
        for left in reversed(range(_PUTS)):
            try:
                put = self._client(bucket).put
                done = _asked(path, put, key, data, mode=mode, use_multipart=False)
                return _version(done)
            except OSError as error:
                if isinstance(error, PermissionError):
                    raise
                # It may have been done, and the answer lost.
                once.forget()
                found = self.read_version(path)
                if found is not None and found[0] == data:
                    return found[1]
                is_as_before = (found[1] if found else None) == version
                if isinstance(error, FileNotFoundError) and version is not None:
                    text = "it is gone that was to be replaced"
                    raise FileExistsError(errno.EEXIST, text, os.fspath(path)) from None
                if not is_as_before:
                    raise
                left = left and time.monotonic() < last
                if not left and isinstance(error, FileExistsError):
                    text = f"a condition is said not to hold that holds; hint: {_CONDITIONS}"
                    raise StoreError(_NO_ANSWER, text, os.fspath(path)) from None
                if not left:
                    raise
                # Also where the condition holds that was said not to: two puts met.
                time.sleep(random.uniform(0, _MEETING_SECS))
        raise AssertionError  # the last one has returned or raised

    # Names.

    def make_folder(self, path: AnyPath, mode: int | None = None) -> None:
        pass  # there are none: it is there once an object is in it

    def move(self, path: AnyPath, target: AnyPath) -> None:
        once.forget()
        # Object by object. What commits a step comes last and goes first: of two places, that one
        # is whole which has it.
        (bucket, source), (into, goal) = _split(path), _split(target)
        if bucket != into:
            raise OSError(errno.EXDEV, "another bucket", os.fspath(target))
        last, rest = self._keys(path)

        def copy(key: str) -> None:
            _asked(path, self._client(bucket).copy, key, goal + key[len(source) :])

        with ThreadPoolExecutor(_COPIES, "cnr_copy") as pool:
            list(pool.map(copy, rest))
        list(map(copy, reversed(last)))
        self._delete(path, last)
        self._delete(path, rest)

    def remove_file(self, path: AnyPath) -> None:
        once.forget()
        bucket, key = _split(path)
        with contextlib.suppress(FileNotFoundError):
            _asked(path, self._client(bucket).delete, key)

    def remove_tree(self, path: AnyPath, threads: int = 1) -> list[OSError]:
        try:
            # What commits a step first: the rest is none.
            for keys in self._keys(path):
                self._delete(path, keys)
        except FileNotFoundError:
            pass
        except OSError as error:
            return [error]
        return []

    def _keys(self, path: AnyPath) -> tuple[list[str], list[str]]:
        """Keys of an object or of all below a name: what commits a step, in turn, and the others.

        Raises:
            FileNotFoundError: if there are none.
        """
        _, key = _split(path)
        keys = [each["path"] for each in self._below(path)]
        if not keys:
            self._headed(path)
            return [], [key]
        markers = [f"{key}/{name}" for name in names.MARKERS]
        return [m for m in markers if m in keys], [k for k in keys if k not in markers]

    def _delete(self, path: AnyPath, keys: list[str]) -> None:
        """Deletes objects, a thousand by one request."""
        once.forget()
        bucket, _ = _split(path)
        if keys:
            _asked(path, self._client(bucket).delete, keys)

    # TensorStore.

    def kvstore(self, folder: AnyPath) -> None:
        return None

    def check_usable(self, root: AnyPath) -> None:
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

    # The client.

    def _client(self, bucket: str) -> Any:
        given = map(
            os.environ.get, ("AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_ACCESS_KEY_ID")
        )
        return _client_of(bucket, _endpoint(), _region(), *given)

    def _read(self, path: AnyPath) -> tuple[bytes, Any]:
        bucket, key = _split(path)

        def get() -> tuple[bytes, Any]:
            found = self._client(bucket).get(key)
            return bytes(found.bytes()), _version(found.meta)

        return _asked(path, get)

    def _head(self, path: AnyPath) -> Any:
        """What is said of an object; None where there is none."""
        try:
            return self._headed(path)
        except FileNotFoundError:
            return None

    def _headed(self, path: AnyPath) -> Any:
        bucket, key = _split(path)
        return _asked(path, self._client(bucket).head, key)

    def _has_below(self, path: AnyPath) -> bool:
        if (held := once.known("listing", path.parent)) is not None:
            return path.name in held[0]
        if once.is_asking_once():
            return any(self._listing(path))
        return bool(self._below(path, first=True))

    def _below(self, path: AnyPath, *, first: bool = False) -> list[Any]:
        """All objects below a name, by their keys; or only the first ones."""
        bucket, key = _split(path)

        def pages() -> list[Any]:
            found = self._client(bucket).list(key or None)
            return list(itertools.islice(found, 1) if first else found)

        return [each for page in _asked(path, pages) for each in page]

    def _listing(self, folder: AnyPath) -> tuple[list[str], list[str]]:
        """Names of what looks like folders right below one, and of objects."""
        return once.once("listing", folder, lambda: self._listed(folder))

    def _listed(self, folder: AnyPath) -> tuple[list[str], list[str]]:
        bucket, key = _split(folder)
        found = _asked(folder, self._client(bucket).list_with_delimiter, key or None)
        folders = [each.rpartition("/")[2] for each in found["common_prefixes"]]
        return folders, [each["path"].rpartition("/")[2] for each in found["objects"]]


class _Stream(io.RawIOBase):
    """An object as it comes in: of whatever size, it does not fill the memory."""

    def __init__(self, path: AnyPath, found: Any) -> None:
        self._path = path
        self._blocks = iter(found.stream(min_chunk_size=_BLOCK_BYTES))
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            # Once: after an error it would seem to be at its end.
            block = _asked_once(self._path, next, self._blocks, b"")
            self._rest = memoryview(bytes(block))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _split(path: AnyPath) -> tuple[str, str]:
    """Bucket and key of a URL."""
    _, _, rest = os.fspath(path).partition("://")
    bucket, _, key = rest.partition("/")
    return bucket, key.rstrip("/")


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
                "retry_timeout": datetime.timedelta(seconds=_RETRY_SECS),
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


def _client_of(bucket: str, *settings: Any) -> Any:
    """A client of a bucket.

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
    return _new_client(bucket, *settings)


def _version(said: Any) -> Any:
    """What a later `swap` compares."""
    return {key: said[key] for key in ("e_tag", "version") if said.get(key)}


def _asked(
    path: AnyPath, request: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The answer to a request of a client; asks again where it is cut, as the client does not.

    Raises:
        OSError: as `_asked_once`.
    """
    last = time.monotonic() + _RETRY_SECS
    while True:
        try:
            return _asked_once(path, request, *args, **kwargs)
        except StoreError as error:
            is_cut = error.fact == _WITHOUT_CODE[""][0] and "mode" not in kwargs
            if not is_cut or time.monotonic() > last:
                raise
        time.sleep(random.uniform(0, _MEETING_SECS))


def _asked_once(
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
        return StoreError(_NO_ANSWER, f"{fact}; hint: {hint}", where)
    hints = (_HINTS[code] for code in reversed(codes) if code in _HINTS)
    fact = f"answer {' '.join(codes)}; hint: {next(hints, _OTHER_HINT)}"
    if {"401", "403", "AccessDenied"} & {*codes}:
        return RefusedError(errno.EACCES, fact, where)
    return StoreError(_NO_ANSWER, fact, where)
