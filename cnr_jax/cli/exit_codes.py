"""Exit codes of commands, and the messages of errors."""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from cnr_jax import errors
from cnr_jax.cli.printing import (
    PrintingError,
    drop_output,
    flush,
    print_text,
    printable,
)

# The base of errors in how a command is called; releases of typer have it in different modules.
_UsageError: Any = typer.BadParameter.__bases__[0]

# Version of the documents that `--json` prints; rises when a field goes or changes its meaning.
SCHEMA = 2


class Exit(enum.IntEnum):
    """Exit codes; those that are not listed are failures too."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    FINDINGS = 3
    NOTHING_RESTORABLE = 4
    NO_ROOT = 10
    OTHER_WRITER = 11
    NOT_A_ROOT = 12
    NO_STEP = 13
    DAMAGED = 14
    INTERRUPTED = 130
    UNREAD = 141


def code_of(error: Exception) -> Exit:
    """The exit code of an error.

    Example:
        >>> code_of(errors.NoStepError("no such root", kind="no_root"))
        <Exit.NO_ROOT: 10>
    """
    if isinstance(error, errors.NoStepError):
        return Exit.NO_ROOT if error.kind == "no_root" else Exit.NO_STEP
    if isinstance(error, errors.OptionError):
        if error.kind in ("not_held", "no_target"):
            return Exit.FAILED
        named = error.kind in ("no_table", "no_row")
        return Exit.NO_STEP if named else Exit.NOT_A_ROOT
    if isinstance(error, errors.WriterError):
        # A folder in the place of a file does not mean that somebody else saves.
        return Exit.FAILED if error.kind == "in_the_way" else Exit.OTHER_WRITER
    return Exit.DAMAGED if isinstance(error, errors.DAMAGE) else Exit.FAILED


def verb(work: Callable[..., Exit]) -> Callable[..., None]:
    """Turns a function that prints something and returns an exit code into a command."""

    @functools.wraps(work)
    def command(**given: Any) -> None:
        raise typer.Exit(work(**given))

    return command


class Verbs(TyperGroup):
    """Group of all commands: each ends here, with an exit code, whatever is raised."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **_: Any,
    ) -> NoReturn:
        """Runs a command.

        It prints an error on stderr, with the fact in the first line. With `--json` it also prints
        a document with the error.
        """
        words = sys.argv[1:] if args is None else list(args)
        try:
            code = self._ended(prog_name or "cnr-jax", words)
            flush()
        except BrokenPipeError:  # a help was being printed
            code = Exit.UNREAD
            drop_output()
        except PrintingError as error:
            code = Exit.FAILED
            if isinstance(error.__cause__, BrokenPipeError):
                code = Exit.UNREAD  # the reader of the output has enough of it
            else:
                _say(f"cnr-jax: {error}")
            drop_output()
        except KeyboardInterrupt:
            code = Exit.INTERRUPTED
        sys.exit(code)

    def _ended(self, name: str, words: list[str]) -> int:
        try:
            with self.make_context(name, list(words)) as context:
                self.invoke(context)
        except typer.Exit as end:
            return end.exit_code
        except (BrokenPipeError, PrintingError):
            raise  # the reader of the output is gone
        except _UsageError as error:
            if not words:
                _say(error.format_message())  # the help
                return Exit.USAGE
            hint = f"{error.ctx.command_path} --help" if error.ctx else "--help"
            kind, code = "usage", Exit.USAGE
            # Newer versions of typer put this before what is wrong with a choice.
            told = error.format_message().replace(": Value error, ", ": ")
            message = f"{told}\n  hint: {hint}"
        except Exception as error:
            kind, code, message = _kind_of(error), code_of(error), str(error)
            if kind == "unexpected":
                message = f"{type(error).__name__}: {message}\n  {_place_of(error)}"
        else:
            return Exit.FINE
        _say(f"cnr-jax: {message}")
        options = words[: words.index("--")] if "--" in words else words
        if "--json" in options:
            named = next((word for word in words if word in self.commands), "")
            print_json(named, {"error": {"kind": kind, "message": message}})
        return code


def _kind_of(error: Exception) -> str:
    """Kind of an error, as JSON documents name it."""
    if isinstance(error, errors.CnrError):
        return error.kind
    return "os_error" if isinstance(error, OSError) else "unexpected"


def _place_of(error: Exception) -> str:
    """File and line in which an unexpected error was raised."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"raised in {last.filename}, line {last.lineno}"


def _say(text: str) -> None:
    # If stderr takes nothing either, the exit code alone tells of the error.
    with contextlib.suppress(OSError, ValueError):
        for line in text.split("\n"):
            print(printable(line, sys.stderr.encoding), file=sys.stderr)


def print_json(name: str, document: dict[str, Any], *, on_a_line: bool = False) -> None:
    """Prints the findings of a verb as one JSON object."""
    whole = {"schema": SCHEMA, "verb": name, **document}
    print_text(json.dumps(whole, indent=None if on_a_line else 1, allow_nan=False))
