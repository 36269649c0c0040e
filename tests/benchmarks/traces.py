"""Real traces of embedding look-ups, and the bytes that saves of them would take.

Three traces: Scarab (a recommender's look-ups of one table), orm-busy (database objects of a
shop), and flights (ten hashed or crossed features of 3 million flights, a table each). A trace
is cut into windows of equal length, one before each save.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cnr_jax.simulation import ByteModel, bytes_of_ids

NAMES = ("scarab", "orm-busy", "flights")
DATA = Path(__file__).parents[3] / "shared" / "data"


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Look-ups in order.

    Attributes:
        rows: of each table; all rows that the trace looks up, and no others.
        ids: int32[look-ups, tables]: the row of each table that a look-up changes.
    """

    name: str
    rows: tuple[int, ...]
    ids: np.ndarray

    @property
    def total_rows(self) -> int:
        """Rows of all tables."""
        return sum(self.rows)

    def windows(self, count: int) -> Iterator[np.ndarray]:
        """Yields the look-ups between two saves, `count` times."""
        bounds = np.linspace(0, len(self.ids), count + 1).astype(np.int64)
        for start, end in itertools.pairwise(bounds.tolist()):
            yield self.ids[start:end]


@dataclasses.dataclass(frozen=True, slots=True)
class Touched:
    """Rows that changed between any two saves, and the bytes of their ids.

    Attributes:
        rows: int64[saves, saves]; `rows[i, j]` for i < j: rows of all tables looked up after
            save i and before save j. On the diagonal: all rows. Below: 0.
        id_bytes: the same for the exact bytes of row ids.
        tables: number of tables.
    """

    rows: np.ndarray
    id_bytes: np.ndarray
    tables: int

    def costs(self, model: ByteModel) -> np.ndarray:
        """int64[saves, saves]: bytes of save j as a delta on i; on the diagonal, as a full."""
        save_bytes = np.vectorize(model.save_bytes, otypes=[np.int64])
        return np.triu(save_bytes(self.rows, self.id_bytes, self.tables))


def find_touched(trace: Trace, saves: int) -> Touched:
    """Counts rows and bytes of ids for every pair of saves."""
    rows = np.zeros((saves, saves), np.int64)
    id_bytes = np.zeros_like(rows)
    last = [np.full(count, -1, np.int32) for count in trace.rows]
    for j, window in enumerate(trace.windows(saves)):
        rows[j, j] = trace.total_rows
        for table, seen in enumerate(last):
            seen[window[:, table]] = j
            after = np.bincount(seen + 1, minlength=saves + 1)[::-1].cumsum()[::-1]
            for i in range(j):
                rows[i, j] += after[i + 2]
                id_bytes[i, j] += bytes_of_ids(seen, i, int(after[i + 2]))
    return Touched(rows, id_bytes, len(trace.rows))


class Cache:
    """Traces and what is touched between their saves, each found once."""

    def __init__(self, folder: Path) -> None:
        self.trace = functools.cache(lambda name: load(name, folder))
        self._touched = functools.cache(lambda n, s: find_touched(self.trace(n), s))

    def touched(self, name: str, saves: int) -> Touched:
        """Rows and ids between the saves of a trace cut into `saves` windows."""
        return self._touched(name, saves)


def load(name: str, folder: Path) -> Trace:
    """Reads a trace; `folder` as `data_folder` gives it."""
    if name == "flights":
        return _flights(folder / "flights-3m.parquet")
    file, dtype = {
        "scarab": ("scarab-recs.trace.xz", ">i8"),
        "orm-busy": ("orm-busy.trace.xz", ">i4"),
    }[name]
    with lzma.open(folder / "traces" / file) as stream:
        return _trace(name, [np.frombuffer(stream.read(), dtype)])


def zipf(rows: int, lookups: int, exponent: float) -> Trace:
    """Look-ups that know no time: row k with a probability proportional to k ** -exponent."""
    weights = np.arange(1, rows + 1) ** -exponent
    ids = np.random.default_rng(0).choice(rows, lookups, p=weights / weights.sum())
    return Trace(f"zipf {exponent}", (rows,), ids.astype(np.int32)[:, None])


def data_folder(given: Path | None) -> Path:
    """The folder of the data: given, named by CNR_DATA, or beside the repository.

    Raises:
        SystemExit: if it does not hold the traces.
    """
    folder = given or Path(os.environ.get("CNR_DATA", DATA))
    if not (folder / "traces").is_dir() or not (folder / "flights-3m.parquet").exists():
        raise SystemExit(
            f"the traces are not in {folder}\n"
            "  expected traces/scarab-recs.trace.xz, traces/orm-busy.trace.xz and"
            " flights-3m.parquet\n"
            "  hint: name their folder by --data or by the environment variable CNR_DATA"
        )
    return folder


def _trace(name: str, columns: list[np.ndarray]) -> Trace:
    """A trace of raw keys, one column a table; rows are numbered in the order of keys."""
    tables = [np.unique(column, return_inverse=True) for column in columns]
    ids = np.stack([inverse.astype(np.int32) for _, inverse in tables], axis=1)
    return Trace(name, tuple(len(keys) for keys, _ in tables), ids)


def _flights(path: Path) -> Trace:
    """Ten features: airports, routes, and these crossed with day, hour and minute."""
    import pyarrow.parquet as parquet

    columns = parquet.read_table(path, columns=["date", "origin", "destination"])
    minutes = columns["date"].to_numpy().astype("datetime64[m]").astype(np.int64)
    origin, destination = (
        columns[name].combine_chunks().dictionary_encode().indices.to_numpy()
        for name in ("origin", "destination")
    )
    origin, destination = origin.astype(np.int64), destination.astype(np.int64)
    day, minute = np.divmod(minutes - minutes.min() // 1440 * 1440, 1440)
    hour, weekday, route = minute // 60, day % 7, origin * 1000 + destination
    return _trace(
        "flights",
        [
            origin,
            destination,
            route,
            origin * 1000 + day,
            destination * 1000 + day,
            (origin * 7 + weekday) * 24 + hour,
            route * 24 + hour,
            (origin * 1000 + day) * 24 + hour,
            (destination * 1000 + day) * 24 + hour,
            route * 1440 + minute,
        ],
    )
