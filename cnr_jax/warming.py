"""Compiling, when a manager is made, all that its saves will need."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

from cnr_jax import capture
from cnr_jax.options import Options
from cnr_jax.rows import hashing
from cnr_jax.rows.tiling import own_tiles
from cnr_jax.rows.touched import stamp_sharding
from cnr_jax.rows.watch import group_tiles
from cnr_jax.table import Tables


def warm_up(tables: Tables, options: Options) -> None:
    """Compiles what saves of these tables need, for every number of changed rows.

    Nothing is done for leaves whose sharding is not known.
    """
    stamps = {
        name: stamp_sharding(table.leaf.sharding, table.leaf.shape)
        for name, table in tables.items()
        if table.leaf.sharding is not None
    }
    shardings = {
        name: {x.name: x.sharding for x in tables[name].leaves if x.sharding}
        for name in stamps
    }
    tiles = own_tiles(tables, shardings, stamps)
    groups = group_tiles(tiles).values()
    needed = [
        capture.programs(tiles, options),
        *(
            hashing.programs(groups, capture.staging(options), t)
            for t in _tags(options)
        ),
    ]
    # XLA compiles each on one core.
    with ThreadPoolExecutor(os.cpu_count(), "cnr_compile") as pool:
        programs = dict.fromkeys(itertools.chain.from_iterable(needed))
        for done in [pool.submit(program, *args) for program, args in programs]:
            done.result()


def _tags(options: Options) -> set[bool]:
    """With and without tags, as hashes will be made."""
    modes = [options.tracking] if options.tracking else ["fingerprint", "recorded"]
    if options.audit_saves == 0:
        modes = [mode for mode in modes if mode != "recorded"]
    return {mode != "fingerprint" for mode in modes}
