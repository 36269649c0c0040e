"""Bytes of deltas of rows on a lattice, of tables in training, and how fast they are packed.

    python tests/benchmarks/lattice.py [--quick] [--data DIR] [--tables DIR] [--json PATH]

A small DLRM (`flights_dlrm.py`) passes once over flights-3m: each row is met for the first time in
it, which is the hard case. A full save is taken early, in the middle and late (after 5, 45 and 85 %
of the flights), a delta 55 batches later, and another 18 batches after that. The figures are those
of the last, on the save before and on the full: times fewer bytes than all rows in float32 with a
float32 slot a row, at 26 % of all rows, with scales, a bitmap of row ids, and slots, exact or those
of `slot_codec="moments"`: differences of logarithms, in 256 steps an octave (0.28 %).

Steps are those of the full; errors are of the rows of the delta, against `adaptive` codes of as
many bits. *Change* is the median motion of a row, by element, in steps: figures of differences that
state none say nothing. Speeds are of one core, in float32 bytes of rows a CPU second, from rows to
bytes, and back to integers. Training takes 5 minutes of two idle cores for each dim; `--tables`
keeps the rows.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Of one core: else those that wait count too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import flights_dlrm
import jax
import numpy as np
import traces
import trained_tables
from commandline import make_parser, write_figures
from etils import epath
from flights_dlrm import BATCH
from results import print_table

from cnr_jax.repository.store.arrays import ArrayWriter
from cnr_jax.rows.codecs import make_codec
from cnr_jax.rows.codecs.dither import row_keys
from cnr_jax.rows.codecs.lattice import SAMPLE_ROWS, Lattice
from cnr_jax.rows.codecs.moments import Octave
from cnr_jax.rows.codecs.packed import pack_rows, unpack_rows
from cnr_jax.rows.codecs.residual import Digest, costs_less
from cnr_jax.rows.codecs.sparse import RowsAt

BEGINS = {"early": 37, "middle": 329, "late": 622}
# Batches after the full save: itself, the delta before, and the one that is looked at.
MOMENTS = (0, 55, 73)
# Dim, and at the error of how many bits.
CASES = ((64, 4), (16, 4), (64, 2), (64, 8))
SHARE, SLOT_BYTES, ID_BYTES = 0.26, 4, 1 / 8
# Rows that are encoded at a time.
_ROWS = 1 << 14
# Bytes of the integers in a chunk.
_CHUNK_BYTES = 16 << 20

Window = Mapping[str, np.ndarray]


def windows(
    dim: int, data: Path, folder: Path | None, names: Sequence[str]
) -> Iterator[tuple[str, Window]]:
    """Trains, and yields the rows of each window; those that are kept are not trained again.

    A window has `ids` of the rows that are looked up in it, `table` of each, `last`: which are
    looked up after the delta before, `rows` and `slots` at each moment, and `samples` of whole
    tables.
    """
    kept = {name: (folder or Path()) / f"lattice-{dim}-{name}.npz" for name in names}
    if folder is not None and all(path.exists() for path in kept.values()):
        yield from ((name, np.load(path)) for name, path in kept.items())
        return
    flights = trained_tables.load_flights_3m(data)
    starts = np.concatenate([[0], np.cumsum(traces.load("flights", data).rows)])
    features, columns = flights.ids.shape[1], flights.dense.shape[1]
    state = flights_dlrm.init(flights.rows, features, columns, dim)
    train_step = jax.jit(flights_dlrm.train_step, donate_argnums=0)
    step = 0
    for name in names:
        begin = BEGINS[name]
        looked_up = flights.ids[begin * BATCH : (begin + MOMENTS[-1]) * BATCH]
        ids = np.unique(looked_up)
        rows, slots = list[np.ndarray](), list[np.ndarray]()
        samples = np.empty(0)
        for moment in MOMENTS:
            while step < begin + moment:
                state, _ = train_step(state, *flights.batch(step))
                step += 1
            table = np.asarray(state["params"][flights_dlrm.TABLE])
            if not moment:
                # Of tables with fewer rows some are taken twice.
                places = np.linspace(starts[:-1], starts[1:] - 1, SAMPLE_ROWS, axis=1)
                samples = table[places.astype(np.int64)]
            rows.append(table[ids])
            slot = state["sparse_optimizer"].sum_of_squares[flights_dlrm.TABLE]
            slots.append(np.asarray(slot)[ids, None])
        last = np.searchsorted(ids, np.unique(looked_up[MOMENTS[1] * BATCH :]))
        of = np.searchsorted(starts, ids, "right") - 1
        found = {"ids": ids, "last": last, "table": of, "rows": np.stack(rows)}
        found |= {"samples": samples, "slots": np.stack(slots)}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(kept[name], **found)
        yield name, found


def in_blocks(work: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """What a jitted function makes of rows, block by block."""
    found: list[list[np.ndarray]] = []
    for start in range(0, len(arrays[0]), _ROWS):
        some = [array[start : start + _ROWS] for array in arrays]
        count = len(some[0])
        if count < _ROWS:
            room = [((0, _ROWS - count), *((0, 0),) * (x.ndim - 1)) for x in some]
            some = [np.pad(x, r, mode="edge") for x, r in zip(some, room, strict=True)]
        found.append([np.asarray(each)[:count] for each in work(*some)])
    return [np.concatenate(each) for each in zip(*found, strict=True)]


class Delta:
    """Rows on the lattice of their tables, at each moment of a window."""

    def __init__(self, dim: int, bits: int, window: Window) -> None:
        self.codec, self._window = Lattice(bits=bits), window
        self._encode = jax.jit(self.codec.encode_on)
        step = jax.jit(self.codec.step)
        steps = np.array([step(each) for each in window["samples"]], np.float32)
        self.steps = steps[window["table"]]
        # As saves of one lineage are dithered: each row by one key.
        keys = row_keys(np.uint32(1), window["ids"])
        self._encoded(window["rows"][0], self.steps, keys)  # compiled, memory at hand
        self.secs = -time.process_time()
        self._parts = [self._encoded(rows, self.steps, keys) for rows in window["rows"]]
        self.secs += time.process_time()
        self.secs /= len(self._parts) * len(self.steps)

    def _encoded(self, *given: np.ndarray) -> dict[str, np.ndarray]:
        encode = self._encode

        def work(*some: np.ndarray) -> tuple[Any, ...]:
            found = encode(*some)
            return found.parts["integers"], found.parts["scale"], found.escaped

        names = ("integers", "scale", "escaped")
        return dict(zip(names, in_blocks(work, *given), strict=True))

    def figures(self, which: np.ndarray, moment: int) -> dict[str, float]:
        """Figures of the last delta of some rows, on an earlier moment."""
        new, below = (
            {name: part[which] for name, part in self._parts[at].items()}
            for at in (-1, moment)
        )
        rows = self._window["rows"][-1][which]
        count, dim = rows.shape
        start = time.process_time()
        difference = self.codec.difference(new, below)["integers"]
        digest = Digest(self.codec)
        digest.update(below)
        width = _CHUNK_BYTES // (dim * difference.itemsize)
        chunks = range(0, count, width)
        packed = [pack_rows(difference[i : i + width]) for i in chunks]
        encode_secs = time.process_time() - start + self.secs * count
        total = {name: part.copy() for name, part in below.items()}
        start = time.process_time()
        for i, data in zip(chunks, packed, strict=True):
            some = slice(i, min(i + width, count))
            read = unpack_rows(data, (some.stop - i) * dim, difference.dtype)
            layer = {"integers": read, "scale": new["scale"][some]}
            self.codec.add(layer, RowsAt(total, some))
        decode_secs = time.process_time() - start
        values = total["integers"] * total["scale"]
        assert (total["integers"] == new["integers"]).all()
        raw = new["escaped"]
        values[raw] = rows[raw]
        # Scales take next to nothing where they are packed: they are counted by those that differ.
        scales = 8 * int((np.diff(new["scale"][:, 0]) != 0).sum())
        row_bytes = (sum(map(len, packed)) + scales + int(raw.sum()) * 4 * dim) / count
        gigabytes = rows.nbytes / 1e9
        before = self._window["rows"][moment][which]
        change = np.linalg.norm(rows - before, axis=1) / dim**0.5 / self.steps[which]
        full = 4 * dim + SLOT_BYTES
        slot_bytes = log_slot_bytes(self._window["slots"][:, which], moment)
        return {
            "bits an element": row_bytes * 8 / dim,
            "times fewer": full / (SHARE * (row_bytes + SLOT_BYTES) + ID_BYTES),
            "bits a log slot": 8 * slot_bytes,
            "log slots": full / (SHARE * (row_bytes + slot_bytes) + ID_BYTES),
            "error": mean_error(rows, values) / self.adaptive_error(rows),
            "change": float(np.median(change)),
            "encode GB/s": gigabytes / encode_secs,
            "decode GB/s": gigabytes / decode_secs,
        }

    def adaptive_error(self, rows: np.ndarray) -> float:
        """Mean error of `adaptive` codes of the same bits."""
        codec = make_codec("adaptive", self.codec.bits)

        def work(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            encoded = codec.encode(rows)
            read = codec.decode(encoded.parts, dim=rows.shape[1], dtype=rows.dtype)
            return read, encoded.escaped

        read, escaped = in_blocks(jax.jit(work), rows)
        read[escaped] = rows[escaped]
        return mean_error(rows, read)


def log_slot_bytes(slots: np.ndarray, moment: int) -> float:
    """Bytes a row of a slot's last difference to an earlier moment, as they are stored."""
    codec, none = Octave(places=256), np.zeros((len(slots[0]), 1), np.int16)
    encode, below = jax.jit(codec.encode_on), [none]
    # Each save rests on the one before, but the last on that of the moment.
    for values in (*slots[: moment + 1], slots[-1]):
        found = encode(values, below[-1], none)
        below.append(np.asarray(found.parts["integers"]))
    stored, escaped = below[-1] - below[-2], np.asarray(found.escaped)
    if not costs_less(stored, below[-1]):
        stored = below[-1]
    part = codec.parts(1, np.float32)["integers"]
    with tempfile.TemporaryDirectory() as folder:
        path = epath.Path(folder) / "slots"
        writer = ArrayWriter(
            path, part.dtype.name, len(stored), compression=part.compression
        )
        writer.append(stored)
        entry = writer.finish()
    assert entry is not None and entry.compressed is not None
    return (sum(entry.compressed.bytes) + 4 * int(escaped.sum())) / len(stored)


