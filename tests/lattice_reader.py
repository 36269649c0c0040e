"""A second reader of rows that are sums, written from SPEC.md; it shares no code with cnr_jax."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .conftest import unpack


def read(root: Path, step: int, rows: int, dim: int, leaf: str = "table") -> np.ndarray:
    """The rows of a leaf of the one table, of one tile, that a step holds."""
    state: dict[str, np.ndarray] = {
        "integers": np.zeros((rows, dim), np.int64),
        "octaves": np.zeros((rows, dim), np.int64),
        "centre": np.zeros((rows, 1), np.int64),
        "scale": np.ones((rows, 1), np.float32),
        "raw": np.zeros((rows, dim), np.float32),
        "is_raw": np.ones(rows, bool),
    }
    codec: dict[str, Any] = {}
    for item in chain(root, step):
        process = json.loads((item / "manifest.p00000.json").read_bytes())
        (tile,) = (each for each in process["tiles"] if each["leaf"] == leaf)
        for segment in tile["segments"]:
            put(item, process, segment, dim, state)
            named = process["codecs"][segment["codec"]]
            codec = codec if named["name"] == "cnr.raw" else named
    values = values_of(codec, state)
    return np.where(state["is_raw"][:, None], state["raw"], values)


def values_of(codec: dict[str, Any], state: dict[str, np.ndarray]) -> np.ndarray:
    """Section 7."""
    counts = state["integers"].astype(np.float32)
    if codec["name"] == "cnr.lattice":
        return counts * state["scale"]
    places, given = codec["configuration"]["places"], codec["configuration"]
    if codec["name"] == "cnr.octave":
        return powers(state["integers"], state["centre"], places, 24)
    root = powers(state["octaves"], state["centre"], 2 * places, 16)
    return counts / given["steps"] * root


def powers(q: np.ndarray, centre: np.ndarray, places: int, bits: int) -> np.ndarray:
    """2 to the power of places, of which so many are an octave, where q is not zero."""
    p = np.clip(centre + q - (q > 0), -126 * places, 128 * places - 1)
    most = 2.0 ** (bits - 1)
    mantissa = np.round(np.exp2(p % places / places) * most) / most
    return np.where(q == 0, 0, np.ldexp(mantissa, p // places)).astype(np.float32)


def chain(root: Path, step: int) -> list[Path]:
    """Items of a chain, the full one first."""
    item = root / str(step) / "default"
    parent = json.loads((item / "manifest.json").read_bytes())["parent"]
    above = chain(root, int(parent["directory"])) if parent else []
    return [*above, item]


def put(
    item: Path,
    process: dict[str, Any],
    segment: dict[str, Any],
    dim: int,
    state: dict[str, np.ndarray],
) -> None:
    """Sections 6.4 and 7."""
    codec = process["codecs"][segment["codec"]]
    ids = positions(item, process, segment["row_ids"], len(state["scale"]))

    def part(name: str, width: int) -> np.ndarray:
        place = segment["parts"][name]
        array = read_array(item, process, place["array"])
        return array[place["offset"] :][: len(ids) * width].reshape(-1, width)

    if codec["name"] == "cnr.raw":
        state["raw"][ids], state["is_raw"][ids] = part("rows", dim), True
        return
    if codec["name"] in ("cnr.octave", "cnr.unit"):
        put_moments(codec["name"], segment, ids, part, dim, state)
        return
    assert codec["name"] == "cnr.lattice"
    stored = part("integers", dim)
    modulus = 1 << 8 * stored.itemsize
    integers, scale = stored.astype(np.int64), part("scale", 1)
    if is_added(segment):
        below, before = state["integers"][ids], state["scale"][ids]
        parts = (below.astype(stored.dtype), before)
        compare(segment, [x.tobytes() for x in parts])
        for i, (old, new) in enumerate(zip(before[:, 0], scale[:, 0], strict=True)):
            n = int(np.log2(old / new))
            if n >= 0:
                below[i] *= 2**n
            else:
                below[i] = (below[i] + 2 ** (-n - 1)) // 2**-n
        integers = integers + below
        half = modulus // 2
        integers = (integers + half) % modulus - half
    state["integers"][ids], state["scale"][ids] = integers, scale
    state["is_raw"][ids] = False


def is_added(segment: dict[str, Any]) -> bool:
    return "below" in segment or "below_crc32" in segment


def compare(segment: dict[str, Any], parts: list[bytes]) -> None:
    """Section 7: what a segment is added to is what it was taken from."""
    if "below_crc32" in segment:
        digits = [f"{zlib.crc32(data):08x}" for data in parts]
        assert "".join(digits) == segment["below_crc32"]
        return
    digits = [hashlib.blake2b(data, digest_size=4).hexdigest() for data in parts]
    assert "".join(digits) == segment["below"]


def put_moments(
    name: str,
    segment: dict[str, Any],
    ids: np.ndarray,
    part: Any,
    dim: int,
    state: dict[str, np.ndarray],
) -> None:
    """Section 7: integers and centres of squares are added, counts of means are not."""
    octaves = "integers" if name == "cnr.octave" else "octaves"
    widths = {octaves: dim, "centre": 1} if dim > 1 else {octaves: dim}
    parts = [b"", b""]
    for number, each in enumerate(widths):
        found = part(each, widths[each]).astype(np.int64)
        if is_added(segment):
            below = state[each][ids]
            parts[number] = below.astype(np.int16).tobytes()
            found = (found + below + 2**15) % 2**16 - 2**15
        state[each][ids] = found
    if is_added(segment):
        compare(segment, parts)
    if name == "cnr.unit":
        state["integers"][ids] = part("integers", dim)
    state["is_raw"][ids] = False


def positions(item: Path, process: dict[str, Any], index: int, rows: int) -> np.ndarray:
    """Section 6.3."""
    ids = process["row_ids"][index]
    if ids["form"] == "all":
        return np.arange(rows)
    data = read_array(item, process, "row_ids")[ids["offset"] :][: ids["bytes"]]
    if ids["form"] == "bitmap":
        return np.flatnonzero(np.unpackbits(data, bitorder="little")[:rows])
    assert ids["form"] == "gaps"
    gaps, value, shift = list[int](), 0, 0
    for byte in data.tolist():
        value, shift = value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            gaps.append(value)
            value = shift = 0
    return np.cumsum(np.array(gaps) + 1) - 1


def read_array(item: Path, process: dict[str, Any], name: str) -> np.ndarray:
    """Section 6.2, of one chunk."""
    entry = process["arrays"][name]
    (path,) = (item / "rows.p00000" / name / "c").iterdir()
    data, dtype = path.read_bytes()[:-4], np.dtype(entry["dtype"])
    codec = entry.get("compressed", {}).get("codec")
    if codec == "packed_rows":
        return unpack_chunk(data, entry["length"], dtype)
    if codec is not None:
        data = unpack(data, entry["chunk"] * dtype.itemsize, codec)
    return np.frombuffer(data, dtype)[: entry["length"]]


def unpack_chunk(data: bytes, elements: int, dtype: np.dtype) -> np.ndarray:
    """Section 6.6."""
    import zstandard

    at = 0

    def take(form: str) -> Any:
        nonlocal at
        found = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return found if len(found) > 1 else found[0]

    def frame(size: int) -> np.ndarray:
        found = (
            zstandard.ZstdDecompressor().decompressobj().decompress(take(f"{size}s"))
        )
        return np.frombuffer(found, np.uint8)

    def nibbles(found: np.ndarray, count: int) -> list[int]:
        return [int(x) >> shift & 15 for x in found for shift in (0, 4)][:count]

    width, groups, most, size = take("IBBI")
    rows = elements // width
    columns = [0] * width
    if groups > 1:
        each = np.array([take("B") for _ in range(-(-width // 2))], np.uint8)
        columns = nibbles(each, width)
    classes = nibbles(frame(size), rows)
    assert max(classes) == most
    out = np.zeros((rows, width), dtype)
    for one in sorted(set(classes) - {0}):
        ours = [i for i, each in enumerate(classes) if each == one]
        for group in range(groups):
            of_group = [i for i, each in enumerate(columns) if each == group]
            bits, symbol_bytes, escape_bytes = take("BII")
            symbols = frame(symbol_bytes)
            escapes = frame(escape_bytes) if escape_bytes else np.zeros(0, np.uint8)
            count = len(ours) * len(of_group)
            if bits == 8 * dtype.itemsize:
                values = integers(symbols, dtype)
            else:
                shifts = np.arange(0, 8, bits)
                codes = (symbols[:, None] >> shifts & 2**bits - 1).reshape(-1)[:count]
                values = codes.astype(np.int64) - (2 ** (bits - 1) - 1)
                values[codes == 2**bits - 1] = integers(escapes, dtype)
            for i, column in enumerate(of_group):
                out[ours, column] = values[i * len(ours) : (i + 1) * len(ours)]
    assert at == len(data)
    return out.reshape(-1)


def integers(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Of int16 all lower bytes come first."""
    planes = data.reshape(dtype.itemsize, -1).T
    return np.frombuffer(planes.tobytes(), dtype).astype(np.int64)
