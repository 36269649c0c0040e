"""Choice of a codec by the name of an optimizer slot: `slot_codec="auto"`, or `"moments"`.

The names are those of optax and of `cnr_jax.optim`. Slots of other names are stored exactly.
"""

from __future__ import annotations

from typing import Literal

from cnr_jax.rows.codecs.asymmetric import Asymmetric
from cnr_jax.rows.codecs.base import Codec, Raw
from cnr_jax.rows.codecs.log import Log
from cnr_jax.rows.codecs.moments import Octave, Unit

# Sums or means of squares. If an element is negative after all, `Log` escapes its row.
ACCUMULATORS = frozenset(
    "sum_of_squares nu nu_max v v_row v_col e_g e_x lazy_nu accumulator accumulators".split()
)
# Means of gradients, of either sign.
MOMENTA = frozenset("mu lazy_mu trace lazy_trace momentum velocity m".split())


def slot_codec(name: str) -> Codec:
    """The codec that `slot_codec="auto"` gives a slot.

    Args:
        name: name of the slot, such as "opt_state/0/nu"; its last known part decides.

    Returns:
        `Log(bits=16)` for accumulators of squares, with an error of at most 0.15 %; the default
        codec with 8 bits for momenta; `Raw()` for all other slots.

    Example:
        >>> slot_codec("opt_state/0/sum_of_squares"), slot_codec("opt_state/0/count")
        (Log(bits=16), Raw())
        >>> slot_codec("opt_state/0/mu")
        Asymmetric(bits=8, refits=None, metadata_bits=32)
    """
    for part in reversed(name.split("/")):
        if part in ACCUMULATORS:
            return Log(bits=16)
        if part in MOMENTA:
            return Asymmetric(bits=8)
    return Raw()


def moments_codec(name: str, moment: Literal["mean", "squares"] | None) -> Codec:
    """The codec that `"moments"` gives a slot: one that stores differences, or else `Raw()`.

    Args:
        name: name of the slot, as in `slot_codec`.
        moment: which of a pair of moments the slot is; None: it belongs to no pair.

    Returns:
        `Unit()` and `Octave(places=2)` for a pair; `Octave(places=256)` for other accumulators,
        with an error of at most 0.28 %; `Raw()` for all other slots.

    Example:
        >>> moments_codec("opt_state/0/sum_of_squares", None), moments_codec("opt_state/0/mu", None)
        (Octave(places=256), Raw())
    """
    if moment is not None:
        pair = Unit()
        return pair if moment == "mean" else pair.squares
    accumulates = not ACCUMULATORS.isdisjoint(name.split("/"))
    return Octave(places=256) if accumulates else Raw()
