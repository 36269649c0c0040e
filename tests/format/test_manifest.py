from __future__ import annotations

import dataclasses
import gc
import json
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.encodings import EncodingEntry, TableEncodingEntry, encoding_told
from cnr_jax.format.fields import dump_document
from cnr_jax.format.manifest import (
    MAX_HISTORY,
    DenseLeaf,
    FileDigest,
    Fork,
    HistoryEntry,
    LeafEntry,
    Manifest,
    NamedConfiguration,
    ParentRef,
    SampledMotion,
    TableEntry,
    Totals,
    bounded_history,
    dump,
    load,
    to_json,
)
from cnr_jax.format.tiles import (
    PROCESS_FORMAT,
    ArrayEntry,
    Compressed,
    PartRef,
    ProcessManifest,
    RowIds,
    Segment,
    Tile,
    dump_process,
    load_process,
)
from cnr_jax.policy.bits import RAW_BITS, bits_for_motion

from ..conftest import each_of

DIGEST = FileDigest(path="dense/d/00ff", bytes=7, sha256="ab" * 32)
MANIFEST = Manifest(
    uuid="0123456789abcdef" * 2,
    step=20,
    kind="delta",
    generation=2,
    lineage="ff" * 16,
    tracking="audited",
    recorded_clock=9,
    fingerprint_clock=3,
    parent=ParentRef(directory="10", uuid="aa" * 16, clock=4),
    processes=(dataclasses.replace(DIGEST, path="manifest.p00000.json"),),
    dense_files=(DIGEST,),
    dense_leaves=(
        DenseLeaf(path=("w",), kind="array", shape=(3, 2), dtype="float32"),
        DenseLeaf(path=("naïve", "0"), kind="text", shape=(), dtype="str", value="ö\n"),
    ),
    tables=(
        TableEntry(
            name="user",
            rows=7,
            padded_rows=8,
            layout=NamedConfiguration(
                name="mod", configuration={"shards": 2, "rows_per_shard": 4}
            ),
            leaves=(
                LeafEntry(name="table", path=("user",), shape=(8, 4), dtype="bfloat16"),
                LeafEntry(
                    name="opt", path=("opt", "user"), shape=(8,), dtype="float32"
                ),
            ),
        ),
    ),
    totals=Totals(
        rows=3, table_bytes=40, slot_bytes=12, dense_bytes=7, manifest_bytes=900
    ),
    policy="intermittent",
    reason="rows since the baseline (step 10)",
    history=(HistoryEntry(step=10, kind="full", bytes=99, rows=8, secs=0.1),),
    restores=1,
    written_at_unix_secs=1767225600.123,
    writer={"cnr_jax": "0.1.0"},
    forks=(Fork(generation=1, step=10),),
)
PROCESS = ProcessManifest(
    uuid=MANIFEST.uuid,
    process=0,
    arrays={
        "row_ids": ArrayEntry(
            dtype="uint8",
            length=5,
            chunk=3,
            metadata_bytes=200,
            metadata_sha256="cd" * 32,
            crc32c=(1, 2**32 - 1),
        )
    },
    codecs=(NamedConfiguration(name="cnr.raw", configuration={}),),
    row_ids=(RowIds(form="gaps", offset=1, bytes=4, count=2),),
    tiles=(
        Tile(
            table="user",
            leaf="table",
            box=((0, 8), (0, 4)),
            segments=(
                Segment(
                    codec=0,
                    row_ids=0,
                    parts={"rows": PartRef(array="row_ids", offset=0)},
                ),
            ),
        ),
    ),
    slot_bytes=0,
)


def document(changes: dict[str, Any], base: Any = MANIFEST) -> bytes:
    """A document with a right digest and wrong fields; `...` leaves a field out."""
    value = json.loads(dump(base) if base is MANIFEST else dump_process(base))
    del value["sha256"]
    for path, new in changes.items():
        *parents, last = path.split(".")
        inner = value
        for key in parents:
            inner = inner[int(key) if isinstance(inner, list) else key]
        if new is ...:
            del inner[last]
        else:
            inner[int(last) if isinstance(inner, list) else last] = new
    return dump_document(value)


