"""Codecs for table rows and optimizer slots, and their names.

Two kinds of names: options use short ones ("raw", "asymmetric", "adaptive"); stored
codecs are `{"name": "cnr....", "configuration": {...}}`, which `codec_spec` writes and
`codec_from` reads. A stored name and the meaning of its configuration never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cnr_jax.errors import FormatError
from cnr_jax.rows.codecs.asymmetric import Asymmetric
from cnr_jax.rows.codecs.base import Codec, Encoded, Part
from cnr_jax.rows.codecs.raw import Raw

__all__ = [
    "Asymmetric",
    "Codec",
    "Encoded",
    "Part",
    "Raw",
    "codec_from",
    "codec_spec",
    "make_codec",
]

_STORED: dict[str, type[Raw] | type[Asymmetric]] = {
    "cnr.raw": Raw,
    "cnr.asymmetric": Asymmetric,
}


def make_codec(name: str, bits: int) -> Codec:
    """Returns the codec that options call `name`.

    Args:
        name: "raw" (exact; `bits` is ignored), "asymmetric" (over min and max of each
            row) or "adaptive" (the same, refined by three rounds of least squares).
        bits: width of a code: 2, 3, 4 or 8.

    Raises:
        ValueError: if there is no such name or width.

    Example:
        >>> make_codec("adaptive", bits=4)
        Asymmetric(bits=4, refits=3, metadata_bits=16)
    """
    if name == "raw":
        return Raw()
    if name == "asymmetric":
        return Asymmetric(bits=bits, refits=0)
    if name == "adaptive":
        return Asymmetric(bits=bits, refits=3)
    raise ValueError(
        f"codec {name!r} is not known, expected one of 'raw', 'asymmetric', 'adaptive'"
    )


def codec_spec(codec: Codec) -> dict[str, Any]:
    """Returns `{"name": ..., "configuration": {...}}`, the codec for a manifest.

    Example:
        >>> codec_spec(Raw())
        {'name': 'cnr.raw', 'configuration': {}}
    """
    return {"name": codec.name, "configuration": codec.configuration()}


def codec_from(name: str, configuration: Mapping[str, Any]) -> Codec:
    """Returns the codec that `codec_spec` described.

    Raises:
        FormatError: if the name is not known, or a configuration value is missing,
            unknown or out of range.

    Example:
        >>> codec_from("cnr.raw", {})
        Raw()
    """
    if name not in _STORED:
        raise FormatError(
            f"codec {name!r} is not known, expected one of {sorted(_STORED)}\n"
            "  hint: a newer version of cnr_jax may have written this checkpoint."
        )
    kind = _STORED[name]
    expected = kind().configuration()
    if set(configuration) != set(expected) or not all(
        type(value) is type(expected[key]) for key, value in configuration.items()
    ):
        fields = {key: type(value).__name__ for key, value in expected.items()}
        raise FormatError(
            f"configuration of codec {name!r} is {dict(configuration)},"
            f" expected {fields}"
        )
    try:
        return kind(**configuration)
    except ValueError as error:
        raise FormatError(f"configuration of codec {name!r}: {error}") from error
