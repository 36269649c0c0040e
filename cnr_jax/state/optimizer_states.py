"""Parts of a train state that are known to move rows that no batch looked up.

`record` stamps the rows of a batch. Most optimizers also move other rows: Adam's and
momentum's averages decay, weight decay shrinks every row. An audit of the rows finds out
that it happened. This module names the likely cause, for the error.

To remember: this explains, and decides nothing. A state shows only what an optimizer
stores there, so to find nothing here proves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from cnr_jax.state.mirrors import Mirror, Mirrors
from cnr_jax.state.paths import PathIndex, named_tuples
from cnr_jax.state.table import Path, Table
from cnr_jax.state.trees import is_copy

# The first group was measured on optax 0.2.8 (6 x 3 rows, a batch of two rows, then two
# of one): rows outside the later batches changed, in the parameter or in a slot. With
# sgd, sign_sgd and adagrad (ScaleByRssState) they did not.
_MEASURED_STATES = """
    DAdaptAdamWState EmaState FactoredState MadgradState MechanicState MultiStepsState
    MuonState ProdigyState ScaleByAdaDeltaState ScaleByAdamState ScaleByAdanState
    ScaleByAdemamixState ScaleByAmsgradState ScaleByBeliefState ScaleByLionState
    ScaleByNovogradState ScaleByOptimisticGradientState ScaleByRStdDevState
    ScaleByRmsState ScaleByRpropState ScaleBySM3State ScaleBySimplifiedAdEMAMixState
    ScheduleFreeState TraceState
"""
# Not measured, or not seen to move rows in that trial (COCOB). Their definitions do not
# promise an update of zero where the gradient is zero.
_PRESUMED_STATES = """
    AccumulateAvgUpdatesState COCOBState GaLoreState LookaheadParams MomoAdamState
    MomoState PerElementMeanAndSumSqDiffGradsState PerElementMeanAndVarianceEMAState
    SAMState ScaleByLBFGSState ScaleByRStdDevWithCountState ScaleByRmsWithCountState
    SophiaState
