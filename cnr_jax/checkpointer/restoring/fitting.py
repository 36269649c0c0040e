"""Dtypes of leaves: conversion of stored values into those of a state.

A dtype that may change a value is refused, unless a cast was asked for: see `holds_all`. Python
numbers fit any dtype that has their value, since a counter that begins as 0 is an array after the
first train step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.leaves import abstract_dense
from cnr_jax.repository.dtypes import converted, holds, holds_all
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.texts import count_of, logger

_log = logger(__name__)
_PYTHON = (bool, int, float)  # in this order, as a bool is an int
_EXPONENTS = numpy_dtype("float8_e8m0fnu")
_CAST_HINT = (
    "values would change in the dtypes of the state: pass those that were saved (64 bits need"
    " jax_enable_x64), or cnr.args.Restore(..., cast=True) to convert values as astype does"
)


def dtype_in(value: Any, *, on_device: bool = False) -> Any:
    """Dtype in which a leaf of a state takes values, or Python's type of a number.

    For an array of jax it is the dtype that jax makes of it: without jax_enable_x64 at most 32
    bits.

    Args:
        value: the leaf.
        on_device: whether it becomes an array of jax in any case.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        kinds = [kind for kind in _PYTHON if isinstance(value, kind)]
        return kinds[0] if kinds else np.dtype(object)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    if on_device or isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return jax.dtypes.canonicalize_dtype(dtype)
    return np.dtype(dtype)


def unknown_to_jax(value: Any, *, on_device: bool = False) -> str:
    """Explains why jax has no array like a leaf that it is to hold; empty if it has.

    Args:
        value: the leaf, whose dtype is of numpy, or a key.
        on_device: whether it becomes an array of jax in any case.
    """
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return ""
    if not on_device and not isinstance(value, jax.ShapeDtypeStruct):
        return ""
    # Only floats of numpy can be too wide. Those that jax adds have few bits.
    is_wide = dtype.itemsize > {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize)
    if dtype.isnative and not is_wide:
        return ""
    return f"{dtype} ({dtype.str}) in the state, and jax has no arrays of that dtype"


def uneven(value: Any) -> str:
    """Explains why the sharding of an abstract leaf cannot cut it; empty if it can."""
    sharding = getattr(value, "sharding", None)
    # An array that is there has been cut.
    if isinstance(value, jax.Array) or not isinstance(sharding, jax.sharding.Sharding):
        return ""
    try:
        sharding.shard_shape(tuple(value.shape))
    except ValueError:
        told = str(sharding)
        if isinstance(sharding, jax.sharding.NamedSharding):
            told = f"{sharding.spec} over {dict(sharding.mesh.shape)}"
        return f"shape {list(value.shape)} cannot be cut evenly by its sharding, {told}"
    return ""


def misfit(stored: np.dtype, value: Any, *, on_device: bool = False) -> str:
    """Explains how a leaf of a state would change stored numbers; empty if it would not."""
    wanted = dtype_in(value, on_device=on_device)
    is_number = isinstance(wanted, type | np.dtype)
    if not is_number or holds_all(stored, wanted):
        return ""
    return _apart(stored.name, wanted)


def misfit_of_number(number: bool | int | float, value: Any) -> str:
    """Explains how a leaf of a state would change a number of Python; empty if not."""
    wanted = dtype_in(value)
    if holds(number, wanted):
        return ""
    return _apart(f"{type(number).__name__} {number!r}", wanted)


def _apart(stored: str, wanted: Any) -> str:
    name = wanted.__name__ if isinstance(wanted, type) else wanted.name
    return f"{stored} in the checkpoint, {name} in the state"


def asked(stored: np.dtype, value: Any) -> Any:
    """Leaf to ask of Orbax, from which `as_wanted` then makes the wanted one.

    Orbax returns arrays of jax as they are wanted, each device's part alone. It returns leaves that
    stay on the host, and those that it cannot convert, as they are stored.
    """
    wanted = dtype_in(value)
    on_host = isinstance(wanted, type) or isinstance(value, np.ndarray | np.generic)
    return np.empty(0, stored) if on_host or not _converts(stored, wanted) else value


def _converts(stored: np.dtype, wanted: Any) -> bool:
    """Whether Orbax, by TensorStore, reads values of a dtype as those of another."""
    if stored == wanted:
        return True
    # This dtype has only exponents, which such a conversion would get wrong.
    if _EXPONENTS in (stored, wanted) or stored.kind == "c" != wanted.kind:
        return False
    return np.can_cast(stored, wanted, "unsafe")


def as_wanted(found: Any, value: Any) -> Any:
    """Converts a leaf that was restored as `asked`, or a number, to what the state wants."""
    wanted = dtype_in(value)
    is_key = not isinstance(wanted, type | np.dtype)
    if isinstance(found, jax.Array | str) or is_key:
        return found
    found = np.asarray(found)
    if isinstance(wanted, type):
        if wanted is not int or not holds_all(found.dtype, int):
            found = converted(found, np.dtype(wanted))
        return wanted(found.item())
    found = converted(found, wanted)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return found
    where = abstract_dense(value).sharding
    return jax.make_array_from_callback(found.shape, where, lambda at: found[at])


def mismatch(
    step: str, problems: Sequence[str], casts: Sequence[str], hints: Sequence[str]
) -> errors.StateMismatchError:
    """Error that names all differences between a state and a checkpoint.

    Args:
        step: name of the step.
        problems: differences between state and checkpoint.
        casts: leaves whose values would change.
        hints: advice about the problems.
    """
    hints = [*(hints if problems else ()), *([_CAST_HINT] if casts else ())]
    lines = [*problems, *casts]
    return errors.StateMismatchError(
        f"the state does not match checkpoint {step} ({count_of(len(lines), 'difference')})"
        + "".join(f"\n  {line}" for line in lines)
        + "".join(f"\n  hint: {hint}" for hint in hints)
    )


def say_converted(step: str, casts: Sequence[str]) -> None:
    """Warns, once a restore, of values that change because a conversion was asked for."""
    if casts:
        _log.warning(
            "leaves of checkpoint %s are converted to dtypes that cannot hold all of their"
            " values: %s",
            step,
            "; ".join(casts),
        )
