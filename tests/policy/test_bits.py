from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cnr_jax.errors import OptionError
from cnr_jax.policy import bits_after, bits_for, expected_restores, small_tables
from cnr_jax.policy.bits import bits_for_motion, is_harmful, older_bits

from ..conftest import each_of


@each_of(
    ("restores", "bits"),
    [
        (0, 2),
        (0.01, 2),
        (1, 2),
        (1.001, 3),
        (2, 3),
        (3, 3),
        (3.5, 4),
        (4, 4),
        (20, 4),
        (20.01, 8),
        (21, 8),
        (100, 8),
        (1e9, 8),
        (np.float32(3), 3),
        (np.int64(20), 4),
        (Fraction(7, 2), 4),
    ],
)
def test_width_has_the_thresholds_of_the_paper(restores: Any, bits: int) -> None:
    assert bits_for(restores) == bits
    assert bits_after(0, restores) == bits


@each_of("expected", [0, 0.3, 1, 2, 3, 7.5, 20, 21, 50])
def test_one_restore_too_many_makes_it_eight_bits_for_good(expected: float) -> None:
    usual = bits_for(expected)
    for restores in range(60):
        wanted = usual if restores <= expected else 8
        assert bits_after(restores, expected) == wanted


@each_of(
    ("elements", "small"),
    [
        ({}, ""),
        ({"a": 1}, ""),
        ({"a": 10**9}, ""),
        ({"a": 99, "b": 1}, "b"),
        ({"a": 98, "b": 1}, ""),
        ({"a": 9900, "b": 60, "c": 40}, "b c"),
        ({"a": 9899, "b": 61, "c": 40}, "c"),
        # One that does not fit leaves no room for a bigger one.
        ({"a": 9000, "b": 101, "c": 50, "d": 30}, "c d"),
        ({"a": 9000, "b": 62, "c": 50, "d": 30}, "c d"),
        # Of one size: all, or none.
        ({"a": 980, "b": 5, "c": 5}, ""),
        ({"a": 990, "b": 5, "c": 5}, "b c"),
        (dict.fromkeys("abcdefgh", 7), ""),
        ({str(i): 10 for i in range(1000)} | {"a": 1}, "a"),
    ],
)
def test_small_tables_have_at_most_a_hundredth_of_the_elements(
    elements: dict[str, int], small: str
) -> None:
    assert small_tables(elements) == set(small.split())
    backwards = dict(reversed(elements.items()))
    assert small_tables(backwards) == set(small.split()), "the order has a say"


def test_expected_restores_are_failures_of_any_node_in_the_time_of_the_job() -> None:
    assert expected_restores(node_mtbf_hours=720, nodes=16, job_hours=72) == 1.6
    assert expected_restores(node_mtbf_hours=1e5, nodes=1, job_hours=1) == 1e-5
    assert expected_restores(node_mtbf_hours=720, nodes=16, job_hours=0) == 0


@each_of("value", [-1, -0.001, math.nan, math.inf, "3", None, [3]])
def test_what_is_no_number_of_restores_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"expected_restores is .*expected a finite"):
        bits_for(value)
    good: dict[str, Any] = {"node_mtbf_hours": 1, "nodes": 1, "job_hours": 1}
    for name in good:
        with pytest.raises(OptionError, match=f"{name} is .*expected a finite number"):
            expected_restores(**{**good, name: value})


def test_nodes_that_fail_all_the_time_are_refused() -> None:
    with pytest.raises(OptionError, match="node_mtbf_hours is 0"):
        expected_restores(node_mtbf_hours=0, nodes=1, job_hours=1)


@each_of(
    ("errors", "bits"),
    [
        # As of trained rows, and of rows on codes of 2, 3, 4 and 8 bits.
        ({2: 0.3, 3: 0.13, 4: 0.06, 8: 0.003}, None),
        ({2: 0.0, 3: 0.13, 4: 0.001, 8: 7e-8}, 2),
        ({2: 0.3, 3: 0.0, 8: 0.0035}, 3),
        ({2: 0.3, 3: 0.13, 4: 0.0, 8: 0.0}, 4),
        ({2: 0.3, 3: 0.13, 4: 0.06, 8: 0.0}, None),
        # Stored exactly in each width, or not known.
        ({2: 0.0, 3: 0.0, 4: 0.0, 8: 0.0}, None),
        ({2: 0.3, 3: None, 4: None}, None),
        ({}, None),
    ],
)
def test_rows_on_codes_are_told_by_errors_that_do_not_fall(
    errors: dict[int, float | None], bits: int | None
) -> None:
    assert older_bits(errors) == bits


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_motion_asks_for_more_bits_where_it_was_measured_to_do_harm(bits: int) -> None:
    """The marks of docs/accuracy.md: moving them takes measuring anew."""
    even_bits = math.log2(2**bits - 1)
    harmless, harmful = (even_bits + math.log2(x) / 2 for x in (0.5, 0.66))
    assert bits_for_motion(harmless - 0.01) <= bits < bits_for_motion(harmless + 0.01)
    assert is_harmful(harmful + 0.01, bits) and not is_harmful(harmful - 0.01, bits)
