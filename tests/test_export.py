"""Exports are read back by who has never heard of this library, and hold what a restore gives."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import xarray
import zarr
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.repository.store.plain_arrays import zarr_holds
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from .conftest import flip, mesh_within
from .older_steps import leave_dense_to_orbax

LAYOUT = cnr.ModSharded(shards=4, rows_per_shard=6)
ROWS = 22  # of 24 that are stored


class Optimizer(NamedTuple):
    """As optax has them, with a part that holds nothing."""

    empty: tuple[()]
    seen: Any


def state_of(user: np.ndarray, item: np.ndarray) -> dict[str, Any]:
    """Two tables, one dealt out over devices and with a slot, and dense leaves of all kinds."""
    mesh = mesh_within((4,), ("rows",), (AxisType.Auto,))
    split = NamedSharding(mesh, P("rows"))
    return {
        "params": {
            "user": jax.device_put(user, split),
            "item": jnp.asarray(item, jnp.bfloat16),
        },
        "opt": Optimizer((), {"user": jax.device_put(user[:, 0] ** 2, split)}),
        "layers": [{"w": jnp.eye(3)}, {"w": np.arange(5, dtype=np.int8)}],
        "steps": 7,
        "rate": np.float32(0.5),
        "key": jax.random.key(3),
        "name": "first",
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A root, a full step and a delta on it, and the state as step 1 restores."""
    root = tmp_path_factory.mktemp("exported") / "root"
    rng = np.random.default_rng(0)
    user = rng.normal(size=(24, 8)).astype(np.float32)
    item = rng.normal(size=(40, 2)).astype(np.float32)
    spec = cnr.TableSpec(
        "params/user", slots=["opt/seen/user"], rows=ROWS, layout=LAYOUT
    )
    state = state_of(user, item)
    tables = cnr.find_tables(state, {"user": spec, "item": "params/item"})
    options = cnr.Options(
        bits=4, tables={"item": cnr.TableOptions(codec="raw")}, policy=cnr.OneShot()
    )
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
        user[[1, 7, 23]] += 1.0
        item[30:] -= 1.0
        state = state_of(user, item)
        manager.save(1, args=cnr.args.Save(state))
        manager.wait_until_finished()
        assert manager.last_report is not None and manager.last_report.kind == "delta"
        found = manager.restore(1, args=cnr.args.Restore(state)).state
    at = LAYOUT.to_physical(np.arange(ROWS))
    found["params"]["user"] = np.asarray(found["params"]["user"])[at]
    found["opt"].seen["user"] = np.asarray(found["opt"].seen["user"])[at]
    return root, found


def wanted(state: dict[str, Any]) -> dict[str, np.ndarray]:
    """What forms of arrays alone hold of a state, by name."""
    return {
        "params/user": state["params"]["user"],
        "params/item": np.asarray(state["params"]["item"]),
        "opt/seen/user": state["opt"].seen["user"],
        "layers/0/w": np.asarray(state["layers"][0]["w"]),
        "layers/1/w": np.asarray(state["layers"][1]["w"]),
        "steps": np.asarray(7, np.int64),
        "rate": np.asarray(0.5, np.float32),
        "key": np.asarray(jax.random.key_data(state["key"])),
    }


