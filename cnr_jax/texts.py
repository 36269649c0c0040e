"""Text that somebody else wrote, on its way to a terminal, a log or a page; and numbers of things.

Names of tables, folders and items, and what crafted files say, are of whoever wrote the root. They
leave the library in its errors, its log and its tables of text, and each of these passes here.
"""

from __future__ import annotations

import logging
import numbers
import re
from collections.abc import Mapping
from typing import Any

# Where lines of ours begin in a text of several: what follows the fact is indented.
_OWN_LINE = re.compile(r"\n(?=  )")


def visible(text: str) -> str:
    r"""A text in one line: what a terminal would act on, or nobody sees, as escapes.

    Example:
        >>> print(visible("user\x1b[31m\n\u202eitem"))
        user\x1b[31m\n\u202eitem
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    r"""The same of a text of several lines, which are indented, as those of errors are.

    Example:
        >>> print(visible_lines("step 3 is damaged\n  hint: restore\r\nWARNING all is well"))
        step 3 is damaged
          hint: restore\r\nWARNING all is well
    """
    if text.isprintable():
        return text
    return "\n".join(map(visible, _OWN_LINE.split(text)))


def count_of(number: int, what: str, several: str = "") -> str:
    """How many there are of something.

    Args:
        number: of them.
        what: one of them is called.
        several: they are called; without it with an `s`.

    Example:
        >>> count_of(1, "step"), count_of(1200, "step"), count_of(2, "leaf", "leaves")
        ('1 step', '1,200 steps', '2 leaves')
    """
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def logger(name: str) -> logging.Logger:
    """The logger of a module, of which all that is put into messages is visible."""
    found = logging.getLogger(name)
    found.addFilter(_make_visible)
    return found


def _make_visible(record: logging.LogRecord) -> bool:
    """Has what a message is about be written so that it is read and no more.

    The message itself stays a template, by which programs that collect records sort them.
    """
    if isinstance(record.args, Mapping):
        record.args = {name: _argument(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_argument, record.args))
    if record.exc_info and not record.exc_text:
        trace = logging.Formatter().formatException(record.exc_info)
        record.exc_text = "\n".join(map(visible, trace.split("\n")))
    return True


def _argument(value: Any) -> Any:
    return value if isinstance(value, numbers.Number) else _Visible(value)


class _Visible:
    """Any value, as a message shows it: in one line, but for an error of several."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._shown = visible_lines if isinstance(value, BaseException) else visible

    def __str__(self) -> str:
        return self._shown(str(self._value))

    def __repr__(self) -> str:
        return self._shown(repr(self._value))
