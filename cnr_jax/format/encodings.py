"""Encodings of rows, as manifests keep them for a run that goes on.

A reader of rows does not need them: each process manifest names the codecs of its own rows.
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
    """Encoding of one table, where it differs from that of all tables; None: it does not.

    Attributes:
        codec: codec of the table: its name in options, or a codec as stored.
        bits: bits for a codec given by name, a number or `"auto"`.
        slot_codec: codec of its slots.
    """

    codec: str | NamedConfiguration | None = None
    bits: int | str | None = None
    slot_codec: str | NamedConfiguration | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodingEntry:
    """Encoding of the rows of a run, for a restore that goes on; see SPEC.md, section 5.11."""

    codec: str | NamedConfiguration
    bits: int | str | None
    expected_restores: float | None
    slot_codec: str | NamedConfiguration
    compression: str | None
    rounding: str | None = None
    tables: Mapping[str, TableEncodingEntry]

    def is_exact(self, table: str) -> bool:
        """Whether a table is stored exactly, whatever the width of codes."""
        own = self.tables.get(table)
        codec = own.codec if own is not None and own.codec is not None else self.codec
        name = codec if isinstance(codec, str) else codec.name
        return name in ("raw", "cnr.raw")


def read_named(fields: Fields) -> NamedConfiguration:
    """Reads a name and its configuration."""
    configuration = fields.any("configuration")
    if not isinstance(configuration, dict):
        fields.problems.append(f"{fields.where}.configuration: expected an object")
        configuration = {}
    return NamedConfiguration(
        name=fields.text("name"),
        configuration=cast("dict[str, Any]", configuration),
    )


def read_encoding(fields: Fields) -> EncodingEntry:
    """Reads the encoding of the rows of a run."""
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
    """Reads an encoding that another process has read, and sent."""
    return read_encoding(Fields(document, "encoding", []))
