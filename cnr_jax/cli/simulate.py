"""The verb `simulate`: policies on a recorded trace of look-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cnr_jax.cli.arguments import AsJson, number, number_option
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines


def simulate(
    accesses: Annotated[
        Path,
        typer.Option(help="An .npz file: by table the ids looked up, int[steps, ...]."),
    ],
    every: Annotated[
        int, number_option("--every", "Train steps between two saves.")
    ] = 100,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="TABLE=N: the rows of a table, if more than its ids show."),
    ] = None,
    dim: Annotated[int, number_option("--dim", "Elements of a row.")] = 64,
    bits: Annotated[int, number_option("--bits", "Of each element.", most=32)] = 4,
    slot_bytes: Annotated[
        int, number_option("--slot-bytes", "Of a row, for its optimizer's slots.", 0)
    ] = 4,
    as_json: AsJson = False,
) -> Exit:
    """Say what the saves of a run would take under each policy.

    From the rows that its train steps looked up. Nothing is saved.
    """
    import numpy as np

    from cnr_jax.errors import OptionError
    from cnr_jax.simulation import ByteModel
    from cnr_jax.simulation import simulate as simulated

    sizes = dict(_rows_of(each) for each in rows or ())
    try:
        # What is no .npz file gives an array, which has no files.
        with (
            accesses.open("rb") as stream,
            np.load(stream, allow_pickle=False) as file,
        ):
            trace = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise OptionError(f"there is no trace {accesses}") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever numpy and zipfile make of what is none
        raise OptionError(
            f"{accesses} is no trace: expected an .npz file of integer arrays, one a table"
        ) from error
    try:
        model = ByteModel(dim=dim, bits=bits, slot_bytes=slot_bytes)
        found = simulated(trace, every, rows=sizes, model=model)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json("simulate", found.asdict())
        return Exit.FINE
    head, *rest = str(found).splitlines()
    told = (
        f"{found.rows:,} rows, of which an interval touches {100 * found.touched_share:.1f} %"
        " on average"
    )
    print_lines([(head, "bold"), *((line, "") for line in rest), (told, "dim")])
    return Exit.FINE


def _rows_of(given: str) -> tuple[str, int]:
    """Parses `TABLE=N`, a table and its number of rows."""
    name, _, count = given.rpartition("=")
    try:
        if name:
            return name, number()(count)
    except typer.BadParameter:
        pass
    raise typer.BadParameter(f"expected TABLE=N, got {given!r}", param_hint="--rows")
