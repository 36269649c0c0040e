"""Hypothesis strategies: tables, states, where they lie on devices, options, whole set-ups.

Sizes are small, since every new shape costs a compilation of its own; values are what codecs
and comparisons may trip over.

Example:
    >>> import hypothesis
    >>> @hypothesis.settings(max_examples=5, deadline=None)
    ... @hypothesis.given(shapes(), options())
    ... def check(shapes, options):
    ...     tables, codec = find(shapes), options.codec_for("t0", "table", 4, np.float32)
    ...     assert set(tables) == set(shapes) and codec.name == "cnr.raw"
    >>> check()
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.testing import damage
from cnr_jax.testing.faults import Fault
from cnr_jax.testing.model import (
    Keeps,
    PreservationPolicy,
    any_of,
    everything,
    latest,
    multiples,
)
from cnr_jax.testing.setup import Setup

DTYPES = (np.float32, jnp.bfloat16, np.float16)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A table to be made.

    Attributes:
        rows: number of rows.
        dim: number of elements of a row.
        dtype: dtype of the table.
        slots: slots that an optimizer keeps for it: `"row"` (float32, a number a row) and
            `"element"` (float32, of the table's shape).
    """

    rows: int
    dim: int
    dtype: Any
    slots: tuple[str, ...] = ()


Shapes = Mapping[str, Shape]


def shapes(
    max_tables: int = 3, rows: Sequence[int] = (8, 24)
) -> st.SearchStrategy[Shapes]:
    """Shapes of tables by name, `t0`, `t1`, ...; numbers of rows are among those given."""
    table = st.builds(
        Shape,
        st.sampled_from(list(rows)),
        # Not as many columns as rows: slots of rows would be slots of columns too.
        st.sampled_from([dim for dim in (1, 4, 5) if dim not in rows]),
        st.sampled_from(DTYPES),
        st.sampled_from([(), ("row",), ("row", "element")]),
    )
    tables = st.lists(table, min_size=1, max_size=max_tables)
    return tables.map(lambda found: {f"t{i}": each for i, each in enumerate(found)})


