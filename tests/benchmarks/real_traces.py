"""Policies on real traces: bytes, capacity, and the distance to the optimum.

    python tests/benchmarks/real_traces.py [--quick] [--data DIR] [--json PATH] [--plots DIR]

Check-N-Run's figures 5 to 7 (modified rows), 15 and 16 (bytes and capacity by policy, with those of
merges) and 17 (reduction by number of restores) on the Scarab, orm-busy and flights traces, tables
of dim 64 with a row-wise float32 slot; and what the default policy writes against the clairvoyant
optimum. Bytes are those of a model with the exact row ids, held against real saves at the end.
Nothing is timed.
The full run takes about 3 minutes, `--quick` half a one.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from commandline import make_parser, write_figures
from measures import machine
from paper_figures import by_interval, by_restores, modified_rows
from real_saves import compare
from results import print_mark, print_table
from schedules import best_schedule, follow, least_bytes
from traces import NAMES, ByteModel, Cache, Touched, data_folder, find_touched, zipf

from cnr_jax.policy import Consecutive, IncrementLog, Intermittent

LENGTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
LENGTHS_QUICK = (12, 16, 24, 48)
DEPTHS = (1, 2, 3, 5, 11)
# Exponents, and look-ups between two saves of 20,000 rows: 4 to 47 % of them are modified.
STATIONARY = [(e, n) for e in (0.7, 1.0, 1.3) for n in (2_000, 8_000, 20_000)]
# Percent of bytes more than the optimum.
MARK = 5.0


def against_optimum(cache: Cache, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """The default policy and the paper's rule against the best fulls and deltas on them.

    `end` compares at the end of the trace. The optimum knows that end: the last saves before
    it need no new full. `mean` therefore takes every length of a run from half the trace on,
    each with an optimum of its own. `unaware` is the optimum of the whole trace, stopped at
    those lengths: what is lost by not knowing how long a run lasts, while knowing the rest.
    """
    figures = [
        {"trace": name, "saves": saves, **_ratios(cache.touched(name, saves))}
        for name in NAMES
        for saves in lengths
    ]
    _print_ratios("real traces", figures)
    for name in NAMES:
        _print_marks(name, [f for f in figures if f["trace"] == name])
    return figures


def stationary(quick: bool) -> list[dict[str, Any]]:
    """The same in long runs where popularity never changes, so that only the rule counts."""
    figures: list[dict[str, Any]] = []
    saves = 60 if quick else 200
    for exponent, lookups in STATIONARY[2::3] if quick else STATIONARY:
        touched = find_touched(zipf(20_000, saves * lookups, exponent), saves)
        share = float(touched.rows.diagonal(1).mean() / touched.rows[0, 0])
        label = f"zipf {exponent}, {share:.2f} modified a save"
        figures.append({"trace": label, "saves": saves, **_ratios(touched)})
    _print_ratios("popularity that never changes", figures)
    return figures


def _ratios(touched: Touched) -> dict[str, dict[str, float]]:
    """Bytes over those of the optimum, for both rules and the optimum of the whole trace."""
    cost = touched.costs(ByteModel())
    least = least_bytes(cost, depth=1)[1:]
    lengths = slice(len(cost) // 2 - 1, None)
    found: dict[str, dict[str, float]] = {}
    for key, schedule in {
        "forecast": follow(Intermittent(), cost),
        "history": follow(Intermittent(predictor="history"), cost),
        "unaware": best_schedule(cost),
    }.items():
        ratio = schedule.so_far / least
        found[key] = {
            "end": float(ratio[-1]),
            "mean": float(ratio[lengths].mean()),
            "worst": float(ratio[lengths].max()),
        }
    return found


def _print_ratios(what: str, figures: list[dict[str, Any]]) -> None:
    keys = ("forecast", "history")
    rows = [
        [
            f"{f['trace']}, {f['saves']} saves",
            *(
                f"{f[key][what]:.4f}"
                for key in keys
                for what in ("end", "mean", "worst")
            ),
            f"{f['unaware']['mean']:.4f}",
        ]
        for f in figures
    ]
    print_table(
        f"Bytes / clairvoyant optimum of fulls and deltas on the latest full: {what}",
        (
            "case",
            "end",
            "mean",
            "worst",
            "paper: end",
            "mean",
            "worst",
            "unaware: mean",
        ),
        rows,
    )


def _print_marks(name: str, figures: list[dict[str, Any]]) -> None:
    """Percent over all interval lengths, and how much of the gap is the unknown end."""

    def percent(key: str, what: str) -> list[float]:
        return [100 * (figure[key][what] - 1) for figure in figures]

    for what in ("end", "mean"):
        ours, paper = percent("forecast", what), percent("history", what)
        label = f"{name}, {what}: percent more bytes than the optimum"
        print_mark(f"{label}, median", statistics.median(ours), MARK)
        print_mark(f"{label}, worst", max(ours), MARK)
        median = statistics.median(paper)
        print(
            f"          the paper's rule: median {median:.2f}, worst {max(paper):.2f}"
        )
    gap, end = (
        statistics.mean(percent(key, "mean")) for key in ("forecast", "unaware")
    )
    print(f"          mean gap {gap:.2f} %, of it for not knowing the end {end:.2f} %")


def any_parent(cache: Cache, saves: int) -> list[dict[str, Any]]:
    """The optimum where a delta may rest on any save, by the deltas that a restore replays.

    Bytes alone would always rest each save on the one before: a later parent never makes a
    delta larger, so `Consecutive` is the optimum over all schedules. What limits it is the
    restore, which reads a chain of all saves, all of which must be kept.
    """
    figures: list[dict[str, Any]] = []
    for name in NAMES:
        cost = cache.touched(name, saves).costs(ByteModel())
        full = int(np.diagonal(cost).sum())
        for depth in (*DEPTHS, saves - 1):
            least = int(least_bytes(cost, depth)[-1])
            chain = follow(Consecutive(max_chain=depth), cost)
            figures.append(
                {
                    "trace": name,
                    "saves": saves,
                    "deltas_replayed": depth,
                    "share_of_full_saves": least / full,
                    "consecutive_against_it": int(chain.written.sum()) / least,
                    "intermittent_against_it": int(
                        follow(Intermittent(), cost).written.sum()
                    )
                    / least,
                }
            )
    rows = [
        [
            f"{f['trace']}, {f['saves']} saves, {f['deltas_replayed']} deltas",
            f"{f['share_of_full_saves']:.3f}",
            f"{f['intermittent_against_it']:.2f}",
            f"{f['consecutive_against_it']:.2f}",
        ]
        for f in figures
    ]
    print_table(
        "Optimum with any parent, by the deltas that a restore may replay",
        ("case", "of full saves", "Intermittent / it", "Consecutive(max_chain) / it"),
        rows,
    )
    return figures


def real_saves(cache: Cache, quick: bool) -> list[dict[str, Any]]:
    """The byte model against saves of the real manager."""
    figures = [
        compare(cache.trace(name), saves, ByteModel(bits=bits), policy)
        for name, saves, bits, policy in (
            ("scarab", 8, 4, Intermittent()),
            ("orm-busy", 8, 2, Consecutive()),
            ("orm-busy", 8, 4, IncrementLog(merge_at=3)),
            ("flights", 6, 4, Intermittent()),
        )[: 3 if quick else 4]
    ]
    rows = [
        [
            f"{f['trace']}, {f['saves']} saves, {f['policy']}",
            f"{sum(f['bytes_written']):,}",
            f"{f['largest_error']:.4%}",
            f"{f['merged_bytes']:,}",
            f"{f['merged_error']:.4%}",
            "alike" if f["kinds_written"] == f["kinds_modelled"] else "DIFFERENT",
        ]
        for f in figures
    ]
    header = (
        "case",
        "bytes written",
        "largest error of a save",
        "merged",
        "error of that",
    )
    header = (*header, "kinds")
    print_table("The byte model against real saves", header, rows)
    return figures


def main() -> None:
    """Runs all sections."""
    args = make_parser(
        __doc__,
        quick="fewer interval lengths",
        data="the folder that holds the traces",
        plots="also draw figures (PNG) here",
    ).parse_args()
    cache = Cache(data_folder(args.data))
    lengths = LENGTHS_QUICK if args.quick else LENGTHS
    found: dict[str, Any] = {
        "machine": machine(),
        "quick": args.quick,
        "modified_rows": modified_rows(cache),
        "by_interval": by_interval(cache),
        "by_restores": by_restores(cache),
        "against_optimum": against_optimum(cache, lengths),
        "stationary": stationary(args.quick),
        "any_parent": any_parent(cache, 24 if args.quick else 48),
        "real_saves": real_saves(cache, args.quick),
    }
    write_figures(args.json, found)
    if args.plots:
        from trace_plots import draw

        draw(found, args.plots)


if __name__ == "__main__":
    main()
