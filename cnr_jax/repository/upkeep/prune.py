"""Deletion of steps on demand: which steps retention would let go of, and why the others stay."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator
from typing import Any, Literal

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.integers import integer
from cnr_jax.repository import layout, store
from cnr_jax.repository.causes import as_root_errors
from cnr_jax.repository.describe import look_into
from cnr_jax.repository.description import aligned, amount
from cnr_jax.repository.index import folders
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.retention import children_first, kept_steps
from cnr_jax.repository.items import find_item
from cnr_jax.repository.orbax_steps import way_on
from cnr_jax.repository.step import read_committed
from cnr_jax.repository.upkeep.aside import aside_of_run, check_is_here
from cnr_jax.repository.upkeep.claim import WritingLock, read_writer
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import count_of

_BY_ORBAX = "plain Orbax has saved it"
FateKind = Literal["full", "delta", "orbax", "unreadable", "aside", "earlier run"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Fate of one folder of a root: whether it stays, and why.

    Attributes:
        name: name of the folder.
        step: number of the step; None: the folder is no step.
        kind: `"full"` or `"delta"`; `"orbax"`: saved by plain Orbax, and never deleted by `prune`;
            `"unreadable"`: a step whose manifest cannot be read; `"aside"`: a step that a rollback
            has set aside; `"earlier run"`: a root that `Options(new_run=True)` has set aside.
        bytes: bytes of all files in the folder.
        stays: whether the folder is kept.
        reason: why it is kept, or is not.
    """

    name: str
    step: int | None
    kind: FateKind
    bytes: int
    stays: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """Plan of what `prune` deletes, and what it keeps. Prints as a table.

    Attributes:
        root: path of the root.
        fates: fates of all steps, in the order of `describe`, then of the folders beside them.
        is_done: whether the folders that do not stay are deleted.
    """

    root: str
    fates: tuple[Fate, ...]
    is_done: bool = False

    @property
    def going(self) -> tuple[Fate, ...]:
        """Fates of the folders that do not stay."""
        return tuple(fate for fate in self.fates if not fate.stays)

    @property
    def freed_bytes(self) -> int:
        """Bytes of all folders that do not stay."""
        return sum(fate.bytes for fate in self.going)

    def asdict(self) -> dict[str, Any]:
        """All fields, and figures that follow from them, as values of JSON."""
        return {**dataclasses.asdict(self), "freed_bytes": self.freed_bytes}

    def __str__(self) -> str:
        """What stays and what does not, with the reasons."""
        return "\n".join(line for line, _ in self.lines())

    def lines(self) -> list[tuple[str, Fate | None]]:
        """Lines of the text, each with the fate that it is about."""
        rows = [["name", "kind", "bytes", "", "because"]]
        gone = "gone" if self.is_done else "goes"
        for each in self.fates:
            verdict = "stays" if each.stays else gone
            rows.append(
                [each.name, each.kind, amount(each.bytes), verdict, each.reason]
            )
        table = aligned(rows, right={2})
        going = self.going
        steps = sum(each.step is not None for each in going)
        what = f"{count_of(steps, 'step')}, {amount(self.freed_bytes)} in all"
        if len(going) > steps:
            what = f"{count_of(len(going) - steps, 'other folder')} and {what}"
        end = "nothing to delete"
        if going:
            end = f"deleted: {what}" if self.is_done else f"to be deleted: {what}"
        return [*zip(table, [None, *self.fates], strict=True), (end, None)]


