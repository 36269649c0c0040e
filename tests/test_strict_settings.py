"""Runs under what jax can be set to, to find mistakes in a user's programs.

Programs of this library are run in the same process, and partly traced in the same train step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from .conftest import xla_flags

_WORKER = Path(__file__).with_name("strict_worker.py")

# What forbids something that programs may do by accident, or leave behind.
_STRICT = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_transfer_guard": "disallow",
    "jax_array_garbage_collection_guard": "fatal",
}
# What forbids also what a program around these calls cannot do without.
_AROUND_CALLS = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_no_tracing": True,
    "jax_transfer_guard": "disallow_explicit",
}


def _run(*runs: dict[str, Any]) -> None:
    """Does runs in a process of their own, whose arguments `strict_worker.tried` has."""
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = xla_flags("--xla_force_host_platform_device_count=2")
    done = subprocess.run(
        [sys.executable, os.fspath(_WORKER), json.dumps(runs)],
        env=environment,
        capture_output=True,
        text=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    failed = "\n".join(
        f"{each['settings']}, {each['part']}:\n{each['trace']}"
        for each in said
        if each["error"]
    )
    assert said and not failed and not done.returncode, failed or done.stderr[-3000:]


def test_a_run_does_not_depend_on_how_strict_jax_is() -> None:
    _run(
        {
            "settings": _AROUND_CALLS,
            "how": "calls",
            "wanted": ["odd rows"],
            "tables": ["plain", "half"],
        },
        {
            "settings": _STRICT,
            "wanted": ["records", "lazy_adam", "audited device"],
            "tables": ["plain", "half"],
            # Programs for other rows: those of the run before are compiled.
            "width": 4,
        },
    )


# One setting a process, or some that have nothing to do with each other; `jax_default_device` is
# given by its number.
_EVERYWHERE: dict[str, dict[str, Any]] = {
    "rank": {"jax_numpy_rank_promotion": "raise"},
    "dtype": {"jax_numpy_dtype_promotion": "strict"},
    "transfers": {"jax_transfer_guard": "disallow"},
    "nan": {"jax_debug_nans": True},
    "infinite": {"jax_debug_infs": True},
    "not compiled": {"jax_disable_jit": True},
    "leaks": {"jax_check_tracer_leaks": True},
    "checks": {"jax_enable_checks": True},
    "collected": {"jax_array_garbage_collection_guard": "fatal"},
    "keys": {
        "jax_debug_key_reuse": True,
        "jax_legacy_prng_key": "error",
        "jax_default_prng_impl": "rbg",
    },
    "x64": {"jax_enable_x64": True},
    "asked for x64": {"jax_explicit_x64_dtypes": "error"},
    "device": {"jax_default_device": 1},
    "threads": {"jax_thread_guard": True, "check_vma": True},
    "partitioner": {"jax_use_shardy_partitioner": False},
    "forbidden": {
        "jax_allow_f16_reductions": False,
        "jax_check_static_indices": True,
        "jax_disallow_mesh_context_manager": True,
        "jax_threefry_partitionable": False,
        "jax_default_matmul_precision": "bfloat16",
    },
    "to come": {
        "jax_use_direct_linearize": False,
        "jax_use_simplified_jaxpr_constants": True,
        "jax_remove_size_one_mesh_axis_from_type": True,
        "jax_softmax_custom_jvp": True,
        "jax_auto_pcast": False,
        "jax_mutable_array_checks": False,
        "eager_constant_folding": True,
    },
    "optimized": {
        "jax_disable_most_optimizations": True,
        "jax_compiler_enable_remat_pass": False,
        "jax_raise_persistent_cache_errors": True,
    },
    "logged": {"jax_log_compiles": True, "jax_explain_cache_misses": True},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _EVERYWHERE)
def test_all_parts_pass_under_a_setting(name: str) -> None:
    _run({"settings": _EVERYWHERE[name]})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [
        _STRICT | {"jax_debug_nans": True, "jax_debug_infs": True},
        {"jax_enable_x64": True},
        {"jax_default_device": 1},
    ],
    ids=["strict", "x64", "device"],
)
def test_all_parts_pass_within_a_context(settings: dict[str, Any]) -> None:
    if "jax_debug_nans" in settings and jax.default_backend() != "cpu":
        pytest.skip("jax itself copies to the host what it looks for NaN in")
    _run({"settings": settings, "how": "here"})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _AROUND_CALLS)
def test_calls_pass_under_a_setting(name: str) -> None:
    _run({"settings": {name: _AROUND_CALLS[name]}, "how": "calls"})
