"""Slots of the optimizers are rounded by `slot_codec="auto"` as their kind allows."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import cnr_jax as cnr
from cnr_jax.optim import lazy_adam, lazy_sgd, rowwise_adagrad
from cnr_jax.rows.codecs.slots import slot_codec


@pytest.mark.parametrize(
    "optimizer",
    [lazy_adam(0.1), lazy_sgd(0.1, momentum=0.9), rowwise_adagrad(0.1)],
)
def test_all_slots_of_our_optimizers_are_known(optimizer) -> None:
    params = {"user": jnp.ones((8, 4))}
    state = {"params": params, "opt_state": optimizer.init(params)}
    slots = cnr.find_tables(state, ["user"])["user"].slots
    assert slots
    for slot in slots:
        assert slot_codec(slot.name).name != "raw", slot.name
