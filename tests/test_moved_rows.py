"""Tables that have grown, shrunk, other names or ids: what a restore and a save make of them.

What a checkpoint holds is known from a restore of it into the state that was saved; a moved table
must have those bits at other rows, and the state's own at all others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.repository.step import read_manifest

from .conftest import case_of, each_of

ROWS, MORE, DIM = 32, 48, 6
STATE = errors.StateMismatchError
OPTION = errors.OptionError
BY_ROWS = P("x")
LEAVES = ("params", "acc", "mu")


def make_state(
    rows: int | dict[str, int],
    seed: int = 0,
    devices: int = 4,
    spec: P = BY_ROWS,
    dtype: Any = np.float32,
    dim: int = DIM,
) -> dict[str, Any]:
    """Tables with a slot of a number a row, one of a row a row, and a dense leaf."""
    mesh = jax.make_mesh(
        (devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    rng = np.random.default_rng(seed)
    rows = {"user": rows} if isinstance(rows, int) else rows

    def put(values: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, P(*spec[: values.ndim])))

    found: dict[str, Any] = {name: {} for name in LEAVES}
    for name, count in rows.items():
        table = rng.normal(size=(count, dim)).astype(dtype)
        found["params"][name] = {"embedding": put(table, spec)}
        acc = rng.random(count).astype(np.float32)
        found["acc"][name] = {"embedding": put(acc, spec)}
        mu = rng.normal(size=(count, dim)).astype(np.float32)
        found["mu"][name] = {"embedding": put(mu, spec)}
    return {**found, "w": put(rng.normal(size=3).astype(np.float32), P())}


def tables_of(state: Any) -> cnr.Tables:
    return cnr.find_tables(state, list(state["params"]))


def opened(root: Path, tables: cnr.Tables, **options: Any) -> cnr.CheckpointManager:
    given = {"codec": "raw", "policy": cnr.Consecutive()} | options
    return cnr.CheckpointManager(root, tables=tables, options=cnr.Options(**given))


def train(state: Any, touched: Any, step: int) -> tuple[Any, Any]:
    """A few rows of each table, and all of their slots, have other values."""
    rng = np.random.default_rng(step)
    ids = {
        name: rng.choice(len(table["embedding"]), 5, replace=False).astype(np.int32)
        for name, table in state["params"].items()
    }
    new = {
        leaf: {
            name: {"embedding": table["embedding"].at[ids[name]].add(1 + step / 4)}
            for name, table in state[leaf].items()
        }
        for leaf in LEAVES
    }
    touched = None if touched is None else cnr.record(touched, ids)
    return {**state, **new, "w": state["w"] + step}, touched


def run(manager: Any, state: Any, touched: Any, steps: Any) -> tuple[Any, Any]:
    for step in steps:
        state, touched = train(state, touched, step)
        assert manager.save(step, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
    return state, touched


def saved_run(root: Path, state: Any, steps: int = 3, **options: Any) -> Any:
    """A full save and deltas; returns the last step as it comes back."""
    tables = tables_of(state)
    with opened(root, tables, **options) as manager:
        run(manager, state, cnr.init_touched(state, tables), range(steps))
    return reread(root, steps - 1, state)


def reread(root: Path, step: int, state: Any) -> dict[str, Any]:
    """A step as it is on disk, by a manager that knows nothing else."""
    with opened(root, tables_of(state)) as manager:
        got = manager.restore(step, args=cnr.args.Restore(state)).state
    return jax.tree.map(np.asarray, got)


def kinds(root: Path, *steps: int) -> list[str]:
    return [read_manifest(root / str(step) / "default").kind for step in steps]


def check_rows(
    got: Any, own: Any, saved: Any, ids: Any, name: str = "user", old: str = "user"
) -> None:
    """Row `i` is row `ids[i]` of what was saved, its own for -1; in the table and its slots."""
    ids = np.asarray(ids)
    for leaf in LEAVES:
        want = np.array(own[leaf][name]["embedding"])
        want[ids >= 0] = saved[leaf][old]["embedding"][ids[ids >= 0]]
        found = np.asarray(got[leaf][name]["embedding"])
        assert found.dtype == want.dtype and found.tobytes() == want.tobytes(), leaf


def same(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


GROWN = [*range(ROWS), *[-1] * (MORE - ROWS)]
CODECS = [("raw", 4), ("adaptive", 4), ("symmetric", 8), ("kmeans", 2), ("greedy", 3)]


# Each codec is compiled anew. Those that are left out come back in test_codecs_in_saves.py.
@pytest.mark.parametrize(
    ("devices", "codecs"),
    [
        (1, CODECS[:1]),
        (4, CODECS[1:2]),
        pytest.param(1, CODECS, marks=pytest.mark.slow),
        pytest.param(8, CODECS, marks=pytest.mark.slow),
    ],
    ids=["1", "4", "1, all codecs", "8, all codecs"],
)
def test_a_grown_table_keeps_its_rows_and_goes_on(
    tmp_path: Path, unsynced: None, devices: int, codecs: list[tuple[str, int]]
) -> None:
    """The full save that comes next has all rows, and deltas rest on it."""
    for codec, bits in codecs:
        with case_of((codec, bits)):
            grows_and_goes_on(tmp_path, devices, codec, bits)


def grows_and_goes_on(tmp_path: Path, devices: int, codec: str, bits: int) -> None:
    root = tmp_path / f"{codec}{bits}"
    kind = {"codec": codec, "bits": bits} if codec != "raw" else {}
    saved = saved_run(root, make_state(ROWS, devices=devices), **kind)
    assert kinds(root, 0, 1, 2) == ["full", "delta", "delta"]
    own = make_state(MORE, seed=1, devices=devices)
    with opened(root, tables_of(own), **kind) as manager:
        args = cnr.args.Restore(own, partial=True)
        state, touched = manager.restore(None, args=args)
        check_rows(state, own, saved, GROWN)
        np.testing.assert_array_equal(state["w"], saved["w"])
        for leaf in LEAVES:
            where = own[leaf]["user"]["embedding"].sharding
            assert state[leaf]["user"]["embedding"].sharding == where
        state, touched = run(manager, state, touched, [3, 4])
        truth = jax.tree.map(np.asarray, state)
        run(manager, state, touched, [5])
    assert kinds(root, 3, 4, 5) == ["full", "delta", "delta"]
    got = reread(root, 4, own)
    if codec == "raw":
        same(got, truth)
    same((got["acc"], got["mu"], got["w"]), (truth["acc"], truth["mu"], truth["w"]))


@each_of(
    "ids, rows",
    [
        (np.arange(16), 16),  # shrunk
        ([5, 5, 0, -1, 31, 31, -1, 7], 8),  # several of one row
        (np.full(8, -1), 8),
        (np.random.default_rng(0).permutation(ROWS), ROWS),
        (np.random.default_rng(1).integers(-1, ROWS, 64).astype(np.int8), 64),
        (jnp.arange(ROWS, dtype=jnp.int32)[::-1], ROWS),
    ],
)
@pytest.mark.parametrize(
    "codec", [pytest.param("raw", marks=pytest.mark.slow), "adaptive"]
)
def test_rows_are_taken_by_the_ids_that_are_given(
    tmp_path: Path, unsynced: None, codec: str, ids: Any, rows: int
) -> None:
    root = tmp_path / f"{rows}-{np.asarray(ids)[0]}"
    saved = saved_run(root, make_state(ROWS), codec=codec)
    own = make_state(rows, seed=1)
    with opened(root, tables_of(own), codec=codec) as manager:
        args = cnr.args.Restore(own, ids={"user": ids})
        state, touched = manager.restore(None, args=args)
        check_rows(state, own, saved, ids)
        run(manager, state, touched, [3, 4])
    assert kinds(root, 3, 4) == ["full", "delta"]


def test_a_shrunk_table_needs_no_values_of_the_state(tmp_path: Path) -> None:
    saved = saved_run(tmp_path, make_state(ROWS))
    small = make_state(16)
    abstract = jax.eval_shape(lambda: small)
    with opened(tmp_path, tables_of(small)) as manager:
        args = cnr.args.Restore(abstract, partial=True)
        state, _ = manager.restore(None, args=args)
    check_rows(state, small, saved, range(16))


@pytest.mark.parametrize("tracking", ["recorded", "fingerprint", "audited"])
def test_no_delta_rests_on_rows_that_were_numbered_anew(
    tmp_path: Path, unsynced: None, tracking: str
) -> None:
    """As many rows, of the same names: a delta would be taken, and leave rows where they were."""
    saved = saved_run(tmp_path, make_state(ROWS), tracking=tracking)
    own, ids = make_state(ROWS, seed=1), np.roll(np.arange(ROWS), 7)
    with opened(tmp_path, tables_of(own), tracking=tracking) as manager:
        args = cnr.args.Restore(own, ids={"user": ids})
        state, touched = manager.restore(None, args=args)
        if tracking == "fingerprint":
            touched = None
        state, touched = run(manager, state, touched, [3])
        truth = jax.tree.map(np.asarray, state)
        run(manager, state, touched, [4])
    assert kinds(tmp_path, 3, 4) == ["full", "delta"]
    same(reread(tmp_path, 3, own), truth)
    moved = train(jax.tree.map(jnp.asarray, saved), None, 3)[0]
    assert not np.array_equal(
        truth["params"]["user"]["embedding"], moved["params"]["user"]["embedding"]
    )


@each_of("rename", [{"user": "who"}, {"user": "who", "item": "item"}])
@pytest.mark.parametrize("partial", [False, True])
def test_a_renamed_table_is_taken_with_its_slots(
    tmp_path: Path, unsynced: None, partial: bool, rename: Any
) -> None:
    root = tmp_path / str(len(rename))
    saved = saved_run(root, make_state({"user": ROWS, "item": 16}))
    own = make_state({"who": ROWS, "item": 16}, seed=1)
    with opened(root, tables_of(own)) as manager:
        args = cnr.args.Restore(own, partial=partial, rename=rename)
        state, touched = manager.restore(None, args=args)
        check_rows(state, own, saved, range(ROWS), "who")
        check_rows(state, own, saved, range(16), "item", "item")
        run(manager, state, touched, [3, 4])
    assert kinds(root, 3, 4) == ["full", "delta"]


def test_tables_change_names_while_they_grow(tmp_path: Path) -> None:
    saved = saved_run(tmp_path, make_state({"a": ROWS, "b": ROWS, "c": ROWS}))
    own = make_state({"a": MORE, "b": 16}, seed=1)
    ids = {"b": np.arange(16)[::-1] + 4}
    with opened(tmp_path, tables_of(own)) as manager:
        rename = {"a": "b", "b": "a", "c": None}
        args = cnr.args.Restore(own, partial=True, rename=rename, ids=ids)
        state, _ = manager.restore(None, args=args)
    check_rows(state, own, saved, GROWN, "a", "b")
    check_rows(state, own, saved, ids["b"], "b", "a")


def test_a_table_in_another_layout_grows(tmp_path: Path) -> None:
    """Rows that were dealt round robin, into more of them on another number of shards."""
    dealt = {"user": cnr.TableSpec(rows=30, layout=layout(4, 8))}
    before = make_state(ROWS)
    tables = cnr.find_tables(before, dealt)
    with opened(tmp_path, tables) as manager:
        touched = cnr.init_touched(before, tables)
        manager.save(1, args=cnr.args.Save(before, touched))
    saved = jax.tree.map(np.asarray, before)
    own = make_state(MORE, seed=1)
    for rows, after in ((48, layout(8, 6)), (44, layout(2, 24)), (40, cnr.Identity())):
        spec = cnr.TableSpec(rows=rows, layout=after)
        tables = cnr.find_tables(own, {"user": spec})
        with opened(tmp_path, tables) as manager:
            args = cnr.args.Restore(own, partial=True)
            state, _ = manager.restore(1, args=args)
        # Padding beside new rows keeps the values of the state, as these do.
        logical = after.to_logical(np.arange(MORE))
        ids = np.where(
            logical < 30, layout(4, 8).to_physical(np.minimum(logical, 30)), -1
        )
        check_rows(state, own, saved, ids)


def layout(shards: int, rows_per_shard: int) -> cnr.ModSharded:
    return cnr.ModSharded(shards=shards, rows_per_shard=rows_per_shard)


def test_a_table_grows_into_its_padding(tmp_path: Path) -> None:
    """What was stored as padding is no row."""
    state = make_state(ROWS)
    tables = cnr.find_tables(state, {"user": cnr.TableSpec(rows=20)})
    with opened(tmp_path, tables) as manager:
        manager.save(0, args=cnr.args.Save(state, cnr.init_touched(state, tables)))
    own = make_state(ROWS, seed=1)
    with opened(tmp_path, tables_of(own)) as manager:
        got, touched = manager.restore(0, args=cnr.args.Restore(own, partial=True))
        saved = jax.tree.map(np.asarray, state)
        check_rows(got, own, saved, [*range(20), *[-1] * 12])
        manager.save(1, args=cnr.args.Save(got, touched))
    assert kinds(tmp_path, 1) == ["full"]


@pytest.mark.parametrize("onto", [1, 2, 4])
@pytest.mark.parametrize("spec", [BY_ROWS, P(None, "x"), P()], ids=str)
def test_a_table_grows_on_other_devices(tmp_path: Path, spec: P, onto: int) -> None:
    dim = 8
    saved = saved_run(tmp_path, make_state(ROWS, dim=dim), codec="adaptive")
    own = make_state(MORE, seed=1, devices=onto, spec=spec, dim=dim)
    with opened(tmp_path, tables_of(own)) as manager:
        state, _ = manager.restore(None, args=cnr.args.Restore(own, partial=True))
    check_rows(state, own, saved, GROWN)


def test_what_is_returned_and_what_was_given_are_two_states(tmp_path: Path) -> None:
    """Either may be donated. Leaves that only the state has are the same arrays in both."""
    saved = saved_run(tmp_path, make_state(ROWS))
    own = make_state(MORE, seed=1)
    own["new"] = jnp.ones(3)
    values = jax.tree.map(np.array, own)
    with opened(tmp_path, tables_of(own)) as manager:
        state, _ = manager.restore(None, args=cnr.args.Restore(own, partial=True))
    assert state["new"] is own["new"]
    rest = {name: state[name] for name in LEAVES}
    donated = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    donated({name: own[name] for name in LEAVES})
    check_rows(rest, values, saved, GROWN)
    donated(rest)


def test_a_dtype_may_change_while_a_table_grows(tmp_path: Path) -> None:
    saved = saved_run(tmp_path, make_state(ROWS, dtype=jnp.bfloat16))
    own = make_state(MORE, seed=1)
    with opened(tmp_path, tables_of(own)) as manager:
        state, _ = manager.restore(None, args=cnr.args.Restore(own, partial=True))
    user = saved["params"]["user"]
    user["embedding"] = user["embedding"].astype(np.float32)
    check_rows(state, own, saved, GROWN)


def test_a_table_of_numpy_in_the_state_keeps_its_new_rows(tmp_path: Path) -> None:
    saved = saved_run(tmp_path, make_state(ROWS))
    own = make_state(MORE, seed=1)
    values = jax.tree.map(np.asarray, own)
    with opened(tmp_path, tables_of(own)) as manager:
        state, _ = manager.restore(None, args=cnr.args.Restore(values, partial=True))
    check_rows(state, own, saved, GROWN)


def test_a_table_grows_twice(tmp_path: Path, unsynced: None) -> None:
    saved = saved_run(tmp_path, make_state(ROWS))
    step = 3
    for rows in (40, 56):
        own = make_state(rows, seed=rows)
        with opened(tmp_path, tables_of(own)) as manager:
            args = cnr.args.Restore(own, partial=True)
            state, touched = manager.restore(None, args=args)
            old = len(saved["acc"]["user"]["embedding"])
            check_rows(state, own, saved, [*range(old), *[-1] * (rows - old)])
            run(manager, state, touched, [step, step + 1])
        assert kinds(tmp_path, step, step + 1) == ["full", "delta"]
        saved = reread(tmp_path, step + 1, own)
        step += 2


# ---- what is refused ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unreadable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of manifests alone: whoever reads more of it comes to an IntegrityError."""
    root = tmp_path_factory.mktemp("unreadable") / "root"
    state = make_state({"user": ROWS, "item": 16})
    with opened(root, tables_of(state)) as manager:
        manager.save(0, args=cnr.args.Save(state))
    for folder in ("rows.p00000", "dense"):
        shutil.rmtree(root / "0" / "default" / folder)
    return root


