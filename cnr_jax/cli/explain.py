"""The verb that says why a step is full or a delta."""

from __future__ import annotations

from cnr_jax.cli.arguments import AsJson, Item, Root, Step
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines


def explain(root: Root, step: Step, item: Item = None, as_json: AsJson = False) -> Exit:
    """Say why a step is full or a delta.

    Lists the saves that its policy saw, and what the predictor of the default policy, at its
    defaults, makes of them.
    """
    from cnr_jax.cli.explanation import explained, lines_of
    from cnr_jax.cli.roots import read_root, step_of

    root_found = read_root(root, item)
    found = explained(root_found, step_of(root_found, step.number))
    if as_json:
        print_json("explain", found.asdict())
    else:
        print_lines(lines_of(found))
    return Exit.FINE
