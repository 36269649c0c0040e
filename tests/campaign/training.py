"""The train state of the campaign: small enough to be saved thousands of times, known exactly.

Two tables, one stored exactly and one in 4 bits, an optimizer slot, and dense leaves. Numpy trains
them, so that what a step must come back as is known without any checkpoint. With `--sums` the
second table has moments of its gradients too, and so many rows that differences are packed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import cnr_jax as cnr

# Set where rows are stored as sums of integers, in this process and those that it starts.
SUMS = "CNR_CAMPAIGN_SUMS"
HAS_SUMS = SUMS in os.environ
SHAPES = {"user": (24, 4), "item": (300 if HAS_SUMS else 24, 4)}
ITEM, MEANS, SQUARES = "['params']['item']", "['mu']['item']", "['nu']['item']"
QUANTIZED = frozenset({ITEM, MEANS, SQUARES} if HAS_SUMS else {ITEM})
IDS_PER_STEP = 4
Values = dict[str, np.ndarray]


def first_state() -> dict[str, Any]:
    """The state before step 0, of numpy arrays."""
    rng = np.random.default_rng(3)
    params = {k: rng.normal(size=shape) for k, shape in SHAPES.items()}
    moments = {k: {"item": np.zeros(SHAPES["item"], np.float32)} for k in ("mu", "nu")}
    return {
        **(moments if HAS_SUMS else {}),
        "params": {k: v.astype(np.float32) for k, v in params.items()},
        "acc": {"user": np.zeros(SHAPES["user"][0], np.float32)},
        "w": np.linspace(-1, 1, 6, dtype=np.float32),
        "step": -1,
    }


def ids_of(step: int, salt: int = 0) -> dict[str, np.ndarray]:
    """The rows that a step changes, each once; runs of other salts take other ways."""
    rng = np.random.default_rng((salt, step))
    return {
        k: rng.choice(rows, IDS_PER_STEP, replace=False).astype(np.int32)
        for k, (rows, _) in SHAPES.items()
    }


def trained(state: dict[str, Any], step: int, salt: int = 0) -> dict[str, Any]:
    """The state after one more step; the state given is left alone."""
    state = copy.deepcopy(state)
    change = np.float32(0.25 + step / 8 + salt)
    for k, ids in ids_of(step, salt).items():
        state["params"][k][ids] += (
            change * np.cos(np.arange(4, dtype=np.float32))[:, None]
        )
    if HAS_SUMS:
        ids = ids_of(step, salt)["item"]
        for k, rate, power in (("mu", 0.1, 1), ("nu", 0.001, 2)):
            rows = state[k]["item"]
            rows[ids] += np.float32(rate) * (change**power - rows[ids])
    state["acc"]["user"][ids_of(step, salt)["user"]] += change
    state["w"] += change
    state["step"] = step
    return state


def state_after(step: int, salts: Mapping[int, int] = {}) -> dict[str, Any]:
    """The state after a step of a run that nothing interrupts and nothing quantizes.

    Args:
        step: the last one.
        salts: of the steps that have another than 0.
    """
    state = first_state()
    for number in range(step + 1):
        state = trained(state, number, salts.get(number, 0))
    return state


def values_of(state: Any) -> Values:
    """All leaves by path, on the host."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def differing(got: Values, want: Values) -> list[str]:
    """Paths of leaves that do not have the same bits, or that only one of the two has."""
    found = sorted(got.keys() ^ want.keys())
    for path in sorted(got.keys() & want.keys()):
        a, b = got[path], want[path]
        if a.shape != b.shape or a.dtype != b.dtype or a.tobytes() != b.tobytes():
            found.append(path)
    return found


def on_device(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a train loop has it: of jax arrays."""
    return jax.tree.map(
        lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, state
    )


def on_host(state: Any) -> dict[str, Any]:
    """The state as `trained` takes it."""
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, state)


def tables_of(state: Any) -> cnr.Tables:
    pairs = [("mu", "nu")] if HAS_SUMS else []
    specs = {"user": cnr.TableSpec(), "item": cnr.TableSpec(moments=pairs)}
    return cnr.find_tables(state, specs)