def prune(
    root: str | os.PathLike[str],
    *,
    keep: int,
    min_fulls: int = 1,
    delete: bool = False,
    other_runs: bool = False,
    writer_is_dead: bool = False,
    single_writer: bool = False,
    item: str | None = None,
) -> PrunePlan:
    """Finds the steps of a root that are superfluous, and with `delete` deletes them.

    The newest steps of the newest run stay, and all that they rest on, as with the retention of a
    manager. These stay too: steps of other runs; steps that cannot be restored; everything that a
    folder without a readable manifest may rest on; steps that are not named as the others, such as
    copies, with what they rest on, or all steps if `prune` cannot tell which are copies; and all
    files and folders that are not of this library. Steps that rollbacks have set aside go as soon
    as any step of the run does, if all folders can be read. With `delete`, `prune` first clears
    away what killed programs have left, as the first save of a manager does: steps that were
    removed in part and, except in buckets, saves that were never committed. Without `delete` a run
    may be saving there; the plan leaves out what that run removes meanwhile.

    `prune` imports neither jax nor Orbax. It deletes deltas before what they rest on, so after a
    crash every step that is listed restores as before.

    Args:
        root: directory of the checkpoints: a local path, or a URL of `file://`, `gs://` or `s3://`.
        keep: how many of the newest steps that restore stay.
        min_fulls: how many full checkpoints of the newest branch stay.
        delete: whether to delete; False: nothing is changed, and the plan says what would be.
        other_runs: whether to delete also what is of other runs and was set aside: their steps
            that rollbacks set aside, and the roots that `Options(new_run=True)` has made of earlier
            runs. A root with steps that are not all named alike, such as copies, stays.
        writer_is_dead: whether you promise that the manager that saved here last has ended. Needed
            where `prune` cannot see that: the manager ran on another host, in another container,
            before this machine was booted, or in this very process; or it was of an older version,
            or there is no `/proc`. If it has not ended, it still has the root afterwards.
        single_writer: as in `Options`: whether the service of the root may ignore the conditions of
            puts.
        item: name of the item of each step; None: the one that holds a checkpoint of this library.

    Returns:
        The plan: what stays and what does not, each with the reason.

    Raises:
        NoStepError: if there is no such folder, or no step in it restores. Nothing is deleted then.
        OptionError: if the folder is no root, or a number is not positive.
        WriterError: if a manager that may still be running saves there. Nothing was deleted.
        RootError: if the root cannot be read or written, or something in it cannot be removed. That
            is there as before, with what it rests on. It is an OSError.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root = tempfile.mkdtemp()
        >>> state = {"user": jnp.zeros((8, 4))}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> options = cnr.Options(policy=cnr.Full())
        >>> with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        ...     for step in range(3):
        ...         _ = manager.save(step, args=cnr.args.Save(state))
        >>> [(fate.step, fate.stays) for fate in cnr.prune(root, keep=2).fates]
        [(0, False), (1, True), (2, True)]
    """
    keep, min_fulls = _positive("keep", keep), _positive("min_fulls", min_fulls)
    path = layout.open_root(root)
    deleted = list[str]()

    def fates_in(ledger: Ledger) -> tuple[Fate, ...]:
        return _fates(path, held, ledger, keep, min_fulls, other_runs=other_runs)

    with as_root_errors(path, "pruned", deleted):
        held = item_of(path, item)
        if not delete:
            fates = fates_in(Ledger.load(path, held, adopts=True))
            return PrunePlan(root=os.fspath(path), fates=fates)
        with claimed(
            path, held, writer_is_dead=writer_is_dead, single_writer=single_writer
        ) as (writer, ledger):
            fates = fates_in(ledger)
            going = [fate.name for fate in fates if not fate.stays]
            steps = children_first(ledger, (n for n in going if n in ledger.entries))
            # Folders that were set aside go first: they may rest on steps, but no step on them.
            for name in [*(n for n in going if n not in ledger.entries), *steps]:
                writer.remover.remove(name, background=False)
                ledger.forget(name)
                deleted.append(name)
    return PrunePlan(root=os.fspath(path), fates=fates, is_done=True)


def _positive(name: str, given: Any) -> int:
    found = integer(given)
    if found is None or found < 1:
        raise errors.OptionError(f"{name} is {given!r}, expected a positive number")
    return found


def item_of(root: store.AnyPath, item: str | None) -> str:
    """Name of the item to go by in a root that is to be changed: `item`, or the one that is found.

    Raises:
        NoStepError: if there is no such folder, or a save has moved its steps away.
        OptionError: if it is no root.
    """
    layout.check_can_be_read(root, item)
    found = item or find_item(root)
    if found is None:
        check_is_here(root)
        hint = way_on(root, adopts=False)
        raise errors.OptionError(
            f"{root} is no root: no checkpoint of cnr_jax lies in it\n"
            + (hint or "  hint: pass the folder that the manager was given")
        )
    return found


