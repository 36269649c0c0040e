"""Damage to stored files that can be undone: bit flips, truncation, removal, exchange.

Each function damages at once and returns a `Damage`. Its `undo`, or the end of its `with`, puts
everything back, times of last change too, so that thousands of cases run on one root.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp(), "file")
    >>> _ = file.write_bytes(b"ab")
    >>> with flip_bit(file, 8):
    ...     file.read_bytes()
    b'ac'
    >>> file.read_bytes()
    b'ab'
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.store import is_directory, names_in, store_of

AnyPath = str | os.PathLike[str]
Kind = Literal[
    "array", "zarr_metadata", "process_manifest", "manifest", "dense", "orbax"
]
# `<step>` or `<prefix>_<step>`, as Orbax names the directories of committed steps.
_STEP = re.compile(r"(?:.*_)?(\d+)")
_PROCESS_MANIFEST = re.compile(r"manifest\.p\d{5}\.json")
_ROWS = re.compile(r"rows\.p\d{5}")
_DENSE_METADATA = re.compile(r"dense/p\d{5}/zarr\.json")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a committed step.

    Attributes:
        path: path of the file; in a bucket a path of `etils`.
        step: number of the step.
        kind: `"array"`: a chunk of rows, row ids or what codecs store. `"zarr_metadata"`: metadata
            of such an array, or of dense leaves. `"process_manifest"`, `"manifest"`: the documents
            that name and commit them. `"dense"`: all else below `dense/`. `"orbax"`: what Orbax
            writes beside, and other items.
        array: name of the array, of `"array"` and `"zarr_metadata"`; else "".
    """

    path: Path
    step: int
    kind: Kind
    array: str = ""


def files_of(root: AnyPath) -> list[StoredFile]:
    """All files of the committed steps in a root, by step and path.

    Steps that are being written, abandoned or removed are left out. So is, in a bucket, the file
    that commits a step: a step without it was never committed, and what it has left behind is a
    step again.

    Args:
        root: path of the root, or URL of one in a bucket.
    """
    if "://" in os.fspath(root):
        return _objects_of(open_root(root))
    found = []
    for folder in sorted(Path(root).iterdir()):
        match = _STEP.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                item, *parts = path.relative_to(folder).parts
                kind, array = _kind_of(parts, ours=_is_ours(folder / item))
                found.append(StoredFile(path, int(match[1]), kind, array))
    return sorted(found, key=lambda file: (file.step, file.path))


def _objects_of(root: Any) -> list[StoredFile]:
    """Those of a root in a bucket."""
    found = []
    for step in cnr.describe(root).steps:
        folder = root / step.directory
        objects = [each for each in _below(folder) if each != [names.ATTEMPT]]
        ours = {item for item, *parts in objects if parts == [names.MANIFEST]}
        for item, *parts in objects:
            kind, array = _kind_of(parts, ours=item in ours)
            path = folder.joinpath(item, *parts)
            found.append(StoredFile(path, step.step, kind, array))
    return sorted(found, key=lambda file: (file.step, os.fspath(file.path)))


def _below(folder: Any) -> Iterator[list[str]]:
    """Names that lead from a folder in a bucket to each object below it."""
    for name in names_in(folder):
        if names.is_file(name) or not is_directory(folder / name):
            yield [name]
        else:
            yield from ([name, *rest] for rest in _below(folder / name))


def _kind_of(parts: Sequence[str], *, ours: bool) -> tuple[Kind, str]:
    """Kind of a file and its array, by the names that lead to it from the folder of an item."""
    if not parts or not ours:
        return "orbax", ""
    if [*parts] == [names.MANIFEST]:
        return "manifest", ""
    if _PROCESS_MANIFEST.fullmatch(parts[0]) and len(parts) == 1:
        return "process_manifest", ""
    if parts[0] == names.DENSE:
        is_metadata = _DENSE_METADATA.fullmatch("/".join(parts)) is not None
        return ("zarr_metadata", names.DENSE) if is_metadata else ("dense", "")
    if _ROWS.fullmatch(parts[0]) and len(parts) > 2:
        return "array" if parts[2] == "c" else "zarr_metadata", parts[1]
    return "orbax", ""


def _is_ours(item: Path) -> bool:
    return (item / names.MANIFEST).exists() or any(item.glob("manifest.p*.json"))


