"""Compaction of a root: the chain of a step merged into one full checkpoint that stands for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.dense import check_dense_cover
from cnr_jax.format.manifest import (
    FileDigest,
    HistoryEntry,
    Manifest,
    SampledMotion,
    dump,
)
from cnr_jax.format.tiles import check_cover
from cnr_jax.repository import layout
from cnr_jax.repository.causes import as_root_errors
from cnr_jax.repository.committer import Attempt, committer_for, offered
from cnr_jax.repository.compaction.rows import BLOCK_BYTES, MergedRows
from cnr_jax.repository.description import amount
from cnr_jax.repository.index.entries import Entry, entry_of
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.manifest_writer import software, totals_of
from cnr_jax.repository.mirroring.step_files import Meter, copy_files
from cnr_jax.repository.rows_writer import write_process
from cnr_jax.repository.step import is_same_step
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.repository.store import (
    AnyPath,
    can,
    exists,
    store_of,
    sync_directory,
    write_durably,
)
from cnr_jax.repository.store.checked import read_checked
from cnr_jax.repository.store.kept_chunks import KeptChunks
from cnr_jax.repository.upkeep.claim import WritingLock
from cnr_jax.repository.upkeep.offers import Offer, merges_in, offer_in
from cnr_jax.repository.upkeep.prune import claimed, item_of
from cnr_jax.repository.upkeep.removal import Remover, remove_in_place
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import count_of

# Bytes of chunks that are kept while rows are cut from them, and that TensorStore may keep.
_KEPT_BYTES, _CACHE_BYTES = 4 * BLOCK_BYTES, 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """What `compact` merges, and what that comes to. As a text: a line for each number.

    Attributes:
        root: its path.
        step: number of the step whose chain is merged; None: none rests on others.
        directory: of that step; empty: there is none.
        chain: step directories that are merged, the full one first.
        restore_bytes: that a restore of the step reads now at most.
        merged_bytes: that it reads afterwards; as far as it is not done, at most about so many.
        restore_secs: that this takes, if it is known how long restores take; None: it is not.
        merged_secs: the same afterwards, as it was planned.
        is_done: whether it is merged, and the merged step stands for it.
        is_offered: whether it is merged, and waits for whoever saves there, who commits it between
            two saves.
        merged_directory: of the step that stands for it, or is going to; empty: it is not merged.
        secs: that it took.
        replaced: step directories that an interrupted call has left, for which merged ones stand.
        item: that is merged.
        uuid: of the step.
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
    is_offered: bool = False
    merged_directory: str = ""
    secs: float = 0.0
    replaced: tuple[str, ...] = ()
    item: str = ""
    uuid: str = ""

    def asdict(self) -> dict[str, Any]:
        """All of it as values of JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """What is merged, and the bytes before and after."""
        if self.step is None:
            text = "nothing to merge: the step rests on no other"
            gone = "is" if self.is_done else "is to be"
            return "\n".join([text, *(f"{n} {gone} removed" for n in self.replaced)])
        deltas = count_of(len(self.chain) - 1, "delta")
        verb = "merged" if self.is_done or self.is_offered else "to be merged"
        lines = [
            f"step {self.step}: a full checkpoint and {deltas} {verb}",
            f"a restore reads {amount(self.restore_bytes)}{_in(self.restore_secs)} before,"
            f" {'' if self.is_done else 'about '}{amount(self.merged_bytes)}"
            f"{_in(self.merged_secs)} after",
        ]
        if self.merged_directory:
            took = f"written in {self.secs:.1f} s" if self.secs else "written before"
            lines.append(f"{took}: {self.merged_directory}")
        if self.is_offered and not self.is_done:
            lines.append("whoever saves there takes it up between the next two saves")
        return "\n".join(lines)

    def execute(self, *, writer_is_dead: bool = False) -> CompactionPlan:
        """Merges the chain, and has the merged step stand for the one that was merged.

        While a manager saves there, that commits the merged step between two saves, and then
        removes the one that it stands for; else this does. A merged step that comes too late, as
        the run went back or the step is gone, is removed. What the step rested on stays, for the
        steps that rest on it and as steps of their own: `prune`, or the retention of a manager,
        lets go of them.

        Args:
            writer_is_dead: as of `prune`: then nobody is left to commit it but this.

        Returns:
            The plan as it was done.

        Raises:
            WriterError: if another program is merging there.
            NoStepError: if the step is gone, or went meanwhile; nothing is left of the merge.
            ChainError, IntegrityError: if something of it is damaged.
            RootError: if the root cannot be read or written.
        """
        if self.step is None and not self.replaced:
            return self
        root, done = layout.open_root(self.root), self
        with as_root_errors(root, "merged"), _alone(root):
            if self.step is not None and not self.is_offered:
                done = _merge(root, self)
            with contextlib.suppress(errors.WriterError):
                return done._taken_up(root, writer_is_dead)
        return done

    def _taken_up(self, root: AnyPath, writer_is_dead: bool) -> CompactionPlan:
        """The plan once the merged step is committed, where nobody else saves.

        Raises:
            WriterError: if somebody may.
            NoStepError: if the step is gone.
            OSError: if something cannot be read or written.
        """
        with claimed(root, self.item, writer_is_dead=writer_is_dead) as (
            writer,
            ledger,
        ):
            writer.take_up()
            for name in ledger.replaced():
                _remove(root, writer, ledger, name)
            if self.step is not None and self.merged_directory not in ledger.entries:
                raise _gone(self)
        return dataclasses.replace(self, is_done=True, is_offered=False)


def _in(secs: float | None) -> str:
    return "" if secs is None else f" in {secs:.3g} s"


def plan_compaction(
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    item: str | None = None,
    restore_secs: Callable[[int], float] | None = None,
) -> CompactionPlan:
    """Tells what of a root can be merged: the chain of a step into one full checkpoint.

    Reads manifests alone.

    Args:
        root: directory of the checkpoints.
        step: whose chain is to be merged; None: the newest that can be restored.
        item: of each step; None: the one that holds a checkpoint of this library.
        restore_secs: function that returns the seconds of a restore that reads so many bytes;
            None: it is not known.

    Returns:
        What would be merged; `execute` does it.

    Raises:
        NoStepError: if there is no such folder or step, or none that restores.
        OptionError: if it is no root.
        ChainError: if its chain is not whole.
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
        offer = next(_offers_for(path, held, ledger, entry), None)
        if entry.stands_alone:
            return CompactionPlan(
                root=os.fspath(path), step=None, replaced=replaced, item=held
            )
        if problem := ledger.obstacle(entry):
            raise errors.ChainError(
                f"step {entry.directory} cannot be merged: {problem}",
                path=os.fspath(path / entry.directory),
            )
        chain, secs = ledger.chain(entry), restore_secs
        before = ledger.restore_bytes(entry)
        # A full checkpoint of the same rows takes about as much as that below.
        after = chain[-1].rows_bytes + _dense_bytes(entry)
        if offer is not None:
            after = Ledger.own_bytes(entry_of("", offer.manifest))
        return CompactionPlan(
            root=os.fspath(path),
            step=entry.step,
            directory=entry.directory,
            chain=tuple(each.directory for each in reversed(chain)),
            restore_bytes=before,
            merged_bytes=after,
            restore_secs=round(secs(before), 6) if secs else None,
            merged_secs=round(secs(after), 6) if secs else None,
            is_offered=offer is not None,
            merged_directory=offer.attempt.directory if offer is not None else "",
            replaced=replaced,
            item=held,
            uuid=entry.uuid,
        )


