"""Arguments and options that several verbs of `cnr-jax` take."""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

# The largest number that an integer of 64 bits holds.
HIGHEST = 2**63 - 1
# `int` takes digits of other scripts too, and `1_0`.
_NUMBER = re.compile(r"0*([0-9]{1,19})")


def number(least: int = 0, most: int = HIGHEST) -> Callable[[object], int]:
    """Parser of a whole-number argument: decimal digits and nothing else.

    Example:
        >>> number()("12")
        12
    """

    def parsed(given: object) -> int:
        found = _NUMBER.fullmatch(str(given))  # a default is a number already
        if found is None or not least <= int(found[1]) <= most:
            raise typer.BadParameter(
                f"{reprlib.repr(str(given))} is no whole number from {least} to {most}"
            )
        return int(found[1])

    return parsed


def number_option(
    name: str, about: str, least: int = 1, most: int = HIGHEST
) -> typer.models.OptionInfo:
    """Option that takes a whole number."""
    return typer.Option(name, metavar="N", parser=number(least, most), help=about)


@dataclasses.dataclass(frozen=True, slots=True)
class StepNumber:
    """Step argument of a command.

    Attributes:
        number: number of the step; None: the newest that restores.
    """

    number: int | None


def _asked(given: object) -> StepNumber:
    if given == "latest":
        return StepNumber(None)
    try:
        return StepNumber(number()(given))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, nor 'latest'") from error


_ONE = "Number of a step, or 'latest': the newest that restores."
_NEWEST = "Number of a step; 'latest', as without: the newest that restores."
_Or = StepNumber | None
Step = Annotated[StepNumber, typer.Argument(metavar="STEP", help=_ONE, parser=_asked)]
StepOrNewest = Annotated[
    _Or, typer.Argument(metavar="[STEP]", help=_NEWEST, parser=_asked)
]
StepOption = Annotated[
    _Or, typer.Option("--step", metavar="STEP", help=_NEWEST, parser=_asked)
]
Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")
]
Item = Annotated[
    str | None,
    typer.Option("--item", help="The item to look at, where steps hold several."),
]
Accelerators = Annotated[
    int, number_option("--accelerators", "That wait for saves and restores.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
WriterIsDead = Annotated[
    bool, typer.Option("--writer-is-dead", help="Whoever saved here last has ended.")
]
SingleWriter = Annotated[
    bool,
    typer.Option(
        "--single-writer",
        help="Nobody else writes there: the store may ignore conditions.",
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]
NOTED_BY = (
    "managers note it from the fifth save on, those of older revisions with"
    " Options(metrics=True)"
)
TRACE_HELP = (
    "A trace of nodes that are up (CSV of secs,nodes, or JSON), exponential:HOURS or"
    " weibull:HOURS,SHAPE of one node"
)
