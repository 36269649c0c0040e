"""Bad input gets an error that says what is wrong, before anything is written or changed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax import errors

from .conftest import case_of


def make_state(rows: int = 8, dim: int = 4, dtype: Any = jnp.float32) -> dict[str, Any]:
    return {
        "params": {"user": jnp.ones((rows, dim), dtype), "item": jnp.ones((6, 4))},
        "opt_state": {"acc": {"user": jnp.zeros(rows), "item": jnp.zeros(6)}},
        "w": jnp.ones(3),
        "step": 0,
    }


def tables_of(state: Any) -> cnr.Tables:
    return cnr.find_tables(state, ["user", "item"])


def tree_of(root: Path) -> dict[str, str]:
    """Every path below a folder, with a digest of each file."""
    return {
        str(path.relative_to(root)): (
            hashlib.sha256(path.read_bytes()).hexdigest()
            if path.is_file()
            else "folder"
        )
        for path in sorted(root.rglob("*"))
    }


@dataclasses.dataclass
class Run:
    """A run of which step 0 is saved."""

    root: Path
    manager: cnr.CheckpointManager
    state: dict[str, Any]
    touched: cnr.Touched

    def changed(self, *path: str, to: Any) -> dict[str, Any]:
        """The state with one leaf replaced; `...` leaves it out."""

        def replace(node: Any, keys: tuple[str, ...]) -> Any:
            if not keys:
                return to
            inner = {**node, keys[0]: replace(node.get(keys[0], {}), keys[1:])}
            return {key: value for key, value in inner.items() if value is not ...}

        return replace(self.state, path)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    state = make_state()
    tables = tables_of(state)
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    root = tmp_path / "run"
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        yield Run(root, manager, state, touched)


# ---- saving -------------------------------------------------------------------------------


def _donated(array: jax.Array) -> jax.Array:
    array = array + 0
    array.delete()
    return array


def _touched_of(state: Any, spec: Any) -> cnr.Touched:
    return cnr.init_touched(state, cnr.find_tables(state, spec))


def _other_layout(run: Run) -> cnr.Touched:
    layout = cnr.ModSharded(shards=2, rows_per_shard=4)
    spec = {"user": cnr.TableSpec(layout=layout), "item": "item"}
    return _touched_of(run.state, spec)


def _donated_touched(run: Run) -> cnr.Touched:
    return dataclasses.replace(run.touched, clock=_donated(run.touched.clock))


STATE, TOUCHED = errors.StateMismatchError, errors.TouchedError
BAD_SAVES: dict[str, tuple[type[Exception], str, Callable[[Run], cnr.args.Save]]] = {
    "table with other rows": (
        STATE,
        r"params/user.*\n.*\[9, 4\].*\[8, 4\]",
        lambda r: cnr.args.Save(
            r.changed("params", "user", to=jnp.ones((9, 4))), r.touched
        ),
    ),
    "table with another dim": (
        STATE,
        r"params/user.*\n.*\[8, 5\].*\[8, 4\]",
        lambda r: cnr.args.Save(
            r.changed("params", "user", to=jnp.ones((8, 5))), r.touched
        ),
    ),
    "table of another dtype": (
        STATE,
        r"params/user.*\n.*bfloat16.*float32",
        lambda r: cnr.args.Save(
            r.changed("params", "user", to=jnp.ones((8, 4), jnp.bfloat16)), r.touched
        ),
    ),
    "slot of another shape": (
        STATE,
        r"acc/user.*\n.*\[8, 1\].*\[8\]",
        lambda r: cnr.args.Save(
            r.changed("opt_state", "acc", "user", to=jnp.ones((8, 1))), r.touched
        ),
    ),
    "table that is missing": (
        STATE,
        "params/user",
        lambda r: cnr.args.Save(r.changed("params", "user", to=...), r.touched),
    ),
    "slot that is missing": (
        STATE,
        "opt_state/acc/item",
        lambda r: cnr.args.Save(
            r.changed("opt_state", "acc", "item", to=...), r.touched
        ),
    ),
    "numpy table": (
        STATE,
        "params/user.*\n.*ndarray",
        lambda r: cnr.args.Save(
            r.changed("params", "user", to=np.ones((8, 4), np.float32)), r.touched
        ),
    ),
    "no state": (STATE, "params/user", lambda r: cnr.args.Save(None, r.touched)),
    "donated table": (
        STATE,
        "user.*donated",
        lambda r: cnr.args.Save(
            r.changed("params", "user", to=_donated(r.state["params"]["user"])),
            r.touched,
        ),
    ),
    "donated dense leaf": (
        STATE,
        "'w'.*donated",
        lambda r: cnr.args.Save(r.changed("w", to=_donated(r.state["w"])), r.touched),
    ),
    "donated touched": (
        STATE,
        "touched.*donated",
        lambda r: cnr.args.Save(r.state, _donated_touched(r)),
    ),
    "object": (
        STATE,
        "leaf w .*\n.*object",
        lambda r: cnr.args.Save(r.changed("w", to=object()), r.touched),
    ),
    "array of objects": (
        STATE,
        "leaf w ",
        lambda r: cnr.args.Save(
            r.changed("w", to=np.array([None, {}], object)), r.touched
        ),
    ),
    "array of a dtype that zarr lacks": (
        STATE,
        r"leaf w .*\n.* of uint4, expected an array",
        lambda r: cnr.args.Save(r.changed("w", to=jnp.ones(2, jnp.uint4)), r.touched),
    ),
    "array of a dtype that neither zarr nor jax has": (
        STATE,
        r"leaf w .*\n.* of float6_e2m3fn, expected an array",
        lambda r: cnr.args.Save(
            r.changed("w", to=np.ones(2, ml_dtypes.float6_e2m3fn)), r.touched
        ),
    ),
    "array of records": (
        STATE,
        r"leaf w .*\n.*ndarray of \[\('a', ",
        lambda r: cnr.args.Save(
            r.changed("w", to=np.zeros(2, [("a", np.int32)])), r.touched
        ),
    ),
    "integer that is too long": (
        STATE,
        r"leaf w .*\n.*of 71 bits, expected -2\*\*63",
        lambda r: cnr.args.Save(r.changed("w", to=2**70), r.touched),
    ),
    "numbers that are too wide": (
        STATE,
        "leaf w .*\n.*ndarray of float128",
        lambda r: cnr.args.Save(
            r.changed("w", to=np.ones(2, np.longdouble)), r.touched
        ),
    ),
    "abstract leaf": (
        STATE,
        "leaf w .*\n.*ShapeDtypeStruct",
        lambda r: cnr.args.Save(
            r.changed("w", to=jax.ShapeDtypeStruct((3,), jnp.float32)), r.touched
        ),
    ),
    "no touched": (TOUCHED, "init_touched", lambda r: cnr.args.Save(r.state)),
    "something else as touched": (
        TOUCHED,
        "dict",
        lambda r: cnr.args.Save(r.state, {"user": jnp.zeros(8, jnp.int32)}),  # type: ignore[arg-type]
    ),
    "touched that lacks a table": (
        TOUCHED,
        "item: not in touched",
        lambda r: cnr.args.Save(r.state, _touched_of(r.state, ["user"])),
    ),
    "touched of other tables": (
        TOUCHED,
        "(?s)item: not in touched.*thing: not a table",
        lambda r: cnr.args.Save(
            r.state, _touched_of(r.state, {"user": "user", "thing": "item"})
        ),
    ),
    "touched of another size": (
        TOUCHED,
        "user: got 9 stamps, expected 8",
        lambda r: cnr.args.Save(
            r.state, _touched_of(make_state(rows=9), ["user", "item"])
        ),
    ),
    "touched of another layout": (
        TOUCHED,
        "user: .*layout",
        lambda r: cnr.args.Save(r.state, _other_layout(r)),
    ),
}


def test_bad_saves_are_refused_before_anything_is_written(run: Run) -> None:
    before = tree_of(run.root)
    for case, (kind, message, make) in BAD_SAVES.items():
        args = make(run)
        with case_of(case), pytest.raises(kind, match=message):
            run.manager.save(1, args=args)
        run.manager.wait_until_finished()
        assert tree_of(run.root) == before, case
        assert run.manager.all_steps() == [0], case
    # And nothing is broken by them.
    assert run.manager.save(1, args=cnr.args.Save(run.state, run.touched))
    run.manager.wait_until_finished()
    assert run.manager.last_report is not None
    assert (run.manager.last_report.step, run.manager.last_report.parent) == (1, 0)


def test_bad_step_numbers_are_refused(run: Run) -> None:
    before = tree_of(run.root)
    step: Any
    for step in (-1, 1.5, "3", True, None):
        with case_of(step), pytest.raises(errors.OptionError, match="a step is"):
            run.manager.save(step, args=cnr.args.Save(run.state, run.touched))
        assert tree_of(run.root) == before, step


def test_integers_of_numpy_and_jax_are_step_numbers(run: Run) -> None:
    for step in (np.int64(1), jnp.int32(2)):
        run.manager.save(step, args=cnr.args.Save(run.state, run.touched))
    run.manager.wait_until_finished()
    assert run.manager.all_steps() == [0, 1, 2]


def test_state_under_another_item_name_is_refused(run: Run) -> None:
    before = tree_of(run.root)
    save = cnr.args.Save(run.state, run.touched)
    with pytest.raises(errors.OptionError, match="'other'"):
        run.manager.save(1, args=ocp.args.Composite(other=save))
    assert tree_of(run.root) == before


def test_manager_without_tables_refuses_to_save(run: Run) -> None:
    before = tree_of(run.root)
    with cnr.CheckpointManager(run.root) as manager:
        with pytest.raises(errors.OptionError, match="only restore"):
            manager.save(1, args=cnr.args.Save(run.state, run.touched))
    assert tree_of(run.root) == before


# ---- opening ------------------------------------------------------------------------------


def test_options_of_unknown_tables_are_refused_before_the_root_is_made(
    tmp_path: Path,
) -> None:
    options = cnr.Options(tables={"usr": cnr.TableOptions(bits=8)})
    with pytest.raises(errors.OptionError, match=r"(?s)usr.*item, user"):
        cnr.CheckpointManager(
            tmp_path / "run", tables=tables_of(make_state()), options=options
        )
    assert not (tmp_path / "run").exists()


# ---- restoring ----------------------------------------------------------------------------


def test_restore_lists_all_differences_of_the_state(run: Run) -> None:
    other = {
        "params": {"user": jnp.ones((8, 5)), "item": jnp.ones((6, 4))},
        "opt_state": {"acc": {"user": jnp.zeros(8)}, "more": jnp.ones(2)},
        "w": jnp.ones(4),
    }
    before = tree_of(run.root)
    with pytest.raises(errors.StateMismatchError) as caught:
        run.manager.restore(0, args=cnr.args.Restore(other))
    text = str(caught.value)
    for part in (
        "checkpoint 0 (5 differences)",
        "params/user: rows of shape [4] in the checkpoint, [5] in the state",
        "table 'item': slot 'opt_state/acc' is not in the state",
        "opt_state/more: not in the checkpoint",
        "w: shape [3] in the checkpoint, [4] in the state",
        "step: not in the state",
    ):
        assert part in text, text
    assert tree_of(run.root) == before


MISMATCHES: list[tuple[tuple[str, ...], Any, str]] = [
    (("params", "user"), jnp.ones((9, 4)), "params/user: 9 rows in the state"),
    (("params", "user"), ..., "table 'user': not in the state"),
    (("params", "extra"), jnp.ones(2), "params/extra: not in the checkpoint"),
    (("opt_state", "acc", "user"), jnp.ones((8, 2)), r"acc/user: .*\[2\]"),
    (("w",), "text", "w: shape"),
]


def test_restore_into_a_state_that_does_not_match_names_the_leaf(run: Run) -> None:
    for path, value, message in MISMATCHES:
        state = run.changed(*path, to=value)
        with (
            case_of(message),
            pytest.raises(errors.StateMismatchError, match=message),
        ):
            run.manager.restore(0, args=cnr.args.Restore(state))


def test_table_of_other_rows_does_not_match_even_with_tables_of_its_own(
    run: Run,
) -> None:
    other = make_state(rows=16)
    args = cnr.args.Restore(other, tables=tables_of(other))
    with pytest.raises(errors.StateMismatchError, match=r"'user': 8 rows.* 16 in the"):
        run.manager.restore(0, args=args)


def test_restore_from_an_empty_folder_finds_no_step(tmp_path: Path) -> None:
    state = make_state()
    with cnr.CheckpointManager(tmp_path, tables=tables_of(state)) as manager:
        assert manager.latest_step() is None
        with pytest.raises(FileNotFoundError, match="no step"):
            manager.restore(None, args=cnr.args.Restore(state))
        with pytest.raises(FileNotFoundError, match=r"step 3 .*\n  steps: none"):
            manager.restore(3, args=cnr.args.Restore(state))
    assert tree_of(tmp_path) == {}


def test_restore_of_a_missing_step_lists_those_there_are(run: Run) -> None:
    with pytest.raises(FileNotFoundError, match=r"step 7 does not exist.*\n  steps: 0"):
        run.manager.restore(7, args=cnr.args.Restore(run.state))


def test_step_before_a_damaged_one_is_restored_and_nothing_is_written(
    run: Run,
) -> None:
    run.manager.save(1, args=cnr.args.Save(run.state, run.touched))
    run.manager.close()
    manifest = run.root / "1" / "default" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    before = tree_of(run.root)
    with cnr.CheckpointManager(run.root, tables=tables_of(run.state)) as manager:
        assert manager.latest_step() == 0
        state, _ = manager.restore(None, args=cnr.args.Restore(run.state))
        assert state["step"] == 0
        with pytest.raises(errors.ManifestError, match=r"manifest\.json"):
            manager.restore(1, args=cnr.args.Restore(run.state))
    assert tree_of(run.root) == before


def test_delta_whose_parent_is_gone_is_not_restored(run: Run) -> None:
    run.manager.save(1, args=cnr.args.Save(run.state, run.touched))
    run.manager.wait_until_finished()
    assert run.manager.last_report is not None
    assert run.manager.last_report.parent == 0
    (run.root / "0").rename(run.root.parent / "elsewhere")
    with cnr.CheckpointManager(run.root, tables=tables_of(run.state)) as manager:
        assert manager.latest_step() is None
        with pytest.raises(errors.ParentMissingError, match="0"):
            manager.restore(1, args=cnr.args.Restore(run.state))


def test_numbers_and_names_that_python_itself_refuses(tmp_path: Path) -> None:
    reader = cnr.CheckpointManager(tmp_path)
    for huge in (10**400, 10**5000, -(10**5000)):
        with pytest.raises(cnr.errors.OptionError, match="expected_restores is"):
            cnr.Options(bits="auto", expected_restores=huge)
        with pytest.raises(cnr.errors.OptionError, match="a step is at"):
            reader.should_save(huge)
    for spec in (np.array(1), np.array("user"), jnp.array(1)):
        with pytest.raises(cnr.errors.TableError, match="a list or a mapping"):
            cnr.find_tables(make_state(), spec)  # pyright: ignore[reportArgumentType]
    reader.close()


def test_a_leaf_of_a_dtype_that_jax_has_not_is_told(tmp_path: Path) -> None:
    state = {"user": jnp.ones((8, 4)), "w": np.arange(3.0)}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path / "own", tables=tables) as manager:
        touched = cnr.init_touched(state, tables)
        manager.save(1, args=cnr.args.Save(state, touched))
    with ocp.CheckpointManager(tmp_path / "plain") as plain:
        plain.save(1, args=ocp.args.StandardSave(state))
    options = cnr.Options(adopt=True)
    for root in ("own", "plain"):
        with cnr.CheckpointManager(
            tmp_path / root, tables=tables, options=options
        ) as manager:
            for dtype in (">f8", ">f4", np.longdouble, np.clongdouble):
                for path, value in (
                    ("w", jax.ShapeDtypeStruct((3,), dtype)),
                    ("user", jax.ShapeDtypeStruct((8, 4), dtype)),
                    ("user", np.ones((8, 4), dtype)),
                ):
                    args = cnr.args.Restore({**state, path: value}, cast=True)
                    with pytest.raises(
                        cnr.errors.StateMismatchError, match=f"{path}: .* jax has no"
                    ):
                        manager.restore(1, args=args)
            args = cnr.args.Restore({**state, "w": np.ones(3, ">f8")})
            assert manager.restore(1, args=args).state["w"].tolist() == [0, 1, 2]