"""
_MOVING_STATES = frozenset((_MEASURED_STATES + _PRESUMED_STATES).split())
# The same by field name, for states that lost their classes (nnx.State). Names that are
# common words need another field of the optimizer beside them.
_MOVING_FIELDS = frozenset(
    """
    mu nu nu_max trace acc_grads avg_grad e_g e_x exp_avg exp_avg_sq grad_sum
    v_row v_col step_sizes prev_updates previous_gradient mean_grads mean_grads_ema
    variance_grads_ema
    """.split()
)
_MOVING_TOGETHER = {
    "v": {"v_row", "m"},  # adafactor; adan, or an Adam by hand
    "m": {"v", "n"},  # adan, simplified ademamix
    "n": {"m"},
    "g": {"m"},
    "m1": {"m2"},  # ademamix
    "m2": {"m1"},
    "z": {"weight_sum"},  # schedule_free
    "s": {"x0"},  # madgrad
    "x0": {"s"},
    "cache": {"adv_state", "steps_since_sync"},  # sam
}
_DECAY = "weight_decay"
_NOISE_STATES = frozenset({"AddNoiseState", "DifferentiallyPrivateAggregateState"})
_AT_MOST = 4  # parts to name: enough for one optimizer and what is around it


def moving_parts(state: Any, table: Table) -> tuple[str, ...]:
    """Lists parts of a state that are known to move rows that no batch looked up.

    Known are leaves that repeat the table's path, whether or not they are its slots: by
    the class of the optax state that holds them, or by name if the tree has lost its
    classes, as in `nnx.State`. Known too are noise, and a `weight_decay` in
    `optax.inject_hyperparams` that may not be zero.

    Not known, since nothing of it is stored: weight decay outside of
    `inject_hyperparams` (as in `chain(add_decayed_weights(...), sgd(...))`),
    `optax.fromage`, noise in a state without classes, regularisers in the loss, updates
    applied in a later step than the look-up (pipelining), optimizers this version does
    not know.

    Args:
        state: the train state, concrete or abstract; never changed, never raised about.
        table: a table of this state.

    Returns:
        Up to four short texts, slots first; empty if nothing is known.

    Example:
        >>> import jax.numpy as jnp
        >>> from cnr_jax.state.find import find_tables
        >>> params = {"user": jnp.zeros((8, 2))}
        >>> state = {"params": params, "opt_state": {"mu": params}}
        >>> moving_parts(state, find_tables(state, ["user"])["user"])
        ('opt_state/mu (a name of Adam, momentum or their like)',)

    Source: Check-N-Run (NSDI'22) tracks the rows that a training step looks up, which
    presumes an optimizer whose update is zero where the gradient is.
    """
    found: dict[str, None] = {}
    # Whatever the state holds, explaining an error must not put another in its place.
    with contextlib.suppress(Exception):
        for part in _moving_parts(state, table):
            found[part] = None
            if len(found) == _AT_MOST:
                break
    return tuple(found)


def _moving_parts(state: Any, table: Table) -> Iterator[str]:
    index = PathIndex(state)
    classes = {path: kind.__name__ for path, kind in named_tuples(state)}
    entry = index.by_path.get(table.path)
    mirrors = Mirrors(index).of(entry, {table.path}) if entry else []
    for mirror in mirrors:
        reason = _moves(mirror, index, classes)
        if reason:
            yield f"{'/'.join(mirror.holder)} {reason}"
    for node, text in _moving_everything(index, classes):
        if _concerns(node, mirrors):
            yield text


def _moves(mirror: Mirror, index: PathIndex, classes: dict[Path, str]) -> str | None:
    """Says why a leaf that repeats a table's path shows that rows move, if it does."""
    if not mirror.holder:
        return None
    above, field = mirror.holder[:-1], mirror.holder[-1]
    holder = classes.get(above)
    if holder in _MOVING_STATES:
        return f"of {holder}"
    if is_copy((field,)):
        return "(a copy that follows the parameters)"
    if holder is not None:
        return None  # adagrad, or a state of the user's own
    beside = {
        entry.path[len(above)]
        for entry in index.entries
        if len(entry.path) > len(above) and entry.path[: len(above)] == above
    }
    if field in _MOVING_FIELDS or _MOVING_TOGETHER.get(field, set()) & beside:
        return "(a name of Adam, momentum or their like)"
    return None


def _moving_everything(
    index: PathIndex, classes: dict[Path, str]
) -> Iterator[tuple[Path, str]]:
    """Lists transformations that move all rows: the node of each, and a text about it."""
    for entry in index.entries:
        scheduled = "hyperparams_states" in entry.path
        key = "hyperparams_states" if scheduled else "hyperparams"
        if key not in entry.path or not any(_DECAY in part for part in entry.parts):
            continue
        if scheduled or _may_be_nonzero(entry.value):
            node = entry.path[: entry.path.index(key)]
            yield node, f"{'/'.join(entry.path)} (weight decay)"
    for node, name in classes.items():
        if name in _NOISE_STATES:
            yield node, f"{'/'.join(node)} of {name} (noise)"


def _concerns(node: Path, mirrors: list[Mirror]) -> bool:
    """Tells whether a transformation at `node` applies to a table with these mirrors.

    A branch of `multi_transform` applies to the leaves that have slots in it. The state does
    not say whether a branch without slots applies: it is taken not to.
    """
    if any(mirror.holder[: len(node)] == node for mirror in mirrors):
        return True
    if "inner_states" not in node:
        return True
    cut = node.index("inner_states") + 2
    return any(mirror.holder[:cut] == node[:cut] for mirror in mirrors)


def _may_be_nonzero(value: Any) -> bool:
    try:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = value.addressable_data(0)  # a replicated scalar
        return bool(np.any(np.asarray(value)))
    except Exception:
        return True  # abstract, traced, donated, or in other processes only
