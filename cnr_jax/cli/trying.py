"""The verb `simulate`: policies on a recorded trace of look-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cnr_jax.cli.arguments import AsJson
from cnr_jax.cli.outcome import Exit, print_json
from cnr_jax.cli.printing import print_lines


def simulate(
    accesses: Annotated[
        Path,
        typer.Option(help="An .npz file: by table the ids looked up, int[steps, ...]."),
    ],
    every: Annotated[
        int, typer.Option(min=1, help="Train steps between two saves.")
    ] = 100,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="TABLE=N: the rows of a table, if more than its ids show."),
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Elements of a row.")] = 64,
    bits: Annotated[int, typer.Option(min=1, max=32, help="Of each element.")] = 4,
    slot_bytes: Annotated[
        int, typer.Option(min=0, help="Of each row, for its optimizer's slots.")
    ] = 4,
    as_json: AsJson = False,
) -> Exit:
    """Say what the saves of a run would take under each policy.

    From the rows that its train steps looked up. Nothing is saved.
    """
    import zipfile

    import numpy as np

    from cnr_jax.errors import OptionError
    from cnr_jax.simulation import ByteModel
    from cnr_jax.simulation import simulate as simulated

    sizes = {}
    for each in rows or ():
        name, _, count = each.rpartition("=")
        if not name or not (count.isascii() and count.isdigit()):
            raise typer.BadParameter(
                f"expected TABLE=N, got {each!r}", param_hint="--rows"
            )
        sizes[name] = int(count)
    try:
        # What is no .npz file gives an array, which has no files.
        with np.load(accesses, allow_pickle=False) as file:
            trace = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise OptionError(f"there is no trace {accesses}") from error
    except (AttributeError, TypeError, ValueError, zipfile.BadZipFile) as error:
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
        " in the mean"
    )
    print_lines([(head, "bold"), *((line, "") for line in rest), (told, "dim")])
    return Exit.FINE
