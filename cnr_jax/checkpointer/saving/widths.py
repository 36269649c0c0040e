"""The width of each table's codes where `bits="auto"` leaves it to the number of restores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from cnr_jax.options import Options
from cnr_jax.policy.bits import FALLBACK_BITS, small_tables
from cnr_jax.state.table import Leaf, Table, Tables


def with_codec(options: Options, codec: str | None) -> Options:
    """Options of a save for which the policy names a codec; None: they stay."""
    return options if codec is None else dataclasses.replace(options, codec=codec)


def find_small(options: Options, tables: Tables) -> frozenset[str]:
    """Tables that have `FALLBACK_BITS` in all saves, among those whose width is "auto".

    The same on all processes: nothing but shapes of whole tables, without padding, is asked.

    Args:
        options: of the save.
        tables: all of the run.
    """
    elements = {name: _elements(options, table) for name, table in tables.items()}
    return small_tables({name: count for name, count in elements.items() if count})


def widths_of(
    tables: Tables, small: frozenset[str], auto_bits: int | None
) -> Mapping[str, int]:
    """Bits of the codes of each table's leaves, where options leave them to the restores.

    Args:
        tables: all of the run.
        small: those of them that are; see `find_small`.
        auto_bits: of the others; None: no bits are "auto".
    """
    if auto_bits is None:
        return {}
    return {name: FALLBACK_BITS if name in small else auto_bits for name in tables}


def _elements(options: Options, table: Table) -> int:
    """How many elements of a table and its slots are stored in "auto" bits."""
    following = (leaf for leaf in table.leaves if _follows(options, table.name, leaf))
    return table.rows * sum(map(_row_elements, following))


def _follows(options: Options, table: str, leaf: Leaf) -> bool:
    codec, other = (
        options.codec_for(
            table, leaf.name, _row_elements(leaf), leaf.dtype, auto_bits=bits
        )
        for bits in (2, 4)
    )
    return codec != other


def _row_elements(leaf: Leaf) -> int:
    return math.prod(leaf.shape[1:])
