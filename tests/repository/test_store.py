"""What roots ask of storage, asked of every kind of it alike; and what each kind can do beside."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from etils import epath

from cnr_jax import errors
from cnr_jax.repository import store
from cnr_jax.repository.store import arrays
from cnr_jax.repository.store.buckets import BucketStore
from cnr_jax.repository.store.local import LocalStore
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from ..conftest import each_of

LOCAL, GOOGLE, BUCKETS = LocalStore(), BucketStore(), BucketStore()
_FIXTURES = {GOOGLE: "google", BUCKETS: "bucket"}


@pytest.fixture(params=[LOCAL, GOOGLE, BUCKETS], ids=["local", "gs", "s3"])
def kind(request: pytest.FixtureRequest) -> store.Store:
    return request.param


@pytest.fixture
def root(tmp_path: Path, request: pytest.FixtureRequest) -> epath.Path:
    if "kind" in request.fixturenames:
        fixture = _FIXTURES.get(request.getfixturevalue("kind"))
        if fixture is not None:
            return request.getfixturevalue(fixture) / "a [run] #~%20"
    return epath.Path(os.fspath(tmp_path)) / "run"


def test_absence_is_told_and_is_no_error(kind: store.Store, root: epath.Path) -> None:
    for path in (root, root / "no" / "file", root / "a"):
        assert not kind.exists(path) and not kind.is_directory(path)
        assert not kind.is_named(path) and not kind.is_link(path)
        assert not kind.is_special(path) and kind.names_in(path) == []
        kind.remove_file(path)
        assert kind.remove_tree(path) == []
    with pytest.raises(FileNotFoundError):
        kind.size_of(root / "file")
    with pytest.raises(FileNotFoundError):
        kind.open_file(root / "file")


def test_what_is_written_is_read_and_replaced_whole(
    kind: store.Store, root: epath.Path
) -> None:
    kind.make_folder(root / "above")
    kind.make_folder(root)  # is there
    kind.write(root / "above" / "file", b"", replaces=False)
    path = root / "file.json"
    for data, replaces in ((b"one", False), (b"", True), (b"three" * 1000, True)):
        kind.write(path, data, replaces=replaces)
        with kind.open_file(path) as stream:
            assert stream.read() == data
        assert kind.size_of(path) == len(data) and kind.exists(path)
        assert kind.is_named(path) and kind.is_file(path)
        assert not kind.is_directory(path)
    assert kind.names_in(root) == ["above", "file.json"], "nothing else is left"
    assert abs(kind.modified_unix_secs(path) - time.time()) < 60
    assert kind.names_in(path) == []
    kind.remove_file(path)
    assert not kind.exists(path)


def test_a_file_is_put_on_a_condition(bucket: epath.Path) -> None:
    path = bucket / "run/claim"
    assert BUCKETS.read_version(path) is None
    first = BUCKETS.swap(path, b"one", None)
    assert BUCKETS.read_version(path) == (b"one", first)
    assert BUCKETS.swap(path, b"one", None) == first, "as after a lost answer"
    for write in (
        lambda: BUCKETS.swap(path, b"two", None),
        lambda: BUCKETS.write_new(path, b"two"),
        lambda: BUCKETS.write(path, b"two", replaces=False),
    ):
        with pytest.raises(FileExistsError):
            write()
    second = BUCKETS.swap(path, b"two", first)
    with pytest.raises(FileExistsError):
        BUCKETS.swap(path, b"three", first)
    assert BUCKETS.read(path) == b"two"
    BUCKETS.remove_file(path)
    with pytest.raises(FileExistsError):
        BUCKETS.swap(path, b"three", second)
    assert not BUCKETS.exists(path)


def test_a_large_object_is_read_block_by_block(bucket: epath.Path) -> None:
    data, path = os.urandom(5_000_001), bucket / "large"
    BUCKETS.write(path, data, replaces=True)
    with BUCKETS.open_file(path) as stream:
        assert stream.read(10) == data[:10] and stream.read() == data[10:]
    assert store.digest_file(path, "large") == store.digest_of("large", data)
    with pytest.raises(errors.FormatError, match="too large"):
        store.read_small(path, 100)
    assert BUCKETS.read_end(path, 4) == data[-4:]


def test_a_file_is_replaced_durably_or_not_at_all(root: epath.Path) -> None:
    path = root / "file.json"
    LOCAL.make_folder(root)
    LOCAL.write(path, b"one", replaces=False)
    with inprocess.watching(root) as calls:
        LOCAL.write(path, b"two", replaces=True)
    written, renamed, synced = [each for each in calls if each.call != "open"]
    assert (written.call, renamed.call, renamed.to) == ("fsync", "rename", str(path))
    assert written.path == renamed.path, "what is renamed is durable"
    assert (synced.call, synced.path) == ("fsync", str(root)), "and then its name"
    for call in ("fsync", "rename"):
        with (
            inprocess.failing(root, Fault(call, action="EIO")),
            pytest.raises(OSError, match="error"),
        ):
            LOCAL.write(path, b"three", replaces=True)
        assert path.read_bytes() == b"two"
        assert LOCAL.names_in(root) == ["file.json"], "nothing is left of it"


def test_what_is_no_file_of_its_size_is_amiss(root: epath.Path) -> None:
    LOCAL.make_folder(root / "folder")
    (root / "file").write_bytes(b"12")
    size = os.stat(root / "folder").st_size
    given = [("file", 2), ("file", 3), ("folder", size), ("gone", 0)]
    assert list(LOCAL.amiss(root, given)) == given[1:]


def test_folders_are_listed_by_name(kind: store.Store, root: epath.Path) -> None:
    for name in ("12", "x", "3", ".hidden", "7~"):
        kind.make_folder(root / name)
        kind.write(root / name / "file", b"", replaces=False)
    kind.write(root / "5", b"a file", replaces=False)
    assert sorted(kind.folders_in(root, str.isdigit)) == ["12", "3"]
    # What is known is not looked at, where that costs anything.
    found = sorted(kind.folders_in(root, str.isdigit, ["5"]))
    assert found == (["12", "3", "5"] if kind is LOCAL else ["12", "3"])
    assert {"12", "x", "3", "5"} <= set(kind.names_in(root))
    assert kind.quick(root) / "12" == kind.quick(root / "12")
    assert os.fspath(kind.quick(root)) == os.fspath(root)


def test_trees_are_moved_and_removed(kind: store.Store, root: epath.Path) -> None:
    kind.make_folder(root / "a" / "b" / "c")
    for path, size in (("a/x", 3), ("a/b/y", 5), ("a/b/c/z", 7)):
        kind.write(root / path, b"." * size, replaces=False)
    assert kind.bytes_below(root) == 15
    kind.sync_tree(root)
    kind.sync_file(root / "a/x")
    kind.sync_directory(root)
    kind.move(root / "a", root / "d")
    assert kind.names_in(root) == ["d"] and kind.size_of(root / "d/b/c/z") == 7
    assert kind.remove_tree(root / "d", 4) == []
    assert kind.names_in(root) == []
    assert kind.exists(root) == (kind is LOCAL), "there are no empty folders"


def test_what_has_another_size_is_amiss_where_sizes_are_quickly_seen(
    kind: store.Store, root: epath.Path
) -> None:
    kind.make_folder(root / "b")
    kind.write(root / "b" / "x", b"123", replaces=False)
    asked = [("b/x", 3), ("b/x", 4), ("b", 3), ("b/no", 0)]
    found = list(kind.amiss(root, asked))
    assert found == asked[1:]


def test_tensorstore_takes_what_a_folder_is_called(
    kind: store.Store, root: epath.Path
) -> None:
    if kind is not LOCAL:
        assert kind.kvstore(root) is None
        return
    spec = arrays.spec_of(root / "array", "int32", 10, 5)
    spec["kvstore"] = kind.kvstore(root / "array")
    opened = ts.open(spec, create=True).result()
    opened.write(np.arange(10, dtype=np.int32)).result()
    assert {"c", "zarr.json"} == set(kind.names_in(root / "array"))


def test_arrays_of_buckets_are_made_in_memory(bucket: epath.Path) -> None:
    values = np.arange(3 << 20, dtype=np.int32)
    for compression in (None, "zstd"):
        path = bucket / f"run/{compression}"
        writer = arrays.ArrayWriter(path, "int32", values.size, compression=compression)
        writer.append(values)
        entry = writer.finish()
        assert entry is not None and len(entry.crc32c) == 6
        assert {"c", "zarr.json"} == set(BUCKETS.names_in(path))
        reader = arrays.ArrayReader(path, entry)
        assert np.array_equal(reader.read(0, values.size), values)
        assert reader.read(600_000, 600_002).tolist() == [600_000, 600_001]
        data = BUCKETS.read(path / "c" / "1")
        for spoilt in (data[:-1], b"", bytes(8) + data[8:], BUCKETS.read(path / "c/2")):
            BUCKETS.write(path / "c" / "1", spoilt, replaces=True)
            with pytest.raises(errors.IntegrityError) as caught:
                arrays.ArrayReader(path, entry).read(0, values.size)
            assert caught.value.path == f"{path}/c/1"


def test_what_a_store_cannot_do_it_refuses(kind: store.Store, root: epath.Path) -> None:
    kind.make_folder(root)
    kind.write(root / "log", b"one\n", replaces=False)

    def append() -> None:
        kind.append(root / "log", b"two\n")
        assert store.read_all(root / "log") == b"one\ntwo\n"

    def lock() -> None:
        one, two = kind.lock(root / "lock"), kind.lock(root / "lock")
        assert one.acquire() and two.acquire() is False
        one.close()
        assert two.acquire()
        two.close()

    for able, does in ((kind.can.appends, append), (kind.can.locks, lock)):
        if able:
            does()
        else:
            with pytest.raises(OSError) as caught:
                does()
            assert caught.value.errno == errno.ENOTSUP


def test_the_store_of_a_path_is_that_of_its_scheme() -> None:
    assert store.store_of(Path("/a/b")) is store.store_of(epath.Path("/a"))
    local = store.can(Path("gs:/a"))
    assert local.renames and not local.conditions, "a folder"
    bucket = store.store_of(epath.Path("gs://bucket/run"))
    assert isinstance(bucket, BucketStore)
    assert bucket.can.conditions and not bucket.can.renames


# ---- local stores ------------------------------------------------------------------------------


@each_of("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_seen_is_not_taken_for_absent(
    number: int, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("x") / "file"

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", fails)
        patch.setattr(os, "lstat", fails)
        for look in (
            LOCAL.exists,
            LOCAL.is_directory,
            LOCAL.is_named,
            LOCAL.is_special,
        ):
            with pytest.raises(OSError) as caught:
                look(path)
            assert caught.value.errno == number
        assert not store.is_gone(path)
        patch.setattr(os, "listdir", fails)
        with pytest.raises(OSError):
            LOCAL.names_in(path)
    assert store.is_gone(path)


def test_links_are_told_apart_from_what_they_lead_to(root: epath.Path) -> None:
    LOCAL.make_folder(root / "real")
    LOCAL.write(root / "real" / "file", b"1", replaces=False)
    os.symlink(root / "real", root / "link")
    os.symlink(root / "gone", root / "nowhere")
    assert LOCAL.is_link(root / "link") and LOCAL.is_directory(root / "link")
    assert LOCAL.is_named(root / "nowhere") and not LOCAL.exists(root / "nowhere")
    assert not store.is_gone(root / "nowhere")
    assert LOCAL.link_target(root / "link") == os.fspath(root / "real")
    assert LOCAL.real(root / "link" / "file") == LOCAL.real(root / "real" / "file")
    assert LOCAL.bytes_below(root / "link") == 0
    assert sorted(LOCAL.folders_in(root, lambda name: True)) == ["link", "real"]
    assert LOCAL.remove_tree(root / "link") == []
    assert store.read_all(root / "real" / "file") == b"1", "only the link went"


def test_pipes_and_sockets_are_no_files_and_are_not_waited_for(
    root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LOCAL.make_folder(root)
    os.mkfifo(root / "pipe")
    monkeypatch.chdir(root)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    for name in ("pipe", "socket"):
        assert LOCAL.is_special(root / name) and not LOCAL.is_file(root / name)
        with pytest.raises(errors.FormatError, match="is not a file"):
            LOCAL.open_file(root / name)
    assert not LOCAL.is_special(root)


def test_a_small_file_takes_no_memory_for_the_limit_of_its_size(
    root: epath.Path,
) -> None:
    LOCAL.make_folder(root)
    (root / "small").write_bytes(b"x" * 70_000)
    # More than there is.
    assert store.read_small(root / "small", 1 << 50) == b"x" * 70_000
    assert len(store.read_small(root / "small", 70_000)) == 70_000
    with pytest.raises(errors.FormatError, match="more than 69,999 bytes"):
        store.read_small(root / "small", 69_999)


def test_a_file_is_known_again_until_it_is_written(root: epath.Path) -> None:
    LOCAL.make_folder(root)
    path = root / "file"
    LOCAL.write(path, b"1", replaces=False)
    before = LOCAL.state_of(path)
    os.link(path, root / "copy")
    assert LOCAL.state_of(path) == before
    LOCAL.write(path, b"2", replaces=True)
    assert LOCAL.state_of(path) != before
    assert BUCKETS.state_of(path) is None


def test_a_line_follows_what_a_killed_program_has_left(root: epath.Path) -> None:
    LOCAL.make_folder(root)
    path = root / "log"
    LOCAL.write(path, b"one\nhalf", replaces=False)
    LOCAL.append(path, b"two\n")
    assert store.read_all(path) == b"one\nhalf\ntwo\n"
    os.symlink(path, root / "link")
    with pytest.raises(OSError):
        LOCAL.append(root / "link", b"three\n")
