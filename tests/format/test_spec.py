"""SPEC.md says what the code does: its tables, its constants, its worked example."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax import errors, handler
from cnr_jax.format import dense, encodings, manifest, names, rowids, tiles
from cnr_jax.format.fields import Fields
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import arrays, checked, digest_of
from cnr_jax.repository.store.arrays import ArrayReader, ArrayWriter
from cnr_jax.rows import codecs
from cnr_jax.rows.codecs import grid, lattice, packed, residual
from cnr_jax.rows.codecs.moments import Octave, Unit
from cnr_jax.rows.codecs.sparse import RowsAt
from cnr_jax.state import layouts

from ..conftest import each_of

PACKAGE = Path(cnr.__file__).parent
SPEC = (PACKAGE / "format" / "SPEC.md").read_text("utf-8")

# Section, table within the section: the dataclass it describes, and what the code adds to it.
DESCRIBED: dict[tuple[str, int], tuple[type, tuple[str, ...]]] = {
    ("5.2", 0): (manifest.Manifest, ("format", "sha256")),
    ("5.3", 0): (manifest.ParentRef, ()),
    ("5.4", 0): (manifest.FileDigest, ()),
    ("5.5", 0): (manifest.TableEntry, ()),
    ("5.6", 0): (manifest.LeafEntry, ()),
    ("5.7", 0): (manifest.DenseLeaf, ()),
    ("5.8", 0): (manifest.HistoryEntry, ()),
    ("5.9", 0): (manifest.Totals, ()),
    ("5.10", 0): (manifest.Fork, ()),
    ("5.11", 0): (encodings.EncodingEntry, ()),
    ("5.11", 1): (encodings.TableEncodingEntry, ()),
    ("5.12", 0): (manifest.SampledMotion, ()),
    ("6.1", 0): (tiles.ProcessManifest, ("format", "sha256")),
    ("6.1", 1): (tiles.SampledError, ()),
    ("6.2", 0): (tiles.ArrayEntry, ()),
    ("6.2", 1): (tiles.Compressed, ()),
    ("6.3", 0): (tiles.RowIds, ()),
    ("6.4", 0): (tiles.Tile, ()),
    ("6.4", 1): (tiles.Segment, ()),
    ("6.4", 2): (tiles.PartRef, ()),
    ("6.5", 0): (tiles.DensePart, ()),
    ("6.5", 1): (dense.DenseTile, ()),
}


def section(number: str) -> str:
    """The text of a section, its subsections included."""
    level = "#" * (number.count(".") + 2)
    text = re.split(rf"^{level} {re.escape(number)}\.? .*$", SPEC, flags=re.M)
    assert len(text) == 2, number
    return re.split(rf"^#{{2,{len(level)}}} ", text[1], flags=re.M)[0]


def tables_in(text: str) -> list[list[list[str]]]:
    """All Markdown tables: rows of cells, the header first."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.M)
    return [
        [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in table.splitlines()
            if not re.fullmatch(r"\|[-|]+\|", line)
        ]
        for table in found
    ]


def described(number: str, index: int) -> dict[str, dict[str, str]]:
    """The fields that a table of the specification lists, by name."""
    with_fields = [t for t in tables_in(section(number)) if t[0][0] == "field"]
    header, *rows = with_fields[index]
    assert header == ["field", "type", "unit", "since", "null", "meaning"]
    return {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows}


def blocks(kind: str) -> dict[str, str]:
    """The fenced blocks of the worked example, by the path of the file they show."""
    found = re.findall(rf"^```{kind} (\S+)\n(.*?)^```$", SPEC, flags=re.M | re.S)
    assert len(dict(found)) == len(found)
    return dict(found)


# Fields.


@each_of("place", DESCRIBED)
def test_fields_in_the_specification_are_those_of_the_code(
    place: tuple[str, int],
) -> None:
    kind, added = DESCRIBED[place]
    fields = [field.name for field in dataclasses.fields(kind)]
    assert sorted(described(*place)) == sorted([*fields, *added])


