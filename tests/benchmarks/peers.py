"""The systems that the benchmarks compare, by name.

A system saves a state of `workload.table_state` and gives it back. Those of torch get torch
tensors (`prepare`), as a user of torch would have them: they are charged for no conversion.
Every system is waited for until its files are synced, whether it syncs them by itself or not.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from system import State as State
from system import System as System
from systems_jax import (
    Cnr2,
    Cnr4,
    Cnr4Zstd,
    Cnr8,
    CnrLattice,
    CnrRaw,
    Numpy,
    Orbax,
    OrbaxUncompressed,
)
from systems_torch import DcpAsync, Safetensors, TorchsnapshotAsync

_SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        *(Cnr4, Cnr4Zstd, CnrLattice, CnrRaw, Cnr8, Cnr2, Orbax, OrbaxUncompressed),
        *(DcpAsync, TorchsnapshotAsync, Safetensors, Numpy),
    )
}
NAMES = tuple(_SYSTEMS)


def system_of(name: str) -> type[System]:
    """The class of a system."""
    return _SYSTEMS[name]


def needs(name: str) -> tuple[str, ...]:
    """Packages that a system needs, for `harness.Case`."""
    return _SYSTEMS[name].needs


def available(name: str) -> str | None:
    """Why a system cannot be used here; None if it can."""
    missing = [p for p in needs(name) if importlib.util.find_spec(p) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def make(name: str, root: Path, state: State, **options: Any) -> System:
    """A system with this root; `state` is of jax arrays or from `prepare`."""
    return _SYSTEMS[name](root, state, **options)
