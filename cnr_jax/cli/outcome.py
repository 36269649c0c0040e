"""How a command ends: its exit code, and what it says of an error."""

from __future__ import annotations

import enum
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import typer

from cnr_jax import errors
from cnr_jax.cli.printing import printable

# Of the documents that `--json` prints; rises when a field goes or changes its meaning.
SCHEMA = 1


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
        # A folder in the place of a file is nobody who saves.
        return Exit.FAILED if error.kind == "in_the_way" else Exit.OTHER_WRITER
    return Exit.DAMAGED if isinstance(error, errors.DAMAGE) else Exit.FAILED


def verb(work: Callable[..., Exit]) -> Callable[..., None]:
    """A command of a function that prints something and returns how it ended.

    An error is told on stderr, the fact in the first line; with `as_json` also in a document.
    """

    @functools.wraps(work)
    def command(**given: Any) -> None:
        try:
            code = work(**given)
        except KeyboardInterrupt:
            code = Exit.INTERRUPTED
        except BrokenPipeError:
            raise  # of who reads what is printed, and stopped
        except (errors.CnrError, OSError) as error:
            code = code_of(error)
            if given.get("as_json"):
                kind = error.kind if isinstance(error, errors.CnrError) else "os_error"
                told = {"kind": kind, "message": str(error)}
                print_json(work.__name__, {"error": told})
            for line in f"cnr-jax: {error}".split("\n"):
                print(printable(line, sys.stderr.encoding), file=sys.stderr)
        raise typer.Exit(code)

    return command


def print_json(name: str, document: dict[str, Any]) -> None:
    """Prints what a verb has found as one JSON object."""
    whole = {"schema": SCHEMA, "verb": name, **document}
    print(json.dumps(whole, indent=1, allow_nan=False))
