"""Paths to any store in the form that Orbax uses, also to stores that `etils` does not reach."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from typing import Any

from etils.epath.gpath import PosixGPath

from cnr_jax.repository.store import AnyPath, can, exists, names_in, store_of


class StorePath(PosixGPath):
    """A path of `etils` that leaves the work to the store where `etils` does not reach it."""

    def open(self, mode: str = "r", **kwargs: Any) -> Any:
        """Opens a file for reading, or for writing as a whole."""
        if can(self).paths:
            return super().open(mode, **kwargs)
        if set(mode) & set("a+x"):
            raise OSError(errno.ENOTSUP, f"no file opens as {mode!r}", os.fspath(self))
        stream: Any = _Written(self) if "w" in mode else store_of(self).open_file(self)
        return stream if "b" in mode else io.TextIOWrapper(stream, "utf-8")

    def iterdir(self) -> Iterator[Any]:
        """Yields the paths right below this one."""
        if can(self).paths:
            yield from super().iterdir()
        else:
            yield from (self / name for name in names_in(self))

    def mkdir(
        self, mode: int | None = None, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """Makes a folder, where the store has folders."""
        if can(self).paths:
            super().mkdir(mode=mode, parents=parents, exist_ok=exist_ok)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file."""
        if can(self).paths:
            super().unlink(missing_ok)
        elif missing_ok or exists(self):
            store_of(self).remove_file(self)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes a folder with all its contents."""
        if can(self).paths:
            super().rmtree(missing_ok)
        else:
            for error in store_of(self).remove_tree(self):
                raise error


class _Written(io.BytesIO):
    """Stream to a file, which exists once the stream is closed."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            store_of(self._path).write(self._path, self.getvalue(), replaces=True)
        super().close()
