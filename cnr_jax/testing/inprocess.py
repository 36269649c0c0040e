"""Faults within this process, for tests that are too many to start a program for each.

Only calls that Python code makes are met, such as those of Orbax and `cnr_jax`: manifests,
directories, renames, removal. TensorStore's own writes are not; `faults` meets these too.
Kinds of calls are those of `faults`, without writes. Calls that only look count if they name a
path. Linux only.

Below a URL of a bucket, requests are met instead, all that this process makes: a put counts as
`"open"`, a copy as `"rename"` and each object deleted as `"unlink"`; of those that only look, a
read counts as `"open_read"`, a question for one object as `"stat"` and a listing as `"scandir"`.
There is no `"mkdir"` or `"fsync"`.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import functools
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from cnr_jax import errors
from cnr_jax.repository.store import AnyPath, bucket_clients
from cnr_jax.testing.faults import LOOKS, Call, Fault, check_hit

# Functions of the `os` module: the kind of call each counts as, and how many paths it has.
_FUNCTIONS = {
    "fsync": ("fsync", 0),
    "fdatasync": ("fsync", 0),
    "mkdir": ("mkdir", 1),
    "unlink": ("unlink", 1),
    "remove": ("unlink", 1),
    "rmdir": ("rmdir", 1),
    "truncate": ("truncate", 1),
    "rename": ("rename", 2),
    "replace": ("rename", 2),
    "link": ("link", 2),
}
# Those that only look; `pathlib`, `epath` and `os.path` go through them.
_LOOKS = {
    "stat": ("stat", 1),
    "lstat": ("stat", 1),
    "scandir": ("scandir", 1),
    "listdir": ("scandir", 1),
}
# Methods of a bucket's client: the kind of call each counts as, and how many keys it has.
_REQUESTS = {"put": ("open", 1), "copy": ("rename", 2), "delete": ("unlink", 1)}
_LOOKING_REQUESTS = {
    "get": ("open_read", 1),
    "head": ("stat", 1),
    "list": ("scandir", 1),
    "list_with_delimiter": ("scandir", 1),
}
Callback = Callable[[Call], object]


class _Watch:
    def __init__(
        self, below: str, before: Callback, after: Callback, *, alone: bool
    ) -> None:
        self.calls: list[Call] = []
        # Reentrant: functions that are called around a call may make others.
        self._turn = threading.RLock() if alone else contextlib.nullcontext()
        self._below = below
        self._before, self._after = before, after
        self._lock = threading.Lock()
        self._busy = threading.local()

    def call(
        self, kind: str, paths: Callable[[], list[str]], do: Callable[[], Any]
    ) -> Any:
        """Counts a call if one of its paths is below, and makes it."""
        if getattr(self._busy, "is_set", False):
            return do()  # made to find the path of another call
        self._busy.is_set = True
        try:
            found = paths()
        finally:
            self._busy.is_set = False
        return self._call(kind, found, do)

    def _call(self, kind: str, paths: list[str], do: Callable[[], Any]) -> Any:
        if not any(self._is_below(path) for path in paths):
            return do()
        with self._turn:
            with self._lock:
                number = len(self.calls) + 1
                to = paths[1] if len(paths) > 1 else ""
                call = Call(number, os.getpid(), kind, paths[0], False, to)
                self.calls.append(call)
            self._before(call)
            result = do()
            self._after(call)
            return result

    def _is_below(self, path: str) -> bool:
        return path == self._below or path.startswith(self._below + os.sep)


@contextlib.contextmanager
def watching(
    below: str | os.PathLike[str],
    *,
    before: Callback = lambda call: None,
    after: Callback = lambda call: None,
    looks: bool = False,
    alone: bool = False,
) -> Iterator[list[Call]]:
    """Calls `before` and `after` around every call, in its thread.

    If `before` raises, the call is not made, and raises the same.

    Args:
        below: calls on this folder, or URL, and what is below it count.
        before: function that is given the call, which has been counted.
        after: likewise.
        looks: whether calls that only look count too.
        alone: whether a call of another thread waits until `after` has returned.

    Yields:
        The calls so far, a list that grows.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> with watching(root) as calls:
        ...     (root / "folder").mkdir()
        >>> [call.call for call in calls]
        ['mkdir']
    """
    where = os.fspath(below) if is_url(below) else str(Path(below).resolve())
    watch = _Watch(where, before, after, alone=alone)
    if is_url(below):
        with _watching_requests(watch, looks):
            yield watch.calls
        return
    with contextlib.ExitStack() as patches:
        functions = _FUNCTIONS | _LOOKS if looks else _FUNCTIONS
        for name, (kind, paths) in functions.items():
            wrapped = _wrapped(watch, getattr(os, name), kind, paths)
            patches.enter_context(mock.patch.object(os, name, wrapped))
        if looks:
            opener = _os_opener(watch, os.open)
            patches.enter_context(mock.patch.object(os, "open", opener))
        opener = _opener(watch, io.open, looks)
        for module in (io, builtins):
            patches.enter_context(mock.patch.object(module, "open", opener))
        yield watch.calls


@contextlib.contextmanager
def failing(below: str | os.PathLike[str], fault: Fault) -> Iterator[list[Call]]:
    """Lets calls fail in this process, as `Fault` describes it.

    Raises:
        OptionError: if its action is not the name of an error number.
        FaultNotHitError: if the fault was not hit, and nothing else was raised.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> with failing(root, Fault("mkdir", action="ENOSPC")):
        ...     try:
        ...         (root / "folder").mkdir()
        ...     except OSError as error:
        ...         print(error.strerror)
        No space left on device
    """
    number = getattr(errno, fault.action, None)
    if number is None:
        raise errors.OptionError(
            f"action {fault.action!r} cannot strike in this process, expected the name"
            " of an error number"
        )
    lock = threading.Lock()
    fitting, hits = 0, []

    def strike(call: Call) -> None:
        nonlocal fitting
        looks = call.call in LOOKS
        if fault.call != call.call and (fault.call != "any" or looks):
            return
        if fault.match not in call.path and fault.match not in call.to:
            return
        if fault.folders and not os.path.isdir(call.path):
            return
        with lock:
            fitting += 1
            if fitting < fault.nth or 0 < fault.times <= fitting - fault.nth:
                return
            hits.append(dataclasses.replace(call, hit=True))
        raise OSError(number, os.strerror(number), call.path)

    with watching(below, before=strike, looks=fault.call in LOOKS) as calls:
        yield hits
        if not hits:
            check_hit(calls, fault)


@contextlib.contextmanager
def copying(
    below: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    nth: int,
    after: bool = False,
) -> Iterator[list[Call]]:
    """Copies a folder right before the nth call on it: so it would be if the process died there.

    Args:
        below: the folder.
        to: path of the copy; must not exist. There is no copy if there were fewer calls.
        nth: number of the call, from 1.
        after: whether to copy after the call instead.
    """

    def copy(call: Call) -> None:
        if call.number == nth:
            with contextlib.suppress(shutil.Error):
                # Files that code outside of Python renames meanwhile.
                shutil.copytree(below, to)

    def nothing(call: Call) -> None:
        pass

    # Alone, since a copy takes its time: another thread could commit a step after the copy has
    # listed the folder, and then delete an older one before the copy has come to it. The copy
    # would lack both, as the folder never did.
    before, behind = (nothing, copy) if after else (copy, nothing)
    with watching(below, before=before, after=behind, alone=True) as calls:
        yield calls


@contextlib.contextmanager
def dying(
    below: str | os.PathLike[str], *, nth: int, after: bool = False
) -> Iterator[list[Call]]:
    """Fails the nth call and all that come later: nothing reaches storage from a dead process.

    What there is at the end is what the process would leave. Unlike `copying`, it goes on, and has
    to be kept from anything else: close what writes there before the end.

    Args:
        below: the folder, or URL.
        nth: number of the call, from 1.
        after: whether the nth call is carried out, and only its answer is lost.

    Yields:
        The calls that failed, a list that grows; empty if there were fewer.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> with dying(root, nth=2) as failed:
        ...     for name in "abc":
        ...         with contextlib.suppress(OSError):
        ...             (root / name).mkdir()
        >>> [path.name for path in root.iterdir()], len(failed)
        (['a'], 2)
    """
    failed: list[Call] = []

    def fail(call: Call) -> None:
        failed.append(dataclasses.replace(call, hit=True))
        raise OSError(errno.ECONNRESET, "the process is dead", call.path)

    def before(call: Call) -> None:
        if call.number > nth or (call.number == nth and not after):
            fail(call)

    def behind(call: Call) -> None:
        if call.number == nth and after:
            fail(call)

    with watching(below, before=before, after=behind):
        yield failed


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a bucket.

    Example:
        >>> is_url("s3://bucket/run"), is_url("/ckpt/run")
        (True, False)
    """
    return "://" in os.fspath(path)


