"""Causes of errors: the number and the call of the system's error behind one, and one-line texts.

`as_root_errors` turns such errors into a `RootError`.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import re
import traceback
from collections.abc import Iterator, Sequence

from cnr_jax.errors import CnrError, RootError
from cnr_jax.texts import count_of

# How TensorStore's errors, which are no OSErrors, name the number of the system's error.
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
# TensorStore adds the whole specification of the array to its errors, 400 characters.
_SPECIFICATION = re.compile(r" \[tensorstore_spec='.*?'\](?= \[|$)", re.DOTALL)
_LONGEST = 500
# Calls of the system as they look in Python code. Methods named like those in `some` are mostly
# other things, so these count only as functions, or on objects with the names listed.
_CALLS = re.compile(
    r"(?:\b(?:os|io|file|stream|path|entry)\.|(?<![.\w]))(?P<some>open|replace|read|write|flush)\("
    r"|\b(?P<all>l?stat|scandir|listdir|iterdir|mkdir|rmdir|fsync|rename|unlink|readlink|flock)\("
)


class StoreError(OSError):
    """Error of a store that refuses a request, or gives no answer that can be used.

    Its `strerror` is the fact, then `; hint: ` and what to do.

    Attributes:
        kind: kind of the `RootError` that is made of it.
    """

    kind = "no_answer"

    @property
    def fact(self) -> str:
        """What is wrong, such as `no connection`."""
        return str(self.strerror).partition("; hint: ")[0]

    @property
    def hint(self) -> str:
        """What to do about it."""
        return str(self.strerror).partition("; hint: ")[2]

    def __str__(self) -> str:
        # The number is left out, as it is that of no system call.
        return f"{self.fact}: {self.filename!r}; hint: {self.hint}"


class RefusedError(StoreError, PermissionError):
    """Error of a store that refuses a request because rights or keys are not the right ones."""

    kind = "refused"


def errno_of(error: BaseException, handled: BaseException | None = None) -> int | None:
    """Number of the system's error behind an error; None if there is none.

    Args:
        error: error that was raised.
        handled: error that was already being handled when the work that raised `error` began. It
            is not the cause, though Python notes it as the context.

    Example:
        >>> errno_of(ValueError("Error writing local file [os_error_code='28']"))
        28
    """
    for each in itertools.takewhile(lambda each: each is not handled, causes(error)):
        if isinstance(each, OSError) and each.errno is not None:
            return each.errno
        named = _OS_ERROR.search(str(each))
        if named:
            return int(named.group(1))
    return None


def call_of(error: BaseException) -> str | None:
    """Name of the system call behind an error, as far as lines of its traceback tell.

    Example:
        >>> from pathlib import Path
        >>> try:
        ...     Path("/no such folder/a").mkdir()
        ... except OSError as error:
        ...     print(call_of(error))
        mkdir
    """
    number, found = errno_of(error), None
    behind = (e for e in causes(error) if isinstance(e, OSError) and e.errno == number)
    # The innermost call counts. Of each line only the part that was being run is searched.
    for frame in traceback.extract_tb(next(behind, error).__traceback__):
        line = linecache.getline(frame.filename, frame.lineno or 0)
        stop = frame.end_colno if frame.end_lineno == frame.lineno else None
        if call := _CALLS.search(line[frame.colno or 0 : stop]):
            found = call["some"] or call["all"]
    same = {"listdir": "scandir", "iterdir": "scandir", "replace": "rename"}
    return same.get(found, found) if found else None


def with_call(error: BaseException) -> str:
    """Text of an error in one line, with the system call that raised it, if known."""
    call = call_of(error)
    return f"{in_one_line(error)}, in {call}" if call else in_one_line(error)


@contextlib.contextmanager
def as_root_errors(
    root: str | os.PathLike[str],
    what: str = "opened",
    deleted: Sequence[str] | None = None,
    *,
    only: type[OSError] = OSError,
) -> Iterator[None]:
    """Raises a `RootError` for errors of the system while something is done with a root.

    Args:
        root: path of the root.
        what: what is done with it, such as `"pruned"`.
        deleted: names in the root that have been deleted so far; None: the work deletes nothing.
        only: class of the errors that become a `RootError`; others are raised as they are.
    """
    try:
        yield
    except only as error:
        if isinstance(error, CnrError):
            raise
        lines, kind = [f"the root {root} cannot be {what}"], None
        hint = "is the path right, is it mounted, and may this program read and write there?"
        if isinstance(error, StoreError):
            lines.append(f"  {error.fact}: {error.filename}")
            kind, hint = error.kind, error.hint
        else:
            lines.append(f"  {with_call(error)}")
        if deleted:
            some = f"{count_of(len(deleted), 'folder')}, {deleted[-1]} last"
            lines.append(f"  deleted before: {some}; the others are as they were")
        elif deleted is not None:
            lines.append("  nothing was deleted")
        lines.append(f"  hint: {hint}")
        raise RootError(
            "\n".join(lines),
            kind=kind,
            path=str(root),
            call=call_of(error),
            errno=error.errno,
        ) from error


def using_root(
    root: str | os.PathLike[str],
) -> contextlib.AbstractContextManager[None]:
    """Raises a `RootError` if the store of a root does not answer, or refuses a request.

    Other errors of the system stay, as code that reads files on a disk catches them as they are.
    """
    return as_root_errors(root, "used", only=StoreError)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then its cause, or the error that was being handled, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def in_one_line(error: BaseException) -> str:
    """Text of an error in one line, as other processes and messages quote it.

    Example:
        >>> in_one_line(OSError(28, "No space left on device"))
        'OSError: [Errno 28] No space left on device'
        >>> in_one_line(ValueError("Failed to rename " + 9000 * "x" + ": no space"))[-10:]
        ': no space'
    """
    text = " ".join(_SPECIFICATION.sub("", str(error)).split())
    if len(text) > _LONGEST:
        # TensorStore says first what it was doing, and last what the system said: both stay.
        half = _LONGEST // 2
        text = f"{text[:half]} ... {text[-half:]}"
    name = type(error).__name__
    return f"{name}: {text}" if text else name
