"""Compaction of a root: merges the chain of a step into one full checkpoint in its place."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.dense import check_dense_cover
from cnr_jax.format.manifest import FileDigest, HistoryEntry, SampledMotion, dump
from cnr_jax.format.tiles import check_cover
from cnr_jax.repository import layout
from cnr_jax.repository.causes import as_root_errors
from cnr_jax.repository.committer import Attempt, committer_for
from cnr_jax.repository.compaction.rows import MergedRows, cache_for_merge
from cnr_jax.repository.description import amount
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.manifest_writer import software
from cnr_jax.repository.mirroring.step_files import Meter, copy_files
from cnr_jax.repository.rows_writer import write_process
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.repository.store import (
    AnyPath,
    exists,
    store_of,
    sync_directory,
    write_durably,
)
from cnr_jax.repository.store.checked import read_checked
from cnr_jax.repository.table_sizes import totals_of
from cnr_jax.repository.upkeep.prune import claimed, item_of
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import count_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """Plan of what `compact` merges, with its sizes and times. Prints as a line for each number.

    Attributes:
        root: path of the root.
        step: number of the step whose chain is merged; None if the step rests on no other.
        directory: name of the step directory.
        chain: names of the step directories that are merged, the full one first.
        restore_bytes: bytes that a restore of the step reads at most, before the merge.
        merged_bytes: bytes that it reads after the merge. Until `is_done`, an estimate of the most.
        restore_secs: seconds that the restore takes before the merge; None if not known.
        merged_secs: seconds that it takes after the merge, as planned; None if not known.
        is_done: whether the chain is merged.
        merged_directory: name of the step directory that stands for the step; empty until
            `is_done`.
        secs: seconds that the merge took; 0 until `is_done`.
        replaced: names of step directories that an interrupted call has left, although merged
            steps stand for them. `execute` removes them.
        item: name of the item that is merged.
        uuid: uuid of the step.
    """

    root: str
    step: int | None
    directory: str = ""
    chain: tuple[str, ...] = ()
    restore_bytes: int = 0
    merged_bytes: int = 0
    restore_secs: float | None = None
    merged_secs: float | None = None
    is_done: bool = False
    merged_directory: str = ""
    secs: float = 0.0
    replaced: tuple[str, ...] = ()
    item: str = ""
    uuid: str = ""

    def asdict(self) -> dict[str, Any]:
        """All fields as values of JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Text that says what is merged, and the bytes before and after."""
        if self.step is None:
            text = f"nothing to merge: step {self.directory} rests on no other"
            gone = "is" if self.is_done else "is to be"
            return "\n".join([text, *(f"{n} {gone} removed" for n in self.replaced)])
        deltas = count_of(len(self.chain) - 1, "delta")
        verb = "merged" if self.is_done else "to be merged"
        lines = [
            f"step {self.step}: a full checkpoint and {deltas} {verb}",
            f"a restore reads {amount(self.restore_bytes)}{_in(self.restore_secs)} before,"
            f" {'' if self.is_done else 'about '}{amount(self.merged_bytes)}"
            f"{_in(self.merged_secs)} after",
        ]
        if self.is_done:
            lines.append(f"written in {self.secs:.1f} s: {self.merged_directory}")
        return "\n".join(lines)

    def execute(
        self, *, writer_is_dead: bool = False, single_writer: bool = False
    ) -> CompactionPlan:
        """Merges the chain, and removes the step that the merged one stands for.

        The other steps of the chain stay, as steps of their own, and because others may rest on
        them. `prune`, or the retention of a manager, removes them.

        Args:
            writer_is_dead: as in `prune`.
            single_writer: as in `prune`.

        Returns:
            The plan, completed by what was done.

        Raises:
            WriterError: if a manager that may still be running saves there. Nothing was merged.
            NoStepError: if the step is gone.
            ChainError, IntegrityError: if a part of the chain is damaged.
            RootError: if the root cannot be read or written.
        """
        if self.step is None and not self.replaced:
            return self
        root = layout.open_root(self.root)
        started = time.perf_counter()
        with (
            as_root_errors(root, "merged"),
            claimed(
                root,
                self.item,
                writer_is_dead=writer_is_dead,
                single_writer=single_writer,
                not_done="merged",
            ) as (writer, ledger),
        ):
            for name in self.replaced:
                if name in ledger.replaced():
                    _remove(writer, ledger, name)
            if self.step is None:
                return dataclasses.replace(self, is_done=True)
            entry = ledger.entries.get(self.directory)
            if entry is None or entry.uuid != self.uuid:
                raise errors.NoStepError(
                    f"step {self.directory} is not in {self.root} any more, as it was planned\n"
                    "  hint: plan_compaction tells what there is to merge now",
                    kind="step_deleted",
                    path=self.root,
                )
            made = _merge(root, self.item, writer, ledger, entry)
        return dataclasses.replace(
            self,
            is_done=True,
            merged_bytes=Ledger.own_bytes(made),
            merged_directory=made.directory,
            secs=round(time.perf_counter() - started, 3),
        )


def _in(secs: float | None) -> str:
    return "" if secs is None else f" in {secs:.3g} s"


def plan_compaction(
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    item: str | None = None,
    restore_secs: Callable[[int], float] | None = None,
) -> CompactionPlan:
    """Plans to merge the chain of a step into one full checkpoint; changes nothing.

    It reads only manifests.

    Args:
        root: directory of the checkpoints.
        step: number of the step whose chain to merge; None for the newest that can be restored.
        item: name of the item of each step; None for the one with a checkpoint of this library.
        restore_secs: function from the bytes that a restore reads to the seconds that it takes.
            With None the plan has no times.

    Returns:
        The plan; its `execute` merges the chain.

    Raises:
        NoStepError: if there is no such folder or step, or none that restores.
        OptionError: if the folder is no root.
        ChainError: if the chain of the step is not whole.
        RootError: if the root cannot be read.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root = tempfile.mkdtemp()
        >>> state = {"user": jnp.zeros((8, 4))}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables) as manager:
        ...     for step in range(2):
        ...         _ = manager.save(step, args=cnr.args.Save(state))
        >>> cnr.plan_compaction(root).chain
        ('0', '1')
    """
    path = layout.open_root(root)
    with as_root_errors(path, "merged"):
        held = item_of(path, item)
        ledger = Ledger.load(path, held)
        entry = ledger.newest() if step is None else ledger.by_step(step)
        if entry is None or entry.orbax:
            if step is None:
                raise errors.NoStepError.nothing_restores(
                    os.fspath(path), ledger.obstacles()
                )
            raise errors.NoStepError(
                f"step {step} does not exist in {os.fspath(path)}", path=os.fspath(path)
            )
        replaced = tuple(ledger.replaced())
        if entry.stands_alone:
            return CompactionPlan(
                root=os.fspath(path),
                step=None,
                directory=entry.directory,
                replaced=replaced,
                item=held,
            )
        if problem := ledger.obstacle(entry):
            raise errors.ChainError(
                f"step {entry.directory} cannot be merged: {problem}",
                path=os.fspath(path / entry.directory),
            )
        chain, secs = ledger.chain(entry), restore_secs
        before = ledger.restore_bytes(entry)
        # The merged checkpoint holds about as many bytes of rows as the full one below the step.
        after = chain[-1].rows_bytes + _dense_bytes(entry)
        return CompactionPlan(
            root=os.fspath(path),
            step=entry.step,
            directory=entry.directory,
            chain=tuple(each.directory for each in reversed(chain)),
            restore_bytes=before,
            merged_bytes=after,
            restore_secs=round(secs(before), 6) if secs else None,
            merged_secs=round(secs(after), 6) if secs else None,
            replaced=replaced,
            item=held,
            uuid=entry.uuid,
        )


def compact(
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    writer_is_dead: bool = False,
    single_writer: bool = False,
    item: str | None = None,
) -> CompactionPlan:
    """Merges the chain of a step into one full checkpoint that stands for it; needs no train state.

    It copies rows as they are stored, and adds the integers of `lattice` and of moments. So a
    restore gives the same bits as before. Deltas that rest on the step then rest on the merged one.
    Memory is bounded, whatever the size of the tables. A crash leaves the root as it was before, or
    with the merged step.

    Args:
        root: directory of the checkpoints.
        step: as in `plan_compaction`.
        writer_is_dead: as in `prune`.
        single_writer: as in `prune`.
        item: as in `plan_compaction`.

    Returns:
        The plan, completed by what was done.

    Raises:
        CnrError: as `plan_compaction` and `CompactionPlan.execute` raise it.
    """
    plan = plan_compaction(root, step=step, item=item)
    return plan.execute(writer_is_dead=writer_is_dead, single_writer=single_writer)


def _dense_bytes(entry: Entry) -> int:
    return entry.known.totals.dense_bytes if entry.known else 0


def _merge(
    root: AnyPath, item: str, writer: RootWriter, ledger: Ledger, entry: Entry
) -> Entry:
    """Writes and commits a step that stands for `entry`, then removes that; returns the new entry.

    Raises:
        IntegrityError, FormatError, ChainError: if a part of the chain is damaged.
        WriterError: if another manager has taken over the root.
        OSError: if a file cannot be read or written.
    """
    source = entry.directory
    generation = max(entry.generation, names.branch_generation(source) + 1)
    directory = names.branched(names.plain(source), generation)
    attempt = Attempt(root, directory, secrets.token_hex(16))
    committer = committer_for(root, writer.discard, writer.check_claim)
    try:
        committer.prepare(attempt, [item])
        folder = committer.folder(attempt)
        # Copies the other items of the step, which other handlers have saved.
        copy_files(root / source, folder, Meter(), but=item)
        chain = open_chain(root, source, item, kept=cache_for_merge(root))
        write_merged(folder / item, chain, attempt.nonce)
        writer.check_claim()
        committer.publish(attempt, [])
    except BaseException:
        with contextlib.suppress(errors.CnrError, OSError):
            committer.abandon(attempt)
        raise
    committer.settle(attempt)
    if (error := ledger.read(root, directory, item)) is not None:
        raise error
    made = ledger.entries[directory]
    ledger.part()
    writer.note_own(made)
    writer.show(directory, [source])
    _remove(writer, ledger, source)
    return made


def _remove(writer: RootWriter, ledger: Ledger, directory: str) -> None:
    """Removes a step directory for which another one stands."""
    writer.remover.remove(directory, background=False)
    ledger.forget(directory)


def write_merged(directory: AnyPath, chain: Sequence[StepReader], uuid: str) -> None:
    """Writes the item of a full checkpoint that restores to the same state as a chain, durably.

    Args:
        directory: directory of the item, which must be empty.
        chain: readers of the chain, the full checkpoint first.
        uuid: uuid of the merged checkpoint.

    Raises:
        IntegrityError, FormatError: if a part of the chain is damaged.
        OSError: if a file cannot be read or written.
    """
    started, last = time.perf_counter(), chain[-1].manifest
    compression = last.encoding.compression if last.encoding else None
    rows = MergedRows(chain, directory, compression)
    process = rows.write(uuid)
    where = os.fspath(directory)
    check_cover(last.tables, process.tiles, where)
    if last.has_dense_tiles:
        check_dense_cover(last.dense_leaves, process.dense_tiles, where)
    digest = write_process(directory, process, syncs=rows.syncs)
    for each in last.dense_files:
        _copy_file(directory, chain[-1].directory, each)
    totals = totals_of([process], (digest,))
    manifest = dataclasses.replace(
        last,
        uuid=uuid,
        kind="full",
        parent=None,
        processes=(digest,),
        totals=dataclasses.replace(
            totals, dense_bytes=totals.dense_bytes or last.totals.dense_bytes
        ),
        reason=f"merged from {len(chain)} checkpoints",
        history=(
            HistoryEntry(
                step=last.step,
                kind="full",
                bytes=totals.table_bytes + totals.slot_bytes,
                rows=totals.rows,
                secs=round(time.perf_counter() - started, 6),
            ),
        ),
        written_at_unix_secs=round(time.time(), 3),
        writer=software(),
        required_features=tuple(sorted({*process.features, names.MERGED})),
        motion=_motion(chain),
        stands_for=(last.uuid, *(last.stands_for or ())),
    )
    write_durably(directory / names.MANIFEST, dump(manifest))
    sync_directory(directory)


def _copy_file(directory: AnyPath, source: AnyPath, digest: FileDigest) -> None:
    """Copies and checks a file that Orbax has written for dense leaves."""
    target, data = directory / digest.path, read_checked(source, digest)
    if not exists(target.parent):
        store_of(target).make_folder(target.parent)
    write_durably(target, data)
    sync_directory(target.parent)


def _motion(chain: Sequence[StepReader]) -> SampledMotion | None:
    """Motion of rows by the newest checkpoint of the last one's lineage that has it, or None."""
    last = chain[-1].manifest
    for each in reversed(chain):
        if each.manifest.lineage == last.lineage and each.manifest.motion is not None:
            return each.manifest.motion
    return None
