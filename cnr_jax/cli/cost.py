"""The verb that tells what checkpoints cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cnr_jax.cli.arguments import NOTED_BY, Accelerators, AsJson, Item, Root
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines
from cnr_jax.texts import count_of


def cost(
    root: Root,
    prices: Annotated[
        Path | None,
        typer.Option(help="A file of TOML with prices; without, quantities are told."),
    ] = None,
    accelerators: Accelerators = 1,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Say what a month of checkpoints takes, and what plain full saves would.

    Counts storage with retention, requests, network, and accelerators that wait, from what the run
    has noted.
    """
    from cnr_jax.cli.roots import read_root
    from cnr_jax.goodput.cost import Prices, cost_of
    from cnr_jax.goodput.profile import ENOUGH
    from cnr_jax.repository.course import course_of

    known = None if prices is None else Prices.read(prices)
    course = course_of(read_root(root, item))
    found = cost_of(course, known, accelerators)
    if as_json:
        print_json("cost", {"cost": found and found.asdict()})
        return Exit.FINE
    if found is None:
        saves = count_of(len(course.saves), "save")
        text = f"not known yet: got {saves}, expected {ENOUGH} or more"
        if len(course.saves) >= ENOUGH:
            text = f"not known yet: got {saves}, of which too few say what they took"
        print_lines([(text, "")])
        return Exit.FINE
    head, *rest = str(found).splitlines()
    lines = [(head, "bold"), *((line, "") for line in rest), (found.basis, "dim")]
    if found.own.stall_hours is None:
        lines.append((f"how long saves hold training up: {NOTED_BY}", "dim"))
    print_lines(lines)
    return Exit.FINE