def mean_error(rows: np.ndarray, read: np.ndarray) -> float:
    return float(np.linalg.norm(rows - read, axis=1).mean())


def main() -> None:
    parser = make_parser(
        __doc__,
        quick="dim 16 alone, of 4 bits, early",
        data="the folder of the data",
        tables="where rows in training are kept, and found",
    )
    args = parser.parse_args()
    cases = [(16, 4)] if args.quick else CASES
    data = traces.data_folder(args.data)
    found: list[dict[str, Any]] = []
    for dim in dict.fromkeys(dim for dim, _ in cases):
        for name, window in windows(
            dim, data, args.tables, list(BEGINS)[: 1 if args.quick else None]
        ):
            for bits in [bits for each, bits in cases if each == dim]:
                delta = Delta(dim, bits, window)
                everything = np.arange(len(window["ids"]))
                for on, which, moment in (
                    ("the save before", window["last"], 1),
                    ("the full", everything, 0),
                ):
                    case = {"dim": dim, "bits": bits, "when": name, "on": on}
                    found.append(case | delta.figures(which, moment))
    header = list(found[0])
    table = [
        [f"{x:.2f}" if isinstance(x, float) else str(x) for x in each.values()]
        for each in found
    ]
    print_table(f"deltas of {SHARE:.0%} of the rows", header, table)
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