def problems_of(changes: dict[str, Any], base: Any = MANIFEST) -> list[str]:
    with pytest.raises(errors.ManifestError) as caught:
        if base is MANIFEST:
            load(document(changes), "here/manifest.json")
        else:
            load_process(document(changes, base), "here/manifest.p00000.json")
    assert str(caught.value).startswith("here/manifest")
    return list(caught.value.problems)


def test_manifest_comes_back_equal() -> None:
    assert load(dump(MANIFEST), "manifest") == MANIFEST


def test_full_manifest_without_clock_parent_or_leaves_comes_back_equal() -> None:
    full = dataclasses.replace(
        MANIFEST,
        kind="full",
        parent=None,
        recorded_clock=None,
        dense_files=(),
        dense_leaves=(),
        history=(),
    )
    assert load(dump(full), "manifest") == full


def test_entry_of_several_saves_comes_back_equal_and_others_say_nothing_of_it() -> None:
    assert b'"saves"' not in dump(MANIFEST)
    several = HistoryEntry(step=9, kind="delta", bytes=8, rows=4, secs=0.3, saves=3)
    manifest = dataclasses.replace(MANIFEST, history=(*MANIFEST.history, several))
    assert load(dump(manifest), "manifest") == manifest
    assert problems_of({"history.0.saves": 0}) == [
        "history[0].saves: expected an integer of at least 1, got 0"
    ]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=300),
)
def test_bounded_history_keeps_sums_order_and_the_last_save(
    saves: list[tuple[bool, int]],
) -> None:
    given, bounded = [], ()
    for step, (is_full, size) in enumerate([(True, 900), *saves]):
        kind = "full" if is_full and step % 90 == 0 else "delta"
        entry = HistoryEntry(step=step, kind=kind, bytes=size, rows=size, secs=0.5)
        given.append(entry)
        bounded = bounded_history((*bounded, entry))
    assert len(bounded) <= MAX_HISTORY
    assert bounded[0] == given[0] and bounded[-1] == given[-1]
    if len(given) <= MAX_HISTORY:
        assert list(bounded) == given
    left = list(given)
    for entry in bounded:
        own, left = left[: entry.saves], left[entry.saves :]
        assert entry.step == own[-1].step
        assert {entry.kind} == {each.kind for each in own}
        assert entry.bytes == entry.rows == sum(each.bytes for each in own)
        assert entry.secs == sum(each.secs for each in own)
        assert entry.saves <= 4 * len(given) / MAX_HISTORY + 2
    assert not left


@pytest.mark.slow
def test_manifests_that_were_read_leave_little_in_memory() -> None:
    def held_after(manifests: Iterable[Manifest]) -> int:
        tracemalloc.start()
        try:
            for number, manifest in enumerate(manifests):
                data = dump(manifest)
                assert load(data, str(number)) == manifest
            del manifest, data
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    def leaf(kind: str, name: str, value: str | None) -> DenseLeaf:
        return DenseLeaf(path=(name,), kind=kind, shape=(), dtype="str", value=value)

    def texts() -> Iterator[Manifest]:
        for number in range(40):
            leaves = (leaf("text", "log", f"{number}" + "x" * 300_000),)
            yield dataclasses.replace(MANIFEST, dense_leaves=leaves)

    def paths() -> Iterator[Manifest]:
        for number in range(20):
            leaves = (leaf("scalar", f"{number}" + "x" * 1_000_000, None),)
            yield dataclasses.replace(MANIFEST, dense_leaves=leaves)

    def longest() -> Iterator[Manifest]:
        leaves = (leaf("scalar", "x" * 5_000_000, None),)
        yield dataclasses.replace(MANIFEST, dense_leaves=leaves)

    assert held_after(texts()) < 1_000_000
    assert held_after(paths()) < 4_000_000
    assert held_after(longest()) < 4_000_000


