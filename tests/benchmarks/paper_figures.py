"""Check-N-Run's figures 5 to 7, 15, 16 and 17 on the traces of `traces.py`."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from results import print_table
from schedules import follow
from traces import NAMES, ByteModel, Cache, Trace

from cnr_jax.policy import Consecutive, Full, IncrementLog, Intermittent, OneShot

POLICIES = {
    "full": Full(),
    "one-shot": OneShot(),
    "consecutive": Consecutive(),
    "intermittent": Intermittent(),
    "intermittent, paper's rule": Intermittent(predictor="history"),
    "log of increments": IncrementLog(),
}
# Check-N-Run's widths: up to 1, 3, 20 expected restores, and more.
BITS_BY_RESTORES = {"<= 1": 2, "<= 3": 3, "<= 20": 4, "> 20": 8}
INTERVALS = (12, 24)


def modified_rows(cache: Cache) -> list[dict[str, Any]]:
    """Figures 5 to 7: share of rows looked up in windows, and since the start."""
    figures: list[dict[str, Any]] = []
    for name in NAMES:
        trace = cache.trace(name)
        for windows in (96, 48, 24, 12, 6):
            figures.append(_shares(trace, windows))
    rows = [
        [
            f"{figure['trace']}, 1/{figure['windows']}",
            f"{statistics.median(figure['in_window']):.3f}",
            f"{min(figure['in_window']):.3f} to {max(figure['in_window']):.3f}",
            " ".join(f"{share:.2f}" for share in _tenths(figure["since_start"])),
        ]
        for figure in figures
    ]
    print_table(
        "Figures 5 to 7: rows looked up, as shares of all rows",
        ("trace, window", "median", "range", "since the start, at 12 points or fewer"),
        rows,
    )
    return figures


def _shares(trace: Trace, windows: int) -> dict[str, Any]:
    seen = [np.zeros(count, np.bool_) for count in trace.rows]
    in_window: list[float] = []
    since_start: list[float] = []
    for window in trace.windows(windows):
        count = 0
        for table, mark in enumerate(seen):
            ids = np.unique(window[:, table])
            mark[ids] = True
            count += len(ids)
        in_window.append(count / trace.total_rows)
        since_start.append(sum(int(mark.sum()) for mark in seen) / trace.total_rows)
    return {
        "trace": trace.name,
        "windows": windows,
        "in_window": in_window,
        "since_start": since_start,
    }


def _tenths(shares: list[float]) -> list[float]:
    return shares[max(1, len(shares) // 12) - 1 :: max(1, len(shares) // 12)]


def by_interval(cache: Cache) -> list[dict[str, Any]]:
    """Figures 15 and 16: what each policy writes and holds, in full saves at equal bits.

    Beside them are what merges write, and the bytes that the longest restore reads.
    """
    figures: list[dict[str, Any]] = []
    for name in NAMES:
        for saves in INTERVALS:
            cost = cache.touched(name, saves).costs(ByteModel())
            one = cost[0, 0]
            for label, policy in POLICIES.items():
                found = follow(policy, cost)
                figures.append(
                    {
                        "trace": name,
                        "saves": saves,
                        "policy": label,
                        "written": (found.written / one).tolist(),
                        "merged": ((found.stored - found.written) / one).tolist(),
                        "steady": (found.steady / one).tolist(),
                        "transient": (found.transient / one).tolist(),
                        "fulls": found.fulls,
                    }
                )
    rows = [
        [
            f"{f['trace']}, {f['saves']} saves, {f['policy']}",
            f"{np.mean(f['written']):.3f}",
            f"{f['written'][-1]:.3f}",
            f"{np.sum(f['written'] + f['merged']) / np.sum(f['written']):.2f}",
            f"{max(f['steady']):.2f}",
            f"{max(f['transient']):.2f}",
            " ".join(map(str, f["fulls"][:8]))
            + (" ..." if len(f["fulls"]) > 8 else ""),
        ]
        for f in figures
    ]
    print_table(
        "Figures 15 and 16: bytes of a save and capacity held, in full saves of 4 bits",
        (
            *("case", "mean save", "last", "times with merges"),
            *("a restore reads at most", "held at most", "fulls at"),
        ),
        rows,
    )
    return figures


def by_restores(cache: Cache) -> list[dict[str, Any]]:
    """Figure 17: times fewer bytes than full float32 saves, by bits; default policy."""
    figures: list[dict[str, Any]] = []
    for name in NAMES:
        for saves in INTERVALS:
            touched = cache.touched(name, saves)
            interval = touched.rows.diagonal(1).mean() / touched.rows[0, 0]
            for restores, bits in BITS_BY_RESTORES.items():
                model = ByteModel(bits=bits)
                found = follow(Intermittent(), touched.costs(model))
                plain = int(touched.rows[0, 0]) * model.float32_row_bytes
                figures.append(
                    {
                        "trace": name,
                        "saves": saves,
                        "share_modified_per_interval": float(interval),
                        "restores": restores,
                        "bits": bits,
                        "bandwidth_reduction": plain / found.written.mean(),
                        "steady_reduction": plain / found.steady.max(),
                        "transient_reduction": plain / found.transient.max(),
                    }
                )
    rows = [
        [
            f"{f['trace']}, {f['saves']} saves, {f['restores']} restores",
            f"{f['share_modified_per_interval']:.2f}",
            str(f["bits"]),
            f"{f['bandwidth_reduction']:.1f}x",
            f"{f['steady_reduction']:.1f}x",
            f"{f['transient_reduction']:.1f}x",
        ]
        for f in figures
    ]
    header = ("case", "modified a save", "bits", "written", "steady", "transient")
    print_table("Figure 17: reduction against full float32 saves", header, rows)
    return figures
