"""Rows of runs on a lattice: encoded on the host, and stored as differences to the save below."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from cnr_jax.repository.parent_rows import TileKey, WrittenTile
from cnr_jax.repository.run_plan import RunPlan
from cnr_jax.rows.codecs import Encoded
from cnr_jax.rows.codecs.lattice import (
    SAMPLE_ROWS,
    Digest,
    Lattice,
    Parts,
    costs_less,
)
from cnr_jax.rows.gather.chunk import Chunk
from cnr_jax.rows.tiling import Program, chunk_rows, host_device, program_rows


class LatticeRows:
    """Encodes the rows of runs whose codec is a lattice, and takes away what lies below.

    Args:
        plans: of the runs, in the order of their rows.
        below: parts of all rows of tiles as they are in the step that the save rests on.
        device: encodes.
    """

    def __init__(
        self,
        plans: Sequence[RunPlan],
        below: Mapping[TileKey, Parts],
        device: jax.Device,
    ) -> None:
        self._device = device
        self._starts = np.cumsum([0, *(plan.count for plan in plans)])
        self._runs = [
            _Run(plan, plan.codec, below.get(plan.key))
            if isinstance(plan.codec, Lattice)
            else None
            for plan in plans
        ]

    def encoded(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yields chunks, those of rows on a lattice encoded."""
        done = 0
        for chunk in chunks:
            parts = self._parts(done, chunk.count)
            yield self._encode(chunk, parts) if parts else chunk
            done += chunk.count

    def stored(self, parts: Parts, done: int, count: int) -> Parts:
        """What is stored of rows that begin at `done`: differences where they rest on others."""
        ours = self._parts(done, count)
        if not ours:
            return parts
        found = [
            run.stored({n: part[at : at + b - a] for n, part in parts.items()}, a, b)
            for run, a, b, at in ours
        ]
        return {name: np.concatenate([each[name] for each in found]) for name in parts}

    def below(self, run: int) -> str | None:
        """Digest of what the rows of a run are added to; None if they replace it."""
        found = self._runs[run]
        return found.digest.hexdigest() if found and found.adds else None

    def written(self) -> dict[TileKey, WrittenTile]:
        """All rows of tiles that were stored."""
        return {run.plan.key: run.written() for run in self._runs if run is not None}

    def _parts(self, done: int, count: int) -> list[tuple[_Run, int, int, int]]:
        """The runs of rows on a lattice: start and stop in each, and where they start in all."""
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
        codec, dithers = parts[0][0].codec, parts[0][0].plan.keys_of is not None
        steps = np.ones(len(rows), np.float32)
        keys = np.zeros(len(rows), np.uint32)
        for run, a, b, at in parts:
            some = slice(at, at + b - a)
            steps[some] = run.step(rows[some])
            if run.plan.keys_of is not None:
                keys[some] = run.plan.keys_of(run.positions(a, b))
        given = [rows, steps, *([keys] if dithers else [])]
        encoded = _encode_at(codec, *jax.device_put(given, self._device))
        return Chunk(codec=codec, count=chunk.count, rows=rows, encoded=encoded)


class _Run:
    """Rows of one tile on a lattice."""

    def __init__(self, plan: RunPlan, codec: Lattice, below: Parts | None) -> None:
        self.plan, self.codec, self._below = plan, codec, below
        self.digest = Digest()
        self.adds: bool | None = None if below is not None else False
        self._step: np.float32 | None = None
        if below is not None:
            self._step = below["scale"].max()
        self._stored: list[Parts] = []

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Positions in the tile of some of the rows."""
        if self.plan.positions is None:
            return np.arange(start, stop)
        return self.plan.positions[start:stop]

    def step(self, rows: np.ndarray) -> np.float32:
        """The step of the tile; chosen from its first rows if there is no better sample."""
        if self._step is None:
            sample = self.plan.sample if self.plan.sample is not None else rows
            count = 1 << (min(len(sample), SAMPLE_ROWS).bit_length() - 1)
            sample = sample[np.arange(count) * len(sample) // count]
            self._step = np.float32(_step(self.codec, sample))
        return self._step

    def stored(self, parts: Parts, start: int, stop: int) -> Parts:
        """Parts of some of the rows as they are stored."""
        self._stored.append(parts)
        if self.adds is False:
            return parts
        assert self._below is not None
        at = self.positions(start, stop)
        below = {name: part[at] for name, part in self._below.items()}
        difference = self.codec.difference(parts, below)
        if self.adds is None:
            self.adds = costs_less(difference, parts["integers"])
        if not self.adds:
            return parts
        self.digest.update(below)
        return {**parts, "integers": difference}

    def written(self) -> WrittenTile:
        """All rows, which are kept no longer."""
        parts, self._stored = self._stored, []
        whole = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        return WrittenTile(self.codec, self.plan.positions, whole)


def lattice_programs(
    codec: Lattice, dtype: np.dtype, width: int, dithers: bool
) -> Iterator[Program]:
    """Programs that encode chunks of such rows."""
    large = chunk_rows(width, dtype.itemsize)
    for rows in {program_rows(1, large), large}:
        yield _encode_zeros, (codec, dtype, width, rows, dithers)


def _encode_zeros(
    codec: Lattice, dtype: np.dtype, width: int, rows: int, dithers: bool
) -> None:
    given = [np.zeros((rows, width), dtype), np.ones(rows, np.float32)]
    keys = [np.zeros(rows, np.uint32)] * dithers
    _encode_at(codec, *jax.device_put([*given, *keys], host_device()))


@functools.partial(jax.jit, static_argnums=0)
def _encode_at(codec: Lattice, *given: jax.Array) -> Encoded:
    return codec.encode_at(*given)


@functools.partial(jax.jit, static_argnums=0)
def _step(codec: Lattice, rows: jax.Array) -> jax.Array:
    return codec.step(rows)
