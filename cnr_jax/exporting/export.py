"""Export of a step, whole or in part, in a form that programs without `cnr_jax` can read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax

from cnr_jax import errors
from cnr_jax.exporting.forms import (
    METADATA,
    check_form,
    check_integers,
    in_form,
    write_orbax,
    write_safetensors,
    write_zarr,
)
from cnr_jax.exporting.leaves import ExportedLeaf, leaves_of
from cnr_jax.exporting.target import check_room, put_whole, target_of
from cnr_jax.integers import integer, take_integers
from cnr_jax.repository.layout import Place
from cnr_jax.repository.reading import of_step
from cnr_jax.repository.step_reader import open_chain
from cnr_jax.repository.store.kept_chunks import KeptChunks
from cnr_jax.rows.tiling import own_settings
from cnr_jax.state.table import few, flatten_paths

Format = Literal["orbax", "safetensors", "zarr"]
# Bytes of chunks of the chain that are kept, by us and by TensorStore: rows are read once, in
# order, so one chunk of each array of a leaf is enough.
_KEPT_BYTES = 64 << 20
_CACHE_BYTES = 32 << 20
# Room for each leaf beside its values: its folder and what describes it.
_LEAF_BYTES = 16 << 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export: its folder, its leaves, and which of them are lossy.

    Attributes:
        directory: absolute path of the folder.
        format: `"orbax"`, `"safetensors"` or `"zarr"`.
        step: number of the exported step.
        leaves: paths of the leaves, sorted.
        lossy: paths of leaves with rows that a codec has rounded, in this step or in one that it
            rests on.
        bytes: bytes of the values.
    """

    directory: str
    format: str
    step: int
    leaves: tuple[str, ...]
    lossy: tuple[str, ...]
    bytes: int


