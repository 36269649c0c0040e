"""Lines in colour, where there is a terminal, and bars for what takes long."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator

# Before that no bar is shown.
_PATIENCE_SECS = 1.0
OnStep = Callable[[int, int], None]


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Prints lines, each in a style of rich; plain where stdout is no terminal.

    Lines are never broken nor cut, so that other programs can read them.
    """
    if not sys.stdout.isatty():
        for text, _ in lines:
            print(printable(text, sys.stdout.encoding))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for text, style in lines:
        console.print(Text(printable(text, console.encoding), style), soft_wrap=True)


def printable(text: str, encoding: str | None) -> str:
    r"""One line of a text: what a terminal would act on, or cannot show, as escapes.

    Names of tables and files are of whoever wrote the root.

    Example:
        >>> printable("user", "utf-8") == "user"
        True
        >>> print(printable("\x1b[31m", "utf-8"), printable("\u00e9", "ascii"))
        \x1b[31m \xe9
    """
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    encoding = encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def progress(what: str) -> Iterator[OnStep]:
    """A bar on stderr, for work that tells how much of how many it has done.

    It comes after a second, goes when the work is done, and is left out where there is no
    terminal.
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
