"""What restores cost a model that dense Adam trains: by bits, number and spacing of restores.

    python tests/benchmarks/dense_adam.py [--quick] [--json PATH] [--seeds N]

A factorization of users and items (dim 16, learning rate 1e-3, 300 batches of 2,048) whose labels
are drawn from factors of their own. Runs of one seed start alike and see the same batches. One is
never restored; the others are at every 7th, 14th, 30th or 75th step, the last time so many steps
before the end, each time through `cnr_jax.CheckpointManager` with fingerprints, which are the
default where nothing is recorded, slots exact, and a new manager. Shown are paired differences on
20,000 pairs that were held out: points of AUC (hundredths) lost, and percent of log loss gained,
with intervals of 95 % confidence.

Why the spacing matters: an element that moves by less than half a step of its row's codes between
two restores is put back by each, and never moves. Printed beside: how far an element moves from
restore to restore in the unbroken run, in such steps.

Of five seeds a full run takes about 2 minutes on two cores, a quick one 15 s. Nothing is timed.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from commandline import make_parser, write_figures
from paired import auc, degradation_percent, interval, log_loss
from results import print_table

import cnr_jax as cnr

USERS, ITEMS, DIM, BATCH, STEPS, HELD_OUT = 1_000, 500, 16, 2048, 300, 20_000
RATE, SCALE = 1e-3, 0.1  # of Adam; of the factors at the start


class Case(NamedTuple):
    """How a run is restored: the width (None: stored exactly), how often, how many steps apart."""

    bits: int | None
    restores: int
    apart: int

    def stops(self) -> list[int]:
        """After which steps."""
        first = STEPS - self.restores * self.apart
        return [first + i * self.apart for i in range(self.restores)]

    def __str__(self) -> str:
        width = "raw" if self.bits is None else f"{self.bits} bits"
        return f"{width}, {self.restores} x {self.apart} steps apart"


CASES = [Case(bits, 20, 7) for bits in (4, 8, None)]
CASES += [Case(4, 20, 14), Case(4, 3, 30), Case(4, 3, 75), Case(8, 3, 30)]
TX = optax.adam(RATE)


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[n, 2] of users and items, and float32[n] of labels; the held-out ones last."""
    rng = np.random.default_rng(seed)
    count = BATCH * STEPS + HELD_OUT
    popular = rng.zipf(1.2, 8 * count)
    items = popular[popular <= ITEMS][:count] - 1
    pairs = np.stack([rng.integers(0, USERS, count), items], axis=1).astype(np.int32)
    user, item = (rng.normal(0, 0.7, (size, DIM)) for size in (USERS, ITEMS))
    logits = (user[pairs[:, 0]] * item[pairs[:, 1]]).sum(1)
    labels = rng.random(count) < 1 / (1 + np.exp(-logits))
    return pairs, labels.astype(np.float32)


def start(seed: int) -> dict[str, Any]:
    """The state at step 0."""
    keys = jax.random.split(jax.random.key(seed))
    params = {
        name: SCALE * jax.random.normal(key, (size, DIM))
        for name, key, size in zip(("user", "item"), keys, (USERS, ITEMS), strict=True)
    }
    return {"params": params, "opt_state": TX.init(params)}


def logits_of(params: dict[str, jax.Array], pairs: Any) -> jax.Array:
    """float32[n] of pairs int32[n, 2]."""
    return (params["user"][pairs[:, 0]] * params["item"][pairs[:, 1]]).sum(1)


