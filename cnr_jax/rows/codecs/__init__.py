"""Codecs for table rows and optimizer slots: their names, and what options may say of them.

`cnr_jax.encoding` decides which codec a leaf gets.

A codec has two kinds of names. Options use short ones ("raw", "asymmetric", "adaptive").
Manifests store `{"name": "cnr....", "configuration": {...}}`, which `codec_from` reads. A
stored name and the meaning of its configuration never change.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from cnr_jax.errors import FormatError, OptionError
from cnr_jax.rows.codecs.asymmetric import Asymmetric
from cnr_jax.rows.codecs.base import Codec, Configuration, Raw
from cnr_jax.rows.codecs.base import Dithering as Dithering
from cnr_jax.rows.codecs.base import Encoded as Encoded
from cnr_jax.rows.codecs.base import Part as Part
from cnr_jax.rows.codecs.base import bytes_of as bytes_of
from cnr_jax.rows.codecs.bfloat16 import BFloat16
from cnr_jax.rows.codecs.codebook import SharedCodebook
from cnr_jax.rows.codecs.greedy import Greedy
from cnr_jax.rows.codecs.kmeans import KMeans
from cnr_jax.rows.codecs.lattice import Lattice
from cnr_jax.rows.codecs.log import Log
from cnr_jax.rows.codecs.moments import Octave, Unit
from cnr_jax.rows.codecs.packed import zstandard
from cnr_jax.rows.codecs.residual import Residual
from cnr_jax.rows.codecs.symmetric import Symmetric

_KINDS = (
    Raw,
    Symmetric,
    Asymmetric,
    Greedy,
    KMeans,
    SharedCodebook,
    BFloat16,
    Log,
    Lattice,
    Octave,
    Unit,
)
_STORED: dict[str, Callable[..., Codec]] = {kind.name: kind for kind in _KINDS}

# Codecs by the names that options use. Each is made from the width of a code; some ignore it.
_NAMED: dict[str, Callable[[int], Codec]] = {
    "raw": lambda _: Raw(),
    "symmetric": lambda bits: Symmetric(bits=bits),
    "asymmetric": lambda bits: Asymmetric(bits=bits, refits=0),
    "adaptive": lambda bits: Asymmetric(bits=bits),
    "greedy": lambda bits: Greedy(bits=bits),
    "kmeans": lambda bits: KMeans(bits=bits),
    "codebook": lambda bits: SharedCodebook(bits=bits),
    "lattice": lambda bits: Lattice(bits=bits),
    "bfloat16": lambda _: BFloat16(),
    "log": lambda _: Log(bits=16),
    "log8": lambda _: Log(bits=8),
}


def make_codec(name: str, bits: int) -> Codec:
    """Returns the codec that options call `name`.

    Args:
        name: "raw" (exact); for tables "asymmetric" (over min and max of each row),
            "adaptive" (the same, refined by least squares), "symmetric" (over a range
            about zero), "greedy" (Check-N-Run's search), "kmeans" (values for each row)
            or "codebook" (levels shared by all rows); for slots "bfloat16", and for
            slots that are never negative "log" (16 bits) or "log8" (8 bits).
        bits: width of a code: 2, 3, 4 or, not for "kmeans", 8. Ignored by "raw" and the
            codecs for slots.

    Raises:
        ValueError: if there is no such name or width.

    Example:
        >>> make_codec("adaptive", bits=4)
        Asymmetric(bits=4, refits=None, metadata_bits=16)
    """
    if name not in _NAMED:
        raise ValueError(
            f"codec {name!r} is not known, expected one of {', '.join(map(repr, _NAMED))}"
        )
    return _NAMED[name](bits)


def at_dim(codec: Codec, dim: int) -> Codec:
    """Returns the codec with which rows of `dim` elements are stored: no value is left open.

    Example:
        >>> at_dim(make_codec("adaptive", bits=4), 64)
        Asymmetric(bits=4, refits=3, metadata_bits=16)
    """
    return codec.at_dim(dim) if isinstance(codec, Asymmetric) else codec


def codec_from(
    name: str, configuration: Mapping[str, Any], *, whole: bool = True
) -> Codec:
    """Returns the codec that a manifest describes.

    Args:
        name: name of the codec.
        configuration: configuration of the codec.
        whole: whether the configuration must have all values, as that of stored rows has;
            otherwise the codec chooses those that are missing.

    Raises:
        FormatError: if the name is not known, or a configuration value is missing,
            unknown or out of range.

    Example:
        >>> codec_from("cnr.raw", {})
        Raw()
    """
    if name not in _STORED:
        raise FormatError(
            f"codec {reprlib.repr(name)} is not known, expected one of {sorted(_STORED)}\n"
            "  hint: a newer version of cnr_jax may have written this checkpoint."
        )
    kind = _STORED[name]
    expected = at_dim(kind(), 1).configuration()
    lacking = set(expected) - set(configuration)
    if (
        not set(configuration) <= set(expected)
        or (whole and lacking)
        or not all(
            type(value) is type(expected[key]) for key, value in configuration.items()
        )
    ):
        fields = {key: type(value).__name__ for key, value in expected.items()}
        raise FormatError(
            f"configuration of codec {name!r} is {dict(configuration)},"
            f" expected {fields}"
        )
    try:
        return kind(**configuration)
    except (ValueError, TypeError) as error:
        raise FormatError(f"configuration of codec {name!r}: {error}") from error


def has_choice(codec: Callable[[int], Codec]) -> bool:
    """Whether `bits="auto"` matters for a codec, that is, whether other bits make another codec."""
    return codec(2) != codec(4)


def is_codec(name: str, bits: int = 4) -> bool:
    """Whether options have a codec of this name, and it can have codes of this width."""
    try:
        make_codec(name, bits)
    except ValueError:
        return False
    return True


def reads_bits(codec: str | Codec, bits: object = None) -> bool:
    """Whether a codec takes bits; for a codec object, whether its width is exactly `bits`.

    Example:
        >>> reads_bits("adaptive"), reads_bits("raw"), reads_bits("unheard")
        (True, False, True)
    """
    if not isinstance(codec, str):
        return getattr(codec, "bits", 0) == bits
    # True for an unknown name: the caller then refuses the name, and not its bits.
    return not is_codec(codec) or has_choice(functools.partial(make_codec, codec))


def configuration_of(codec: Codec) -> tuple[str, Configuration]:
    """Returns the name of a codec, and its configuration without values that depend on the rows.

    `codec_from(name, configuration, whole=False)` makes an equal codec from the two.

    Example:
        >>> configuration_of(make_codec("adaptive", bits=4))
        ('cnr.asymmetric', {'bits': 4, 'metadata_bits': 16})
    """
    values = at_dim(codec, 1).configuration()
    chosen = {k: v for k, v in values.items() if getattr(codec, k, v) is not None}
    return codec.name, chosen


def check_readable(codec: Codec) -> None:
    """Checks that a restore can make the codec again from its name and configuration.

    Raises:
        OptionError: if the codec is one of the user's own or is no codec at all, or if it needs a
            package that is not installed.
    """
    if isinstance(codec, type) or not callable(getattr(codec, "configuration", None)):
        raise OptionError(
            f"{codec!r} is no codec, expected the name of one, such as 'adaptive'"
        )
    codec = at_dim(codec, 1)
    try:
        known = codec_from(codec.name, codec.configuration()) == codec
    except FormatError:
        known = False
    if not known:
        raise OptionError(
            f"codec {codec!r} could not be read again: it is not one of cnr_jax"
        )
    if isinstance(codec, Residual):
        zstandard()