def check(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert found.keys() == want.keys()
    for name, values in want.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        assert found[name].tobytes() == values.tobytes(), name


def check_told(directory: Path, form: str, done: cnr.Exported) -> None:
    """What is rounded is said, and in which codec; nothing is left beside."""
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    if form == "zarr":
        told = json.loads((directory / "zarr.json").read_text())["attributes"][
            "cnr_jax"
        ]
    else:
        told = json.loads((directory / "cnr_jax_export.json").read_text())
        assert told["format"] == form
    assert (told["step"], told["chain"]) == (1, [0, 1])
    assert done.lossy == ("params/user",)
    leaves = told["leaves"]
    assert {name for name, leaf in leaves.items() if leaf["lossy"]} == {"params/user"}
    assert "adaptive 4 bits" in leaves["params/user"]["codecs"]
    assert leaves["opt/seen/user"]["codecs"] == ["raw"]
    assert leaves["name"]["text"] == "first"
    assert leaves["key"]["key"] == "threefry2x32"


# Of keys, on which devices Orbax is not told.
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_restores_an_export(saved: Any, tmp_path: Path) -> None:
    root, want = saved
    there = tmp_path / "new" / "plain"
    seen: list[tuple[int, int]] = []
    done = cnr.export(root, None, there, on_bytes=lambda *told: seen.append(told))
    assert (done.step, done.directory) == (1, str(there))
    assert seen[-1] == (done.bytes, done.bytes) and seen == sorted(seen)
    check_told(there, "orbax", done)
    for checkpointer in (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer()):
        with checkpointer:
            found = checkpointer.restore(there)
        assert isinstance(found["layers"], list)
        assert (found.pop("steps"), found.pop("name")) == (7, "first")
        assert found.pop("rate") == 0.5
        key = np.asarray(jax.random.key_data(found.pop("key")))
        flat = {
            "params/user": found["params"]["user"],
            "params/item": found["params"]["item"],
            "opt/seen/user": found["opt"]["seen"]["user"],
            "layers/0/w": found["layers"][0]["w"],
            "layers/1/w": found["layers"][1]["w"],
            "key": key,
        }
        expected = wanted(want)
        check(flat, {name: expected[name] for name in flat})


def test_an_export_like_a_state_is_restored_into_it(saved: Any, tmp_path: Path) -> None:
    root, want = saved
    like = {name: want[name] for name in ("params", "opt", "layers", "rate")}
    arrays = ["params/*", "opt/*", "layers/*", "rate"]
    there = tmp_path / "plain"
    cnr.export(root, 1, there, leaves=arrays, like=like)
    with ocp.StandardCheckpointer() as checkpointer:
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), like
        )
        found = checkpointer.restore(there, target)
    assert jax.tree.structure(found) == jax.tree.structure(like)
    jax.tree.map(np.testing.assert_array_equal, found, like)
    with pytest.raises(
        errors.OptionError, match="other leaves than are exported: name"
    ):
        cnr.export(root, 1, tmp_path / "b", like={**want, "name": {"a": 1}})


