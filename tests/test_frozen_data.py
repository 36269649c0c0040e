"""Checkpoints written by released versions stay readable, and damage to them never passes.

tests/data/generate.py wrote them. They are read twice: by the library, and by a second reader
below, written from SPEC.md with nothing but the standard library, numpy, and TensorStore for zstd
and blosc.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.handler import CnrHandler, Restore

from . import lattice_reader
from .conftest import unpack

DATA = Path(__file__).parent / "data"
# Rows that are sums have a state, and a second reader, of their own: `lattice_reader.py`.
SUMS = sorted(path.name for path in DATA.glob("v*sums"))
VERSIONS = sorted(
    path.name
    for path in DATA.iterdir()
    if path.name.startswith("v") and path.name not in SUMS
)
STEPS = (10, 20, 30)
SAVED = [
    (version, step)
    for version in VERSIONS
    for step in STEPS
    if (DATA / version / "root" / str(step)).exists()
]
LEAVES = {
    ("user", "table"): "params/user/embedding",
    ("user", "opt"): "opt/user/embedding",
    ("item", "table"): "params/item/embedding",
}


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", DATA / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


def expected_of(version: str, kind: str, step: int) -> dict[str, np.ndarray]:
    prefix = f"{kind}/{step}/"
    with np.load(DATA / version / "expected.npz") as file:
        return {k.removeprefix(prefix): file[k] for k in file if k.startswith(prefix)}


def same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return got.keys() == expected.keys() and all(
        got[key].dtype == value.dtype
        and got[key].shape == value.shape
        and got[key].tobytes() == value.tobytes()
        for key, value in expected.items()
    )


def restore(root: Path, step: int, state: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Leaves by path, as bits; without a manager, whose start is not what is tested."""
    args = Restore(state, **kwargs) if state is not None else None
    handler = CnrHandler()
    try:
        restored = handler.restore(root / str(step) / "default", args)
    finally:
        handler.close()
    return {
        key.removeprefix("/"): value
        for key, value in generate.flatten(restored.state, "").items()
    }


# A second reader. SPEC.md is its only source; it shares no code with the library.


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def read_document(path: Path) -> dict[str, Any]:
    """Section 5.1: the digest is taken of the file without the digest."""
    data = path.read_bytes()
    document = json.loads(data)
    member = f'"sha256":"{document["sha256"]}",'.encode()
    assert data.count(member) == 1
    digest = hashlib.sha256(data.replace(member, b"")).hexdigest()
    assert digest == document["sha256"]
    return document


def read_array(item: Path, process: dict[str, Any], name: str) -> np.ndarray:
    """Section 6.2."""
    folder = item / f"rows.p{process['process']:05d}" / name
    return read_chunks(folder, process["arrays"][name])


def read_chunks(folder: Path, entry: dict[str, Any]) -> np.ndarray:
    """Section 6.2."""
    chunks = []
    dtype = dtype_of(entry["dtype"])
    for i, checksum in enumerate(entry["crc32c"]):
        data, size = (
            (folder / "c" / str(i)).read_bytes(),
            entry["chunk"] * dtype.itemsize,
        )
        assert crc32c(data[:-4]) == checksum == int.from_bytes(data[-4:], "little")
        if "compressed" in entry:
            codec = entry["compressed"]["codec"]
            assert codec == "zstd" or (codec == "blosc" and dtype.itemsize > 1)
            assert len(data) == entry["compressed"]["bytes"][i]
            data = unpack(data[:-4], size, codec) + data[-4:]
        assert len(data) == size + 4
        chunks.append(np.frombuffer(data[:-4], dtype))
    metadata = (folder / "zarr.json").read_bytes()
    assert hashlib.sha256(metadata).hexdigest() == entry["metadata_sha256"]
    return np.concatenate(chunks)[: entry["length"]]


