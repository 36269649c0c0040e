"""Rows as they are stored in the step that a save rests on: what differences are taken to.

They are read back from that step, and kept for the next save, together with what each save writes.
Nothing has to be said when a save fails: its rows are asked for by nobody, as no step rests on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cnr_jax import errors
from cnr_jax.format.boxes import Box
from cnr_jax.format.manifest import ParentRef
from cnr_jax.repository.replay.encoded import Target
from cnr_jax.repository.replay.regions import WantedLeaf
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.repository.store import AnyPath
from cnr_jax.rows.codecs import Raw
from cnr_jax.rows.codecs.lattice import Parts
from cnr_jax.rows.codecs.moments import Unit
from cnr_jax.rows.codecs.residual import Residual
from cnr_jax.state.layouts import layout_from

# How often who waits for a save looks whether its thread has ended, or was kept from beginning.
_POLL_SECS = 1.0
# Table, leaf and box.
TileKey = tuple[str, str, Box]


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenTile:
    """Rows of a tile that a save has written.

    Attributes:
        codec: of the rows.
        positions: of them in the tile; None: all.
        parts: of the rows, with integers as they are read, not as they are stored; of means none.
    """

    codec: Residual
    positions: np.ndarray | None
    parts: Parts


class ParentRows:
    """Parts of all rows of tiles as they are in one step, mostly the parent of the next save.

    From any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Steps whose rows are being written, or read back; whether that is over all the same.
        self._writing: dict[str, Callable[[], bool]] = {}
        self._uuid = ""
        self._tiles: dict[TileKey, WrittenTile] = {}
        # Of the last save: its uuid, that of what it rests on, empty if on nothing, and its rows.
        self._last: tuple[str, str, dict[TileKey, WrittenTile]] = "", "", {}

    def begin(self, uuid: str, is_over: Callable[[], bool]) -> None:
        """Has those that rest on a save wait for its rows, before its thread writes them.

        Args:
            uuid: of the save.
            is_over: whether its thread has ended, or never begins.
        """
        with self._changed:
            for each in [each for each, over in self._writing.items() if over()]:
                del self._writing[each]
            self._writing[uuid] = is_over

    @contextlib.contextmanager
    def writing(self, uuid: str) -> Iterator[None]:
        """While a save writes its rows, those that rest on it wait for these."""
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
        """Keeps what a save has written, until the next one has."""
        with self._changed:
            self._last = uuid, parent.uuid if parent else "", dict(tiles)

    def of(
        self,
        root: AnyPath,
        item: str,
        parent: ParentRef,
        keys: Mapping[TileKey, Residual],
    ) -> dict[TileKey, Parts]:
        """Parts of all rows of tiles in a step; tiles that differences cannot rest on are left out.

        Args:
            root: holds the step.
            item: of it.
            parent: the step.
            keys: tiles, and the codec that they are to have there.

        Raises:
            CnrError: if they cannot be read.
        """
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
            # Without the lock: other saves write meanwhile.
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

    def _go_to(self, uuid: str) -> None:
        """Brings what is kept to the state of a step, if that is known."""
        last, parent, tiles = self._last
        if uuid != last or parent not in ("", self._uuid):
            return
        self._tiles = dict(self._tiles) if parent else {}
        for key, tile in tiles.items():
            _put(self._tiles, key, tile)
        self._uuid, self._last = uuid, ("", "", {})


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _put(tiles: dict[TileKey, WrittenTile], key: TileKey, new: WrittenTile) -> None:
    """Puts rows that were written in the places of those that there were."""
    before = tiles.get(key)
    if new.positions is None:
        tiles[key] = new
    elif before is None or before.codec != new.codec:
        tiles.pop(key, None)
    else:
        # Copies: another save may be reading those that there were.
        parts = {name: part.copy() for name, part in before.parts.items()}
        for name, part in parts.items():
            part[new.positions] = new.parts[name]
        tiles[key] = WrittenTile(new.codec, None, parts)


def _read_tiles(
    root: AnyPath, item: str, parent: ParentRef, keys: Mapping[TileKey, Residual]
) -> dict[TileKey, WrittenTile]:
    """Tiles as they are stored in a step; those of other codecs are left out.

    Raises:
        CnrError: if they cannot be read, or another checkpoint is in its place.
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
    """The parts of all rows of a tile that are its own; None if not all are of the one codec.

    Of means only whether it is so: what they are added to are shared parts.
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
        # Of what is stored exactly in between the squares are not with the means.
        return {} if others and exact <= others else None
    merged = wanted.merged(box)
    return merged.parts if merged.encoding.codec == codec else None