def compact(
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    writer_is_dead: bool = False,
    item: str | None = None,
) -> CompactionPlan:
    """Merges the chain of a step into one full checkpoint that stands for it; needs no state.

    Rows are taken as they are stored, and integers of `lattice` and of moments added: what is
    restored has the same bits as before. Deltas that rest on the step go on to do so. Memory
    is bounded, whatever the size of the tables, and a crash leaves the root as it was before, or
    with the merged step. A manager may save there meanwhile: see `CompactionPlan.execute`.

    Args:
        root: directory of the checkpoints.
        step: as of `plan_compaction`.
        writer_is_dead: as of `prune`.
        item: as of `plan_compaction`.

    Returns:
        What was done.

    Raises:
        CnrError: as `plan_compaction`, and `CompactionPlan.execute`.
    """
    plan = plan_compaction(root, step=step, item=item)
    return plan.execute(writer_is_dead=writer_is_dead)


def _dense_bytes(entry: Entry) -> int:
    return entry.known.totals.dense_bytes if entry.known else 0


@contextlib.contextmanager
def _alone(root: AnyPath) -> Iterator[None]:
    """While this program merges; what others have left that were killed in it is removed first.

    Raises:
        WriterError: if another one does.
        OSError: if that cannot be seen.
    """
    lock = WritingLock(root, names.MERGING_LOCK)
    if not lock.acquire(0):
        raise errors.WriterError(
            f"another program is merging in {os.fspath(root)}: nothing was merged\n"
            "  hint: try again when that is over",
            kind="writer_busy",
        )
    try:
        if lock.is_proof and can(root).renames:
            with _removing(root) as discard:
                for folder in merges_in(root):
                    if not ((found := offered(root, folder)) and found[1]):
                        discard(folder)
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _removing(root: AnyPath) -> Iterator[Callable[[str], None]]:
    """Removes folders that are no steps, by their names; waits for it in the end."""
    remover = Remover(root)
    try:
        yield remover.discard
    finally:
        remover.close()


