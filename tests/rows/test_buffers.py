"""Memory of chunks is used again, and never while anything still refers to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax.rows.codecs import Asymmetric, BFloat16, Codec, Raw
from cnr_jax.rows.gather import host
from cnr_jax.rows.gather.chunk import HostRows
from cnr_jax.rows.gather.encode import encode_chunks
from cnr_jax.rows.gather.host import Buffers
from cnr_jax.rows.shards import row_words
from cnr_jax.rows.tiling import host_device

from ..conftest import each_of

ROWS, WIDTH = 64, 6
SHAPE, FLOAT = (ROWS, WIDTH), np.dtype(np.float32)
BYTES = ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def small_chunks(tiny_limits: Any) -> None:
    tiny_limits(gathered_small_rows=8, gathered_chunk_bytes=BYTES)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_once_the_last_array_over_it_is_gone() -> None:
    buffers = Buffers(10 * BYTES)
    rows = buffers.empty(SHAPE, FLOAT)
    assert address(rows) % 64 == 0
    first = address(rows)
    part = rows[3:5].view(np.uint32)
    del rows
    assert buffers.idle_bytes == 0
    other = buffers.empty(SHAPE, FLOAT)
    assert address(other) != first
    del part
    assert buffers.idle_bytes == BYTES
    again = buffers.empty((ROWS - 10, WIDTH), FLOAT)
    assert address(again) == first and again.shape == (ROWS - 10, WIDTH)


def test_a_jax_array_over_memory_keeps_it() -> None:
    buffers = Buffers(10 * BYTES)
    rows = buffers.empty(SHAPE, FLOAT)
    rows[...] = np.arange(rows.size).reshape(SHAPE)
    on_device = jax.device_put(rows, host_device())
    first = address(rows)
    # Else the test says nothing: the array was copied.
    assert on_device.unsafe_buffer_pointer() == first
    del rows
    others = [buffers.empty(SHAPE, FLOAT) for _ in range(3)]
    for other in others:
        other[...] = -1
    assert first not in map(address, others)
    assert np.array_equal(np.asarray(on_device).ravel(), np.arange(ROWS * WIDTH))


def test_no_more_idles_than_is_to_be_kept() -> None:
    buffers = Buffers(2 * BYTES)
    lent = [buffers.empty(SHAPE, FLOAT) for _ in range(5)]
    lent.clear()
    assert buffers.idle_bytes == 2 * BYTES


def test_nothing_is_kept_after_close() -> None:
    buffers = Buffers(2 * BYTES)
    late = buffers.empty(SHAPE, FLOAT)
    del [buffers.empty(SHAPE, FLOAT)][:]
    assert buffers.idle_bytes == BYTES
    buffers.close()
    del late
    assert buffers.idle_bytes == 0


@pytest.mark.parametrize("shape", [(2 * ROWS, WIDTH), (4, WIDTH)])
def test_arrays_of_other_sizes_are_not_kept(shape: tuple[int, int]) -> None:
    buffers = Buffers(10 * BYTES)
    rows = buffers.empty(shape, FLOAT)
    assert rows.shape == shape
    del rows
    assert buffers.idle_bytes == 0


def rows_of(values: np.ndarray, codec: Codec) -> HostRows:
    return HostRows(
        codec=codec,
        dtype=values.dtype,
        width=values.shape[1],
        words=[row_words(np.asarray(jnp.asarray(values)))],
        firsts=[0],
        positions=[None],
        counts=[len(values)],
    )


def halves(codec: Codec, values: np.ndarray, buffers: Buffers) -> Iterator[np.ndarray]:
    """What the rows of one save are on their way to a file."""
    chunks = host.gather_chunks([rows_of(values, codec)], buffers)
    for _, encoded in encode_chunks(chunks, host_device()):
        yield from encoded.parts.values()


@each_of("codec", [Raw(), Asymmetric(bits=4), BFloat16()])
@each_of("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_still_to_be_written_survives_the_next_save(
    codec: Codec, dtype: jnp.dtype
) -> None:
    rng = np.random.default_rng(0)
    width = WIDTH * 4 // np.dtype(dtype).itemsize
    values = [rng.normal(size=(5 * ROWS, width)).astype(dtype) for _ in range(3)]
    buffers = Buffers(100 * BYTES)
    held = [list(halves(codec, rows, buffers)) for rows in values]
    alone = [list(halves(codec, rows, Buffers(0))) for rows in values]
    for some, others in zip(held, alone, strict=True):
        for part, other in zip(some, others, strict=True):
            assert part.tobytes() == other.tobytes()


@pytest.mark.parametrize("keep", [True, False])
def test_saves_share_memory_unless_told_not_to(tmp_path: Path, keep: bool) -> None:
    state = {"table": jnp.zeros((10 * ROWS, WIDTH), jnp.float32)}
    tables = cnr.find_tables(state, {"t": "table"})
    options = cnr.Options(
        codec="raw", policy=cnr.Full(), tracking="fingerprint", keep_staging=keep
    )
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(3):
            state = {"table": state["table"] + 1.5}
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
        gc.collect()
        buffers = manager._handler._launcher._buffers
        assert (buffers.idle_bytes > 0) == keep
        assert buffers.idle_bytes <= 10 * BYTES
        for step in range(3):
            restored = manager.restore(step, args=cnr.args.Restore(state)).state
            assert (np.asarray(restored["table"]) == 1.5 * (step + 1)).all()
    assert buffers.idle_bytes == 0
