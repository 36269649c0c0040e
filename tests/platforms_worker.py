"""Lowers every jitted program of saves and restores for GPUs and TPUs, on a machine without.

Prints a line for each program: its name, how often it was lowered, and what went wrong.
Programs of the library alone: the train step here is not jitted.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.export

PLATFORMS = ("cuda", "tpu")
# By the name of a function and what it was called with: why it could not be lowered, if so.
used: dict[tuple[str, str], str] = {}
jit = jax.jit


class Noting:
    """A jitted function that notes with what it is called, or lowered."""

    def __init__(
        self, work: Callable[..., Any], options: dict[str, Any], name: str = ""
    ) -> None:
        self.program = jit(work, **options)
        self.name = name or f"{work.__module__}.{work.__qualname__}"

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def described(leaf: Any) -> Any:
            shape = getattr(leaf, "shape", None)
            if shape is None or not hasattr(leaf, "dtype"):
                return leaf
            sharding = getattr(leaf, "sharding", None)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        given = jax.tree.map(described, (args, kwargs))
        # Of programs that differ in the number of rows alone one is enough.
        kind = jax.tree.map(
            lambda x: (len(x.shape), x.dtype) if hasattr(x, "dtype") else x, given
        )
        if (self.name, repr(kind)) in used:
            return
        args, kwargs = given
        # Here, as settings of jax are those of the call.
        try:
            jax.export.export(self.program, platforms=PLATFORMS)(*args, **kwargs)
            used[self.name, repr(kind)] = ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            used[self.name, repr(kind)] = why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note(args, kwargs)
        return self.program(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        self.note(args, kwargs)
        return self.program.lower(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)


def noting_jit(work: Any = None, **options: Any) -> Any:
    """In the place of `jax.jit`, for functions of the library."""
    if work is None:
        return functools.partial(noting_jit, **options)
    inner = work.func if isinstance(work, functools.partial) else work
    if not (getattr(inner, "__module__", None) or "").startswith("cnr_jax"):
        return jit(work, **options)
    return Noting(work, options)


jax.jit = noting_jit  # type: ignore[assignment]

# Imports of the library come after that.
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import cnr_jax as cnr  # noqa: E402
from cnr_jax.repository.replay import leaves  # noqa: E402
from cnr_jax.rows.codecs import Dithering, make_codec  # noqa: E402

ROWS, DIM = 64, 8
CODECS = ("asymmetric", "adaptive", "symmetric", "greedy", "kmeans", "codebook")
SLOTS = ("bfloat16", "log", "log8", "raw")


def make_state(across: tuple[int, int]) -> dict[str, Any]:
    mesh = jax.make_mesh(across, ("r", "c"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)

    def rows(width: int, dtype: Any, spec: P) -> jax.Array:
        values = jnp.asarray(rng.normal(size=(ROWS, width)), dtype)
        return jax.device_put(values, NamedSharding(mesh, spec))

    return {
        "user": rows(DIM, jnp.float32, P("r", "c")),
        "item": rows(2 * DIM, jnp.bfloat16, P("r")),
        "acc": {"user": rows(DIM, jnp.float32, P("r", "c"))},
    }


def run(root: Path, staging: Any, tracking: Any) -> None:
    """Saves, restores elsewhere, and saves dithered codes."""
    state = make_state((2, 2))
    tables = cnr.find_tables(state, ["user", "item"])
    options = cnr.Options(
        codec="asymmetric",
        slot_codec="log",
        policy=cnr.Consecutive(),
        staging=staging,
        tracking=tracking,
    )
    touched = cnr.init_touched(state, tables) if tracking != "fingerprint" else None
    record = jax.jit(cnr.record)
    ids = {name: np.arange(4, dtype=np.int32) for name in ("user", "item")}
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(3):
            touched = touched and record(touched, ids)
            state = {**state, "user": state["user"].at[:4].add(1)}
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            if step == 1:
                state, back = manager.restore(1, args=cnr.args.Restore(state))
                touched = touched and back
        manager.restore(2, args=cnr.args.Restore(make_state((4, 1))))


def code_all() -> None:
    """Lowers what each codec encodes rows with, to nearest and dithered, and decodes them."""
    keys = jax.ShapeDtypeStruct((8,), jnp.uint32)
    for dtype in (jnp.float32, jnp.bfloat16):
        rows = jax.ShapeDtypeStruct((8, DIM), dtype)
        for name in (*CODECS, *SLOTS):
            codec = make_codec(name, 3)
            Noting(codec.encode, {}).note((rows,), {})
            if isinstance(codec, Dithering):
                Noting(codec.encode, {}).note((rows, keys), {})
            parts = jax.eval_shape(codec.encode, rows).parts
            decode = functools.partial(codec.decode, dim=DIM, dtype=np.dtype(dtype))
            Noting(decode, {}, f"{type(codec).__name__}.decode").note((parts,), {})


def main() -> None:
    # Regions of any size are put together on their devices.
    leaves.SMALL_BYTES = leaves.SLAB_BYTES = 1024
    leaves._is_host = lambda device: False  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder, "1"), "device", "audited")
        run(Path(folder, "2"), "host", "recorded")
    code_all()
    # That it would show: this one is for CPUs and GPUs alone.
    Noting(jax.lax.linalg.schur, {}, "schur").note((jnp.eye(2),), {})
    names: dict[str, list[str]] = {}
    for (name, _), problem in used.items():
        names.setdefault(name, []).append(problem)
    for name, problems in sorted(names.items()):
        print(name, len(problems), *sorted({each for each in problems if each}))


if __name__ == "__main__":
    main()
