"""The chain of a step, which a restore replays, read anew from its manifests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest, ParentRef
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.index.entries import Entry, chain_of, entry_of, parent_of
from cnr_jax.repository.layout import step_directories
from cnr_jax.repository.step import read_committed, read_manifest, read_step
from cnr_jax.repository.store import AnyPath, store_of


def resolve_chain(
    root: AnyPath, directory: str, item: str
) -> list[tuple[str, Manifest]]:
    """Reads the checkpoints to replay, the full one first and `directory` last.

    Args:
        root: root that holds the step directories.
        directory: name of the step directory to restore.
        item: name of the item in each step directory.

    Returns:
        The name of each step directory and its manifest.

    Raises:
        ParentMissingError: if a parent is missing, or is not the checkpoint that its child names.
        ChainError: if the parents lead in a circle.
        IntegrityError: if the manifest of the step itself is missing or damaged.
        ManifestError: if a manifest is damaged, or the tables of a chain differ.
    """
    try:
        return _resolved(root, directory, item)
    except errors.ParentMissingError as error:
        try:
            # A program that merged a step, or was removing what it rests on, may have been killed
            # before it removed the step itself.
            return _resolved(root, directory, item, by_merged=True)
        except errors.ParentMissingError:
            raise error from None


def _resolved(
    root: AnyPath, directory: str, item: str, *, by_merged: bool = False
) -> list[tuple[str, Manifest]]:
    """As `resolve_chain`; `by_merged` prefers a full stand-in even if the parent still exists."""
    chain: list[tuple[str, Manifest]] = []

    def above(entry: Entry) -> Entry | None:
        if entry.parent is None:
            return None
        found = _stand_in(root, item, entry.parent) if by_merged else None
        if found is None or found[1].parent is not None:
            found = _read_parent(root, item, entry.parent, chain)
        return entry_of(*found)

    store_of(root).fetch(
        root / name / item / names.MANIFEST for name in _foreseen(root, directory)
    )
    first = entry_of(directory, read_step(root, directory, item))
    for entry in chain_of(first, above):
        assert entry.manifest is not None
        chain.append((entry.directory, entry.manifest))
    chain.reverse()
    _check_tables(root, chain)
    return chain


def _foreseen(root: AnyPath, directory: str) -> list[str]:
    """Step directories of the chain, as far as the catalogue knows them."""
    entries = catalogue.read(root).entries
    entry = entries.get(directory)
    if entry is None:
        return []
    return [each.directory for each in chain_of(entry, lambda e: parent_of(e, entries))]


def _read_parent(
    root: AnyPath,
    item: str,
    parent: ParentRef,
    chain: Sequence[tuple[str, Manifest]],
) -> tuple[str, Manifest]:
    """Reads a parent, or what stands for it: the name of its directory, and its manifest."""
    child, heir = chain[0][0], chain[-1][0]
    if any(manifest.uuid == parent.uuid for _, manifest in chain):
        raise errors.ChainError(
            f"checkpoint {child} cannot be restored: its chain is a circle\n"
            f"  chain: {_picture(chain, parent.directory, 'again')}",
            kind="circle",
            path=os.fspath(root / heir / item),
        )
    path = root / parent.directory
    try:
        # The step number is not checked: the uuid says which checkpoint it must be.
        manifest = read_manifest(path / item)
    except errors.IntegrityError as error:
        if error.kind == "manifest_missing":
            if found := _stand_in(root, item, parent):
                return found
            raise errors.ParentMissingError(
                f"checkpoint {child} cannot be restored: its parent {parent.directory}"
                f" is missing\n  chain: {_picture(chain, parent.directory, 'missing')}\n"
                f"  hint: bring back {os.fspath(path)}, or restore another step",
                path=os.fspath(path / item),
            ) from error
        raise
    if not entry_of(parent.directory, manifest).answers_to(parent.uuid):
        if found := _stand_in(root, item, parent):
            return found
        raise errors.ParentMissingError(
            f"checkpoint {child} cannot be restored: {parent.directory} is not the"
            f" parent it was saved with\n  got uuid {manifest.uuid}, expected"
            f" {parent.uuid}, as {names.MANIFEST} of {heir} says\n"
            f"  chain: {_picture(chain, parent.directory, 'another run')}\n"
            f"  hint: bring back the {parent.directory} that {heir} was saved on, or"
            " restore another step",
            kind="foreign_parent",
            # The checkpoint in the place of the parent is whole; the one that names it is not.
            path=os.fspath(root / heir / item),
        )
    return parent.directory, manifest


def _stand_in(
    root: AnyPath, item: str, parent: ParentRef
) -> tuple[str, Manifest] | None:
    """Finds the merged checkpoint that stands for a parent; None if there is none."""
    plain = names.plain(parent.directory)
    alike = step_directories(
        root, lambda n: names.may_be_step(n) and names.plain(n) == plain
    )
    for name in sorted(alike, key=names.branch_generation, reverse=True):
        try:
            manifest = read_committed(root, name, item)
        except errors.CnrError:
            continue  # the caller then reports the parent as missing
        if entry_of(name, manifest).answers_to(parent.uuid):
            return name, manifest
    return None


def _picture(chain: Sequence[tuple[str, Manifest]], last: str, note: str) -> str:
    known = [f"{name} ({manifest.kind})" for name, manifest in chain]
    return " <- ".join([f"{last} ({note})", *reversed(known)])


def _check_tables(root: AnyPath, chain: Sequence[tuple[str, Manifest]]) -> None:
    """Checks that each delta has the tables of its parent: names, leaves and shapes."""
    for (name, parent), (child_name, child) in itertools.pairwise(chain):
        if parent.tables != child.tables:
            raise errors.ManifestError(
                f"checkpoints {name} and {child_name} are of one chain but hold"
                " different tables",
                [f"{name}: {_names(parent)}", f"{child_name}: {_names(child)}"],
                path=os.fspath(root / child_name),
            )


def _names(manifest: Manifest) -> str:
    return ", ".join(
        f"{table.name}.{leaf.name} {list(leaf.shape)} {leaf.dtype}"
        for table in manifest.tables
        for leaf in table.leaves
    )
