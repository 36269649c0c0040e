"""Mean l2 errors of rows by codec, bits and dim: Check-N-Run's figure 9 (`codecs.py` runs it)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from codec_tables import Tables
from results import print_mark, print_table

from cnr_jax.rows.codecs import (
    Codec,
    Greedy,
    KMeans,
    SharedCodebook,
    Symmetric,
    make_codec,
)
from cnr_jax.rows.tiling import chunk_rows

# What the adaptive codec is held against.
SEARCH = {"bins": 45, "ratio": 1.0}
Report = dict[str, Any]


@functools.partial(jax.jit, static_argnums=0)
def _norms(codec: Codec, rows: jax.Array) -> jax.Array:
    """The l2 error of each row; 0 of escaped ones, which are stored exactly."""
    encoded = codec.encode(rows)
    back = codec.decode(encoded.parts, dim=rows.shape[1], dtype=jnp.float32)
    return jnp.where(encoded.escaped, 0, jnp.linalg.norm(back - rows, axis=1))


def norms(codec: Codec, rows: np.ndarray) -> np.ndarray:
    """The l2 error of each row, chunk by chunk."""
    size = min(chunk_rows(rows.shape[1], 4), len(rows))
    found = [
        np.asarray(_norms(codec, rows[start : start + size]))
        for start in range(0, len(rows) // size * size, size)
    ]
    return np.concatenate(found)


def schemes(bits: int, rows: np.ndarray) -> dict[str, Codec]:
    """What figure 9 compares, at one width."""
    found: dict[str, Codec] = {
        "symmetric": Symmetric(bits=bits),
        "asymmetric": make_codec("asymmetric", bits),
    }
    if bits < 8:
        found["greedy 25, .6"] = Greedy(bits=bits)
        found["greedy 45"] = Greedy(bits=bits, **SEARCH)
    found["adaptive"] = make_codec("adaptive", bits)
    if bits < 8:
        # At least as many values as a code tells apart, for each of a few thousand rows.
        found["codebook"] = SharedCodebook.fit(rows[:4096], bits)
        found["k-means"] = KMeans(bits=bits)
    return found


def mean_errors(tables: Tables) -> list[Report]:
    """Figure 9: mean l2 error of a row, by data set, dim, bits and scheme."""
    figures: list[Report] = []
    for name, dim in tables.all():
        rows = tables.rows(name, dim)
        for bits in tables.bits:
            found = {
                scheme: float(norms(codec, rows).mean())
                for scheme, codec in schemes(bits, rows).items()
            }
            figures.append({"table": name, "dim": dim, "bits": bits, "error": found})
    _print_errors(figures)
    return figures


def _print_errors(figures: list[Report]) -> None:
    names = list(dict.fromkeys(name for f in figures for name in f["error"]))
    rows = [
        [
            f"{f['table']}, dim {f['dim']}, {f['bits']} bits",
            f"{f['error']['asymmetric']:.3e}",
            *(
                f"{f['error'][name] / f['error']['asymmetric']:.4f}"
                if name in f["error"]
                else "-"
                for name in names
            ),
        ]
        for f in figures
    ]
    header = ("table", "asymmetric", *names)
    print_table(
        "Mean l2 error of a row, also as a share of plain asymmetric", header, rows
    )
    for f in figures:
        _print_error_marks(f)


def _print_error_marks(figure: Report) -> None:
    error, bits, dim = figure["error"], figure["bits"], figure["dim"]
    label = f"{figure['table']}, dim {dim}, {bits} bits"
    if bits == 8:
        limit = 0.985 if dim > 64 else 0.97
        print_mark(
            f"{label}: adaptive / asymmetric", _ratio(error, "asymmetric"), limit
        )
        return
    print_mark(f"{label}: adaptive / greedy 45", _ratio(error, "greedy 45"), 1.0)
    order = [error[name] for name in ("adaptive", "asymmetric", "symmetric")]
    print_mark(f"{label}: pairs out of the paper's order", _unsorted(order), 0)
    if bits == 2:
        print(
            f"          k-means is {error['k-means'] / error['adaptive']:.3f} of adaptive"
        )


def _ratio(error: dict[str, float], to: str) -> float:
    return error["adaptive"] / error[to]


def _unsorted(values: Sequence[float]) -> int:
    return sum(a >= b for a, b in itertools.pairwise(values))