def values(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Makes numbers of all magnitudes, with zeros, infinities and NaNs among them.

    Example:
        >>> values((2, 3), np.float16, seed=1).shape
        (2, 3)
    """
    rng = np.random.default_rng(seed)
    found = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, size=shape)
    limits = jnp.finfo(dtype)
    special = [
        np.nan,
        np.inf,
        -np.inf,
        -0.0,
        0.0,
        limits.max,
        limits.smallest_subnormal,
    ]
    where = rng.random(shape) < 0.1
    found = np.where(where, rng.choice(np.array(special, np.float64), shape), found)
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def state_of(shapes: Shapes, seed: int) -> dict[str, Any]:
    """Makes a train state on the host: tables, their slots, dense leaves, a step."""
    slots: dict[str, dict[str, np.ndarray]] = {}
    for i, (name, table) in enumerate(shapes.items()):
        for slot in table.slots:
            shape = (table.rows,) if slot == "row" else (table.rows, table.dim)
            made = values(shape, np.float32, seed + 100 + i)
            slots.setdefault(slot, {})[name] = made
    tables = {
        name: values((table.rows, table.dim), table.dtype, seed + i)
        for i, (name, table) in enumerate(shapes.items())
    }
    w = values((5,), np.float32, seed + 1000)
    return {"params": tables, "opt_state": slots, "w": w, "step": np.int32(0)}


def states(max_tables: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """Train states on the host."""
    return st.builds(state_of, shapes(max_tables), st.integers(0, 2**31))


def find(shapes: Shapes, state: Any = None) -> cnr.Tables:
    """Finds the tables of a state made of these shapes."""
    placed = jax.device_put(state_of(shapes, 0)) if state is None else state
    return cnr.find_tables(placed, list(shapes))


def shardings(
    state: Any, devices: Sequence[Any] | None = None
) -> st.SearchStrategy[Any]:
    """A sharding for each leaf of a state: by rows, by columns, by both, or replicated.

    Args:
        state: state that gives the shapes; leaves that cannot be divided are replicated.
        devices: devices of the mesh; by default all.
    """
    devices = list(jax.devices() if devices is None else devices)
    columns = 2 if len(devices) % 2 == 0 else 1
    mesh = Mesh(np.array(devices).reshape(-1, columns), ("r", "c"))

    def of(leaf: Any) -> st.SearchStrategy[NamedSharding]:
        fitting = [P()]
        for spec in (P(("r", "c")), P("r"), P(None, "c"), P("r", "c")):
            if _divides(mesh, spec, np.shape(leaf)):
                fitting.append(spec)
        return st.sampled_from(fitting).map(functools.partial(NamedSharding, mesh))

    leaves, structure = jax.tree.flatten(state)
    return st.tuples(*map(of, leaves)).map(structure.unflatten)


def _divides(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> bool:
    if len(spec) > len(shape):
        return False
    for size, axes in zip(shape, spec, strict=False):
        names = () if axes is None else (axes,) if isinstance(axes, str) else axes
        if size % int(np.prod([mesh.shape[name] for name in names])):
            return False
    return True


def policies() -> st.SearchStrategy[Any]:
    """Policies: when a save is full, and on which parent deltas rest."""
    return st.sampled_from(
        [
            cnr.Full(),
            cnr.OneShot(),
            cnr.Consecutive(),
            cnr.Consecutive(max_chain=2),
            cnr.Intermittent(),
        ]
    )


def options(exact: bool = True) -> st.SearchStrategy[cnr.Options]:
    """Options of a manager.

    Args:
        exact: whether codecs lose nothing, as the model needs.
    """
    codecs = st.just({"codec": "raw"})
    if not exact:
        rounding = {
            "codec": st.sampled_from(["adaptive", "asymmetric"]),
            "bits": st.sampled_from([2, 3, 4, 8]),
        }
        codecs |= st.fixed_dictionaries(rounding)
    return st.builds(
        lambda of_rows, **others: cnr.Options(**of_rows, **others),
        of_rows=codecs,
        policy=policies(),
        tracking=st.sampled_from(["recorded", "fingerprint", "audited"]),
        audit_bytes=st.sampled_from([0, 256, 4 << 20]),
        max_in_flight=st.sampled_from([1, 2, 3]),
        max_staging_bytes=st.sampled_from([100, 2 << 30]),
        verify_reads=st.booleans(),
        min_fulls=st.sampled_from([1, 2]),
    )


def retentions() -> st.SearchStrategy[tuple[Any, Keeps]]:
    """A preservation policy for Orbax, and the same as a plain function for the model."""
    plain = [
        latest(1),
        latest(3),
        multiples(3),
        any_of(latest(1), multiples(4)),
    ]
    kept = [(PreservationPolicy(keeps), keeps) for keeps in plain]
    return st.sampled_from([(None, everything), *kept])


def faults_in_process() -> st.SearchStrategy[Fault]:
    """Faults for `inprocess.failing`: early and late ones, once or for ever."""
    return st.builds(
        Fault,
        call=st.sampled_from(["any", "fsync", "rename", "mkdir", "open"]),
        nth=st.integers(1, 40),
        action=st.sampled_from(["EIO", "ENOSPC", "EROFS", "EDQUOT", "EMFILE"]),
        times=st.sampled_from([1, 0]),
    )


def damages() -> st.SearchStrategy[Any]:
    """Functions that damage the file whose path they are given."""

    def flip(where: float) -> Any:
        return lambda path: damage.flip_bit(path, int(where * 8 * path.stat().st_size))

    def cut(where: float) -> Any:
        return lambda path: damage.truncate(path, int(where * path.stat().st_size))

    part = st.floats(0, 1, exclude_max=True)
    return st.one_of(
        part.map(flip),
        part.map(cut),
        st.binary(min_size=1, max_size=8).map(
            lambda data: lambda path: damage.extend(path, data)
        ),
        st.just(damage.remove),
    )


def setups(
    retentions: st.SearchStrategy[tuple[Any, Keeps]] | None = None,
    devices: Sequence[Any] | None = None,
    some_shapes: st.SearchStrategy[Shapes] | None = None,
) -> st.SearchStrategy[Setup]:
    """Runs of our own making for `playing.Player`, with any tables, placement and options.

    Args:
        retentions: pairs as from `retentions`, such as Orbax's own policies.
        devices: devices of the mesh; by default all.
        some_shapes: shapes of the tables.
    """

    @st.composite
    def build(draw: st.DrawFn) -> Setup:
        made = draw(some_shapes if some_shapes is not None else shapes())
        host = state_of(made, draw(st.integers(0, 2**31)))
        placed = jax.device_put(host, draw(shardings(host, devices)))
        policy, keeps = draw(retentions if retentions is not None else _retentions())
        chosen = draw(options())
        return Setup(
            state=placed,
            tables=find(made, placed),
            train=functools.partial(train, made),
            options=dataclasses.replace(chosen, preservation_policy=policy),
            keeps=keeps,
        )

    return build()


_retentions = retentions


def train(shapes: Shapes, state: Any, touched: Any, seed: int) -> tuple[Any, Any]:
    """A train step that changes a few rows of each table, with their slots."""
    rng = np.random.default_rng(seed)
    rows = {
        name: rng.integers(0, table.rows, rng.integers(0, 7))
        for name, table in shapes.items()
    }
    tables = {k: _changed(leaf, rows[k], rng) for k, leaf in state["params"].items()}
    slots = {
        slot: {k: _changed(leaf, rows[k], rng) for k, leaf in leaves.items()}
        for slot, leaves in state["opt_state"].items()
    }
    rest = {key: _changed(state[key], slice(None), rng) for key in ("w", "step")}
    if touched is not None:
        touched = _record(touched, {k: _padded(found) for k, found in rows.items()})
    return {"params": tables, "opt_state": slots, **rest}, touched


def _changed(leaf: Any, rows: Any, rng: np.random.Generator) -> Any:
    host = np.array(leaf)
    if host.ndim:
        new = values(host[rows].shape, host.dtype, int(rng.integers(2**31)))
        host[rows] = new
    else:
        host = host + np.ones((), host.dtype)
    return jax.device_put(host, leaf.sharding)


def _padded(rows: np.ndarray) -> cnr.Lookup:
    """Pads row ids to one length, so that recording is compiled once."""
    where = np.arange(8) < len(rows)
    filled = np.resize(rows if len(rows) else np.zeros(1, int), 8).astype(np.int32)
    return cnr.Lookup(filled, where=where)


@functools.partial(jax.jit, donate_argnums=0)
def _record(touched: cnr.Touched, ids: Mapping[str, Any]) -> cnr.Touched:
    return cnr.record(touched, ids)
