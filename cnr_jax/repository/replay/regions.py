"""Regions: the parts of a leaf that this process holds, and what each is put together from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from cnr_jax.format.tiles import Box
from cnr_jax.repository.replay.encoded import Encoding, Held, Merged, held_rows
from cnr_jax.repository.replay.merge import merge
from cnr_jax.repository.replay.overlap import Target, split_columns
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.codecs import Raw
from cnr_jax.rows.tiling import boxes_of


@dataclasses.dataclass(frozen=True, slots=True)
class WantedLeaf:
    """The leaf to be restored, and what it is restored from."""

    chain: Sequence[StepReader]
    table: str
    name: str
    target: Target
    dtype: np.dtype
    stored_dtype: np.dtype

    def held(self, box: Box) -> tuple[Held, ...]:
        """What the chain holds of a region."""
        return held_rows(self.chain, self.table, self.name, self.target, box)

    def empty(self, box: Box) -> Encoding:
        """The encoding of rows of a region that nothing holds."""
        shape = shape_of(box)[1:]
        return Encoding(Raw(), shape, tuple((0, n) for n in shape), self.stored_dtype)

    def encoding(self, box: Box) -> Encoding:
        """The encoding of most rows of a region."""
        held = self.held(box)
        return held[0].encoding if held else self.empty(box)

    def merged(self, box: Box, main: Encoding | None = None) -> Merged:
        """The newest rows of a region, most of them in the encoding `main`: see `merge`."""
        return merge(self.held(box), box[0][1] - box[0][0], self.empty(box), main)


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A part of a leaf, cut by columns so that each piece has one encoding: `split_columns`."""

    box: Box
    pieces: tuple[Box, ...]
    encodings: tuple[Encoding, ...]

    @property
    def rows(self) -> int:
        """Rows of the region."""
        return self.box[0][1] - self.box[0][0]

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for regions that one program can decode."""
        cuts = tuple(
            (columns.start, columns.stop)
            for piece in self.pieces
            for columns in columns_in(self.box, piece)
        )
        return shape_of(self.box), cuts, self.encodings


def region_of(leaf: WantedLeaf, box: Box) -> Region:
    """Cuts a region into pieces and looks up how they are encoded."""
    pieces = split_columns(leaf.chain, leaf.table, leaf.name, box)
    return Region(box, pieces, tuple(leaf.encoding(piece) for piece in pieces))


def local_boxes(
    sharding: Sharding, shape: tuple[int, ...]
) -> dict[Box, list[jax.Device]]:
    """The regions that this process holds, each with its local devices."""
    here = jax.process_index()
    found: dict[Box, list[jax.Device]] = {}
    for box, devices in boxes_of(sharding, shape).items():
        local = [device for device in devices if device.process_index == here]
        if local:
            found[box] = local
    return found


def global_array(
    shape: tuple[int, ...],
    sharding: Sharding,
    arrays: Mapping[jax.Device, jax.Array],
) -> jax.Array:
    """An array from the regions on local devices."""
    order = sharding.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [arrays[device] for device in order]
    )


def shape_of(box: Box) -> tuple[int, ...]:
    """Elements in each dimension."""
    return tuple(stop - start for start, stop in box)


def columns_in(box: Box, piece: Box) -> tuple[slice, ...]:
    """Where the columns of a piece are in its region."""
    return tuple(
        slice(a - c, b - c) for (a, b), (c, _) in zip(piece[1:], box[1:], strict=True)
    )
