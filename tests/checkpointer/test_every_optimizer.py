"""No optimizer of optax passes silently wrong, whichever rows it moves.

Each is trained for fifty steps on a sharded table and looked at now and then, as a save would.
With fingerprints the rows found are those that changed; with recorded rows the audit raises at the
first save that would lie. Which that is follows from the true states, which are kept in numpy.

Ten, one for each way in which states differ, are saved and restored too; `-m slow` does so with
all: with fingerprints every step comes back bit for bit, with recorded rows all before the lie.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

import cnr_jax as cnr
from cnr_jax.checkpointer.tracking.tracker import ChangedRows, Tracker
from cnr_jax.errors import AuditError
from cnr_jax.state.find import Table
from cnr_jax.state.table import split

from ..conftest import mesh_within

# Some of what optax still offers it advises against.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("unsynced"),
]

ROWS, DIM, BATCH, STEPS, SAVES = 512, 8, 16, 50, 6
LR = 0.05

# ---- which optimizers ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """How one optimizer is trained.

    Attributes:
        make: makes the optimizer.
        moves: whether rows change that `record` was not told of: then recorded rows do
            not do, and the audit must say so. None: it takes rounding to tell.
        names: of the tables.
        per_example: whether it wants a gradient for each example.
        lookahead: whether its parameters come in a fast and a slow copy.
        pipelined: whether a step applies the gradients of the batch before.
        record_applied: then, whether `record` is told of that batch, as it should.
        copy: makes, from a copy of the parameters, their new values and the number of
            the step, what the state keeps beside the parameters.
        every: saves only at multiples of this many steps.
        extra: what its update is told beside gradients and parameters.
        warm: whether its state gets its structure in the first update.
    """

    make: Callable[[], Any]
    moves: bool | None
    names: tuple[str, ...] = ("item",)
    per_example: bool = False
    lookahead: bool = False
    pipelined: bool = False
    record_applied: bool = False
    copy: Callable[[Any, Any, Any], Any] | None = None
    every: int = 1
    extra: tuple[str, ...] = ("value", "grad", "value_fn")
    warm: bool = False


def _sgd(*before: Any) -> Any:
    return optax.chain(*before, optax.sgd(LR))


LABELS = {"item": "table", "dense": "dense"}
TABLE_ONLY = {"item": True, "dense": False}
DENSE_ONLY = {"item": False, "dense": True}


def _every_other(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _ema(copy: Any, params: Any, step: Any) -> Any:
    return optax.incremental_update(params, copy, 0.1)


def _swa(copy: Any, params: Any, step: Any) -> Any:
    n = step // 5
    mean = jax.tree.map(lambda c, p: c + (p - c) / (n + 1), copy, params)
    return jax.tree.map(lambda m, c: jnp.where(step % 5 == 4, m, c), mean, copy)


def _still(make: Callable[[], Any], **how: Any) -> Case:
    return Case(make, moves=False, **how)


def _moves(make: Callable[[], Any], **how: Any) -> Case:
    return Case(make, moves=True, **how)


# The first word of a name is that of the optimizer in optax or optax.contrib.
OPTIMIZERS: dict[str, Case] = {
    "sgd": _still(lambda: optax.sgd(LR)),
    "sgd, momentum": _moves(lambda: optax.sgd(LR, 0.9)),
    "sgd, nesterov": _moves(lambda: optax.sgd(LR, 0.9, nesterov=True)),
    "sign_sgd": _still(lambda: optax.sign_sgd(LR)),
    "signum": _moves(lambda: optax.signum(LR)),
    "noisy_sgd": _moves(lambda: optax.noisy_sgd(LR, key=3)),
    "polyak_sgd": _still(lambda: optax.polyak_sgd(0.1)),
    "adagrad": _still(lambda: optax.adagrad(LR)),
    "adabelief": _moves(lambda: optax.adabelief(LR)),
    "adadelta": _moves(lambda: optax.adadelta(LR)),
    "adafactor": _moves(lambda: optax.adafactor(LR)),
    "adafactor, factored": _moves(lambda: optax.adafactor(LR, 8)),
    "adam": _moves(lambda: optax.adam(LR)),
    "adam, bfloat16 mu": _moves(lambda: optax.adam(LR, mu_dtype=jnp.bfloat16)),
    "adamax": _moves(lambda: optax.adamax(LR)),
    "adamaxw": _moves(lambda: optax.adamaxw(LR)),
    "adamw": _moves(lambda: optax.adamw(LR)),
    "adan": _moves(lambda: optax.adan(LR)),
    "amsgrad": _moves(lambda: optax.amsgrad(LR)),
    "fromage": _moves(lambda: optax.fromage(LR)),
    "lamb": _moves(lambda: optax.lamb(LR)),
    "lars": _moves(lambda: optax.lars(LR)),
    "lbfgs": _moves(
        lambda: optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(2))
    ),
    "lion": _moves(lambda: optax.lion(LR)),
    "nadam": _moves(lambda: optax.nadam(LR)),
    "nadamw": _moves(lambda: optax.nadamw(LR)),
    "novograd": _moves(lambda: optax.novograd(LR)),
    "optimistic_adam": _moves(lambda: optax.optimistic_adam(LR)),
    "optimistic_adam_v2": _moves(lambda: optax.optimistic_adam_v2(LR)),
    "optimistic_gradient_descent": _moves(
        lambda: optax.optimistic_gradient_descent(LR)
    ),
    "radam": _moves(lambda: optax.radam(LR)),
    "rmsprop": _moves(lambda: optax.rmsprop(LR)),
    "rmsprop, centered": _moves(lambda: optax.rmsprop(LR, centered=True)),
    "rprop": _moves(lambda: optax.rprop(LR)),
    "sm3": _moves(lambda: optax.sm3(LR)),
    "yogi": _moves(lambda: optax.yogi(LR)),
    "acprop": _moves(lambda: contrib.acprop(LR)),
    "ademamix": _moves(lambda: contrib.ademamix(LR)),
    "adopt": _moves(lambda: contrib.adopt(LR)),
    "cocob": Case(lambda: contrib.cocob(), moves=None),
    "dadapt_adamw": _moves(lambda: contrib.dadapt_adamw()),
    "dog": _still(lambda: contrib.dog()),
    "dowg": _still(lambda: contrib.dowg()),
    "dpsgd": _moves(lambda: contrib.dpsgd(LR, 1.0, 0.1, 3), per_example=True),
    "galore": _moves(lambda: contrib.galore(LR, rank=4, update_proj_gap=20)),
    "madgrad": _moves(lambda: contrib.madgrad(LR)),
    "momo": _moves(lambda: contrib.momo()),
    "momo_adam": _moves(lambda: contrib.momo_adam()),
    "muon": _moves(lambda: contrib.muon(LR)),
    "prodigy": _moves(lambda: contrib.prodigy()),
    "schedule_free_adamw": _moves(lambda: contrib.schedule_free_adamw(LR)),
    "schedule_free_sgd": _moves(lambda: contrib.schedule_free_sgd(LR)),
    "simplified_ademamix": _moves(lambda: contrib.simplified_ademamix(LR)),
    "sophia": _moves(lambda: contrib.sophia(LR), extra=("obj_fn",)),
}
WRAPPERS: dict[str, Case] = {
    "MultiSteps, sgd": _moves(lambda: optax.MultiSteps(optax.sgd(LR), 4)),
    "MultiSteps, adagrad": _moves(lambda: optax.MultiSteps(optax.adagrad(LR), 4)),
    "MultiSteps, adam": _moves(lambda: optax.MultiSteps(optax.adam(LR), 4)),
    # Its sums are put back to zeros of either sign, and made positive in the next step.
    "MultiSteps, saved when applied": _moves(
        lambda: optax.MultiSteps(optax.sgd(LR), 4), every=4
    ),
    "add_decayed_weights": _moves(lambda: _sgd(optax.add_decayed_weights(0.01))),
    "add_noise": _moves(lambda: _sgd(optax.add_noise(0.1, 0.5, 3))),
    "chain, clip": _still(lambda: _sgd(optax.clip(0.1), optax.clip_by_global_norm(1))),
    "monitor": _moves(
        lambda: optax.chain(
            optax.monitor({"size": optax.measure_with_ema(optax.tree.norm, 0.9)}),
            optax.adam(LR),
        ),
        warm=True,
    ),
    "scale_by_backtracking_linesearch": _still(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4))
    ),
    "apply_if_finite": _still(lambda: optax.apply_if_finite(optax.adagrad(LR), 3)),
    "masked": _moves(lambda: _sgd(optax.masked(optax.adam(1.0), TABLE_ONLY))),
    "masked, dense only": _still(
        lambda: _sgd(optax.masked(optax.adam(1.0), DENSE_ONLY))
    ),
    "multi_transform": _still(
        lambda: optax.multi_transform(
            {"table": optax.adagrad(LR), "dense": optax.adamw(LR)}, LABELS
        )
    ),
    "partition": _moves(
        lambda: optax.partition(
            {"table": optax.adam(LR), "dense": optax.sgd(LR)}, LABELS
        )
    ),
    "inject_hyperparams": _still(lambda: optax.inject_hyperparams(optax.adagrad)(LR)),
    "lookahead": _moves(lambda: optax.lookahead(optax.sgd(LR), 5, 0.5), lookahead=True),
    "schedule_free": _moves(lambda: contrib.schedule_free(optax.sgd(LR), LR)),
    "mechanize": _moves(lambda: contrib.mechanize(optax.sgd(LR))),
    "sam": _moves(lambda: contrib.sam(optax.sgd(LR), optax.sgd(0.1)), extra=()),
    "sam, opaque": _still(
        lambda: contrib.sam(optax.sgd(LR), optax.sgd(0.1), opaque_mode=True),
        extra=("grad_fn",),
    ),
    "reduce_on_plateau": _still(lambda: _sgd(contrib.reduce_on_plateau(patience=2))),
    "sgd, parameters' average": _moves(lambda: optax.sgd(LR), copy=_ema),
    "sgd, stochastic weight averaging": _moves(lambda: optax.sgd(LR), copy=_swa),
    "sgd, pipelined": _still(
        lambda: optax.sgd(LR), pipelined=True, record_applied=True
    ),
    "sgd, pipelined, wrong ids": _moves(lambda: optax.sgd(LR), pipelined=True),
    "adagrad, pipelined": _still(
        lambda: optax.adagrad(LR), pipelined=True, record_applied=True
    ),
}
# Building blocks, all in one state, each with a table of its own.
PARTS: dict[str, Callable[[], Any]] = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "apply_every": lambda: optax.apply_every(4),
    "centralize": lambda: optax.centralize(),
    "clip": lambda: optax.clip(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.scale(2.0), _every_other
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(1.0), _every_other
    ),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(optax.adam(1.0)),
    "freeze": lambda: optax.freeze(True),
    "identity": lambda: optax.identity(),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(
        optax.adam
    )(1.0),
    "keep_params_nonnegative": lambda: optax.keep_params_nonnegative(),
    "named_chain": lambda: optax.named_chain(("first", optax.adam(1.0))),
    "normalize": lambda: contrib.normalize(),
    "normalize_by_update_norm": lambda: optax.normalize_by_update_norm(),
    "scale": lambda: optax.scale(2.0),
    "scale_by_distance_over_gradients": (
        lambda: optax.scale_by_distance_over_gradients()
    ),
    "scale_by_param_block_norm": lambda: optax.scale_by_param_block_norm(),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: 0.9**step),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(1.0), freeze_mask=False
    ),
    "set_to_zero": lambda: optax.set_to_zero(),
    "snapshot": lambda: optax.snapshot("size", optax.tree.norm),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(1.0)
    ),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda g, p: 2 * g
    ),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(1.0)),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda g: g, 0.9),
    "zero_nans": lambda: optax.zero_nans(),
}


def _all_parts() -> Any:
    """Each part trains the table that bears its name."""
    parts: dict[Any, Any] = {
        k: optax.chain(make(), optax.scale(-LR)) for k, make in PARTS.items()
    }

    def label(params: Any) -> Any:
        return {k: k for k in PARTS} | {"dense": "dense"}

    parts["dense"] = optax.sgd(LR)
    return optax.partition(parts, label)


CASES = OPTIMIZERS | WRAPPERS | {"parts": _moves(_all_parts, names=tuple(PARTS))}
# Building blocks that are tried inside of an optimizer.
INSIDE = {
    "clip_by_block_rms": "adafactor",
    "differentially_private_aggregate": "dpsgd",
    "hutchinson_estimator_diag_hessian": "sophia",
    "scale_by_acprop": "acprop",
    "scale_by_adadelta": "adadelta",
    "scale_by_adam": "adam",
    "scale_by_adamax": "adamax",
    "scale_by_adan": "adan",
    "scale_by_ademamix": "ademamix",
    "scale_by_adopt": "adopt",
    "scale_by_amsgrad": "amsgrad",
    "scale_by_belief": "adabelief",
    "scale_by_cocob": "cocob",
    "scale_by_factored_rms": "adafactor",
    "scale_by_galore": "galore",
    "scale_by_lbfgs": "lbfgs",
    "scale_by_learning_rate": "sgd",
    "scale_by_lion": "lion",
    "scale_by_madgrad": "madgrad",
    "scale_by_muon": "muon",
    "scale_by_novograd": "novograd",
    "scale_by_optimistic_gradient": "optimistic_gradient_descent",
    "scale_by_param_block_rms": "adafactor",
    "scale_by_polyak": "polyak_sgd",
    "scale_by_radam": "radam",
    "scale_by_rms": "rmsprop",
    "scale_by_rprop": "rprop",
    "scale_by_rss": "adagrad",
    "scale_by_sign": "sign_sgd",
    "scale_by_simplified_ademamix": "simplified_ademamix",
    "scale_by_sm3": "sm3",
    "scale_by_stddev": "rmsprop",
    "scale_by_trust_ratio": "lamb",
    "scale_by_yogi": "yogi",
    "scale_by_zoom_linesearch": "lbfgs",
    "trace": "sgd",
}
# Functions of optax without an annotation that tells they are no transformations.
OTHERS = {
    "matrix_inverse_pth_root",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}


# ---- training -----------------------------------------------------------------------------


def _loss(params: Any, ids: jax.Array) -> jax.Array:
    """How far the rows looked up are from what their ids stand for."""
    target = jnp.cos(ids[:, None] * jnp.arange(1.0, 5.0))
    rows = sum(table[ids] for k, table in params.items() if k != "dense")
    got = jnp.tanh(rows @ params["dense"])
    return jnp.mean((got - target) ** 2)


# Compiled once for all optimizers.
_value_and_grad = jax.jit(jax.value_and_grad(_loss))
_grad_of_each = jax.jit(jax.vmap(jax.grad(_loss), (None, 0)))
_record = jax.jit(cnr.record)


def _put(values: Any) -> Any:
    """Places leaves with a row for each of the table's over two devices."""
    mesh = mesh_within((2,), ("rows",), (AxisType.Auto,))

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P("rows") if leaf.shape[:1] == (ROWS,) else P())

    return jax.device_put(values, jax.tree.map(sharding, values))


