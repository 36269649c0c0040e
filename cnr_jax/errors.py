"""The exceptions of `cnr_jax`, grouped by what a caller can do about them.

Every error has a `kind`, a stable string to branch on, beside its class; the classes also
inherit the builtin a caller would catch. Errors of Orbax and TensorStore pass through unwrapped
unless a fact about a checkpoint can be added.
"""

from __future__ import annotations

from collections.abc import Sequence


class CnrError(Exception):
    """Base of all errors raised by `cnr_jax`.

    Attributes:
        kind: stable, append-only identifier of the trouble, such as `"parent_missing"`.
    """

    kind: str = "error"

    def __init__(self, message: str, *, kind: str | None = None) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind


class ChainError(CnrError):
    """The parents of a checkpoint do not lead to a full one: restore another step."""

    kind = "chain"


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

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(message + lines)
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
    """A row changed that was not recorded: the delta would have missed it."""

    kind = "audit"


class OptionError(CnrError, ValueError):
    """An option or an argument has a value that cannot work."""

    kind = "option"