@each_of("place", DESCRIBED)
def test_fields_that_may_be_null_are_optional_in_the_code(
    place: tuple[str, int],
) -> None:
    kind, _ = DESCRIBED[place]
    optional = {f.name for f in dataclasses.fields(kind) if "None" in str(f.type)}
    rows = described(*place).items()
    # What stands for an absent field is None in the code, but for these.
    found = {name for name, row in rows if row["null"]}
    assert found - {"saves", "layer", "outgrown"} == optional


def test_every_table_of_fields_is_compared() -> None:
    numbers = re.findall(r"^### (\d+\.\d+) ", SPEC, flags=re.M)
    found = {
        (number, i)
        for number in numbers
        for i, table in enumerate(
            t for t in tables_in(section(number)) if t[0][0] == "field"
        )
    }
    assert found == set(DESCRIBED)


def test_all_fields_are_of_version_1_or_a_feature() -> None:
    rows = [row for place in DESCRIBED for row in described(*place).values()]
    features = {f"`{feature}`" for feature in names.KNOWN_FEATURES}
    since = {each for row in rows for each in row["since"].split(" or ")}
    assert since == {str(names.VERSION), *features}
    assert names.VERSION == 1
    may_lack = (row["since"] for row in rows if row["null"] == "absent")
    absent = {each for since in may_lack for each in since.split(" or ")}
    assert absent - {str(names.VERSION)} == features


CHECKS: dict[str, Any] = {
    "boolean": lambda v: isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
    "number": lambda v: isinstance(v, (int, float)) and v >= 0,
    "object": lambda v: isinstance(v, dict),
    "path": lambda v: isinstance(v, str) and not {"", ".", ".."} & set(v.split("/")),
}


def is_of(value: Any, row: dict[str, str]) -> bool:
    kind = row["type"]
    if value is None:
        return row["null"] == "yes"
    if kind.startswith("hex "):
        return bool(re.fullmatch(rf"[0-9a-f]{{{kind[4:]}}}", value))
    if kind.startswith("list of "):
        item = CHECKS[kind.removeprefix("list of ")]
        return isinstance(value, list) and all(map(item, value))
    if "May be negative" in row["meaning"] and isinstance(value, float):
        value = abs(value)
    return any(CHECKS[each](value) for each in kind.split(" or "))


def parts_of(document: dict[str, Any]) -> list[tuple[tuple[str, int], Any]]:
    """The objects in a document, with the table that describes each."""
    if document["format"] == names.FORMAT:
        found: list[tuple[tuple[str, int], Any]] = [(("5.2", 0), document)]
        found += [(("5.3", 0), document["parent"])] if document["parent"] else []
        found += [
            (("5.4", 0), f) for f in document["processes"] + document["dense_files"]
        ]
        found += [(("5.5", 0), t) for t in document["tables"]]
        found += [(("5.6", 0), e) for t in document["tables"] for e in t["leaves"]]
        found += [(("5.7", 0), e) for e in document["dense_leaves"]]
        found += [(("5.8", 0), e) for e in document["history"]]
        found += [(("5.10", 0), e) for e in document.get("forks", ())]
        if "encoding" in document:
            found += [(("5.11", 0), document["encoding"])]
            of_tables = document["encoding"]["tables"].values()
            found += [(("5.11", 1), e) for e in of_tables]
        found += [(("5.12", 0), document["motion"])] if "motion" in document else []
        return [*found, (("5.9", 0), document["totals"])]
    segments = [s for tile in document["tiles"] for s in tile["segments"]]
    found = [(("6.1", 0), document)]
    arrays = list(document["arrays"].values())
    if "dense" in document:
        found += [(("6.5", 0), document["dense"])]
        found += [(("6.5", 1), tile) for tile in document["dense"]["tiles"]]
        arrays.append(document["dense"]["array"])
    found += [(("6.1", 1), e) for e in document.get("row_errors", {}).values()]
    found += [(("5.12", 0), e) for e in document.get("motion", {}).values()]
    found += [(("6.2", 0), a) for a in arrays]
    found += [(("6.2", 1), a["compressed"]) for a in arrays if "compressed" in a]
    found += [(("6.3", 0), e) for e in document["row_ids"]]
    found += [(("6.4", 0), tile) for tile in document["tiles"]]
    found += [(("6.4", 1), s) for s in segments]
    return found + [(("6.4", 2), p) for s in segments for p in s["parts"].values()]


