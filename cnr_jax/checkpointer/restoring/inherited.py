"""Encoding that a run inherits, derived from its steps if their manifests do not have it.

Manifests have it, except those of older writers. For these it is derived from the codecs of stored
rows, which do not tell whether bits followed the restores, so a width stays as it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cnr_jax import errors
from cnr_jax.encoding import Encoding
from cnr_jax.format import names
from cnr_jax.format.encodings import EncodingEntry
from cnr_jax.format.manifest import Manifest
from cnr_jax.format.tiles import ProcessManifest
from cnr_jax.given import TableOptions
from cnr_jax.repository.index.planner import ALL_BITS
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.rows.codecs import Codec, codec_from, reads_bits

# Values of options, by name.
_Options = Mapping[str, Any]


class Step(NamedTuple):
    """A committed step, and what its processes have written."""

    manifest: Manifest
    processes: Sequence[ProcessManifest]


class _Stored(NamedTuple):
    """Stored rows of one leaf: their width and dtype, their number of elements, and their codec."""

    leaf: str
    width: int
    dtype: np.dtype
    elements: int
    codec: Codec


def encoding_in(steps: Iterable[Step]) -> EncodingEntry | None:
    """Derives the encoding of a run from the codecs of its first step that is not exact.

    Args:
        steps: steps of one run, by older writers, the most telling ones first.

    Returns:
        The encoding; None if no step tells.

    Raises:
        OptionError: if a codec is not known here.
    """
    for step in steps:
        if ALL_BITS not in step.manifest.reason:
            found = _stored(step)
            if found:
                features = {names.ZSTD, names.BLOSC} & {
                    *step.manifest.required_features
                }
                return _encoding(found, bool(features))
    return None


def renamed(entry: EncodingEntry, now: Mapping[str, str]) -> EncodingEntry:
    """Renames the tables of an encoding, for a state with other names.

    Args:
        entry: encoding of a step.
        now: names in the step of the restored tables, by their names in the state.
    """
    others = entry.tables.keys() - now.keys() - set(now.values())
    tables = {name: own for name, own in entry.tables.items() if name in others}
    tables |= {
        name: entry.tables[was] for name, was in now.items() if was in entry.tables
    }
    return dataclasses.replace(entry, tables=tables)


def _stored(step: Step) -> dict[str, list[_Stored]]:
    """Lists the stored leaves of each table of a step, with their codecs."""
    dtypes = {
        (table.name, leaf.name): (leaf.dtype, math.prod(leaf.shape))
        for table in step.manifest.tables
        for leaf in table.leaves
    }
    found: dict[str, dict[str, _Stored]] = defaultdict(dict)
    for process in step.processes:
        for tile in process.tiles:
            if tile.segments and tile.width:
                # The codec of the first segment: escaped rows of a tile, stored raw, come last.
                named = process.codecs[tile.segments[0].codec]
                dtype, elements = dtypes[tile.table, tile.leaf]
                try:
                    codec = codec_from(named.name, named.configuration)
                except errors.FormatError as error:
                    raise errors.OptionError(
                        f"codecs of step {step.manifest.step} cannot be inherited: {error}\n"
                        "  hint: give codec= and slot_codec="
                    ) from error
                found[tile.table][tile.leaf] = _Stored(
                    tile.leaf, tile.width, numpy_dtype(dtype), elements, codec
                )
    return {table: list(leaves.values()) for table, leaves in found.items()}


def _encoding(found: Mapping[str, list[_Stored]], is_packed: bool) -> EncodingEntry:
    tables = {
        t: [x for x in leaves if x.leaf == "table"] for t, leaves in found.items()
    }
    slots = {t: [x for x in leaves if x.leaf != "table"] for t, leaves in found.items()}
    of_all, own = _likeliest(tables, _of_tables(), "codec")
    of_slots, own_slots = _likeliest(slots, _of_slots(), "slot_codec")
    said = {
        name: TableOptions(**own.get(name, {}), **own_slots.get(name, {}))
        for name in own.keys() | own_slots.keys()
    }
    packing = "zstd" if is_packed else None
    whole = Encoding(**of_all, **of_slots, compression=packing, tables=said)
    return whole.entry()


def _of_tables() -> Iterator[_Options]:
    """Yields options that tables may have been saved with, the likeliest first."""
    for name in ("adaptive", "raw", "asymmetric", "symmetric", "greedy", "kmeans"):
        for bits in (4, 2, 3, 8) if reads_bits(name) else ():
            if (name, bits) != ("kmeans", 8):
                yield {"codec": name, "bits": bits}
        if not reads_bits(name):
            yield {"codec": name}


def _of_slots() -> Iterator[_Options]:
    """Yields options that slots may have been saved with; bits are those of tables."""
    for name in ("raw", "auto", "bfloat16", "log", "log8"):
        yield {"slot_codec": name}


def _likeliest(
    found: Mapping[str, list[_Stored]], likely: Iterable[_Options], name: str
) -> tuple[_Options, dict[str, _Options]]:
    """Finds options that explain most of the stored rows, and those of tables for the rest."""
    stored = [x for leaves in found.values() for x in leaves]
    tried = [
        *likely,
        *({name: codec} for codec in dict.fromkeys(x.codec for x in stored)),
    ]
    fitting = {
        table: [
            i for i, options in enumerate(tried) if _explains(options, table, leaves)
        ]
        for table, leaves in found.items()
    }

    # Counted in elements, so that large tables decide on the options of all.
    def explained(i: int) -> int:
        return sum(
            x.elements for t, leaves in found.items() if i in fitting[t] for x in leaves
        )

    best = max(range(len(tried)), key=explained)
    # Other tables get the likeliest options that fit, as far as these differ from the best.
    own: dict[str, _Options] = {
        table: {k: v for k, v in tried[fits[0]].items() if tried[best].get(k) != v}
        for table, fits in fitting.items()
        if fits and best not in fits
    }
    return tried[best], own


def _explains(options: _Options, table: str, leaves: Sequence[_Stored]) -> bool:
    encoding = Encoding(**options)
    return all(
        encoding.codec_for(table, x.leaf, x.width, x.dtype) == x.codec for x in leaves
    )
