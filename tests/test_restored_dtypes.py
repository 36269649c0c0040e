"""A leaf of each dtype for each kind, restored each way into each dtype: no value changes unasked.

As a program it saves the checkpoints, with 64 bits, and restores them; the test restores them in
this process, without.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # has numpy know bfloat16 and float8 by name  # noqa: F401
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.repository.dtypes import holds_all

ROWS = 64
# Rows can be of these, and dense leaves of more.
ROW_DTYPES = """
bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn float8_e3m4
float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz bfloat16 float16
float32 float64
""".split()
DTYPES = [*ROW_DTYPES, "float8_e8m0fnu", "complex64", "complex128"]
POINTS = ("bool", "int4", "uint64", "bfloat16", "float64", "complex64")
WIDE = [np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")]
NUMBERS: dict[str, bool | int | float] = {
    "flag": True,
    "count": 7,
    "large": 6_000_000_000,
    "huge": 2**64 - 1,
    "least": -(2**63),
    "half": 0.5,
    "tenth": 0.1,
}
# Those that some dtypes take.
TAKEN = {
    bool: "flag",
    int: "flag count large huge least",
    float: "flag count large half tenth",
    "int32": "flag count",
    "uint64": "flag count large huge",
    "float16": "flag count half",
    "complex64": "flag count half",
}
ROOTS = ("rows", "dense", "adopted")
State = dict[str, Any]


def values(name: str) -> np.ndarray:
    """All values of a dtype of up to 16 bits, of others some and the extremes; `[ROWS, n]`."""
    dtype, rng = np.dtype(name), np.random.default_rng(1)
    if name in ("bool", "int2", "int4"):
        least, count = {"bool": (0, 2), "int2": (-2, 4), "int4": (-8, 16)}[name]
        found = (np.arange(ROWS) % count + least).astype(dtype)
    elif dtype.itemsize <= 2:
        bits = 4 if name == "float4_e2m1fn" else 8 * dtype.itemsize
        found = np.arange(max(ROWS, 2**bits)) % 2**bits
        found = found.astype(f"uint{8 * dtype.itemsize}").view(dtype)
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        found = rng.integers(info.min, info.max, 2 * ROWS, dtype, endpoint=True)
        found[:3] = info.min, info.max, info.max - 1
    else:
        part = np.dtype(f"float{4 * dtype.itemsize}" if dtype.kind == "c" else dtype)
        info = np.finfo(part)
        found = rng.normal(size=4 * ROWS).astype(part)
        some = [info.max, info.min, info.smallest_normal, 0.0, -0.0, np.inf, np.nan]
        found[: len(some)] = some
        found = found.view(dtype)
    return found.reshape(ROWS, -1)


def whole_state(root: str, put: Any = jnp.asarray) -> State:
    """What a root holds, its arrays made by `put`."""
    hosts = DTYPES if root == "dense" else POINTS
    state = {
        "array": {name: put(values(name)) for name in DTYPES},
        "host": {name: values(name) for name in hosts},
        "point": {name: put(values(name)[-1, -1]) for name in POINTS},
        "alike": {
            "-0": put(np.full(9, -0.0, np.float32)),
            "NaN": put(np.full(9, np.nan, np.float32)),
        },
        "number": dict(NUMBERS),
        "key": jax.random.key(5),
        "text": "as it is",
    }
    if root != "dense":
        state["table"] = {name: put(values(name)) for name in ROW_DTYPES}
    if root == "rows":
        state["slot"] = {name: put(values(name)) for name in DTYPES}
        state["slotted"] = put(np.ones((ROWS, 2), np.float32))
    return state


def tables_of(state: State) -> cnr.Tables:
    spec = {f"of {n}": cnr.TableSpec(f"table/{n}", slots=[]) for n in ROW_DTYPES}
    slots = [f"slot/{name}" for name in DTYPES]
    slotted = cnr.TableSpec("slotted", slots=slots)
    return cnr.find_tables(state, {**spec, "slotted": slotted})


def save(folder: Path) -> None:
    options = cnr.Options(codec="raw", tracking="recorded", audit_bytes=0)
    for root in ("rows", "dense"):
        state = whole_state(root)
        tables = tables_of(state) if root == "rows" else cnr.Tables({})
        touched = cnr.init_touched(state, tables)
        with cnr.CheckpointManager(
            folder / root, tables=tables, options=options
        ) as manager:
            manager.save(1, args=cnr.args.Save(state, touched))
    with ocp.CheckpointManager(folder / "adopted") as plain:
        plain.save(1, args=ocp.args.PyTreeSave(whole_state("adopted")))


def leaves_of(state: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(state)[0]
    return {"/".join(str(k.key) for k in keys): leaf for keys, leaf in found}


def part_of(state: State, paths: Collection[str]) -> State:
    """Those leaves of a state that have the given paths."""
    found: State = {}
    for path, leaf in leaves_of(state).items():
        if path in paths:
            *above, last = path.split("/")
            inner = found
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = leaf
    return found


def is_row(path: str) -> bool:
    return path.startswith(("table", "slot"))


def restored(folder: Path, state: State | None = None, **kwargs: Any) -> dict[str, Any]:
    options = cnr.Options(adopt=folder.name == "adopted")
    tables = None
    if folder.name == "adopted" and state and "table" in state:
        # Of what plain Orbax saved nobody else knows which leaves are tables.
        spec = {
            name: cnr.TableSpec(f"table/{name}", slots=[])
            for name, leaf in state["table"].items()
            if hasattr(leaf, "sharding") and leaf.dtype.name in ROW_DTYPES
        }
        tables = cnr.find_tables(state, spec) if spec else None
    with cnr.CheckpointManager(folder, options=options) as manager:
        args = cnr.args.Restore(state, tables, **kwargs)
        return leaves_of(manager.restore(1, args=args).state)


def refused(folder: Path, state: State | None, **kwargs: Any) -> set[str]:
    """The leaves that a restore names because their values would change."""
    try:
        restored(folder, state, **kwargs)
    except errors.StateMismatchError as error:
        _, *lines = str(error).splitlines()
        assert "cnr.args.Restore(..., cast=True)" in lines.pop()
        assert all("in the checkpoint" in x and "in the state" in x for x in lines)
        return {line.strip().split(":")[0] for line in lines}
    return set()


def is_kept(stored: Any, found: Any) -> bool:
    """Whether all values are the same, and of one dtype all bits of them."""
    if isinstance(stored, str):
        return stored == found
    if jnp.issubdtype(getattr(stored, "dtype", np.int8), jax.dtypes.prng_key):
        stored, found = jax.random.key_data(stored), jax.random.key_data(found)
    a, b = np.asarray(stored), np.asarray(found)
    assert a.shape == b.shape
    if a.dtype == b.dtype:
        return a.tobytes() == b.tobytes()
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return a.tolist() == b.tolist()
    # Integers of 64 bits, which this would round, are taken by none but such.
    with np.errstate(invalid="ignore"):  # of NaN that signal
        a, b = (np.atleast_1d(x).astype(np.complex128) for x in (a, b))
    a, b = a.view(np.float64), b.view(np.float64)
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))
    return bool(same.all())


def check_kept(stored: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    assert set(found) == set(stored)
    assert not [path for path in stored if not is_kept(stored[path], found[path])]


def check_as_saved(folder: Path) -> None:
    """Restores each leaf as it was: abstract, concrete, in part, and without a state."""
    x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    with np.errstate(over="ignore"):  # where jax cuts 64 bits
        concrete = whole_state(folder.name)
    stored = leaves_of(whole_state(folder.name, np.asarray))
    on_host = {p for p, x in leaves_of(concrete).items() if isinstance(x, np.ndarray)}
    wide = {p for p, x in stored.items() if hasattr(x, "dtype") and x.dtype in WIDE}

    def abstract(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    shapes = jax.tree.map(abstract, whole_state(folder.name, np.asarray))
    for state, gone in ((concrete, wide - on_host), (shapes, wide)):
        gone = set() if x64 else gone
        assert refused(folder, state) == gone
        rest = {path: leaf for path, leaf in stored.items() if path not in gone}
        found = restored(folder, part_of(state, rest), partial=True)
        check_kept(rest, found)
    if folder.name == "rows" and not x64:
        assert refused(folder, None) == {path for path in wide if is_row(path)}
    else:
        check_kept(stored, restored(folder))


def check_other_dtypes(folder: Path, nth: int) -> None:
    """Restores each array into each nth dtype: it is kept, or named, as the rule says."""
    whole = whole_state(folder.name, np.asarray)
    kinds = ("table/", "slot/", "array/")
    arrays = {p: x for p, x in leaves_of(whole).items() if p.startswith(kinds)}
    for at, name in enumerate(DTYPES[::nth]):
        form = ("abstract", "concrete", "host")[at % 3]
        state = jax.tree.map(
            lambda x, form=form, name=name: wanted(form, np.shape(x), name),
            part_of(whole, arrays),
        )
        given = leaves_of(state)
        taken = {
            path: jax.dtypes.canonicalize_dtype(np.dtype(name))
            if form != "host" or (is_row(path) and folder.name == "rows")
            else np.dtype(name)
            for path in given
        }
        gone = {p for p, x in arrays.items() if not holds_all(x.dtype, taken[p])}
        assert refused(folder, state, partial=True) == gone
        rest = {path: x for path, x in arrays.items() if path not in gone}
        found = restored(folder, part_of(state, rest), partial=True)
        check_kept(rest, found)
        assert all(found[path].dtype == taken[path] for path in rest)


def wanted(form: str, shape: tuple[int, ...], name: str) -> Any:
    """A leaf of a state that is to be restored in a dtype."""
    if form == "abstract":
        return jax.ShapeDtypeStruct(shape, np.dtype(name))
    zeros = np.zeros(shape, name)
    return jnp.asarray(zeros) if form == "concrete" else zeros


def check_numbers(folder: Path) -> None:
    """Numbers of Python are taken by dtypes that have their values."""
    for at, (kind, names) in enumerate(TAKEN.items()):
        form, taken = ("abstract", "host", "concrete")[at % 3], set(names.split())
        if kind == "uint64":
            form = "host"
        leaf = wanted(form, (), kind) if isinstance(kind, str) else kind(0)
        state = {"number": dict.fromkeys(NUMBERS, leaf)}
        gone = {f"number/{name}" for name in set(NUMBERS) - taken}
        assert refused(folder, state, partial=True) == gone
        paths = {f"number/{name}" for name in taken}
        found = restored(folder, part_of(state, paths), partial=True)
        for name in taken:
            got = found[f"number/{name}"]
            assert NUMBERS[name] == (np.asarray(got).item())
            assert kind in (type(got), getattr(got, "dtype", None))


def check(folder: Path, nth: int) -> None:
    check_as_saved(folder)
    if folder.name != "dense":
        check_other_dtypes(folder, nth)
        check_numbers(folder)


def run(folder: Path, *arguments: str) -> None:
    command = [sys.executable, __file__, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a program with 64 bits has saved, and has restored, every value as it was."""
    folder = tmp_path_factory.mktemp("dtypes")
    run(folder, "save", "6")
    return folder


