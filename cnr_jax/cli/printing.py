"""Lines in colour, where there is a terminal, and bars for what takes long."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from cnr_jax.texts import visible

# Before that time no bar is shown.
_PATIENCE_SECS = 1.0
OnStep = Callable[[int, int], None]


class PrintingError(Exception):
    """Standard output takes nothing more; its cause is the error of the system."""


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Flushes standard output after the prints within it.

    Raises:
        PrintingError: if standard output does not take them.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise PrintingError(f"what was found cannot be printed: {error}") from error


def drop_output() -> None:
    """Points standard output at nowhere, as the end of a program flushes it once more."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def flush() -> None:
    """Flushes what others have printed, such as a help.

    Raises:
        PrintingError: if standard output does not take it.
    """
    with _printing():
        pass


def print_text(text: str) -> None:
    """Prints a text as it is.

    Raises:
        PrintingError: if standard output does not take it.
    """
    with _printing():
        print(text)


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Prints lines, each in a style of rich; plain where stdout is no terminal.

    Lines are never broken nor cut, so that other programs can read them.

    Raises:
        PrintingError: if standard output does not take them.
    """
    if sys.stdout is None:
        return
    if not sys.stdout.isatty():
        encoding = sys.stdout.encoding
        with _printing():
            for text, _ in lines:
                print(printable(text, encoding))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    with _printing():
        for text, style in lines:
            shown = Text(printable(text, console.encoding), style)
            console.print(shown, soft_wrap=True)


def printable(text: str, encoding: str | None) -> str:
    r"""Escapes one line of a text: characters that a terminal acts on, or cannot show.

    Example:
        >>> printable("user", "utf-8") == "user"
        True
        >>> print(printable("\x1b[31m", "utf-8"), printable("\u00e9", "ascii"))
        \x1b[31m \xe9
    """
    encoding = encoding or "utf-8"
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def progress(what: str) -> Iterator[OnStep]:
    """Shows a bar on stderr, for work that tells how much of it is done.

    It appears after a second, goes when the work is done, and is left out without a terminal.
    """
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        show: OnStep | None = None

        def tell(done: int, of: int) -> None:
            nonlocal show
            late = time.monotonic() - began > _PATIENCE_SECS
            if show is None and late and sys.stderr.isatty():
                show = _bar(what, stack)
            if show is not None:
                show(done, of)

        yield tell


def _bar(what: str, stack: contextlib.ExitStack) -> OnStep:
    from rich.console import Console
    from rich.progress import Progress

    bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    task = bar.add_task(what, total=None)
    return lambda done, of: bar.update(task, completed=done, total=of)