def test_what_manifests_have_alike_is_read_once_but_for_problems() -> None:
    leaves = tuple(leaf for leaf in MANIFEST.dense_leaves if leaf.kind != "text")
    manifest = dataclasses.replace(MANIFEST, dense_leaves=leaves)
    other = dataclasses.replace(manifest, step=MANIFEST.step + 1)
    one, two = load(dump(manifest), "one"), load(dump(other), "two")
    assert one.tables is two.tables and one.dense_leaves is two.dense_leaves
    assert one.history[0] is two.history[0]
    for _ in range(2):
        assert problems_of({"tables.0.rows": -1, "history.0.rows": True}) == [
            "tables[0].rows: expected an integer of at least 1, got -1",
            "history[0].rows: expected an integer of at least 0, got true",
        ]


def test_process_manifest_comes_back_equal() -> None:
    assert load_process(dump_process(PROCESS), "manifest") == PROCESS
    assert PROCESS.features == frozenset()


def test_compressed_arrays_come_back_equal_and_others_say_nothing_of_it() -> None:
    assert b"compressed" not in dump_process(PROCESS)
    ids = dataclasses.replace(
        PROCESS.arrays["row_ids"], compressed=Compressed(codec="zstd", bytes=(19, 20))
    )
    process = dataclasses.replace(PROCESS, arrays={**PROCESS.arrays, "ids": ids})
    assert load_process(dump_process(process), "manifest") == process
    assert process.features == {"zstd"}


def test_manifest_is_ascii_with_sorted_keys_and_one_final_newline() -> None:
    data = dump(MANIFEST)
    assert data.isascii() and data.count(b"\n") == 1 and data.endswith(b"}\n")
    keys = list(json.loads(data))
    assert keys == sorted(keys)


def test_unknown_field_is_ignored_but_under_the_digest() -> None:
    data = document({"later": {"x": 1}})
    assert load(data, "manifest") == MANIFEST
    with pytest.raises(errors.ManifestError, match="digest"):
        load(data.replace(b'"x":1', b'"x":2'), "manifest")


