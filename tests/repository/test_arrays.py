from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_jax import errors
from cnr_jax.format.tiles import ArrayEntry
from cnr_jax.repository import rows_writer
from cnr_jax.repository.store.arrays import ArrayReader, ArrayWriter, chunk_length
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.repository.store.local import LocalStore
from cnr_jax.rows.codecs import Raw

LIMIT = 64


@pytest.fixture(autouse=True)
def small_chunks(tiny_limits: Any) -> None:
    """64 bytes a chunk of exact arrays, 16 of others, so that small arrays have many."""
    tiny_limits(stored_chunk_bytes=LIMIT, compressed_least_bytes=0)


def write(
    path: Path,
    *pieces: np.ndarray,
    exact: bool = True,
    length: int = 0,
    compression: str | None = None,
) -> ArrayEntry:
    total = length or sum(piece.size for piece in pieces)
    writer = ArrayWriter(
        path, pieces[0].dtype.name, total, exact=exact, compression=compression
    )
    for piece in pieces:
        writer.append(piece)
    entry = writer.finish()
    assert entry is not None
    return entry


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


@pytest.fixture(autouse=True, params=["by TensorStore", "in memory"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who writes and reads files: where TensorStore reaches no store, it makes them in memory."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in memory":
            patch.setattr(LocalStore, "kvstore", lambda *_: None)
            patch.setattr(LocalStore, "write", _written_with_folders)
        yield request.param


def _written_with_folders(
    self: LocalStore, path: Path, data: bytes, *, replaces: bool
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


both_ways = pytest.mark.parametrize("compression", [None, "zstd"])


@both_ways
@pytest.mark.parametrize(
    "dtype",
    "bool int8 uint16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn"
    " complex64".split(),
)
def test_values_come_back_bit_for_bit_in_every_dtype(
    tmp_path: Path, dtype: str, compression: str | None
) -> None:
    item = numpy_dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, 50 * item.itemsize, np.uint8)
    values = (raw & 1).view(item) if dtype == "bool" else raw.view(item)
    entry = write(tmp_path / "a", values, compression=compression)
    assert (entry.compressed is not None) == (compression is not None)
    assert ArrayReader(tmp_path / "a", entry).read(0, 50).tobytes() == values.tobytes()


@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    exact=st.booleans(),
    compression=st.sampled_from([None, "zstd"]),
    spare=st.integers(0, 70),
    data=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_any_slice_of_any_appended_pieces_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    exact: bool,
    compression: str | None,
    spare: int,
    data: st.DataObject,
) -> None:
    total = sum(sizes)
    values = np.arange(total, dtype=np.int32) * 77
    pieces = np.split(values, np.cumsum(sizes)[:-1])
    path = tmp_path_factory.mktemp("array") / "a"
    length = total if exact else total + spare
    writer = ArrayWriter(
        path,
        "int32",
        max(length, 1) if not exact else length,
        exact=exact,
        compression=compression,
    )
    for piece in pieces:
        writer.append(piece)
    assert writer.position == total
    entry = writer.finish()
    if total == 0:
        assert entry is None and not path.exists()
        return
    assert entry is not None and entry.length == total
    reader = ArrayReader(path, entry)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert reader.read(start, stop).tolist() == values[start:stop].tolist()


@given(length=st.integers(1, 500), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_chunks_are_within_the_limit_and_padded_by_less_than_an_element_each(
    length: int, itemsize: int
) -> None:
    chunk = chunk_length(length, itemsize, LIMIT)
    chunks = -(-length // chunk)
    assert chunk * itemsize <= LIMIT + itemsize - 1
    assert chunks * chunk - length < chunks


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_chunk_boundaries_are_where_the_entry_says(tmp_path: Path, length: int) -> None:
    values = np.arange(length, dtype=np.int32)
    entry = write(tmp_path / "a", values)
    files = sorted((tmp_path / "a" / "c").iterdir(), key=lambda path: int(path.name))
    assert len(files) == len(entry.crc32c) == -(-length // entry.chunk)
    for i, file in enumerate(files):
        data = file.read_bytes()
        assert len(data) == entry.chunk * 4 + 4
        part = values[i * entry.chunk : (i + 1) * entry.chunk]
        assert data[: part.nbytes] == part.tobytes()
        assert int.from_bytes(data[-4:], "little") == entry.crc32c[i]


def test_entry_describes_the_metadata_file(tmp_path: Path) -> None:
    entry = write(tmp_path / "a", np.arange(40, dtype=np.int32))
    data = (tmp_path / "a" / "zarr.json").read_bytes()
    assert entry.metadata_bytes == len(data)
    assert entry.metadata_sha256 == hashlib.sha256(data).hexdigest()
    assert json.loads(data)["shape"] == [40]


def test_array_shorter_than_announced_is_cut(tmp_path: Path) -> None:
    values = np.arange(11, dtype=np.int32)
    entry = write(tmp_path / "a", values, exact=False, length=1000)
    assert (entry.length, entry.chunk, len(entry.crc32c)) == (11, 4, 3)
    assert json.loads((tmp_path / "a" / "zarr.json").read_bytes())["shape"] == [11]
    assert ArrayReader(tmp_path / "a", entry).read(0, 11).tolist() == values.tolist()


def test_short_array_of_unknown_length_takes_only_its_own_bytes(tmp_path: Path) -> None:
    entry = write(
        tmp_path / "a", np.arange(3, dtype=np.int32), exact=False, length=1000
    )
    assert (entry.length, entry.chunk) == (3, 3)


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_appended_writes_nothing(tmp_path: Path, exact: bool) -> None:
    writer = ArrayWriter(tmp_path / "a", "int32", 0 if exact else 9, exact=exact)
    writer.append(np.empty((0, 4), np.int32))
    assert writer.finish() is None
    assert list(tmp_path.iterdir()) == []


def test_chunks_of_zeros_are_stored(tmp_path: Path) -> None:
    entry = write(tmp_path / "a", np.zeros(40, np.int32))
    assert len(list((tmp_path / "a" / "c").iterdir())) == len(entry.crc32c) == 3


def test_appended_values_are_copied(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.int32)
    writer = ArrayWriter(tmp_path / "a", "int32", 10)
    writer.append(values[:5])
    values[:] = -1
    writer.append(np.arange(5, 10, dtype=np.int32))
    entry = writer.finish()
    assert entry is not None
    assert ArrayReader(tmp_path / "a", entry).read(0, 10).tolist() == list(range(10))


def test_rows_are_flattened_in_order_whatever_their_strides(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4).T
    entry = write(tmp_path / "a", values)
    got = ArrayReader(tmp_path / "a", entry).read(0, 12)
    assert got.tolist() == values.reshape(-1).tolist()


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "a", "float32", 2)
    with pytest.raises(TypeError, match="float64, not float32"):
        writer.append(np.zeros(2))


def test_exact_array_that_is_short_is_refused(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "a", "int32", 40)
    writer.append(np.zeros(39, np.int32))
    with pytest.raises(RuntimeError, match="39 of 40"):
        writer.finish()


def test_unknown_dtype_is_a_format_error() -> None:
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    with pytest.raises(errors.FormatError, match="float99"):
        numpy_dtype("float99")


@pytest.mark.parametrize("bounds", [(-1, 3), (0, 41), (30, 20)])
def test_slice_outside_the_array_is_a_format_error(
    tmp_path: Path, bounds: tuple[int, int]
) -> None:
    entry = write(tmp_path / "a", np.arange(40, dtype=np.int32))
    with pytest.raises(errors.FormatError, match="outside"):
        ArrayReader(tmp_path / "a", entry).read(*bounds)


@both_ways
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("at", [0, -5, -1])
def test_flipped_bit_is_detected_with_and_without_the_manifest(
    tmp_path: Path, verify: bool, at: int, compression: str | None
) -> None:
    values = np.arange(40, dtype=np.int32)
    entry = write(tmp_path / "a", values, compression=compression)
    flip(tmp_path / "a" / "c" / "1", at)
    reader = ArrayReader(tmp_path / "a", entry, verify=verify)
    assert reader.read(0, entry.chunk)[0] == 0
    with pytest.raises(errors.IntegrityError, match=str(tmp_path / "a")):
        reader.read(0, 40)


@both_ways
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [None, 0, 3, 15])
def test_missing_or_truncated_chunk_is_never_read_as_zeros(
    tmp_path: Path, verify: bool, size: int | None, compression: str | None
) -> None:
    entry = write(tmp_path / "a", np.zeros(40, np.int32), compression=compression)
    file = tmp_path / "a" / "c" / "2"
    data = file.read_bytes()
    assert len(data) > 15
    file.unlink()
    if size is not None:
        file.write_bytes(data[:size])
    with pytest.raises(errors.IntegrityError, match=str(tmp_path / "a")):
        ArrayReader(tmp_path / "a", entry, verify=verify).read(0, 40)


def test_whole_chunk_of_another_place_is_detected_by_the_manifest(
    tmp_path: Path,
) -> None:
    entry = write(tmp_path / "a", np.arange(48, dtype=np.int32))
    first, second = (tmp_path / "a" / "c" / name for name in "01")
    first.write_bytes(second.read_bytes())
    with pytest.raises(errors.IntegrityError, match="chunk 0") as caught:
        ArrayReader(tmp_path / "a", entry).read(3, 5)
    assert caught.value.kind == "foreign_chunk"


def test_metadata_file_is_not_needed_to_read(tmp_path: Path) -> None:
    entry = write(tmp_path / "a", np.arange(40, dtype=np.int32))
    (tmp_path / "a" / "zarr.json").unlink()
    assert ArrayReader(tmp_path / "a", entry).read(39, 40).tolist() == [39]


def test_missing_array_is_an_integrity_error(tmp_path: Path) -> None:
    entry = write(tmp_path / "a", np.arange(40, dtype=np.int32))
    with pytest.raises(errors.IntegrityError, match="other"):
        ArrayReader(tmp_path / "other", entry).read(0, 1)


def test_arrays_that_are_being_made_are_waited_for_where_another_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hears of the error removes the folder, and may use its name again."""
    stopped: list[str] = []
    stop = ArrayWriter.stop

    def noting(self: ArrayWriter) -> None:
        stop(self)
        stopped.append(self._path.name)

    monkeypatch.setattr(ArrayWriter, "stop", noting)
    monkeypatch.setattr(rows_writer, "DenseWriter", lambda *_, **__: 1 / 0)
    plan = rows_writer.RunPlan(
        table="user",
        leaf="table",
        box=((0, 4), (0, 2)),
        positions=None,
        codec=Raw(),
        dtype=np.dtype(np.float32),
        count=4,
    )
    with pytest.raises(ZeroDivisionError):
        rows_writer.RowsWriter(tmp_path, "0" * 32, 0, [plan])
    assert stopped == ["raw.rows.float32"]
