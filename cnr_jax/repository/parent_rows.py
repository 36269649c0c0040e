"""Rows as they are stored in the step that a save rests on; the save stores differences to them.

They are read back from that step. What each save writes is kept for the next one. Nobody has to
tell when a save fails: as no step rests on it, no save asks for its rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap

import numpy as np

from cnr_jax import errors
from cnr_jax.format.boxes import Box
from cnr_jax.format.manifest import ParentRef
from cnr_jax.repository.replay.encoded import Target
from cnr_jax.repository.replay.regions import WantedLeaf
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.repository.store import AnyPath
from cnr_jax.rows.codecs import Raw, bytes_of
from cnr_jax.rows.codecs.lattice import Parts
from cnr_jax.rows.codecs.moments import Unit
from cnr_jax.rows.codecs.residual import Residual
from cnr_jax.state.layouts import layout_from

# How often a thread that waits for rows of a save looks whether the save's thread has ended.
_POLL_SECS = 1.0
# Table, leaf and box of a tile.
TileKey = tuple[str, str, Box]


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenTile:
    """Rows of a tile that a save has written.

    Attributes:
        codec: codec of the rows.
        positions: positions of the rows in the tile; None: all.
        parts: parts of the rows, with integers as they are read, not as they are stored; empty for
            means.
    """

    codec: Residual
    positions: np.ndarray | None
    parts: Parts


class ParentRows:
    """Parts of all rows of tiles as they are in one step, mostly the parent of the next save.

    Any thread may call it.

    Args:
        limit_bytes: bytes of all rows of the tiles together up to which they are kept, and read;
            None: always.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = math.inf if limit_bytes is None else limit_bytes
        self._changed = threading.Condition()
        # By uuid, saves whose rows are being written or read back: whether their thread has ended.
        self._writing: dict[str, Callable[[], bool]] = {}
        self._uuid = ""
        self._tiles: dict[TileKey, WrittenTile] = {}
        # Uuid of the last save, uuid of its parent, empty if it has none, and its rows.
        self._last: tuple[str, str, dict[TileKey, WrittenTile]] = "", "", {}

    def begin(self, uuid: str, is_over: Callable[[], bool]) -> None:
        """Has saves that rest on this one wait for its rows, from before its thread writes them.

        Args:
            uuid: uuid of the save.
            is_over: function that says whether the save's thread has ended, or will never begin.
        """
        with self._changed:
            for each in [each for each, over in self._writing.items() if over()]:
                del self._writing[each]
            self._writing[uuid] = is_over

    @contextlib.contextmanager
    def writing(self, uuid: str) -> Iterator[None]:
        """Context in which a save writes its rows, while saves that rest on it wait for them."""
        self.begin(uuid, _never)
        try:
            yield
        finally:
            with self._changed:
                self._writing.pop(uuid, None)
                self._changed.notify_all()

    def close(self) -> None:
        """Frees all rows."""
        with self._changed:
            self._uuid, self._tiles, self._last = "", {}, ("", "", {})
            self._writing.clear()

    def note(
        self, uuid: str, parent: ParentRef | None, tiles: Mapping[TileKey, WrittenTile]
    ) -> None:
        """Keeps the rows that a save has written, until the next save has written its own."""
        fits = self._fits({key: tile.codec for key, tile in tiles.items()})
        with self._changed:
            self._last = uuid, parent.uuid if parent else "", dict(tiles)
            if not fits:
                self._uuid, self._tiles, self._last = "", {}, ("", "", {})

    def of(
        self,
        root: AnyPath,
        item: str,
        parent: ParentRef,
        keys: Mapping[TileKey, Residual],
    ) -> dict[TileKey, Parts]:
        """Parts of all rows of tiles in a step; tiles that differences cannot rest on are left out.

        If they would take more memory than they may, all are left out.

        Args:
            root: root that holds the step.
            item: name of the item in it.
            parent: reference to the step.
            keys: for each tile the codec that it is to have there.

        Raises:
            CnrError: if the rows cannot be read.
        """
        if not self._fits(keys):
            return {}
        with self._changed:
            while not self._writing.get(parent.uuid, _always)():
                self._changed.wait(_POLL_SECS)
            self._go_to(parent.uuid)
            if self._uuid != parent.uuid:
                self._tiles, self._uuid = {}, parent.uuid
            tiles = dict(self._tiles)
            missing = {key: c for key, c in keys.items() if key not in tiles}
            if missing:
                self._writing[parent.uuid] = _never
        if missing:
            # Without the lock, so that other saves can write meanwhile.
            with self.writing(parent.uuid):
                tiles |= _read_tiles(root, item, parent, missing)
                with self._changed:
                    if self._uuid == parent.uuid:
                        self._tiles = tiles
        return {
            key: found.parts
            for key, codec in keys.items()
            if (found := tiles.get(key)) and found.codec == codec
        }

    def _fits(self, keys: Mapping[TileKey, Residual]) -> bool:
        return sum(starmap(_bytes_of_tile, keys.items())) <= self._limit_bytes

    def _go_to(self, uuid: str) -> None:
        """Brings the kept rows to those of a step, if they follow from the last save."""
        last, parent, tiles = self._last
        if uuid != last or parent not in ("", self._uuid):
            return
        self._tiles = dict(self._tiles) if parent else {}
        for key, tile in tiles.items():
            if parent:
                _put(self._tiles, key, tile)
            else:
                self._tiles[key] = tile
        self._uuid, self._last = uuid, ("", "", {})


