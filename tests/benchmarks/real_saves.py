"""The byte model of `traces.py` against real saves of `cnr_jax.CheckpointManager`."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
from schedules import follow
from traces import ByteModel, Trace, find_touched

from cnr_jax.policy import Policy

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def compare(trace: Trace, saves: int, model: ByteModel, policy: Policy) -> dict:
    """Saves a trace for real, on one device, and as the model has it.

    Returns:
        For each save its bytes as written and as modelled, those that merges have written, and the
        kinds of both.
    """
    modelled = follow(policy, find_touched(trace, saves).costs(model))
    reports = save_trace(trace, saves, model, policy)
    written = np.array([report.total_bytes for report in reports])
    merged = sum(report.merged_bytes for report in reports)
    merged_modelled = int((modelled.stored - modelled.written).sum())
    return {
        "trace": trace.name,
        "saves": saves,
        "policy": policy.name,
        "kinds_written": [report.kind for report in reports],
        "kinds_modelled": [
            "full" if parent == save else "delta"
            for save, parent in enumerate(modelled.parents)
        ],
        "bytes_written": written.tolist(),
        "bytes_modelled": modelled.written.tolist(),
        "merged_bytes": merged,
        "merged_bytes_modelled": merged_modelled,
        "merged_error": merged_modelled / merged - 1 if merged else 0.0,
        "largest_error": float(np.abs(modelled.written / written - 1).max()),
        "total_error": float(modelled.written.sum() / written.sum() - 1),
    }


def save_trace(trace: Trace, saves: int, model: ByteModel, policy: Policy) -> list[Any]:
    """Saves random tables whose rows are touched as the trace has it; returns the reports."""
    import jax
    import jax.numpy as jnp

    import cnr_jax as cnr

    names = [f"table{i}" for i in range(len(trace.rows))]
    tables = {
        name: jax.random.normal(jax.random.key(i), (rows, model.dim))
        for i, (name, rows) in enumerate(zip(names, trace.rows, strict=True))
    }
    slots = {name: jnp.zeros(len(table)) for name, table in tables.items()}
    state = {"params": tables, "accumulator": slots}
    found = cnr.find_tables(state, names)
    touched = cnr.init_touched(state, found)
    reports: list[Any] = []
    options = cnr.Options(bits=model.bits, policy=policy, on_save=reports.append)

    @partial(jax.jit, donate_argnums=0)
    def record(touched: Any, ids: Any) -> Any:
        return cnr.record(touched, {n: ids[:, i] for i, n in enumerate(names)})

    # One shape for all windows: one compilation. Repeating a look-up changes nothing.
    length = -(-len(trace.ids) // saves)
    with (
        tempfile.TemporaryDirectory() as root,
        cnr.CheckpointManager(root, tables=found, options=options) as manager,
    ):
        for step, window in enumerate(trace.windows(saves)):
            fill = np.repeat(window[-1:], length - len(window), axis=0)
            touched = record(touched, np.concatenate([window, fill]))
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            # In the model a merge ends before the next save.
            while manager._handler.lifecycle.merging.is_busy:
                time.sleep(0.02)
    return reports
