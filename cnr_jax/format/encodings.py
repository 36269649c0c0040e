"""How rows of a run are stored, as its manifests tell those who go on with it.

What it says is of no meaning to a reader: each process manifest names the codecs of its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from cnr_jax.format.fields import Fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedConfiguration:
    """A codec or a row layout as stored: a name and its parameters."""

    name: str
    configuration: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableEncodingEntry:
    """How rows of one table are stored, where that differs from all; None: as of all.

    Attributes:
        codec: of the table, what options call it or a codec as stored.
        bits: that a codec of that name takes, a number or `"auto"`.
        slot_codec: of its slots.
    """

    codec: str | NamedConfiguration | None = None
    bits: int | str | None = None
    slot_codec: str | NamedConfiguration | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodingEntry:
    """How rows of a run are stored, for whoever goes on with it; see SPEC.md, section 5.11."""

    codec: str | NamedConfiguration
    bits: int | str | None
    expected_restores: float | None
    slot_codec: str | NamedConfiguration
    compression: str | None
    rounding: str | None = None
    tables: Mapping[str, TableEncodingEntry]

    def is_exact(self, table: str) -> bool:
        """Whether all bits of a table are stored in any width of codes."""
        own = self.tables.get(table)
        codec = own.codec if own is not None and own.codec is not None else self.codec
        name = codec if isinstance(codec, str) else codec.name
        return name in ("raw", "cnr.raw")


def read_named(fields: Fields) -> NamedConfiguration:
    """A name and its configuration."""
    configuration = fields.any("configuration")
    if not isinstance(configuration, dict):
        fields.problems.append(f"{fields.where}.configuration: expected an object")
        configuration = {}
    return NamedConfiguration(
        name=fields.text("name"),
        configuration=cast("dict[str, Any]", configuration),
    )


def read_encoding(fields: Fields) -> EncodingEntry:
    """How rows of a run are stored."""
    common = _read_table_encoding(fields)
    expects = fields.has("expected_restores")
    return EncodingEntry(
        codec=common.codec or fields.text("codec"),
        bits=common.bits,
        expected_restores=fields.number("expected_restores") if expects else None,
        slot_codec=common.slot_codec or fields.text("slot_codec"),
        compression=fields.text("compression") if fields.has("compression") else None,
        rounding=fields.text("rounding") if fields.has("rounding") else None,
        tables=fields.mapping("tables", _read_table_encoding),
    )


def _read_table_encoding(fields: Fields) -> TableEncodingEntry:
    def codec(key: str) -> str | NamedConfiguration | None:
        if not fields.has(key):
            return None
        is_named = isinstance(fields.any(key), str)
        return fields.text(key) if is_named else read_named(fields.child(key))

    bits = fields.any("bits")
    if isinstance(bits, str) or bits is None:
        width = bits
    else:
        width = fields.integer("bits", minimum=1)
    return TableEncodingEntry(
        codec=codec("codec"), bits=width, slot_codec=codec("slot_codec")
    )


def encoding_told(document: Mapping[str, Any]) -> EncodingEntry:
    """What a process tells another one, and has read before."""
    return read_encoding(Fields(document, "encoding", []))