class Trainer:
    """Trains a table whose ids follow a power law: many rows are never looked up."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        tx = case.make()
        if isinstance(tx, optax.MultiSteps):
            tx = tx.gradient_transformation()
        self.tx = optax.with_extra_args_support(tx)
        weights = 1.0 / np.arange(1, ROWS + 1) ** 1.1
        self.ids = self.rng.permutation(ROWS)[
            self.rng.choice(ROWS, (STEPS, BATCH), p=weights / weights.sum())
        ].astype(np.int32)
        self.initial = _put(self._initial())
        both = {"fast item": "fast/item", "slow item": "slow/item"}
        names = both if case.lookahead else case.names
        self.tables = cnr.find_tables(self.initial, names)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.initial)
        # Compiling them takes longer than all the rest, and how fast they run is of no matter.
        self._apply = jax.jit(
            self._update,
            out_shardings=shardings,
            compiler_options={"xla_backend_optimization_level": 0},
        )

    def _initial(self) -> dict[str, Any]:
        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(self.rng.normal(size=shape), jnp.float32)

        params: Any = {name: normal(ROWS, DIM) for name in self.case.names}
        params["dense"] = normal(DIM, 4)
        if self.case.lookahead:
            params = optax.LookaheadParams.init_synced(params)
        opt_state = self.tx.init(params)
        if self.case.warm:
            opt_state = self.tx.update(params, opt_state, params)[1]
        state = {"params": params, "opt_state": opt_state, "step": jnp.int32(0)}
        if self.case.copy:
            state["copy"] = params
        if self.case.pipelined:
            state["pending"] = {
                "ids": jnp.zeros(BATCH, jnp.int32),
                "item": jnp.zeros((BATCH, DIM)),
                "dense": jnp.zeros_like(params["dense"]),
            }
        return state

    def step(self, state: Any, touched: cnr.Touched, t: int) -> Any:
        """One step of training: the state and the touched rows after it."""
        case, params, ids = self.case, state["params"], jnp.asarray(self.ids[t])
        fast = params.fast if case.lookahead else params
        value, grads = _value_and_grad(fast, ids)
        if case.per_example:
            grads = _grad_of_each(fast, ids[:, None])
        rows = state["pending"]["ids"] if case.record_applied else ids
        touched = _record(touched, {name: rows for name in self.tables})
        return self._apply(state, value, grads, ids), touched

    def _update(self, state: Any, value: Any, grads: Any, ids: Any) -> Any:
        case, params, new = self.case, state["params"], dict(state)
        if case.pipelined:
            new["pending"] = {"ids": ids, "item": grads["item"][ids]}
            new["pending"]["dense"] = grads["dense"]
            rows = jnp.zeros((ROWS, DIM)).at[state["pending"]["ids"]]
            grads = state["pending"] | {"item": rows.set(state["pending"]["item"])}
            del grads["ids"]
        value_fn = functools.partial(_loss, ids=ids)
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        extra |= {"obj_fn": value_fn, "grad_fn": lambda p, _: jax.grad(value_fn)(p)}
        updates, new["opt_state"] = self.tx.update(
            grads, state["opt_state"], params, **{k: extra[k] for k in case.extra}
        )
        new["params"] = optax.apply_updates(params, updates)
        new["step"] = state["step"] + 1
        if case.copy:
            new["copy"] = case.copy(state["copy"], new["params"], state["step"])
        return new

    def run(self) -> list[Saved]:
        """The states to be saved: at random steps, the last one among them."""
        every = self.case.every
        last = STEPS - STEPS % every
        steps = self.rng.choice(np.arange(every, last, every), SAVES - 1, False)
        state, saves = self.initial, []
        touched = cnr.init_touched(state, self.tables)
        for t in range(STEPS):
            state, touched = self.step(state, touched, t)
            if t + 1 in (*steps, last):
                saves.append(Saved(t + 1, state, touched, _values(state)))
        return saves


@dataclasses.dataclass(frozen=True)
class Saved:
    """What is to be saved at a step, and what must come back."""

    step: int
    state: Any
    touched: cnr.Touched
    truth: dict[str, np.ndarray]


def _values(state: Any) -> dict[str, np.ndarray]:
    """All leaves by path, on the host."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _host(leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _host(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


