"""Rows that are encoded on the host, and stored as differences to the rows of the save below.

Means of gradients are stored beside the rows of their squares, which come before them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from cnr_jax.repository.parent_rows import TileKey, WrittenTile
from cnr_jax.repository.run_plan import RunPlan
from cnr_jax.rows.codecs import Encoded
from cnr_jax.rows.codecs.lattice import SAMPLE_ROWS, SUITS, Lattice, Parts
from cnr_jax.rows.codecs.residual import Digest, Residual, costs_less, is_on_step
from cnr_jax.rows.gather.chunk import Chunk
from cnr_jax.rows.tiling import Program, chunk_rows, host_device, program_rows

# Fewest rows of a sample that are not zeros, by which a step is judged: of few, each new one moves
# it. And the least share of all elements that is worth a full save.
_LEAST_ROWS, _LEAST_SHARE = 256, 0.05


class ResidualRows:
    """Encodes rows whose codec takes differences, and subtracts the rows below them.

    Args:
        plans: plans of the runs, in the order of their rows.
        below: parts of all rows of tiles as they are in the step that the save rests on.
        device: device that encodes.
    """

    def __init__(
        self,
        plans: Sequence[RunPlan],
        below: Mapping[TileKey, Parts],
        device: jax.Device,
    ) -> None:
        self._device = device
        self._starts = np.cumsum([0, *(plan.count for plan in plans)])
        self._runs = list[_Run | None]()
        known = dict[TileKey, _Run]()
        for plan in plans:
            run = None
            if isinstance(plan.codec, Residual):
                beside = known[plan.beside] if plan.beside else None
                run = known[plan.key] = _Run(
                    plan, plan.codec, below.get(plan.key), beside
                )
            self._runs.append(run)

    def encoded(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yields chunks in their order; encodes those whose codec takes differences."""
        done = 0
        for chunk in chunks:
            parts = self._parts(done, chunk.count)
            yield self._encode(chunk, parts) if parts else chunk
            done += chunk.count

    def stored(self, parts: Parts, done: int, count: int) -> Parts:
        """Parts of rows from `done` on, as they are stored: differences if they rest on others."""
        ours = self._parts(done, count)
        if not ours:
            return parts
        found = [
            run.stored({n: part[at : at + b - a] for n, part in parts.items()}, a, b)
            for run, a, b, at in ours
        ]
        return {n: np.concatenate([each[n] for each in found]) for n in found[0]}

    def below(self, run: int) -> str | None:
        """Digest of the rows that a run is added to; None if the run replaces them."""
        found = self._runs[run]
        if found is None or not found.adds:
            return None
        return (found.beside or found).digest.hexdigest()

    def outgrown(self, plans: Iterable[RunPlan]) -> tuple[str, ...]:
        """Names of tables of which a sample of all rows has grown out of the parent's step.

        Args:
            plans: plans of all tiles, also of those without rows to write. If the tables hold only
                a small part of their elements, none are named.
        """
        runs = (run for run in self._runs if run is not None)
        found = [run.plan for run in runs if run.is_outgrown()]
        few = _LEAST_SHARE * sum(plan.elements for plan in plans)
        if sum(plan.elements for plan in found) < few:
            return ()
        return tuple(sorted({plan.table for plan in found}))

    def written(self) -> dict[TileKey, WrittenTile]:
        """The rows that were written, by tile, for the save that rests on this one."""
        return {run.plan.key: run.written() for run in self._runs if run is not None}

    def _parts(self, done: int, count: int) -> list[tuple[_Run, int, int, int]]:
        """Runs that `count` rows from `done` on are in, if their codecs take differences.

        Each comes with the start and stop of these rows in the run, and their start in the chunk.
        """
        stop, found = done + count, list[tuple[_Run, int, int, int]]()
        number = int(np.searchsorted(self._starts, done, "right")) - 1
        while number < len(self._runs) and (first := int(self._starts[number])) < stop:
            run, low = self._runs[number], max(first, done)
            high = min(int(self._starts[number + 1]), stop)
            if run is not None and low < high:
                found.append((run, low - first, high - first, low - done))
            number += 1
        return found

    def _encode(self, chunk: Chunk, parts: list[tuple[_Run, int, int, int]]) -> Chunk:
        assert chunk.rows is not None or chunk.encoded is not None
        rows = chunk.rows
        if rows is None:
            assert chunk.encoded is not None
            rows = np.asarray(chunk.encoded.parts["rows"])
        plan, codec = parts[0][0].plan, parts[0][0].codec
        given = _given(codec, rows, parts, plan.keys_of is not None)
        encoded = _encode(codec, *jax.device_put(given, self._device))
        for run, a, b, at in parts:
            run.keep(encoded.parts, at, b - a)
        return Chunk(codec=codec, count=chunk.count, rows=rows, encoded=encoded)


