"""Forms of an export: safetensors, zarr v3, a checkpoint of plain Orbax.

Each writer makes the folder of the export, and writes nothing outside it.
"""

from __future__ import annotations

import collections
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.skeleton import array_folder, save_skeleton
from cnr_jax.exporting.leaves import ExportedLeaf
from cnr_jax.repository.store.plain_arrays import write_array, zarr_holds
from cnr_jax.state.table import Path as LeafPath
from cnr_jax.state.table import few

_SAFETENSORS = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# The dtypes that the specification of zarr v3 has; readers such as zarr-python know no others.
_ZARR = {
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
_ZARR |= {"float16", "float32", "float64", "complex64", "complex128"}
# File that describes an export, beside its leaves.
METADATA = "cnr_jax_export.json"
# Names that no folder of a leaf can have in a zarr hierarchy.
_NO_NODES = {"", ".", "..", "zarr.json"}
# What Orbax, and an export to it, write beside the arrays.
_BESIDE_ARRAYS = {
    METADATA,
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "_sharding",
    "array_metadatas",
    "commit_success.txt",
    "manifest.ocdbt",
}
# Bytes that the name of a folder has at most.
_NAME_BYTES = 255
# The key in the header of a safetensors file that names no tensor.
_HEADER_KEY = "__metadata__"


def in_form(form: str, leaves: Sequence[ExportedLeaf]) -> list[ExportedLeaf]:
    """Converts leaves for a form, without rounding: for zarr to dtypes of its specification."""
    if form != "zarr":
        return list(leaves)
    return [
        leaf
        if leaf.kind == "text" or leaf.dtype.name in _ZARR
        else leaf.widened(_wider(leaf.dtype))
        for leaf in leaves
    ]


def _wider(dtype: np.dtype) -> np.dtype:
    """Dtype of numpy that holds all values of one that numpy lacks, such as bfloat16."""
    wider = ("uint8", "int8", "float32")
    return next(
        (np.dtype(name) for name in wider if np.can_cast(dtype, name, "safe")), dtype
    )


def check_form(form: str, leaves: Sequence[ExportedLeaf]) -> None:
    """Checks that a form can hold leaves, before anything is written.

    Raises:
        OptionError: if it cannot; the text names the leaves.
    """
    arrays = [leaf for leaf in leaves if leaf.kind != "text"]
    if form == "safetensors":
        bad = [leaf for leaf in arrays if leaf.dtype.name not in _SAFETENSORS]
    else:
        bad = [leaf for leaf in arrays if not zarr_holds(leaf.dtype)]
    if bad:
        found = few(f"{leaf.name} ({leaf.dtype})" for leaf in bad)
        raise errors.OptionError(
            f"{form} has no such dtype: {found}\n"
            "  hint: choose the other leaves by leaves=, or another format",
            kind="not_held",
        )
    in_files = form != "safetensors"
    bad = [leaf for leaf in arrays if not _fits(form, _name_in(form, leaf))]
    if bad:
        raise errors.OptionError(
            f"{form} cannot have leaves of these names:"
            f" {few(repr(leaf.name) for leaf in bad)}\n"
            "  hint: choose the other leaves by leaves=, or another format",
            kind="not_held",
        )
    # The metadata names leaves by their paths too, texts among them.
    told = collections.Counter(leaf.name for leaf in leaves)
    names = collections.Counter(_name_in(form, leaf) for leaf in arrays)
    bad = [
        leaf
        for leaf in leaves
        if told[leaf.name] > 1
        or names[name := _name_in(form, leaf)] > 1
        or (in_files and any(name[:i] in names for i, x in enumerate(name) if x == "/"))
    ]
    if bad:
        raise errors.OptionError(
            f"{form} cannot tell leaves apart: {few(str(list(leaf.path)) for leaf in bad)}\n"
            "  hint: choose the other leaves by leaves=, or another format",
            kind="not_held",
        )


def check_integers(form: str, leaves: Sequence[ExportedLeaf]) -> None:
    """Checks that a form can hold Python's integers, by reading them.

    Raises:
        OptionError: if it cannot; the text names the leaf.
    """
    for leaf in leaves:
        if form == "orbax" or leaf.kind != "scalar" or leaf.dtype.kind != "i":
            continue
        found, held = leaf.value(), np.iinfo(leaf.dtype)
        if not held.min <= found <= held.max:
            raise errors.OptionError(
                f"scalar {leaf.name} does not fit {leaf.dtype}: got {found}\n"
                "  hint: format='orbax' holds it; or choose the other leaves by leaves=",
                kind="not_held",
            )


def _name_in(form: str, leaf: ExportedLeaf) -> str:
    return array_folder(leaf.path) if form == "orbax" else leaf.name


def _fits(form: str, name: str) -> bool:
    """Whether a form can store a leaf under a name; outside of safetensors it is a path on disk."""
    if form == "safetensors":
        return name != _HEADER_KEY
    keys = name.split("/")
    if form == "orbax" and keys[0] in _BESIDE_ARRAYS:
        return False
    fits = all(len(key.encode("utf-8", "replace")) <= _NAME_BYTES for key in keys)
    # TensorStore takes a backslash for the end of a folder's name.
    return fits and not {"\0", "\\"} & set(name) and not _NO_NODES & set(keys)


# ---- safetensors ----------------------------------------------------------------------------


def write_safetensors(
    directory: Path,
    leaves: Sequence[ExportedLeaf],
    about: Mapping[str, Any],
    written: Callable[[int], None],
    shard_bytes: int,
) -> None:
    """Writes `model.safetensors`, or past `shard_bytes` numbered files with an index.

    A leaf is never divided. The safetensors library writes only tensors that are whole in memory,
    so header and values are written here.
    """
    arrays = [leaf for leaf in leaves if leaf.kind != "text"]
    directory.mkdir()
    shards = list(_shards(arrays, shard_bytes)) or [[]]
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        index |= {leaf.name: name for leaf in shard}
        with open(directory / name, "xb") as file:
            file.write(_header(shard, about))
            for leaf in shard:
                _write_values(file, leaf, written)
    if len(shards) > 1:
        total = sum(leaf.nbytes for leaf in arrays)
        told = {"metadata": {"total_size": total}, "weight_map": index}
        text = json.dumps(told, indent=1)
        (directory / "model.safetensors.index.json").write_text(text, "utf-8")


def _shards(
    leaves: Sequence[ExportedLeaf], shard_bytes: int
) -> Iterator[list[ExportedLeaf]]:
    shard: list[ExportedLeaf] = []
    nbytes = 0
    for leaf in leaves:
        if shard and nbytes + leaf.nbytes > shard_bytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(leaf)
        nbytes += leaf.nbytes
    if shard:
        yield shard


def _header(leaves: Sequence[ExportedLeaf], about: Mapping[str, Any]) -> bytes:
    """Length and header of a file; the header says where each tensor lies behind it."""
    header: dict[str, Any] = {_HEADER_KEY: {"cnr_jax": json.dumps(about)}}
    start = 0
    for leaf in leaves:
        stop = start + leaf.nbytes
        header[leaf.name] = {
            "dtype": _SAFETENSORS[leaf.dtype.name],
            "shape": list(leaf.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_values(
    file: BinaryIO, leaf: ExportedLeaf, written: Callable[[int], None]
) -> None:
    for block in leaf.blocks():
        data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        file.write(data.data)
        written(block.nbytes)


# ---- zarr -----------------------------------------------------------------------------------


def write_zarr(
    directory: Path,
    leaves: Sequence[ExportedLeaf],
    about: Mapping[str, Any],
    written: Callable[[int], None],
) -> None:
    """Writes a zarr v3 hierarchy: a group for each node of the state, an array for each leaf."""
    directory.mkdir()
    _write_group(directory, {"cnr_jax": about})
    arrays = [leaf for leaf in leaves if leaf.kind != "text"]
    axes = _names_of_axes(arrays)
    for leaf in arrays:
        where = directory
        for key in leaf.name.split("/")[:-1]:
            where = where / key
            if not where.exists():
                where.mkdir()
                _write_group(where, {})
        told = {"cnr_jax": leaf.told}
        _write_array(directory / leaf.name, leaf, told, written, axes[leaf.name])


def _names_of_axes(leaves: Sequence[ExportedLeaf]) -> dict[str, list[str]]:
    """Names for the axes of leaves, such as `params_user_0`, which xarray needs.

    To xarray, axes with one name, in a group and in those above it, are one axis of one size, and a
    leaf with the name of an axis has its coordinates. So no two names are alike.
    """
    taken = {key for leaf in leaves for key in leaf.name.split("/")}
    found: dict[str, list[str]] = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.name):
        found[leaf.name] = []
        for axis in range(len(leaf.shape)):
            name = f"{leaf.name.replace('/', '_')}_{axis}"
            while name in taken:
                name += "_"
            taken.add(name)
            found[leaf.name].append(name)
    return found


def _write_group(directory: Path, attributes: Mapping[str, Any]) -> None:
    node = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (directory / "zarr.json").write_text(json.dumps(node, indent=1), "utf-8")


def _write_array(
    path: Path,
    leaf: ExportedLeaf,
    attributes: Mapping[str, Any],
    written: Callable[[int], None],
    axes: Sequence[str] | None = None,
) -> None:
    def blocks() -> Iterator[np.ndarray]:
        for block in leaf.blocks():
            yield block
            written(block.nbytes)

    rows = leaf.block_rows
    write_array(path, leaf.shape, leaf.dtype, blocks(), rows, attributes, axes)


# ---- Orbax ----------------------------------------------------------------------------------


def write_orbax(
    directory: Path,
    leaves: Sequence[ExportedLeaf],
    about: Mapping[str, Any],
    written: Callable[[int], None],
    like: Any,
) -> None:
    """Writes a checkpoint that `ocp.StandardCheckpointer` restores.

    Orbax itself writes everything but the arrays. For each array it writes one element, which the
    array then replaces.
    """
    arrays = [leaf for leaf in leaves if leaf.kind in ("row", "array")]
    values: dict[LeafPath, Any] = {
        leaf.path: np.zeros(1, leaf.dtype) for leaf in arrays
    }
    for leaf in leaves:
        if leaf.path not in values:
            values[leaf.path] = leaf.value()
    save_skeleton(directory, values, {"cnr_jax": about}, like)
    for leaf in leaves:
        if leaf not in arrays:
            written(leaf.nbytes)
    for leaf in arrays:
        folder = directory / array_folder(leaf.path)
        shutil.rmtree(folder)
        _write_array(folder, leaf, {"cnr_jax": leaf.told}, written)
