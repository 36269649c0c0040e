"""Tuning of codecs on a sample of each table's rows, before a run.

To remember: every process samples the same logical rows, sees their values, and takes what process
0 chose. So neither the sharding nor the number of processes has a say.

Source: Check-N-Run (NSDI'22), which tunes its search on a sample of the rows. How it weighs error
against time is not known. Here the cost is counted in rounds, not in seconds, so that the choice
depends on the rows alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.errors import OptionError, StateMismatchError
from cnr_jax.given import TableOptions
from cnr_jax.options import Options, checked
from cnr_jax.rows.codecs import Asymmetric, Codec, Greedy, KMeans
from cnr_jax.rows.tiling import chunk_rows, in_host_memory, own_settings, padded
from cnr_jax.state.table import Table, Tables, check_tables, split
from cnr_jax.texts import logger

_log = logger(__name__)

# Share of the rows in a sample, as in Check-N-Run, but at least so many rows, and at most so many
# elements if rows are very wide.
_SHARE = 1e-5
_LEAST_ROWS = 4096
_MOST_ELEMENTS = 1 << 24
# Settings that are tried. On trained rows the greedy search gains nothing from more bins.
_ITERATIONS = (0, 1, 2, 3, 4, 6, 8)
_REFITS = (0, 1, 2, 3, 4, 5, 7, 9)
_BINS = (5, 10, 15, 25, 45)
_RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
# Most rows that are encoded at a time; they have no more bytes than a chunk of a save.
_MOST_ROWS = 4096


@own_settings()
def tune(
    state: Any, tables: Tables, options: Options | None = None, *, within: float = 0.01
) -> Options:
    """Tunes how long the codec of each table searches, on a sample of its rows.

    For a codec that searches (`"adaptive"`: fits by least squares; `"greedy"`: bins and ratio;
    `"kmeans"`: iterations) it tries several settings on 0.001 % of the rows, but at least 4096. Of
    the settings whose mean l2 error is at most `within` above the best, it takes the one of fewest
    rounds. It logs the choice, and saves store it like any codec. It takes some seconds, mostly of
    compiling, for each distinct width of rows.

    Call it once before you make the manager, on rows that look like those to be saved: those of a
    state that was restored or has been trained for a while. In runs of several processes call it on
    all of them. The choice depends on the values of the sampled rows alone, which are the same for
    every sharding and number of processes.

    Args:
        state: train state, concrete.
        tables: tables, from `find_tables`.
        options: options of the run; None: the defaults. Their codecs and bits are tuned.
        within: largest error above that of the best setting, as a share of it.

    Returns:
        The options, with a codec for each table whose codec searches. Other tables, slots, and
        tables whose bits are `"auto"` keep theirs.

    Raises:
        OptionError: if `within` is negative, or options name tables that do not exist.
        StateMismatchError: if the state is not the one `tables` was found in, or is abstract.

    Example:
        >>> from cnr_jax import find_tables
        >>> rows = jax.random.normal(jax.random.key(0), (500, 16))
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
        if options.encoding.is_auto(name, "table", table.dim, table.dtype):
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
    """Returns the choice of process 0: another kind of processor may round an error differently."""
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
    # What differs between variants.
    shown, best = ("refits", "bins", "ratio", "iterations"), choice.best_error
    tried = []
    for codec, _, error in choice.tried:
        values = codec.configuration()
        settings = " ".join(f"{key} {values[key]}" for key in shown if key in values)
        tried.append(
            f"{settings}: {error / best:.4f}" if best else f"{settings}: {error:.3g}"
        )
    return (
        f"table {name!r}: {choice.chosen.codec}, the fewest rounds within {within:.3%} of the"
        f" least error on {sampled:,} of {table.rows:,} rows; errors as shares of it: "
        + ", ".join(tried)
    )


class Variant(NamedTuple):
    """Configuration of a codec that may be chosen.

    Attributes:
        codec: codec, of the same kind and width in all variants.
        rounds: number of rounds of its search, which is its cost: all rounds cost the same.
    """

    codec: Codec
    rounds: int


class Tried(NamedTuple):
    """Variant that was tried, with its mean l2 error of a row."""

    codec: Codec
    rounds: int
    error: float


class Choice(NamedTuple):
    """Choice for a table: the chosen variant, and all that were tried, in the order given."""

    chosen: Tried
    tried: tuple[Tried, ...]

    @property
    def best_error(self) -> float:
        """Least error of all variants that were tried."""
        return min(each.error for each in self.tried)