@contextlib.contextmanager
def claimed(
    root: store.AnyPath,
    item: str,
    *,
    writer_is_dead: bool,
    single_writer: bool,
    not_done: str = "deleted",
) -> Iterator[tuple[RootWriter, Ledger]]:
    """Claims a root for a while if nobody else saves to it; yields its writer and its ledger.

    Args:
        root: root that is claimed.
        item: name of the item of its steps.
        writer_is_dead: whether the user promises that the manager that saved there last has ended.
        single_writer: whether to skip the trial of the store's conditions, see `check_conditions`.
        not_done: what was not done if the claim is refused, such as `"deleted"`; for the error.

    Raises:
        WriterError: if a manager may be saving there.
    """
    before = read_writer(root)
    # A folder of that name is nobody's claim; `writer.claim` below raises an error that says so.
    path = root / names.WRITER
    unknown = before is None and store.exists(path) and not store.is_directory(path)
    # The lock is tried only to say at once that a save is being written. `writer.claim` below takes
    # it again, and waits for a save that begins in between.
    lock = WritingLock(root)
    is_free = lock.acquire(0)
    lock.release()
    # Asked once. A manager that is not known to have ended gets the root back afterwards, even if
    # the user promises that it has ended.
    is_dead = not unknown and (before is None or before.is_dead)
    if not is_free or not (is_dead or writer_is_dead):
        who = f"a manager saves to {root}, and is not known to have ended"
        hint = "if it has: writer_is_dead=True, or --writer-is-dead of the command"
        if not is_free:
            who = f"a manager is writing a save in {root}"
            hint = "try again when that is over"
        got = "a claim that cannot be read"
        if before is not None:
            runs = before.process.state() == "alive"
            seen = (
                "which is running" if runs else "whose process cannot be seen from here"
            )
            got = f"{before}, {seen}"
        raise errors.WriterError(
            f"{who}: nothing was {not_done}\n  got {got}\n  hint: {hint}",
            kind="writer_busy",
        )
    writer = RootWriter(lambda: True, adopts=True, single=single_writer)
    with writer.for_a_while():
        writer.open(root, item)
        if before is not None and not is_dead:
            writer.stand_in(before, alone=lock.is_proof)
        yield writer, writer.claim()


def _fates(
    root: store.AnyPath,
    item: str,
    ledger: Ledger,
    keep: int,
    min_fulls: int,
    *,
    other_runs: bool,
) -> tuple[Fate, ...]:
    """Fates of the steps of a root, in the order of `describe`, then of the folders beside them.

    Args:
        root: root that is looked through.
        item: name of the item of its steps.
        ledger: ledger of the root. Afterwards it knows no copies of steps.
        keep: see `prune`.
        min_fulls: see `prune`.
        other_runs: see `prune`.
    """
    kinds: dict[str, FateKind] = {n: e.kind for n, e in ledger.entries.items()}
    odd = _strays(ledger)
    own = [entry.directory for entry in ledger.committed() if not entry.orbax]
    is_clear = names.are_all_alike(own)
    look_into(root, item, ledger, sorted(ledger.directories()))
    check_is_here(root)  # after all steps were looked at, as in `describe`
    restorable = [entry for entry in ledger.restorable() if not entry.orbax]
    if not restorable:
        raise errors.NoStepError.nothing_restores(
            os.fspath(root),
            ledger.obstacles(),
            "  hint: cnr_jax.verify, or cnr-jax verify, says more",
            done="nothing is deleted",
        )
    ledger.run = restorable[-1].run
    # Steps of plain Orbax rest on no others, and no others on them. They stay and do not count.
    theirs = {entry.directory for entry in ledger.committed() if entry.orbax}
    numbers = {names.step_number(name) for name in ledger.directories() - theirs}
    found = kept_steps(
        ledger,
        numbers,
        lambda steps: steps[-keep:],
        min_fulls=min_fulls,
        because="it is the newest" if keep == 1 else f"it is one of the newest {keep}",
    )
    fates: list[Fate] = []
    for name in sorted(ledger.folders, key=names.step_number):
        folder = ledger.folders[name]
        is_orbax = folder.kind == "orbax"
        reason = "its manifest cannot be read, and what it rests on is not known"
        told = _BY_ORBAX if is_orbax else reason
        if not folder.may_be_a_step:
            told = "it is no step: nothing in it is of a checkpoint"
        fates.append(_stays(root, name, told, "orbax" if is_orbax else "unreadable"))
    for entry in ledger.committed():
        reason = found.reasons.get(entry.step) or odd.get(entry.directory)
        if entry.orbax:
            reason = _BY_ORBAX
        elif reason is None and not is_clear:
            reason = "steps are called in different ways: which are copies is not known"
        why = f"it is older than the newest {keep}"
        if entry.step in found.left:
            why = f"a rollback has left it behind: {why}"
        told = _stays(root, entry.directory, reason or why, entry.kind)
        fates.append(dataclasses.replace(told, stays=reason is not None))
    for name in sorted(odd.keys() - ledger.entries.keys(), key=names.step_number):
        fates.append(_stays(root, name, odd[name], kinds[name]))
    crowded = found.crowded and is_clear
    gone = [fate.name for fate in fates if not fate.stays]
    fates += _beside(
        root,
        item,
        ledger,
        crowded=crowded,
        goes={name for each in gone for name in ledger.hidden_by(each)},
        all_runs=other_runs,
    )
    # A run that saves there may have removed some of the folders meanwhile.
    return tuple(fate for fate in fates if not store.is_gone(root / fate.name))