class _Client:
    """Client of a bucket that lets a watch see its requests.

    Args:
        client: the client itself.
        bucket: URL of the bucket, with a slash.
        watch: the watch.
        kinds: methods that count, with the kind and the number of keys of each.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        watch: _Watch,
        kinds: Mapping[str, tuple[str, int]],
    ) -> None:
        self._client, self._bucket = client, bucket
        self._watch, self._kinds = watch, kinds

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._client, name)
        kind, count = self._kinds.get(name, ("", 0))
        if not kind:
            return real

        def request(*args: Any, **kwargs: Any) -> Any:
            if name == "delete" and not isinstance(args[0], str):
                # The service deletes one after the other, and may have got to any of them.
                return [one(kind, [key], real, [key]) for key in args[0]]
            keys = [key or "" for key in args[:count]] or [""]
            return one(kind, keys, real, *args, **kwargs)

        def one(kind: str, keys: list[str], do: Any, *args: Any, **kwargs: Any) -> Any:
            paths = [self._bucket + key for key in keys]
            return self._watch.call(kind, lambda: paths, lambda: do(*args, **kwargs))

        return request


@contextlib.contextmanager
def _watching_requests(watch: _Watch, looks: bool) -> Iterator[None]:
    """Lets a watch see the requests to buckets, those that only look too if `looks`."""
    real = bucket_clients.client_of
    kinds = _REQUESTS | _LOOKING_REQUESTS if looks else _REQUESTS

    def client_of(path: AnyPath) -> Any:
        scheme, _, rest = os.fspath(path).partition("://")
        bucket = f"{scheme}://{rest.partition('/')[0]}/"
        return _Client(real(path), bucket, watch, kinds)

    with mock.patch.object(bucket_clients, "client_of", client_of):
        yield


def _wrapped(
    watch: _Watch, real: Callable[..., Any], kind: str, count: int
) -> Callable[..., Any]:
    def paths_of(args: Any, kwargs: Any) -> list[str]:
        if count == 0:
            descriptor = args[0] if isinstance(args[0], int) else args[0].fileno()
            return [_path_of(descriptor)]
        keys = ["dir_fd"] if count == 1 else ["src_dir_fd", "dst_dir_fd"]
        given = [*args, *(kwargs[k] for k in ("path", "src", "dst") if k in kwargs)]
        return [
            _absolute(path, kwargs.get(key))
            for path, key in zip(given[:count] or ["."], keys, strict=True)
        ]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind == "stat" and args and isinstance(args[0], int):
            return real(*args, **kwargs)  # an open file, which is there
        paths = functools.partial(paths_of, args, kwargs)
        return watch.call(kind, paths, lambda: real(*args, **kwargs))

    return wrapper


def _opener(watch: _Watch, real: Callable[..., Any], looks: bool) -> Callable[..., Any]:
    def opener(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        changes = bool(set("wax+") & set(mode))
        if isinstance(file, int) or not (changes or looks):
            return real(file, mode, *args, **kwargs)
        return watch.call(
            "open" if changes else "open_read",
            lambda: [_absolute(file, None)],
            lambda: real(file, mode, *args, **kwargs),
        )

    return opener


def _os_opener(watch: _Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `os.open`: counts files and folders that it opens for reading, such as to sync them."""

    def opener(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return real(path, flags, *args, **kwargs)
        return watch.call(
            "open_read",
            lambda: [_absolute(path, kwargs.get("dir_fd"))],
            lambda: real(path, flags, *args, **kwargs),
        )

    return opener


def _absolute(path: Any, folder: int | None) -> str:
    if isinstance(path, int):
        return _path_of(path)
    start = os.getcwd() if folder is None else _path_of(folder)
    # Links are resolved but for the last component, which is what is renamed or removed.
    parent, name = os.path.split(os.path.join(start, os.fsdecode(path)))
    return os.path.join(os.path.realpath(parent), name)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
