"""Reading encoded rows ahead and putting them in place, in order."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from cnr_jax.repository.array_reader import Reading
from cnr_jax.repository.replay.encoded import Held, part_ref
from cnr_jax.repository.replay.overlap import Index, picked

# Encoded bytes read at once where they are put in place one by one: few enough to stay in
# cache on their way, many enough to hide the cost of a read.
BLOCK_BYTES = 4 << 20
# Encoded bytes that are being read while earlier ones are put in place.
AHEAD_BYTES = 32 << 20
# Where a row goes that is read only to be checked.
DROPPED = -1


@dataclasses.dataclass(slots=True)
class Job:
    """A block of encoded rows on its way to where they belong."""

    readings: Mapping[str, Reading]
    parts: Mapping[str, np.ndarray]
    nbytes: int
    held: Held
    pick: Index | None
    at: Index

    def finish(self) -> None:
        """Waits until it is read, and puts it in place."""
        for name, reading in self.readings.items():
            values = reading.result()
            if self.pick is None:
                continue  # it was read to where it belongs
            target = self.parts[name]
            width = self.held.stored.parts[name].width
            rows = values.reshape(-1, width)
            if self.held.stored != self.held.encoding:
                whole = rows.reshape(-1, *self.held.stored.trailing)
                cut = whole[(slice(None), *self.held.stored.slices)]
                rows = np.ascontiguousarray(cut).reshape(len(rows), -1)
            _items(target)[self.at] = _items(rows)[self.pick]


class Queue:
    """Finishes jobs in the order in which they came, while later ones are being read."""

    def __init__(self) -> None:
        self._jobs: collections.deque[Job] = collections.deque()
        self._nbytes = 0

    def extend(self, jobs: Iterator[Job]) -> None:
        """Adds jobs, which start as they are drawn, and finishes those that waited long."""
        for job in jobs:
            self._jobs.append(job)
            self._nbytes += job.nbytes
            while self._nbytes > AHEAD_BYTES:
                self._finish()

    def drain(self) -> None:
        """Finishes all jobs."""
        while self._jobs:
            self._finish()

    def _finish(self) -> None:
        job = self._jobs.popleft()
        self._nbytes -= job.nbytes
        job.finish()


def jobs(held: Held, parts: Mapping[str, np.ndarray], *, direct: bool) -> Iterator[Job]:
    """Starts to read the rows of a segment, block by block.

    Args:
        held: the rows.
        parts: where they belong.
        direct: nothing else is written to these rows before, so that runs may be read
            straight into `parts`.
    """
    run = isinstance(held.index, slice) and isinstance(held.at, slice)
    direct = direct and run and held.encoding == held.stored
    row_bytes = held.stored.row_bytes
    step = max(1, (AHEAD_BYTES // 2 if direct else BLOCK_BYTES) // row_bytes)
    for start, stop, pick, at in _blocks(held.index, held.at, step):
        if not direct and not isinstance(at, slice):
            pick, at = _kept(pick, at)
        readings: dict[str, Reading] = {}
        for name, part in held.stored.parts.items():
            ref = part_ref(held.reader, held.process, held.segment, name, part)
            first, last = (ref.offset + row * part.width for row in (start, stop))
            out = parts[name][at].reshape(-1) if direct else None
            readings[name] = held.reader.start(
                held.process, ref.array, first, last, out
            )
        nbytes = (stop - start) * row_bytes
        yield Job(readings, parts, nbytes, held, None if direct else pick, at)


def _blocks(
    index: Index, at: Index, step: int
) -> Iterator[tuple[int, int, Index, Index]]:
    """Runs of at most `step` rows of a segment that have all rows of `index`.

    Yields:
        Start and stop of the run, which of its rows are wanted, and where they go.
    """
    if isinstance(index, slice):
        for start in range(index.start, index.stop, step):
            stop = min(start + step, index.stop)
            here = picked(at, start - index.start, stop - index.start)
            yield start, stop, slice(None), here
        return
    low = 0
    while low < len(index):
        start = int(index[low])
        high = int(np.searchsorted(index, start + step))
        stop = int(index[high - 1]) + 1
        yield start, stop, index[low:high] - start, picked(at, low, high)
        low = high


def _kept(pick: Index, at: np.ndarray) -> tuple[Index, np.ndarray]:
    kept = at != DROPPED
    if kept.all():
        return pick, at
    return (np.flatnonzero(kept) if isinstance(pick, slice) else pick[kept]), at[kept]


def _items(rows: np.ndarray) -> np.ndarray:
    """Rows as opaque items: numpy moves them whole, and never looks at numbers."""
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]
