"""Settings of codecs and how they are found: Check-N-Run's figures 10, 11 and 13.

`codecs.py` runs it: the greedy search by its bins and ratio, how near the error of a sample is to
that of all rows, and what `cnr_jax.tune` makes of one.
"""

from __future__ import annotations

import numpy as np
from codec_errors import Report, norms
from codec_tables import Tables
from results import print_mark, print_table

from cnr_jax.checkpointer.tuning import cheapest, mean_error, variants
from cnr_jax.rows.codecs import Greedy, make_codec

BINS = (5, 10, 15, 25, 35, 45, 100, 200)
RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
SAMPLES = (30, 100, 300, 1_000, 3_000, 10_000, 30_000)


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
