"""Compiles the programs of saves ahead: when a manager is made, or restores.

So no save has to wait for XLA, whatever the number of changed rows.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cnr_jax.checkpointer.saving.capture import Codecs, is_dithered
from cnr_jax.checkpointer.saving.widening import Widening
from cnr_jax.encoding import Encoding
from cnr_jax.options import Options
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.repository.residual_rows import residual_programs
from cnr_jax.rows.codecs import Raw
from cnr_jax.rows.codecs.residual import Residual
from cnr_jax.rows.fingerprints import rotation
from cnr_jax.rows.fingerprints import tiles as tile_hashes
from cnr_jax.rows.gather import host
from cnr_jax.rows.gather.device import device_programs
from cnr_jax.rows.gather.encode import comparing_program, host_programs
from cnr_jax.rows.tiling import (
    OwnTile,
    Program,
    group_tiles,
    own_settings,
    own_tiles,
    place_of,
    placing,
)
from cnr_jax.rows.touched import stamp_sharding
from cnr_jax.state.table import Tables
from cnr_jax.texts import logger

_log = logger(__name__)


def programs(
    tiles: Iterable[OwnTile],
    encoding: Encoding,
    widths: Mapping[str, int],
    staging: str,
    *,
    dithered_bits: int,
) -> Iterator[Program]:
    """Yields the programs that choose, gather and encode rows of tiles, however many rows change.

    Args:
        tiles: tiles of leaves whose sharding is known.
        encoding: encoding of rows.
        widths: bits of codes, by table, where options leave these to the number of restores.
        staging: where rows are encoded, as in options.
        dithered_bits: bits of the widest codes of tables that are dithered; 0: none are.
    """
    codecs, way = Codecs(encoding, widths), placing(staging)
    for tile in tiles:
        leaf, device = tile.leaf, tile.piece.device
        codec = codecs.of(tile)
        assert leaf.sharding is not None and tile.table.leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape)
        width = math.prod(shape[1:])
        if leaf.name == "table" and not isinstance(codec, Raw):
            yield comparing_program(codec, leaf.dtype, width)
        dithered = is_dithered(leaf, codec, dithered_bits)
        if isinstance(codec, Residual):
            yield from residual_programs(codec, leaf.dtype, width, dithered)
            codec, dithered = Raw(), False
        size = math.prod(shape) * leaf.dtype.itemsize
        if place_of(way, device, size, [leaf.sharding]) == "host":
            yield from host_programs(codec, leaf.dtype, width, dithered)
        else:
            yield from device_programs(codec, shape, leaf.dtype, device, dithered)
        rows = tile.table.leaf.sharding.shard_shape(tile.table.leaf.shape)[0]
        if way(device, 4 * rows) == "device":
            yield host.stamps_program(rows, device)


class WarmUp:
    """Compiles ahead the programs that saves of a run need, whatever the number of changed rows.

    Nothing is compiled for leaves whose sharding is not known.

    Args:
        tables: tables that are saved.
        options: options of the run.
        widening: knows the codecs, and the width of each table's codes.

    Attributes:
        done_for: pairs of widths for which all is compiled: of codes at "auto", and of the widest
            codes that are dithered.
    """

    def __init__(self, tables: Tables, options: Options, widening: Widening) -> None:
        self._options, self._widening = options, widening
        self._done: set[Program] = set()
        self.done_for: set[tuple[int | None, int]] = set()
        # The encoding for which `done_for` holds. A restore may bring another one.
        self._encoding = widening.encoding
        stamps = {
            name: stamp_sharding(table.leaf.sharding, table.leaf.shape)
            for name, table in tables.items()
            if table.leaf.sharding is not None
        }
        shardings = {
            name: {x.name: x.sharding for x in tables[name].leaves if x.sharding}
            for name in stamps
        }
        self._tiles = own_tiles(tables, shardings, stamps)

    def compile_for(self, plan: SavePlan) -> None:
        """Compiles for a plan that was not foreseen, such as after touched rows were made anew."""
        self.compile(plan.auto_bits, plan.dithered_bits)

    def hashes(self) -> Iterator[Program]:
        """Yields the programs that find changed rows."""
        options, way = self._options, placing(self._options.staging)
        asked = options.tracking
        groups = group_tiles(self._tiles).values()
        if asked in (None, "fingerprint"):
            yield from tile_hashes.programs(groups, way, tagged=False)
        if asked == "audited":
            yield from tile_hashes.programs(groups, way, tagged=True)
        if asked in (None, "recorded") and options.audit_bytes:
            yield from rotation.programs(self._tiles, options.audit_bytes, way)

    def compile(self, auto_bits: int | None, dithered_bits: int) -> None:
        """Compiles the programs that are missing.

        Args:
            auto_bits: width of codes where options leave it to the number of restores, except
                in small tables. Other widths are compiled only when they come, as each takes as
                long as the first.
            dithered_bits: bits of the widest codes that are dithered; 0: none are.
        """
        encoding = self._widening.encoding
        if encoding is not self._encoding:
            self._encoding = encoding
            self.done_for.clear()
        widths = auto_bits, dithered_bits
        if widths in self.done_for:
            return
        of_tables, staging = self._widening.widths(auto_bits), self._options.staging
        needed = programs(
            self._tiles, encoding, of_tables, staging, dithered_bits=dithered_bits
        )
        if not self._done:
            needed = itertools.chain(needed, self.hashes())
        missing = [p for p in dict.fromkeys(needed) if p not in self._done]
        if self._done and missing:
            kind = "dithered codes" if dithered_bits else "codes"
            bits = "" if auto_bits is None else f" of {auto_bits} bits"
            _log.info("compiling for %s%s", kind, bits)
        # XLA compiles each program on one core.
        with ThreadPoolExecutor(os.cpu_count(), "cnr_compile") as pool:
            for done in [pool.submit(_compile, *each) for each in missing]:
                done.result()
        self._done.update(missing)
        self.done_for.add(widths)


# Settings of jax that a program makes for all threads would hold in this thread too.
@own_settings()
def _compile(program: Callable[..., object], args: tuple[Any, ...]) -> None:
    program(*args)