def variants(codec: Codec) -> Sequence[Variant]:
    """Returns the configurations that may replace a codec; most kinds have none.

    Example:
        >>> [variant.codec.refits for variant in variants(Asymmetric(bits=2))]
        [0, 1, 2, 3, 4, 5, 7, 9]
    """
    if isinstance(codec, Asymmetric) and codec.refits != 0:
        return [Variant(dataclasses.replace(codec, refits=n), n) for n in _REFITS]
    if isinstance(codec, KMeans) and codec.iterations:
        return [
            Variant(dataclasses.replace(codec, iterations=n), n) for n in _ITERATIONS
        ]
    if isinstance(codec, Greedy):
        return [
            Variant(dataclasses.replace(codec, bins=bins, ratio=ratio), moves)
            for bins in _BINS
            for ratio in _RATIOS
            if (moves := int(bins * ratio + 1e-9))
        ]
    return []


def cheapest(rows: np.ndarray, found: Sequence[Variant], within: float) -> Choice:
    """Returns the variant of fewest rounds among those close to the best.

    Args:
        rows: float[rows, dim], of a dtype that the codecs encode.
        found: variants to try, at least one.
        within: how much greater than the least error the chosen one may be, as a share of it.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
        >>> some = variants(Asymmetric(bits=2))[:4]
        >>> cheapest(rows, some, within=0.05).chosen.rounds
        1
    """
    tried = tuple(Tried(*each, mean_error(each.codec, rows)) for each in found)
    limit = (1.0 + within) * min(each.error for each in tried)
    close = [each for each in tried if each.error <= limit]
    return Choice(min(close, key=lambda each: (each.rounds, each.error)), tried)


def mean_error(codec: Codec, rows: np.ndarray) -> float:
    """Returns the mean l2 error of a row; escaped rows, which are stored exactly, have none."""
    dim = rows.shape[1]
    size = min(chunk_rows(dim, rows.dtype.itemsize), _MOST_ROWS)
    norms = np.zeros(len(rows))
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        back, escaped = _there_and_back(codec, padded(part, size))
        held = ~np.asarray(escaped)[: len(part)]
        # In double precision: squares of what a float holds may not fit into one.
        off = np.asarray(back)[: len(part)][held].astype(np.float64) - part[held]
        norms[start : start + size][held] = np.linalg.norm(off, axis=1)
    return float(norms.mean())


@functools.partial(jax.jit, static_argnums=0)
def _there_and_back(codec: Codec, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    encoded = codec.encode(rows)
    back = codec.decode(encoded.parts, dim=rows.shape[1], dtype=rows.dtype)
    return back, encoded.escaped


def _sample(table: Table, data: Any) -> np.ndarray:
    """Draws a uniform sample of the logical rows, the same on all processes, `[sampled, dim]`."""
    if not isinstance(data, jax.Array):
        raise StateMismatchError(
            f"table {table.name!r}: its rows cannot be sampled\n"
            f"  got {type(data).__name__}, expected a jax.Array"
        )
    count = max(_LEAST_ROWS, math.ceil(table.rows * _SHARE))
    count = min(table.rows, count, max(1, _MOST_ELEMENTS // table.dim))
    rng = np.random.default_rng(table.rows)  # the same seed on all processes
    logical = rng.choice(table.rows, count, replace=False, shuffle=False)
    rows = np.asarray(table.layout.to_physical(logical.astype(np.int64)))
    found = np.zeros((len(rows), *data.shape[1:]), data.dtype)
    for shard in data.addressable_shards:
        if shard.replica_id == 0:
            start, stop, _ = shard.index[0].indices(data.shape[0])
            here = (start <= rows) & (rows < stop)
            at = np.where(here, rows - start, 0).astype(np.int32)
            if in_host_memory(shard.data.sharding):
                taken = np.asarray(shard.data)[at]
            else:
                taken = np.asarray(_take(shard.data, jax.device_put(at, shard.device)))
            found[(here, *shard.index[1:])] = taken[here]
    return of_all(found).reshape(len(rows), -1)


@jax.jit
def _take(data: jax.Array, at: jax.Array) -> jax.Array:
    return data.at[at].get(mode="clip")


@own_settings()
def of_all(found: np.ndarray) -> np.ndarray:
    """Gathers an array on all processes; each value is on one of them, with zeros on the others."""
    processes = jax.process_count()
    if processes == 1:
        return found
    # Bits are summed, as sums of numbers would not keep -0.0. Without x64 jax has integers of at
    # most 32 bits.
    bits = np.ascontiguousarray(found).view(f"u{min(found.itemsize, 4)}")
    # One device of each process carries its values.
    firsts = [
        min((d for d in jax.devices() if d.process_index == p), key=lambda d: d.id)
        for p in range(processes)
    ]
    mesh = jax.sharding.Mesh(np.array(firsts), ("process",))
    parts = jax.make_array_from_process_local_data(
        NamedSharding(mesh, P("process")), bits[None]
    )
    summed = _sum_program(NamedSharding(mesh, P()))(parts)
    return np.asarray(summed.addressable_data(0)).view(found.dtype)


@functools.cache
def _sum_program(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Compiled sum over processes; kept, as each metric of each trial asks for it."""
    return jax.jit(lambda x: jnp.sum(x, 0, dtype=x.dtype), out_shardings=where)
