"""Compiling all that saves need before the first of them: when a manager is made, or restores."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from cnr_jax.checkpointer.saving import capture
from cnr_jax.checkpointer.saving.auto_bits import find_small, widths_of
from cnr_jax.options import Options
from cnr_jax.rows.fingerprints import rotation, tiles
from cnr_jax.rows.fingerprints.watch import group_tiles
from cnr_jax.rows.gather.chunk import Program
from cnr_jax.rows.gather.where import placing
from cnr_jax.rows.tiling import own_tiles
from cnr_jax.rows.touched import stamp_sharding
from cnr_jax.state.table import Tables

_log = logging.getLogger(__name__)


class Warmth:
    """What saves of a run need compiled, for every number of changed rows, and what is.

    Nothing is done for leaves whose sharding is not known.

    Args:
        tables: that are saved.
        options: of the run.

    Attributes:
        widths: of codes for which all is compiled.
    """

    def __init__(self, tables: Tables, options: Options) -> None:
        self._options, self._tables = options, tables
        self._small = find_small(options, tables)
        self._done: set[Program] = set()
        self.widths: set[int | None] = set()
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

    def hashes(self) -> Iterator[Program]:
        """What finding changed rows needs."""
        options, way = self._options, placing(self._options.staging)
        asked = options.tracking
        groups = group_tiles(self._tiles).values()
        if asked in (None, "fingerprint"):
            yield from tiles.programs(groups, way, tagged=False)
        if asked == "audited":
            yield from tiles.programs(groups, way, tagged=True)
        if asked in (None, "recorded") and options.audit_bytes:
            yield from rotation.programs(self._tiles, options.audit_bytes, way)

    def warm_up(self, auto_bits: int | None) -> None:
        """Compiles what is not yet.

        Args:
            auto_bits: width of codes where options leave it to the number of restores, but
                for small tables. Others are compiled only when they come: each takes as long
                as the first.
        """
        if auto_bits in self.widths:
            return
        if self.widths:
            _log.info("compiling for codes of %s bits", auto_bits)
        of_tables = widths_of(self._tables, self._small, auto_bits)
        needed = capture.programs(self._tiles, self._options, of_tables)
        if not self.widths:
            needed = itertools.chain(needed, self.hashes())
        programs = [p for p in dict.fromkeys(needed) if p not in self._done]
        # XLA compiles each on one core.
        with ThreadPoolExecutor(os.cpu_count(), "cnr_compile") as pool:
            for done in [pool.submit(program, *args) for program, args in programs]:
                done.result()
        self._done.update(programs)
        self.widths.add(auto_bits)
