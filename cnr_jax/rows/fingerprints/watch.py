"""Watch of all rows by fingerprints: finds those that changed since the save before.

Tiles of one table with the same rows on the same device are hashed together, where they lie.
Nothing is communicated: a row that is split by columns over devices has a hash on each. Hashes
stay with the rows. The stamps that are made from them are kept on the host.

To remember: looking changes nothing. Only `keep` makes a look count, so a save that is refused
in between leaves no trace.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cnr_jax.rows.fingerprints.tiles import (
    Hashed,
    changed_of,
    hash_tiles,
    settled,
    tags_of,
)
from cnr_jax.rows.shards import Shards
from cnr_jax.rows.tiling import (
    Group,
    OwnTile,
    Rows,
    Where,
    boxes_in,
    bytes_in,
    place_of,
)


class Seen(NamedTuple):
    """Rows of one group as they were seen; hashes compare only with those of the same tiles."""

    tiles: tuple[OwnTile, ...]
    where: Where
    hashed: Hashed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """Rows of some groups that differ from what they were.

    Attributes:
        groups: groups that were compared.
        names: names of the leaves of each group.
        numbers: number of the group of each row that differs; sorted.
        rows: positions of these rows within their groups, sorted in each.
        since: clock of the look with which each of them was compared.
        leaves: function of indices into `rows` that returns the leaves in which these differ,
            bool[rows, leaves]. It compares 8 bits, so one change of a leaf in 256 is missed.
        compared: number of rows of each group that were compared.
    """

    groups: tuple[Group, ...]
    names: Sequence[tuple[str, ...]]
    numbers: np.ndarray
    rows: np.ndarray
    since: np.ndarray
    leaves: Callable[[np.ndarray], np.ndarray]
    compared: int

    def runs(self) -> Iterator[tuple[Group, slice]]:
        """Yields the groups with differing rows, and the indices of these in `rows`."""
        first = np.flatnonzero(np.diff(self.numbers, prepend=-1))
        of_groups, starts = self.numbers[first].tolist(), first.tolist()
        stops = [*starts[1:], len(self.rows)]
        for number, start, stop in zip(of_groups, starts, stops, strict=False):
            yield self.groups[number], slice(start, stop)

    def by_group(self) -> dict[Group, tuple[Differing, slice]]:
        """Splits by group, each with the indices of its rows in `rows`."""
        runs = dict(self.runs())
        found: dict[Group, tuple[Differing, slice]] = {}
        for number, group in enumerate(self.groups):
            some = runs.get(group, slice(0, 0))
            alone = dataclasses.replace(
                self,
                groups=(group,),
                names=(self.names[number],),
                numbers=np.zeros(some.stop - some.start, np.int64),
                rows=self.rows[some],
                since=self.since[some],
                leaves=functools.partial(self._leaves_after, some.start),
            )
            found[group] = alone, some
        return found

    def _leaves_after(self, start: int, which: np.ndarray) -> np.ndarray:
        return self.leaves(which + start)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All rows of this process at one moment.

    Attributes:
        seen: rows as they were seen, by group.
        changed: sorted positions of the rows that differ from what was kept, by group. A group is
            missing if nothing was kept of it, or other tiles.
    """

    seen: Mapping[Group, Seen]
    changed: Mapping[Group, np.ndarray]


