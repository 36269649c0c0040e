"""Leaves of a state that are of other dtypes than what is stored for them.

What may change a value is refused, or converted where that was asked for: see `holds_all`. Numbers
of Python are taken into any dtype that has their value, as a counter that begins as 0 is an array
after the first train step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.dense import abstract_dense
from cnr_jax.repository.dtypes import between, converted, converts, holds, holds_all

_log = logging.getLogger(__name__)
_PYTHON = (bool, int, float)  # in this order, as a bool is an int
_CAST_HINT = (
    "values would change in the dtypes of the state: pass those that were saved (64 bits need"
    " jax_enable_x64), or cnr.args.Restore(..., cast=True) to convert values as astype does"
)


def dtype_in(value: Any, *, on_device: bool = False) -> Any:
    """The dtype that a leaf of a state takes values in, or Python's type of a number.

    Of an array of jax, which without jax_enable_x64 has no more than 32 bits, what jax makes of it.

    Args:
        value: the leaf.
        on_device: it becomes such an array in any case.
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


def misfit(stored: np.dtype, value: Any, *, on_device: bool = False) -> str:
    """How a leaf of a state would change stored values of numbers, or nothing."""
    wanted = dtype_in(value, on_device=on_device)
    is_number = isinstance(wanted, type | np.dtype)
    if not is_number or holds_all(stored, wanted):
        return ""
    return _apart(stored.name, wanted)


def misfit_of_number(number: bool | int | float, value: Any) -> str:
    """How a leaf of a state would change a number of Python, or nothing."""
    wanted = dtype_in(value)
    if holds(number, wanted):
        return ""
    return _apart(f"{type(number).__name__} {number!r}", wanted)


def _apart(stored: str, wanted: Any) -> str:
    name = wanted.__name__ if isinstance(wanted, type) else wanted.name
    return f"{stored} in the checkpoint, {name} in the state"


def asked(stored: np.dtype, value: Any) -> Any:
    """What Orbax is to restore a dense leaf into, so that `as_wanted` makes it the one wanted.

    What stays on the host comes as it is stored, as Orbax has rules of its own for such. On devices
    it comes in its dtype, but where numpy cannot convert to that.
    """
    wanted = dtype_in(value)
    if isinstance(wanted, type) or isinstance(value, np.ndarray | np.generic):
        return np.empty(0, stored)
    if converts(stored, wanted):
        return value
    by_way = between(stored, wanted)
    return jax.ShapeDtypeStruct(value.shape, by_way, sharding=value.sharding)


def as_wanted(found: Any, value: Any) -> Any:
    """A leaf that was restored into what `asked` said, in the dtype of the state's."""
    wanted = dtype_in(value)
    if isinstance(found, str) or not isinstance(wanted, type | np.dtype):
        return found
    if isinstance(found, jax.Array):
        return found if found.dtype == wanted else found.astype(wanted)
    found = np.asarray(found)
    if isinstance(wanted, np.dtype):
        return converted(found, wanted)
    if wanted is not int or not holds_all(found.dtype, int):
        found = converted(found, np.dtype(wanted))
    return wanted(found.item())


def number_as_wanted(number: bool | int | float, value: Any) -> Any:
    """A number of Python as the leaf of a state."""
    found = np.asarray(number)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return as_wanted(found, value)
    found, where = converted(found, dtype_in(value)), abstract_dense(value).sharding
    return jax.make_array_from_callback((), where, lambda _: found)


def mismatch(
    step: str, problems: Sequence[str], casts: Sequence[str], hints: Sequence[str]
) -> errors.StateMismatchError:
    """The error that names all differences between a state and a checkpoint.

    Args:
        step: what it is called.
        problems: what does not match.
        casts: leaves whose values would change.
        hints: what to do about the problems.
    """
    hints = [*(hints if problems else ()), *([_CAST_HINT] if casts else ())]
    lines = [*problems, *casts]
    return errors.StateMismatchError(
        f"the state does not match checkpoint {step} ({len(lines)} differences)"
        + "".join(f"\n  {line}" for line in lines)
        + "".join(f"\n  hint: {hint}" for hint in hints)
    )


def say_converted(step: str, casts: Sequence[str]) -> None:
    """Warns, once a restore, of values that change because that was asked for."""
    if casts:
        _log.warning(
            "leaves of checkpoint %s are converted to dtypes that cannot hold all of their"
            " values: %s",
            step,
            "; ".join(casts),
        )
