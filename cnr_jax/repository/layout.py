"""Layout of roots: what a root may be, and where the steps and items in it lie."""

from __future__ import annotations

import dataclasses
import os
import re
import urllib.parse
from collections.abc import Callable, Collection
from pathlib import Path

from etils import epath

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.store import (
    REMOTE,
    AnyPath,
    asking_once,
    can,
    exists,
    is_directory,
    names_in,
    store_of,
)

# Names that Orbax gives to steps, unless the user sets a format.
_STEP_NAME = re.compile(r"(?:(.+)_)?([0-9]+)")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Schemes of buckets in other programs, such as Hadoop, Spark and fsspec.
_CALLED_OTHERWISE = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "s3": "s3", "gs": "gs"}
# pathlib makes `s3:/bucket` of `s3://bucket`. Only schemes that nobody would name a folder by.
_CUT_SCHEME = re.compile(
    r"(gs|s3):|(gcs|s3[an]|az|abfss?|hdfs|https?|file|ftp):/", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where an item of a step lies, or will lie once it is committed.

    Attributes:
        root: root that holds the step directories.
        directory: name of the step directory.
        item: name of the item's directory in it.
    """

    root: AnyPath
    directory: str
    item: str

    @property
    def path(self) -> AnyPath:
        """The item's directory."""
        return self.root / self.directory / self.item


def open_root(root: str | os.PathLike[str]) -> epath.Path:
    """Path of a root that a user names: made absolute if local, unchanged if `gs://` or `s3://`.

    Every function that takes a root makes its path here, and nothing else decides where the root
    is. A URL that is made absolute like a local path would be a folder below the current directory.

    Args:
        root: a local path, a `file://` URL of this machine, or a `gs://` or `s3://` URL.

    Raises:
        OptionError: if checkpoints cannot be kept there.

    Example:
        >>> open_root("gs://bucket/run"), open_root("file:///ckpt/a%20run")
        (PosixGPath('gs://bucket/run'), PosixGPath('/ckpt/a run'))
    """
    text = os.fspath(root)
    scheme = _SCHEME.match(text)
    if scheme is None:
        if _CUT_SCHEME.match(text):
            raise errors.OptionError(
                f"{text!r} is no root: it looks like a URL that lost a slash, as in a"
                " pathlib.Path\n  hint: pass URLs as strings"
            )
        return _local(_at_home(text), text)
    if scheme[1].lower() == "file":
        return _local(_path_of(text), text)
    if not text.startswith(schemes := tuple(f"{each}://" for each in REMOTE)):
        hint = "mount the store as a folder, or save to a local disk and copy"
        if (known := _CALLED_OTHERWISE.get(scheme[1].lower())) is not None:
            hint = f"{known}{text[scheme.end(1) :]} is the same bucket"
        raise errors.OptionError(
            f"{text!r} is no root: checkpoints cannot be kept in {scheme[1]}://\n"
            f"  got {scheme[1]!r}, expected a local path, file://, {' or '.join(schemes)}\n"
            f"  hint: {hint}"
        )
    if text.partition("://")[2].startswith("/") or text.endswith("://"):
        raise errors.OptionError(
            f"{text!r} is no root: it names no bucket\n"
            f"  expected {scheme[1]}://BUCKET or {scheme[1]}://BUCKET/FOLDER"
        )
    if ".." in text.split("/"):
        raise errors.OptionError(
            f"{text!r} is no root: `..` leads nowhere in a bucket\n"
            "  got '..' in it, expected names of folders\n"
            "  hint: the URL without it"
        )
    found = epath.Path(text)
    store_of(found).forget_listings()
    return found


def lies_in(path: AnyPath, root: AnyPath) -> bool:
    """Whether a path from `open_root` is a root, or lies below it; links are followed.

    Neither of the two need exist.

    Example:
        >>> lies_in(open_root("/ckpt/a/b"), open_root("file:///ckpt/a"))
        True
    """
    real = [Path(store_of(each).real(each)) for each in (path, root)]
    return real[0].is_relative_to(real[1])


def _path_of(url: str) -> str:
    """Local path that a `file://` URL stands for."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise errors.OptionError(
            f"{url!r} is no root: {error}\n  hint: file:///path"
        ) from None
    if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
        raise errors.OptionError(
            f"{url!r} is no root: it is no file of this machine\n"
            f"  got host {parts.netloc!r}, query {parts.query!r}, fragment"
            f" {parts.fragment!r}; expected file:///path\n"
            "  hint: pass the path itself; in a URL `?` is %3F and `#` is %23"
        )
    if not parts.path.startswith("/"):
        raise errors.OptionError(
            f"{url!r} is no root: it names no folder\n  hint: file:///path"
        )
    return os.fsdecode(urllib.parse.unquote_to_bytes(parts.path))


def _local(text: str, given: str) -> epath.Path:
    """Absolute path of a local root that Orbax, TensorStore and this library all read alike."""
    if not text:
        raise errors.OptionError(
            f"{given!r} is no root: it is empty\n  hint: '.' is the current folder"
        )
    why, text = "", os.path.abspath(text)
    if "\0" in text:
        why = "no path holds a NUL"
    elif "\\" in text:
        # Without an error, rows would go to another folder than manifests.
        why = "TensorStore takes a backslash for a slash"
    elif any("\ud800" <= letter <= "\udfff" for letter in text):
        why = "TensorStore takes only paths of UTF-8"
    elif "gs:/" in text or os.fspath(epath.Path(text)) != text:
        why = "Orbax takes it for a URL"
    if why:
        raise errors.OptionError(
            f"{given!r} is no root: {why}\n  got {text!r}\n"
            "  hint: rename the folder, or save to another one"
        )
    return epath.Path(text)


def _at_home(text: str) -> str:
    """Local path in which `~` and `~user` are replaced as a shell does."""
    found = os.path.expanduser(text)
    if found.startswith("~"):
        raise errors.OptionError(
            f"{text!r} is no root: there is no such home folder\n"
            f"  hint: './{text}' if the folder is called so"
        )
    return found


def check_is_root(root: AnyPath) -> None:
    """Checks that a root is not a step of another root, nor an item of such a step.

    Raises:
        OptionError: if it is.
        OSError: if storage does not tell.
    """
    # Files that each step has tell it from a root, in a few looks, however many steps a root has.
    # In a bucket one listing answers these: without the right to list, a program may not even ask
    # for objects that are not there.
    with asking_once():
        if not is_directory(root):
            return
        if _has_files_of_step(root):
            step, held = root, [root / name for name in names_in(root)]
        elif exists(root / names.MANIFEST) and _has_files_of_step(root.parent):
            step, held = root.parent, [root]
        else:
            return
        is_step = any(exists(item / names.MANIFEST) for item in held)
    if is_step:
        back = ""
        if names.may_be_step(step.name):
            back = f", and restore({names.step_number(step.name)})"
        raise errors.OptionError(
            f"{os.fspath(root)} is a step of the root {os.fspath(step.parent)}\n"
            "  got a folder that holds a checkpoint, expected the folder that holds all steps"
            f"\n  hint: {os.fspath(step.parent)!r}{back}"
        )


def _has_files_of_step(path: AnyPath) -> bool:
    """Whether a folder has a file that lies in the folder of each step; others may be gone."""
    return any(exists(path / name) for name in names.OF_STEP)


def check_is_no_file(root: AnyPath) -> None:
    """Checks that a root can be made: that nothing but folders are in its path.

    Raises:
        OptionError: if a file is there, or the package that reads its store is not installed.
        OSError: if storage does not tell.
    """
    store_of(root).check_usable(root)


def check_is_free(root: AnyPath, directory: str) -> None:
    """Checks that no file is where Orbax makes the folder of a save: Orbax would delete the file.

    Raises:
        DependentsExistError: if there is one.
        OSError: if storage does not tell.
    """
    path = root / f"{directory}{names.TEMPORARY_SUFFIX}"
    if can(root).renames and exists(path) and not is_directory(path):
        raise errors.DependentsExistError(
            f"{directory} cannot be saved: {os.fspath(path)} is a file\n"
            "  got a file, expected nothing where Orbax makes a folder\n"
            "  hint: move it out of the root, or save another step",
            kind="step_exists",
        )


def check_is_there(root: AnyPath) -> None:
    """Checks that a root that is to be read exists.

    Raises:
        NoStepError: if there is no such folder.
    """
    if not is_directory(root):
        raise errors.NoStepError(
            f"there is no folder {os.fspath(root)}, so no checkpoint to read\n"
            "  hint: is the path right? The first save of a manager with tables makes it",
            kind="no_root",
            path=os.fspath(root),
        )


def check_can_be_read(root: AnyPath, item: str | None = None) -> None:
    """Checks that a root can be read: that it is a folder, exists, and is no step of another root.

    Args:
        root: root to be read.
        item: name of the item of its steps, as the user gave it; None: none was given.

    Raises:
        NoStepError: if there is no such folder.
        OptionError: if it is a file, or a step, or `item` is not the name of one folder.
        OSError: if storage does not tell.
    """
    if item is not None and not (isinstance(item, str) and names.is_component(item)):
        raise errors.OptionError(
            f"an item is the name of one folder of each step, got {item!r}\n"
            "  hint: without one, that which most of the newest steps have is taken"
        )
    check_is_no_file(root)
    check_is_there(root)
    check_is_root(root)


def step_directories(
    root: AnyPath,
    is_step: Callable[[str], bool] | None = None,
    *,
    known: Collection[str] = (),
) -> list[str]:
    """Names of the directories below a root that may be committed steps, sorted.

    Args:
        root: root that is listed.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        known: names that were found before; they are not looked at again.
    """
    wanted = is_step or names.may_be_step
    found = store_of(root).folders_in(root, names.may_be_step, known)
    return sorted(name for name in found if name in known or wanted(name))


def beside(root: AnyPath) -> dict[str, tuple[str, ...]]:
    """Names of the folders that lie in a root beside its steps, as `names.beside` sorts them.

    A link counts unless it leads to a file: steps may be links, and stay links when renamed.

    Raises:
        OSError: if the root cannot be listed.
    """
    return names.beside(name for name in names_in(root) if _may_be_folder(root, name))


def _may_be_folder(root: AnyPath, name: str) -> bool:
    """Whether a name is that of a special folder, and no file has it; looks only at such names."""
    if names.kind_of_folder(name) is None:
        return False
    path = root / name
    if is_directory(path):
        return True
    return store_of(path).is_link(path) and not exists(path)


def hint_of_names(others: Collection[str]) -> str:
    """Hint that names the options with which a manager lists these directories; empty for none."""
    if not others:
        return ""
    newest = max(others, key=names.step_number)
    return (
        f"  hint: {newest} is named by other options than this manager's: orbax_options="
        f"ocp.CheckpointManagerOptions({options_of_names(others)})"
    )


def options_of_names(directories: Collection[str]) -> str:
    """Text of the arguments with which Orbax's options name step directories like these.

    Example:
        >>> options_of_names(["ck_0012", "ck_0013"]), options_of_names(["12"])
        ("step_prefix='ck', step_format_fixed_length=4", 'step_prefix=None')
        >>> options_of_names(["epoch-12"])
        'step_name_format=...'
    """
    directories = [*map(names.plain, directories)]
    newest = max(directories, key=names.step_number)
    found = _STEP_NAME.fullmatch(newest)
    if found is None:
        return "step_name_format=..."
    said = f"step_prefix={found[1]!r}"
    parts = [_STEP_NAME.fullmatch(name) for name in directories]
    alike = [each[2] for each in parts if each is not None and each[1] == found[1]]
    if any(each[0] == "0" and len(each) > 1 for each in alike):
        said += f", step_format_fixed_length={min(map(len, alike))}"
    return said
