"""What is decided about one save."""

from __future__ import annotations

import dataclasses

from cnr_jax.format import names
from cnr_jax.format.encodings import EncodingEntry
from cnr_jax.format.manifest import Fork, Kind, ParentRef
from cnr_jax.repository.index.entries import Entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Decision about one save, the same on every process.

    Attributes:
        uuid: uuid of the save.
        directory: name of the step directory.
        lineage: lineage of the stamps that choose rows.
        clock: clock of the stamps that choose rows, in this save.
        parent: parent that a delta rests on; None if the save is full.
        generation: generation of its branch.
        codec: codec that the policy names; None for that of the options.
        policy: name of the policy that decided.
        reason: why the save is full, or a delta.
        restores: how often a run was restored along this chain.
        run: run of the save; empty for that of steps whose manifests name none.
        forks: where the branch of this save leaves older ones.
        exact: whether rows are stored raw, whatever their codecs.
        encoding: encoding of the run that goes on, for options not given; None if none goes on.
        auto_bits: width of codes where options leave it to the number of restores, except in small
            tables; None if they leave none to it.
        dithered_bits: width of the widest codes that are dithered, the same for all saves of a
            lineage; 0 if none are dithered.
        abandoned: step directories to rename before this one is written. If this one has a
            generation in its name, they stay, and its commit leaves them behind.
        earlier: folder of the root that `abandoned` are moved into instead, because a new run
            begins; empty if none does.
    """

    uuid: str
    directory: str
    lineage: str
    clock: int
    parent: ParentRef | None
    generation: int
    codec: str | None
    policy: str
    reason: str
    restores: int
    run: str
    forks: tuple[Fork, ...] | None
    exact: bool
    encoding: EncodingEntry | None
    auto_bits: int | None = None
    dithered_bits: int = 0
    abandoned: tuple[str, ...]
    earlier: str

    @property
    def step(self) -> int:
        """Number of the step."""
        return names.step_number(self.directory)

    @property
    def leaves_behind(self) -> bool:
        """Whether `abandoned` stay where they are, and the commit leaves them behind."""
        return names.branch_generation(self.directory) > 0

    @property
    def kind(self) -> Kind:
        """Full, or a delta on its parent."""
        return "full" if self.parent is None else "delta"

    @property
    def entry(self) -> Entry:
        """Entry of the save as long as it is being written."""
        return Entry(
            directory=self.directory,
            step=self.step,
            uuid=self.uuid,
            generation=self.generation,
            parent=self.parent,
            run=self.run,
            forks=self.forks,
        )
