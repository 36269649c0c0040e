"""An interrupt, as by Ctrl-C, at a chosen moment of a call in this process.

Python looks for signals where a function begins and where one that is written in C has returned,
and nowhere in between: an interrupt comes out at these places alone, and so do those of here.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PACKAGE = Path(__file__).parents[1]


@dataclasses.dataclass(slots=True)
class Interrupt:
    """An interrupt that comes, or came, or will not.

    Attributes:
        moments: that there have been so far at which it might have come; none after it did.
        where: the function in which it was noted, to be raised where Python looks next; empty
            as long as it has not come.
    """

    moments: int = 0
    where: str = ""


class _Signal:
    """`-_SIGINT` says that the signal has come, and is no call, after which Python would look."""

    __neg__ = _thread.interrupt_main


_SIGINT: Any = _Signal()


@contextlib.contextmanager
def interrupting(
    nth: int, within: Sequence[str | os.PathLike[str]] = (_PACKAGE,)
) -> Iterator[Interrupt]:
    """Interrupts the main thread once: whenever a function begins or ends that counts, is a moment.

    To be used in the main thread, while SIGINT raises KeyboardInterrupt, as it does unless told
    otherwise.

    Args:
        nth: of these moments, from 1; if there are fewer, nothing happens.
        within: folders and files of code. Its functions count, and those written in C that it
            calls.

    Example:
        >>> with interrupting(1) as interrupt:
        ...     _ = os.getpid()  # not called from the package
        >>> interrupt
        Interrupt(moments=0, where='')
    """
    found, folders = Interrupt(), tuple(os.fspath(each) for each in within)
    known: dict[CodeType, bool] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code not in known:
            file = code.co_filename
            known[code] = file.startswith(folders) and file != __file__
        if not known[code] or event == "c_call":
            return
        found.moments += 1
        if found.moments == nth:
            file = os.path.basename(code.co_filename)
            found.where = f"{file}:{frame.f_lineno} {code.co_qualname}, {event}"
            sys.setprofile(None)
            _ = -_SIGINT  # the last thing: Python is to look for it there, not here

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
