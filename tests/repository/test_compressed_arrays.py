"""Compressed chunks: what lies on storage, and that nothing of it passes unchecked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from cnr_jax import errors
from cnr_jax.format.tiles import ArrayEntry
from cnr_jax.repository.store import arrays
from cnr_jax.repository.store.arrays import ArrayReader, ArrayWriter
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.repository.store.kept_chunks import KeptChunks

from ..conftest import unpack

MAGIC = bytes.fromhex("28b52ffd")


def codes(count: int = 2000) -> np.ndarray:
    """Bytes of which some are more frequent: what zstd packs are their frequencies."""
    found = np.random.default_rng(0).normal(128, 12, count)
    return found.astype(np.uint8)


def write(path: Path, values: np.ndarray, compression: str | None = "zstd") -> Any:
    writer = ArrayWriter(path, values.dtype.name, values.size, compression=compression)
    writer.append(values)
    return writer.finish()


def unpacked(frame: bytes, size: int) -> bytes | None:
    """What zstd alone makes of bytes that should be a frame; None: it refuses them."""
    try:
        return unpack(frame, size)
    except ValueError:
        return None


def flips(data: bytes, every: int) -> Iterator[bytes]:
    for bit in range(0, len(data) * 8, every):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def test_a_chunk_is_a_frame_and_the_checksum_of_the_frame(tmp_path: Path) -> None:
    values = codes()
    entry = write(tmp_path / "a", values)
    data = (tmp_path / "a" / "c" / "0").read_bytes()
    assert data.startswith(MAGIC) and len(data) < 0.9 * values.size
    assert entry.compressed.bytes == (len(data),)
    assert entry.crc32c == (int.from_bytes(data[-4:], "little"),)
    assert unpacked(data[:-4], values.size) == values.tobytes()


def test_other_programs_read_it_by_its_metadata(tmp_path: Path) -> None:
    values = np.repeat(np.arange(300, dtype=np.float32), 7)
    write(tmp_path / "a", values)
    kvstore = {"driver": "file", "path": f"{tmp_path}/a/"}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    np.testing.assert_array_equal(array.read().result(), values)


def test_a_bit_that_zstd_takes_for_data_is_refused(tmp_path: Path) -> None:
    values = codes()
    entry = write(tmp_path / "a", values)
    file = tmp_path / "a" / "c" / "0"
    data = file.read_bytes()
    passed = 0
    for flipped in flips(data, 149):
        found = unpacked(flipped[:-4], values.size)
        passed += found not in (None, values.tobytes())
        file.write_bytes(flipped)
        for verify in (True, False):
            kept = KeptChunks(cache_bytes=0)
            reader = ArrayReader(tmp_path / "a", entry, verify=verify, kept=kept)
            with pytest.raises(errors.IntegrityError, match=str(tmp_path / "a")):
                reader.read(0, values.size)
    assert passed > 30, "zstd alone refused them"


@pytest.mark.parametrize("content", ["no frame", "more", "fewer", "a frame cut off"])
def test_a_frame_of_a_faulty_writer_is_refused_though_its_checksum_is_right(
    tmp_path: Path, content: str
) -> None:
    """It is named by the manifest, so only what is in it can tell."""
    values = codes()
    entry = write(tmp_path / "a", values)
    file = tmp_path / "a" / "c" / "0"
    frame = file.read_bytes()[:-4]
    if content in ("more", "fewer"):
        count = values.size + (1 if content == "more" else -1)
        write(tmp_path / "other", codes(count))
        data = (tmp_path / "other" / "c" / "0").read_bytes()
    else:
        wrong = frame[:-20] if content == "a frame cut off" else b"\0" * 50
        write(tmp_path / "other", np.frombuffer(wrong, np.uint8), None)
        data = (tmp_path / "other" / "c" / "0").read_bytes()
        assert data[:-4] == wrong
    file.write_bytes(data)
    assert entry.compressed is not None
    entry = dataclasses.replace(
        entry,
        crc32c=(int.from_bytes(data[-4:], "little"),),
        compressed=dataclasses.replace(entry.compressed, bytes=(len(data),)),
    )
    with pytest.raises(errors.IntegrityError, match=f"{tmp_path}/a") as caught:
        ArrayReader(tmp_path / "a", entry).read(0, values.size)
    assert caught.value.kind == "data_damaged"


def test_arrays_too_short_to_gain_anything_are_as_without(tmp_path: Path) -> None:
    least = arrays.COMPRESSED_LEAST_BYTES
    values = np.zeros(least // 4, np.int32)
    assert write(tmp_path / "a", values).compressed is not None
    short = write(tmp_path / "b", values[1:])
    assert short == write(tmp_path / "c", values[1:], None)
    assert short.compressed is None


def test_an_array_whose_length_was_not_known_is_judged_by_what_came(
    tmp_path: Path,
) -> None:
    def entry_of(path: Path, count: int) -> ArrayEntry:
        writer = ArrayWriter(path, "uint8", 1 << 20, exact=False, compression="zstd")
        writer.append(np.zeros(count, np.uint8))
        entry = writer.finish()
        assert entry is not None
        return entry

    assert entry_of(tmp_path / "a", 5000).compressed is not None
    assert entry_of(tmp_path / "b", 50).compressed is None


def test_what_cannot_be_packed_takes_hardly_more(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    entry = write(tmp_path / "a", values)
    assert sum(entry.compressed.bytes) < 1.0002 * values.size
    np.testing.assert_array_equal(
        ArrayReader(tmp_path / "a", entry).read(9, 70_000), values[9:70_000]
    )


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int32"]
)
def test_numbers_of_several_bytes_are_packed_by_their_bytes_apart(
    tmp_path: Path, dtype: str
) -> None:
    """So that what repeats, which are the high ones, lies side by side."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=1 << 18) * (100 if dtype == "int32" else 0.01)
    values = rows.astype(numpy_dtype(dtype))
    writer = ArrayWriter(tmp_path / "rows", dtype, values.size, compression="zstd")
    writer.append(values)
    entry = writer.finish()
    assert entry is not None and entry.compressed is not None
    assert entry.compressed.codec == "blosc"
    read = ArrayReader(tmp_path / "rows", entry).read(0, values.size)
    assert read.dtype == values.dtype and read.tobytes() == values.tobytes()
    together = write(tmp_path / "bytes", values.view(np.uint8))
    assert together.compressed.codec == "zstd"
    if dtype != "int32":  # whose few high bytes zstd finds by itself
        assert sum(entry.compressed.bytes) < 0.95 * sum(together.compressed.bytes)


def test_a_chunk_of_equal_numbers_is_not_taken_for_one_that_promises_too_much(
    tmp_path: Path,
) -> None:
    for dtype in ("float16", "float32", "float64"):
        values = np.zeros((4 << 20) // np.dtype(dtype).itemsize, dtype)
        path = tmp_path / dtype
        writer = ArrayWriter(path, dtype, values.size, compression="zstd")
        writer.append(values)
        entry = writer.finish()
        assert entry is not None
        assert not ArrayReader(path, entry).read(0, values.size).any()
