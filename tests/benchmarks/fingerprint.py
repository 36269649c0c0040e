"""What a fingerprint pass over a table and its slots costs, against `sum` over the same arrays.

    python tests/benchmarks/fingerprint.py [--quick] [--json PATH]

A pass is what a save does: it hashes every row in host memory, compares, and stamps the rows
that changed, of which there are 1 %. Passes and sums alternate in one process, on one CPU
device; times are medians with ranges, and a ratio is the median of those of neighbours. Memory
is what is kept of a row, and what is held at the peak, when there are old hashes and new ones;
both also as a share of the table and its slots. Audits keep a byte more for each leaf.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from commandline import make_parser, write_figures

import cnr_jax as cnr
from cnr_jax.rows.fingerprints.watch import RowWatch
from cnr_jax.rows.shards import Shards, Tiling
from cnr_jax.state.table import split

CHANGED = 0.01
CASES = [
    *(
        (dim, dtype, slots)
        for slots in ("none", "row-wise")
        for dtype in ("float32", "bfloat16")
        for dim in (16, 32, 64, 128)
    ),
    (64, "float32", "adam"),
]


def make_state(dim: int, dtype: str, slots: str, size: int) -> dict[str, Any]:
    """A table and its slots, `size` bytes together."""
    element = np.dtype(jnp.dtype(dtype)).itemsize
    width = dim * element * (3 if slots == "adam" else 1)
    rows = size // (width + 4 * (slots == "row-wise"))
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        values = rng.random(shape, np.float32)
        return jnp.asarray(values).astype(dtype)

    state: dict[str, Any] = {"params": {"user": draw(rows, dim)}}
    if slots == "row-wise":
        state["opt"] = {"acc": {"user": draw(rows).astype(jnp.float32)}}
    if slots == "adam":
        state["opt"] = {name: {"user": draw(rows, dim)} for name in ("mu", "nu")}
    return jax.block_until_ready(state)


class Pass:
    """A pass over states like the first one.

    Attributes:
        found: how many rows changed, of each pass.
        kept: bytes after the last pass.
        peak: bytes during the last pass.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._tables = cnr.find_tables(state, ["user"])
        shardings = jax.tree.map(lambda x: x.sharding, split(state, self._tables)[0])
        where = {"user": shardings["user"]["table"]}
        self._tiling = Tiling(self._tables, shardings, where, lambda *_: "host")
        self._watch = RowWatch(stamped=True)
        self.found: list[int] = []
        self.kept = self.peak = 0

    def __call__(self, state: dict[str, Any]) -> None:
        arrays = split(state, self._tables)[0]
        look = self._watch.look(Shards(self._tiling, arrays))
        hashed = [seen.hashed for seen in look.seen.values()]
        new = sum(bytes_of(x.hashes) + bytes_of(x.differ) for x in hashed)
        self.peak = self._held() + new
        self._watch.keep(look, len(self.found) + 1)
        self.kept = self._held()
        self.found.append(sum(len(rows) for rows in look.changed.values()))

    def _held(self) -> int:
        hashes = sum(bytes_of(x.hashed.hashes) for x in self._watch._seen.values())
        return hashes + bytes_of(list(self._watch._stamps.values()))


def bytes_of(chunks: Any) -> int:
    """Bytes of hashes or positions in host memory, which are there by chunk; None: 0."""
    return sum(chunk.nbytes for chunk in chunks or ())


def sum_all() -> Callable[[Any], None]:
    """A function that sums every array of a state."""
    program = jax.jit(lambda state: jax.tree.map(jnp.sum, state))
    return lambda state: jax.block_until_ready(program(state))


def race(
    one: Callable[[Any], Any],
    two: Callable[[Any], Any],
    states: list[Any],
    repetitions: int,
) -> list[list[float]]:
    """Seconds that each takes, in turns and over states in turns."""
    times: list[list[float]] = [[], []]
    for number in range(repetitions + 2):
        state = states[number % 2]
        for seconds, run in zip(times, (one, two), strict=True):
            start = time.perf_counter()
            run(state)
            seconds.append(time.perf_counter() - start)
    # The first two compile, or find memory that was never used.
    return [seconds[2:] for seconds in times]


def measure(
    dim: int, dtype: str, slots: str, size: int, repetitions: int
) -> dict[str, Any]:
    """Times and memory of one case."""
    state = make_state(dim, dtype, slots, size)
    table = state["params"]["user"]
    rows = table.shape[0]
    ids = np.random.default_rng(1).choice(rows, int(rows * CHANGED), replace=False)
    other = {**state, "params": {"user": table.at[ids].add(1)}}
    run = Pass(state)
    sums, passes = race(sum_all(), run, [state, other], repetitions)
    assert run.found[1:] == [len(ids)] * (repetitions + 1), (len(ids), run.found)
    model = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return {
        "dim": dim,
        "dtype": dtype,
        "slots": slots,
        "rows": rows,
        "bytes": model,
        "sum_seconds": sums,
        "pass_seconds": passes,
        "times_a_sum": [b / a for a, b in zip(sums, passes, strict=True)],
        "bytes_kept_a_row": run.kept / rows,
        "bytes_at_peak_a_row": run.peak / rows,
        "kept_of_model": run.kept / model,
        "peak_of_model": run.peak / model,
    }


def spread(values: list[float], form: str) -> str:
    """Median and range."""
    shown = (statistics.median(values), min(values), max(values))
    middle, low, high = (form.format(value) for value in shown)
    return f"{middle} ({low}-{high})"


def main() -> None:
    args = make_parser(__doc__, quick="64 MiB a case").parse_args()
    size, repetitions = (64 << 20, 5) if args.quick else (256 << 20, 11)
    load = os.getloadavg()[0]
    print(
        f"{size >> 20} MiB a case, {os.cpu_count()} cores, load {load:.1f} at the start"
    )
    print(
        "dtype     slots     dim  sum, ms               pass, ms              "
        "times a sum        bytes a row: kept, at peak  of the model"
    )
    figures = []
    for dim, dtype, slots in CASES:
        figure = measure(dim, dtype, slots, size, repetitions)
        figures.append(figure)
        sums, passes = (
            spread([1e3 * s for s in figure[name]], "{:.1f}")
            for name in ("sum_seconds", "pass_seconds")
        )
        print(
            f"{dtype:9} {slots:9} {dim:3}  {sums:21} {passes:21} "
            f"{spread(figure['times_a_sum'], '{:.2f}'):20}"
            f"{figure['bytes_kept_a_row']:15.1f} {figure['bytes_at_peak_a_row']:8.1f}"
            f"  {figure['kept_of_model']:7.1%} {figure['peak_of_model']:6.1%}",
            flush=True,
        )
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
