"""What is decided about one save, and the merged baseline that it may bring along."""

from __future__ import annotations

import dataclasses

from cnr_jax.format import names
from cnr_jax.format.encodings import EncodingEntry
from cnr_jax.format.manifest import Fork, Kind, ParentRef
from cnr_jax.repository.index.entries import Entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergedBaseline:
    """Rows of the chain of a step, merged into those of one process of a save that is to come.

    Attributes:
        folder: name of the folder of the root that they are in, which no reader lists.
        directory: name of the step directory that was merged.
        uuid: uuid of its checkpoint.
        process: number of the process; those before it save the rest of the step.
        layers: number of layers of its tiles. Rows of the save lie in a layer above them.
        digest: SHA-256 of the process manifest, in hexadecimal digits.
        bytes: size of that manifest.
        table_bytes: bytes of its rows of tables, as in `Totals`.
        slot_bytes: bytes of its rows of slots.
        merged: number of checkpoints that were merged.
    """

    folder: str
    directory: str
    uuid: str
    process: int
    layers: int
    digest: str
    bytes: int
    table_bytes: int
    slot_bytes: int
    merged: int

    @property
    def all_bytes(self) -> int:
        """Bytes of all that it adds to a step."""
        return self.table_bytes + self.slot_bytes + self.bytes


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
        merges: whether to merge the chain of the save into a baseline, once it is committed.
        baseline: baseline of the parent that the save brings along, so that it is full although it
            writes only rows that the parent does not have; None: it brings none.
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
    merges: bool = False
    baseline: MergedBaseline | None = None

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
        return "full" if self.rests_on is None else "delta"

    @property
    def rests_on(self) -> ParentRef | None:
        """Parent that the checkpoint needs once it is committed; None if it stands alone."""
        return self.parent if self.baseline is None else None

    @property
    def layer(self) -> int:
        """Number of the layer that the rows which the save itself writes are in."""
        return self.baseline.layers if self.baseline is not None else 0

    @property
    def entry(self) -> Entry:
        """Entry of the save as long as it is being written."""
        return Entry(
            directory=self.directory,
            step=self.step,
            uuid=self.uuid,
            generation=self.generation,
            parent=self.rests_on,
            run=self.run,
            forks=self.forks,
        )
