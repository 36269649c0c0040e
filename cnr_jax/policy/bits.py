"""Width of codes, from the expected restores of a run and the motion of its rows.

Error enters training only when a checkpoint is restored, so the damage grows with the number of
restores, not of saves. Each restore does more damage if rows have moved little since the one
before. The invariant to remember: once a run has been restored more often than was expected, all
its saves take at least 8 bits, since the forecast has proved wrong. Measurements only add bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Real

from cnr_jax.errors import OptionError

ASSUMED_RESTORES = 20
"""Expected where nothing is said: 4 bits, which fixed widths have by default too."""

FALLBACK_BITS = 8
"""Tolerates more than 100 restores in the paper's evaluation."""

CODE_BITS = (2, 3, 4, FALLBACK_BITS)
"""Widths of codes that quantizers have."""

RAW_BITS = 32
"""In the place of a width: rows are stored as they are."""

SMALL_PERCENT = 1
"""Of all elements, at most as many as small tables have together."""

# Values of `noise_of` up to which rounding does no harm, and above which it was seen to do harm:
# measured on trainings of several kinds, see docs/accuracy.md. Between them nobody need be warned.
_HARMLESS_NOISE, _HARMFUL_NOISE = 0.5, 0.66

# Most restores, and the width that keeps the loss of accuracy below 0.01 % for so many.
_WIDTHS = ((1, 2), (3, 3), (20, 4))


def bits_for(expected_restores: float) -> int:
    """Returns the width of a code for a run that is expected to be restored so often.

    Args:
        expected_restores: number of restores over the whole run, 0 or more.

    Raises:
        OptionError: if that is not a number, or negative.

    Example:
        >>> [bits_for(restores) for restores in (0, 1, 1.2, 3, 20, 21)]
        [2, 2, 3, 3, 4, 8]

    Source: Check-N-Run (NSDI'22), dynamic bit-width selection.
    """
    _check_number("expected_restores", expected_restores)
    for most, bits in _WIDTHS:
        if expected_restores <= most:
            return bits
    return FALLBACK_BITS


def bits_after(
    restores: int, expected_restores: float, even_bits: float | None = None
) -> int:
    """Returns the width of a code in a save, after so many restores of its run.

    Args:
        restores: how often the run was restored along the branch that goes on.
        expected_restores: number of restores over the whole run, those so far included.
        even_bits: motion of its rows from restore to restore, or since the first save, see
            `SampledMotion`; None: not known.

    Returns:
        The width for the expected restores, or 8 once there have been more; or the width that
        the motion asks for, if that is greater. `RAW_BITS` only once the run was restored.

    Raises:
        OptionError: as `bits_for`.

    Example:
        >>> [bits_after(restores, expected_restores=3) for restores in (0, 3, 4)]
        [3, 3, 8]
        >>> [bits_after(restores, 3, even_bits=8) for restores in (0, 3)]
        [8, 32]

    Source: Check-N-Run (NSDI'22), fallback when restores exceed the estimate.
    """
    bits = bits_for(expected_restores)
    if restores > expected_restores:
        bits = FALLBACK_BITS
    if even_bits is None:
        return bits
    needed = bits_for_motion(even_bits)
    # A run that was not restored yet may be restored just once: no cause to save all bits.
    return max(bits, needed if restores else min(needed, FALLBACK_BITS))


def bits_for_motion(even_bits: float) -> int:
    """Returns the least width that does no harm to rows that move so little.

    Args:
        even_bits: motion of the run's rows from restore to restore, see `SampledMotion`.

    Returns:
        2, 3, 4 or 8; `RAW_BITS` if 8 are too few.

    Example:
        >>> [bits_for_motion(bits) for bits in (-3, 1, 2, 3, 5, 8)]
        [2, 2, 3, 4, 8, 32]

    Differs from Check-N-Run in: there the number of restores alone decides.
    """
    for bits in CODE_BITS:
        if noise_of(bits, even_bits) <= _HARMLESS_NOISE:
            return bits
    return RAW_BITS


def dithered_bits(restores: int, even_bits: float | None = None) -> int:
    """Returns the widest codes that `rounding="auto"` dithers in a save; 0: it dithers none.

    Dither keeps restores from undoing small motion, but doubles the squared error. So codes are
    dithered once the run was restored, unless rows are known to move far enough from restore to
    restore. Their motion before the first restore does not tell how soon the second one comes.

    Args:
        restores: how often the run was restored along the branch that goes on.
        even_bits: motion of its rows since the restore before, taken when it was restored, see
            `SampledMotion`; None: not known.

    Example:
        >>> dithered_bits(0), dithered_bits(1, even_bits=-3), dithered_bits(2)
        (0, 8, 8)
        >>> [dithered_bits(2, even_bits=bits) for bits in (-3, 1, 2, 3, 8)]
        [0, 0, 2, 3, 8]
    """
    if restores < 2 or even_bits is None:
        return FALLBACK_BITS if restores else 0
    return max(
        (b for b in CODE_BITS if noise_of(b, even_bits) > _HARMLESS_NOISE), default=0
    )


def is_harmful(even_bits: float, bits: int) -> bool:
    """Returns whether restores of codes of this width may well cost accuracy.

    Args:
        even_bits: motion of the run's rows from restore to restore, see `SampledMotion`.
        bits: width of a code; `RAW_BITS`: nothing is rounded.

    Example:
        >>> [is_harmful(3.0, bits) for bits in (2, 3, 4, RAW_BITS)]
        [True, True, False, False]
    """
    return bits != RAW_BITS and noise_of(bits, even_bits) > _HARMFUL_NOISE


