"""Results of `try_bits`: losses with their intervals, verdicts, and the recommended width.

To remember: a width is recommended only for what was measured of it, and never because the
measurement was too uncertain.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cnr_jax.checkpointer.trying.given import Width, named
from cnr_jax.policy.bits import older_bits
from cnr_jax.repository.description import aligned, amount, share_told
from cnr_jax.texts import count_of

Verdict = Literal["harmless", "harmful", "open"]
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a metric by rounding: positive is worse, in the units of the metric.

    Attributes:
        values: difference to the state as it is, one for each seed; a single one if nothing was
            random.
        within: largest accepted loss.
        random: whether seeds could give other values, because rows were rounded, and dithered or
            trained on.
    """

    values: tuple[float, ...]
    within: float
    random: bool

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return statistics.fmean(self.values)

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % interval of the mean, by Student's t.

        It is 0 if nothing was random. It is None if the spread is not known: with a single seed, or
        with seeds that all gave the same value, as if nothing depended on them.
        """
        if not self.random:
            return 0.0
        count = len(self.values)
        if len(set(self.values)) == 1:
            return None
        spread = statistics.stdev(self.values) / math.sqrt(count)
        return t_quantile(count - 1) * spread

    @property
    def is_gain(self) -> bool:
        """Whether the metric is better by more than `within`, and more than chance."""
        margin = self.margin
        return margin is not None and -self.mean > max(margin, self.within)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the rounding: `"harmless"`, `"harmful"` or `"open"`.

        Harmless: the mean is at most `within`, and so is the margin or the upper end of the
        interval. Harmful: the mean is above `within`, and can be told from zero. Open: neither, or
        the spread is not known. More seeds, that differ, would tell.
        """
        mean, margin = self.mean, self.margin
        if margin is None:
            return "open"
        if mean <= self.within:
            sure = min(margin, mean + margin) <= self.within
            return "harmless" if sure else "open"
        return "harmful" if mean > margin else "open"

    def __str__(self) -> str:
        if not self.random:
            return f"{self.mean:.3g}"
        margin = "?" if self.margin is None else f"{self.margin:.2g}"
        return f"{self.mean:.3g} ± {margin}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriedWidth:
    """Result of `try_bits` for one width: its losses, bytes and errors.

    Attributes:
        bits: width of a code; `"raw"`: tables were stored exactly.
        losses: loss by metric.
        metrics: mean over the seeds, by metric.
        table_bytes: bytes of codes and metadata of all rows of tables, and of rows that are stored
            exactly beside them: those of a full save before compression, without the headers and
            checksums of arrays.
        slot_bytes: bytes of the same for optimizer slots.
        mean_row_error: mean of `||row - read|| / ||row||` over rounded rows of tables, without rows
            of zeros; over parts of rows if columns are sharded. None if no row is rounded. It is
            the error of the first restore and seed, so of nearest codes unless the options dither
            from the beginning.
        worst_row_error: greatest of these errors.
    """

    bits: Width
    losses: Mapping[str, Loss]
    metrics: Mapping[str, float]
    table_bytes: int
    slot_bytes: int
    mean_row_error: float | None
    worst_row_error: float | None

    @property
    def verdict(self) -> Verdict:
        """Verdict on the worst of the losses."""
        found = {loss.verdict for loss in self.losses.values()}
        order: tuple[Verdict, ...] = ("harmful", "open", "harmless")
        return next(each for each in order if each in found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriedBits:
    """Result of `try_bits`: what each width costs, and the recommended one. Prints as a table.

    Attributes:
        metrics: metrics of the state as it is; means over the seeds if it was trained.
        widths: results by width, the narrowest first.
        seeds: number of seeds that were tried; 1 if nothing was random.
        restores: how often the state was restored in turn.
        trained: whether `train` ran after each restore.
        random: whether seeds could differ, because rows were dithered or trained on.
        within: largest accepted loss, by metric.
        dense_bytes: bytes of everything that is neither table nor slot, in memory.
        state_bytes: bytes of all arrays of the state, in memory.
    """

    metrics: Mapping[str, float]
    widths: tuple[TriedWidth, ...]
    seeds: int
    restores: int
    trained: bool
    random: bool
    within: Mapping[str, float]
    dense_bytes: int
    state_bytes: int

    @property
    def recommended(self) -> Width | None:
        """Narrowest harmless width above which none is harmful; None if there is none.

        If a wider one is harmful, a narrower one is harmless only by chance.
        """
        found: Width | None = None
        for each in reversed(self.widths):
            if each.verdict == "harmful":
                break
            if each.verdict == "harmless":
                found = each.bits
        return found

    def full_bytes(self, bits: Width) -> int:
        """Bytes of a full save: stored tables and slots, and everything else.

        Raises:
            KeyError: if this width was not tried.
        """
        found = {each.bits: each for each in self.widths}[bits]
        return found.table_bytes + found.slot_bytes + self.dense_bytes

    @property
    def sentence(self) -> str:
        """The recommendation in a sentence, and how sure it is."""
        chosen = self.recommended
        text = "no width recommended: none that was tried is known to be harmless"
        narrower = list(itertools.takewhile(lambda e: e.bits != chosen, self.widths))
        if chosen is not None:
            losses = self.widths[len(narrower)].losses.items()
            text = f"{named(chosen)} recommended: " + ", ".join(
                f"loss of {name} {loss} (accepted: {loss.within:.3g})"
                for name, loss in losses
            )
        unclear = [each for each in narrower if each.verdict == "open"]
        unclear = [named(e.bits) for e in unclear if not self._with_equal_seeds(e)]
        more = f"; more seeds would tell of {', '.join(unclear)}" if unclear else ""
        return f"{text}; {self._basis()}{more}{self._doubts()}"

    def _doubts(self) -> str:
        """Doubts about all figures, if there are any."""
        text = ""
        equal = [named(e.bits) for e in self.widths if self._with_equal_seeds(e)]
        if equal:
            text = (
                f"; all seeds gave the same loss with {', '.join(equal)}, so its spread is not"
                " known: does train use its seed, and does evaluate tell small changes?"
            )
        rounded = [each for each in self.widths if each.mean_row_error is not None]
        for name in self.metrics:
            losses = [each.losses[name] for each in rounded]
            if losses and all(each.is_gain for each in losses):
                text += (
                    f"; every width gains in {name}: is better= the right way round?"
                )
        errors = {int(each.bits): each.mean_row_error for each in rounded}
        if (older := older_bits(errors)) is not None:
            text += (
                f"; rows lie on codes of {older} bits, as a restore brought them:"
                " try it again once they were trained on"
            )
        return text

    def _with_equal_seeds(self, width: TriedWidth) -> bool:
        """Whether a loss of a width is the same on all of several seeds."""
        return self.seeds > 1 and any(x.margin is None for x in width.losses.values())

    def _basis(self) -> str:
        seeds = f"on {count_of(self.seeds, 'seed')}"
        if not self.trained:
            found = seeds if self.random else "nothing was random"
            return f"{found}, no training after the restore was tried"
        if self.restores == 1:
            return f"{seeds}, trained on after the restore"
        return f"{seeds}, trained on after each of {self.restores} restores"

    def asdict(self) -> dict[str, Any]:
        """All fields, and figures that follow from them, as values of JSON."""
        found = dataclasses.asdict(self)
        for each, document in zip(self.widths, found["widths"], strict=True):
            document["verdict"] = each.verdict
            document["full_bytes"] = self.full_bytes(each.bits)
            document["losses"] = {
                name: {
                    "mean": loss.mean,
                    "margin": loss.margin,
                    "values": list(loss.values),
                    "verdict": loss.verdict,
                }
                for name, loss in each.losses.items()
            }
        found["widths"] = list(found["widths"])
        return {**found, "recommended": self.recommended, "sentence": self.sentence}

    def __str__(self) -> str:
        head = ["bits", "full save", "row error"]
        for name in self.metrics:
            head += [name, "loss"]
        exact = ["as it is", amount(self.state_bytes), ""]
        for value in self.metrics.values():
            exact += [f"{value:.6g}", ""]
        rows = [[*head, ""], [*exact, ""]]
        for each in self.widths:
            row = [str(each.bits), amount(self.full_bytes(each.bits))]
            row.append(share_told(each.mean_row_error))
            for name, loss in each.losses.items():
                row += [f"{each.metrics[name]:.6g}", str(loss)]
            rows.append([*row, each.verdict])
        right = set(range(1, len(head)))
        return "\n".join([*aligned(rows, right=right), self.sentence])


def losses_of(
    exact: Sequence[Mapping[str, float]],
    rounded: Sequence[Mapping[str, float]],
    better: Mapping[str, str],
    within: Mapping[str, float],
    *,
    random: bool,
) -> dict[str, Loss]:
    """Loss of each metric, paired by seed.

    Args:
        exact: metrics of the state as it is, one for each seed.
        rounded: metrics of the restored state, likewise.
        better: `"higher"` or `"lower"`, by metric.
        within: the largest accepted loss, by metric.
        random: whether seeds could differ in the rounded state alone.
    """
    return {
        name: Loss(
            tuple(
                a[name] - b[name] if way == "higher" else b[name] - a[name]
                for a, b in zip(exact, rounded, strict=True)
            ),
            within[name],
            random,
        )
        for name, way in better.items()
    }


def t_quantile(freedom: int) -> float:
    """Quantile of Student's t for both sides of a `CONFIDENCE` interval.

    Args:
        freedom: degrees of freedom, 1 or more.

    Example:
        >>> [round(t_quantile(n), 3) for n in (1, 2, 11)]
        [12.706, 4.303, 2.201]

    Source: M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
    """
    # The probability that |t| is less grows with the angle whose tangent is t / sqrt(freedom).
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if _probability(angle, freedom) < CONFIDENCE:
            low = angle
        else:
            high = angle
    return math.tan(low) * math.sqrt(freedom)


def _probability(angle: float, freedom: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * n / (n + 1)
    total *= sine
    return 2 / math.pi * (angle + total) if odd else total