def test_written_documents_have_the_described_fields_and_types() -> None:
    data = Path(__file__).parents[1] / "data"
    documents = [
        *blocks("json").values(),
        *(path.read_text() for path in data.glob("v*/root/*/*/manifest*.json")),
    ]
    parsed = [json.loads(text) for text in documents if '"format"' in text]
    seen = set()
    for document in parsed:
        for place, value in parts_of(document):
            seen.add(place)
            rows = described(*place)
            absent = {name for name, row in rows.items() if "absent" in row["null"]}
            assert rows.keys() - absent <= value.keys() <= rows.keys(), place
            for name, found in value.items():
                assert is_of(found, rows[name]), (place, name, found)
    assert seen == set(DESCRIBED)


# Constants and names.


def cells(number: str, first: str) -> list[list[str]]:
    (table,) = [t for t in tables_in(section(number)) if t[0][0] == first]
    return [[re.sub("`", "", cell) for cell in row] for row in table[1:]]


def test_title_names_the_version() -> None:
    assert re.search(r"version (\d+)", SPEC.splitlines()[0])[1] == str(names.VERSION)


def test_layout_names_the_files_of_the_code() -> None:
    text = section("4")
    for name in (
        names.MANIFEST,
        names.process_manifest(0).replace("00000", "NNNNN"),
        names.rows_directory(0).replace("00000", "NNNNN") + "/",
        names.DENSE + "/",
        names.TEMPORARY_SUFFIX,
        names.branched("<plain name>", 1).replace("g1", "g<generation>"),
        "<step directory>"
        + names.abandoned("", 1, "u").replace("g1-u", "g<generation>-<uuid>"),
    ):
        assert f"{name}" in text, name
    assert names.process_manifest(123456) == "manifest.p123456.json"


def test_format_names_are_those_of_the_code() -> None:
    assert described("5.2", 0)["format"]["meaning"] == f"`{names.FORMAT}`"
    assert described("6.1", 0)["format"]["meaning"] == f"`{tiles.PROCESS_FORMAT}`"


def test_array_names_are_those_of_the_code() -> None:
    text = section("6.2")
    assert f"`{names.ROW_IDS_ARRAY}` (uint8" in text
    for codec in ("<codec>", "escaped"):
        part = "<part>" if codec == "<codec>" else "rows"
        assert f"`{names.array_name(f'cnr.{codec}', part, '<dtype>')}`" in text


def test_forms_of_row_ids_are_those_of_the_code() -> None:
    assert tuple(row[0] for row in cells("6.3", "form")) == rowids.FORMS


def test_layouts_are_those_of_the_code() -> None:
    rows = {row[0]: row for row in cells("5.5", "layout")}
    assert set(rows) == set(layouts._LAYOUTS)
    mod = layouts.ModSharded(shards=3, rows_per_shard=4)
    assert tuple(rows["mod"][1].split(", ")) == tuple(mod.configuration())
    for i in range(12):
        value = eval(rows["mod"][2], {"i": i, **mod.configuration()})
        assert value == mod.to_physical(i)


def test_codecs_are_those_of_the_code() -> None:
    rows = {row[0]: row for row in cells("7", "codec")}
    assert set(rows) == set(codecs._STORED)
    for name, row in rows.items():
        keys = re.findall(r"(\w+)(?: \([^)]*\))?(?:, |$)", row[1])
        codec = codecs.at_dim(codecs._STORED[name](), 16)
        assert set(keys) == set(codec.configuration())
    widths = re.search(r"bits \(([\d, ]+)\)", rows["cnr.asymmetric"][1])[1]
    assert tuple(int(width) for width in widths.split(", ")) == grid.WIDTHS


