"""The audit: did any row change that was not recorded, and if so, which, where and why.

A delta holds recorded rows. If others changed, it would restore a state that never existed;
so the save is refused, and the error tells what a user needs to find the reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax.errors import AuditError
from cnr_jax.optimizers import moving_parts
from cnr_jax.rows.watch import Group, Look, Rows, RowWatch, by_rows
from cnr_jax.table import Table, Tables

_SHOWN_ROWS = 5
# Past this share of a table's rows the look-ups of some batches are not what was missed.
_MOST = 0.5

# int32 of some rows: the stamps that `record` wrote.
StampsOf = Callable[[Rows], np.ndarray]


@dataclasses.dataclass(slots=True)
class Unrecorded:
    """Rows of one table that changed without being recorded, as this process sees them.

    Attributes:
        rows: sorted stored rows.
        leaves: how many of them differ in each leaf, by leaf name.
        recorded: rows of the table that were recorded meanwhile.
        before: which of `rows` were recorded at an earlier time.
    """

    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    leaves: Counter[str] = dataclasses.field(default_factory=Counter)
    recorded: np.ndarray = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    before: np.ndarray = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int64)
    )


def check_recorded(
    tables: Tables,
    watch: RowWatch,
    look: Look,
    stamps: StampsOf,
    clock: int,
    state: Any,
) -> None:
    """Checks that all rows that changed since the look before were recorded since.

    Args:
        tables: of the state.
        watch: that keeps the look before.
        look: at the state now.
        stamps: that `record` wrote.
        clock: of the recorded rows at the look before.
        state: in which the likely cause is looked for.

    Raises:
        AuditError: naming tables, rows, leaves, the likely cause and the remedy.
    """
    parts = by_rows(look)
    guilty = {
        rows.table
        for rows, groups in parts.items()
        if not _is_clean(groups, look, stamps(rows), clock)
    }
    if not guilty:
        return
    found = {name: Unrecorded() for name in tables if name in guilty}
    for rows, groups in parts.items():
        if rows.table in guilty:
            _add(found[rows.table], rows, groups, watch, look, stamps(rows), clock)
    raise AuditError(_message(tables, found, state))


def _is_clean(
    groups: Sequence[Group], look: Look, written: np.ndarray, clock: int
) -> bool:
    """Whether all rows that changed were recorded: nearly always, so the quick question."""
    changed = (look.changed[group] for group in groups if group in look.changed)
    return all(bool((written[rows] > clock).all()) for rows in changed)


def _add(
    here: Unrecorded,
    rows: Rows,
    groups: Sequence[Group],
    watch: RowWatch,
    look: Look,
    written: np.ndarray,
    clock: int,
) -> None:
    """Adds what is found in some rows, of which `groups` hold columns or leaves."""
    missed: list[np.ndarray] = []
    leaves: Counter[str] = Counter()
    for group in groups:
        if group in look.changed:
            changed = look.changed[group]
            missed.append(changed[written[changed] <= clock])
            leaves |= Counter(watch.differing(look, group, missed[-1]))
    positions = np.concatenate(missed or [np.empty(0, np.int64)])
    before = positions[written[positions] > 0]
    recorded = np.flatnonzero(written > clock)
    # Columns and leaves of a row may be in several groups, and cut in several ways.
    start = rows.rows[0]
    here.rows = np.union1d(here.rows, positions + start)
    here.before = np.union1d(here.before, before + start)
    here.recorded = np.union1d(here.recorded, recorded + start)
    here.leaves += leaves


def _message(tables: Tables, found: Mapping[str, Unrecorded], state: Any) -> str:
    lines: list[str] = []
    for name, rows in found.items():
        lines += [
            f"table {name!r}: {_rows(len(rows.rows))} changed without being recorded;"
            " a delta would miss them",
            f"  got changes in {_leaves_text(rows)}; first rows: {_rows_text(tables[name], rows)}",
            f"  expected changes only in the {_rows(len(rows.recorded))} recorded since the"
            " save before",
            f"  likely cause: {_cause(tables[name], rows, state)}",
        ]
    if jax.process_count() > 1:
        lines.append(f"  as process {jax.process_index()} sees its part of the rows")
    return "\n".join([*lines, _HINT])


_HINT = """\
  hint: a manager made with Options(tracking="fingerprint") saves exactly whatever the optimizer;
    or give tables a row-sparse one (one of cnr_jax.optim, or sgd or adagrad of optax), and call
    `record` in the step that applies an update, with all ids whose rows it changes;
    after putting back an older state by hand, call reset_touched"""


def _rows(count: int) -> str:
    return f"{count:,} row" + "s" * (count != 1)


def _leaves_text(rows: Unrecorded) -> str:
    named = [
        f"{'the table' if leaf == 'table' else f'slot {leaf}'} (about {_rows(count)})"
        for leaf, count in rows.leaves.items()
    ]
    return ", ".join(named) or "the table or a slot"


def _rows_text(table: Table, rows: Unrecorded) -> str:
    """The first rows, as the ids by which a model knows them."""
    stored = rows.rows[:_SHOWN_ROWS]
    logical = np.asarray(table.layout.to_logical(stored))
    shown = [str(row) if row < table.rows else f"{row} (padding)" for row in logical]
    return ", ".join(shown) + ", ..." * (len(rows.rows) > _SHOWN_ROWS)


def _cause(table: Table, rows: Unrecorded, state: Any) -> str:
    parts = moving_parts(state, table)
    if parts:
        return (
            "the optimizer moves rows that no batch looked up, as"
            f" {', '.join(parts)} shows"
        )
    if not len(rows.recorded) and not len(rows.before):
        return "`record` was told of no row of this table: a feature is missing"
    if len(rows.rows) > _MOST * table.padded_rows:
        return (
            "something moves most rows: weight decay, noise, an average of the parameters,"
            " or a gradient that is not of looked-up rows alone"
        )
    if rows.leaves and "table" not in rows.leaves:
        return "the optimizer changes slots of rows that no batch looked up"
    if len(rows.before) == len(rows.rows):
        return (
            "rows move after the step that looked them up: momentum, gradient"
            " accumulation, or an update that is applied later"
        )
    return (
        "rows are changed by ids that `record` is not told of: a feature left out, a table"
        " shared under another name, or ids recorded before they are mapped to rows"
    )
