"""What verbs of `cnr-jax` are called with, as far as several take it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="The folder of the checkpoints.")
]
Step = Annotated[int, typer.Argument(metavar="STEP", help="Number of a step.")]
Item = Annotated[
    str | None,
    typer.Option("--item", help="The item to look at, where steps hold several."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]