def every_codec() -> Iterator[codecs.Codec]:
    """Every codec of the table, at all widths that it lists."""
    for name, configuration, _ in cells("7", "codec"):
        kind = codecs._STORED[name]
        listed = dict(re.findall(r"(\w+) \(([\d, ]+)\)", configuration))
        values = [map(int, numbers.split(", ")) for numbers in listed.values()]
        for given in itertools.product(*values):
            chosen = dict(zip(listed, given, strict=True))
            if (chosen.get("bits"), chosen.get("metadata_bits")) != (8, 16):
                yield kind(**chosen)


@each_of("codec", list(every_codec()))
def test_parts_of_codecs_are_those_of_the_code(codec: codecs.Codec) -> None:
    (row,) = (row for row in cells("7", "codec") if row[0] == codec.name)
    described_parts = dict(re.findall(r"(\w+): ([^;]+)", row[2]))
    parts = codec.parts(13, np.float16)
    if codec == codecs.Log(bits=16):
        assert "with 8 bits top" in row[2] and "with 8 bits stride" in row[2]
        del described_parts["top"], described_parts["stride"]
    assert parts.keys() == described_parts.keys()
    configuration = codecs.at_dim(codec, 13).configuration()
    scope = {"dim": 13, "ceil": math.ceil, **configuration}
    for name, part in parts.items():
        allowed, width = described_parts[name].rsplit(", ", 1)
        allowed = allowed.replace("the leaf's dtype", "float16")
        assert part.dtype.name in allowed.split(" or ")
        assert part.width == eval(width, scope)