def _offers_for(
    root: AnyPath, item: str, ledger: Ledger, entry: Entry
) -> Iterator[Offer]:
    """What was merged already, and waits to stand for a step."""
    name = names.merged(names.plain(entry.directory), entry.generation)
    for folder in merges_in(root):
        if names.final_name(folder) == name and name not in ledger.all_directories():
            with contextlib.suppress(errors.CnrError):
                if offer := offer_in(root, item, ledger, folder):
                    yield offer


def _merge(root: AnyPath, plan: CompactionPlan) -> CompactionPlan:
    """Writes the step that is to stand for one, and offers it to who has claimed the root.

    Raises:
        NoStepError: if that is gone.
        IntegrityError, FormatError, ChainError: if something of the chain is damaged.
        OSError: if something cannot be read or written.
    """
    started, source, item = time.perf_counter(), plan.directory, plan.item
    entry = Ledger.load(root, item).entries.get(source)
    if entry is None or entry.uuid != plan.uuid:
        raise _gone(plan)
    directory = names.merged(names.plain(source), entry.generation)
    attempt = Attempt(root, directory, secrets.token_hex(16))
    with _removing(root) as discard:
        committer = committer_for(root, discard, lambda: None)
        try:
            committer.prepare(attempt, [item])
            folder = committer.folder(attempt)
            # What other handlers have saved beside it.
            copy_files(root / source, folder, Meter(), but=item)
            kept = KeptChunks(_KEPT_BYTES, _CACHE_BYTES)
            chain = open_chain(root, source, item, kept=kept)
            written = write_merged(folder / item, chain, attempt.nonce)
            if not is_same_step(root, source, item, plan.uuid):
                raise _gone(plan)
            committer.offer(attempt)
        except BaseException as error:
            with contextlib.suppress(errors.CnrError, OSError):
                committer.abandon(attempt)
            if isinstance(error, (errors.CnrError, OSError)):
                if not is_same_step(root, source, item, plan.uuid):
                    raise _gone(plan) from error
            raise
    return dataclasses.replace(
        plan,
        is_offered=True,
        merged_bytes=Ledger.own_bytes(entry_of(directory, written)),
        merged_directory=directory,
        secs=round(time.perf_counter() - started, 3),
    )


def _gone(plan: CompactionPlan) -> errors.NoStepError:
    return errors.NoStepError(
        f"step {plan.directory} is not in {plan.root} any more, as it was planned: nothing was"
        " merged\n  hint: plan_compaction tells what there is to merge now",
        kind="step_deleted",
        path=plan.root,
    )


def _remove(root: AnyPath, writer: RootWriter, ledger: Ledger, directory: str) -> None:
    """Removes a step for which another one stands."""
    writer.show(ledger.standing(names.plain(directory)), [directory])
    writer.check_removal(directory)
    if writer.remover is None:
        remove_in_place(root / directory)
    else:
        writer.remover.remove(directory, background=False)
    ledger.forget(directory)


def write_merged(
    directory: AnyPath, chain: Sequence[StepReader], uuid: str
) -> Manifest:
    """Writes the item of a checkpoint that holds what a chain restores to, durably.

    Args:
        directory: of the item, which is empty.
        chain: the full checkpoint first.
        uuid: of the merged checkpoint.

    Returns:
        Its manifest.

    Raises:
        IntegrityError, FormatError: if something of the chain is damaged.
        OSError: if something cannot be read or written.
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
    return manifest


def _copy_file(directory: AnyPath, source: AnyPath, digest: FileDigest) -> None:
    """Copies a file that Orbax has written for dense leaves."""
    target, data = directory / digest.path, read_checked(source, digest)
    if not exists(target.parent):
        store_of(target).make_folder(target.parent)
    write_durably(target, data)
    sync_directory(target.parent)


def _motion(chain: Sequence[StepReader]) -> SampledMotion | None:
    """How far rows had moved in the newest checkpoint of the last one's lineage that tells."""
    last = chain[-1].manifest
    for each in reversed(chain):
        if each.manifest.lineage == last.lineage and each.manifest.motion is not None:
            return each.manifest.motion
    return None
