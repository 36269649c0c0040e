from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax.rows.codecs import Asymmetric, Greedy, Raw, SharedCodebook, Symmetric

from .conftest import each_of


class Own(Raw):
    """A codec that nobody could read again: it is stored under a name of another one."""


def test_codec_of_the_users_own_is_refused() -> None:
    for options in ({"codec": Own()}, {"slot_codec": Own()}):
        with pytest.raises(cnr.errors.OptionError, match="could not be read again"):
            cnr.Options(**options)
    with pytest.raises(cnr.errors.OptionError, match="could not be read again"):
        cnr.Options(tables={"user": cnr.TableOptions(codec=Own())})


@each_of(
    "codec",
    [
        Raw(),
        Asymmetric(bits=3, refits=7),
        Asymmetric(metadata_bits=32),
        Greedy(bins=7, ratio=0.25),
        SharedCodebook(bits=2, levels=(-1.5, -0.1, 0.1, 1.5)),
    ],
)
def test_codec_objects_of_the_library_are_taken(codec: Any) -> None:
    assert cnr.Options(codec=codec).codec == codec


AUTO: Any = {"bits": "auto"}


def test_auto_bits_are_those_of_the_expectation_or_of_the_save() -> None:
    options = cnr.Options(**AUTO, expected_restores=2.5)

    def codec(**given: Any) -> Any:
        return options.codec_for("user", "table", 64, np.float32, **given)

    assert codec() == Asymmetric(bits=3).at_dim(64)
    assert codec(auto_bits=8) == Asymmetric(bits=8).at_dim(64)
    assert cnr.Options(**AUTO).auto_bits(20) == 4
    assert cnr.Options(**AUTO).auto_bits(21) == 8
    assert cnr.Options().codec_for(
        "user", "table", 64, np.float32, auto_bits=8
    ) == Asymmetric(bits=4).at_dim(64)


def test_auto_bits_are_for_slots_too() -> None:
    options = cnr.Options(**AUTO, codec=Raw(), slot_codec="symmetric")
    for bits in (4, 8):
        found = options.codec_for("user", "mu", 64, np.float32, auto_bits=bits)
        assert found == Symmetric(bits=bits)
        found = options.codec_for("user", "table", 64, np.float32, auto_bits=bits)
        assert found == Raw()


OWN_BITS = "bits='auto' has nothing to choose: Asymmetric.* has bits of its own"


@each_of(
    ("options", "message"),
    [
        ({**AUTO, "codec": Asymmetric()}, f"options: {OWN_BITS}"),
        (
            {"tables": {"user": cnr.TableOptions(codec=Asymmetric(), **AUTO)}},
            f"table 'user': {OWN_BITS}",
        ),
        (
            {"codec": Asymmetric(), "tables": {"user": cnr.TableOptions(**AUTO)}},
            f"table 'user': {OWN_BITS}",
        ),
        (
            # Whether there are other tables than "user" is not known here.
            {
                **AUTO,
                "codec": Asymmetric(),
                "tables": {"user": cnr.TableOptions(codec="adaptive", bits=3)},
            },
            f"options: {OWN_BITS}",
        ),
        ({"bits": "Auto", "codec": "raw"}, "bits is 'Auto', expected 2, 3, 4, 8 or"),
        (
            {"tables": {"user": cnr.TableOptions(bits="4")}},  # type: ignore[arg-type]
            "table 'user': bits is '4', expected",
        ),
        (
            {"expected_restores": 3},
            r"expected_restores=3 has no effect: got no bits.*\n.*both, in a run that",
        ),
        ({**AUTO, "expected_restores": -1}, "expected_restores is -1, expected a fin"),
        ({**AUTO, "expected_restores": "3"}, "expected_restores is '3', expected a f"),
        # There are no 8 bits to fall back to.
        ({**AUTO, "codec": "kmeans"}, "bits is 8, expected one of .*\n.*'auto' comes"),
        ({**AUTO, "codec": "unheard"}, r"codec 'unheard' is not known, [^\n]*$"),
    ],
)
def test_auto_bits_that_cannot_work_are_refused(options: Any, message: str) -> None:
    with pytest.raises(cnr.errors.OptionError, match=message):
        cnr.Options(**options)


@each_of(
    "options",
    [
        {**AUTO, "tables": {"user": cnr.TableOptions(codec=Asymmetric(bits=2))}},
        {
            **AUTO,
            "codec": Asymmetric(),
            "tables": {"user": cnr.TableOptions(codec="adaptive")},
        },
        {
            "expected_restores": 3,
            "tables": {"user": cnr.TableOptions(**AUTO)},
        },
        {
            "tables": {
                "user": cnr.TableOptions(codec=Raw(), slot_codec="adaptive", **AUTO)
            }
        },
    ],
)
def test_auto_bits_that_choose_something_are_taken(options: Any) -> None:
    made = cnr.Options(**options)
    assert made.encoding.follows_restores()
    widths = {
        getattr(made.codec_for(table, leaf, 64, np.float32, auto_bits=bits), "bits", 0)
        for table in ("user", "item")
        for leaf in ("table", "slot")
        for bits in (3, 8)
    }
    assert widths >= {3, 8}


class Naming(cnr.Consecutive):
    """A policy that may name a codec for any save."""