def safetensors_in(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, from the description of the format alone."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert json.loads(header.pop("__metadata__")["cnr_jax"])["step"] == 1
    dtypes = {"F32": "float32", "BF16": "bfloat16", "I8": "int8", "U32": "uint32"}
    found: dict[str, np.ndarray] = {}
    end = 0
    for name, each in header.items():
        start, stop = each["data_offsets"]
        dtype = jnp.dtype(dtypes.get(each["dtype"], "int64"))
        assert start == end and (8 + size + start) % dtype.itemsize == 0
        values = np.frombuffer(data[8 + size + start : 8 + size + stop], dtype)
        found[name], end = values.reshape(each["shape"]), stop
    assert 8 + size + end == len(data)
    return found


def test_safetensors_are_in_one_file_or_in_shards_with_an_index(
    saved: Any, tmp_path: Path
) -> None:
    root, want = saved
    one, many = tmp_path / "a" / "one", tmp_path / "b" / "many"
    check_told(one, "safetensors", cnr.export(root, 1, one, "safetensors"))
    check(safetensors_in(one / "model.safetensors"), wanted(want))
    limit = 400
    done = cnr.export(root, 1, many, "safetensors", shard_bytes=limit)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 2
    assert index["metadata"]["total_size"] == done.bytes
    found = {}
    for file in files:
        held = safetensors_in(many / file)
        assert {index["weight_map"][name] for name in held} == {file}
        assert len(held) == 1 or sum(x.nbytes for x in held.values()) <= limit
        found |= held
    check(found, wanted(want))


def test_the_library_of_safetensors_reads_an_export(saved: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    root, want = saved
    # Its numpy face knows no bfloat16.
    cnr.export(
        root, 1, tmp_path / "a", "safetensors", tables=["user"], leaves=["[!p]*"]
    )
    held = library.load_file(tmp_path / "a" / "model.safetensors")
    expected = wanted(want)
    del expected["params/item"]
    check(held, expected)


def test_zarr_is_a_hierarchy_of_groups_and_arrays(saved: Any, tmp_path: Path) -> None:
    root, want = saved
    there = tmp_path / "zarr"
    check_told(there, "zarr", cnr.export(root, 1, there, "zarr"))
    found = {}
    for name in wanted(want):
        store = {"driver": "file", "path": str(there / name)}
        array = ts.open({"driver": "zarr3", "kvstore": store}).result()
        found[name] = np.asarray(array.read().result())
        for parent in (there / name).relative_to(there).parents:
            group = json.loads((there / parent / "zarr.json").read_text())
            assert (group["node_type"], group["zarr_format"]) == ("group", 3)
    expected = wanted(want)
    # zarr has no bfloat16 of its own.
    expected["params/item"] = expected["params/item"].astype(np.float32)
    check(found, expected)
    array = json.loads((there / "params/user/zarr.json").read_text())
    assert array["attributes"]["cnr_jax"]["lossy"] is True
    array = json.loads((there / "params/item/zarr.json").read_text())
    assert array["attributes"]["cnr_jax"]["saved_dtype"] == "bfloat16"


# In zarr what numpy has not is in what it has.
DTYPES = {
    **{f"{sign}int{bits}": "" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("bool", "float16", "float32", "float64", "complex64"), ""),
    **{"complex128": "", "int2": "int8", "int4": "int8"},
    **dict.fromkeys(("uint2", "uint4"), "uint8"),
    **dict.fromkeys(("bfloat16", "float8_e4m3fn", "float8_e5m2"), "float32"),
    **dict.fromkeys(("float8_e4m3b11fnuz", "float4_e2m1fn"), "float32"),
}


def test_zarr_and_xarray_read_every_leaf_of_an_export(
    tmp_path: Path, unsynced: None
) -> None:
    """Values of all dtypes; groups in groups, and names that look like those of axes."""
    values = {
        name: np.arange(6).reshape(2, 3).astype(jnp.dtype(name)) for name in DTYPES
    }
    # What Orbax cannot save is no dtype of a state.
    for name in ("int2", "uint2", "uint4", "float4_e2m1fn", "float8_e4m3b11fnuz"):
        if not zarr_holds(jnp.dtype(name)):
            del values[name]
    values["user_0"] = np.arange(7)
    odd = {"user": np.arange(5), "a b.c\u00e9": np.float16(3), "1": 2.5, "__x": True}
    state = {
        "user": jnp.arange(8.0, dtype=jnp.bfloat16).reshape(4, 2),
        **values,
        "user_1": np.float32(3),
        "deep": {"params": odd, "user": np.arange(9)},
        "text": "x",
    }
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw")
    root, to = tmp_path / "root", tmp_path / "there"
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(1, args=cnr.args.Save(state))
    done = cnr.export(root, 1, to, "zarr")
    want = {
        **{
            name: value for name, value in state.items() if name not in ("deep", "text")
        },
        "deep/user": np.arange(9),
        **{f"deep/params/{name}": value for name, value in odd.items()},
    }
    tree = xarray.open_datatree(to, engine="zarr", consolidated=False)
    group = zarr.open_group(str(to), mode="r")
    held = 0
    for name, value in want.items():
        array = np.asarray(value)
        stored = np.dtype(DTYPES.get(array.dtype.name, "") or array.dtype)
        for found in (np.asarray(group[name][...]), tree[name].values):
            assert (found.dtype, found.shape) == (stored, array.shape), name
            np.testing.assert_array_equal(found, array.astype(stored))
            np.testing.assert_array_equal(found.astype(array.dtype), array)
        told = dict(group[name].attrs)["cnr_jax"]
        was = told.get("saved_dtype", stored.name)
        assert was == array.dtype.name and tree[name].attrs["cnr_jax"] == told
        held += array.size * stored.itemsize
    assert done.bytes == held
    # Group by group too, and each node holds nothing else.
    leaves = {
        f"{node.path}/{name}"[1:] for node in tree.subtree for name in node.data_vars
    }
    assert {name.removeprefix("/") for name in leaves} == want.keys()
    flat = xarray.open_zarr(to, group="deep/params", consolidated=False)
    np.testing.assert_array_equal(flat["user"].values, np.arange(5))
    assert tree.attrs["cnr_jax"]["leaves"]["text"]["text"] == "x"


def test_some_tables_or_leaves_alone_are_exported(saved: Any, tmp_path: Path) -> None:
    root, _ = saved
    done = cnr.export(root, 0, tmp_path / "a", "zarr", tables=["user"])
    assert done.leaves == ("opt/seen/user", "params/user")
    done = cnr.export(
        root, 0, tmp_path / "b", "zarr", tables=["item"], leaves=["layers/*"]
    )
    assert done.leaves == ("layers/0/w", "layers/1/w", "params/item")
    assert done.lossy == ()


def refused(root: Path, to: Path, match: str, **given: Any) -> errors.CnrError:
    before = sorted(to.parent.iterdir())
    with pytest.raises(errors.CnrError, match=match) as caught:
        cnr.export(root, given.pop("step", 1), to, **given)
    assert sorted(to.parent.iterdir()) == before
    return caught.value


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, to = saved[0], tmp_path / "there"
    assert refused(root, to, "no table 'users'", tables=["users"]).kind == "no_table"
    assert refused(root, to, "no leaf fits 'x/", leaves=["x/*"]).kind == "no_table"
    refused(root, to, "a list of names, got 'user'", tables="user")
    refused(root, to, "no format 'hdf5'", format="hdf5")
    refused(root, to, "nothing to export", tables=[])
    refused(root, to, "step 5 does not exist", step=5)
    refused(root, to, r"got 'there'\n.*export\(root, step, directory\)", step="there")
    assert refused(root, root / "out", "lies in the root").kind == "no_target"
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        error = refused(root, to, "got 100 bytes free, expected")
    assert isinstance(error, errors.ExportError) and isinstance(error, OSError)
    assert error.free_bytes == 100 and (error.needed_bytes or 0) > 1000
    to.mkdir()
    assert refused(root, to, "exists already").kind == "target_exists"
    assert not any(to.iterdir())


@contextlib.contextmanager
def replaced_by_flipped(path: Path) -> Iterator[None]:
    data = path.read_bytes()
    flip(path)
    yield
    path.write_bytes(data)


def test_damage_is_an_error_and_no_export(saved: Any, tmp_path: Path) -> None:
    copy, to = tmp_path / "root", tmp_path / "there"
    shutil.copytree(saved[0], copy)
    chunk = next((copy / "0/default/rows.p00000").rglob("*codes*/c/0"))
    flip(chunk, at=1)
    for form in ("orbax", "safetensors", "zarr"):
        with pytest.raises(errors.IntegrityError, match="default/rows"):
            cnr.export(copy, 1, to, form)
    done = cnr.export(copy, 1, tmp_path / "item", tables=["item"])
    assert done.leaves == ("params/item",)
    with replaced_by_flipped(copy / "1/default/dense/p00000/c/0"):
        with pytest.raises(errors.IntegrityError, match="dense/p00000"):
            cnr.export(copy, 1, to, leaves=["layers/*"])
    # Orbax would look it up, though it is none of its files; another it would not.
    leave_dense_to_orbax(copy / "1/default")
    dense = next(path for path in (copy / "1/default/dense/d").iterdir())
    (copy / "1/default/dense/.DS_Store").write_bytes(b"")
    stray = copy / "1/default/dense/d" / ("0" * 32)
    stray.write_bytes(b"")
    with pytest.raises(errors.IntegrityError, match=stray.name):
        cnr.export(copy, 1, to, leaves=["layers/*"])
    stray.unlink()
    flip(dense)
    with pytest.raises(errors.IntegrityError, match="default/dense"):
        cnr.export(copy, 1, to, leaves=["layers/*"])
    assert sorted(os.listdir(tmp_path)) == ["item", "root"]


def test_a_dtype_that_a_format_lacks_is_named(tmp_path: Path, unsynced: None) -> None:
    state = {
        "user": jnp.arange(8).reshape(4, 2).astype(jnp.int4),
        "a": {"b.c": jnp.ones(2)},
    }
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path / "root", tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
    with pytest.raises(
        errors.OptionError, match=r"no such dtype: user \(int4\)"
    ) as caught:
        cnr.export(tmp_path / "root", 0, tmp_path / "there", "safetensors")
    assert caught.value.kind == "not_held"
    cnr.export(tmp_path / "root", 0, tmp_path / "there")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "there")
    assert found["user"].dtype == jnp.int4 and found["a"]["b.c"].shape == (2,)
    np.testing.assert_array_equal(found["user"], state["user"])


FORMS = ("orbax", "safetensors", "zarr")


def root_of(root: Path, dense: dict[str, Any], rows: int = 4) -> Path:
    """A root with a step that holds a table and what is given."""
    state = {"user": jnp.zeros((rows, 8)), **dense}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(1, args=cnr.args.Save(state))
    return root


ONE, TWO = np.ones(2, np.float32), np.zeros(2, np.float32)
# What is saved beside a table, and which forms cannot hold it.
NOT_HELD: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "paths of one text": ({"a/b": ONE, "a": {"b": TWO}}, FORMS, r"\['a', 'b'\], \['a/"),
    "of a string too": ({"a/b": ONE, "a": {"b": "x"}}, FORMS, r"\['a/b'\], \['a', "),
    "one folder": ({"a.b": ONE, "a": {"b": TWO}}, ("orbax",), r"\['a', 'b'\], \['a.b"),
    "a long name": ({"n" * 300: ONE}, ("orbax", "zarr"), "leaves of these names: 'nnn"),
    "a zero byte": ({"a\0b": ONE}, ("orbax", "zarr"), r"of these names: 'a\\x00b'"),
    "no name": ({"": ONE}, ("orbax", "zarr"), "leaves of these names: ''"),
    "the folder itself": ({"..": ONE}, ("orbax", "zarr"), "these names: '..'"),
    "a backslash": ({"a\\b": ONE}, ("orbax", "zarr"), r"of these names: 'a\\\\b'"),
    "a file of Orbax": ({"_METADATA": ONE}, ("orbax",), "these names: '_METADATA'"),
    "the header": ({"__metadata__": ONE}, ("safetensors",), "names: '__metadata__'"),
    "a large number": ({"n": 2**63}, ("safetensors", "zarr"), "scalar n does not fit"),
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("case", NOT_HELD)
def test_what_a_form_cannot_hold_is_said_and_leaves_nothing(
    case: str, tmp_path: Path, unsynced: None
) -> None:
    dense, forms, text = NOT_HELD[case]
    root, to = root_of(tmp_path / "root", dense), tmp_path / "there"
    for form in FORMS:
        if form in forms:
            with inprocess.watching(tmp_path) as calls:
                assert refused(root, to, text, format=form).kind == "not_held"
            assert calls == [], "nothing was written"
            # The others can be had.
            cnr.export(root, 1, to, form, tables=["user"])
        else:
            done = cnr.export(root, 1, to, form)
            assert len(done.leaves) == 1 + len(dense)
            if form == "orbax":
                with ocp.StandardCheckpointer() as checkpointer:
                    found = checkpointer.restore(to)
                assert found.keys() == {"user", *dense}
        shutil.rmtree(to)


@pytest.mark.parametrize("form", FORMS)
def test_storage_that_fails_is_an_export_error_and_leaves_nothing(
    form: Any, tmp_path: Path, unsynced: None
) -> None:
    root = root_of(tmp_path / "root", {"w": ONE}, rows=4000)
    to = tmp_path / "new" / "there"
    with inprocess.watching(tmp_path) as calls:
        cnr.export(root, 1, to, form)
    shutil.rmtree(tmp_path / "new")
    # But at the end, when what is left is to be removed, and where Orbax removes a file before it
    # writes it, which is not there.
    changes = [
        call
        for call in calls
        if not call.path.endswith(".tmp")
        and (call.call, "-tmp/" in call.path) != ("unlink", True)
    ]
    assert {call.call for call in changes} >= {"fsync", "rename"}
    before = sorted(tmp_path.iterdir())
    for call in changes:
        with inprocess.failing(tmp_path, Fault(nth=call.number, action="EDQUOT")):
            with pytest.raises(errors.ExportError, match="nothing is there") as caught:
                cnr.export(root, 1, to, form)
        assert caught.value.errno == errno.EDQUOT
        assert caught.value.path == str(to)
        assert sorted(tmp_path.iterdir()) == before, call
    # What TensorStore writes meets no fault of this process's calls.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        with pytest.raises(errors.ExportError, match="nothing is there") as caught:
            cnr.export(root, 1, to, form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert sorted(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize("form", FORMS)
def test_an_export_that_is_stopped_leaves_nothing(
    form: Any, tmp_path: Path, unsynced: None
) -> None:
    # Blocks of 8 MiB, of which one is written while the next is decoded.
    root, to = root_of(tmp_path / "root", {}, rows=600_000), tmp_path / "there"
    for stop in (ValueError, KeyboardInterrupt) * 3:

        def stopped(done: int, total: int, stop: Any = stop) -> None:
            raise stop

        with pytest.raises(stop):
            cnr.export(root, 1, to, form, on_bytes=stopped)
        assert sorted(tmp_path.iterdir()) == [root]


def test_errors_of_the_caller_are_not_taken_for_those_of_storage(
    tmp_path: Path, unsynced: None
) -> None:
    root = root_of(tmp_path / "root", {})

    def stopped(done: int, total: int) -> None:
        raise ValueError("enough")

    try:
        raise FileExistsError(errno.EEXIST, "is there already")
    except OSError:
        # Python notes it as the context of all that is raised here.
        with pytest.raises(ValueError, match=r"^enough$"):
            cnr.export(root, 1, tmp_path / "there", on_bytes=stopped)


def test_what_comes_to_the_place_of_an_export_meanwhile_is_left_as_it_is(
    tmp_path: Path, unsynced: None
) -> None:
    root, to = root_of(tmp_path / "root", {}), tmp_path / "there"

    def made(done: int, total: int) -> None:
        to.write_text("mine")

    with pytest.raises(errors.ExportError, match="already, and is left") as caught:
        cnr.export(root, 1, to, on_bytes=made)
    assert caught.value.kind == "target_exists"
    assert "nothing is there" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [root, to] and to.read_text() == "mine"


def test_places_where_no_folder_can_be_are_refused(
    tmp_path: Path, unsynced: None
) -> None:
    root = root_of(tmp_path / "root", {})
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for to, number in (
        (tmp_path / "file" / "there", errno.ENOTDIR),
        (tmp_path / "loop" / "there", errno.ELOOP),
        (tmp_path / ("n" * 300), errno.ENAMETOOLONG),
        (tmp_path / "new" / ("n" * 300) / "there", errno.ENAMETOOLONG),
    ):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(errors.ExportError) as caught:
            cnr.export(root, 1, to)
        assert caught.value.errno == number
        assert sorted(tmp_path.iterdir()) == before
    # As long as a name may be.
    cnr.export(root, 1, tmp_path / ("n" * 255))


def test_the_library_of_safetensors_reads_values_of_all_dtypes_that_it_has(
    tmp_path: Path, unsynced: None
) -> None:
    dense = {
        "bool": np.array([True, False]),
        "bf16": jnp.arange(3, dtype=jnp.bfloat16),
        "c64": np.array([1 + 2j], np.complex64),
        "u64": np.array([2**64 - 1], np.uint64),
        "u64 of numpy": np.uint64(2**64 - 1),
        "f16 of numpy": np.float16(1.5),
        "no axes": np.float32(2.5) + np.zeros((), np.float32),
        "low": -(2**63),
        "high": 2**63 - 1,
        "bool of Python": True,
        "float": -0.0,
    }
    of_8_bits = {
        "e4m3": jnp.arange(3, dtype=jnp.float8_e4m3fn),
        "e5m2": jnp.arange(5, dtype=jnp.float8_e5m2),
    }
    state = {**dense, **of_8_bits, "text": "x"}
    root, to = root_of(tmp_path / "root", state), tmp_path / "there"
    cnr.export(root, 1, to, "safetensors", leaves=list(dense), tables=["user"])
    library = pytest.importorskip("safetensors.numpy")
    found = library.load_file(to / "model.safetensors")
    assert found.pop("user").shape == (4, 8) and found.keys() == dense.keys()
    for name, want in dense.items():
        assert found[name].dtype == np.asarray(want).dtype
        np.testing.assert_array_equal(found[name], want, err_msg=name)
    assert np.signbit(found["float"])
    # The library itself has no words for these in numpy; another has.
    cnr.export(root, 1, tmp_path / "all", "safetensors")
    data = (tmp_path / "all" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert json.loads(header.pop("__metadata__")["cnr_jax"])["leaves"]["text"] == {
        "kind": "text",
        "lossy": False,
        "text": "x",
    }
    assert header.keys() == {"user", *dense, *of_8_bits}
    for name, dtype in (("e4m3", "F8_E4M3"), ("e5m2", "F8_E5M2")):
        first, last = (start + at for at in header[name]["data_offsets"])
        assert header[name]["dtype"] == dtype
        assert data[first:last] == np.asarray(of_8_bits[name]).tobytes()