# ---- saving and comparing -----------------------------------------------------------------


def _options(tracking: Any, seed: int, **options: Any) -> cnr.Options:
    policies = (cnr.Consecutive(max_chain=4), cnr.OneShot(), cnr.Intermittent())
    policy = policies[seed % 3]
    return cnr.Options(policy=policy, codec="raw", tracking=tracking, **options)


def _assert_all_restore(root: Path, tables: cnr.Tables, saves: list[Saved]) -> None:
    """Every step comes back bit for bit, and there are no others."""
    # Such a manager does not hash all of what it restores.
    options = cnr.Options(tracking="recorded")
    with cnr.CheckpointManager(root, tables=tables, options=options) as reader:
        assert reader.all_steps() == [saved.step for saved in saves]
        for saved in saves:
            args = cnr.args.Restore(saved.state)
            _assert_same(reader.restore(saved.step, args=args).state, saved)


def _assert_same(state: Any, saved: Saved) -> None:
    got = _values(state)
    assert got.keys() == saved.truth.keys()
    for path, want in saved.truth.items():
        where = f"step {saved.step}, {path}"
        assert (got[path].shape, got[path].dtype) == (want.shape, want.dtype), where
        np.testing.assert_array_equal(_bits(got[path]), _bits(want), err_msg=where)


