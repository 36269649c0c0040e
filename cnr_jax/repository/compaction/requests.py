"""Requests for merges: a run asks in its root, and a program elsewhere merges.

A request is a folder of the root that readers take for a save in flight. The run makes it, with a
note of what is to be merged. Whoever takes the request writes the baseline there, and at last what
came of it. Meanwhile it gives signs of life, so that the run can give the request up once there are
none; and it looks whether the note is still there, as the run may have ended. So a crash on either
side leaves no lock behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from cnr_jax.errors import CnrError
from cnr_jax.format import names
from cnr_jax.repository.compaction import baseline
from cnr_jax.repository.compaction.baseline import Request
from cnr_jax.repository.index.save_plan import MergedBaseline
from cnr_jax.repository.store import AnyPath, exists, names_in, read_small, store_of
from cnr_jax.texts import logger

_log = logger(__name__)
# In the folder of a request: what is to be merged, and signs of life of the program that merges.
_REQUEST, _SIGNS = "request.json", "signs.txt"
# Seconds between two looks, and between two signs of life.
_LOOK_SECS, _SIGN_SECS = 2.0, 5.0
# Seconds without a sign of life after which nobody is there any more.
_SILENT_SECS = 60.0
_MOST_BYTES = 1 << 16  # of a file of a request


def await_merge(
    root: AnyPath, request: Request, closing: threading.Event
) -> MergedBaseline:
    """Asks for a merge, and waits until somebody has made it.

    Raises:
        ValueError: saying why there is none.
        OSError: if the root cannot be written, or could not be read for a minute.
    """
    folder, store = root / request.folder, store_of(root)
    store.make_folder(folder)
    told = json.dumps(dataclasses.asdict(request)).encode()
    store.write(folder / _REQUEST, told, replaces=False)
    sign, since, failed = b"", time.monotonic(), False
    while not closing.wait(_LOOK_SECS):
        is_silent = time.monotonic() > since + _SILENT_SECS
        try:
            if baseline.is_answered(folder):
                return _take_answer(root, request)
            if not exists(folder / _REQUEST):
                raise ValueError("the request is gone")
            now = _read(folder / _SIGNS)
        except OSError:
            if is_silent:
                raise
            failed = True
            continue  # the next look may do better
        if now != sign or failed:
            # While looks failed, signs may have failed too.
            sign, since, failed = now, time.monotonic(), False
        elif is_silent:
            ended = "the program that merges it has ended"
            nobody = f"no program elsewhere merges it: cnr-jax compact {root} --follow"
            raise ValueError(ended if sign else nobody)
    raise ValueError("the run ends")


def _take_answer(root: AnyPath, request: Request) -> MergedBaseline:
    """Takes the baseline out of the answer to a request; can be tried again if it fails."""
    folder, store = root / request.folder, store_of(root)
    # First of all: without it nobody takes the request again, or gives signs.
    store.remove_file(folder / _REQUEST)
    for name in names_in(folder):  # kills leave files of longer names
        if name.startswith((_REQUEST, _SIGNS)):
            store.remove_file(folder / name)
    return baseline.take_note(root, request)


def serve(
    root: AnyPath,
    told: Callable[[Request, str], None],
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Merges what runs ask for in a root, one request after the other.

    Args:
        root: the root.
        told: function that is called after each merge, with why there is none; else empty.
        goes_on: function that is asked before each look at the root.
    """
    problem = ""
    while goes_on():
        try:
            for request in _take_requests(root):
                told(request, _answered(root, request))
        except OSError as error:
            if problem != str(error):
                problem = str(error)
                _log.warning("cannot look for requests in %s: %s", root, problem)
        time.sleep(_LOOK_SECS)


def _answered(root: AnyPath, request: Request) -> str:
    """Merges what is asked for; returns why there is no baseline, or nothing."""
    try:
        with _signs(root / request.folder):
            made = baseline.write_baseline(root, request)
    except Exception as error:  # damage, among others
        return _told(root, request, str(error))
    except BaseException:
        with contextlib.suppress(OSError):
            _told(root, request, "the program that merges it was interrupted")
        raise
    return _told(root, request, made)


def _told(root: AnyPath, request: Request, found: MergedBaseline | str) -> str:
    """Tells the run what came of its request, after the last sign, as the run removes signs then.

    Returns:
        Why there is no baseline, or nothing.
    """
    if not exists(root / request.folder / _REQUEST):
        # TensorStore may have made the folder again after the run had removed it.
        baseline.remove_baseline(root, request.folder)
        return "the run does not wait for it any more"
    if isinstance(found, str):
        baseline.note_failure(root, request.folder, found)
        return found
    baseline.note(root, found)
    return ""


def _take_requests(root: AnyPath) -> Iterator[Request]:
    """Takes the requests that nobody has taken, and yields each."""
    for name in names_in(root):
        if names.kind_of_folder(name) != "unfinished":
            continue
        # It may be going away, or be what nobody has made as a request; others are to be had.
        with contextlib.suppress(OSError, CnrError):
            if (request := _taken(root / name)) is not None:
                yield request


def _taken(folder: AnyPath) -> Request | None:
    """Takes the request in a folder; None if there is none, or if it is not to be had."""
    if not exists(folder / _REQUEST) or exists(folder / _SIGNS):
        return None
    try:
        request = Request(**json.loads(_read(folder / _REQUEST)))
    except (TypeError, ValueError, RecursionError):
        return None  # it is being written, or was made by another revision
    if request.folder != folder.name:
        return None
    try:
        # No two sign alike: who finds its own sign in a bucket takes it that it has written it.
        store_of(folder).write_new(folder / _SIGNS, secrets.token_hex(8).encode())
    except FileExistsError:
        return None
    # Meanwhile another program may have answered it, and the run have taken the answer.
    return request if exists(folder / _REQUEST) else None


def _read(path: AnyPath) -> bytes:
    """A small file; empty if there is none."""
    try:
        return read_small(path, _MOST_BYTES)
    except FileNotFoundError:
        return b""


@contextlib.contextmanager
def _signs(folder: AnyPath) -> Iterator[None]:
    """Gives signs of life while it is open, as long as the request is there."""
    store, done = store_of(folder), threading.Event()

    def give() -> None:
        while not done.wait(_SIGN_SECS):
            with contextlib.suppress(OSError):
                if not exists(folder / _REQUEST):
                    return
                sign = secrets.token_hex(8).encode()
                store.write(folder / _SIGNS, sign, replaces=True)

    thread = threading.Thread(target=give, name="cnr_sign", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
