"""Steps as versions wrote them that left dense leaves to Orbax."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp

from cnr_jax.format import names
from cnr_jax.format.manifest import FileDigest, dump
from cnr_jax.format.tiles import dump_process
from cnr_jax.repository.replay.dense_tiles import TiledDense
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store import digest_file, digest_of
from cnr_jax.repository.store.checked import mistakable_files
from cnr_jax.repository.store.kept_chunks import KeptChunks
from cnr_jax.state.table import nest


def leave_dense_to_orbax(item: Path) -> None:
    """Makes a committed step one of the kind in which Orbax has written the dense leaves."""
    manifest = read_manifest(item)
    reader = StepReader(item, manifest, verify=True, kept=KeptChunks())
    stored = TiledDense(reader)
    values = {}
    for leaf in manifest.dense_leaves:
        if leaf.kind != "text":
            value = stored.value(leaf.path)
            is_jax = leaf.kind == "array" and not leaf.numpy
            values[leaf.path] = jnp.asarray(value) if is_jax else value
    folder = item / names.DENSE
    shutil.rmtree(folder)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        tree = nest(values.items())
        checkpointer.save(folder, args=ocp.args.StandardSave(tree))
    for name in (names.ORBAX_METADATA, names.ORBAX_COMMITTED):
        (folder / name).unlink(missing_ok=True)  # of a step of its own
    files = tuple(digest_file(item / path, path) for path in mistakable_files(item))
    processes: list[FileDigest] = []
    for process in reader.processes:
        path = names.process_manifest(process.process)
        data = dump_process(dataclasses.replace(process, dense=None))
        (item / path).write_bytes(data)
        processes.append(digest_of(path, data))
    size = sum(file.bytes for file in files)
    older = dataclasses.replace(
        manifest,
        required_features=tuple(
            each for each in manifest.required_features if each != names.DENSE_TILES
        ),
        processes=tuple(processes),
        dense_files=files,
        dense_leaves=tuple(
            dataclasses.replace(leaf, numpy=None) for leaf in manifest.dense_leaves
        ),
        totals=dataclasses.replace(manifest.totals, dense_bytes=size),
    )
    (item / names.MANIFEST).write_bytes(dump(older))
