"""What stages make of arrays, as figures and tables of `entropy.py`."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
from results import print_table
from stages import LEAST_GAIN, LEAST_MB_PER_SEC, Staged, apply, stages

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Figure = dict[str, Any]


def staged_figures(
    case: Figure, values: np.ndarray, whole_bytes: float, turns: int
) -> list[Figure]:
    """All stages on an array that is a part of `whole_bytes`."""
    flat = np.ascontiguousarray(values).reshape(-1)
    flat = flat.view(UNSIGNED[flat.dtype.itemsize])
    return [
        staged_figure({**case, "stage": name}, flat.nbytes, whole_bytes, staged)
        for name, stage in stages(flat.dtype.itemsize).items()
        for staged in [apply(stage, flat, turns)]
    ]


def staged_figure(
    case: Figure,
    size: int,
    whole_bytes: float,
    staged: Staged,
    saved: float | None = None,
) -> Figure:
    """What a stage makes of `size` bytes; `saved` bytes if not all that it takes away."""
    part = size / whole_bytes
    gain = staged.gain(part) if saved is None else saved / whole_bytes
    verdict = {"part": part, "gain": gain, "passes": staged.pays(gain)}
    return {**case, "bytes": size, **dataclasses.asdict(staged), **verdict}


def label(figure: Figure) -> str:
    """What it was measured on."""
    shown = {"dim": "dim {}", "bits": "{} bits", "saves": "{} saves"}
    return ", ".join(
        shown.get(key, "{}").format(value)
        for key, value in figure.items()
        if key in ("table", "trace", "dim", "bits", "saves", "array", "form", "stage")
    )


def print_staged(title: str, figures: list[Figure]) -> None:
    """Prints what stages made of arrays."""
    rows = [
        [
            label(f),
            f"{f['part']:.1%}",
            f"{f['share']:.3f}",
            f"{f['gain']:.1%}",
            f"{f['encode_mb_per_sec']:.0f}",
            f"{f['decode_mb_per_sec']:.0f}",
            "passes" if f["passes"] else "-",
        ]
        for f in figures
    ]
    header = (
        "bytes",
        "of all",
        "left",
        "gain of all",
        "encode, MB/s",
        "decode, MB/s",
        f"{LEAST_GAIN:.0%} at {LEAST_MB_PER_SEC:.0f}",
    )
    print_table(f"{title}; MB/s of bytes before it, on one core", header, rows)


def together(case: Figure, arrays: list[Figure], total: int) -> list[Figure]:
    """Each stage on every array, where it is on all; and on each array the best for it."""
    of: dict[str, list[Figure]] = collections.defaultdict(list)
    by_array: dict[str, list[Figure]] = collections.defaultdict(list)
    for figure in arrays:
        of[figure["stage"]].append(figure)
        by_array[figure["array"]].append(figure)
    chosen = {name: each for name, each in of.items() if len(each) == len(by_array)}
    best = [min(each, key=lambda f: f["share"]) for each in by_array.values()]
    # An array that no stage makes smaller is left as it is, and costs no time.
    chosen["best of each"] = [figure for figure in best if figure["share"] < 1]
    return [
        _sum({**case, "array": "all", "stage": stage}, each, total)
        for stage, each in chosen.items()
        if each
    ]


def _sum(case: Figure, figures: list[Figure], total: int) -> Figure:
    """Figures of several arrays as of one: sums of bytes and of seconds."""
    size = sum(f["bytes"] for f in figures)
    rates = {
        what: size / sum(f["bytes"] / f[what] for f in figures)
        for what in ("encode_mb_per_sec", "decode_mb_per_sec")
    }
    left = sum(f["bytes"] * f["share"] for f in figures)
    return staged_figure(case, size, total, Staged(left / size, **rates))


def print_passes(figures: list[Figure]) -> None:
    """The stages that pass anywhere, by what they are applied to."""
    print(
        f"\nStages that gain {LEAST_GAIN:.0%} of a delta at over"
        f" {LEAST_MB_PER_SEC:.0f} MB/s on one core, both ways"
    )
    counted: dict[str, dict[str, list[bool]]] = {}
    for figure in figures:
        what = figure.get("array") or figure.get("form") or "packed codes"
        by_stage = counted.setdefault(what, {})
        by_stage.setdefault(figure["stage"], []).append(figure["passes"])
    for what, by_stage in counted.items():
        passing = [
            f"{stage} in {sum(passes)} of {len(passes)} cases"
            for stage, passes in by_stage.items()
            if any(passes)
        ]
        print(f"  {what}: {'; '.join(passing) or 'none'}")
