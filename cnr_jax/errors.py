"""The exceptions of `cnr_jax`, grouped by what a caller can do about them.

Every error has a `kind`, a stable string to branch on, beside its class; the classes also
inherit the builtin a caller would catch. Errors of Orbax and TensorStore pass through unwrapped
unless a fact about a checkpoint can be added.

The docstring of a class says what it means, what to do, and which other kinds it has.
`docs/generate.py` makes the page of errors from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cnr_jax.texts import visible_lines


class CnrError(Exception):
    """Base of all errors raised by `cnr_jax`.

    The tuple `DAMAGE` has the errors that mean a damaged step, and no others. `pickle` and `copy`
    keep all attributes and notes of an error, also from a worker of a pool of processes. Cause
    and traceback stay behind, as with all exceptions.

    Kinds:
        error: no class fits better.
        not_installed: the call needs a package that is missing; the text names it.
        process_failed: another process has failed for a reason of its own, which the text tells.

    Attributes:
        kind: stable, append-only identifier of the trouble, such as `"parent_missing"`.
        path: the file or folder that is in trouble, if there is one.
    """

    kind: str = "error"
    path: str | None = None

    def __init__(
        self, message: str, *, kind: str | None = None, path: str | None = None
    ) -> None:
        super().__init__(visible_lines(message))
        if kind is not None:
            self.kind = kind
        if path is not None:
            self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        # How pickle and copy make another. Python's own way would call the class with the text
        # alone, and leave out what `OSError` keeps beside its variables.
        return _blank, (type(self), self.args), self._facts()

    def _facts(self) -> dict[str, Any]:
        """Attributes of the error beside its text, notes included."""
        of_system = {name: getattr(self, name, None) for name in _OF_SYSTEM}
        return {**vars(self), **{k: v for k, v in of_system.items() if v is not None}}

    def to_json(self) -> dict[str, Any]:
        """All that the error says, for another process of the run: text and attributes.

        Its cause and traceback stay behind.

        Example:
            >>> found = ManifestError("not valid", ["step: required key is absent"], path="m")
            >>> same = CnrError.from_json(found.to_json())
            >>> type(same).__name__, str(same) == str(found), same.problems, same.path
            ('ManifestError', True, ('step: required key is absent',), 'm')
        """
        facts = {k: v for k, v in self._facts().items() if not k.startswith("_")}
        found = {"class": type(self).__name__, "message": str(self)}
        return {**found, "facts": {"kind": self.kind, **facts}}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> CnrError:
        """Rebuilds an error from `to_json`, in the nearest class that this version has."""
        kind: Any = globals().get(document["class"])
        if not isinstance(kind, type) or not issubclass(kind, CnrError):
            kind = CnrError
        error = _blank(kind, (document["message"],))
        for name, value in document["facts"].items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error


# Most steps that a text names of those that cannot be restored.
_MOST_OBSTACLES = 10
# What `OSError` keeps of the system's error.
_OF_SYSTEM = ("errno", "strerror", "filename", "filename2")


def _blank(kind: type[CnrError], args: tuple[Any, ...]) -> CnrError:
    """Makes an error without calling its class, since the text holds all arguments already."""
    error = kind.__new__(kind)
    error.args = args
    return error


class ChainError(CnrError):
    """The parents of a checkpoint do not lead to a full one.

    Restore another step; `restore(None)` does.

    Kinds:
        circle: the parents lead back to the checkpoint.
    """

    kind = "chain"


class NoStepError(CnrError, FileNotFoundError):
    """There is no such root, no such step in it, or none at all that can be restored.

    The text lists the steps that there are, and what is wrong with each. Look at the path, or
    ask for another step. A manager lists the steps that it saw when you opened it, and those that
    it saved. `reload()` also finds what another process has saved or deleted since.

    Kinds:
        no_root: there is no such folder.
        moved_aside: a save that begins a new run has moved the steps away, and is not committed.
        step_deleted: the step was deleted, or moved aside, while it was read.
    """

    kind = "no_step"

    @classmethod
    def nothing_restores(
        cls,
        root: str,
        obstacles: Sequence[tuple[str, str]],
        hint: str = "",
        *,
        done: str = "",
    ) -> NoStepError:
        """Error for a root from which no step can be restored.

        Args:
            root: path of the root.
            obstacles: name of each step directory, and why it cannot be restored, in a line; the
                first ten are named.
            hint: last line of the text.
            done: what comes of it for the caller, such as `"nothing is deleted"`.
        """
        end = f": {done}" if done else ""
        lines = [f"no step in {root} can be restored{end}"]
        lines += [f"  {name}: {why}" for name, why in obstacles[:_MOST_OBSTACLES]]
        if (left := len(obstacles) - _MOST_OBSTACLES) > 0:
            lines.append(f"  and {left} more")
        if not obstacles:
            hint = (
                hint or "  hint: it holds no steps: is it the root that was saved to?"
            )
        return cls("\n".join([*lines, *([hint] if hint else [])]), path=root)


class ParentMissingError(ChainError, FileNotFoundError):
    """A checkpoint names a parent that is not there, or that is another checkpoint.

    If folders were moved or copied, bring the parent back. Otherwise restore another step.

    Kinds:
        foreign_parent: another checkpoint is in the parent's place.
    """

    kind = "parent_missing"


class DependentsExistError(ChainError):
    """A checkpoint cannot be removed or replaced while others depend on it.

    The text names the others: delete them first. In a save, go on with a higher step number, or
    in another root.

    Kinds:
        step_exists: a step, or a folder, already has the number of the save. The error that a
            manager raises is Orbax's `StepAlreadyExistsError` too, which is a ValueError.
    """

    kind = "dependents_exist"


class FormatError(CnrError, ValueError):
    """Bytes on disk are not what the format allows: damage, or another version.

    Restore another step, or upgrade `cnr_jax`.

    Kinds:
        row_ids: the bytes are those of row ids.
    """

    kind = "format"


class ManifestError(FormatError):
    """A manifest breaks the format's rules.

    `problems` lists each of them. Restore another step.

    Attributes:
        problems: every problem found, each one line, `field: expected ..., got ...`.
    """

    kind = "manifest"

    def __init__(
        self,
        message: str,
        problems: Sequence[str] = (),
        *,
        kind: str | None = None,
        path: str | None = None,
    ) -> None:
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(message + lines, kind=kind, path=path)
        self.problems = tuple(problems)


class UnsupportedVersionError(FormatError):
    """A checkpoint needs a newer reader, such as for compressed arrays.

    Upgrade `cnr_jax`.
    """

    kind = "unsupported_version"


class IntegrityError(CnrError):
    """Stored data does not match its checksum, or a stored file is missing.

    The text names the file. Restore another step, and look at the disk.

    Kinds:
        file_missing: a file or folder is not there.
        file_damaged: a file is cut, longer or of another kind, or its digest differs.
        file_changed: a file was written while it was read.
        file_unknown: no manifest names a file that Orbax could take for a part of the step. Nothing
            else is wrong: move the file away.
        file_unreadable: storage gave an I/O error; it may read the file the next time.
        data_damaged: rows or dense leaves do not match their checksum.
        dense_unfinished: Orbax was to write dense leaves, and has not written the files by which it
            finds them.
        dense_unreadable: Orbax has written dense leaves, and cannot read them.
        foreign_chunk: a chunk is whole, but belongs to another array, step or run.
        foreign_rows: differences lie on other rows than they were taken from. The program that
            wrote them is at fault, not storage.
        foreign_step: the folder has the name of another step than the manifest in it.
        manifest_missing: there is no manifest: the step is not ours, or was never whole.
        not_committed: the save of this step was cut short.
        not_ours: no item of the step is a checkpoint of ours: plain Orbax has saved it, our item is
            gone, or it is not clear which of several items of Orbax is the state;
            docs/guides/from-orbax.md.
        orbax_unreadable: plain Orbax has saved this step, and cannot read it any more.
        process_missing: not all processes have written their part of the step.
        rows_missing: a full checkpoint does not hold all rows of a table.
    """

    kind = "integrity"


class StateMismatchError(CnrError, ValueError):
    """The state that was passed and the tables or the checkpoint disagree.

    The text lists all differences. In a save, pass a state of the structure in which the tables
    were found, with all its leaves, each of the same shape and dtype. In a restore, pass the state
    that was saved. Or pass `Restore(..., partial=True)` to restore what both have, or `cast=True`
    to convert values to dtypes that cannot hold all of them. 64 bits need `jax_enable_x64`. For
    tables with another number of rows, other ids or another name, see docs/guides/grow-a-table.md.
    No rows of tables were read.
    """

    kind = "state_mismatch"


class TableError(CnrError, ValueError):
    """A table specification does not single out tables and slots in a state.

    A name matches no leaf or several, the leaf is not an array of numbers with rows, or a slot
    may belong to two tables. Print the tables, and give the full path of the leaf, or a
    `TableSpec` that lists rows and slots.
    """

    kind = "table"


class TouchedError(CnrError, ValueError):
    """Row ids or a `touched` value cannot be used with these tables.

    The cause is an unknown table, ids that are not integers, a mask that does not fit them, a
    sharding that does not split rows evenly, or a recorded run that saves without `touched`. Pass
    what `record` returned, in the order `Save(state, touched)`.
    """

    kind = "touched"


class AuditError(CnrError, ValueError):
    """A row changed that was not recorded: the delta would have missed it.

    The save wrote no step, not even a full one, and noted the steps in doubt in the root. The text
    names tables, rows and the likely cause. Save by fingerprints
    (`Options(tracking="fingerprint")`), or give tables an optimizer that leaves other rows alone,
    or record the missing rows. If you put back an older state by hand, or want to save all rows as
    they are now, give `Save` what `reset_touched` returns. That save is full; see
    docs/guides/choose-tracking.md.

    Attributes:
        steps: committed steps that may lack such rows: deltas of this run since the rows were
            last seen right, and full ones that hold such deltas merged. If a save compares only a
            part of the rows, earlier deltas may lack some too. Other full checkpoints lack none.
        since: the step in which the rows were last seen right; None if that is not known.
        lineage: lineage of the touched rows that lacked these rows.
        clock: clock of these touched rows when the rows were last seen right.
    """

    kind = "audit"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        steps: Sequence[int] = (),
        since: int | None = None,
        lineage: str = "",
        clock: int = 0,
    ) -> None:
        super().__init__(message, kind=kind)
        self.steps, self.since = tuple(steps), since
        self.lineage, self.clock = lineage, clock


class WriterError(CnrError, RuntimeError):
    """Another manager saves to this root: this one has saved and deleted nothing.

    Stop one of them. `CheckpointManager.reload()` lets this one take the root over again.

    Kinds:
        writer_busy: the other manager is still writing.
        in_the_way: there is no other manager, but a folder is in the place of a file.
    """

    kind = "writer"


class UsedRootError(CnrError, RuntimeError):
    """A root holds checkpoints, and none was restored: saving there would mix two runs.

    Nothing was saved, moved or deleted. Restore first (steps of plain Orbax with
    `Options(adopt=True)`), save into another root, or set the checkpoints aside with
    `Options(new_run=True)`; see docs/guides/sweeps.md. You also get it if a mirror or a `near` root
    holds the steps of another run, or if you import into a root that holds steps.
    """

    kind = "used_root"


class RootError(CnrError, OSError):
    """A root cannot be opened, read or pruned: the system refused a call.

    Nothing was saved or moved, and nothing deleted but what `prune` then names. The text names
    the root, the call and its path. Look at rights, at the path and at the mount; the same call may
    work the next time. If the root is in a bucket, all calls but saves raise it when the service
    does not answer or refuses. The text then names the object and the code, and says what to do
    (docs/guides/buckets.md).

    Kinds:
        no_answer: the service of a bucket did not answer, or not as it was asked.
        refused: the service refused a request: keys or rights are not the right ones.

    Attributes:
        path: the root.
        call: call that the system refused, such as `"mkdir"`; None if it is not known.
        errno: number of the system's error, such as `errno.EACCES`.
    """

    kind = "root"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        path: str | None = None,
        call: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, kind=kind, path=path)
        self.call, self.errno = call, errno


class CallError(CnrError, RuntimeError):
    """A call of a manager would wait for itself, comes after its end, or is in another process.

    Kinds:
        inside_on_save: call it after `on_save` has returned.
        nested: do not call it in a signal handler that interrupts another call, or in a handler or
            callback that a save waits for.
        closed: call it before `close()`.
        forked: call it in the process that made the manager, and start others by
            `multiprocessing.get_context("spawn")`.
    """

    kind = "call"


class OptionError(CnrError, ValueError):
    """An option or an argument has a value that cannot work.

    It may be an unknown name, options of the wrong library, a state given by position, or a step
    that is not an integer, is negative or is past 2**63 - 1. It may be arguments of Orbax that
    restore no state, a root that is not a folder or is in another store, or a `rename` or `ids` of
    a restore that is not a dict of names or of lists of integers. Or you gave bits, and no codec
    takes any; if the run's own codec takes none, a restore raises the error. The hint names the
    form that works.

    Kinds:
        no_table: there is no table of that name.
        no_row: the table does not have a row that was asked for.
        not_held: the format of an export cannot hold a leaf, or cannot name it.
        not_installed: a root in a store, or rows on a lattice, need a package that the text
            names.
        no_conditions: the service of a bucket cannot tell apart programs that save there.
        no_target: an export cannot be written to that folder, or an import cannot be made there.
        faults_unavailable: `cnr_jax.testing` has no way to inject that fault on this system.
    """

    kind = "option"


class SaveError(CnrError, OSError):
    """A save failed; what was committed before it is untouched.

    The run can go on: the next save has the rows of the failed one. With several processes all
    raise it. Make room, or look at storage, and save again; see
    docs/guides/full-disk-and-failures.md.

    Kinds:
        timeout: a save waited longer than `timeout_secs` for its directories, or for room in
            memory.
        process_silent: another process did not answer. It may have been killed, hang, or be late:
            look at its log.
        coordination_lost: the processes do not reach each other; jax's service in process 0 may
            have ended.
        chain_damaged: a checkpoint that the save was to rest on has lost files, so the save is not
            committed; the next one is full. Our manager raises no error for it: its
            `last_report.outcome` is `"dropped"`, and its `failure` says why.
        after_commit: the step *is* saved, but something after the commit failed, such as syncing
            it. Older steps may still be there.

    Attributes:
        problem: the missing part of the chain, in a line; empty for other kinds.
        step: step of the failed save; None if it had none yet.
        process: the process that failed or was silent; None if it is not known.
        errno: number of the system's error, such as `errno.ENOSPC`; None if it was another.
    """

    kind = "save_failed"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        path: str | None = None,
        problem: str = "",
        step: int | None = None,
        process: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, kind=kind, path=path)
        self.step, self.process, self.errno = step, process, errno
        self.problem = problem


class ExportError(CnrError, OSError):
    """An export was not written, and nothing is in its place.

    Make room, or name another folder. The export has removed the files that it wrote beside it.

    Kinds:
        target_exists: something of that name is there already, and stays as it is.
        no_space: there is less room than the export takes; nothing was written.

    Attributes:
        needed_bytes: bytes that the export takes, about; None if room was not the problem.
        free_bytes: bytes that are free, likewise.
        errno: number of the system's error, such as `errno.ENOSPC`; None if it was another.
    """

    kind = "export_failed"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        path: str | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, kind=kind, path=path)
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        self.errno = errno


# A step is damaged, or cannot be read by this version: another one may be restored instead.
DAMAGE = (ChainError, FormatError, IntegrityError)
