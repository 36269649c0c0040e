"""Checks of a codec that options name or give, before anything is saved with it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cnr_jax import errors
from cnr_jax.rows.codecs import Codec, at_dim, codec_from, make_codec
from cnr_jax.rows.codecs.base import Configuration


def has_choice(codec: Callable[[int], Codec]) -> bool:
    """Whether `bits="auto"` matters for a codec, that is, other bits make another one."""
    return codec(2) != codec(4)


def is_codec(name: str, bits: int = 4) -> bool:
    """Whether options know a codec by this name, and it can have codes of this width."""
    try:
        make_codec(name, bits)
    except ValueError:
        return False
    return True


def reads_bits(codec: str | Codec, bits: object = None) -> bool:
    """Whether a codec takes bits; for a codec object, whether it has just these.

    Example:
        >>> reads_bits("adaptive"), reads_bits("raw"), reads_bits("unheard")
        (True, False, True)
    """
    if not isinstance(codec, str):
        return getattr(codec, "bits", 0) == bits
    # What is no codec is refused for that.
    return not is_codec(codec) or has_choice(functools.partial(make_codec, codec))


def configuration_of(codec: Codec) -> tuple[str, Configuration]:
    """Returns the name of a codec, and its configuration without what it leaves to the rows.

    `codec_from(name, configuration, whole=False)` makes an equal one of them.

    Example:
        >>> configuration_of(make_codec("adaptive", bits=4))
        ('cnr.asymmetric', {'bits': 4, 'metadata_bits': 16})
    """
    values = at_dim(codec, 1).configuration()
    chosen = {k: v for k, v in values.items() if getattr(codec, k, v) is not None}
    return codec.name, chosen


def check_readable(codec: Codec) -> None:
    """Checks that rows of a codec can be read again, by its name and configuration.

    Raises:
        OptionError: for a codec of the user's own, and for what is none.
    """
    if isinstance(codec, type) or not callable(getattr(codec, "configuration", None)):
        raise errors.OptionError(
            f"{codec!r} is no codec, expected the name of one, such as 'adaptive'"
        )
    codec = at_dim(codec, 1)
    try:
        known = codec_from(codec.name, codec.configuration()) == codec
    except errors.FormatError:
        known = False
    if not known:
        raise errors.OptionError(
            f"codec {codec!r} could not be read again: it is not one of cnr_jax"
        )
