"""Runs: finds out to which run of training a save belongs.

Retention deletes steps of that run only. So a save joins a run if that is known: a step of the root
was restored, or the touched rows come from there. It never begins a run in a root that holds
checkpoints, unless the user asks for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.encodings import EncodingEntry
from cnr_jax.repository.index import rollback
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.layout import hint_of_names
from cnr_jax.repository.store import AnyPath, store_of
from cnr_jax.texts import logger

_log = logger(__name__)


class RestoredRun(NamedTuple):
    """Run of a step that was restored.

    Attributes:
        root: root that the step was restored from.
        run: run of the step; empty if it names none.
        encoding: encoding of its rows, which saves go on with; None if it is not known.
    """

    root: str
    run: str
    encoding: EncodingEntry | None


# Lineage of stamps, and their clock.
Stamps = tuple[str, int]
# Runs of all restores of this process, by lineage: one manager may restore a state, and another
# one save it. When there are too many, the oldest go first.
_restored_runs: dict[str, RestoredRun] = {}
_REMEMBERED = 1024


def note_restored(
    root: AnyPath, lineage: str, run: str, encoding: EncodingEntry | None
) -> None:
    """Notes the run of a step of a root that was restored with touched rows of a fresh lineage."""
    _restored_runs[lineage] = RestoredRun(_real(root), run, encoding)
    while len(_restored_runs) > _REMEMBERED:
        del _restored_runs[next(iter(_restored_runs))]


def run_restored(root: AnyPath | None, lineage: str) -> RestoredRun | None:
    """Run of the step of a root that was restored with touched rows of this lineage.

    None if this process did not restore them from that root.
    """
    known = _restored_runs.get(lineage)
    if known is None or root is None:
        return None
    return known if known.root == _real(root) else None


def _real(root: AnyPath) -> str:
    return store_of(root).real(root)


class Runs:
    """Runs of one root, as known to the process that decides about its saves.

    Args:
        nonce: digits that uuids of saves of this process begin with.
        new_run: whether a run begins here even in a root that holds checkpoints, unless one is
            restored.

    Attributes:
        current: run that was restored or saved last; None if neither happened here.
        new_run: the argument.
    """

    def __init__(self, nonce: str, *, new_run: bool = False) -> None:
        self._nonce, self.new_run = nonce, new_run
        self.current: str | None = None
        # How rows are stored, by run; runs that began here are not in it.
        self._encodings: dict[str, EncodingEntry | None] = {}
        # Whether `current` was restored, so that `new_run` begins no other here.
        self._is_restored = False
        self._is_new_run_refused = False
        # Step directories to which this process has planned a save, committed or not.
        self._tried: set[str] = set()
        # Run of each lineage that was saved or restored here, for as long as this process lives.
        self._known: dict[str, str] = {}
        # Lineages of touched rows that went with saves that began, until these are committed, by
        # the uuid of the save. Where fingerprints choose rows, these have a lineage of their own.
        self._carried: dict[str, str] = {}

    def saved(self, lineage: str, run: str, uuid: str = "") -> None:
        """Notes a committed save, and that its touched rows belong to its run."""
        self.current = self._known[lineage] = run
        if uuid in self._carried:
            self._known[self._carried.pop(uuid)] = run

    def restored(self, lineage: str, run: str, encoding: EncodingEntry | None) -> None:
        """Notes that a restored step of a run goes on as `lineage`, with this encoding of rows."""
        self.saved(lineage, run)
        self._is_restored = True
        self._encodings[run] = encoding

    def encoding_of(self, run: str) -> EncodingEntry | None:
        """How rows of a run are stored; None if that is not known, or the run began here."""
        return self._encodings.get(run)

    def tries(self, directory: str) -> None:
        """Notes that a save to this step directory is planned."""
        self._tried.add(directory)

    def carries(self, uuid: str, touched: Stamps | None) -> None:
        """Notes the touched rows that go with a save that begins."""
        if touched is not None:
            self._carried[uuid] = touched[0]

    def check_origin(self, ledger: Ledger, touched: Stamps | None) -> None:
        """Checks that a save of a state belongs to a run that may save here.

        Args:
            ledger: ledger of the root.
            touched: lineage and clock of the touched rows that go with the state; None without
                any.

        Raises:
            UsedRootError: if the root holds checkpoints, but none of them was restored, the state
                does not come from there, and no new run was asked for.
            SaveError: if storage does not say whether an earlier save of this process is committed.
        """
        if self.current is not None:
            return
        doubtful = sorted(self._tried & ledger.doubtful)
        if doubtful:
            name = doubtful[0]
            raise errors.SaveError(
                f"nothing can be saved: storage does not say whether the save of step {name},"
                f" with which this run began, is committed\n  {ledger.folders[name].why}\n"
                "  hint: save again once storage is well; what is committed is untouched",
                path=f"{ledger.root}/{name}",
            )
        if self.new_run:
            return
        others = ledger.others()
        there = [*others, *ledger.checkpoints()]
        if there and self._joinable(ledger, touched) is None:
            raise _used_root(ledger, there, hint_of_names(others))

    def of_save(
        self, ledger: Ledger, touched: Stamps | None, step: int, uuid: str
    ) -> tuple[str, list[Entry]]:
        """Run of a save, and the steps that are set aside because that run is new.

        The name of a new run is the uuid of its first save.

        Raises:
            UsedRootError, SaveError: see `check_origin`.
        """
        self.check_origin(ledger, touched)
        if self.current is None:
            if self.new_run and not self._own(ledger):
                return uuid, rollback.all_of_root(ledger)
            known = self._joinable(ledger, touched)
            if known is None:
                return uuid, []
            self._encodings[known] = _encoding_of(ledger, touched)
            return known, []
        if self.new_run and self._is_restored and not self._is_new_run_refused:
            _log.warning(
                "new_run=True is ignored: a step of %s was restored, and its run goes on",
                ledger.root,
            )
            self._is_new_run_refused = True
        whose = self._whose(ledger, touched)
        if whose is not None and whose not in (self.current, *self._encodings):
            self._encodings[whose] = _encoding_of(ledger, touched)
        if whose is not None or touched is None:
            return (self.current if whose is None else whose), []
        later = rollback.from_step_on(ledger, self.current, step)
        return (uuid if later else self.current), later

    def _whose(self, ledger: Ledger, touched: Stamps | None) -> str | None:
        """Run that touched rows belong to; None if it is not known."""
        if touched is None:
            return None
        if touched[0] in self._known:
            return self._known[touched[0]]
        restored = run_restored(ledger.root, touched[0])
        if restored is not None:
            return restored.run
        saved = _saved_with(ledger, *touched)
        return None if saved is None else saved.run

    def _joinable(self, ledger: Ledger, touched: Stamps | None) -> str | None:
        """Run that the first save of this process joins; None if it goes on with none."""
        own = self._own(ledger)
        return own[-1] if own else self._whose(ledger, touched)

    def _own(self, ledger: Ledger) -> list[str]:
        """Runs of the saves of this process that storage did not show at first."""
        return [e.run for e in ledger.committed() if e.uuid.startswith(self._nonce)]


def _encoding_of(ledger: Ledger, touched: Stamps | None) -> EncodingEntry | None:
    """How rows are stored in the run that a save joins; None if that is not known."""
    if touched is None:
        return None
    restored = run_restored(ledger.root, touched[0])
    if restored is not None:
        return restored.encoding
    saved = _saved_with(ledger, *touched)
    return saved.manifest.encoding if saved and saved.manifest else None


def _saved_with(ledger: Ledger, lineage: str, clock: int) -> Entry | None:
    """Newest checkpoint of a lineage that was saved at this clock or before; None without one."""
    for entry in reversed(ledger.committed()):
        found = entry.known
        if found is not None and found.lineage == lineage:
            if found.recorded_clock is not None and found.recorded_clock <= clock:
                return entry
    return None


def _used_root(ledger: Ledger, found: Sequence[str], hint: str) -> errors.UsedRootError:
    """Makes the error for a save into a root from which nothing was restored."""
    ours = ledger.committed()
    steps = sorted(names.step_number(directory) for directory in found)
    span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
    lines = [
        f"{ledger.root} holds checkpoints, and none was restored: a new run would mix with theirs",
        f"  got {len(steps)} step{'s' * (len(steps) > 1)}, {span}",
        "  expected an empty root, or a restore before the first save; nothing was changed",
    ]
    theirs = {name for name, each in ledger.folders.items() if each.is_foreign}
    if set(found) <= theirs:
        lines[1] += ", saved by plain Orbax"
        lines[2] = "  expected an empty root; nothing was changed"
        lines.append(
            "  hint: to go on with them here, Options(adopt=True) lets restore take them and saves"
            " go beside them; or restore them with ocp.CheckpointManager, and save into another"
            " root"
        )
    elif ours:
        lines.append(
            "  hint: to go on with them, state, touched = manager.restore(None,"
            " args=cnr_jax.args.Restore(state))"
        )
        lines.append(
            "  hint: to go on with a state of that run in memory, pass the touched rows that"
            " belong to it, not new ones: Save(state, touched)"
        )
    else:
        lines.append(hint or "  hint: cnr_jax.verify(root) says why none can be read")
    lines.append(
        "  hint: to begin anew, save into another root; or Options(new_run=True), which moves"
        " them into a folder of this one"
    )
    return errors.UsedRootError("\n".join(lines))
