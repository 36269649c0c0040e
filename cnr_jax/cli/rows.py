"""Rows that were decoded, as text and as JSON, and the verb `rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cnr_jax import errors
from cnr_jax.cli.arguments import AsJson, Item, Root
from cnr_jax.cli.outcome import Exit, print_json
from cnr_jax.cli.printing import print_lines
from cnr_jax.repository.description import StepDescription, aligned

if TYPE_CHECKING:
    import numpy as np

# Elements of a decoded row that are shown.
_SHOWN = 6


def rows(
    root: Root,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of a table.")],
    ids: Annotated[
        list[str],
        typer.Argument(metavar="IDS...", help="Of rows, such as 7, or 0:5 for 0 to 4."),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Instead of the newest that restores.")
    ] = None,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Show single rows of a table and of its slots, as a restore gives them.

    Only chunks with these rows are read; this imports jax, which takes seconds.
    """
    from cnr_jax.cli.roots import read_root, step_of, use_cpu

    asked = [_parsed(text) for text in ids]
    found = read_root(root, item)
    chosen = step_of(found, step)
    _check(asked, table, chosen)
    wanted = [row for each in asked for row in each]
    use_cpu()
    from cnr_jax.repository.reading import read_rows

    values, slots = read_rows(
        root, table, wanted, chosen.step, slots=True, item=found.item
    )
    decoded = {"table": values, **slots}
    if as_json:
        told = {"step": chosen.step, "table": table, "ids": wanted}
        print_json("rows", {**told, "leaves": rows_json(decoded)})
    else:
        print_lines([(line, "") for line in rows_lines(decoded, wanted)])
    return Exit.FINE


def _parsed(text: str) -> range:
    """Row ids as they were given."""
    first, colon, end = text.partition(":")
    numbers = [first, end] if colon else [first]
    if all(each.isascii() and each.isdigit() for each in numbers):
        found = range(int(first), int(end) if colon else int(first) + 1)
        if found:
            return found
    raise typer.BadParameter(
        f"{text!r} are no row ids, expected such as 7, or 0:5 for 0 to 4"
    )


def _check(asked: Sequence[range], table: str, step: StepDescription) -> None:
    """Checks that a step has these rows, if it tells of the table.

    Raises:
        OptionError: if it has not.
    """
    highest = max(each[-1] for each in asked)
    count = next((each.rows for each in step.tables if each.name == table), None)
    if count is not None and highest >= count:
        raise errors.OptionError(
            f"table {table!r} has rows 0 to {count - 1}, got {highest}", kind="no_row"
        )


def rows_json(decoded: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Rows as lists; what is no number of JSON as texts."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        finite = not isinstance(value, float) or abs(value) < float("inf")
        return value if finite else str(value)

    return {name: plain(_numbers(held).tolist()) for name, held in decoded.items()}


def _numbers(held: np.ndarray) -> np.ndarray:
    """Rows of a dtype of Python's own numbers."""
    return held if held.dtype.kind in "biuf" else held.astype("float32")


def rows_lines(decoded: Mapping[str, np.ndarray], ids: Sequence[int]) -> list[str]:
    """Rows of a table and of its slots as lines, the first elements of each.

    Args:
        decoded: by leaf, as many rows as there are `ids`.
        ids: of the rows.
    """
    cells = [["row", *decoded]]
    for i, row_id in enumerate(ids):
        row = [str(row_id)]
        for held in decoded.values():
            flat = _numbers(held[i : i + 1]).reshape(-1).tolist()
            more = " ..." if len(flat) > _SHOWN else ""
            row.append(" ".join(f"{x:.4g}" for x in flat[:_SHOWN]) + more)
        cells.append(row)
    return aligned(cells, right={0})