def _bits(values: np.ndarray) -> np.ndarray:
    """Values as bytes, by the first axis: zeros differ by sign, NaNs are alike."""
    values = np.ascontiguousarray(np.atleast_1d(values))
    return values.view(np.uint8).reshape(len(values), -1)


def _changed(table: Table, before: Saved, after: Saved) -> np.ndarray:
    """bool[rows]: whether any bit of a row or its slots is another one."""
    rows = np.zeros(ROWS, bool)
    for leaf in table.leaves:
        old, new = (_bits(s.truth["/".join(leaf.path)]) for s in (before, after))
        rows |= (old != new).any(axis=1)
    return rows


def _rows_of(report: cnr.SaveReport, tables: cnr.Tables, saves: list[Saved]) -> int:
    """How many rows a delta must hold: those that changed in a save after its parent."""
    assert report.parent is not None
    since = [s for s in saves if report.parent <= s.step <= report.step]
    return sum(
        np.logical_or.reduce(
            [_changed(table, *pair) for pair in itertools.pairwise(since)]
        ).sum()
        for table in tables.values()
    )


def _first_lie(tables: cnr.Tables, saves: list[Saved]) -> int | None:
    """The first step whose delta would lack a row that changed since the save before."""
    for before, after in itertools.pairwise(saves):
        for table in tables.values():
            stamps = np.asarray(after.touched.stamps[table.name])
            unrecorded = stamps <= int(before.touched.clock)
            if _changed(table, before, after)[unrecorded].any():
                return after.step
    return None


