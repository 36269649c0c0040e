"""What is behind an error of the system: its number, its call, and what it says in a line.

And the error of ours that says so of a whole root.
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

# How TensorStore's errors, which are no OSErrors, name that of the system.
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
# What TensorStore adds to its errors: the whole specification of the array, 400 characters.
_SPECIFICATION = re.compile(r" \[tensorstore_spec='.*?'\](?= \[|$)", re.DOTALL)
_LONGEST = 500
# Calls of the system as Python code makes them; methods of some names are mostly other things.
_CALLS = re.compile(
    r"(?:\b(?:os|io|file|stream|path|entry)\.|(?<![.\w]))(?P<some>open|replace|read|write|flush)\("
    r"|\b(?P<all>l?stat|scandir|listdir|iterdir|mkdir|rmdir|fsync|rename|unlink|readlink|flock)\("
)


def errno_of(error: BaseException, handled: BaseException | None = None) -> int | None:
    """The number of the system's error behind an error, if there is one.

    Args:
        error: what was raised.
        handled: what was being handled already when that began of which `error` comes, so that
            it is not behind it, though Python notes it as its context.

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
    """Which call of the system is behind an error, as far as lines of its traceback tell.

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
    # The innermost that is one; of each line the part that was being run.
    for frame in traceback.extract_tb(next(behind, error).__traceback__):
        line = linecache.getline(frame.filename, frame.lineno or 0)
        stop = frame.end_colno if frame.end_lineno == frame.lineno else None
        if call := _CALLS.search(line[frame.colno or 0 : stop]):
            found = call["some"] or call["all"]
    same = {"listdir": "scandir", "iterdir": "scandir", "replace": "rename"}
    return same.get(found, found) if found else None


def with_call(error: BaseException) -> str:
    """An error in a line, and the call of the system in which it was raised, if known."""
    call = call_of(error)
    return f"{in_one_line(error)}, in {call}" if call else in_one_line(error)


@contextlib.contextmanager
def as_root_errors(
    root: str | os.PathLike[str],
    what: str = "opened",
    deleted: Sequence[str] | None = None,
) -> Iterator[None]:
    """Raises a `RootError` for errors of the system while something is done with a root.

    Args:
        root: path of the root.
        what: what is done with it, such as `"pruned"`.
        deleted: names in the root that have been deleted meanwhile; None: none could be.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, CnrError):
            raise
        lines = [f"the root {root} cannot be {what}", f"  {with_call(error)}"]
        if deleted:
            some = f"{count_of(len(deleted), 'folder')}, {deleted[-1]} last"
            lines.append(f"  deleted before: {some}; the others are as they were")
        elif deleted is not None:
            lines.append("  nothing was deleted")
        lines.append(
            "  hint: is the path right, is it mounted, and may this program read and write there?"
        )
        raise RootError(
            "\n".join(lines),
            path=str(root),
            call=call_of(error),
            errno=error.errno,
        ) from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those it was raised from, or while handling them."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def in_one_line(error: BaseException) -> str:
    """An error as other processes and messages quote it.

    Example:
        >>> in_one_line(OSError(28, "No space left on device"))
        'OSError: [Errno 28] No space left on device'
        >>> in_one_line(ValueError("Failed to rename " + 9000 * "x" + ": no space"))[-10:]
        ': no space'
    """
    text = " ".join(_SPECIFICATION.sub("", str(error)).split())
    if len(text) > _LONGEST:
        # TensorStore says first what it was doing, and last what the system said.
        half = _LONGEST // 2
        text = f"{text[:half]} ... {text[-half:]}"
    name = type(error).__name__
    return f"{name}: {text}" if text else name