Make = Callable[[], Any]
TWO = {"user": ROWS, "item": 16}
REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "more rows": (
        lambda: make_state({"user": MORE, "item": 16}),
        {},
        r"table 'user': 32 rows in the checkpoint, 48 in the state(.|\n)*hint: args\.Restore\("
        r"state, partial=True\) takes the rows that both have",
    ),
    "abstract": (
        lambda: jax.eval_shape(lambda: make_state({"user": MORE, "item": 16})),
        {"partial": True},
        r"params/user/embedding: 16 rows that take none of the checkpoint's, and abstract",
    ),
    "abstract by ids": (
        lambda: jax.eval_shape(lambda: make_state(TWO)),
        {"ids": {"item": [*range(15), -1]}},
        r"acc/item/embedding: 1 rows that take none",
    ),
    "other dim": (
        lambda: make_state(TWO, dim=8),
        {"partial": True},
        r"rows of shape \[6\] in the checkpoint, \[8\] in the state(.|\n)*"
        r"rename=\{'user': None\}\) leaves",
    ),
    "renamed": (
        lambda: make_state({"who": ROWS, "item": 16}),
        {},
        r"table 'user': not in the state(.|\n)*rename=\{'user': 'who'\}",
    ),
    "renamed, partly": (
        lambda: make_state({"who": ROWS, "item": 16}),
        {"partial": True},
        r"table 'user': not in the state(.|\n)*rename=\{'user': 'who'\}\).*\{'user': None\}",
    ),
    "unknown old": (
        lambda: make_state(TWO),
        {"rename": {"usr": "user"}},
        r"rename: no table 'usr' in the checkpoint, which has 'user', 'item'",
    ),
    "unknown new": (
        lambda: make_state(TWO),
        {"rename": {"user": "who"}},
        r"rename: 'user' to 'who', which is no table of the state: it has 'user', 'item'",
    ),
    "onto another": (
        lambda: make_state({"item": 16}),
        {"rename": {"user": "item"}, "partial": True},
        r"tables 'user' and 'item' of the checkpoint would both be 'item'"
        r"(.|\n)*rename 'item' too, or leave it out: rename=\{\.\.\., 'item': None\}",
    ),
    "too few ids": (
        lambda: make_state({"user": MORE, "item": 16}),
        {"ids": {"user": np.arange(ROWS)}},
        r"table 'user': 32 ids for 48 rows in the state",
    ),
    "past the end": (
        lambda: make_state(TWO),
        {"ids": {"item": [*range(14), 16, 17]}},
        r"ids\[14\] is 16, expected a row of the checkpoint, 0 to 15, or -1; 2 ids are out",
    ),
    "below -1": (
        lambda: make_state(TWO),
        {"ids": {"item": [-2, *range(15)]}},
        r"ids\[0\] is -2, expected",
    ),
    "largest": (
        lambda: make_state(TWO),
        {"ids": {"item": np.full(16, 2**64 - 1, np.uint64)}},
        r"ids\[0\] is 9223372036854775807, expected",
    ),
    "ids of no table": (
        lambda: make_state(TWO),
        {"ids": {"usr": [0]}},
        r"ids: no table 'usr' in the state, which has 'user', 'item'$",
    ),
    "ids by the old name": (
        lambda: make_state({"who": ROWS, "item": 16}),
        {"ids": {"user": range(ROWS)}, "rename": {"user": "who"}},
        r"ids: no table 'user' in the state, .*; 'user' of the checkpoint is 'who' there",
    ),
    "ids of a new table": (
        lambda: make_state({**TWO, "new": 8}),
        {"ids": {"new": range(8)}, "partial": True},
        r"ids: the checkpoint has no table 'new' to take rows of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused_before_rows_are_read(
    unreadable: Path, case: str
) -> None:
    make, given, message = REFUSED[case]
    state = make()
    with opened(unreadable, tables_of(state)) as manager:
        with pytest.raises(STATE, match=f"(?m){message}"):
            manager.restore(0, args=cnr.args.Restore(state, **given))
        if not {"rename", "ids"} & given.keys() and case != "abstract":
            return
        # Nothing else is wrong with it but what is missing.
        good = make_state(TWO)
        with pytest.raises(errors.IntegrityError):
            manager.restore(
                0,
                args=cnr.args.Restore(
                    good, tables=tables_of(good), ids={"user": range(ROWS)}
                ),
            )


