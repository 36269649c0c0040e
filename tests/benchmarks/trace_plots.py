"""Draws the figures of `real_traces.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from traces import NAMES


def draw(found: dict[str, Any], folder: Path) -> None:
    """Writes one PNG for each of the figures into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in {
        "modified_rows": _modified_rows,
        "by_interval": _by_interval,
        "by_restores": _by_restores,
        "against_optimum": _against_optimum,
    }.items():
        figure = plot(found[name])
        figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
        plt.close(figure)


def _modified_rows(figures: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(2, len(NAMES), figsize=(13, 6), sharex=True)
    for case in figures:
        column = NAMES.index(case["trace"])
        count = case["windows"]
        edges = [window / count for window in range(count + 1)]
        axes[0, column].plot(edges, [0, *case["since_start"]], label=f"1/{count}")
        axes[1, column].stairs(case["in_window"], edges, label=f"1/{count}")
    for column, name in enumerate(NAMES):
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("share of the trace")
        axes[1, column].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("rows looked up since the start")
    axes[1, 0].set_ylabel("rows looked up in a window")
    axes[0, 0].legend(title="window")
    return figure


def _by_interval(figures: list[dict[str, Any]]) -> Any:
    most = max(case["saves"] for case in figures)
    shown = [case for case in figures if case["saves"] == most]
    figure, axes = plt.subplots(3, len(NAMES), figsize=(13, 9), sharex=True)
    for case in shown:
        for row, what in enumerate(("written", "steady", "transient")):
            axis = axes[row, NAMES.index(case["trace"])]
            axis.plot(case[what], marker=".", label=case["policy"])
    for column, name in enumerate(NAMES):
        axes[0, column].set_title(name)
        axes[2, column].set_xlabel("save")
        for axis in axes[:, column]:
            axis.set_ylim(bottom=0)
    for row, label in enumerate(("written", "held, steady", "held, transient")):
        axes[row, 0].set_ylabel(f"{label} (full saves)")
    labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="upper center", ncols=5)
    return figure


def _by_restores(figures: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(1, len(NAMES), figsize=(13, 4), sharey=True)
    fewest = min(case["saves"] for case in figures)
    for axis, name in zip(axes, NAMES, strict=True):
        cases = [c for c in figures if c["trace"] == name and c["saves"] == fewest]
        for offset, what in enumerate(("bandwidth", "steady", "transient")):
            at = [place + 0.27 * (offset - 1) for place in range(len(cases))]
            axis.bar(at, [c[f"{what}_reduction"] for c in cases], 0.27, label=what)
        labels = [f"{c['restores']}\n{c['bits']} bits" for c in cases]
        axis.set_xticks(range(len(cases)), labels)
        axis.set_title(f"{name}, {fewest} saves")
    axes[0].set_ylabel("times smaller than full float32 saves")
    axes[0].legend()
    return figure


def _against_optimum(figures: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(1, len(NAMES), figsize=(13, 4), sharey=True)
    for axis, name in zip(axes, NAMES, strict=True):
        cases = [case for case in figures if case["trace"] == name]
        at = [case["saves"] for case in cases]
        for key, label in {
            "forecast": "Intermittent",
            "history": "the paper's rule",
            "unaware": "optimum of the whole trace",
        }.items():
            axis.plot(at, [c[key]["mean"] for c in cases], marker=".", label=label)
        axis.axhline(1.05, color="grey", linewidth=0.5)
        axis.set_xscale("log")
        axis.set_xticks(at, map(str, at), fontsize="small")
        axis.minorticks_off()
        axis.set_title(name)
        axis.set_xlabel("saves of the trace")
    axes[0].set_ylabel("bytes / optimum, mean over lengths of a run")
    axes[0].legend()
    return figure
