"""The verb `bits`: how far off rows of a step would be in each width of codes, and their bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cnr_jax.cli.arguments import AsJson, Item, Root, StepOrNewest
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines, progress
from cnr_jax.policy.bits import CODE_BITS, older_bits
from cnr_jax.repository.description import aligned, amount, share_told

if TYPE_CHECKING:
    import numpy as np

    from cnr_jax.repository.step_reader import StepReader

_WIDTHS = (*CODE_BITS, None)
_ASK = (
    "what errors of rows cost a model its own metric alone can tell: cnr_jax.try_bits"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WidthOfRows:
    """Rows of a table in one width.

    Attributes:
        bits: width of a code; None: exact.
        bytes: bytes of all rows in a full save, without slots. Rows that the codec cannot hold are
            stored exactly, and count with their share of the sampled rows.
        mean_row_error: mean of `||row - read|| / ||row||` over the sampled rows; None if it is not
            known, as the rows were rounded before.
        worst_row_error: the greatest of them.
    """

    bits: int | None
    bytes: int
    mean_row_error: float | None
    worst_row_error: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BitsOfTable:
    """A table of a step in each width.

    Attributes:
        table: name of the table.
        rows: number of its rows.
        sampled_rows: number of evenly spread rows that were read.
        stored_bits: width of the narrowest codes in which its rows are stored, in the chain of the
            step; None: they are exact.
        widths: its rows in each width, the narrowest first.
    """

    table: str
    rows: int
    sampled_rows: int
    stored_bits: int | None
    widths: tuple[WidthOfRows, ...]


def bits(
    root: Root,
    step: StepOrNewest = None,
    table: Annotated[
        list[str] | None, typer.Option(help="Only this table; may be given again.")
    ] = None,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Show bytes and errors of a step's rows in each width of codes.

    Takes rows as a restore gives them, at most 16,384 a table, in the default codec. A table that
    was rounded has errors only in narrower widths. This imports jax, which takes seconds.
    """
    from cnr_jax.cli.roots import opened, read_root, step_of

    found = read_root(root, item)
    chosen = step_of(found, step.number if step else None)
    chain = opened(found, chosen)
    from cnr_jax.repository.reading import table_entry

    manifest = chain[-1].manifest
    named = table or [entry.name for entry in manifest.tables]
    for name in named:
        table_entry(manifest, name)
    tables: list[BitsOfTable] = []
    with progress("rounding rows") as tell:
        for name in named:
            tables.append(_table(chain, name))
            tell(len(tables), len(named))
    if as_json:
        documents = [dataclasses.asdict(each) for each in tables]
        print_json("bits", {"step": chosen.step, "tables": documents})
    else:
        print_lines(_lines(chosen.step, tables))
    return Exit.FINE


def _table(chain: Sequence[StepReader], name: str) -> BitsOfTable:
    import numpy as np

    from cnr_jax.repository.replay.picked import picked_rows
    from cnr_jax.rows.gather.encode import SAMPLE_ROWS
    from cnr_jax.state.layouts import layout_from

    entry = chain[-1].tables[name]
    stride = -(-entry.rows // SAMPLE_ROWS)
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    physical = layout.to_physical(np.arange(stride // 2, entry.rows, stride))
    rows = picked_rows(chain, name, "table", np.sort(physical))
    stored = _stored_bits(chain, name)
    return BitsOfTable(
        table=name,
        rows=entry.rows,
        sampled_rows=len(rows),
        stored_bits=stored,
        widths=tuple(_width(rows, bits, entry.padded_rows, stored) for bits in _WIDTHS),
    )


def _width(
    rows: np.ndarray, bits: int | None, count: int, stored: int | None
) -> WidthOfRows:
    from cnr_jax.encoding import Encoding
    from cnr_jax.rows.codecs import Raw, bytes_of
    from cnr_jax.rows.rounding import Off, off_on_host

    width = rows[0].size
    encoding = Encoding(codec="raw") if bits is None else Encoding(bits=bits)
    codec = encoding.codec_for("", "table", width, rows.dtype)
    exact = isinstance(codec, Raw)
    off = Off() if exact else off_on_host(codec, rows)
    size = count * bytes_of(codec.parts(width, rows.dtype))
    size += off.escaped * count // len(rows) * width * rows.dtype.itemsize
    known = exact or (off.rows > 0 and (stored is None or (bits or 0) < stored))
    return WidthOfRows(
        bits=bits,
        bytes=size,
        mean_row_error=off.errors / max(1, off.rows) if known else None,
        worst_row_error=off.worst if known else None,
    )


def _stored_bits(chain: Sequence[StepReader], table: str) -> int | None:
    """Bits of the narrowest codes among a table's rows; None if all of them are exact."""
    from cnr_jax.rows.codecs import Raw

    codecs = [
        reader.codec(process, segment.codec)
        for reader in chain
        for process, tile in reader.tiles(table, "table")
        for segment in tile.segments
    ]
    # A codec without bits is bfloat16.
    found = [getattr(c, "bits", 16) for c in codecs if not isinstance(c, Raw)]
    return min(found, default=None)


def _lines(step: int, tables: Sequence[BitsOfTable]) -> list[tuple[str, str]]:
    cells = [["table", "rows", "bits", "bytes", "smaller", "mean error", "worst"]]
    rounded = [each for each in tables if each.stored_bits is not None]
    for each in tables:
        exact_bytes = each.widths[-1].bytes
        for i, width in enumerate(each.widths):
            first = [each.table, f"{each.rows:,}"] if i == 0 else ["", ""]
            cells.append(
                [
                    *first,
                    "exact" if width.bits is None else str(width.bits),
                    amount(width.bytes),
                    f"{exact_bytes / max(1, width.bytes):.1f}x",
                    share_told(width.mean_row_error),
                    share_told(width.worst_row_error),
                ]
            )
    header, *rest = aligned(cells, right={1, 2, 3, 4, 5, 6})
    lines = [(f"step {step}", "bold"), (header, "bold"), *((row, "") for row in rest)]
    for each in tables:
        found = {w.bits: w.mean_row_error for w in each.widths if w.bits is not None}
        if (older := older_bits(found)) is not None:
            text = f"rows of {each.table} lie on codes of {older} bits, as a restore brought them"
            lines.append((f"{text}: rows that were trained on err otherwise", "dim"))
    if rounded:
        told = ", ".join(f"{each.table} in {each.stored_bits} bits" for each in rounded)
        lines.append(
            (
                f"rounded already: {told}; other errors are to the rows as a restore gives them",
                "dim",
            )
        )
    return [*lines, (_ASK, "dim")]
