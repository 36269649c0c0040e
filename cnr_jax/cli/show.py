"""The verb that shows what one step holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cnr_jax.cli.arguments import AsJson, Item, Root, Step, number_option
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines
from cnr_jax.cli.rows import rows_json, rows_lines

if TYPE_CHECKING:
    import numpy as np

    from cnr_jax.repository.description import StepDescription
    from cnr_jax.repository.step_reader import StepReader


def show(
    root: Root,
    step: Step,
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="A table to decode rows of."),
    ] = None,
    rows: Annotated[
        int, number_option("--rows", "How many of its rows to decode.")
    ] = 5,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Show what one step holds of each table.

    With TABLE it shows the first rows of that table, as a restore gives them. This imports jax,
    which takes seconds.
    """
    from cnr_jax.cli.roots import chain_of, opened, read_root, step_of

    found = read_root(root, item)
    chosen = step_of(found, step.number)
    chain = [each.step for each in chain_of(found, chosen)]
    document: dict[str, Any] = {**chosen.asdict(), "chain": chain}
    lines = _step_lines(chosen, chain)
    if table is not None:
        read = opened(found, chosen)
        decoded = _decoded(read, table, rows)
        document = {"step": chosen.step, "table": table, "leaves": rows_json(decoded)}
        count = len(decoded["table"])
        lines = [(line, "") for line in rows_lines(decoded, range(count))]
    if as_json:
        print_json("show", document)
    else:
        print_lines(lines)
    return Exit.DAMAGED if chosen.problem else Exit.FINE


def _step_lines(step: StepDescription, chain: list[int]) -> list[tuple[str, str]]:
    from cnr_jax.repository.description import aligned, amount, share_told

    what = step.kind if step.parent is None else f"{step.kind} on {step.parent}"
    verdict = f"no: {step.problem}" if step.problem else "yes"
    if step.may_lack_rows:
        verdict += "; an audit found later that rows may be missing in it"
    lines = [(f"step {step.step}: {what}", "bold")]
    if step.kind != "unreadable":
        less = step.reduction
        times = f"{less:.1f} times fewer than" if less >= 1 else f"{1 / less:.1f} times"
        saved = f"{step.saved_at:%Y-%m-%d %H:%M:%S} UTC" if step.saved_at else "?"
        lines += [
            (f"saved:       {saved}, in {step.secs or 0:.2f} s", ""),
            (f"reason:      {step.reason}", ""),
            (f"chain:       {' <- '.join(map(str, chain))}", ""),
            (
                f"bytes:       {amount(step.total_bytes)}, {times} a plain full save"
                f" ({amount(step.state_bytes)})",
                "",
            ),
            (
                f"of these:    tables {amount(step.table_bytes)},"
                f" slots {amount(step.slot_bytes)}, dense {amount(step.dense_bytes)},"
                f" manifests {amount(step.manifest_bytes)}"
                + (
                    f", merged {amount(step.merged_bytes)}" if step.merged_bytes else ""
                ),
                "",
            ),
        ]
    lines.append((f"restorable:  {verdict}", "red" if step.problem else ""))
    if not step.tables:
        return lines
    cells = [["table", "leaf", "shape", "dtype", "codecs", "rows", "bytes", "tiles"]]
    cells[0] += ["mean error", "worst"]
    for table in step.tables:
        for i, leaf in enumerate(table.leaves):
            shape = " x ".join(f"{n:,}" for n in leaf.shape)
            row = [leaf.name, shape, leaf.dtype, ", ".join(leaf.codecs) or "-"]
            row += [f"{leaf.rows:,}", amount(leaf.bytes), str(leaf.tiles)]
            # Errors are those of rows of tables; slots are not compared.
            off = (None, None) if i else (table.mean_row_error, table.worst_row_error)
            cells.append(["" if i else table.name, *row, *map(share_told, off)])
    header, *rest = aligned(cells, right={5, 6, 7, 8, 9})
    return [*lines, ("", ""), (header, "bold"), *((line, "") for line in rest)]


def _decoded(
    chain: tuple[StepReader, ...], table: str, rows: int
) -> dict[str, np.ndarray]:
    """The first rows of a table and of its slots."""
    from cnr_jax.repository.compare import logical_rows
    from cnr_jax.repository.reading import table_entry

    entry = table_entry(chain[-1].manifest, table)
    stop = min(rows, entry.rows)
    names = [leaf.name for leaf in entry.leaves]
    return {name: logical_rows(chain, table, name, 0, stop) for name in names}