def _strays(ledger: Ledger) -> dict[str, str]:
    """Reasons why copies of steps stay, and the steps that they rest on, by directory.

    A copy is, for example, `backup_5` beside 4, 5 and 6: no manager has given it that name, and
    none deletes it. The ledger forgets copies, as it would take either of two steps of one number.
    It also forgets folders with other names that are seen to hold no checkpoint: nothing rests on
    those.
    """
    own = [entry.directory for entry in ledger.committed() if not entry.orbax]
    found = ledger.strays()
    alike = [name for name in own if name not in found]
    strange = [n for n, each in ledger.folders.items() if not each.is_checkpoint]
    for name in strange:
        if alike and not any(names.are_alike(name, other) for other in alike):
            ledger.forget(name)
    reasons = {
        below: f"{name} rests on it"
        for name in found
        for below in ledger.closure([name])
    }
    reasons |= dict.fromkeys(found, "it is not called as the other steps are")
    for name in found:
        ledger.forget(name)
    return reasons


def _beside(
    root: store.AnyPath,
    item: str,
    ledger: Ledger,
    *,
    crowded: bool,
    goes: Collection[str],
    all_runs: bool,
) -> list[Fate]:
    """Fates of what rollbacks and new runs have set aside; `goes` names what goes with steps."""
    others = set[str]()
    reason = "a rollback has set it aside: it goes with the first step of the run"
    if ledger.unknown:
        reason = (
            "a rollback has set it aside; folders that cannot be read may rest on it"
        )
    own = aside_of_run(root, item, ledger, others)
    found = [(name, not (crowded or name in goes), reason) for name in own]
    for name in sorted(others):
        try:
            read_committed(root, name, item)
        except (errors.CnrError, OSError):
            is_orbax = folders.Folder.look(root / name, item).kind == "orbax"
            told = _BY_ORBAX if is_orbax else "its manifest cannot be read"
            found.append((name, True, told))
        else:
            found.append((name, not all_runs, "it is of another run"))
    fates = [_aside(root, "aside", *each) for each in found]
    for name in layout.beside(root)["earlier_runs"]:
        told = name, True, "no step is seen in it, so it may be somebody else's"
        with contextlib.suppress(OSError):
            if folders.is_earlier_run(root / name):
                told = name, not all_runs, "it holds an earlier run"
                # A new run may have taken along a copy, such as `backup_5`.
                if not names.are_all_alike(layout.step_directories(root / name)):
                    told = name, True, "not all steps in it are called alike"
        fates.append(_aside(root, "earlier run", *told))
    return fates


def _aside(
    root: store.AnyPath, kind: FateKind, name: str, stays: bool, reason: str
) -> Fate:
    told = _stays(root, name, reason, kind)
    return dataclasses.replace(told, step=None, stays=stays)


def _stays(root: store.AnyPath, name: str, reason: str, kind: FateKind) -> Fate:
    """The fate of a step that stays."""
    return Fate(
        name=name,
        step=names.step_number(name),
        kind=kind,
        bytes=store.store_of(root).bytes_below(root / name),
        stays=True,
        reason=reason,
    )
