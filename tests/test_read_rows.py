"""Single rows of a root: as a restore gives them, from the chunks that they lie in alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.repository.step import read_manifest, read_process
from cnr_jax.testing import inprocess

from .conftest import each_of, flip


def check(root: Path, table: str, rows: int, step: int | None, want: Any) -> None:
    """Rows of all kinds of ids are those that a restore of the step gave.

    Args:
        root: of the run.
        table: to read.
        rows: of the table.
        step: to read.
        want: what was restored of each leaf, by logical row.
    """
    rng = np.random.default_rng(rows)
    for ids in (
        np.arange(rows),
        rng.integers(0, rows, 7),
        rng.integers(0, rows, (2, 3)).astype(np.uint8),
        [rows - 1, 0, rows - 1],
        [],
        jnp.array(rows // 2),
    ):
        got, slots = cnr.read_rows(root, table, ids, step, slots=True)
        found = {"table": got, **slots}
        assert found.keys() == want.keys()
        for leaf, values in want.items():
            at = np.asarray(ids, np.int64)
            assert found[leaf].dtype == values.dtype
            assert found[leaf].tobytes() == values[at].tobytes(), (leaf, ids)
            assert found[leaf].shape == values[at].shape


@each_of(
    "options",
    [
        {},
        {"codec": "asymmetric", "bits": 4, "slot_codec": "log"},
        {"codec": "codebook", "bits": 2, "slot_codec": "bfloat16"},
        {"codec": "symmetric", "bits": 8, "compression": "zstd"},
        {"codec": "adaptive", "tracking": "fingerprint", "policy": cnr.OneShot()},
    ],
)
def test_rows_are_those_of_a_restore(
    tiny_run: Any, opened: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = tiny_run()
    root = tmp_path / str(options.get("codec")) / str(options.get("tracking"))
    manager = opened(run, root, **options)
    run.run(manager, range(4))
    manager.close()
    with cnr.CheckpointManager(root) as reader:
        for step in (0, 2, None):
            state = reader.restore(step).state
            for name, rows in (("user", 64), ("item", 32)):
                (slot,) = (leaf.name for leaf in run.tables[name].slots)
                want = {
                    "table": np.asarray(state["params"][name]["embedding"]),
                    slot: np.asarray(state["acc"][name]["embedding"]),
                }
                check(root, name, rows, step, want)


@each_of("codec", ["raw", "asymmetric"])
def test_rows_that_are_cut_by_columns_and_dealt_out_come_whole(
    tmp_path: Path, unsynced: None, codec: str
) -> None:
    layout = cnr.ModSharded(shards=4, rows_per_shard=5)
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 16)).astype(np.float32)

    def state_of(values: np.ndarray) -> dict[str, Any]:
        split = NamedSharding(mesh, P("rows", "columns"))
        return {"user": jax.device_put(values, split)}

    state, root = state_of(values), tmp_path / codec
    tables = cnr.find_tables(state, {"user": cnr.TableSpec(rows=18, layout=layout)})
    bits = None if codec == "raw" else 8
    options = cnr.Options(codec=codec, bits=bits, policy=cnr.OneShot())
    held = []
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(3):
            changed = np.arange(step, 18, 4)
            if step:
                values[layout.to_physical(changed)] += 1.0
            manager.save(step, args=cnr.args.Save(state_of(values.copy())))
            manager.wait_until_finished()
            held.append(cnr.changed_rows(root, step, "user").tolist())
    # Each delta on the full one, by the ids of the model and without padding.
    assert held[0] == list(range(18))
    assert held[1] == [1, 5, 9, 13, 17]
    assert held[2] == [1, 2, 5, 6, 9, 10, 13, 14, 17]
    with cnr.CheckpointManager(root) as reader:
        for step in range(3):
            stored = np.asarray(reader.restore(step).state["user"])
            want = {"table": stored[layout.to_physical(np.arange(18))]}
            check(root, "user", 18, step, want)


def chunk_files(step: Path, part: str) -> list[Path]:
    """The chunks of the array of a part, in order."""
    (array,) = (step / "default" / "rows.p00000").glob(f"*{part}*")
    return sorted((array / "c").iterdir(), key=lambda path: int(path.name))


def needed(root: Path, copy: Path, part: str, ids: Any) -> set[tuple[str, int]]:
    """The chunks without which rows cannot be read: step and number."""
    found: set[tuple[str, int]] = set()
    for step in sorted(path.name for path in root.iterdir() if path.name.isdigit()):
        for i in range(len(chunk_files(root / step, part))):
            shutil.copytree(root, copy)
            flip(chunk_files(copy / step, part)[i], at=1)
            try:
                cnr.read_rows(copy, "user", ids)
            except errors.IntegrityError as error:
                assert str(copy / step) in str(error)
                found.add((step, i))
            shutil.rmtree(copy)
    return found


def test_no_chunks_are_read_but_those_that_the_rows_lie_in(
    tmp_path: Path, unsynced: None, tiny_limits: Any
) -> None:
    tiny_limits(stored_chunk_bytes=256)
    state = {"user": jnp.arange(512.0).reshape(128, 4)}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    root, copy = tmp_path / "root", tmp_path / "copy"
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
        # Rows 0 to 31, and every fourth of the others.
        changed = jnp.array([*range(32), *range(32, 128, 4)])
        state = {"user": state["user"].at[changed].add(1000.0)}
        manager.save(1, args=cnr.args.Save(state))
    # 16 rows of 16 bytes a chunk: 8 chunks of the full one; 56 rows in 4 of 14 in the delta.
    chunks = len(chunk_files(root / "0", "rows")), len(chunk_files(root / "1", "rows"))
    assert chunks == (8, 4)
    cases = [
        # The delta has them: nothing of the full one is needed.
        (range(4, 10), {("1", 0)}),
        (range(10, 20), {("1", 0), ("1", 1)}),
        # 40 is the row 34 of the delta, the others are those of the full one.
        (range(40, 44), {("0", 2), ("1", 2)}),
        ([33, 127, 33], {("0", 2), ("0", 7)}),
        ([124, 0], {("1", 0), ("1", 3)}),
        ([], set()),
    ]
    for ids, want in cases:
        assert needed(root, copy, "rows", ids) == want, ids
        got = cnr.read_rows(root, "user", list(ids))
        np.testing.assert_array_equal(got, np.asarray(state["user"])[list(ids)])


def test_what_is_damaged_is_an_error_and_never_a_row(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(2))
    manager.close()
    root, copy = Path(manager.directory), tmp_path / "copy"
    files = [
        "0/default/manifest.json",
        "0/default/manifest.p00000.json",
        "1/default/manifest.p00000.json",
        "1/default/rows.p00000/row_ids/c/0",
        "0/default/rows.p00000/raw.rows.float32/c/0",
    ]
    for name in files:
        shutil.copytree(root, copy)
        flip(copy / name)
        for damage in (lambda: None, (copy / name).unlink):
            damage()
            with pytest.raises(errors.DAMAGE):
                cnr.read_rows(copy, "user", np.arange(64), 1)
        shutil.rmtree(copy)
    shutil.copytree(root, copy)
    flip(copy / "1" / "default" / "manifest.json")
    got = cnr.read_rows(copy, "user", np.arange(64))
    want = run.truth[0]["['params']['user']['embedding']"]
    np.testing.assert_array_equal(got, want)


def test_the_newest_step_is_that_of_the_newest_branch(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(4))
    run.restore(manager, 1)
    run.salt = 5
    run.run(manager, [2])
    root, path = Path(manager.directory), "['params']['user']['embedding']"
    got = cnr.read_rows(root, "user", np.arange(64))
    np.testing.assert_array_equal(got, run.truth[2][path])


def test_bad_arguments_are_named(tiny_run: Any, opened: Any, tmp_path: Path) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(2))
    root = Path(manager.directory)
    for ids, said in (
        ([0, 64], r"1 row id of table 'user' is out of range\n  got 64 at \[1\]"),
        ([[0], [-65]], r"got -65 at \[1, 0\], expected 0 to 63, or -64 to -1 from"),
        ([-(2**63)], "out of range"),
        (np.array([2**63], np.uint64), "out of range"),
        ([0.0], "are float64, expected integers"),
        ([True], "are bool, expected integers"),
        ("3", "expected integers"),
    ):
        with pytest.raises(errors.OptionError, match=said):
            cnr.read_rows(root, "user", ids)
    for call in (cnr.read_rows, lambda *args: cnr.changed_rows(args[0], 0, args[1])):
        with pytest.raises(
            errors.OptionError, match=r"'usr' in step \d, expected one of"
        ):
            call(root, "usr", [0])
        with pytest.raises(errors.NoStepError, match="no folder"):
            call(tmp_path / "nowhere", "user", [0])
        (tmp_path / "file").write_text("")
        with pytest.raises(errors.OptionError, match="is a file"):
            call(tmp_path / "file", "user", [0])
        with pytest.raises(errors.OptionError, match="a step is an integer, got 'no'"):
            cnr.read_rows(root, "user", [0], step="no")
        with pytest.raises(errors.OptionError, match="a step is an integer, got None"):
            cnr.changed_rows(root, None, "user")  # type: ignore[arg-type]
        with pytest.raises(errors.OptionError, match="are of no one shape"):
            cnr.read_rows(root, "user", [[1], [1, 2]])
        for read in (cnr.describe, cnr.verify):
            with pytest.raises(
                errors.OptionError,
                match=r"one folder of each step, got '\.\./0/default'",
            ):
                read(root, item="../0/default")
        with pytest.raises(
            errors.OptionError, match=r"one folder of each step, got '\.\./0/default'"
        ):
            cnr.read_rows(root, "user", [0], item="../0/default")
        with pytest.raises(errors.OptionError, match="is a step of the root"):
            call(root / "1", "user", [0])
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(errors.NoStepError, match="holds a checkpoint"):
            call(tmp_path / "empty", "user", [0])
    with pytest.raises(errors.NoStepError, match="step 7 does not exist") as caught:
        cnr.read_rows(root, "user", [0], 7)
    assert "steps: 0, 1" in str(caught.value)
    for step in (0, 1):
        (root / str(step) / "default" / "manifest.json").unlink()
    with pytest.raises(errors.NoStepError, match="can be restored\n  1: "):
        cnr.read_rows(root, "user", [0])


@each_of("policy", [cnr.Consecutive(), cnr.OneShot()])
def test_changed_rows_are_those_that_a_step_holds(
    tiny_run: Any, opened: Any, tmp_path: Path, policy: Any
) -> None:
    run = tiny_run()
    root = tmp_path / policy.name
    manager = opened(run, root, policy=policy)
    looked_up: dict[str, set[int]] = {"user": set(), "item": set()}
    for step in range(4):
        before = run.values()
        run.run(manager, [step])
        after = run.values()
        for name, rows in looked_up.items():
            path = f"['params']['{name}']['embedding']"
            new = np.flatnonzero((before[path] != after[path]).any(axis=1))
            assert len(new)
            rows |= set(new.tolist())
            found = cnr.changed_rows(root, step, name)
            assert found.dtype == np.int64
            if step == 0:
                np.testing.assert_array_equal(found, np.arange(len(after[path])))
                rows.clear()
            else:
                assert found.tolist() == sorted(rows)
            if policy.name == "consecutive":
                rows.clear()


def test_reading_rows_changes_nothing(tiny_run: Any, opened: Any) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(2))
    manager.close()
    root = Path(manager.directory)
    before = {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}
    with inprocess.watching(root) as changes:
        cnr.read_rows(root, "user", [1, 2])
        cnr.changed_rows(root, 1, "user")
    assert changes == []
    assert before == {p: p.stat().st_mtime_ns for p in [root, *root.rglob("*")]}


def test_files_of_other_tables_are_not_missed(tmp_path: Path, unsynced: None) -> None:
    """Of an array of another codec not even the size is asked."""
    state = {"user": jnp.ones((8, 4)), "wide": jnp.ones((8, 64))}
    tables = cnr.find_tables(state, ["user", "wide"])
    options = cnr.Options(
        codec="raw", tables={"wide": cnr.TableOptions(codec="symmetric", bits=8)}
    )
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
    item = tmp_path / "0" / "default"
    manifest = read_manifest(item)
    for name in read_process(item, manifest, 0).arrays:
        if not name.startswith("raw"):
            shutil.rmtree(item / "rows.p00000" / name)
    np.testing.assert_array_equal(cnr.read_rows(tmp_path, "user", [7]), np.ones((1, 4)))
    with pytest.raises(errors.IntegrityError):
        cnr.read_rows(tmp_path, "wide", [7])


def test_a_step_that_is_taken_away_meanwhile_is_gone_and_not_damaged(
    tiny_run: Any, opened: Any, tmp_path: Path, storage: Any
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(run) as manager:
        run.run(manager, [0, 1, 2])
    kept = tmp_path / "kept"
    shutil.copytree(root, kept)

    def taken_away(call: Any) -> None:
        """As retention and rollbacks do it."""
        if (root / "2").exists():
            (root / "2").rename(root / "2.removed-00")

    def reading(read: Callable[[], Any]) -> Any:
        shutil.rmtree(root)
        shutil.copytree(kept, root)
        with storage.calling(taken_away, "/root/2/default/rows.p00000", "open_read"):
            return read()

    ids = np.arange(64)
    want = run.truth[1]["['params']['user']['embedding']"]
    got = reading(lambda: cnr.read_rows(root, "user", ids))
    np.testing.assert_array_equal(got, want)
    for read in (
        lambda: cnr.read_rows(root, "user", ids, step=2),
        lambda: cnr.changed_rows(root, 2, "user"),
    ):
        with pytest.raises(errors.NoStepError, match="step 2 is not in"):
            reading(read)
    # What is damaged and still there is damaged.
    shutil.rmtree(root)
    shutil.copytree(kept, root)
    flip(next((root / "2/default").rglob("raw.rows.float32/c/0")))
    for step in (2, None):
        with pytest.raises(errors.IntegrityError, match="is damaged"):
            cnr.read_rows(root, "user", ids, step=step)
