"""The arrays of a real delta, as they lie in its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flights_course import Course

import cnr_jax as cnr

# At the end of a chunk.
_CRC32C_BYTES = 4


def saved_delta(
    course: Course, bits: int, root: Path
) -> tuple[dict[str, np.ndarray], int]:
    """Trains, saves everything after four fifths of the batches, and a delta at the end.

    Args:
        course: what is trained on.
        bits: of the default codec.
        root: an empty folder.

    Returns:
        Arrays of the delta by name, and its bytes, all but the dense layers'.
    """
    run, reports = course.begin(0), []
    options = cnr.Options(bits=bits, on_save=reports.append)
    tables = course.tables(course.saved(run.state))
    baseline = course.steps * 4 // 5
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for start, stop in ((0, baseline), (baseline, course.steps)):
            course.advance(run, start, stop)
            state = course.saved(run.state)
            manager.save(stop, args=cnr.args.Save(state, run.touched))
        manager.wait_until_finished()
    delta = reports[-1]
    if delta.kind != "delta":
        raise RuntimeError(f"the last save is not a delta: {delta}")
    folder = next(root.glob(f"{course.steps}/*/rows.p*"))
    arrays = {path.name: read_chunks(path) for path in sorted(folder.iterdir())}
    return arrays, delta.total_bytes - delta.dense_bytes


def read_chunks(path: Path) -> np.ndarray:
    """All elements of a stored array, as unsigned integers of the same width.

    Args:
        path: of a one-dimensional zarr v3 array whose chunks end with a CRC-32C.
    """
    metadata = json.loads((path / "zarr.json").read_bytes())
    chunks = sorted((path / "c").iterdir(), key=lambda chunk: int(chunk.name))
    data = b"".join(chunk.read_bytes()[:-_CRC32C_BYTES] for chunk in chunks)
    # Names end with the width: uint8, bfloat16, float32.
    digits = metadata["data_type"].lstrip("abcdefghijklmnopqrstuvwxyz")
    width = int(digits) // 8
    values = np.frombuffer(data, np.dtype(f"<u{width}"))
    return values[: metadata["shape"][0]]
