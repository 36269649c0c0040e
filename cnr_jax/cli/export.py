"""The verb `export`: a step in a form that needs no `cnr_jax` to be read."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import typer

from cnr_jax.cli.arguments import AsJson, Item, Root, StepOrNewest
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines, progress
from cnr_jax.texts import count_of


def export(
    root: Root,
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="The folder to be made.")
    ],
    step: StepOrNewest = None,
    form: Annotated[
        Literal["orbax", "safetensors", "zarr"],
        typer.Option("--format", help="A checkpoint of plain Orbax, or another form."),
    ] = "orbax",
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="This one with its slots; may be repeated."),
    ] = None,
    leaf: Annotated[
        list[str] | None,
        typer.Option("--leaf", help="A path, or a pattern such as 'params/*'."),
    ] = None,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Write a step as plain arrays, for programs without cnr_jax.

    Rows are as a restore gives them: if a save has rounded them, they stay rounded.
    Changes nothing in the root. This imports jax and Orbax, which takes seconds.

    A step does not know the types of nodes, so plain Orbax gets dicts and lists: restore the folder
    without a target. To restore it into a state, such as a TrainState, export it in Python:
    cnr_jax.export(root, step, directory, like=state) has the very structure of the state.
    """
    from cnr_jax.cli.roots import read_root, step_of, use_cpu
    from cnr_jax.repository.description import amount

    found = read_root(root, item)
    chosen = step_of(found, step.number if step else None)
    use_cpu()
    from cnr_jax.exporting.export import export as write

    with progress("exporting") as tell:
        done = write(
            root,
            chosen.step,
            to,
            form,
            tables=table,
            leaves=leaf,
            item=found.item,
            on_bytes=tell,
        )
    if as_json:
        print_json("export", dataclasses.asdict(done))
        return Exit.FINE
    lines = [
        f"step {done.step} as {done.format}: {count_of(len(done.leaves), 'array')},"
        f" {amount(done.bytes)}, in {to}"
    ]
    if done.lossy:
        lines.append(f"rounded by a codec: {', '.join(done.lossy)}")
    print_lines([(line, "") for line in lines])
    return Exit.FINE