# ---- tests --------------------------------------------------------------------------------


# Rows that stay, slots that move, of few bits, smaller than the table or of other rows, keys,
# sums of several steps, parameters twice, copies beside them, updates that come late.
SAVED = [
    "sgd",
    "adagrad",
    "adam, bfloat16 mu",
    "adafactor, factored",
    "lbfgs",
    "noisy_sgd",
    "MultiSteps, sgd",
    "lookahead",
    "sgd, parameters' average",
    "sgd, pipelined, wrong ids",
]


def _rows_found(
    tracker: Tracker, found: ChangedRows, clock: int
) -> dict[str, set[int]]:
    """Rows of each table that a delta on a save at this clock would hold."""
    chosen = tracker.choose(found, clock).positions
    rows: dict[str, set[int]] = {}
    ranges = found.shards.tiling.ranges
    for (table, (start, stop)), some in zip(ranges, chosen, strict=True):
        positions = range(stop - start) if some is None else some.tolist()
        rows.setdefault(table, set()).update(start + at for at in positions)
    return rows


def _rows_changed(tables: cnr.Tables, saves: list[Saved]) -> dict[str, set[int]]:
    """Rows of each table that changed from some of the saves to the next."""
    return {
        name: {
            row
            for pair in itertools.pairwise(saves)
            for row in np.flatnonzero(_changed(table, *pair)).tolist()
        }
        for name, table in tables.items()
    }