def _bytes_of_tile(key: TileKey, codec: Residual) -> int:
    """Bytes of the parts of all rows of a tile."""
    (start, stop), *columns = key[2]
    width = math.prod(b - a for a, b in columns)
    return (stop - start) * bytes_of(codec.parts(width, np.dtype(np.float32)))


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _put(tiles: dict[TileKey, WrittenTile], key: TileKey, new: WrittenTile) -> None:
    """Puts rows of a delta in their places in a tile, or drops the tile if its codec has changed.

    A tile is also dropped if it was not known: its chain may hold differences in another codec or
    for other columns, and a reader adds rows of one tile in one encoding only.
    """
    before = tiles.get(key)
    if before is None or before.codec != new.codec:
        tiles.pop(key, None)
    elif new.positions is None:
        tiles[key] = new
    else:
        # Copies, as another save may be reading the arrays that were there.
        parts = {name: part.copy() for name, part in before.parts.items()}
        for name, part in parts.items():
            part[new.positions] = new.parts[name]
        tiles[key] = WrittenTile(new.codec, None, parts)


def _read_tiles(
    root: AnyPath, item: str, parent: ParentRef, keys: Mapping[TileKey, Residual]
) -> dict[TileKey, WrittenTile]:
    """Reads tiles as they are stored in a step; tiles of other codecs are left out.

    Raises:
        CnrError: if they cannot be read, or another checkpoint is in the place of the step.
    """
    chain = open_chain(root, parent.directory, item)
    if (uuid := chain[-1].manifest.uuid) != parent.uuid:
        raise errors.ChainError(
            f"step {parent.directory} is another checkpoint than the one that is rested on\n"
            f"  got uuid {uuid}, expected {parent.uuid}",
            path=os.fspath(chain[-1].directory),
        )
    found = ((key, codec, _read(chain, *key, codec)) for key, codec in keys.items())
    return {
        key: WrittenTile(codec, None, parts)
        for key, codec, parts in found
        if parts is not None
    }


def _read(
    chain: Sequence[StepReader], table: str, leaf: str, box: Box, codec: Residual
) -> Parts | None:
    """Reads the parts of all rows of a tile; None if some have another codec, exact rows aside.

    Means are added to parts of their squares, so of them no parts are read: the result is empty.
    """
    entry = chain[-1].tables.get(table)
    if entry is None or all(each.name != leaf for each in entry.leaves):
        return None
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    target = Target(rows=entry.rows, layout=layout, padded_rows=entry.padded_rows)
    dtype = chain[-1].dtypes[table, leaf]
    wanted = WantedLeaf(chain, table, leaf, target, dtype, dtype)
    whole = tuple((0, stop - start) for start, stop in box[1:])
    exact, others = set[int](), set[int]()
    for held in wanted.held(box):
        if isinstance(held.encoding.codec, Raw):
            exact.add(id(held.reader))
            continue
        others.add(id(held.reader))
        if held.encoding.codec != codec or held.encoding.columns != whole:
            return None
        if held.encoding.trailing != tuple(stop for _, stop in whole):
            return None
    if isinstance(codec, Unit):
        # A checkpoint that stores rows only exactly has no squares beside its means.
        return {} if others and exact <= others else None
    merged = wanted.merged(box)
    return merged.parts if merged.encoding.codec == codec else None