@own_settings()
def export(
    root: str | os.PathLike[str],
    step: int | None,
    directory: str | os.PathLike[str],
    format: Format = "orbax",
    *,
    tables: Sequence[str] | None = None,
    leaves: Sequence[str] | None = None,
    like: Any = None,
    item: str | None = None,
    shard_bytes: int = 5_000_000_000,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Exported:
    """Exports a step as plain arrays, in a form that programs without `cnr_jax` can read.

    Rows are as a restore gives them: if a save has rounded them, they stay rounded, and the result
    names their leaves. Tables are decoded in blocks of at most 8 MiB, and hold all their rows, in
    the order of their ids, whatever their layout. The export changes nothing in the root, and
    compares all that it reads with its checksums. It writes the folder under another name beside
    its own, syncs and renames it, so the folder is there whole or not at all.

    Args:
        root: directory of the checkpoints: a local path, or a URL of `file://`, `gs://` or `s3://`.
        step: number of the step; None: the newest of the newest branch whose chain is there.
        directory: local folder to make; folders above it are made too.
        format: `"orbax"`: a checkpoint for `ocp.StandardCheckpointer`; `"safetensors"`:
            `model.safetensors`, or several files with `model.safetensors.index.json`; `"zarr"`: a
            zarr v3 hierarchy, where floats that numpy lacks, such as bfloat16, become float32, and
            integers of 2 or 4 bits int8 or uint8.
        tables: names of tables; only these are exported, with their slots.
        leaves: paths, or patterns such as `"params/*"`; leaves that match are exported, beside
            `tables`.
        like: for `"orbax"`, a state with the structure that the export is to have, such as the one
            that was saved, of arrays or `jax.ShapeDtypeStruct`. None: nested dicts, with a list for
            each node whose keys are 0, 1, 2 and so on.
        item: name of the item; None: the one that holds a checkpoint of this library.
        shard_bytes: for `"safetensors"`, the most bytes of values in a file. A leaf is not divided.
        on_bytes: function that is called with the bytes written so far, and the bytes of the whole.

    Returns:
        The folder, its leaves, and which of them are lossy. `cnr_jax_export.json` in the folder, or
        `cnr_jax` among the attributes of a zarr hierarchy, says the same, with the codecs.

    Raises:
        ExportError: if something of that name exists already, if there is too little room, or if
            storage fails. Then nothing is left.
        OptionError: if a table or leaf is not there, the format cannot hold a leaf, the folder lies
            in the root, or the program has several processes.
        NoStepError: if there is no such root or step; it is a FileNotFoundError too.
        ChainError, IntegrityError, FormatError: if what is read is damaged or missing.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, orbax.checkpoint as ocp, cnr_jax as cnr
        >>> root, there = tempfile.mkdtemp(), os.path.join(tempfile.mkdtemp(), "plain")
        >>> state = {"user": jnp.arange(12.0).reshape(6, 2), "rates": [0.1, 0.2]}
        >>> options = cnr.Options(codec="raw")
        >>> tables = cnr.find_tables(state, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        >>> cnr.export(root, 0, there).lossy
        ()
        >>> found = ocp.StandardCheckpointer().restore(there)
        >>> found["user"][5].tolist(), found["rates"]
        ([10.0, 11.0], [0.1, 0.2])
    """
    asked = _Asked(format, tables, leaves, like, shard_bytes, on_bytes)
    if jax.process_count() > 1:
        raise errors.OptionError(
            f"export is for programs of one process, got {jax.process_count()}\n"
            "  hint: run `cnr-jax export` beside the run"
        )
    target = target_of(root, directory)
    return of_step(root, step, item, lambda place: _export(place, target, asked))


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """Arguments of `export`, as they are described there."""

    format: Format
    tables: Sequence[str] | None
    leaves: Sequence[str] | None
    like: Any
    shard_bytes: int
    on_bytes: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            known = ", ".join(get_args(Format))
            raise errors.OptionError(
                f"no format {self.format!r}, expected one of: {known}"
            )
        if self.like is not None and self.format != "orbax":
            raise errors.OptionError(
                f"like= is for format='orbax', not for {self.format!r}"
            )
        for name, value in (("tables", self.tables), ("leaves", self.leaves)):
            if isinstance(value, str):
                raise errors.OptionError(f"{name} are a list of names, got {value!r}")
        take_integers(self, "shard_bytes")
        if integer(self.shard_bytes) is None or self.shard_bytes < 1:
            raise errors.OptionError(
                f"shard_bytes is a number of at least 1, got {self.shard_bytes!r}"
            )


def _export(place: Place, target: Path, asked: _Asked) -> Exported:
    kept = KeptChunks(_KEPT_BYTES, _CACHE_BYTES)
    chain = open_chain(place.root, place.directory, place.item, kept=kept)
    manifest = chain[-1].manifest
    leaves, dense = leaves_of(chain, asked.tables, asked.leaves)
    leaves = in_form(asked.format, leaves)
    if not leaves:
        raise errors.OptionError("nothing to export: tables and leaves are empty")
    check_form(asked.format, leaves)
    if asked.like is not None:
        _check_like(asked.like, leaves)
    total = sum(leaf.nbytes for leaf in leaves)
    check_room(target, total + _LEAF_BYTES * (len(leaves) + 1))
    about = {
        "root": os.fspath(place.root),
        "step": manifest.step,
        "uuid": manifest.uuid,
        "chain": [reader.manifest.step for reader in chain],
        "leaves": {leaf.name: _metadata(leaf) for leaf in leaves},
    }
    # Before anything is written, so that damage is known soon.
    if any(leaf.kind not in ("row", "text") for leaf in leaves):
        dense.check()
        check_integers(asked.format, leaves)
    done = 0

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if asked.on_bytes is not None:
            asked.on_bytes(done, total)

    with put_whole(target) as folder:
        if asked.format == "orbax":
            write_orbax(folder, leaves, about, written, asked.like)
        elif asked.format == "zarr":
            write_zarr(folder, leaves, about, written)
        else:
            write_safetensors(folder, leaves, about, written, asked.shard_bytes)
        # Readers of zarr warn of files that are no part of the hierarchy.
        if asked.format != "zarr":
            told = json.dumps({"format": asked.format, **about}, indent=1)
            (folder / METADATA).write_text(told, "utf-8")
    return Exported(
        directory=os.fspath(target),
        format=asked.format,
        step=manifest.step,
        leaves=tuple(sorted(about["leaves"])),
        lossy=tuple(sorted(leaf.name for leaf in leaves if leaf.told["lossy"])),
        bytes=total,
    )


def _metadata(leaf: ExportedLeaf) -> dict[str, Any]:
    """Metadata of a leaf, as the export stores them."""
    shape = {"shape": list(leaf.shape), "dtype": leaf.dtype.name}
    return {**({} if leaf.kind == "text" else shape), "kind": leaf.kind, **leaf.told}


def _check_like(like: Any, leaves: Sequence[ExportedLeaf]) -> None:
    given = {path for path, _ in flatten_paths(like)}
    apart = given ^ {leaf.path for leaf in leaves}
    if apart:
        raise errors.OptionError(
            "like= has other leaves than are exported:"
            f" {few(sorted('/'.join(path) for path in apart))}\n"
            "  hint: pass a state of the structure that was saved, with what is exported of it"
        )
