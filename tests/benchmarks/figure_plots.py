"""Draws Check-N-Run's figures 9 and 14 from what `codecs.py` and `accuracy.py` measured.

    python tests/benchmarks/figure_plots.py [--codecs JSON] [--accuracy JSON] [--harm JSON]
                                            [--to FOLDER]

One SVG for each: `codec_errors.svg`, `accuracy_after_restores.svg`, and of the summary of
`harm.py` `harm.svg`; by default in `tests/benchmarks/results/`, where docs/accuracy.md finds them.
The same figures give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from accuracy_report import AUTO, MARK, METRICS, NAMES, changes
from harm_report import MARKS

RESULTS = Path(__file__).parent / "results"


def draw(path: Path, to: Path, plot: Callable[[Any], Any]) -> None:
    """Writes one SVG of what a JSON file holds; makes the folder if it is missing."""
    figure = plot(json.loads(path.read_text()))
    to.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cnr_jax"}):
        figure.savefig(to, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def codec_errors(found: dict[str, Any]) -> Any:
    """Figure 9: mean l2 error of a row by scheme and dim, as a share of plain asymmetric."""
    figures = found["mean_errors"]
    tables = list(dict.fromkeys(f["table"] for f in figures))
    widths = sorted({f["bits"] for f in figures})
    figure, axes = plt.subplots(
        len(tables),
        len(widths),
        figsize=(3.1 * len(widths), 2.7 * len(tables)),
        squeeze=False,
        sharex=True,
        sharey="col",
    )
    styles: dict[str, Any] = {}
    for row, table in enumerate(tables):
        for column, bits in enumerate(widths):
            axis = axes[row, column]
            cases = [f for f in figures if (f["table"], f["bits"]) == (table, bits)]
            dims = [case["dim"] for case in cases]
            for scheme in cases[0]["error"]:
                shares = [c["error"][scheme] / c["error"]["asymmetric"] for c in cases]
                color = styles.setdefault(scheme, f"C{len(styles)}")
                axis.plot(dims, shares, marker=".", color=color, label=scheme)
            axis.set_xscale("log", base=2)
            axis.set_xticks(dims, map(str, dims))
            axis.set_title(f"{table}, {bits} bits", fontsize="medium")
            axis.grid(alpha=0.3)
        axes[row, 0].set_ylabel("l2 error / asymmetric")
    for axis in axes[-1]:
        axis.set_xlabel("dim")
    _shared_legend(figure, axes)
    return figure


def accuracy_after_restores(found: dict[str, Any]) -> Any:
    """Figure 14: percent worse by restores and bits, with intervals; by metric."""
    runs = found["runs"]
    figure, axes = plt.subplots(1, len(METRICS), figsize=(3.4 * len(METRICS), 3.2))
    for axis, (scope, metric) in zip(axes, METRICS, strict=True):
        of = changes(runs, scope, metric)
        for number, bits in enumerate(dict.fromkeys(c.bits for c in of if c.bits)):
            cases = sorted(c for c in of if c.bits == bits)
            each = [of[case] for case in cases]
            axis.errorbar(
                # Beside each other, so that no interval hides another.
                [case.restores * 1.06 ** (number - 2) for case in cases],
                [change.mean for change in each],
                [change.margin for change in each],
                marker=".",
                capsize=2,
                label=bits if bits == AUTO else f"{bits} bits",
            )
        axis.axhline(0, color="black", linewidth=0.5)
        axis.axhline(MARK, color="grey", linewidth=0.8, linestyle=":")
        # Equal steps within the mark, logarithmic beyond it.
        axis.set_yscale("symlog", linthresh=MARK)
        axis.set_xscale("log")
        ticks = sorted({case.restores for case in of})
        axis.set_xticks(ticks, map(str, ticks))
        axis.minorticks_off()
        axis.set_title(f"{NAMES[scope]}, {NAMES[metric]}", fontsize="medium")
        axis.set_xlabel("restores")
    axes[0].set_ylabel("percent worse than without restores")
    _shared_legend(figure, axes[None, :])
    return figure


def harm(found: dict[str, Any]) -> Any:
    """Points of AUC that restores cost by the noise of a restore, all fixed widths."""
    figure, axis = plt.subplots(figsize=(7.5, 4.2))
    cells = [
        cell for cell in found["cells"] if cell["noise"] and cell["bits"] != "auto"
    ]
    for number, model in enumerate(dict.fromkeys(cell["model"] for cell in cells)):
        for harmful in (False, True):
            own = [
                cell
                for cell in cells
                if (cell["model"], cell["harmful"]) == (model, harmful)
            ]
            axis.errorbar(
                [cell["noise"] for cell in own],
                [cell["held_out_auc"][0] for cell in own],
                [cell["held_out_auc"][1] for cell in own],
                linestyle="none",
                linewidth=0.6,
                color=f"C{number}",
                marker="osD^v"[number],
                markersize=5,
                markerfacecolor=None if harmful else "white",
                label=f"{model}{', harmed' if harmful else ''}",
            )
    axis.axhline(0, color="black", linewidth=0.5)
    axis.axvline(found["most_noise"], color="grey", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    # Equal steps within the mark, logarithmic beyond it.
    axis.set_yscale("symlog", linthresh=MARKS["auc"])
    axis.set_xlabel("noise of a restore")
    axis.set_ylabel("points of AUC lost, held out")
    axis.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    figure.legend(loc="upper center", ncols=4, fontsize="small")
    return figure


def _shared_legend(figure: Any, axes: Any) -> None:
    """One legend for all axes, above them."""
    labels = {
        text: handle
        for axis in axes.ravel()
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.legend(
        labels.values(), labels, loc="upper center", ncols=len(labels), fontsize="small"
    )


def main() -> None:
    """Draws what was given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codecs", type=Path, help="figures of codecs.py")
    parser.add_argument("--accuracy", type=Path, help="figures of accuracy.py")
    parser.add_argument("--harm", type=Path, help="the summary of harm.py")
    parser.add_argument("--to", type=Path, default=RESULTS, help="where drawings go")
    args = parser.parse_args()
    if args.codecs:
        draw(args.codecs, args.to / "codec_errors.svg", codec_errors)
    if args.accuracy:
        to = args.to / "accuracy_after_restores.svg"
        draw(args.accuracy, to, accuracy_after_restores)
    if args.harm:
        draw(args.harm, args.to / "harm.svg", harm)


if __name__ == "__main__":
    main()
