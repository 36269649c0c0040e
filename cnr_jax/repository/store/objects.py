"""Buckets: no folders, no links, no locks; what a write has returned from is durable."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, BinaryIO

import fsspec
from etils import epath

from cnr_jax import errors
from cnr_jax.repository.store.base import AnyPath, Capabilities, Objects, Streams


def _plain(path: AnyPath) -> epath.Path:
    """A path without what Orbax is shown of it instead, which asks here itself."""
    return epath.Path(os.fspath(path))


class ObjectStore(Streams, Objects):
    """Objects of a bucket, which have names like files of a folder.

    Args:
        scheme: of the URLs, such as `"gs"`.
        package: that reads and writes them.
    """

    can = Capabilities(
        renames=False,
        locks=False,
        appends=False,
        cheap_looks=False,
        conditions=False,
        paths=True,
    )

    def __init__(self, scheme: str, package: str) -> None:
        self._scheme, self._package = scheme, package

    # Looks.

    def exists(self, path: AnyPath) -> bool:
        return _plain(path).exists()

    def is_directory(self, path: AnyPath) -> bool:
        return _plain(path).is_dir()

    def is_named(self, path: AnyPath) -> bool:
        return _plain(path).exists()

    def names_in(self, folder: AnyPath) -> list[str]:
        try:
            return sorted(entry.name for entry in _plain(folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders_in(
        self,
        folder: AnyPath,
        may_be: Callable[[str], bool],
        known: Collection[str] = (),
    ) -> list[str]:
        return [
            each.name
            for each in _plain(folder).iterdir()
            if each.name in known or (may_be(each.name) and each.is_dir())
        ]

    def size_of(self, path: AnyPath) -> int:
        with _plain(path).open("rb") as stream:
            return int(stream.seek(0, os.SEEK_END))

    def modified_unix_secs(self, path: AnyPath) -> float:
        return float(_plain(path).stat().mtime)

    def amiss(
        self, folder: AnyPath, files: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[str, int]]:
        yield from files

    def bytes_below(self, folder: AnyPath) -> int:
        return sum(
            self.bytes_below(folder / name)
            if self.is_directory(folder / name)
            else self.size_of(folder / name)
            for name in self.names_in(folder)
        )

    # Reading and writing files.

    def open_file(self, path: AnyPath) -> BinaryIO:
        stream: Any = _plain(path).open("rb")
        return stream

    def write(self, path: AnyPath, data: bytes, *, replaces: bool) -> None:
        # An object is shown when it is complete.
        with _plain(path).open("wb") as file:
            file.write(data)

    def write_new(self, path: AnyPath, data: bytes) -> None:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "is there", os.fspath(path))
        self.write(path, data, replaces=True)

    def read_version(self, path: AnyPath) -> tuple[bytes, Any] | None:
        try:
            with self.open_file(path) as stream:
                return stream.read(), None
        except FileNotFoundError:
            return None

    def swap(self, path: AnyPath, data: bytes, version: Any) -> Any:
        raise OSError(errno.ENOTSUP, "no condition can be given", os.fspath(path))

    # Names.

    def make_folder(self, path: AnyPath, mode: int | None = None) -> None:
        _plain(path).mkdir(parents=True, exist_ok=True)

    def move(self, path: AnyPath, target: AnyPath) -> None:
        _plain(path).rename(_plain(target))  # object by object

    def remove_file(self, path: AnyPath) -> None:
        with contextlib.suppress(FileNotFoundError):
            _plain(path).unlink()

    def remove_tree(self, path: AnyPath, threads: int = 1) -> list[OSError]:
        try:
            _plain(path).rmtree()
        except FileNotFoundError:
            pass
        except OSError as error:
            return [error]
        return []

    # TensorStore.

    def kvstore(self, folder: AnyPath) -> str | dict[str, str]:
        where = os.fspath(folder)
        return where if where.endswith("/") else f"{where}/"

    def check_usable(self, root: AnyPath) -> None:
        try:
            fsspec.get_filesystem_class(self._scheme)
        except ImportError as error:
            raise errors.OptionError(
                f"{os.fspath(root)} is no root here, as {self._package} is not installed;"
                f" hint: pip install {self._package}",
                kind="not_installed",
            ) from error

    def fetch(self, paths: Iterable[AnyPath]) -> None:
        pass

    def forget_listings(self) -> None:
        """Has each listing of a bucket be made anew.

        What TensorStore writes there, and what other processes do, fsspec does not see: by what it
        has kept, files of a step would be missing in its manifest.
        """
        try:
            # The one that epath uses: fsspec makes one of the same arguments once.
            system: Any = fsspec.filesystem("gcs", finalize_on_close=True)
        except ImportError:
            return  # without gcsfs no path of a bucket can be used at all
        system.dircache.use_listings_cache = False
        system.invalidate_cache()
