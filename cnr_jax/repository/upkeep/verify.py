"""Check of a root: lists everything that is wrong, without a device and without any change.

`"structure"` checks manifests, names and sizes. `"data"` also reads every byte. No problem stops
the search: each one is listed, with the steps that it makes unrestorable.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, get_args

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository import layout, store
from cnr_jax.repository.causes import using_root
from cnr_jax.repository.index import folders
from cnr_jax.repository.index.chains import Flaw
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item, items_of
from cnr_jax.repository.step import sorted_out, uuid_of_step
from cnr_jax.repository.store import checked
from cnr_jax.repository.upkeep.aside import check_is_here
from cnr_jax.repository.upkeep.verify_item import Finding, inspect_item
from cnr_jax.texts import visible

# How often steps that have changed meanwhile are looked at again. A run saves so seldom that few
# rounds are enough.
_LOOKS = 5
Level = Literal["structure", "data"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Problem:
    """Problem in a root: something that is not as it should be.

    Attributes:
        directory: name of the step directory, or of a file or folder beside the steps.
        file: path of the file or folder in that directory, with the item first; empty for the
            directory itself.
        kind: stable identifier of the trouble, such as `"file_missing"`; errors have the same ones.
        consequence: names of the step directories that cannot be restored because of it; empty if
            it does no harm.
        message: text for people that says what is wrong.
        root: path of the root: that of a manager, or that of its mirror.
    """

    directory: str
    file: str
    kind: str
    consequence: tuple[str, ...]
    message: str
    root: str = ""

    def __str__(self) -> str:
        """One line."""
        where = "/".join(part for part in (self.directory, self.file) if part)
        harm = ", ".join(self.consequence)
        line = self.message.partition("\n")[0]
        # Most errors begin with the path of the file, below the root or with the root before it.
        at = line.find(where) if self.file else -1
        is_named = at == 0 or (at > 0 and line[at - 1] == "/")
        text = f"{line[at:] if is_named else f'{where}: {line}'} ({self.kind})"
        return visible(f"{text}; cannot be restored: {harm}" if harm else text)


def verify(
    root: str | os.PathLike[str],
    level: Level = "data",
    *,
    item: str | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> tuple[Problem, ...]:
    """Lists everything that is wrong in a root, in the order of its steps.

    It changes nothing and needs no device. A save or a removal that is under way is no problem, so
    the root may be in use. What a run abandoned or left behind is listed as harmless.

    Args:
        root: directory of the checkpoints: a local path, or a URL of `file://`, `gs://` or `s3://`.
        level: `"structure"` checks manifests, digests of small files, presence and sizes of all
            others, files that do not belong here, and parents. `"data"` also reads every byte,
            compares it with its checksum, and decodes row ids.
        item: name of the only item to look at; None: all items.
        on_step: function that is called after each step, once for each of its items, with the
            number of items looked at so far, and the number of all.

    Returns:
        The problems. Those with a `consequence` make steps unrestorable; those without do no harm.
        Of the damaged chunks of an array 32 are listed; one more problem counts those that are not.

    Raises:
        NoStepError: if there is no such root, or a save that is not committed has moved its steps
            away; it is a FileNotFoundError too.
        OptionError: if there is no such level, or the path cannot be a root, or is a file, or a
            step of a root.
        RootError: if the service of a bucket does not answer.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root = tempfile.mkdtemp()
        >>> state = {"user": jnp.zeros((8, 4))}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        >>> cnr.verify(root)
        ()
    """
    if level not in get_args(Level):
        known = " or ".join(map(repr, get_args(Level)))
        raise errors.OptionError(f"level {level!r} is not known, expected {known}")
    path = layout.open_root(root)
    with using_root(path):
        return _problems(path, level, item, on_step)


def _problems(
    path: store.AnyPath,
    level: Level,
    item: str | None,
    on_step: Callable[[int, int], None] | None,
) -> tuple[Problem, ...]:
    """Problems of a root; see `verify`."""
    layout.check_can_be_read(path, item)
    check_is_here(path)
    held, cut = sorted_out(path, layout.step_directories(path))
    steps = items_of(path, held, item or find_item(path))
    found: list[Problem] = []
    every = {each for items in steps.values() for each in items}
    wanted = sorted(every if item is None else every & {item})
    total = sum(each in items for items in steps.values() for each in wanted)
    counter = itertools.count(1)

    def looked() -> None:
        if on_step is not None:
            on_step(next(counter), total)

    left = set[str]()
    for each in wanted:
        looking = _Item(path, each, level)
        found += looking.problems(steps, looked)
        left |= looking.left
    found += _beside(path, cut, left)
    steps = {name: items for name, items in steps.items() if name not in left}
    known = [name for name, items in steps.items() if items] or ["0"]
    for name, items in steps.items():
        # Folders of other programs may end in a number too. Steps of a root are named alike.
        if items:
            found += _unknown(path, name, items)
        else:
            folder = folders.Folder.look(path / name)
            is_alike = any(names.are_alike(name, other) for other in known)
            if not is_alike and not folder.is_checkpoint:
                continue
            found.append(_without_item(name, folder))
        found += _of_orbax(path, name)
    # A run may be saving there. Folders that it has removed meanwhile are no problem.
    return tuple(
        dataclasses.replace(each, root=os.fspath(path))
        for each in sorted(found, key=lambda p: (names.place(p.directory), p))
        if store.is_named(path / each.directory)
    )


def _without_item(step: str, folder: folders.Folder) -> Problem:
    """Problem of a step directory that holds nothing of this library."""
    if folder.kind == "orbax":
        message = "a step of plain Orbax: what it holds is not looked at here"
        return Problem(step, "", "orbax", (), message)
    message = "holds no checkpoint of cnr_jax"
    return Problem(step, "", "no_checkpoint", (step,), message)


def _of_orbax(root: store.AnyPath, step: str) -> Iterator[Problem]:
    """Problems of the file in which Orbax describes a step; it holds no values."""
    file = names.ORBAX_METADATA
    path = root / step / file
    try:
        checked.refuse_pipe(path)
        if store.exists(path):
            data = store.read_small(path, folders.ORBAX_NOTE_BYTES)
            if not isinstance(json.loads(data), dict):
                raise ValueError("it is no JSON object")
    except errors.IntegrityError as error:
        yield Problem(step, file, error.kind, (step,), str(error))
    except (ValueError, RecursionError, OSError) as error:
        message = f"cannot be read, but is not needed: {error}"
        yield Problem(step, file, "orbax_metadata", (), message)


def _unknown(root: store.AnyPath, step: str, items: Sequence[str]) -> Iterator[Problem]:
    """Problems of files beside the items of a step, and of folders known to be no items."""
    held = folders.items_of_orbax(root / step)
    for name in store.names_in(root / step):
        if name in (*names.OF_STEP, *held, *items):
            continue
        path = root / step / name
        if held or not store.is_directory(path) or folders.is_own_item(path):
            message = "is not of this checkpoint; it is never read"
            yield Problem(step, name, checked.UNKNOWN, (), message)


def _beside(
    root: store.AnyPath, cut: tuple[str, ...], left: Iterable[str]
) -> Iterator[Problem]:
    """Harmless problems: folders that lie in a root beside its steps.

    Args:
        root: root that is looked at.
        cut: folders with names of steps that are unfinished.
        left: folders with names of steps that a rollback left behind.
    """
    meanings = {
        "removed": "a removed step that has left files",
        "abandoned": "a step that a rollback set aside",
        "unfinished": "a save or merged baseline that is being written, or was left by a kill",
    }
    held = layout.beside(root)
    held["unfinished"] += cut
    held["abandoned"] += tuple(left)
    for kind, message in meanings.items():
        for name in held[kind]:
            yield Problem(name, "", kind, (), message)


class _Item:
    """Check of one item in all steps of a root."""

    def __init__(self, root: store.AnyPath, item: str, level: Level) -> None:
        self._root, self._item, self._level = root, item, level
        self._index = Ledger(says=False)

    def problems(
        self, steps: dict[str, list[str]], looked: Callable[[], None]
    ) -> Iterator[Problem]:
        """Problems of this item; calls `looked` after each step."""
        found: dict[str, list[Finding]] = {}
        for step in (name for name, items in steps.items() if self._item in items):
            found[step] = self._look(step)
            looked()
        self._catch_up(found)
        self._index.part()
        found = {name: each for name, each in found.items() if name not in self.left}
        for step, findings in found.items():
            for finding in (*findings, *self._parent_problems(step)):
                yield self._problem(step, finding, found)

    @property
    def left(self) -> set[str]:
        """Folders with names of steps that rollbacks have left behind."""
        return {*self._index.left}

    def _catch_up(self, found: dict[str, list[Finding]]) -> None:
        """Looks again at steps that were removed, saved or replaced while it looked at others."""
        for _ in range(_LOOKS):
            # Until no more steps are found to be gone, since a parent goes after its children.
            while gone := [
                step for step in found if not store.is_directory(self._root / step)
            ]:
                for step in gone:
                    del found[step]
                    self._index.forget(step)
            apart = [step for step in found if self._parent_problems(step)]
            stale = [step for step in apart if self._is_stale(step)]
            for step in stale:
                parent = self._index.entries[step].parent
                for name in (step, *([parent.directory] if parent else [])):
                    found.pop(name, None)
                    self._index.forget(name)
                    if folders.is_own_item(self._root / name / self._item):
                        found[name] = self._look(name)
            if not stale:
                return

    def _is_stale(self, step: str) -> bool:
        """Whether a step or its parent is by now another checkpoint than the one compared."""
        entry = self._index.entries[step]
        assert entry.parent is not None
        known = self._index.entries.get(entry.parent.directory)
        # The parent is looked at first, since a step is removed before its parent.
        now = self._uuid(entry.parent.directory)
        if self._uuid(step) != entry.uuid:
            return True
        return now != (known.uuid if known else None)

    def _look(self, step: str) -> list[Finding]:
        """Looks at one step, and again if it was replaced meanwhile."""
        findings: list[Finding] = []
        for _ in range(3):
            where = self._root / step / self._item
            error = self._index.read(self._root, step, self._item)
            known = self._index.entries.get(step)
            if error is not None:
                findings = [Finding.of(error, names.MANIFEST, where)]
            elif known is not None and known.manifest is not None:
                is_data = self._level == "data"
                findings = inspect_item(where, known.manifest, data=is_data)
            if not findings or self._uuid(step) == (known.uuid if known else None):
                break
        return findings

    def _uuid(self, step: str) -> str | None:
        return uuid_of_step(self._root, step, self._item)

    def _parent_problems(self, step: str) -> list[Finding]:
        entry = self._index.entries.get(step)
        flaw = self._index.flaw(entry) if entry is not None else None
        if flaw is not None:
            if flaw.kind == "not_readable":
                return []  # the finding about the unreadable manifest says so
            text = f"{flaw.text}{self._told_uuids(step, flaw)}"
            return [Finding(names.MANIFEST, flaw.kind, text, "chain")]
        above = self._index.chain(entry)[1:2] if entry is not None else []
        if entry is None or not above or above[0].generation <= entry.generation:
            return []
        text = (
            f"the parent {above[0].directory} is of a later generation\n"
            f"  got {above[0].generation}, expected at most {entry.generation}"
        )
        return [Finding(names.MANIFEST, "generation", text, "none")]

    def _told_uuids(self, step: str, flaw: Flaw) -> str:
        """Text that says which checkpoint is in the place of a parent, if it is another one."""
        parent = self._index.entries[step].parent
        if flaw.kind != "foreign_parent" or parent is None:
            return ""
        other = self._index.entries[parent.directory].uuid
        return f"\n  got uuid {other}, expected {parent.uuid}"

    def _problem(self, step: str, finding: Finding, known: Collection[str]) -> Problem:
        harmed: tuple[str, ...] = ()
        if finding.harms == "step":
            harmed = (step,)
        elif finding.harms == "chain":
            heirs = set(self._index.heirs(step))
            harmed = tuple(name for name in known if name in heirs)
        file = f"{self._item}/{finding.file}".rstrip("/")
        return Problem(step, file, finding.kind, harmed, finding.message)