def width_told(bits: int) -> str:
    """Returns a width in words.

    Example:
        >>> width_told(4), width_told(RAW_BITS)
        ('4 bits', 'all bits')
    """
    return "all bits" if bits == RAW_BITS else f"{bits} bits"


def noise_of(bits: int, even_bits: float) -> float:
    """Returns the squared error of codes as a share of the squared motion of rows.

    Args:
        bits: width of a code.
        even_bits: motion of the rows, see `SampledMotion`.

    Example:
        >>> [round(noise_of(bits, even_bits=4.0), 3) for bits in (2, 3, 4, 8)]
        [28.444, 5.224, 1.138, 0.004]
    """
    ratio = even_bits - math.log2(2**bits - 1)
    # A manifest may say anything, and a float holds its own range alone.
    return float(4.0 ** max(-500.0, min(500.0, ratio)))


def older_bits(errors: Mapping[int, float | None]) -> int | None:
    """Returns the width in which rows were stored before, if their errors show it.

    Args:
        errors: error of the rows by width of codes; None: not known.

    Returns:
        The narrowest width with no greater error than the next wider one. Rows have such errors if
        a restore brought them, and training has not moved them since. None: there is no such
        width, or no width errs.

    Example:
        >>> older_bits({2: 0.25, 3: 0.0, 4: 0.056, 8: 0.003}), older_bits({2: 0.2, 3: 0.1})
        (3, None)
    """
    known = [(bits, e) for bits, e in sorted(errors.items()) if e is not None]
    if not any(error for _, error in known):
        return None  # rows that each width stores exactly
    # Errors fall with the width, unless rows lie on the codes of the narrower one already.
    for (bits, error), (_, wider) in itertools.pairwise(known):
        if error <= wider:
            return bits
    return None


def small_tables(elements: Mapping[str, int]) -> frozenset[str]:
    """Returns the tables that take `FALLBACK_BITS` however few restores are expected.

    Their few rows are looked up often: each rounding of them reaches many examples, and most of
    the accuracy that restores cost is lost there. For a hundredth of the elements, 8 bits in place
    of 2 add 3 % to the codes of a full save. They add 27 % to those of a delta that holds all of
    these elements, but a tenth of the others.

    Codes cost bytes by element: a table of few but very wide rows is not small. Tables of one size
    are small together or not at all, so names have no say.

    Args:
        elements: number of elements, 1 or more, by table with a width that follows the restores;
            the rows of all processes count.

    Returns:
        The tables of fewest elements that together have at most `SMALL_PERCENT` of all.

    Example:
        >>> sizes = {"user": 64_000_000, "item": 9_000_000, "day": 448, "airport": 22_000}
        >>> sorted(small_tables(sizes))
        ['airport', 'day']

    Differs from Check-N-Run in: there all tables have the width for the expected restores.
    """
    total, taken, small = sum(elements.values()), 0, set[str]()
    by_size = sorted(elements, key=elements.__getitem__)
    for size, group in itertools.groupby(by_size, elements.__getitem__):
        names = list(group)
        taken += size * len(names)
        if 100 * taken > SMALL_PERCENT * total:
            break
        small.update(names)
    return frozenset(small)


def widths_of(
    tables: Iterable[str], small: Collection[str], auto_bits: int
) -> dict[str, int]:
    """Returns the width of the codes of each table whose width follows the restores.

    Args:
        tables: names of all these tables.
        small: those among them that `small_tables` names.
        auto_bits: width for the restores.

    Example:
        >>> widths_of(["user", "day"], {"day"}, 3)
        {'user': 3, 'day': 8}
    """
    of_small = max(FALLBACK_BITS, auto_bits)
    return {name: of_small if name in small else auto_bits for name in tables}


def expected_restores(*, node_mtbf_hours: float, nodes: int, job_hours: float) -> float:
    """Returns how often a job is expected to be restored: once for each failure.

    The number is a mean: the actual number scatters around it by about its square root.

    Args:
        node_mtbf_hours: mean time between failures of one node, in hours.
        nodes: number of nodes that the job runs on; the failure of any of them ends it.
        job_hours: hours that the job trains for, restarts included.

    Raises:
        OptionError: if an argument is not a number, or negative, or `node_mtbf_hours` is 0.

    Example:
        >>> expected_restores(node_mtbf_hours=4000, nodes=16, job_hours=500)
        2.0

    Source: Check-N-Run (NSDI'22): failure probability times nodes times time.
    """
    _check_number("node_mtbf_hours", node_mtbf_hours)
    _check_number("nodes", nodes)
    _check_number("job_hours", job_hours)
    if node_mtbf_hours == 0:
        raise OptionError("node_mtbf_hours is 0: there would be no end of failures")
    return nodes * job_hours / node_mtbf_hours


def _check_number(name: str, value: object) -> None:
    got = "beyond all floats"
    try:
        if not isinstance(value, bool) and isinstance(value, Real):
            # False for nan too.
            if 0 <= float(value) < math.inf:
                return
        got = f"{value!r}"
    except OverflowError:
        pass
    raise OptionError(f"{name} is {got}, expected a finite number of 0 or more")