class RowWatch:
    """Remembers all rows of this process by their hashes.

    Args:
        stamped: whether to keep stamps too, 4 bytes a row beside the 8 of a hash.
        tagged: whether to keep a byte for each row and leaf, to tell which leaf changed.

    Example:
        >>> import jax.numpy as jnp
        >>> from cnr_jax.rows.shards import Shards, Tiling
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": jnp.zeros((4, 2))}
        >>> tables, where = find_tables(state, ["user"]), state["user"].sharding
        >>> way = lambda device, size: "host"
        >>> tiling = Tiling(tables, {"user": {"table": where}}, {"user": where}, way)
        >>> watch = RowWatch(stamped=True)
        >>> rows = {"user": {"table": state["user"]}}
        >>> watch.keep(watch.look(Shards(tiling, rows)), 0)
        >>> rows = {"user": {"table": state["user"].at[2].add(1)}}
        >>> watch.keep(watch.look(Shards(tiling, rows)), 1)
        >>> watch.positions(Rows("user", (0, 4)), 0)
        array([2])
    """

    def __init__(self, *, stamped: bool, tagged: bool = False) -> None:
        self._stamped = stamped
        self._tagged = tagged
        self._seed = _draw_seed()
        self._seen: Mapping[Group, Seen] = {}
        # By rows: the columns of a row may lie on several devices, but it has one stamp.
        self._stamps: dict[Rows, np.ndarray] = {}

    def look(self, shards: Shards) -> Look:
        """Hashes all rows and compares them with what was kept.

        Waits for the computation that makes the arrays. They may be donated afterwards.

        Args:
            shards: shards of the state that this process saves.
        """
        tiling = shards.tiling
        # All devices work before the first one is waited for.
        seen = {
            group: self._hash(group, own, shards)
            for group, own in tiling.groups.items()
        }
        changed = {
            group: changed_of(now.hashed.differ, group.rows[1] - group.rows[0])
            for group, now in seen.items()
            if now.hashed.differ is not None
        }
        return Look(seen=seen, changed=changed)

    def _hash(self, group: Group, tiles: tuple[OwnTile, ...], shards: Shards) -> Seen:
        tiling, rows = shards.tiling, group.rows[1] - group.rows[0]
        spans = [
            (shards.data[n], tiling.firsts[n], rows) for n in tiling.numbers[group]
        ]
        held = [data.sharding for data, _, _ in spans]
        where = place_of(tiling.way, group.device, bytes_in(tiles), held)
        known = self._seen.get(group)
        comparable = (
            known is not None
            and known.where == where
            and (known.tiles is tiles or boxes_in(known.tiles) == boxes_in(tiles))
        )
        hashed = hash_tiles(
            spans,
            group.device,
            where,
            self._seed,
            before=known.hashed.hashes if known and comparable else None,
            tagged=self._tagged,
        )
        return Seen(tiles, where, hashed)

    def keep(self, look: Look, clock: int) -> None:
        """Remembers what `look` saw, and stamps the rows that changed.

        Args:
            look: look of this watch, with nothing kept since.
            clock: clock that is greater than any before.
        """
        # Stamps first: should this be interrupted, rows are found changed again, not missed.
        if self._stamped:
            self._stamps = {
                rows: self._stamp(look, rows, groups, clock)
                for rows, groups in by_rows(look.seen).items()
            }
        self._seen = self._settled(look)

    def _settled(self, look: Look) -> dict[Group, Seen]:
        found: dict[Group, Seen] = {}
        for group, now in look.seen.items():
            before = self._seen[group].hashed.hashes if group in self._seen else None
            found[group] = now._replace(hashed=settled(now.hashed, before))
        return found

    def _stamp(
        self, look: Look, rows: Rows, groups: Sequence[Group], clock: int
    ) -> np.ndarray:
        stamps, (start, stop) = self._stamps.get(rows), rows.rows
        if stamps is None or any(group not in look.changed for group in groups):
            return np.full(stop - start, clock, np.int32)
        for group in groups:
            stamps[look.changed[group]] = clock
        return stamps

    def start(self, look: Look, stamps: Callable[[Rows], np.ndarray]) -> None:
        """Remembers what `look` saw, with given stamps; forgets what was kept before.

        Args:
            look: look at a restored state.
            stamps: function that returns stamps of some rows, int32; not called unless stamps are
                kept.
        """
        self._seen = self._settled(look)
        if self._stamped:
            self._stamps = {rows: stamps(rows) for rows in by_rows(look.seen)}

    def positions(self, rows: Rows, clock: int) -> np.ndarray:
        """Positions within `rows` that were stamped after `clock`, sorted."""
        return np.flatnonzero(self._stamps[rows] > clock)

    def differing(self, look: Look, clock: int) -> list[Differing]:
        """Compares a look with what was kept, each group alone.

        Args:
            look: look at tiles of which all was kept.
            clock: clock at which it was kept.
        """
        return [self._differing(look, group, clock) for group in look.seen]

    def _differing(self, look: Look, group: Group, clock: int) -> Differing:
        rows, seen = look.changed[group], look.seen[group]

        def leaves(which: np.ndarray) -> np.ndarray:
            before, now = self._seen[group].hashed.tags, seen.hashed.tags
            assert before is not None and now is not None
            return tags_of(before, rows[which]) != tags_of(now, rows[which])

        return Differing(
            groups=(group,),
            names=(tuple(tile.leaf.name for tile in seen.tiles),),
            numbers=np.zeros(len(rows), np.int64),
            rows=rows,
            since=np.full(len(rows), clock, np.int64),
            leaves=leaves,
            compared=group.rows[1] - group.rows[0],
        )


def _draw_seed() -> np.ndarray:
    """Draws a seed for this process alone, as no other process compares its hashes.

    Nobody knows it beforehand, so nobody can make data that collides.
    """
    return np.frombuffer(secrets.token_bytes(8), np.uint32)


def by_rows(groups: Iterable[Group]) -> dict[Rows, list[Group]]:
    """Collects the groups that hold parts of the same rows."""
    found: dict[Rows, list[Group]] = {}
    for group in groups:
        found.setdefault(Rows(group.table, group.rows), []).append(group)
    return found
