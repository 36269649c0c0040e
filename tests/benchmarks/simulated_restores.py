"""Restores of a small training without files: its tables are encoded, decoded, and trained on.

What `cnr_jax.CheckpointManager` does to a state that stores its slots exactly, by the same codecs
and the same dither; that both end alike is tested. Without files a restore takes a millisecond, so
there can be many runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from paired import auc, log_loss
from small_trainings import State, Training

from cnr_jax.policy.bits import FALLBACK_BITS, dithered_bits
from cnr_jax.rows.codecs.asymmetric import Asymmetric
from cnr_jax.rows.codecs.dither import Dither, dither_seed, row_keys

Tables = Mapping[str, jax.Array]
# Of a table at a restore: sums over the elements of rows that have moved since the one before.
Figures = dict[str, float]
# Examples of each batch by which a lifetime is judged: of more, sorting takes longer than training.
SEEN = 256


class Run(NamedTuple):
    """A run under way.

    Attributes:
        state: of the training.
        seen: float32[2, steps, examples]: logits before each batch was learnt from, and labels, of
            its first `SEEN` examples.
    """

    state: State
    seen: jax.Array


class Restored(NamedTuple):
    """What a restore did: the step, and by table the width that it was read from, and figures."""

    step: int
    bits: dict[str, int | None]
    figures: dict[str, Figures]


def made_up_lineage(stop: int) -> str:
    """One that differs from step to step, as those of restores do."""
    return f"{stop:032x}"


def even_bits(restored: Restored) -> float:
    """What the library would measure of the rows that were restored, see `SampledMotion`."""
    moved = [of for of in restored.figures.values() if of["motion"]]
    # Of a step, a sixth is the mean of what dither errs by, squared.
    logs = [0.5 * math.log2(of["ranges"] / 6 / of["motion"]) for of in moved]
    return float(np.average(logs, weights=[of["rows"] for of in moved]))


class Rounding(NamedTuple):
    """How tables are stored.

    Attributes:
        widths: of a code by table, None where rows are stored exactly, of what has been restored.
        rule: "nearest", "dithered" or "auto", as `cnr_jax.Options` takes it.
        lineage: of a save, by its step, by which its codes are dithered.
    """

    widths: Callable[[Sequence[Restored]], Mapping[str, int | None]]
    rule: str = "auto"
    lineage: Callable[[int], str] = made_up_lineage

    def dithered_bits(self, restores: Sequence[Restored]) -> int:
        """The widest codes that are dithered, of what has been restored; 0: none are."""
        if self.rule == "auto":
            before = even_bits(restores[-1]) if restores else None
            return dithered_bits(len(restores), before)
        return FALLBACK_BITS if self.rule == "dithered" else 0


class Course:
    """Runs of one training, of so many steps.

    Args:
        training: what is trained.
        steps: of a run.
    """

    def __init__(self, training: Training, steps: int) -> None:
        self.training, self.steps = training, steps
        self._advance = jax.jit(self._steps)
        self._logits = jax.jit(training.logits)
        self._data: tuple[int, Any] = (-1, None)
        self._kept: dict[int, Run] = {}

    def data(self, seed: int) -> Any:
        """What batches of a seed are made of; of the last seed it is kept."""
        if self._data[0] != seed:
            self._data, self._kept = (seed, self.training.data(seed)), {}
        return self._data[1]

    def unbroken(self, seed: int, step: int) -> Run:
        """The run of a seed that is never restored, up to a step."""
        data = self.data(seed)
        if not self._kept:
            size = len(self.training.batch(data, jnp.int32(0))[-1])
            seen = jnp.zeros((2, self.steps, min(size, SEEN)), jnp.float32)
            self._kept[0] = Run(self.training.begin(seed), seen)
        if step not in self._kept:
            before = max(known for known in self._kept if known < step)
            self._kept[step] = self.advance(seed, self._kept[before], before, step)
        return self._kept[step]

    def advance(self, seed: int, run: Run, begin: int, end: int) -> Run:
        """Trains from step `begin` to step `end`."""
        return self._advance(self.data(seed), run, begin, end)

    def _steps(self, data: Any, run: Run, begin: int, end: int) -> Run:
        def step(number: jax.Array, run: Run) -> Run:
            batch = self.training.batch(data, number)
            state, logits = self.training.step(run.state, batch)
            both = jnp.stack([logits[:SEEN], batch[-1][:SEEN]])
            return Run(state, run.seen.at[:, number].set(both))

        return jax.lax.fori_loop(begin, end, step, run)

    def restored(
        self, seed: int, stops: Sequence[int], rounding: Rounding
    ) -> tuple[Run, list[Restored]]:
        """A run that is restored after each of the stops, ascending."""
        names = self.training.tables
        run, base = self.unbroken(seed, stops[0]), self.unbroken(seed, 0)
        kept = _of(base.state, names)
        restores: list[Restored] = []
        for stop, following in zip(stops, [*stops[1:], self.steps], strict=True):
            tables = _of(run.state, names)
            widths = rounding.widths(restores)
            dither = Dither(rounding.lineage(stop), rounding.dithered_bits(restores))
            found = {
                name: reread(name, tables[name], kept[name], widths[name], dither)
                for name in names
            }
            if restores:
                # What did not move since is in no delta.
                found = {
                    name: _unmoved(tables[name], kept[name], *of)
                    for name, of in found.items()
                }
            kept = {name: read for name, (read, _) in found.items()}
            figures = {name: of for name, (_, of) in found.items()}
            restores.append(Restored(stop, dict(widths), figures))
            params = {**run.state["params"], **kept}
            run = Run({**run.state, "params": params}, run.seen)
            run = self.advance(seed, run, stop, following)
        return run, restores

    def metrics(self, seed: int, run: Run) -> dict[str, dict[str, float]]:
        """AUC and log loss of a run that has ended: held out, and over its lifetime."""
        *given, labels = self.training.held_out(self.data(seed))
        logits = self._logits(run.state["params"], *given)
        both = {"held_out": (logits, labels), "lifetime": run.seen.reshape(2, -1)}
        return {
            scope: {"auc": auc(*of), "log_loss": log_loss(*of)}
            for scope, of in {
                s: tuple(map(np.asarray, b)) for s, b in both.items()
            }.items()
        }


def _unmoved(
    rows: jax.Array, before: jax.Array, read: jax.Array, figures: Figures
) -> tuple[jax.Array, Figures]:
    """The same, with rows as they were that have not moved."""
    moved = (rows != before).any(1, keepdims=True)
    return jnp.where(moved, read, before), figures


def _of(state: State, names: Sequence[str]) -> dict[str, jax.Array]:
    return {name: state["params"][name] for name in names}


def reread(
    name: str, rows: jax.Array, before: jax.Array, bits: int | None, dither: Dither
) -> tuple[jax.Array, Figures]:
    """Rows as they are restored, and what that undoes.

    Args:
        name: of the table.
        rows: float32[rows, dim], as they are saved.
        before: as they were restored the last time, or began.
        bits: of the default codec; None: stored exactly.
        dither: of codes.
    """
    if bits is None:
        return rows, _figures(_sums(rows, rows, before))
    keys = None
    if bits <= dither.most_bits:
        keys = row_keys(dither_seed(dither.lineage, name), np.arange(len(rows)))
    read, sums = _rounded(rows, before, bits, keys)
    return read, _figures(sums)


@functools.partial(jax.jit, static_argnums=2)
def _rounded(
    rows: jax.Array, before: jax.Array, bits: int, keys: jax.Array | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    codec = Asymmetric(bits=bits)  # the default one
    parts, escaped = codec.encode(rows, keys)
    read = codec.decode(parts, dim=rows.shape[1], dtype=rows.dtype)
    read = jnp.where(escaped[:, None], rows, read)
    return read, _sums(rows, read, before)


@jax.jit
def _sums(rows: jax.Array, read: jax.Array, before: jax.Array) -> dict[str, jax.Array]:
    motion, error = rows - before, read - rows
    ranges = jnp.broadcast_to(jnp.ptp(rows, axis=1, keepdims=True), rows.shape)
    moved = (motion != 0).any(1)

    def total(of: jax.Array) -> jax.Array:
        return jnp.where(moved[:, None], of, 0.0).sum()

    return {
        "rows": moved.sum(),
        "motion": total(motion * motion),
        "error": total(error * error),
        "undone": -total(error * motion),
        "ranges": total(ranges * ranges),
    }


def _figures(sums: Mapping[str, jax.Array]) -> Figures:
    return {name: float(of) for name, of in sums.items()}
