"""Parameters of codecs chosen on a sample of each table's rows, before a run.

To remember: every process samples the same logical rows, sees their values, and takes what
process 0 chose, so neither the sharding nor the number of processes has a say.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.checkpointer.codec_tuning import Choice, cheapest, variants
from cnr_jax.errors import OptionError, StateMismatchError
from cnr_jax.options import Options, TableOptions, checked
from cnr_jax.rows.codecs import Codec
from cnr_jax.rows.mesh import outside_mesh
from cnr_jax.state.split import split
from cnr_jax.state.table import Table, Tables, check_tables

_log = logging.getLogger(__name__)

# Of the rows, as in Check-N-Run, but at least so many; and at most so many elements, of tables
# whose rows are very wide.
_SHARE = 1e-5
_LEAST_ROWS = 4096
_MOST_ELEMENTS = 1 << 24


@outside_mesh()
def tune(
    state: Any, tables: Tables, options: Options | None = None, *, within: float = 0.01
) -> Options:
    """Chooses for each table how long its codec searches, on a sample of its rows.

    Of a codec that searches (`"adaptive"`: fits by least squares; `"greedy"`: bins and ratio;
    `"kmeans"`: iterations) several settings are tried on 0.001 % of the rows, at least 4096,
    and the one of fewest rounds is taken whose mean l2 error is at most `within` above the best.
    What comes of it is logged, and stored with every save as any codec is. It costs some
    seconds, mostly of compiling, for each distinct width of rows.

    Call it once before the manager is made, on rows that look like those to be saved: those
    of a state that was restored or has been trained for a while. In runs of several processes all
    must call it. The choice depends on the values of the sampled rows alone, which are the same for
    every sharding and number of processes.

    Args:
        state: the train state, concrete.
        tables: from `find_tables`.
        options: the run's; None: the defaults. Their codecs and bits say what is tuned.
        within: how much more error than the best setting's is as good, as a share of it.

    Returns:
        The options with a codec of its own for every table whose codec searches. Others, slots,
        and tables whose bits are `"auto"`, keep theirs.

    Raises:
        OptionError: if `within` is negative, or options name tables that do not exist.
        StateMismatchError: if the state is not the one `tables` was found in, or abstract.

    Example:
        >>> from cnr_jax import find_tables
        >>> rows = jax.random.normal(jax.random.key(0), (500, 32))
        >>> state = {"user": rows, "step": 3}
        >>> options = tune(state, find_tables(state, ["user"]), Options(bits=2), within=0.02)
        >>> options.tables["user"].codec
        Asymmetric(bits=2, refits=2, metadata_bits=16)

    Source: Check-N-Run (NSDI'22), tuning of the adaptive search on a sample.
    """
    options = checked(options)
    check_tables(tables)
    if not within >= 0:
        raise OptionError(f"within is {within!r}, expected 0 or more")
    options.check_tables(tables)
    leaves, _ = split(state, tables)
    tuned = dict(options.tables)
    for name, table in tables.items():
        codec = options.codec_for(name, "table", table.dim, table.dtype)
        if options.is_auto(name, "table", table.dim, table.dtype):
            _log.info("table %r is not tuned: its bits follow the restores", name)
        elif variants(codec):
            rows = _sample(table, leaves[name][table.leaf.name])
            chosen = _choose(name, table, codec, rows, within)
            own = tuned.get(name, TableOptions())
            tuned[name] = dataclasses.replace(own, codec=chosen)
    return dataclasses.replace(options, tables=tuned)


def _choose(
    name: str, table: Table, codec: Codec, rows: np.ndarray, within: float
) -> Codec:
    """The choice of process 0: another kind of processor may round an error differently."""
    choice = cheapest(rows, variants(codec), within)
    index = choice.tried.index(choice.chosen)
    if jax.process_count() > 1:
        index = int(multihost_utils.broadcast_one_to_all(np.int32(index)))
        choice = choice._replace(chosen=choice.tried[index])
    _log.info("%s", _described(name, table, len(rows), choice, within))
    return choice.chosen.codec


def _described(
    name: str, table: Table, sampled: int, choice: Choice, within: float
) -> str:
    tried = ", ".join(
        f"{_settings(each.codec)}: {_share(each.error, choice.best_error)}"
        for each in choice.tried
    )
    return (
        f"table {name!r}: {choice.chosen.codec}, the fewest rounds within {within:.3%} of the"
        f" least error on {sampled:,} of {table.rows:,} rows; errors as shares of it: {tried}"
    )


def _settings(codec: Codec) -> str:
    """What differs between variants."""
    shown = ("refits", "bins", "ratio", "iterations")
    values = codec.configuration()
    return " ".join(f"{key} {values[key]}" for key in shown if key in values)


def _share(error: float, best: float) -> str:
    return f"{error / best:.4f}" if best else f"{error:.3g}"


def _sample(table: Table, data: Any) -> np.ndarray:
    """A uniform sample of the logical rows, the same on all processes, `[sampled, dim]`."""
    if not isinstance(data, jax.Array):
        raise StateMismatchError(
            f"table {table.name!r}: its rows cannot be sampled\n"
            f"  got {type(data).__name__}, expected a jax.Array"
        )
    rng = np.random.default_rng(table.rows)
    logical = rng.choice(table.rows, _sample_rows(table), replace=False, shuffle=False)
    rows = np.asarray(table.layout.to_physical(logical.astype(np.int64)))
    found = np.zeros((len(rows), *data.shape[1:]), data.dtype)
    for shard in data.addressable_shards:
        if shard.replica_id == 0:
            start, stop, _ = shard.index[0].indices(data.shape[0])
            here = (start <= rows) & (rows < stop)
            at = np.where(here, rows - start, 0).astype(np.int32)
            taken = np.asarray(_take(shard.data, jax.device_put(at, shard.device)))
            found[(here, *shard.index[1:])] = taken[here]
    return _of_all(found).reshape(len(rows), -1)


def _sample_rows(table: Table) -> int:
    most = max(1, _MOST_ELEMENTS // table.dim)
    return min(table.rows, most, max(_LEAST_ROWS, math.ceil(table.rows * _SHARE)))


@jax.jit
def _take(data: jax.Array, at: jax.Array) -> jax.Array:
    return data.at[at].get(mode="clip")


def _of_all(found: np.ndarray) -> np.ndarray:
    """Rows whose elements each are on one process, and zeros on the others, on all of them."""
    processes = jax.process_count()
    if processes == 1:
        return found
    # Sums of bits, to which zeros add nothing: those of numbers would not keep -0.0.
    bits = found.view(f"u{found.itemsize}")
    firsts = [
        min((d for d in jax.devices() if d.process_index == p), key=lambda d: d.id)
        for p in range(processes)
    ]
    mesh = jax.sharding.Mesh(np.array(firsts), ("process",))
    parts = jax.make_array_from_process_local_data(
        NamedSharding(mesh, P("process")), bits[None]
    )
    add = jax.jit(
        lambda x: jnp.sum(x, 0, dtype=x.dtype), out_shardings=NamedSharding(mesh, P())
    )
    return np.asarray(add(parts).addressable_data(0)).view(found.dtype)