@jax.jit
def train(state: dict[str, Any], pairs: jax.Array, labels: jax.Array) -> dict[str, Any]:
    """One step."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        got = logits_of(params, pairs)
        return optax.sigmoid_binary_cross_entropy(got, labels).mean()

    updates, opt_state = TX.update(jax.grad(loss)(state["params"]), state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}


class Course(NamedTuple):
    """The data of a seed, and an unbroken run: its states by step."""

    pairs: np.ndarray
    labels: np.ndarray
    states: list[dict[str, Any]]

    def advance(self, state: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
        """Trains from step `begin` to step `end`."""
        for step in range(begin, end):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            state = train(state, self.pairs[rows], self.labels[rows])
        return state

    def figures(self, state: dict[str, Any]) -> dict[str, float]:
        """AUC and log loss of what was held out."""
        got = np.asarray(logits_of(state["params"], self.pairs[-HELD_OUT:]))
        labels = self.labels[-HELD_OUT:]
        return {"auc": auc(got, labels), "log_loss": log_loss(got, labels)}


def course(seed: int) -> Course:
    """Of a seed."""
    found = Course(*data(seed), [start(seed)])
    for step in range(STEPS):
        found.states.append(found.advance(found.states[-1], step, step + 1))
    return found


def restored(of: Course, case: Case, root: Path) -> dict[str, Any]:
    """The state at the end of a run with restores."""
    stops = case.stops()
    state = of.states[stops[0]]
    tables = cnr.find_tables(state, ["user", "item"])
    assert all(len(table.slots) == 2 for table in tables.values())
    options = cnr.Options(
        codec="adaptive" if case.bits else "raw",
        bits=case.bits or 4,
        preservation_policy=ocp.checkpoint_managers.LatestN(1),
    )
    opened = functools.partial(cnr.CheckpointManager, root, tables=tables)
    manager = opened(options=options)
    for stop, following in zip(stops, [*stops[1:], STEPS], strict=True):
        manager.save(stop, args=cnr.args.Save(state))
        manager.close()
        manager = opened(options=options)
        abstract = jax.eval_shape(lambda saved: saved, state)
        got = manager.restore(None, args=cnr.args.Restore(abstract)).state
        same = jax.tree.leaves(jax.tree.map(np.array_equal, got, state))
        # Two tables are rounded, nothing else.
        assert same.count(False) == (0 if case.bits is None else 2), same
        state = of.advance(got, stop, following)
    manager.close()
    return state


def motion(of: Course, case: Case) -> float:
    """The median motion of an element of the users between restores, in steps of 4-bit codes."""
    found = []
    for stop in case.stops():
        before, after = (
            np.asarray(of.states[step]["params"]["user"])
            for step in (stop, stop + case.apart)
        )
        step = (before.max(1, keepdims=True) - before.min(1, keepdims=True)) / 15
        found.append(np.median(np.abs(after - before) / step))
    return float(np.mean(found))


def run(seed: int, cases: list[Case]) -> list[dict[str, Any]]:
    """What each case cost."""
    of = course(seed)
    reference = of.figures(of.states[-1])
    found = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="cnr-bench-") as root:
            got = of.figures(restored(of, case, Path(root, "run")))
        auc_points = 100 * (reference["auc"] - got["auc"])
        loss = degradation_percent("log_loss", reference["log_loss"], got["log_loss"])
        found.append(
            {"seed": seed, **case._asdict(), "unbroken": reference, **got}
            | {"auc_points": auc_points, "log_loss_percent": loss}
            | {"motion": motion(of, case)}
        )
    return found


def main() -> None:
    """Makes all runs, and prints what they cost."""
    parser = make_parser(__doc__, quick="two cases of two seeds")
    parser.add_argument("--seeds", type=int, help="pairs of runs; 5, quick 2")
    args = parser.parse_args()
    cases = [CASES[0], Case(4, 3, 30)] if args.quick else CASES
    seeds = range(args.seeds or (2 if args.quick else 5))
    runs = [each for seed in seeds for each in run(seed, cases)]
    rows = []
    for case in cases:
        own = [each for each in runs if case._asdict().items() <= each.items()]
        cells = [str(case), f"{np.mean([each['motion'] for each in own]):.2f}"]
        for name in ("auc_points", "log_loss_percent"):
            found = interval([each[name] for each in own])
            cells.append(f"{found.mean:.3f} ± {found.margin:.3f}")
        rows.append(cells)
    unbroken = np.mean([each["unbroken"]["auc"] for each in runs])
    print_table(
        f"Dense Adam, {len(seeds)} seeds; AUC without restores {unbroken:.4f}",
        ("run", "motion, 4-bit steps", "points of AUC lost", "log loss, % more"),
        rows,
    )
    write_figures(args.json, runs)


if __name__ == "__main__":
    main()
