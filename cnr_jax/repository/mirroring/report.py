"""Report of a mirror: what it has done, and how far it is behind its root."""

from __future__ import annotations

import dataclasses

from cnr_jax.repository.description import amount
from cnr_jax.texts import count_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """Report of a mirror: what it has done since it was opened, and how far it is behind its root.

    Attributes:
        root: path of the root.
        mirror: path or URL of the mirror.
        copied_steps: number of steps that were copied.
        removed_steps: number of older steps that `mirror_keep` has let go of in the mirror.
        skipped_steps: numbers of steps that retention removed from the root before they were
            copied.
        mended: paths of files that were mended, and of steps that were brought back.
        problems: why steps are not copied, one line each. Steps that rest on them are not copied
            either.
        lag_steps: number of committed steps that are not in the mirror, and are lost with the root.
            All steps of the run count until the mirror has been looked at.
        lag_secs: seconds since the oldest of these steps was committed; 0 if there is none.
        backlog_bytes: bytes of these steps.
    """

    root: str
    mirror: str
    copied_steps: int = 0
    removed_steps: int = 0
    skipped_steps: tuple[int, ...] = ()
    mended: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    lag_steps: int = 0
    lag_secs: float = 0.0
    backlog_bytes: int = 0

    def __str__(self) -> str:
        """One line."""
        done = f"{count_of(self.copied_steps, 'step')} copied to {self.mirror}"
        if self.mended:
            done += f", {count_of(len(self.mended), 'file or step', 'files or steps')} mended"
        if self.removed_steps:
            done += f", {count_of(self.removed_steps, 'step')} removed there"
        if self.skipped_steps:
            done += f", {count_of(len(self.skipped_steps), 'step')} skipped"
        if self.lag_steps:
            done += (
                f"; behind by {count_of(self.lag_steps, 'step')}, {self.lag_secs:.1f} s,"
                f" {amount(self.backlog_bytes)}"
            )
        return done