class Damage(contextlib.AbstractContextManager["Damage"]):
    """Something was damaged; `undo` puts it back, once."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def undo(self) -> None:
        """Puts back what was there. Several damages are undone last first."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def of_stored(path: Any, do: Callable[[Path], Damage]) -> Damage:
    """Damages a stored file by one of the functions below, in a bucket too.

    An object is damaged in a copy on the local disk, which then takes its place.

    Args:
        path: path of a file, such as that of a `StoredFile`.
        do: function that damages the file at a local path.
    """
    if "://" not in os.fspath(path):
        return do(Path(path))
    store = store_of(path)
    whole = store.read(path)
    with tempfile.TemporaryDirectory(prefix="cnr_jax_damage_") as folder:
        copy = Path(folder, "object")
        copy.write_bytes(whole)
        with do(copy):
            if copy.exists():
                store.write(path, copy.read_bytes(), replaces=True)
            else:
                store.remove_file(path)
    return Damage(lambda: store.write(path, whole, replaces=True))


def flip_bit(path: AnyPath, bit: int) -> Damage:
    """Flips one bit: `bit % 8` (0 is worth 1) of byte `bit // 8`.

    Raises:
        OptionError: if the file is shorter.
    """
    path = Path(path)
    size_bytes = path.stat().st_size
    if not 0 <= bit < 8 * size_bytes:
        raise errors.OptionError(
            f"bit {bit} is not in {path}, which has {8 * size_bytes}"
        )
    with path.open("rb") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
    return overwrite(path, bytes([byte ^ (1 << bit % 8)]), at_bytes=bit // 8)


def overwrite(path: AnyPath, data: bytes, *, at_bytes: int = 0) -> Damage:
    """Overwrites some bytes, such as by the zeros that a power cut leaves.

    Raises:
        OptionError: if the file ends before they do.
    """
    path = Path(path)
    before = path.stat()
    if at_bytes < 0 or at_bytes + len(data) > before.st_size:
        raise errors.OptionError(
            f"{len(data)} bytes at {at_bytes} are not in {path}, which has"
            f" {before.st_size}"
        )
    with path.open("rb") as file:
        file.seek(at_bytes)
        old = file.read(len(data))
    _put(path, at_bytes, data)

    def undo() -> None:
        _put(path, at_bytes, old)
        _set_times(path, before)

    return Damage(undo)


def truncate(path: AnyPath, size_bytes: int) -> Damage:
    """Cuts a file off after its first `size_bytes` bytes.

    Raises:
        OptionError: if it has no more than that.
    """
    path = Path(path)
    before = path.stat()
    if not 0 <= size_bytes < before.st_size:
        raise errors.OptionError(
            f"{path} cannot be cut to {size_bytes} bytes, it has {before.st_size}"
        )
    with path.open("rb") as file:
        file.seek(size_bytes)
        tail = file.read()
    os.truncate(path, size_bytes)

    def undo() -> None:
        _put(path, size_bytes, tail)
        _set_times(path, before)

    return Damage(undo)


def extend(path: AnyPath, data: bytes = b"\0") -> Damage:
    """Adds bytes to the end of a file."""
    path = Path(path)
    before = path.stat()
    _put(path, before.st_size, data)

    def undo() -> None:
        os.truncate(path, before.st_size)
        _set_times(path, before)

    return Damage(undo)


def remove(path: AnyPath) -> Damage:
    """Removes a file, or a directory with all that is in it."""
    path = Path(path)
    undo = contextlib.ExitStack()
    undo.callback(_set_times, path.parent, path.parent.stat())
    undo.callback(_move_aside(path))
    return Damage(undo.close)


def duplicate(source: AnyPath, target: AnyPath) -> Damage:
    """Copies a file or directory to a place where another is, or where nothing is.

    Folders that are missing above it are made.
    """
    source, target = Path(source), Path(target)
    # What is made here: the copy, or the outermost of the missing folders.
    made = [path for path in (target, *target.parents) if not path.exists()]
    made_first = made[-1] if made else target
    undo = contextlib.ExitStack()
    undo.callback(_set_times, made_first.parent, made_first.parent.stat())
    if os.path.lexists(target):
        undo.callback(_move_aside(target))
    undo.callback(_delete, made_first)
    target.parent.mkdir(parents=True, exist_ok=True)
    _copy(source, target)
    return Damage(undo.close)


def exchange(first: AnyPath, second: AnyPath) -> Damage:
    """Exchanges two files or directories."""
    first, second = Path(first), Path(second)
    parents = [(path.parent, path.parent.stat()) for path in (first, second)]

    def swap() -> None:
        aside = first.with_name(first.name + ".exchanged")
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    def undo() -> None:
        swap()
        for parent, before in parents:
            _set_times(parent, before)

    swap()
    return Damage(undo)


def _put(path: Path, at_bytes: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at_bytes)
        file.write(data)


def _set_times(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _move_aside(path: Path) -> Callable[[], None]:
    """Moves a path to a temporary folder; returns a function that moves it back."""
    folder = Path(tempfile.mkdtemp(prefix="cnr_jax_damage_"))
    shutil.move(path, folder / path.name)

    def back() -> None:
        shutil.move(folder / path.name, path)
        folder.rmdir()

    return back


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