# Those that take longest, and those whose state and moves are like those of another: the one that
# is before it here, or in its name.
ALIKE = {
    *("lbfgs", "lookahead", "adafactor, factored", "MultiSteps, sgd", "monitor"),
    *("sign_sgd", "signum", "sgd, nesterov", "optimistic_gradient_descent"),
    *("adabelief", "adadelta", "adamax", "adamaxw", "adamw", "fromage", "lamb"),
    *("nadam", "nadamw", "optimistic_adam", "optimistic_adam_v2", "radam", "yogi"),
    *("rmsprop", "rmsprop, centered", "acprop", "adopt", "ademamix", "momo_adam"),
    *("simplified_ademamix", "dadapt_adamw", "dowg", "schedule_free_adamw"),
    *("schedule_free", "MultiSteps, adagrad", "masked, dense only", "sam, opaque"),
    *("sgd, stochastic weight averaging", "adagrad, pipelined"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in CASES],
)
def test_no_optimizer_passes_silently_wrong(name: str, tmp_path: Path) -> None:
    seed = zlib.crc32(name.encode())
    trainer = Trainer(CASES[name], seed)
    tables, saves = trainer.tables, trainer.run()
    lie = _first_lie(tables, saves)
    assert CASES[name].moves in (None, lie is not None)
    prints, record = (
        Tracker(cnr.Options(tracking=mode)) for mode in ("fingerprint", "recorded")
    )
    clocks: list[int] = []
    for number, saved in enumerate(saves):
        arrays, _ = split(saved.state, tables)
        found = prints.find(saved.state, None, tables, arrays)
        prints.keep(found, found.stamps)
        # On the save before, and on the first one.
        for parent in {number - 1, 0} - {-1, number}:
            changed = _rows_changed(tables, saves[parent : number + 1])
            assert _rows_found(prints, found, clocks[parent]) == changed
        clocks.append(found.stamps.clock)
    for before, saved in itertools.pairwise([None, *saves]):
        arrays, _ = split(saved.state, tables)
        if saved.step == lie:
            with pytest.raises(AuditError, match="|".join(tables)):
                record.find(saved.state, saved.touched, tables, arrays)
            break
        found = record.find(saved.state, saved.touched, tables, arrays)
        record.keep(found, found.stamps)
        if before is not None:
            clock = int(before.touched.clock)
            rows = _rows_found(record, found, clock)
            for table, changed in _rows_changed(tables, [before, saved]).items():
                assert changed <= rows[table]
    if name in SAVED:
        _save_and_restore(trainer, saves, seed, lie, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SAVED])
