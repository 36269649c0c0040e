from __future__ import annotations

from typing import Any

import pytest

import cnr_jax as cnr
from cnr_jax.rows.codecs import Asymmetric, Greedy, Raw, SharedCodebook


class Own(Raw):
    """A codec that nobody could read again: it is stored under a name of another one."""


def test_codec_of_the_users_own_is_refused() -> None:
    for options in ({"codec": Own()}, {"slot_codec": Own()}):
        with pytest.raises(cnr.errors.OptionError, match="could not be read again"):
            cnr.Options(**options)
    with pytest.raises(cnr.errors.OptionError, match="could not be read again"):
        cnr.Options(tables={"user": cnr.TableOptions(codec=Own())})


@pytest.mark.parametrize(
    "codec",
    [
        Raw(),
        Asymmetric(bits=3, refits=7),
        Asymmetric(metadata_bits=32),
        Greedy(bins=7, ratio=0.25),
        SharedCodebook(bits=2, levels=(-1.5, -0.1, 0.1, 1.5)),
    ],
    ids=str,
)
def test_codec_objects_of_the_library_are_taken(codec: Any) -> None:
    assert cnr.Options(codec=codec).codec == codec
