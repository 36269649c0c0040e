"""Forms of the dense leaves of a state, by which a save tells whether it still has them.

A step that lacks a leaf, or has another in its place, does not restore into the state that the
loop makes. A jitted train step turns a number of Python into an array without axes and, without
x64, 64 bits into 32. The leaf counts as the same then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.state.table import Path

# Kinds of dtypes of arrays that may take the place of a number of Python.
_NUMBERS = {
    "bool": np.bool_,
    "int": np.integer,
    "float": np.floating,
    "complex": np.complexfloating,
}


class Form(NamedTuple):
    """Form of a dense leaf: an array, a number of Python, a PRNG key, or a string.

    Attributes:
        kind: "array", "key", "str", or the class of a number or of anything else.
        shape: shape of an array.
        dtype: dtype of an array.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: Any = None

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        return f"{self.dtype}{list(self.shape)}"


def form_of(leaf: Any) -> Form:
    """Form of a leaf, concrete or abstract."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return Form(type(leaf).__name__)
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return Form("key" if is_key else "array", tuple(shape), dtype)


def _are_alike(one: Form, other: Form) -> bool:
    if one.shape != other.shape:
        return False
    if one.kind == other.kind == "array":
        return _dtype(one) == _dtype(other)
    number, array = (one, other) if other.kind == "array" else (other, one)
    if array.kind == "array" and number.kind in _NUMBERS:
        return bool(jnp.issubdtype(array.dtype, _NUMBERS[number.kind]))
    return one == other


def _dtype(form: Form) -> Any:
    try:
        return jax.dtypes.canonicalize_dtype(form.dtype)
    except TypeError:
        return form.dtype  # no numbers: such arrays are refused elsewhere


def differences(
    found: Mapping[Path, Form], leaves: Iterable[tuple[Path, Any]]
) -> list[str]:
    """Lists the leaves in which a state differs from the one that tables were found in.

    Args:
        found: forms of the dense leaves then.
        leaves: dense leaves of the state.

    Example:
        >>> found = {("step",): form_of(3), ("w",): form_of(jnp.zeros(3))}
        >>> differences(found, [(("step",), jnp.int32(4))])
        ['w: not in this state, was float32[3]']
    """
    missing, problems = dict(found), []
    for path, leaf in leaves:
        want, got = missing.pop(path, None), form_of(leaf)
        if want is None:
            problems.append(f"{'/'.join(path)}: {got} here, was not in the state")
        elif not _are_alike(want, got):
            problems.append(f"{'/'.join(path)}: {got} here, was {want}")
    return problems + [
        f"{'/'.join(path)}: not in this state, was {form}"
        for path, form in missing.items()
    ]
