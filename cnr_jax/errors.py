"""The exceptions of `cnr_jax`, grouped by what a caller can do about them.

Every error has a `kind`, a stable string to branch on, beside its class; the classes also
inherit the builtin a caller would catch. Errors of Orbax and TensorStore pass through unwrapped
unless a fact about a checkpoint can be added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class CnrError(Exception):
    """Base of all errors raised by `cnr_jax`.

    Attributes:
        kind: stable, append-only identifier of the trouble, such as `"parent_missing"`.
        path: the file or folder that is in trouble, where there is one.
    """

    kind: str = "error"
    path: str | None = None

    def __init__(
        self, message: str, *, kind: str | None = None, path: str | None = None
    ) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind
        if path is not None:
            self.path = path

    def to_json(self) -> dict[str, Any]:
        """All that the error says, for another process of the run: text and attributes.

        Its cause and traceback stay behind.

        Example:
            >>> found = ManifestError("not valid", ["step: required key is absent"], path="m")
            >>> same = CnrError.from_json(found.to_json())
            >>> type(same).__name__, str(same) == str(found), same.problems, same.path
            ('ManifestError', True, ('step: required key is absent',), 'm')
        """
        facts = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        if isinstance(self, OSError):
            facts["errno"] = self.errno  # which is not among its variables
        found = {"class": type(self).__name__, "message": str(self)}
        return {**found, "facts": {"kind": self.kind, **facts}}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> CnrError:
        """The error that `to_json` told of; of the nearest class there is here."""
        kind: Any = globals().get(document["class"])
        if not isinstance(kind, type) or not issubclass(kind, CnrError):
            kind = CnrError
        # Made without its arguments, which the text holds already.
        error = kind.__new__(kind)
        error.args = (document["message"],)
        for name, value in document["facts"].items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error


class ChainError(CnrError):
    """The parents of a checkpoint do not lead to a full one: restore another step."""

    kind = "chain"


class NoStepError(CnrError, FileNotFoundError):
    """There is no such root, no such step in it, or none at all that can be restored."""

    kind = "no_step"


class ParentMissingError(ChainError, FileNotFoundError):
    """A checkpoint names a parent that is not there, or is another than the named one."""

    kind = "parent_missing"


class DependentsExistError(ChainError):
    """A checkpoint cannot be removed or replaced while others depend on it."""

    kind = "dependents_exist"


class FormatError(CnrError, ValueError):
    """Bytes on disk are not what the format allows: corruption, or another version."""

    kind = "format"


class ManifestError(FormatError):
    """A manifest breaks the format's rules.

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
    """A checkpoint needs a newer reader: upgrade `cnr_jax`."""

    kind = "unsupported_version"


class IntegrityError(CnrError):
    """Stored data does not match its checksum, or a stored file is missing."""

    kind = "integrity"


class StateMismatchError(CnrError, ValueError):
    """The state that was passed and the tables or the checkpoint disagree."""

    kind = "state_mismatch"


class TableError(CnrError, ValueError):
    """A table specification does not single out tables and slots in a state."""

    kind = "table"


class TouchedError(CnrError, ValueError):
    """Row ids or a `touched` value that cannot be used with these tables."""

    kind = "touched"


class AuditError(CnrError, ValueError):
    """A row changed that was not recorded: the delta would have missed it.

    Attributes:
        steps: committed deltas that may lack such rows: those of this run since the rows were
            last seen right. Others before these cannot be excluded where a save compares a part
            of the rows only. Full checkpoints lack none.
        since: the step in which the rows were last seen right; None if that is not known.
        lineage: of the touched rows that did not have them.
        clock: of these, at which the rows were last seen right.
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
    """Another manager saves to this root: nothing was saved or deleted by this one.

    Stop one of them. `CheckpointManager.reload()` lets this one take the root over again.
    """

    kind = "writer"


class UsedRootError(CnrError, RuntimeError):
    """A root holds checkpoints, and none was restored: saving there would mix two runs.

    Nothing was saved, moved or deleted. Restore first, save into another root, or set the
    checkpoints aside with `Options(new_run=True)`.
    """

    kind = "used_root"


class CallError(CnrError, RuntimeError):
    """A call of a manager that would wait for itself, or that comes after its end.

    By `kind`: `"inside_on_save"` or `"nested"`: call it elsewhere, or later. `"closed"`: call it
    before `close()`.
    """

    kind = "call"


class OptionError(CnrError, ValueError):
    """An option or an argument has a value that cannot work."""

    kind = "option"


class SaveError(CnrError, OSError):
    """A save failed; what was committed before it is untouched.

    The run can go on: the rows of the failed save are in the next one.

    Attributes:
        step: of the failed save; None if it had none yet.
        process: the process that failed or was silent; None if it is not known.
        errno: number of the system's error, such as `errno.ENOSPC`; None if it was another.
    """

    kind = "save_failed"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        step: int | None = None,
        process: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, kind=kind)
        self.step, self.process, self.errno = step, process, errno


# A step is damaged, or cannot be read by this version: another one may be restored instead.
DAMAGE = (ChainError, FormatError, IntegrityError)
