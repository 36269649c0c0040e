"""The verb `rows`, and decoded rows as text and as JSON."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cnr_jax import errors
from cnr_jax.cli.arguments import HIGHEST, AsJson, Item, Root, StepOption
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines
from cnr_jax.repository.description import StepDescription, aligned

if TYPE_CHECKING:
    import numpy as np

# Elements of a decoded row that are shown.
_SHOWN = 6
# An id, or the first one and the one after the last; `int` takes other digits too.
_IDS = re.compile(r"(-?[0-9]{1,19})(?::(-?[0-9]{1,19}))?")


def rows(
    root: Root,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of a table.")],
    ids: Annotated[
        list[str],
        typer.Argument(
            metavar="IDS...",
            help="Of rows, such as 7, or 0:5 for 0 to 4; -1 is the last one.",
        ),
    ],
    step: StepOption = None,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Show single rows of a table and of its slots, as a restore gives them.

    Without the number of a step the first line says which step was read. Only chunks with these
    rows are read. This imports jax, which takes seconds.
    """
    from cnr_jax.cli.roots import read_root, step_of, use_cpu

    asked = [_parsed(text) for text in ids]
    found = read_root(root, item)
    chosen = step_of(found, step.number if step else None)
    wanted = _wanted(asked, table, chosen)
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
        # The output says which step the newest is.
        head = [] if step and step.number is not None else [f"step {chosen.step}"]
        lines = [(line, "") for line in rows_lines(decoded, wanted)]
        print_lines([*((line, "bold") for line in head), *lines])
    return Exit.FINE


def _parsed(text: str) -> range:
    """Parses row ids, `7` or `0:5`, as a range."""
    found = _IDS.fullmatch(text)
    if found is not None:
        first = int(found[1])
        asked = range(first, first + 1 if found[2] is None else int(found[2]))
        if asked and -HIGHEST <= first and asked.stop <= HIGHEST:
            return asked
    if text.startswith("--"):
        raise typer.BadParameter(f"no such option: {text}")
    raise typer.BadParameter(
        f"{reprlib.repr(text)} are no row ids, expected such as 7, or 0:5 for 0 to 4",
        param_hint="IDS",
    )


def _wanted(asked: Sequence[range], table: str, step: StepDescription) -> list[int]:
    """Checks row ids against the table, before they are expanded to more than memory holds.

    Raises:
        OptionError: if the step has the table, but not such rows.
    """
    found = next((each for each in step.tables if each.name == table), None)
    if found is None:
        return [each[0] for each in asked]  # the read names the missing table
    # Rows of the stored array, padding included: JAX wraps negative ids by these.
    stored = found.leaves[0].shape[0]
    for each in asked:
        for end in (each[0], each[-1]):
            if not -stored <= end < found.rows:
                raise errors.OptionError(
                    f"table {table!r} has rows 0 to {found.rows - 1}, got {end}\n"
                    f"  hint: -1 to -{stored} count from the end",
                    kind="no_row",
                )
    return [row for each in asked for row in each]


def rows_json(decoded: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Rows as lists for JSON; values that are no number of JSON become texts."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        finite = not isinstance(value, float) or abs(value) < float("inf")
        return value if finite else str(value)

    return {name: plain(_numbers(held).tolist()) for name, held in decoded.items()}


def _numbers(held: np.ndarray) -> np.ndarray:
    """Converts rows to a dtype for which Python has numbers."""
    return held if held.dtype.kind in "biuf" else held.astype("float32")


def rows_lines(decoded: Mapping[str, np.ndarray], ids: Sequence[int]) -> list[str]:
    """Lines of a table's and its slots' rows, with the first elements of each.

    Args:
        decoded: rows by leaf, as many as there are `ids`.
        ids: ids of the rows.
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
