"""An interrupt, as by Ctrl-C, at a chosen moment of a call in this process.

Python looks for signals where a function begins, where a function that is written in C has
returned, and where a loop jumps back. Interrupts are raised at such places alone, those of this
module too.
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
    """An interrupt that may still come, or has come.

    Attributes:
        moments: number of moments so far at which it might have come; none count after it did.
        where: the function in which it came, and is raised where Python looks next; empty before.
    """

    moments: int = 0
    where: str = ""


class _Signal:
    """`-_SIGINT` notes the signal without a call, after which Python would look for signals."""

    __neg__ = _thread.interrupt_main


_SIGINT: Any = _Signal()


@contextlib.contextmanager
def interrupting(
    nth: int, within: Sequence[str | os.PathLike[str]] = (_PACKAGE,)
) -> Iterator[Interrupt]:
    """Interrupts the main thread once, at a moment when a function that counts begins or ends.

    Use it in the main thread, while SIGINT raises KeyboardInterrupt, as it does unless told
    otherwise. A function that is written in C has one moment, its end.

    Args:
        nth: number of the moment, from 1; if there are fewer, nothing happens.
        within: folders and files of code. Their functions count, and those written in C that they
            call.

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
            _ = -_SIGINT  # comes last, so that Python looks for it there, not here

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
