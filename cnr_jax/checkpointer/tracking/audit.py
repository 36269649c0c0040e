"""Audit: finds rows that changed without being recorded, and explains which, where and why.

A delta holds recorded rows. If others changed, it would restore a state that never existed. So the
save is refused, with an error that has what a user needs to find the reason.

An audited run compares all rows at each save, and a recorded run compares a rotating part of them:
see rows/fingerprints/rotation.py. Let a table have N rows on a device. Each save compares w of them
with what they were at the save before, and another w with what they were a round of N / w saves
ago. A table whose rows fit into its share is compared whole: then w is N, and the statements below
are certain at once.

Suppose that k rows, anywhere, keep moving. Then n saves miss all of them with probability
C(N - n w, k) / C(N, k), about (1 - n w / N)^k, and N / w saves never do. It does not matter when
the rows were recorded, except for those recorded again right before the save that compares them.

Suppose that k rows move once. Then the n saves after that miss all of them with the same
probability, if none of them is recorded before its turn, and if their hashes are older than the
move. If they move m saves after the run began or was restored, the hashes of a share m w / N of all
rows are older; one round after, those of all are.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from cnr_jax.errors import AuditError
from cnr_jax.rows.fingerprints.watch import Differing, by_rows
from cnr_jax.rows.tiling import Group, Rows
from cnr_jax.state.optimizer_states import moving_parts
from cnr_jax.state.table import Table, Tables

_SHOWN_ROWS = 5
# Share of the compared rows. If more changed, they are not the look-ups of some batches.
_MOST = 0.5

# int32 of rows: the stamps that `record` wrote.
StampsOf = Callable[[Rows], np.ndarray]


@dataclasses.dataclass(slots=True)
class Unrecorded:
    """Rows of one table that changed without being recorded, as this process sees them.

    Attributes:
        rows: sorted stored rows.
        leaves: number of these rows that differ in each leaf, by leaf name.
        before: those of `rows` that were recorded at an earlier time.
        since: clock of the oldest look with which these rows were compared.
        compared: number of rows of the table that were compared.
        recorded: rows of the table that were recorded after `since`.
    """

    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    leaves: Counter[str] = dataclasses.field(default_factory=Counter)
    before: np.ndarray = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    since: int = 0
    compared: int = 0
    recorded: np.ndarray = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int64)
    )


def unrecorded_error(
    tables: Tables,
    differing: Mapping[Group, Differing],
    missed: Mapping[Group, np.ndarray],
    stamps: StampsOf,
    lineage: str,
    state: Any,
    *,
    recorded: bool,
) -> AuditError:
    """Error of a save whose rows changed without being recorded since they were compared.

    It names tables, rows, leaves, the likely cause and the remedy.

    Args:
        tables: tables of the state.
        differing: rows that differ, for each group that was compared alone.
        missed: indices of the rows that were not recorded, by group; there are some.
        stamps: function that returns the stamps of all rows.
        lineage: lineage of the stamps.
        state: state in which the likely cause is looked for.
        recorded: whether `record` was called since the save before, as far as the touched rows of
            the state tell.
    """
    guilty = {group.table for group in missed}
    found = {
        name: _unrecorded(
            {group: d for group, d in differing.items() if group.table == name},
            missed,
            stamps,
        )
        for name in tables
        if name in guilty
    }
    return AuditError(
        _message(tables, found, state, recorded=recorded),
        lineage=lineage,
        clock=min(each.since for each in found.values()),
    )


def _unrecorded(
    differing: Mapping[Group, Differing],
    missed: Mapping[Group, np.ndarray],
    stamps: StampsOf,
) -> Unrecorded:
    """Collects the unrecorded rows of one table.

    Args:
        differing: rows of the table that differ, by group.
        missed: indices of the rows that were not recorded, by group.
        stamps: function that returns the stamps of all rows.
    """
    here = Unrecorded()
    here.since = min(
        int(differing[group].since[which].min())
        for group, which in missed.items()
        if group in differing
    )
    for rows, groups in by_rows(differing).items():
        written, start = stamps(rows), rows.rows[0]
        # Columns and leaves of a row may be in several groups, and cut in several ways.
        leaves: Counter[str] = Counter()
        for group in groups:
            if group in missed:
                found, which = differing[group], missed[group]
                positions = found.rows[which]
                before = positions[written[positions] > 0]
                here.rows = np.union1d(here.rows, positions + start)
                here.before = np.union1d(here.before, before + start)
                counts = found.leaves(which).sum(0)
                leaves |= Counter(
                    {
                        n: int(c)
                        for n, c in zip(found.names[0], counts, strict=True)
                        if c
                    }
                )
        here.leaves += leaves
        here.compared += max(differing[group].compared for group in groups)
        here.recorded = np.union1d(
            here.recorded, np.flatnonzero(written > here.since) + start
        )
    return here


def _message(
    tables: Tables, found: Mapping[str, Unrecorded], state: Any, *, recorded: bool
) -> str:
    lines: list[str] = []
    stale = ""
    if not recorded:
        stale = (
            ", or the touched rows given to Save are not those that `record` returned"
        )
    for name, rows in found.items():
        lines += [
            f"table {name!r}: {_rows(len(rows.rows))} changed without being recorded;"
            " a delta would miss them",
            f"  got changes in {_leaves_text(rows)}; first rows: {_rows_text(tables[name], rows)}",
            f"  expected changes only in the {_rows(len(rows.recorded))} recorded since;"
            f" {_compared_text(tables[name], rows)} compared",
            f"  likely cause: {_cause(tables[name], rows, state)}{stale}",
        ]
    if jax.process_count() > 1:
        lines.append(f"  as process {jax.process_index()} sees its part of the rows")
    return "\n".join([*lines, _HINT])


_HINT = """\
  hint: a manager made with Options(tracking="fingerprint") saves exactly whatever the optimizer,
    also in this root if its first save passes the touched rows along: Save(state, touched);
    or give tables a row-sparse one (one of cnr_jax.optim, or sgd or adagrad of optax), and call
    `record` in the step that applies an update, with all ids whose rows it changes;
    after putting back an older state by hand, or to save all rows as they are now, give Save
    what reset_touched returns: that save is full"""


def _rows(count: int) -> str:
    return f"{count:,} row" + "s" * (count != 1)


def _compared_text(table: Table, rows: Unrecorded) -> str:
    if rows.compared >= table.padded_rows:
        return "all were"
    return f"{rows.compared:,} of {_rows(table.padded_rows)} were"


def _leaves_text(rows: Unrecorded) -> str:
    named = [
        f"{'the table' if leaf == 'table' else f'slot {leaf}'} (about {_rows(count)})"
        for leaf, count in rows.leaves.items()
    ]
    return ", ".join(named) or "the table or a slot"


def _rows_text(table: Table, rows: Unrecorded) -> str:
    """Lists the first rows, as the ids by which a model knows them."""
    stored = rows.rows[:_SHOWN_ROWS]
    logical = np.asarray(table.layout.to_logical(stored))
    shown = [str(row) if row < table.rows else f"{row} (padding)" for row in logical]
    return ", ".join(shown) + ", ..." * (len(rows.rows) > _SHOWN_ROWS)


def _cause(table: Table, rows: Unrecorded, state: Any) -> str:
    # From the surest sign down to the mere pattern of the rows.
    parts = moving_parts(state, table)
    if parts:
        return (
            "the optimizer moves rows that no batch looked up, as"
            f" {', '.join(parts)} shows"
        )
    if not len(rows.recorded) and not len(rows.before):
        return "`record` was told of no row of this table: a feature is missing"
    if len(rows.rows) > _MOST * rows.compared:
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
