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


class StoreError(OSError):
    """What is said for a store that refuses a request, or gives no answer that can be used.

    Its text is the fact, and what to do after `; hint: `.

    Attributes:
        kind: of the `RootError` that is made of it.
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
        # Without the number, which is of no call.
        return f"{self.fact}: {self.filename!r}; hint: {self.hint}"


class RefusedError(StoreError, PermissionError):
    """What is said for a store that refuses a request: rights or keys are not the right ones."""

    kind = "refused"


def errno_of(error: BaseException, handled: BaseException | None = None) -> int | None:
    """The number of the system's error behind an error, if there is one.

    Args:
        error: what was raised.
        handled: what was being handled already when the work began that raised `error`, so that
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
    *,
    only: type[OSError] = OSError,
) -> Iterator[None]:
    """Raises a `RootError` for errors of the system while something is done with a root.

    Args:
        root: path of the root.
        what: what is done with it, such as `"pruned"`.
        deleted: names in the root that have been deleted meanwhile; None: none could be.
        only: errors of this class alone; others are raised as they are.
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
    """Raises a `RootError` where the store of a root does not answer, or refuses.

    Other errors of the system stay: who reads files on a disk catches them as they are.
    """
    return as_root_errors(root, "used", only=StoreError)


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
