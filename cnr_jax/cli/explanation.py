"""Explanation of a save: why it was full or a delta, and what the predictor forecasts."""

from __future__ import annotations

import dataclasses
from typing import Any

from cnr_jax.cli.roots import chain_of
from cnr_jax.format.manifest import Manifest
from cnr_jax.policy import SaveRecord
from cnr_jax.policy.baseline import since_baseline
from cnr_jax.policy.intermittent import forecast_next, full_is_due
from cnr_jax.repository.description import (
    RootDescription,
    StepDescription,
    aligned,
    amount,
)
from cnr_jax.repository.index.entries import records
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.step import read_step
from cnr_jax.texts import count_of

# Lines of a table of saves, its header included.
_SHOWN = 14


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of a step: why it is full or a delta.

    Attributes:
        step: the step that is explained.
        chain: the steps that it rests on, itself last.
        seen: the saves since the baseline that the policy saw, oldest first.
        seen_in: step with the manifest that lists them; None: there was no save before.
        forecast_bytes: bytes of the next delta, as the default policy forecasts it; None without a
            delta to go by.
        average_bytes: mean bytes of the saves seen; None without any.
        is_due: whether the default policy, at its defaults, takes a full save after those seen.
    """

    step: StepDescription
    chain: tuple[StepDescription, ...]
    seen: tuple[SaveRecord, ...]
    seen_in: int | None
    forecast_bytes: float | None
    average_bytes: float | None
    is_due: bool

    def asdict(self) -> dict[str, Any]:
        """All fields as values of JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found["step"], found["chain"] = self.step.step, [s.step for s in self.chain]
        found["seen"] = [dataclasses.asdict(each) for each in self.seen]
        told = ("kind", "parent", "policy", "reason", "generation")
        return {**found, **{name: getattr(self.step, name) for name in told}}


def explained(root: RootDescription, step: StepDescription) -> Explanation:
    """Explains why a step is full or a delta.

    A delta lists the saves before it. A full save begins a new list, so they are taken from the
    save before it in its branch, if that is still there. A full save that begins a branch does not
    name the step that was restored.

    Raises:
        IntegrityError, FormatError: if its manifest cannot be read.
    """
    there = {each.step: each for each in root.steps if each.run == step.run}

    def restored(number: int) -> tuple[int, int] | None:
        if number not in there:
            return None
        chain = chain_of(root, there[number])
        rows_bytes = sum(
            each.table_bytes + each.slot_bytes + each.merged_bytes for each in chain
        )
        return len(chain), rows_bytes + chain[-1].dense_bytes

    own = _manifest(root, step)
    seen, seen_in = records(own.history, restored)[:-1], step.step
    if step.kind == "full":
        before = _before(root, step)
        seen = records(_manifest(root, before).history, restored) if before else []
        seen_in = before.step if before else None
    cycle = since_baseline(seen)
    sizes = [save.bytes for save in cycle[1:]]
    return Explanation(
        step=step,
        chain=tuple(chain_of(root, step)),
        seen=cycle,
        seen_in=seen_in if cycle else None,
        forecast_bytes=float(forecast_next(sizes)) if sizes else None,
        average_bytes=sum(s.bytes for s in cycle) / len(cycle) if cycle else None,
        is_due=bool(cycle) and full_is_due(sizes, full_size=cycle[0].bytes),
    )


def _manifest(root: RootDescription, step: StepDescription) -> Manifest:
    return read_step(open_root(root.root), step.directory, root.item or "default")


def _before(root: RootDescription, step: StepDescription) -> StepDescription | None:
    """Save before a step in its branch, by the time of their manifests.

    Later steps are left out, as a step that `compact` has made tells the time of that.
    """
    when = step.saved_at
    if when is None:
        return None
    earlier = [
        (each.saved_at, each.step, each)
        for each in root.steps
        if each.saved_at is not None
        and each.saved_at < when
        and each.step < step.step
        and (each.run, each.generation) == (step.run, step.generation)
    ]
    return max(earlier, key=lambda found: found[:2])[2] if earlier else None


def lines_of(found: Explanation) -> list[tuple[str, str]]:
    """Lines of an explanation, each with its style."""
    step = found.step
    what = step.kind if step.parent is None else f"{step.kind} on {step.parent}"
    is_made = step.merged_bytes == step.total_bytes
    by = "made by compact" if is_made else f"by the policy {step.policy!r}"
    lines = [
        (f"step {step.step}: {what}, {by}", "bold"),
        (f"reason:  {step.reason}", ""),
        (f"chain:   {' <- '.join(f'{s.step} ({s.kind})' for s in found.chain)}", ""),
    ]
    if not found.seen:
        # No manifest tells which of these it is.
        why = "it is the first of its run or branch, or the one before it is not there any more"
        return [*lines, (f"seen:    no save: {why}", "")]
    head = f"seen:    {count_of(len(found.seen), 'save')} since the baseline"
    if found.seen_in != step.step:
        head += f", as step {found.seen_in} lists them"
    rows = [["step", "kind", "rows", "bytes", "secs", "average so far"]]
    total = 0
    for i, save in enumerate(found.seen, start=1):
        total += save.bytes
        row = [save.kind, f"{save.rows:,}", amount(save.bytes), f"{save.secs:.2f}"]
        rows.append([str(save.step), *row, amount(total / i)])
    if len(rows) > _SHOWN:
        left = len(rows) - _SHOWN
        rows[2 : 2 + left] = [[f"({left} more)", *[""] * 5]]
    table = aligned(rows, right={2, 3, 4, 5})
    lines += [(head, ""), *((f"  {line}", "") for line in table)]
    if found.forecast_bytes is None or found.average_bytes is None:
        return [*lines, ("forecast: none yet, without a delta to go by", "")]
    compared = "less than" if not found.is_due else "no less than"
    lines.append(
        (
            f"forecast: the next delta would take about {amount(found.forecast_bytes)},"
            f" {compared} the average save, {amount(found.average_bytes)}:"
            f" {'a new baseline pays' if found.is_due else 'a delta'}",
            "",
        )
    )
    if step.policy != "intermittent":
        lines.append((f"          {step.policy!r} does not ask for it", "dim"))
    return lines