def random_parts(
    codec: codecs.Asymmetric, rows: int, dim: int
) -> dict[str, np.ndarray]:
    """Any codes, scales of all magnitudes, offsets of all precisions."""
    rng = np.random.default_rng(codec.bits)
    parts = codec.parts(dim, np.float32)
    scale = np.exp2(rng.uniform(-100, 100, (rows, 1)))
    scale[: rows // 2] = np.exp2(rng.uniform(-10, 10, (rows // 2, 1)))
    offset = rng.normal(size=(rows, 1)) * 10.0 ** rng.integers(-3, 3, (rows, 1))
    return {
        "codes": rng.integers(0, 256, (rows, parts["codes"].width), np.uint8),
        "scale": scale.astype(parts["scale"].dtype),
        "offset": offset.astype(parts["offset"].dtype),
    }


@each_of("bits", grid.WIDTHS)
@each_of("dtype", ["float32", "bfloat16", "float16"])
def test_formula_gives_the_bits_of_the_codec(bits: int, dtype: str) -> None:
    formula = re.search(r"^c = (.+?) {2,}.*\nx = (.+?) {2,}", section("7"), flags=re.M)
    item, codec, rows, dim = (
        checked.numpy_dtype(dtype),
        codecs.Asymmetric(bits=bits),
        64,
        13,
    )
    parts = random_parts(codec, rows, dim)
    decode = jax.jit(lambda parts: codec.decode(parts, dim=dim, dtype=item))
    got = np.asarray(decode(parts))
    string = np.unpackbits(parts["codes"], axis=1, bitorder="little")
    q = string[:, : dim * bits].reshape(rows, dim, bits) @ (2 ** np.arange(bits))
    scope = {"q": q.astype(np.float32), "bits": np.float32(bits)}
    scope |= {name: parts[name].astype(np.float32) for name in ("scale", "offset")}
    scope["c"] = eval(formula[1], scope)
    x = eval(formula[2], scope)
    assert x.dtype == np.float32
    x = np.clip(x, -65504, 65504) if dtype == "float16" else x
    assert x.astype(item).tobytes() == got.tobytes()


def test_required_features_are_those_of_the_code() -> None:
    line = re.search(r"Known features: (.*?)\. Reserved: (.*?) \(", section("11"))
    assert set(re.findall(r"`(\w+)` \(", line[1])) == names.KNOWN_FEATURES
    assert set(tiles.CHUNK_CODECS.values()) <= names.KNOWN_FEATURES
    assert set(re.findall(r"`(\w+)`", line[2])) == names.RESERVED_FEATURES
    assert not names.RESERVED_FEATURES & names.KNOWN_FEATURES


def test_limits_of_arrays_and_chunks_are_those_of_the_code() -> None:
    assert f"at most {arrays.CHUNK_BYTES >> 20} MiB" in section("6.2")
    assert f"less than {arrays.COMPRESSED_LEAST_BYTES} bytes" in section("6.2")
    assert f"at most {checked.PACKED_MOST_BYTES >> 20} MiB unpacked" in section("6.6")


def test_handler_types_ever_used_are_importable() -> None:
    text = section("11").split("importable:")[1]
    ever = re.findall(r"`([\w.]+)`", text)
    current = f"{handler.CnrHandler.__module__}.{handler.CnrHandler.__qualname__}"
    assert current in ever
    for path in ever:
        module, name = path.rsplit(".", 1)
        assert issubclass(getattr(__import__(module, fromlist=[name]), name), object)
    data = Path(__file__).parents[1] / "data"
    for path in data.glob("v*/root/*/_CHECKPOINT_METADATA"):
        stored = json.loads(path.read_text())["item_handlers"]
        assert set(stored.values()) <= set(ever)


def test_sections_that_the_code_names_exist() -> None:
    headings = re.findall(r"^#{2,3} (\d+(?:\.\d+)?)", SPEC, flags=re.M)
    cited = [
        (path.name, number)
        for path in PACKAGE.rglob("*.py")
        for number in re.findall(
            r"SPEC\.md, section (\d+(?:\.\d+)?)", path.read_text("utf-8")
        )
    ]
    assert {number for _, number in cited} >= {"5", "6"}
    assert [entry for entry in cited if entry[1] not in headings] == []


def test_sections_are_the_promised_ones_in_order() -> None:
    numbers = [int(n) for n in re.findall(r"^## (\d+)\. ", SPEC, flags=re.M)]
    assert numbers == list(range(1, 13))


# The worked example.

# What its uuids begin with.
NONCE = "5eed" * 6


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the worked example, written by the manager."""
    root = tmp_path_factory.mktemp("example")
    state = {
        "user": {
            "embedding": jnp.array(
                [[0, 0.5, 1, 7.5], [-1, -0.5, 0, 0.25], [1, 1, 1, 1]], jnp.float32
            )
        },
        "opt": {"user": {"embedding": jnp.array([1, 2, 3], jnp.float32)}},
        "name": "demo",
    }
    tables = cnr.find_tables(state, ["user"])
    lineage = jnp.array([1, 2, 3, 4], jnp.uint32)
    touched = dataclasses.replace(cnr.init_touched(state, tables), lineage=lineage)
    options = cnr.Options(codec="asymmetric", bits=4, policy=cnr.Consecutive())
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        touched = cnr.record(touched, {"user": jnp.array([0, 1])})
        manager.save(0, args=cnr.args.Save(state, touched))
        touched = cnr.record(touched, {"user": jnp.array([2, 0])})
        table = [[2, 2, 2, 2], [-1, -0.5, 0, 0.25], [0, 0, -0.3, 1.2]]
        state["user"]["embedding"] = jnp.array(table, jnp.float32)
        state["opt"]["user"]["embedding"] = jnp.array([4, 2, 5], jnp.float32)
        manager.save(1, args=cnr.args.Save(state, touched))
    return root


def shown_bytes(text: str) -> bytes:
    return b"".join(bytes.fromhex(line.split(";")[0]) for line in text.splitlines())


def test_example_arrays_are_what_is_written(example: Path) -> None:
    shown = blocks("bytes")
    written = sorted(
        str(p.relative_to(example)) for p in example.glob("*/*/rows*/*/c/*")
    )
    assert sorted(shown) == written
    for path, text in shown.items():
        assert shown_bytes(text) == (example / path).read_bytes(), path


def comparable(text: str, nonce: str) -> dict[str, Any]:
    """Without what other software, clocks and chance decide, and digests of such.

    Args:
        text: of the document.
        nonce: what the uuids of all saves of a manager begin with; it may be any.
    """
    document = json.loads(text.replace(nonce, NONCE))
    for key in ("sha256", "writer", "written_at_unix_secs"):
        document.pop(key, None)
    for entry in document.get("arrays", {}).values():
        del entry["metadata_bytes"], entry["metadata_sha256"]
    for entry in document.get("processes", ()):
        del entry["bytes"], entry["sha256"]
    for entry in document.get("history", ()):
        del entry["bytes"], entry["secs"]
    if "totals" in document:
        del document["totals"]["table_bytes"], document["totals"]["manifest_bytes"]
    return document


def test_example_documents_are_what_is_written(example: Path) -> None:
    shown = {path: text for path, text in blocks("json").items() if "manifest" in path}
    written = sorted(str(p.relative_to(example)) for p in example.glob("*/*/manifest*"))
    assert sorted(shown) == written
    first, second = (read_manifest(example / step / "default") for step in "01")
    assert second.history[:1] == first.history
    for path, text in shown.items():
        got = comparable((example / path).read_text(), first.uuid[: len(NONCE)])
        assert got == comparable(text, NONCE), path


def test_example_metadata_says_what_is_written(example: Path) -> None:
    (shown,) = [(p, t) for p, t in blocks("json").items() if p.endswith("zarr.json")]
    got, expected = json.loads((example / shown[0]).read_bytes()), json.loads(shown[1])
    assert {key: got[key] for key in expected} == expected


def canonical(text: str) -> bytes:
    document = json.loads(text)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize("step", [0, 1])
def test_example_documents_are_valid_and_hold_each_others_digests(step: int) -> None:
    shown = blocks("json")
    process_data = canonical(shown[f"{step}/default/manifest.p00000.json"])
    whole = manifest.load(canonical(shown[f"{step}/default/manifest.json"]), "manifest")
    process = tiles.load_process(process_data, "process")
    assert whole.processes == (digest_of("manifest.p00000.json", process_data),)
    assert whole.uuid == process.uuid
    tiles.check_cover(whole.tables, process.tiles, "the example")
    assert manifest.dump(whole) == canonical(shown[f"{step}/default/manifest.json"])
    assert tiles.dump_process(process) == process_data
    for name, entry in process.arrays.items():
        data = shown_bytes(blocks("bytes")[f"{step}/default/rows.p00000/{name}/c/0"])
        assert entry.crc32c == (int.from_bytes(data[-4:], "little"),)


@pytest.mark.parametrize("step", [0, 1])
def test_example_restores_to_the_shown_values(example: Path, step: int) -> None:
    table = next(
        t for t in tables_in(section("12")) if t[0][0] == f"restored at step {step}"
    )
    values = {row[0]: [float(x) for x in row[1].split(", ")] for row in table[1:]}
    with cnr.CheckpointManager(example) as manager:
        state = manager.restore(step).state
    shown = np.array([values[f"row {i}"] for i in range(3)], np.float32)
    assert np.asarray(state["user"]["embedding"]).tobytes() == shown.tobytes()
    assert np.asarray(state["opt"]["user"]["embedding"]).tolist() == values["slot"]
    assert state["name"] == "demo"


def test_compressed_example_is_read_and_its_metadata_is_what_is_written(
    tmp_path: Path,
) -> None:
    """Written again it need not be the same frame: that is up to the version of zstd."""
    ((name, shown),) = blocks("entry").items()
    ((chunk, frame),) = blocks("compressed").items()
    problems: list[str] = []
    entry = tiles._read_array(Fields(json.loads(shown), name, problems))
    path = tmp_path / name
    (path / chunk).parent.mkdir(parents=True)
    (path / chunk).write_bytes(shown_bytes(frame))
    codes = np.full(2048, 0x11, np.uint8)
    np.testing.assert_array_equal(ArrayReader(path, entry).read(0, 2048), codes)
    assert problems == []
    assert checked.file_bytes(entry) == (len(shown_bytes(frame)),)
    assert entry.crc32c[0] == int.from_bytes(shown_bytes(frame)[-4:], "little")
    writer = ArrayWriter(tmp_path / "again", "uint8", 2048, compression="zstd")
    writer.append(codes)
    again = writer.finish()
    assert again is not None and again.compressed is not None
    ((file, described_codecs),) = blocks("metadata").items()
    written = json.loads((tmp_path / "again" / file).read_bytes())["codecs"]
    expected = json.loads(described_codecs)
    assert [codec["name"] for codec in written] == [c["name"] for c in expected]
    assert written[1]["configuration"]["level"] == expected[1]["configuration"]["level"]


def numbers_of(cell: str) -> np.ndarray:
    """Rows of numbers: `1, 2; 3, 4`."""
    return np.array([[float(x) for x in row.split(",")] for row in cell.split(";")])


def test_example_of_a_lattice_adds_up_to_the_shown_values() -> None:
    pytest.importorskip("zstandard")
    (table,) = (t for t in tables_in(section("12.4")) if t[0][0] == "segment")
    (full, delta) = (
        {
            "integers": numbers_of(row[2]).astype(np.int8),
            "scale": numbers_of(row[3]).astype(np.float32).T.reshape(-1, 1),
        }
        for row in table[1:]
    )
    ids = [int(i) for i in table[2][1].split(",")]
    below = {name: part[ids] for name, part in full.items()}
    codec = codecs.codec_from("cnr.lattice", {"bits": 4})
    assert isinstance(codec, lattice.Lattice)
    digest = residual.Digest(codec)
    digest.update(below)
    assert f"`{digest.hexdigest()}`" == table[2][4]
    codec.add(delta, RowsAt(full, np.array(ids)))
    read = codec.decode(full, dim=4, dtype=np.float32)
    shown = tables_in(section("12.4"))[1][1:]
    np.testing.assert_array_equal(read, [numbers_of(row[1])[0] for row in shown])
    (stored,) = blocks("packed").values()
    packed_rows = packed.unpack_rows(shown_bytes(stored), 8, np.dtype(np.int8))
    assert packed_rows.at.tolist() == [0, 1]
    np.testing.assert_array_equal(packed_rows.values, delta["integers"])


def test_example_of_moments_adds_up_to_the_shown_values() -> None:
    steps, shown = (t[1:] for t in tables_in(section("12.5")))
    octave = codecs.codec_from("cnr.octave", {"places": 2})
    unit = codecs.codec_from("cnr.unit", {"places": 2, "steps": 8})
    assert isinstance(octave, Octave)
    assert isinstance(unit, Unit)

    def stored(row: list[str]) -> dict[str, dict[str, np.ndarray]]:
        squares = numbers_of(row[1]).astype(np.int16)
        centre = numbers_of(row[2]).astype(np.int16).T.reshape(-1, 1)
        counts = numbers_of(row[3]).astype(np.int8)
        return {
            "squares": {"integers": squares, "centre": centre},
            "means": {"integers": counts, "octaves": squares, "centre": centre},
        }

    full, delta = map(stored, steps)
    for column, (name, codec) in enumerate(
        {"squares": octave, "means": unit}.items(), start=1
    ):
        digest = residual.Digest(codec)
        digest.update(full[name])
        assert f"`{digest.hexdigest()}`" == steps[1][4]
        parts = {part: rows.copy() for part, rows in full[name].items()}
        codec.add(delta[name], RowsAt(parts, slice(0, 2)))
        read = codec.decode(parts, dim=4, dtype=np.float32)
        values = [numbers_of(row[column])[0] for row in shown]
        np.testing.assert_array_equal(read, np.array(values, np.float32))


def test_damaged_example_is_refused() -> None:
    text = blocks("json")["0/default/manifest.json"]
    with pytest.raises(errors.ManifestError, match="digest"):
        manifest.load(canonical(text.replace('"rows": 3', '"rows": 2')), "manifest")


def test_frozen_files_are_committed_as_binary() -> None:
    """Bytes on disk are compared below tests/data: nothing may convert line ends there."""
    attributes = Path(__file__).parents[2] / ".gitattributes"
    assert "tests/data/v*/** -text" in attributes.read_text("utf-8").splitlines()
