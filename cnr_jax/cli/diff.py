"""The verb that compares the rows of two steps."""

from __future__ import annotations

import dataclasses

from cnr_jax.cli.arguments import AsJson, Item, Root, Step
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines, progress


def diff(
    root: Root,
    before: Step,
    after: Step,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Compare the rows of two steps, table by table.

    Decodes both, which imports jax and reads both chains. The change of a row is the norm of
    the difference over the norm of the row in the first step.
    """
    from cnr_jax.cli.roots import opened, read_root, step_of
    from cnr_jax.repository.description import aligned, share_told

    found = read_root(root, item)
    chosen = [step_of(found, each.number) for each in (before, after)]
    old, new = (opened(found, each) for each in chosen)
    from cnr_jax.repository.compare import compare

    with progress("comparing rows") as tell:
        leaves = sorted(compare(old, new, tell), key=lambda d: d.table)
    differs = any(each.changed_rows or each.note for each in leaves)
    code = Exit.FINDINGS if differs else Exit.FINE
    if as_json:
        found_leaves = [dataclasses.asdict(each) for each in leaves]
        told = {"before": chosen[0].step, "after": chosen[1].step}
        print_json("diff", {**told, "leaves": found_leaves})
        return code
    cells = [["table", "leaf", "rows", "changed", "share", "mean change", "worst", ""]]
    for each in leaves:
        share = 100 * each.changed_rows / each.rows if each.rows else 0
        cells.append(
            [
                each.table,
                each.leaf,
                f"{each.rows:,}",
                f"{each.changed_rows:,}",
                f"{share:.2f} %",
                share_told(each.mean_change),
                share_told(each.worst_change),
                each.note,
            ]
        )
    header, *rest = aligned(cells, right={2, 3, 4, 5, 6})
    print_lines([(header, "bold"), *((line, "") for line in rest)])
    return code
