"""The verb that lists what is wrong in a root."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import typer

from cnr_jax.cli.arguments import AsJson, Item, Root
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines, progress
from cnr_jax.texts import count_of


def verify(
    root: Root,
    level: Annotated[
        Literal["structure", "data"],
        typer.Option(help="Look at manifests and sizes only, or read every byte."),
    ] = "data",
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """List everything that is wrong, and what it costs.

    Leftovers of a run are listed too, but do not count as findings.
    """
    from cnr_jax.cli.roots import check_root, use_cpu

    check_root(root)
    use_cpu()
    from cnr_jax.format import names
    from cnr_jax.repository.layout import open_root
    from cnr_jax.repository.upkeep import verify as verifying

    with progress(f"verifying {level}") as tell:
        found = verifying.verify(root, level, item=item, on_step=tell)
    lost = sorted(
        {name for problem in found for name in problem.consequence},
        key=names.place,
    )
    code = Exit.FINDINGS if lost else Exit.FINE
    if as_json:
        problems = [dataclasses.asdict(problem) for problem in found]
        print_json("verify", {"level": level, "problems": problems, "lost": lost})
        return code
    above = f"{open_root(root)}/"  # files are named by where they lie in the root
    lines = [
        (str(each).replace(above, ""), "red" if each.consequence else "dim")
        for each in found
    ]
    harmless = sum(not problem.consequence for problem in found)
    verdict = "nothing is wrong"
    if found:
        verdict = f"{count_of(len(found) - harmless, 'problem')}"
        verdict += f", {count_of(harmless, 'note')} of what does no harm"
    if lost:
        verdict += f"; cannot be restored: {', '.join(lost)}"
    print_lines([*lines, (verdict, "bold red" if lost else "bold")])
    return code
