"""The newest rows of a region, gathered from a chain while they are still encoded.

Encoded rows are several times smaller than decoded ones, so a chain is replayed on codes, in host
memory: each row is then decoded once, however many checkpoints hold it. Most rows of a region
are of one *encoding*; those that are stored in another way (escaped rows, another codec in a later
checkpoint) are kept beside, as patches, and read only if nothing newer holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from cnr_jax.repository.replay.encoded import Encoding, Held, Merged, Patch
from cnr_jax.repository.replay.fetch import DROPPED, Queue, jobs
from cnr_jax.repository.replay.overlap import Index, as_array
from cnr_jax.rows.gather.chunk import aligned_empty


def merge(
    held: Sequence[Held], rows: int, empty: Encoding, main: Encoding | None = None
) -> Merged:
    """Reads the newest copy of each row.

    Args:
        held: what a chain holds, in order.
        rows: rows of the region.
        empty: the encoding of rows that nothing holds, which are zeros; raw.
        main: the encoding in which most rows are to come; None: that of the first that is held.

    Raises:
        IntegrityError: if data is missing or damaged.
        FormatError: if segments do not fit their codecs.
    """
    if main is None:
        main = held[0].encoding if held else empty
    parts = main.room(rows, aligned_empty)
    owners = _Owners(rows, sum(each.count for each in held if each.first))
    queue = Queue()
    others: list[tuple[int, Held]] = []
    for each in held:
        if each.encoding == main:
            owners.claim(each.at, 0)
            queue.extend(jobs(each, parts, direct=each.first))
        else:
            others.append((len(others) + 1, each))
            owners.claim(each.at, len(others))
    queue.drain()
    patches = _patches(others, owners)
    nothing = owners.rows_of(_NOBODY)
    if len(nothing):
        zeros = empty.room(len(nothing), np.zeros)
        patches.append(Patch(empty, nothing, zeros))
    return Merged(main, parts, tuple(_joined(patches)))


def _patches(others: Sequence[tuple[int, Held]], owners: _Owners) -> list[Patch]:
    """Takes of each segment the rows that nothing newer holds.

    The others are read and checked too: damage is found no matter what came later.
    """
    found: list[Patch] = []
    queue = Queue()
    for owner, each in others:
        mine = owners.mine(each.at, owner)
        rows = as_array(each.at)[mine]
        parts = each.encoding.room(len(rows))
        at = np.where(mine, np.cumsum(mine) - 1, DROPPED)
        queue.extend(jobs(dataclasses.replace(each, at=at), parts, direct=False))
        if len(rows):
            found.append(Patch(each.encoding, rows, parts))
    queue.drain()
    return found


def _joined(patches: Sequence[Patch]) -> Iterator[Patch]:
    """One patch for each encoding."""
    encodings: dict[Encoding, list[Patch]] = {}
    for patch in patches:
        encodings.setdefault(patch.encoding, []).append(patch)
    for encoding, same in encodings.items():
        if len(same) == 1:
            yield same[0]
            continue
        rows = np.concatenate([patch.rows for patch in same])
        parts = {
            name: np.concatenate([patch.parts[name] for patch in same])
            for name in encoding.parts
        }
        yield Patch(encoding, rows, parts)


_NOBODY = -1


class _Owners:
    """For each row the segment that holds its newest copy: 0 for all those of the main encoding.

    Kept only once it matters: where all rows are of the main encoding, it does not.
    """

    def __init__(self, rows: int, covered: int) -> None:
        self._rows = rows
        self._of: np.ndarray | None = None
        if covered != rows:
            self._of = np.full(rows, _NOBODY, np.int32)

    def claim(self, at: Index, owner: int) -> None:
        if self._of is None and owner:
            self._of = np.zeros(self._rows, np.int32)
        if self._of is not None:
            self._of[at] = owner

    def mine(self, at: Index, owner: int) -> np.ndarray:
        assert self._of is not None
        return self._of[at] == owner

    def rows_of(self, owner: int) -> np.ndarray:
        if self._of is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._of == owner)