def test_every_other_optimizer_is_saved_and_restored(name: str, tmp_path: Path) -> None:
    seed = zlib.crc32(name.encode())
    trainer = Trainer(CASES[name], seed)
    saves = trainer.run()
    lie = _first_lie(trainer.tables, saves)
    _save_and_restore(trainer, saves, seed, lie, tmp_path)


def _save_and_restore(
    trainer: Trainer, saves: list[Saved], seed: int, lie: int | None, tmp_path: Path
) -> None:
    """Both ways; a run that records rows ends at the save that would lie."""
    tables = trainer.tables
    reports: list[cnr.SaveReport] = []
    options = _options("fingerprint", seed, on_save=reports.append)
    root = tmp_path / "fingerprint"
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for saved in saves:
            manager.save(saved.step, args=cnr.args.Save(saved.state))
    _assert_all_restore(root, tables, saves)
    deltas = [report for report in reports if report.kind == "delta"]
    assert deltas and len(reports) == SAVES
    for report in deltas:
        assert report.rows == _rows_of(report, tables, saves)

    root, options = tmp_path / "recorded", _options("recorded", seed + 1)
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for saved in saves:
            args = cnr.args.Save(saved.state, saved.touched)
            if saved.step == lie:
                with pytest.raises(AuditError, match="|".join(tables)):
                    manager.save(saved.step, args=args)
                break
            manager.save(saved.step, args=args)
    true = [saved for saved in saves if lie is None or saved.step < lie]
    _assert_all_restore(root, tables, true)


@pytest.mark.parametrize("name", ["adam", "MultiSteps, sgd"])
def test_without_audit_a_step_comes_back_wrong(name: str, tmp_path: Path) -> None:
    trainer = Trainer(CASES[name], 1)
    tables, saves = trainer.tables, trainer.run()
    options = _options("recorded", 0, audit_bytes=0)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for saved in saves:
            manager.save(saved.step, args=cnr.args.Save(saved.state, saved.touched))
    lie = _first_lie(tables, saves)
    with pytest.raises(AssertionError, match=f"step {lie}, .*item"):
        _assert_all_restore(tmp_path, tables, saves)


@pytest.mark.parametrize(
    ("name", "tracking"),
    [
        ("adamw", "fingerprint"),
        ("MultiSteps, adam", "fingerprint"),
        ("adagrad, pipelined", "recorded"),
    ],
)
def test_resumed_run_goes_on_as_if_never_stopped(
    name: str, tracking: str, tmp_path: Path
) -> None:
    trainer = Trainer(CASES[name], 2)
    tables, saves = trainer.tables, trainer.run()
    options = _options(tracking, zlib.crc32(name.encode()))
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for saved in saves[:3]:
            manager.save(saved.step, args=cnr.args.Save(saved.state, saved.touched))
    reports: list[cnr.SaveReport] = []
    options = dataclasses.replace(options, tracking=None, on_save=reports.append)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        restored = manager.restore(None, args=cnr.args.Restore(trainer.initial))
        state, touched = restored
        for before, saved in itertools.pairwise(saves[2:]):
            for t in range(before.step, saved.step):
                state, touched = trainer.step(state, touched, t)
            _assert_same(state, saved)
            manager.save(saved.step, args=cnr.args.Save(state, touched))
    assert "delta" in [report.kind for report in reports]
    _assert_all_restore(tmp_path, tables, saves)


def _transformations() -> Iterator[str]:
    """The public functions of optax that make transformations, or may."""
    for module in (optax, contrib):
        for name, value in vars(module).items():
            function = getattr(value, "func", value)  # a partial's
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            made = inspect.signature(function).return_annotation
            if made is inspect.Signature.empty or "GradientTransformation" in str(made):
                yield name


def test_no_optimizer_of_optax_is_forgotten() -> None:
    cases = {name.split(",")[0] for name in CASES} - {"parts"}
    known = cases | set(PARTS) | set(INSIDE) | OTHERS
    assert set(_transformations()) | {"MultiSteps"} == known


def test_parts_are_inside_of_their_optimizers() -> None:
    for part, name in INSIDE.items():
        optimizer = getattr(contrib, name, None) or getattr(optax, name)
        assert name in CASES and f"{part}(" in inspect.getsource(optimizer), part
