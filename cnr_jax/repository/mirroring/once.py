"""Mirroring on demand: copies the steps of a root, and mends each of two roots from the other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

from cnr_jax import errors
from cnr_jax.repository import layout
from cnr_jax.repository.causes import as_root_errors, in_one_line
from cnr_jax.repository.index.entries import order
from cnr_jax.repository.items import find_item
from cnr_jax.repository.mirroring.copier import Copier, may_hold
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.mirroring.places import check_apart, is_free
from cnr_jax.repository.mirroring.report import MirrorReport
from cnr_jax.repository.mirroring.step_files import mend_files
from cnr_jax.repository.store import AnyPath
from cnr_jax.repository.upkeep.claim import read_writer
from cnr_jax.repository.upkeep.prune import claimed


def mirror(
    root: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    keep: int | None = None,
    repair: bool = False,
    bytes_per_sec: int | None = None,
    writer_is_dead: bool = False,
    single_writer: bool = False,
    item: str | None = None,
    follows: Callable[[MirrorReport], bool] | None = None,
) -> MirrorReport:
    """Copies the committed steps of a root to another root, parents first.

    It checks each file on the way. It does not copy again what the mirror already has, even of a
    step that a killed program has copied in part. A run may be saving in the root meanwhile. The
    call needs no device.

    Args:
        root: directory of the checkpoints.
        url: path or URL of the mirror, which is made if it is missing.
        keep: how many of the newest steps stay in the mirror, with the steps that these rest on;
            None: all stay.
        repair: whether to mend steps that are in both roots: a file that is damaged or missing in
            one is replaced by that of the other. This reads every byte of both, and no program may
            save to either.
        bytes_per_sec: bytes a second that are written at most; None: no limit.
        writer_is_dead: for `repair`, whether you promise that the managers that saved to either
            root have ended, where that cannot be seen.
        single_writer: as in `Options`, for both roots: whether their services may ignore the
            conditions of puts.
        item: name of the item of each step; None: the one that holds a checkpoint of this library.
        follows: function that is called with the report each time that all steps are copied, and
            says whether to look for more. None: the call copies once.

    Returns:
        The report of what was done, and of what could not be.

    Raises:
        NoStepError: if there is no such root.
        OptionError: if one root lies in the other, or the mirror is where no root can be.
        UsedRootError: if the mirror holds another run.
        WriterError: if another program copies to the mirror; with `repair`, if one saves to either.
        RootError: if a root cannot be seen, for example because its bucket does not exist.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root, far = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> state = {"user": jnp.zeros((8, 4))}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        >>> cnr.mirror(root, far).copied_steps, cnr.describe(far).latest_step
        (1, 0)
    """
    path, target = layout.open_root(root), layout.open_root(url)
    with as_root_errors(path, "mirrored"):
        layout.check_can_be_read(path, item)
        held = item or find_item(path)
    mended, problems = list[str](), list[str]()
    with as_root_errors(target, "mirrored to"):
        if repair:
            if held := held or find_item(target):
                mended = _repair(
                    path,
                    target,
                    held,
                    problems,
                    writer_is_dead=writer_is_dead,
                    single_writer=single_writer,
                )
        elif not is_free(target):
            raise errors.WriterError(
                f"another program copies to {os.fspath(target)}: nothing was copied\n"
                f"  got {read_writer(target)}\n"
                "  hint: end it, or mirror to another folder",
                kind="writer_busy",
            )
        found = Mirror(
            path,
            target,
            keep=keep,
            bytes_per_sec=bytes_per_sec,
            item=item,
            single=single_writer,
        )
    with found.for_a_while():
        while True:
            report = found.catch_up()
            if found.lost is not None:
                raise found.lost
            if follows is None or not follows(report):
                break
    return dataclasses.replace(
        report, mended=tuple(mended), problems=(*problems, *report.problems)
    )


def _repair(
    root: AnyPath,
    target: AnyPath,
    item: str,
    problems: list[str],
    *,
    writer_is_dead: bool,
    single_writer: bool,
) -> list[str]:
    """Mends each of two roots from the other; returns the paths of what was mended."""
    check_apart(root, target)
    layout.check_can_be_read(target)
    mended = list[str]()
    with contextlib.ExitStack() as stack:
        own, far = (
            stack.enter_context(
                claimed(
                    place,
                    item,
                    writer_is_dead=writer_is_dead,
                    single_writer=single_writer,
                    not_done="mended",
                )
            )
            for place in (root, target)
        )
        pairs = (target, root, own), (root, target, far)
        for source, place, (writer, _) in pairs:
            Copier(source, place, item=item, writer=writer).look()  # of one run?
        known = [e for _, held in (own, far) for e in held.committed() if not e.orbax]
        for entry in sorted({e.directory: e for e in known}.values(), key=order):
            if not all(
                may_hold(held, entry, place=place, source=source, item=item)
                for source, place, (_, held) in pairs
            ):
                continue
            copies = [place / entry.directory for place in (root, target)]
            try:
                mended += map(os.fspath, mend_files(copies, copies))
            except (errors.CnrError, OSError) as error:
                problems.append(f"step {entry.directory}: {in_one_line(error)}")
            for _, place, (_, held) in pairs:
                held.read(place, entry.directory, item)
        for source, place, (writer, _) in pairs:
            copier = Copier(source, place, item=item, writer=writer)
            copier.look()
            for entry in copier.needed():
                copier.copy(entry)
                mended.append(os.fspath(place / entry.directory))
    return mended