def _given(
    codec: Residual,
    rows: np.ndarray,
    parts: list[tuple[_Run, int, int, int]],
    dithers: bool,
) -> list[np.ndarray]:
    """Arguments of `encode_on`: rows, and what their codec needs beside them.

    A codec on a step needs the step of each row, and its key if rows are dithered. The others need
    integers and centres of squares: those below, or those beside which means are stored.
    """
    if codec.on_step:
        steps, keys = np.ones(len(rows), np.float32), np.zeros(len(rows), np.uint32)
        for run, a, b, at in parts:
            some = slice(at, at + b - a)
            steps[some] = run.step(rows[some])
            if run.plan.keys_of is not None:
                keys[some] = run.plan.keys_of(run.positions(a, b))
        return [rows, steps, *[keys] * dithers]
    given = [np.zeros(rows.shape, np.int16), np.zeros((len(rows), 1), np.int16)]
    for run, a, b, at in parts:
        known = run.beside.whole(a, b) if run.beside else run.below(a, b)
        for array, name in zip(given, ("integers", "centre"), strict=True):
            if known is not None and name in known:
                array[at : at + b - a] = known[name]
    return [rows, *given]


class _Run:
    """A run: the rows of one tile.

    Args:
        plan: plan of the run.
        codec: codec of its rows.
        below: parts of all rows of the tile as they are in the save that this one rests on; None:
            there are none that differences can rest on.
        beside: run of squares beside which this one is stored; None: it is stored alone.
    """

    def __init__(
        self, plan: RunPlan, codec: Residual, below: Parts | None, beside: _Run | None
    ) -> None:
        self.plan, self.codec, self._below = plan, codec, below
        self.beside, self.digest = beside, Digest(codec)
        self._adds: bool | None = None if below is not None else False
        self._step: np.float32 | None = None
        if below is not None and codec.on_step:
            self._step = below["scale"].max()
        # Parts, start and count, as the encoder returns them; nobody waits for the arrays yet.
        self._kept: list[tuple[Mapping[str, jax.Array], int, int]] = []
        self._whole: Parts | None = None

    @property
    def adds(self) -> bool | None:
        """Whether rows are added to what lies below them; None: that is not known yet."""
        return self.beside.adds if self.beside else self._adds

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Positions in the tile of some of the rows."""
        if self.plan.positions is None:
            return np.arange(start, stop)
        return self.plan.positions[start:stop]

    def below(self, start: int, stop: int) -> Parts | None:
        """Parts of the rows below some of the rows; None if there are none."""
        if self._below is None:
            return None
        at = self.positions(start, stop)
        return {name: part[at] for name, part in self._below.items()}

    def step(self, rows: np.ndarray) -> np.float32:
        """Step of the tile: that of the save below, else one that suits a sample or these rows."""
        if self._step is None:
            sample = self.plan.sample
            self._step = self._chosen(rows if sample is None else sample)
        return self._step

    def is_outgrown(self) -> bool:
        """Whether the step of the save below suits the sample no more; False if none was taken."""
        if self._below is None or self._step is None or self.plan.sample is None:
            return False
        if np.count_nonzero((self.plan.sample != 0).any(axis=1)) < _LEAST_ROWS:
            return False
        least, most = SUITS
        return not least <= self._step / self._chosen(self.plan.sample) <= most

    def _chosen(self, rows: np.ndarray) -> np.float32:
        """The step that suits rows; not all of them are looked at."""
        assert is_on_step(self.codec)
        count = 1 << (min(len(rows), SAMPLE_ROWS).bit_length() - 1)
        sample = rows[np.arange(count) * len(rows) // count]
        return np.float32(_step(self.codec, sample))

    def keep(self, parts: Mapping[str, jax.Array], start: int, count: int) -> None:
        """Keeps the next rows: for the next save, and for rows that are stored beside them."""
        if self.beside is None:
            self._kept.append((parts, start, count))

    def whole(self, start: int, stop: int) -> Parts:
        """Parts of some of the rows, once all rows of the run have been encoded."""
        if self._whole is None:
            self._whole = {
                name: np.concatenate(
                    [np.asarray(p[name])[at : at + n] for p, at, n in self._kept]
                )
                for name in self._kept[0][0]
            }
            self._kept = []
        return {name: part[start:stop] for name, part in self._whole.items()}

    def stored(self, parts: Parts, start: int, stop: int) -> Parts:
        """Parts of some of the rows as they are stored."""
        if self.beside is not None:
            return {"integers": parts["integers"]}
        below = self.below(start, stop) if self.adds is not False else None
        if below is None:
            return parts
        found = self.codec.difference(parts, below)
        if self._adds is None:
            self._adds = costs_less(found["integers"], parts["integers"])
        if not self._adds:
            return parts
        self.digest.update(below)
        return found

    def written(self) -> WrittenTile:
        """The rows of the run, for the save that rests on this one."""
        parts = {} if self.beside else self.whole(0, self.plan.count)
        return WrittenTile(self.codec, self.plan.positions, parts)


def residual_programs(
    codec: Residual, dtype: np.dtype, width: int, dithers: bool
) -> Iterator[Program]:
    """Yields the programs that encode chunks of rows by such a codec."""
    large = chunk_rows(width, dtype.itemsize)
    for rows in {program_rows(1, large), large}:
        yield _encode_zeros, (codec, dtype, width, rows, dithers)


def _encode_zeros(
    codec: Residual, dtype: np.dtype, width: int, rows: int, dithers: bool
) -> None:
    given = _given(codec, np.zeros((rows, width), dtype), [], dithers)
    _encode(codec, *jax.device_put(given, host_device()))


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Residual, *given: jax.Array) -> Encoded:
    return codec.encode_on(*given)


@functools.partial(jax.jit, static_argnums=0)
def _step(codec: Lattice, rows: jax.Array) -> jax.Array:
    return codec.step(rows)
