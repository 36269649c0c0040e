"""The verb `prune`: shows old steps of a root with reasons, and deletes them if confirmed."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_jax.cli.arguments import (
    AsJson,
    Item,
    Root,
    SingleWriter,
    WriterIsDead,
    number_option,
)
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines


def prune(
    root: Root,
    keep: Annotated[int, number_option("--keep", "Steps that stay, the newest ones.")],
    min_fulls: Annotated[
        int, number_option("--min-fulls", "Full checkpoints that stay.")
    ] = 1,
    other_runs: Annotated[
        bool,
        typer.Option("--other-runs", help="Also delete what new runs have set aside."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete; without it nothing is changed.")
    ] = False,
    writer_is_dead: WriterIsDead = False,
    single_writer: SingleWriter = False,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Delete old steps; without --yes, tell which and why.

    Steps that the newest ones rest on stay, and so does anything that cannot be understood. If a
    run may still be saving, nothing is deleted.
    """
    from cnr_jax.repository.upkeep.prune import prune as pruned

    done = pruned(
        root,
        keep=keep,
        min_fulls=min_fulls,
        delete=yes,
        other_runs=other_runs,
        writer_is_dead=writer_is_dead,
        single_writer=single_writer,
        item=item,
    )
    if as_json:
        print_json("prune", done.asdict())
        return Exit.FINE
    header, *lines = done.lines()
    styled = [(line, "red" if fate and not fate.stays else "") for line, fate in lines]
    print_lines([(header[0], "bold"), *styled])
    if done.going and not yes:
        print_lines([("nothing was changed: --yes deletes them", "dim")])
    return Exit.FINE