@each_of(
    ("options", "message"),
    [
        (
            {"codec": "raw", "bits": 4},
            "options: bits=4 has no effect: codec 'raw' has no",
        ),
        (
            {"codec": Raw(), "bits": 8},
            r"options: bits=8 has no effect: codec Raw",
        ),
        (
            {**AUTO, "codec": "raw"},
            "options: bits='auto' has nothing .*: codec 'raw' has",
        ),
        ({"codec": "log", "bits": 4, "slot_codec": "auto"}, "codec 'log' has no bits"),
        (
            {"tables": {"user": cnr.TableOptions(codec="raw", bits=4)}},
            "table 'user': bits=4 has no effect: codec 'raw' has no bits",
        ),
        (
            {"codec": "raw", "tables": {"user": cnr.TableOptions(bits=4)}},
            "table 'user': bits=4 has no effect: codec 'raw' has no bits",
        ),
        (
            {"codec": Asymmetric(bits=8), "bits": 4},
            "options: bits=4 has no effect: Asymmetric.* has bits of its own",
        ),
        # A policy names the codec of tables that have none of their own.
        (
            {
                "policy": Naming(),
                "tables": {"user": cnr.TableOptions(codec="raw", bits=4)},
            },
            "table 'user': bits=4 has no effect: codec 'raw' has no bits",
        ),
    ],
)
def test_bits_that_reach_no_codec_are_refused(options: Any, message: str) -> None:
    with pytest.raises(cnr.errors.OptionError, match=message):
        cnr.Options(**options)


@each_of(
    "options",
    [
        {"codec": "raw", "bits": 4, "slot_codec": "symmetric"},
        {
            "codec": "raw",
            "bits": 4,
            "tables": {"user": cnr.TableOptions(codec="greedy")},
        },
        {"bits": 4, "tables": {"user": cnr.TableOptions(codec="raw")}},
        {
            "tables": {
                "user": cnr.TableOptions(codec="raw", slot_codec="kmeans", bits=3)
            }
        },
        # They say the same.
        {"codec": Asymmetric(bits=8), "bits": 8},
        {"codec": "raw", "bits": 4, "policy": Naming()},
        {**AUTO, "codec": "raw", "policy": Naming()},
        {
            "codec": "raw",
            "policy": Naming(),
            "tables": {"user": cnr.TableOptions(bits=4)},
        },
    ],
)
def test_bits_that_reach_a_codec_are_taken(options: Any) -> None:
    made = cnr.Options(**options)
    assert all(getattr(made, name) == value for name, value in options.items())


OPEN = ("codec", "bits", "expected_restores", "slot_codec", "compression")


def test_what_is_not_given_is_one_value_in_all_options() -> None:
    none: Any = dict.fromkeys(("codec", "bits", "expected_restores"))
    table: Any = dict.fromkeys(("codec", "bits", "slot_codec"))
    made = cnr.Options(**none, tables={"user": cnr.TableOptions(**table)})
    assert made.tables == {"user": cnr.TableOptions()}
    options = dataclasses.replace(made, tables={}, policy=cnr.Full())
    assert options == cnr.Options(policy=cnr.Full())
    for each in (options, pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert all(getattr(each, name) is cnr.NOT_GIVEN for name in OPEN)
        assert each == options
    assert all(f"{name}=NOT_GIVEN" in repr(options) for name in OPEN)
    assert options != dataclasses.replace(options, compression=None)
    again = dataclasses.replace(options, codec="raw", slot_codec=cnr.NOT_GIVEN)
    assert again == cnr.Options(policy=cnr.Full(), codec="raw")


def test_a_compression_that_is_not_known_is_refused() -> None:
    with pytest.raises(cnr.errors.OptionError, match="'lz4' is not known"):
        cnr.Options(compression="lz4")  # type: ignore[arg-type]


BAD: list[Callable[[], Any]] = [
    lambda: cnr.Options(codec="zip"),
    lambda: cnr.Options(slot_codec="zip"),
    lambda: cnr.Options(bits=5),
    lambda: cnr.Options(bits="four"),  # type: ignore[arg-type]
    lambda: cnr.Options(staging="disk"),  # type: ignore[arg-type]
    lambda: cnr.Options(tracking="guessed"),  # type: ignore[arg-type]
    lambda: cnr.Options(max_staging_bytes=0),
    lambda: cnr.Options(tables={"user": cnr.TableOptions(bits=7)}),
    lambda: cnr.Intermittent(max_deltas=-1),
]


def test_bad_options_are_refused_when_made() -> None:
    for make in BAD:
        with pytest.raises(cnr.errors.OptionError):
            make()


class Exact:
    """A policy that has every save hold all bits."""

    name: ClassVar[str] = "exact"

    def decide(self, history: Any) -> cnr.Decision:
        return cnr.Decision(kind="full", parent=None, codec="raw", reason="mine")


@each_of(
    "given",
    [{"bits": 4}, {"bits": 4, "tables": {"user": cnr.TableOptions(bits=8)}}, AUTO],
)
def test_bits_do_not_contradict_the_codec_that_a_policy_names(
    tmp_path: Any, given: Any
) -> None:
    state = {"user": jnp.linspace(0.0, 1.0, 32).reshape(8, 4), "w": jnp.ones(3)}
    tables, root = cnr.find_tables(state, ["user"]), tmp_path / str(len(given))
    root = root / str(given["bits"])
    options = cnr.Options(policy=Exact(), **given)
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        # The policy is asked from the second save on.
        for step in (0, 1):
            manager.save(step, args=cnr.args.Save(state))
        got = manager.restore(1, args=cnr.args.Restore(state)).state
    np.testing.assert_array_equal(got["user"], state["user"])
