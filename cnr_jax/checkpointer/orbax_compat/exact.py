"""Paths with which Orbax sees what is there, takes names as they are, and hears of errors."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

from etils.epath.gpath import PosixGPath

from cnr_jax.repository.files import exists, is_directory, is_local


class ExactPath(PosixGPath):
    """A path as Orbax uses it, on which it can rely; what is made from it is one too.

    Orbax asks a path whether something is there, and goes on as if it were not: it leaves a
    step out of its list, or the values out of a step that it finalizes. The paths it makes
    itself say so of whatever cannot be seen, and take `[1]` in the name of a folder above for
    a pattern.

    Example:
        >>> import tempfile
        >>> root = ExactPath(tempfile.mkdtemp()) / "lr=[0.1]"
        >>> (root / "part_1").mkdir(parents=True)
        >>> [path.name for path in root.glob("part_*")]
        ['part_1']
    """

    def exists(self) -> bool:
        """Whether something is there; raises OSError if that cannot be seen."""
        return exists(self) if is_local(self) else super().exists()

    def is_dir(self) -> bool:
        """Whether a directory is there; raises OSError if that cannot be seen."""
        return is_directory(self) if is_local(self) else super().is_dir()

    def glob(self, pattern: str) -> Iterator[Any]:
        """What lies below and fits; raises OSError if that cannot be seen."""
        found: list[Any] = [self]
        for part in pattern.split("/"):
            found = [
                inner
                for folder in found
                if folder.is_dir()
                for inner in folder.iterdir()
                if fnmatch.fnmatchcase(inner.name, part)
            ]
        return iter(found)