def read_positions(
    item: Path, process: dict[str, Any], index: int, rows: int
) -> list[int]:
    """Section 6.3."""
    ids = process["row_ids"][index]
    if ids["form"] == "all":
        return list(range(rows))
    array = read_array(item, process, "row_ids")
    data = array[ids["offset"] : ids["offset"] + ids["bytes"]].tolist()
    if ids["form"] == "bitmap":
        return [i for i in range(rows) if data[i // 8] >> i % 8 & 1]
    assert ids["form"] == "gaps"
    positions, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            positions.append(value if not positions else positions[-1] + 1 + value)
            value = shift = 0
    return positions


def read_rows(
    codec: dict[str, Any], parts: dict[str, np.ndarray], dim: int, dtype: np.dtype
) -> np.ndarray:
    """Section 7; `parts` start at the segment's first element, and go on after its last."""
    if codec["name"] == "cnr.raw":
        return parts["rows"]
    assert codec["name"] == "cnr.asymmetric"
    bits = codec["configuration"]["bits"]
    count = len(parts["scale"])
    string = np.unpackbits(parts["codes"], axis=1, bitorder="little")
    digits = string[:, : dim * bits].reshape(count, dim, bits)
    codes = (digits * 2 ** np.arange(bits)).sum(axis=2).astype(np.float32)
    centred = codes - np.float32((2**bits - 1) / 2)
    scale, offset = (parts[name].astype(np.float32) for name in ("scale", "offset"))
    values = scale * (centred + offset)
    if dtype == np.float16:
        values = np.clip(values, -65504, 65504)
    return values.astype(dtype)


def widths(codec: dict[str, Any], dim: int) -> dict[str, int]:
    if codec["name"] == "cnr.raw":
        return {"rows": dim}
    bits = codec["configuration"]["bits"]
    return {"codes": -(-dim * bits // 8), "scale": 1, "offset": 1}


# Section 4: what Orbax could open because of its name.
LOOKED_UP = re.compile(
    r"_METADATA|checkpoint|_sharding|_strings\.json|array_metadatas/process_[0-9]+"
    r"|(ocdbt\.process_[A-Za-z0-9_]+/)?"
    r"(manifest\.(ocdbt|[0-9a-f]{16})|(d|ocdbt_data|ocdbt_meta)/[0-9a-f]{32})"
)
# Section 4: what is no step though it ends in a digit.
NO_STEP = re.compile(
    r".*\.orbax-checkpoint-tmp.*|.*[0-9]\.abandoned-g(0|[1-9][0-9]*)-[0-9a-f]{32}"
    r"|.*\.removed-[0-9a-f]{16}",
    re.DOTALL,
)


def steps_in(root: Path) -> list[str]:
    """Section 4: step directories."""
    found = [path.name for path in root.iterdir() if path.is_dir()]
    ends = [name for name in found if re.fullmatch(".*[0-9]", name, re.DOTALL)]
    return sorted((n for n in ends if not NO_STEP.fullmatch(n)), key=int)


def check_dense(item: Path, manifest: dict[str, Any]) -> None:
    """Section 4: a file that is not listed is ignored, unless Orbax could take it for its own."""
    listed = {file["path"] for file in manifest["dense_files"]}
    for path in (item / "dense").rglob("*"):
        parts = path.relative_to(item / "dense").parts
        above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if f"dense/{above[-1]}" not in listed and any(map(LOOKED_UP.fullmatch, above)):
            raise AssertionError(f"{path} could be taken for a dense file")


def read_step(root: Path, directory: str) -> dict[str, np.ndarray]:
    """Section 9.2, for the leaves of tables."""
    assert directory in steps_in(root)
    item = root / directory / "default"
    manifest = read_document(item / "manifest.json")
    check_dense(item, manifest)
    parent = manifest["parent"]
    leaves: dict[str, np.ndarray] = {}
    if parent is not None:
        above = read_document(root / parent["directory"] / "default" / "manifest.json")
        assert above["uuid"] == parent["uuid"]
        leaves = read_step(root, parent["directory"])
    entries = {
        (t["name"], e["name"]): e for t in manifest["tables"] for e in t["leaves"]
    }
    for key, entry in entries.items():
        zeros = np.zeros(entry["shape"], dtype_of(entry["dtype"]))
        leaves.setdefault("/".join(entry["path"]), zeros)
        assert LEAVES[key] == "/".join(entry["path"])
    for file in [*manifest["processes"], *manifest["dense_files"]]:
        data = (item / file["path"]).read_bytes()
        assert len(data) == file["bytes"]
        assert hashlib.sha256(data).hexdigest() == file["sha256"]
    for file in manifest["processes"]:
        process = read_document(item / file["path"])
        for tile in process["tiles"]:
            out = leaves["/".join(entries[tile["table"], tile["leaf"]]["path"])]
            put_tile(item, process, tile, out)
    return leaves


def put_tile(
    item: Path, process: dict[str, Any], tile: dict[str, Any], out: np.ndarray
) -> None:
    """Section 6.4."""
    bounds = list(zip(tile["box"][::2], tile["box"][1::2], strict=True))
    start, stop = bounds[0]
    shape = tuple(b - a for a, b in bounds[1:])
    dim = int(np.prod(shape))
    for segment in tile["segments"]:
        codec = process["codecs"][segment["codec"]]
        positions = read_positions(item, process, segment["row_ids"], stop - start)
        parts = {}
        for name, width in widths(codec, dim).items():
            ref = segment["parts"][name]
            first, last = ref["offset"], ref["offset"] + len(positions) * width
            array = read_array(item, process, ref["array"])
            parts[name] = array[first:last].reshape(-1, width)
        rows = read_rows(codec, parts, dim, out.dtype).reshape(-1, *shape)
        columns = tuple(slice(a, b) for a, b in bounds[1:])
        for position, row in zip(positions, rows, strict=True):
            out[(start + position, *columns)] = row


def is_told(encoding: dict[str, Any], table: str, leaf: str, stored: Any) -> bool:
    """Section 5.11: whether the encoding of a run tells the codec that a leaf is stored with."""
    name = "codec" if leaf == "table" else "slot_codec"
    own = encoding["tables"].get(table, dict.fromkeys(("codec", "bits", "slot_codec")))
    said = own[name] or encoding[name]
    if isinstance(said, str):
        named = {"raw": "cnr.raw", "adaptive": "cnr.asymmetric"}
        bits = {"bits": own["bits"] or encoding["bits"]}
        said = {"name": named[said], "configuration": bits if said != "raw" else {}}
    values = stored["configuration"]
    assert said["configuration"].items() <= values.items(), (table, leaf)
    return said["name"] == stored["name"]


def read_dense(root: Path, directory: str) -> dict[str, np.ndarray]:
    """Section 6.5: the dense leaves, of keys their words, of numbers as numpy has them."""
    item = root / directory / "default"
    manifest = read_document(item / "manifest.json")
    assert "dense_tiles" in manifest["required_features"]
    assert not manifest["dense_files"]
    listed = manifest["dense_leaves"]
    parts: list[list[tuple[Any, bytes]]] = [[] for _ in listed]
    for file in manifest["processes"]:
        process = read_document(item / file["path"])
        part = process["dense"]
        folder = item / "dense" / f"p{process['process']:05d}"
        data = read_chunks(folder, part["array"]).tobytes()
        for tile in part["tiles"]:
            box = list(zip(tile["box"][::2], tile["box"][1::2], strict=True))
            some = data[tile["offset"] : tile["offset"] + tile["bytes"]]
            parts[tile["leaf"]].append((box, some))
    leaves: dict[str, np.ndarray] = {}
    for leaf, tiles in zip(listed, parts, strict=True):
        path, kind, shape = "/".join(leaf["path"]), leaf["kind"], leaf["shape"]
        if kind == "text":
            assert not tiles
            leaves[path] = np.asarray(leaf["value"])
        elif kind == "scalar":
            ((box, data),) = tiles
            assert box == []
            if leaf["dtype"] == "float":
                assert len(data) == 8
                leaves[path] = np.frombuffer(data, "<f8").reshape(())
            elif leaf["dtype"] == "bool":
                assert data in (b"\0", b"\1")
                leaves[path] = np.asarray(data == b"\1")
            else:
                assert len(data) == 16
                leaves[path] = np.asarray(int.from_bytes(data, "little", signed=True))
        else:
            dtype = np.dtype("<u4") if kind == "key" else dtype_of(leaf["dtype"])
            elements = int(np.prod([b - a for a, b in tiles[0][0]], dtype=int))
            size = len(tiles[0][1]) // elements
            words = [size // 4] if kind == "key" else []
            assert kind == "key" or size == dtype.itemsize
            whole = np.zeros([*shape, *words], dtype)
            seen = np.zeros(shape, int)
            for box, data in tiles:
                at = tuple(slice(a, b) for a, b in box)
                part_shape = [*(b - a for a, b in box), *words]
                whole[at] = np.frombuffer(data, dtype).reshape(part_shape)
                seen[at] += 1
            assert (seen == 1).all()
            leaves[path] = whole
    return leaves


# What was saved comes back.


def state_of(version: str) -> dict[str, Any]:
    return generate.first_state(more=version == "v1-dense")


@pytest.mark.parametrize(("version", "step"), SAVED)
def test_frozen_step_restores_bit_for_bit_on_another_mesh(
    version: str, step: int
) -> None:
    state = state_of(version)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def moved(leaf: Any) -> Any:
        spec = {1: P("a"), 2: P("a", "b")}.get(getattr(leaf, "ndim", 0), P())
        sharded = isinstance(leaf, jax.Array) and leaf.shape[:1] > (3,)
        return jax.device_put(leaf, NamedSharding(mesh, spec)) if sharded else leaf

    state = jax.tree.map(moved, state)
    tables = generate.tables_of(state)
    got = restore(DATA / version / "root", step, state, tables=tables)
    assert same_bits(got, expected_of(version, "restored", step))


@pytest.mark.parametrize(("version", "step"), SAVED)
def test_frozen_step_restores_without_a_state(version: str, step: int) -> None:
    got = restore(DATA / version / "root", step)
    expected = expected_of(version, "restored", step)
    # Nobody says what the key is: its data comes back.
    assert same_bits(got, expected)


@pytest.mark.parametrize(("version", "step"), SAVED)
def test_second_reader_reads_the_same_from_the_specification(
    version: str, step: int
) -> None:
    expected = expected_of(version, "restored", step)
    leaves = read_step(DATA / version / "root", str(step))
    assert set(leaves) == set(LEAVES.values())
    for path, values in leaves.items():
        assert values.tobytes() == expected[path].tobytes(), path


@pytest.mark.parametrize(("version", "step"), SAVED)
def test_frozen_values_are_within_the_codec_bound_of_what_was_saved(
    version: str, step: int
) -> None:
    restored = expected_of(version, "restored", step)
    truth = expected_of(version, "truth", step)
    for path, values in truth.items():
        if path not in ("params/user/embedding", "params/item/embedding"):
            assert values.tobytes() == restored[path].tobytes(), path
            continue
        got, saved = restored[path], values
        if got.dtype == np.uint16:
            got, saved = got.view(ml_dtypes.bfloat16), saved.view(ml_dtypes.bfloat16)
        exact = ~np.isfinite(saved.astype(np.float32)).all(axis=1)
        assert got[exact].tobytes() == saved[exact].tobytes()
        x, y = saved[~exact].astype(np.float32), got[~exact].astype(np.float32)
        step_size = (x.max(axis=1) - x.min(axis=1)) / 15
        # The codec's bound, and half an ulp of bfloat16 an element.
        half_ulp = np.abs(x).max(axis=1) * 2.0**-8 if values.dtype == np.uint16 else 0
        bound = (0.52 * step_size + half_ulp) * np.sqrt(x.shape[1])
        assert (np.linalg.norm(x - y, axis=1) <= bound + 1e-12).all()


@pytest.mark.parametrize("step", [10, 20])
def test_second_reader_reads_dense_leaves_from_the_specification(step: int) -> None:
    expected = expected_of("v1-dense", "restored", step)
    leaves = read_dense(DATA / "v1-dense" / "root", str(step))
    assert set(leaves) == set(expected) - set(LEAVES.values())
    for path, values in leaves.items():
        assert values.shape == expected[path].shape, path
        assert values.tobytes() == expected[path].tobytes(), path


def test_frozen_data_covers_what_the_format_has() -> None:
    root = DATA / "v1" / "root"
    kinds = (
        "v1",
        "v1-blosc",
        "v1-dense",
        "v1-encoding",
        "v1-errors",
        "v1-motion",
        "v1-rollback",
        "v1-zstd",
    )
    found = dict.fromkeys(kinds, STEPS)
    found |= {"v1-encoding": STEPS[:1], "v1-errors": STEPS[:2], "v1-zstd": STEPS[:1]}
    found["v1-blosc"] = STEPS[:1]
    found["v1-motion"] = found["v1-dense"] = STEPS[:2]
    assert SAVED == [(version, step) for version in found for step in found[version]]
    processes = (DATA / "v1-errors" / "root").glob("*/*/manifest.p*.json")
    assert all("row_errors" in json.loads(p.read_text()) for p in processes)
    documents = [json.loads(p.read_bytes()) for p in root.glob("*/default/manifest.p*")]
    forms = {ids["form"] for d in documents for ids in d["row_ids"]}
    assert forms >= {"all", "bitmap", "gaps"}
    tiles = [tile for d in documents for tile in d["tiles"]]
    assert {len(tile["segments"]) for tile in tiles} == {0, 1, 2}
    manifests = [
        json.loads(p.read_bytes()) for p in root.glob("*/default/manifest.json")
    ]
    assert sorted(m["kind"] for m in manifests) == ["delta", "delta", "full"]
    kinds = {leaf["kind"] for m in manifests for leaf in m["dense_leaves"]}
    assert kinds == {"array", "scalar", "key", "text"}
    assert {t["layout"]["name"] for t in manifests[0]["tables"]} == {"identity", "mod"}


@pytest.mark.parametrize(
    ("version", "of_rows", "features"),
    [
        ("v1-zstd", "zstd", ["zstd"]),
        ("v1-blosc", "blosc", ["blosc", "dense_tiles", "zstd"]),
    ],
)
def test_frozen_data_covers_arrays_that_are_compressed_and_that_are_not(
    version: str, of_rows: str, features: list[str]
) -> None:
    (path,) = (DATA / version / "root").glob("*/default/manifest.p*")
    arrays = json.loads(path.read_bytes())["arrays"]
    packed = {name for name, entry in arrays.items() if "compressed" in entry}
    assert packed == {"asymmetric.codes.uint8", "raw.rows.float32"}
    assert len(arrays) == 6
    for name in packed:
        entry = arrays[name]
        size = entry["chunk"] * dtype_of(entry["dtype"]).itemsize
        assert sum(entry["compressed"]["bytes"]) < size, name
    assert arrays["asymmetric.codes.uint8"]["compressed"]["codec"] == "zstd"
    assert arrays["raw.rows.float32"]["compressed"]["codec"] == of_rows
    manifest = json.loads((path.parent / "manifest.json").read_bytes())
    assert manifest["required_features"] == features


def test_frozen_data_covers_an_encoding_that_tells_the_codecs_of_its_rows() -> None:
    item = DATA / "v1-encoding" / "root" / "10" / "default"
    encoding = read_document(item / "manifest.json")["encoding"]
    process = read_document(item / "manifest.p00000.json")
    assert encoding["tables"].keys() == {"item"}
    assert encoding["bits"] == 4 and encoding["compression"] is None
    for tile in process["tiles"]:
        stored = process["codecs"][tile["segments"][0]["codec"]]
        assert is_told(encoding, tile["table"], tile["leaf"], stored)


def test_frozen_data_covers_rows_that_moved_and_a_rounding() -> None:
    first, second = (
        DATA / "v1-motion" / "root" / str(s) / "default" for s in STEPS[:2]
    )
    assert "motion" not in read_document(first / "manifest.json"), "a run begins"
    manifest = read_document(second / "manifest.json")
    process = read_document(second / "manifest.p00000.json")
    rows = {name: each["rows"] for name, each in process["motion"].items()}
    # Of rows that are finite: one of 45 is not.
    assert rows == {"user": 44, "item": 3} and manifest["motion"]["rows"] == 47
    assert manifest["encoding"]["rounding"] == "nearest"


def test_frozen_data_covers_a_branch_that_left_an_older_one() -> None:
    root = DATA / "v1-rollback" / "root"
    last = json.loads((root / "30/default/manifest.json").read_bytes())
    assert (last["generation"], last["parent"]["directory"]) == (2, "10")
    assert last["forks"] == [{"generation": 1, "step": 10}]
    with cnr.CheckpointManager(root) as manager:
        assert manager.all_steps() == [10, 30]


@pytest.mark.parametrize("step", STEPS)
def test_table_of_another_layout_restores_by_logical_rows(step: int) -> None:
    state = generate.first_state()
    state["params"]["item"]["embedding"] = jnp.zeros((15, 8), jnp.bfloat16)
    tables = cnr.find_tables(state, ["user", "item"])
    got = restore(DATA / "v1" / "root", step, state, tables=tables)
    stored = expected_of("v1", "restored", step)["params/item/embedding"]
    rows = generate.ITEM_LAYOUT.to_physical(np.arange(15))
    assert got["params/item/embedding"].tobytes() == stored[rows].tobytes()


# Damage is found, or does no harm.

FILES = sorted(
    str(path.relative_to(DATA / "v1" / "root"))
    for path in (DATA / "v1" / "root").glob("*/default/**/*")
    if path.is_file()
)


def class_of(file: str) -> str:
    """Files of one class are read in the same way, whatever their step and their contents."""
    if file == f"{STEPS[-1]}/default/manifest.json":
        return "manifest of the step itself"
    name = re.sub(r"^\d+/default/", "", file)
    name = re.sub(r"/[0-9a-f]{32}$", "/data", name)
    return re.sub(r"/(asymmetric|raw|escaped)\.\w+\.\w+/", "/array/", name)


def one_of_each_class() -> list[Any]:
    """All files; those that another one stands for, in the middle of the chain, are slow."""
    chosen = {class_of(file): file for file in FILES}
    chosen |= {class_of(file): file for file in FILES if file.startswith("20/")}
    return [
        file
        if chosen[class_of(file)] == file
        else pytest.param(file, marks=pytest.mark.slow)
        for file in FILES
    ]


# Not named by any manifest, or not needed because a manifest says the same.
HARMLESS = re.compile(r"zarr\.json$|commit_success\.txt$")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("frozen") / "root"
    shutil.copytree(DATA / "v1" / "root", root)
    return root


@contextlib.contextmanager
def replaced(path: Path, data: bytes | None) -> Iterator[None]:
    """Puts other contents in the place of a file, or none, for a while."""
    before = path.read_bytes()
    assert data != before
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def step_that_reads(file: str) -> int:
    """The newest step whose restore depends on a file: the chain's, but for dense ones."""
    return int(file.split("/")[0]) if "/dense/" in file else STEPS[-1]


def detected(root: Path, file: str) -> errors.CnrError | None:
    """The error with which a restore fails; None if it returns what was saved."""
    step = step_that_reads(file)
    try:
        got = restore(root, step)
    except errors.CnrError as error:
        return error
    assert same_bits(got, expected_of("v1", "restored", step)), (
        f"damage to {file} passed"
    )
    return None


def part_of_name(file: str) -> str:
    """What an error must say: the file, or the array whose chunk it is."""
    return re.sub(r"/c/\d+$", "", file)


@pytest.mark.parametrize("file", one_of_each_class())
def test_every_flipped_bit_is_detected_or_harmless(copy: Path, file: str) -> None:
    path = copy / file
    data = path.read_bytes()
    rng = np.random.default_rng(len(data))
    for at in {0, len(data) - 1, int(rng.integers(len(data)))}:
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        with replaced(path, bytes(flipped)):
            error = detected(copy, file)
        assert (error is None) == bool(HARMLESS.search(file)), (at, error)


@pytest.mark.parametrize("file", one_of_each_class())
def test_missing_and_truncated_files_are_named(copy: Path, file: str) -> None:
    path = copy / file
    data = path.read_bytes()
    for contents in (None, b"", data[:-1]):
        with replaced(path, contents):
            error = detected(copy, file)
        if HARMLESS.search(file):
            assert error is None
            continue
        assert error is not None
        if isinstance(error, errors.ParentMissingError):
            assert "its parent" in str(error)
        else:
            folder, name = part_of_name(file).rsplit("/", 1)
            assert folder in str(error) and name in str(error)
        if file.endswith("/manifest.json"):
            expected = (
                errors.ManifestError if contents is not None else errors.IntegrityError
            )
            assert isinstance(error, (expected, errors.ParentMissingError))
        else:
            assert isinstance(error, errors.IntegrityError)


def pairs_of_equal_size() -> list[tuple[str, str]]:
    root = DATA / "v1" / "root"
    sizes: dict[int, list[str]] = {}
    for file in FILES:
        if re.search(r"/c/\d+$", file):
            sizes.setdefault((root / file).stat().st_size, []).append(file)
    return [
        (a, b)
        for files in sizes.values()
        for i, a in enumerate(files)
        for b in files[i + 1 :]
        if (root / a).read_bytes() != (root / b).read_bytes()
    ]


@pytest.mark.parametrize(("first", "second"), pairs_of_equal_size())
def test_exchanged_chunks_of_equal_size_are_detected(
    copy: Path, first: str, second: str
) -> None:
    a, b = copy / first, copy / second
    one, other = a.read_bytes(), b.read_bytes()
    with replaced(a, other), replaced(b, one):
        error = detected(copy, first)
    assert isinstance(error, errors.IntegrityError)
    assert error.kind == "foreign_chunk"


def test_few_classes_of_files_stand_for_all() -> None:
    default = [file for file in one_of_each_class() if isinstance(file, str)]
    assert len(default) == 15 and len(FILES) == 74


def test_exchange_covers_arrays_of_one_step_and_one_array_of_two_steps() -> None:
    pairs = pairs_of_equal_size()
    steps = {a.split("/")[0] == b.split("/")[0] for a, b in pairs}
    assert steps == {True, False}


def test_manifest_of_another_checkpoint_in_its_place_is_detected(copy: Path) -> None:
    other = (copy / "10/default/manifest.json").read_bytes()
    with replaced(copy / "20/default/manifest.json", other):
        error = detected(copy, "20/default/manifest.json")
    assert isinstance(error, errors.ParentMissingError)
    assert error.kind == "foreign_parent"


def test_process_manifest_of_another_checkpoint_in_its_place_is_detected(
    copy: Path,
) -> None:
    other = (copy / "10/default/manifest.p00000.json").read_bytes()
    with replaced(copy / "20/default/manifest.p00000.json", other):
        error = detected(copy, "20/default/manifest.p00000.json")
    assert isinstance(error, errors.IntegrityError)


# A file too many, a reader of the specification, and whether Orbax could take it for its own.
TOO_MANY = {
    "dense/.DS_Store": False,
    "dense/_METADATA~": False,
    "dense/array_metadatas/process_0 (1)": False,
    "dense/array_metadatas/process_1": True,
    "dense/d/.nfs00000000000000000000000000000001": False,
    "dense/d/00000000000000000000000000000001": True,
    "dense/d/00000000000000000000000000000001\n": False,
    "dense/ocdbt.process_1/manifest.ocdbt": True,
    "dense/.snapshot/hourly.0/manifest.ocdbt": False,
    "dense/_strings.json/folder": True,
    "rows.p00001/raw.rows.float32/c/0": False,
    "manifest.p00001.json": False,
}


@pytest.mark.parametrize("file", TOO_MANY)
def test_both_readers_refuse_the_same_files_that_no_manifest_names(
    copy: Path, file: str
) -> None:
    first = (copy / "10/default" / file).relative_to(copy).parts
    made = next(
        p
        for i in range(len(first))
        if not (p := copy.joinpath(*first[: i + 1])).exists()
    )
    path = copy / "10/default" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((copy / "10/default/dense/manifest.ocdbt").read_bytes())
    try:
        if TOO_MANY[file]:
            with pytest.raises(errors.IntegrityError) as raised:
                restore(copy, 10)
            assert raised.value.kind == "file_unknown"
            with pytest.raises(AssertionError, match="could be taken"):
                read_step(copy, "10")
        else:
            assert same_bits(restore(copy, 10), expected_of("v1", "restored", 10))
            read_step(copy, "10")
    finally:
        shutil.rmtree(made) if made.is_dir() else made.unlink()


# Documents whose digests are right and whose contents are not: a faulty writer, not damage.


def sealed(document: dict[str, Any]) -> bytes:
    """Section 5.1."""

    def canonical(value: dict[str, Any]) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    body = {key: value for key, value in document.items() if key != "sha256"}
    return canonical({**body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})


def rename_part(process: dict[str, Any]) -> None:
    parts = process["tiles"][0]["segments"][0]["parts"]
    parts["scales"] = parts.pop("scale")


def exchange_parts(process: dict[str, Any]) -> None:
    parts = process["tiles"][0]["segments"][0]["parts"]
    parts["scale"], parts["offset"] = parts["offset"], parts["scale"]


def lead_past_the_end(process: dict[str, Any]) -> None:
    process["tiles"][0]["segments"][0]["parts"]["codes"]["offset"] += 10_000


def name_an_unknown_codec(process: dict[str, Any]) -> None:
    process["codecs"][0]["name"] = "cnr.later"


def configure_a_codec_otherwise(process: dict[str, Any]) -> None:
    process["codecs"][0]["configuration"]["stochastic"] = True


def promise_other_rows(process: dict[str, Any]) -> None:
    process["row_ids"][0]["count"] -= 1


def leave_a_gap(process: dict[str, Any]) -> None:
    process["tiles"].pop()


def write_an_array_of_an_unknown_dtype(process: dict[str, Any]) -> None:
    process["arrays"]["asymmetric.scale.bfloat16"]["dtype"] = "float99"


@pytest.mark.parametrize(
    "change",
    [
        rename_part,
        exchange_parts,
        lead_past_the_end,
        name_an_unknown_codec,
        configure_a_codec_otherwise,
        promise_other_rows,
        leave_a_gap,
        write_an_array_of_an_unknown_dtype,
    ],
)
@pytest.mark.parametrize("step", [pytest.param("10", marks=pytest.mark.slow), "20"])
def test_contradictions_in_a_process_manifest_are_format_errors(
    copy: Path, step: str, change: Any
) -> None:
    item = copy / step / "default"
    process = json.loads((item / "manifest.p00000.json").read_bytes())
    change(process)
    data = sealed(process)
    manifest = json.loads((item / "manifest.json").read_bytes())
    digest = hashlib.sha256(data).hexdigest()
    manifest["processes"][0] |= {"bytes": len(data), "sha256": digest}
    with (
        replaced(item / "manifest.p00000.json", data),
        replaced(item / "manifest.json", sealed(manifest)),
    ):
        error = detected(copy, f"{step}/default/manifest.p00000.json")
    assert isinstance(error, errors.FormatError) or error.kind == "rows_missing"


def test_tables_that_differ_along_a_chain_are_refused(copy: Path) -> None:
    path = copy / "20/default/manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["tables"][0]["rows"] -= 1
    with replaced(path, sealed(manifest)):
        error = detected(copy, "20/default/manifest.json")
    assert isinstance(error, errors.ManifestError)
    assert "hold different tables" in str(error)


def test_sealing_gives_the_very_bytes_of_the_library() -> None:
    paths = list((DATA / "v1" / "root").glob("*/default/manifest*.json"))
    assert len(paths) == 2 * len(STEPS)
    for path in paths:
        assert sealed(json.loads(path.read_bytes())) == path.read_bytes()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("version", SUMS)
def test_frozen_sums_restore_bit_for_bit(version: str, step: int) -> None:
    pytest.importorskip("zstandard")
    expected = expected_of(version, "restored", step)
    state = generate.sums_at(0)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    where = {
        n: NamedSharding(mesh, spec) for n, spec in ((1, P("a")), (2, P("b", "a")))
    }
    moved = jax.tree.map(lambda x: jax.device_put(x, where[x.ndim]), state)
    tables = generate.sums_tables(state)
    for like in (state, moved):
        got = restore(DATA / version / "root", step, like, tables=tables)
        assert same_bits(got, expected)
    assert same_bits(restore(DATA / version / "root", step), expected)
    for leaf, path in (
        ("table", "params/user"),
        ("opt/mu", "opt/mu/user"),
        ("opt/nu", "opt/nu/user"),
        ("opt/accumulator", "opt/accumulator/user"),
    ):
        values = expected[path]
        rows, dim = len(values), values[0].size
        read = lattice_reader.read(DATA / version / "root", step, rows, dim, leaf)
        assert read.tobytes() == values.tobytes(), path
    truth = generate.flatten(generate.sums_at(step), "")
    assert any(
        values.tobytes() != truth["/" + path].tobytes()
        for path, values in expected.items()
    )