@given(at=st.integers(0, len(dump(MANIFEST)) - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_refused(at: int, bit: int) -> None:
    data = bytearray(dump(MANIFEST))
    data[at] ^= 1 << bit
    with pytest.raises(errors.FormatError):
        load(bytes(data), "manifest")


@given(at=st.integers(0, len(dump(MANIFEST)) - 1))
def test_every_truncation_is_refused(at: int) -> None:
    with pytest.raises(errors.ManifestError):
        load(dump(MANIFEST)[:at], "manifest")


@given(data=st.binary(max_size=60))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(errors.ManifestError):
        load(data, "manifest")


@each_of(
    "data",
    [
        b"[]\n",
        b"null\n",
        b"1\n",
        b"{}\n",
        b"[" * 100_000,
        b'{"format":"cnr_jax","required_features":[],"version":1,"x":NaN}\n',
        b'{"format":"cnr_jax","required_features":[],"version":1,"x":1e999}\n',
    ],
)
def test_json_that_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(errors.ManifestError):
        load(data, "manifest")


def test_spaces_or_other_order_are_refused_even_with_a_right_digest() -> None:
    value = json.loads(dump(MANIFEST))
    for text in (
        json.dumps(value, sort_keys=True),
        json.dumps(value, separators=(",", ":")),
    ):
        assert json.loads(text) == value
    with pytest.raises(errors.ManifestError, match="digest"):
        load(json.dumps(value, sort_keys=True).encode() + b"\n", "manifest")


def test_process_manifest_is_not_taken_for_a_manifest() -> None:
    with pytest.raises(errors.ManifestError, match=f"not a {names.FORMAT} document"):
        load(dump_process(PROCESS), "manifest")
    with pytest.raises(errors.ManifestError, match=f"not a {PROCESS_FORMAT} document"):
        load_process(dump(MANIFEST), "manifest")


def test_newer_version_is_refused_as_such_whatever_its_digest() -> None:
    for data in (
        document({"version": names.VERSION + 1}),
        document({"version": 7, "processes": "of another kind", "tables": ...}),
        dump(MANIFEST).replace(b'"version":1', b'"version":2'),
    ):
        with pytest.raises(errors.UnsupportedVersionError, match="upgrade"):
            load(data, "manifest")
    with pytest.raises(errors.UnsupportedVersionError):
        load_process(document({"version": 2}, PROCESS), "manifest")


@pytest.mark.parametrize("feature", ["tombstones", "something else"])
def test_unknown_required_feature_is_refused_and_named(feature: str) -> None:
    with pytest.raises(errors.UnsupportedVersionError, match=feature) as caught:
        load(document({"required_features": [feature]}), "manifest")
    assert caught.value.kind == "unsupported_version"


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(
        {
            "uuid": "xyz",
            "step": -1,
            "kind": "partial",
            "lineage": ...,
            "tables.0.rows": 9,
            "totals.rows": "many",
            "history.0.secs": None,
            "dense_files.0.path": "../elsewhere",
        }
    )
    assert sorted(problems) == [
        'dense_files[0].path: expected a path below this folder, got "../elsewhere"',
        "history[0].secs: expected a number of at least 0, got null",
        'kind: expected one of full, delta, got "partial"',
        "lineage: required key is absent",
        "step: expected an integer of at least 0, got -1",
        "tables[0].rows: expected at most padded_rows (8), got 9",
        'totals.rows: expected an integer of at least 0, got "many"',
        'uuid: expected 32 hexadecimal digits, got "xyz"',
    ]


# Null, or of no meaning to a reader.
FREE = {
    "parent",
    "recorded_clock",
    "fingerprint_clock",
    "run",
    "forks",
    "writer",
    "encoding",
    "motion",
    "stands_for",
    "outgrown",
}


@each_of("field", [f.name for f in dataclasses.fields(Manifest) if f.name not in FREE])
def test_every_field_is_required(field: str) -> None:
    assert any(field in problem for problem in problems_of({field: ...}))


OF_PROCESS = [f.name for f in dataclasses.fields(ProcessManifest)]


# Of rows that nobody has measured there are neither errors nor motion, and none are outgrown.
MEASURED = {"row_errors", "motion", "outgrown"}
# Of a process that has written none.
UNUSED = {"dense"}


@each_of("field", [n for n in OF_PROCESS if n not in MEASURED | UNUSED])
def test_every_field_of_a_process_is_required(field: str) -> None:
    assert any(field in problem for problem in problems_of({field: ...}, PROCESS))


def test_forks_are_checked_where_they_are_and_left_out_where_nothing_is_known() -> None:
    wrong = [{"generation": 0, "step": 10}, {"generation": 1, "step": -1}]
    assert problems_of({"forks": wrong}) == [
        "forks[0].generation: expected an integer of at least 1, got 0",
        "forks[1].step: expected an integer of at least 0, got -1",
    ]
    unknown = dataclasses.replace(MANIFEST, forks=None)
    assert "forks" not in json.loads(dump(unknown))
    assert load(dump(unknown), "here") == unknown
    none_left = dataclasses.replace(MANIFEST, forks=())
    assert json.loads(dump(none_left))["forks"] == []
    assert load(dump(none_left), "here") == none_left


def test_what_a_step_stands_for_is_checked_and_left_out_where_it_is_nothing() -> None:
    assert problems_of({"stands_for": ["00ff"]}) == [
        "stands_for: expected uuids, got '00ff'"
    ]
    assert "stands_for" not in json.loads(dump(MANIFEST))
    merged = dataclasses.replace(MANIFEST, stands_for=("00ff" * 8,))
    assert load(dump(merged), "here") == merged


def test_layers_are_stored_and_left_out_where_there_is_one() -> None:
    first, *rest = PROCESS.tiles
    assert "layer" not in json.loads(dump_process(PROCESS))["tiles"][0]
    upper = dataclasses.replace(first, layer=2)
    layered = dataclasses.replace(PROCESS, tiles=(first, upper, *rest))
    assert load_process(dump_process(layered), "here") == layered
    assert json.loads(dump_process(layered))["tiles"][1]["layer"] == 2


ENCODING = EncodingEntry(
    codec=NamedConfiguration(name="cnr.log", configuration={"bits": 8}),
    bits="auto",
    expected_restores=3.5,
    slot_codec="auto",
    compression=None,
    tables={
        "user": TableEncodingEntry(bits=8),
        "item": TableEncodingEntry(
            codec="raw",
            slot_codec=NamedConfiguration(name="mine", configuration={"a": [1.5]}),
        ),
    },
)


def test_an_encoding_is_read_as_it_was_written_and_may_be_absent() -> None:
    whole = dataclasses.replace(MANIFEST, encoding=ENCODING)
    assert load(dump(whole), "here") == whole
    assert encoding_told(json.loads(dump(whole))["encoding"]) == ENCODING
    assert "encoding" not in json.loads(dump(MANIFEST))
    wrong = {
        "codec": {"name": "cnr.raw", "configuration": 3},
        "bits": 0,
        "slot_codec": "raw",
        "tables": {"user": {"bits": []}},
    }
    assert problems_of({"encoding": wrong}) == [
        "encoding.bits: expected an integer of at least 1, got 0",
        "encoding.codec.configuration: expected an object",
        "encoding.tables.user.bits: expected an integer of at least 1, got []",
    ]


def test_outgrown_tables_are_read_as_they_were_written_and_may_be_absent() -> None:
    whole = dataclasses.replace(MANIFEST, outgrown=("items", "users"))
    assert load(dump(whole), "here") == whole
    assert "outgrown" not in json.loads(dump(MANIFEST))
    part = dataclasses.replace(PROCESS, outgrown=("users",))
    assert load_process(dump_process(part), "here") == part
    assert "outgrown" not in json.loads(dump_process(PROCESS))
    expected = ["outgrown: expected a list of strings, got 3"]
    assert problems_of({"outgrown": 3}) == expected
    assert problems_of({"outgrown": 3}, PROCESS) == expected


def test_motion_is_read_as_it_was_written_and_may_be_absent() -> None:
    motion = SampledMotion(rows=20, even_bits=-1.25)
    whole = dataclasses.replace(MANIFEST, motion=motion)
    assert load(dump(whole), "here") == whole
    assert "motion" not in json.loads(dump(MANIFEST))
    wrong = {"rows": 0, "even_bits": "x"}
    assert problems_of({"motion": wrong}) == [
        "motion.rows: expected an integer of at least 1, got 0",
        'motion.even_bits: expected a number, got "x"',
    ]
    # Other writers may write whole numbers.
    by_others = dataclasses.replace(motion, even_bits=-3)
    found = load(dump(dataclasses.replace(MANIFEST, motion=by_others)), "here").motion
    assert found == by_others
    # A crafted number is no power of two that overflows.
    far = dataclasses.replace(MANIFEST, motion=SampledMotion(rows=1, even_bits=1e9))
    found = load(dump(far), "here").motion
    assert found is not None and bits_for_motion(found.even_bits) == RAW_BITS
    process = dataclasses.replace(PROCESS, motion={"user": motion})
    assert load_process(dump_process(process), "here") == process
    assert problems_of({"motion": {"user": {"rows": 0}}}, PROCESS) == [
        "motion.user.rows: expected an integer of at least 1, got 0",
        "motion.user.even_bits: required key is absent",
    ]


def test_delta_needs_a_parent_and_a_full_has_none() -> None:
    assert problems_of({"parent": None}) == ["parent: a delta needs a parent, got null"]
    assert problems_of({"kind": "full"}) == ["parent: a full checkpoint has no parent"]


@each_of("name", ["", ".", "..", "a/b", "a\\b", "/ckpt/10"])
def test_parent_cannot_be_outside_the_root(name: str) -> None:
    (problem,) = problems_of({"parent.directory": name})
    assert problem.startswith("parent.directory: expected the name of a file or folder")


@each_of("path", ["", "/etc/x", "a//b", "./a", "a/../b", "a\\b", "a/"])
def test_file_cannot_be_outside_the_item(path: str) -> None:
    (problem,) = problems_of({"processes.0.path": path})
    assert problem.startswith("processes[0].path: expected a path below")


@each_of(
    ("changes", "problem"),
    [
        ({"tables.0.leaves": []}, "expected `table` as the first leaf"),
        ({"tables.0.leaves.0.name": "opt"}, "expected `table` as the first leaf"),
        (
            {"tables.0.leaves.1.shape": [7]},
            "leaves.opt.shape: expected 8 rows, got [7]",
        ),
        ({"tables.0.layout.configuration": 3}, "configuration: expected an object"),
        ({"tables.0.rows": 0}, "expected an integer of at least 1, got 0"),
        ({"dense_leaves.0.kind": "blob"}, "expected one of array, scalar, key, text"),
        ({"dense_leaves.1.value": None}, "dense_leaves[1].value"),
        ({"generation": 0}, "generation: expected an integer of at least 1"),
        ({"recorded_clock": True}, "recorded_clock: expected an integer"),
        ({"restores": 1.5}, "restores: expected an integer"),
    ],
)
def test_rules_of_the_manifest_are_checked(
    changes: dict[str, Any], problem: str
) -> None:
    assert any(problem in found for found in problems_of(changes))


@each_of(
    ("changes", "problem"),
    [
        ({"arrays.row_ids.crc32c": [1]}, "expected 2 checksums, got 1"),
        ({"arrays.row_ids.chunk": 0}, "chunk: expected an integer of at least 1"),
        (
            {"arrays.row_ids.compressed": {"codec": "lz4", "bytes": [20, 20]}},
            'compressed.codec: expected one of zstd, blosc, packed_rows, got "lz4"',
        ),
        (
            {"arrays.row_ids.compressed": {"codec": "zstd", "bytes": [20]}},
            "compressed.bytes: expected 2 sizes, got 1",
        ),
        (
            {"arrays.row_ids.compressed": {"codec": "zstd", "bytes": [20, 0]}},
            "compressed.bytes: expected a list of integers of at least 1",
        ),
        (
            {"arrays.row_ids.compressed": "zstd"},
            'arrays.row_ids.compressed: expected an object, got "zstd"',
        ),
        ({"arrays.row_ids": ...}, "array row_ids is not listed"),
        (
            {"arrays.a/b": to_json(PROCESS.arrays["row_ids"])},
            "arrays.a/b: expected the name",
        ),
        (
            {"arrays...": to_json(PROCESS.arrays["row_ids"])},
            "expected the name of a folder",
        ),
        ({"codecs": []}, "codec 0 is not listed"),
        ({"row_ids": []}, "row ids 0 not listed"),
        ({"row_ids.0.count": 0}, "a segment without rows"),
        ({"row_ids.0.form": "list"}, "expected one of all, none, bitmap, gaps"),
        ({"row_ids.0.offset": 2}, "row_ids[0]: outside the array of row ids"),
        ({"tiles.0.box": [0, 8, 0]}, "box: expected start and stop of each dimension"),
        (
            {"tiles.0.box": [0, 8, 4, 4]},
            "box: expected start and stop of each dimension",
        ),
        ({"tiles.0.box": []}, "box: expected start and stop of each dimension"),
    ],
)
def test_rules_of_a_process_manifest_are_checked(
    changes: dict[str, Any], problem: str
) -> None:
    if "arrays..." in changes:
        value = to_json(PROCESS)
        value["arrays"][".."] = changes["arrays..."]
        value["tiles"][0]["box"] = [0, 8, 0, 4]
        with pytest.raises(errors.ManifestError, match=problem):
            load_process(dump_document({"format": PROCESS_FORMAT, **value}), "manifest")
        return
    assert any(problem in found for found in problems_of(changes, PROCESS))
