"""Text that somebody else wrote, on its way to a terminal, a log or a page; and counts of things.

Names of tables, folders and items, and the contents of crafted files, come from whoever wrote the
root. They leave the library in its errors, its log and its tables of text, and all pass here.
"""

from __future__ import annotations

import logging
import numbers
import re
from collections.abc import Mapping
from typing import Any

# Where lines of ours begin in a text of several lines: those after the fact are indented.
_OWN_LINE = re.compile(r"\n(?=  )")


def visible(text: str) -> str:
    r"""Escapes a text of one line: characters that a terminal acts on, or that nobody sees.

    Example:
        >>> print(visible("user\x1b[31m\n\u202eitem"))
        user\x1b[31m\n\u202eitem
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    r"""Escapes a text of several lines, keeping indented lines, as errors have them.

    Example:
        >>> print(visible_lines("step 3 is damaged\n  hint: restore\r\nWARNING all is well"))
        step 3 is damaged
          hint: restore\r\nWARNING all is well
    """
    if text.isprintable():
        return text
    return "\n".join(map(visible, _OWN_LINE.split(text)))


def count_of(number: int, what: str, several: str = "") -> str:
    """Number of things as text, with their noun in singular or plural.

    Args:
        number: how many there are.
        what: noun for one of them.
        several: noun for several; without it `what` with an `s`.

    Example:
        >>> count_of(1, "step"), count_of(1200, "step"), count_of(2, "leaf", "leaves")
        ('1 step', '1,200 steps', '2 leaves')
    """
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def logger(name: str) -> logging.Logger:
    """Logger of a module, which makes all arguments of its messages visible."""
    found = logging.getLogger(name)
    found.addFilter(_make_visible)
    return found


def _make_visible(record: logging.LogRecord) -> bool:
    """Filter of log records: escapes the arguments of a message, and its traceback.

    The message itself stays a template, since programs that collect records sort them by it.
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
    """A value that prints escaped: in one line, except errors of several lines."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._shown = visible_lines if isinstance(value, BaseException) else visible

    def __str__(self) -> str:
        return self._shown(str(self._value))

    def __repr__(self) -> str:
        return self._shown(repr(self._value))
