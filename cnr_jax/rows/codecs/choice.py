"""What is asked of a codec that options name, or give, before anything is saved with it."""

from __future__ import annotations

from collections.abc import Callable

from cnr_jax import errors
from cnr_jax.rows.codecs import Codec, at_dim, codec_from, make_codec


def has_choice(codec: Callable[[int], Codec]) -> bool:
    """Whether `bits="auto"` has a say in a codec: then other bits make it another one."""
    return codec(2) != codec(4)


def is_codec(name: str) -> bool:
    """Whether options may call a codec so."""
    try:
        make_codec(name, 4)
    except ValueError:
        return False
    return True


def check_readable(codec: Codec) -> None:
    """Checks that what a codec writes can be read again, by its name and configuration.

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