@pytest.mark.parametrize("root", ROOTS)
def test_every_value_is_kept_or_its_leaf_is_named_without_64_bits_too(
    saved: Path, root: str
) -> None:
    check(saved / root, 6)


@pytest.mark.slow
def test_every_value_is_kept_or_its_leaf_is_named_in_all_dtypes(saved: Path) -> None:
    run(saved, "restore", "1")
    for root in ROOTS:
        check(saved / root, 1)


@pytest.mark.parametrize("root", ("rows", "adopted"))
@pytest.mark.parametrize("wanted_name", ("bool", "int2", "float16", "float8_e8m0fnu"))
def test_a_cast_that_was_asked_for_converts_every_leaf_and_says_so_once(
    saved: Path, root: str, wanted_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored = {
        path: leaf
        for path, leaf in leaves_of(whole_state(root, np.asarray)).items()
        if hasattr(leaf, "dtype") and path != "key"
    }
    for path in [path for path in stored if path.startswith("table")]:
        if wanted_name not in ROW_DTYPES:
            del stored[path]
    state = jax.tree.map(
        lambda x: wanted("abstract", np.shape(x), wanted_name),
        part_of(whole_state(root, np.asarray), stored),
    )
    found = restored(saved / root, state, partial=True, cast=True)
    assert {leaf.dtype.name for leaf in found.values()} == {wanted_name}
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (told,) = [text for text in told if "converted" in text]
    for path, leaf in stored.items():
        lossy = not holds_all(leaf.dtype, np.dtype(wanted_name))
        assert (f"{path}: {leaf.dtype.name} in the checkpoint" in told) == lossy
    if wanted_name == "float16":
        for kind in ("array", "table"):
            for name in ("float32", "int16", "complex64"):
                if (path := f"{kind}/{name}") in stored:
                    with np.errstate(all="ignore"), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of the imaginary part
                        expected = values(name).astype(np.float16)
                    np.testing.assert_array_equal(found[path], expected)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if sys.argv[2] == "save":
        save(Path(sys.argv[1]))
    for each in ROOTS:
        check(Path(sys.argv[1]) / each, int(sys.argv[3]))


def test_arrays_of_numpy_come_back_as_such_without_a_state(tmp_path: Path) -> None:
    state = {
        "user": jnp.zeros((8, 4)),
        "numpy": np.arange(8, dtype=np.int32),
        "jax": jnp.arange(3),
    }
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
    with cnr.CheckpointManager(tmp_path) as reader:
        found = reader.restore(0).state
    assert type(found["numpy"]) is np.ndarray and isinstance(found["jax"], jax.Array)
    np.testing.assert_array_equal(found["numpy"], state["numpy"])