def test_a_table_that_may_have_been_renamed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another number of rows it may as well be another one."""
    saved = saved_run(tmp_path, make_state({"user": ROWS, "item": 16}))
    own = make_state({"who": MORE, "item": 16}, seed=1)
    with opened(tmp_path, tables_of(own)) as manager:
        args = cnr.args.Restore(own, partial=True)
        state, _ = manager.restore(None, args=args)
        assert "table 'user' of the checkpoint is left out, and 'who'" in caplog.text
        caplog.clear()
        asked = cnr.args.Restore(own, partial=True, rename={"user": None})
        manager.restore(None, args=asked)
        assert "left out" not in caplog.text
    check_rows(state, own, saved, range(16), "item", "item")
    check_rows(state, own, saved, [-1] * MORE, "who")


def test_a_donated_state_has_no_values_to_keep(unreadable: Path) -> None:
    state = make_state({"user": MORE, "item": 16})
    tables = tables_of(state)
    state["params"]["user"]["embedding"].delete()
    with opened(unreadable, tables) as manager:
        args = cnr.args.Restore(state, partial=True)
        with pytest.raises(
            STATE, match=r"params/user/embedding: 16 rows .* and donated"
        ):
            manager.restore(0, args=args)


@each_of(
    "given, message",
    [
        (
            {"rename": ["user"]},
            r"rename is list, expected a dict.*\n.*rename=\{\"old\"",
        ),
        ({"rename": {"user": 3}}, r"got 'user' to 3"),
        ({"ids": [1, 2]}, r"ids is list, expected a dict"),
        (
            {"ids": {"user": [0.5]}},
            r"'user' are float64\[1\], expected integers\[rows\]",
        ),
        ({"ids": {"user": [True]}}, r"'user' are bool\[1\]"),
        ({"ids": {"user": [[1]]}}, r"'user' are int64\[1, 1\]"),
        ({"ids": {"user": None}}, r"'user' are object\[\]"),
    ],
)
def test_moves_of_another_form_are_refused_where_they_are_given(
    given: Any, message: str
) -> None:
    with pytest.raises(OPTION, match=message):
        cnr.args.Restore({"user": np.zeros((1, 1))}, **given)
    if next(iter(given.values())):
        with pytest.raises(OPTION, match=r"without a state|expected a dict"):
            cnr.args.Restore(**given)


@each_of(
    "given",
    [
        {"partial": True, "rename": {"user": None}},
        {"partial": True, "rename": {"user": "who"}},
        {"rename": {"user": "who"}},
    ],
)
def test_the_ways_out_that_errors_name_are_ways_out(tmp_path: Path, given: Any) -> None:
    root = tmp_path / str(given)
    saved = saved_run(root, make_state(ROWS))
    own = make_state({"who": ROWS}, seed=1)
    with opened(root, tables_of(own)) as manager:
        state, _ = manager.restore(None, args=cnr.args.Restore(own, **given))
    taken = given["rename"]["user"] is not None
    check_rows(state, own, saved, range(ROWS) if taken else [-1] * ROWS, "who")


def test_a_table_of_another_dim_can_begin_anew(tmp_path: Path) -> None:
    saved_run(tmp_path, make_state(ROWS))
    own = make_state(ROWS, seed=1, dim=8)
    with opened(tmp_path, tables_of(own)) as manager:
        args = cnr.args.Restore(own, partial=True, rename={"user": None})
        state, touched = manager.restore(None, args=args)
        same([state[leaf] for leaf in LEAVES], [own[leaf] for leaf in LEAVES])
        run(manager, state, touched, [3, 4])
    assert kinds(tmp_path, 3, 4) == ["full", "delta"]


def test_a_restore_that_was_refused_changes_nothing(tmp_path: Path) -> None:
    """The run goes on with deltas as if it had not been tried."""
    state = make_state(ROWS)
    tables = tables_of(state)
    with opened(tmp_path, tables) as manager:
        state, touched = run(manager, state, cnr.init_touched(state, tables), [0])
        with pytest.raises(STATE):
            manager.restore(0, args=cnr.args.Restore(state, ids={"user": [0]}))
        run(manager, state, touched, [1])
    assert kinds(tmp_path, 0, 1) == ["full", "delta"]


def test_a_dense_leaf_with_the_rows_of_a_table_is_not_left_in_another_order(
    tmp_path: Path, unsynced: None
) -> None:
    """A slot whose path does not end with the table's is dense, and `ids` do not reach it."""

    def make(rows: int = 6) -> Any:
        table = jnp.arange(rows * 4.0).reshape(rows, 4)
        return {"emb": {"item": table}, "acc": {"item": jnp.arange(float(rows))}}

    def found(state: Any, **spec: Any) -> cnr.Tables:
        return cnr.find_tables(state, {"item": cnr.TableSpec(**spec)})

    back = np.arange(6)[::-1]
    state = make()
    with opened(tmp_path, found(state), codec="raw") as manager:
        manager.save(0, args=cnr.args.Save(state))
        for args in (
            cnr.args.Restore(state, ids={"item": back}),
            cnr.args.Restore(state, ids={"item": back}, partial=True),
            cnr.args.Restore(make(8), tables=found(make(8)), partial=True),
        ):
            with pytest.raises(errors.StateMismatchError) as caught:
                manager.restore(0, args=args)
            assert "acc/item: " in str(caught.value)
            assert "TableSpec(slots=['acc/item'])" in str(caught.value)
        # The way out that the hint names.
        state = manager.restore(0, args=cnr.args.Restore(state)).state
    own = found(state, slots=["acc/item"])
    with opened(tmp_path, own, codec="raw") as manager:
        as_saved = cnr.args.Restore(state, tables=found(state))
        state = manager.restore(0, args=as_saved).state
        manager.save(1, args=cnr.args.Save(state, cnr.init_touched(state, own)))
        got = manager.restore(1, args=cnr.args.Restore(state, ids={"item": back})).state
    assert got["acc"]["item"].tolist() == list(back)
    assert got["emb"]["item"][:, 0].tolist() == list(4 * back)
