"""The verb that lists the steps of a root."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from cnr_jax.cli.arguments import AsJson, Item, Root
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines

if TYPE_CHECKING:
    from cnr_jax.repository.description import StepDescription


def ls(root: Root, item: Item = None, as_json: AsJson = False) -> Exit:
    """List all steps, chain by chain, and which restore.

    It looks at manifests and the sizes of files; `verify` reads the files.
    """
    from cnr_jax.cli.roots import read_root
    from cnr_jax.repository.description import footer, step_lines

    found = read_root(root, item)
    whole = Exit.FINE if found.latest_step is not None else Exit.NOTHING_RESTORABLE
    if as_json:
        print_json("ls", found.asdict())
        return whole
    now = datetime.datetime.now(tz=datetime.UTC)
    lines = [(line, _style(step)) for line, step in step_lines(found, now)]
    print_lines([*lines, *((line, "dim") for line in footer(found))])
    return whole


def _style(step: StepDescription | None) -> str:
    if step is None:
        return "bold"
    if step.kind == "orbax":
        return "dim"
    if step.problem:
        return "red"
    return "yellow" if step.may_lack_rows else "green" if step.kind == "full" else ""
