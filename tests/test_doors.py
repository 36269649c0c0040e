"""What users pass in and take out: numbers, arguments of Orbax, names of steps, pickled values."""

from __future__ import annotations

import copy
import errno
import inspect
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.rows.codecs import Asymmetric, Greedy, KMeans, Log, make_codec

from .conftest import case_of

Options = ocp.CheckpointManagerOptions
RAW = cnr.Options(codec="raw", policy=cnr.Consecutive())
STATE = {"user": jnp.arange(32.0).reshape(8, 4), "w": jnp.ones(3), "n": 3}
TABLES = cnr.find_tables(STATE, ["user"])
WAYS: list[Callable[[Any], Any]] = [
    *(lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in range(6)),
    copy.copy,
    copy.deepcopy,
]


def manager_of(root: Path, options: cnr.Options = RAW, **more: Any) -> Any:
    return cnr.CheckpointManager(
        root, tables=TABLES, options=options, orbax_options=Options(**more)
    )


def save(root: Path, *steps: int, **more: Any) -> None:
    with manager_of(root, **more) as manager:
        for step in steps:
            manager.save(step, args=cnr.args.Save(STATE))


def same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- values that cross processes ----------------------------------------------------------


def every_error() -> list[errors.CnrError]:
    """One of each class, each argument given."""
    known = {
        "kind": "trouble",
        "path": "/run/7",
        "problems": ["a: wrong", "b: wrong"],
        "steps": [3, 4],
        "since": 2,
        "lineage": "ab",
        "clock": 9,
        "step": 3,
        "process": 1,
        "errno": errno.ENOSPC,
        "needed_bytes": 9,
        "free_bytes": 8,
    }
    found = []
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.CnrError):
            names = inspect.signature(kind).parameters
            error = kind("it failed", **{k: v for k, v in known.items() if k in names})
            error.add_note("on host 7")
            found.append(error)
    return found


class OwnError(errors.SaveError):
    """As a program makes one of its own: called with other arguments."""

    def __init__(self, host: str, *, code: int) -> None:
        super().__init__(f"{host} failed", step=1, errno=code)
        self.host = host


def said(error: Any) -> Any:
    of_system = ("errno", "strerror", "filename", "kind", "path")
    attributes = {name: getattr(error, name, None) for name in of_system}
    return type(error), str(error), error.args, vars(error), attributes


def test_errors_come_through_pickle_and_copy_whole() -> None:
    found = [*every_error(), OwnError("seven", code=errno.EIO)]
    assert len(found) > 15
    for error in found:
        error.__cause__ = ValueError(lambda: "what no pickle holds")
        for way in WAYS:
            with case_of(type(error).__name__):
                assert said(way(error)) == said(error)


def test_errors_of_another_process_have_their_errno() -> None:
    context = multiprocessing.get_context("spawn")
    failed = errors.SaveError("no room", step=3, process=0, errno=errno.ENOSPC)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.raises(errors.SaveError) as caught:
            # Nothing else than the module of errors is imported there.
            pool.submit(exec, "raise error", {"error": failed}).result()
    assert (caught.value.errno, caught.value.step) == (errno.ENOSPC, 3)


def test_values_are_equal_once_they_were_pickled(tmp_path: Path) -> None:
    root = tmp_path / "run"
    spec = cnr.TableSpec(rows=7, layout=cnr.Identity())
    mesh = jax.make_mesh((1,), ("rows",))
    where = jax.NamedSharding(mesh, P("rows"))
    sharded = {"user": jax.device_put(STATE["user"], where)}
    trace = {"user": np.arange(40).reshape(20, 2)}
    with manager_of(root) as manager:
        manager.save(1, args=cnr.args.Save(STATE))
        manager.wait_until_finished()
        report = manager.last_report
        restored = manager.restore(1).report
    values = {
        "tables": TABLES,
        "of rows": cnr.find_tables(STATE, {"user": spec}),
        "sharded": cnr.find_tables(sharded, ["user"]),
        "table": TABLES["user"],
        "spec": spec,
        "layout": cnr.ModSharded(shards=2, rows_per_shard=4),
        "options": cnr.Options(bits=4, tables={"user": cnr.TableOptions(bits=8)}),
        "saved": report,
        "restored": restored,
        "described": cnr.describe(root),
        "planned": cnr.prune(root, keep=1),
        "exported": cnr.export(root, 1, tmp_path / "there"),
        "problem": cnr.verify(root),
        "simulated": cnr.simulate(trace, 5),
        "decided": cnr.Decision(kind="delta", parent=3, reason="why"),
        "codec": make_codec("greedy", 4),
    }
    for name, value in values.items():
        for way in WAYS:
            with case_of(name):
                again = way(value)
                assert again == value
                if name != "table":  # it tells its sharding, which stays behind
                    assert str(again) == str(value)
    # Within a process nothing of them is lost.
    kept = copy.deepcopy(values["sharded"])["user"].leaf
    assert kept.sharding == copy.copy(kept).sharding == where


# ---- integers -----------------------------------------------------------------------------

INTEGERS = [np.int32, np.uint64, np.array, jnp.int32, jnp.uint8]
NONE = [3.0, np.float32(3), jnp.float32(3), True, np.True_, "3", np.array([3])]


def test_steps_of_any_kind_are_integers_from_there_on(tmp_path: Path) -> None:
    best: dict[str, Any] = {"best_fn": lambda metrics: metrics["loss"]}
    with manager_of(tmp_path / "run", **best) as manager:
        for step, kind in enumerate(INTEGERS, 3):
            assert manager.should_save(kind(step))
            assert not manager.reached_preemption(kind(step))
            args = cnr.args.Save(STATE)
            assert manager.save(kind(step), args=args, metrics={"loss": float(step)})
            manager.wait_until_finished()
            assert type(manager.last_report.step) is int
        # More than 32 bits, which those before had.
        assert manager.save(3_000_000_000, args=cnr.args.Save(STATE))
        manager.wait_until_finished()
        for kind in INTEGERS:
            assert manager.restore(kind(4)).report.step == 4
            assert manager.item_metadata(kind(4))["user"].shape == (8, 4)
            assert manager.metadata(kind(4)).metrics == {"loss": 4.0}
            assert manager.metrics(kind(4)) == {"loss": 4.0}
            root = tmp_path / "run"
            assert cnr.read_rows(root, "user", [1], kind(4)).tolist() == [[4, 5, 6, 7]]
            assert len(cnr.changed_rows(root, kind(3), "user")) == 8
            there = tmp_path / f"{kind.__name__}{id(kind)}"
            size = kind(100)
            assert cnr.export(root, kind(4), there, shard_bytes=size).step == 4
            assert len(cnr.prune(root, keep=kind(2), min_fulls=kind(1)).fates) == 6
        manager.delete(jnp.uint32(3_000_000_000))
        assert manager.all_steps() == [3, 4, 5, 6, 7]
        for wrong in [*NONE, -1, 2**63, 10**30]:
            for call in (
                lambda step: manager.save(step, args=cnr.args.Save(STATE)),
                manager.should_save,
                manager.reached_preemption,
                manager.restore,
                manager.delete,
                manager.item_metadata,
                manager.metrics,
                lambda step: cnr.read_rows(root, "user", [1], step),
                lambda step: cnr.changed_rows(root, step, "user"),
                lambda step: cnr.export(root, step, tmp_path / "no"),
            ):
                with case_of(repr(wrong)), pytest.raises(errors.OptionError) as caught:
                    call(wrong)
                assert "a step is " in str(caught.value)
    for step, why in ((2**63, "at most 2..63 - 1"), (-1, "at least 0")):
        with pytest.raises(errors.OptionError, match=why):
            cnr.read_rows(root, "user", [1], step)


def test_a_step_that_no_manifest_holds_is_refused_by_plain_orbax_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    registry = cnr.handler_registry(TABLES, RAW)
    last, most = 2**63 - 1, 2**63
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        manager.save(last, args=cnr.args.Save(STATE))
        manager.wait_until_finished()
        with pytest.raises(errors.OptionError, match=r"at most 2\*\*63 - 1"):
            manager.save(most, args=cnr.args.Save(STATE))
    assert cnr.describe(tmp_path / "run").latest_step == last


def of_numbers() -> dict[str, Callable[[Any], Any]]:
    """By what takes an integer, what makes of it that it was taken as."""
    trace = {"user": np.arange(40).reshape(20, 2) % 8}
    table = cnr.TableOptions
    spec = cnr.TableSpec
    return {
        "min_fulls": lambda n: cnr.Options(min_fulls=n).min_fulls,
        "audit_bytes": lambda n: cnr.Options(audit_bytes=n).audit_bytes,
        "staging": lambda n: cnr.Options(max_staging_bytes=n).max_staging_bytes,
        "bits": lambda n: cnr.Options(bits=n).bits,
        "of a table": lambda n: (
            cnr.Options(tables={"a": table(bits=n)}).tables["a"].bits
        ),
        "max_deltas": lambda n: cnr.Intermittent(max_deltas=n).max_deltas,
        "max_chain": lambda n: cnr.Consecutive(max_chain=n).max_chain,
        "rows": lambda n: cnr.find_tables(STATE, {"user": spec(rows=n)})["user"].rows,
        "shards": lambda n: cnr.ModSharded(shards=n, rows_per_shard=n).shards,
        "every": lambda n: len(
            next(iter(cnr.simulate(trace, n).schedules.values())).parents
        ),
        "of a trace": lambda n: cnr.simulate(trace, 5, rows={"user": n * 3}).rows // 3,
        "dim": lambda n: cnr.ByteModel(dim=n).dim,
        "asymmetric": lambda n: Asymmetric(bits=n, refits=n).refits,
        "greedy": lambda n: Greedy(bits=n, bins=n).bins,
        "kmeans": lambda n: KMeans(bits=n, iterations=n).iterations,
        "named": lambda n: make_codec("adaptive", n).bits,  # type: ignore[union-attr]
        "log": lambda n: Log(bits=n * 4 - 4).bits // 2,
    }


def test_numbers_of_any_kind_are_integers_from_there_on() -> None:
    for name, take in of_numbers().items():
        expected = take(3)
        for kind in INTEGERS:
            with case_of(name):
                found = take(kind(3))
                assert found == expected
                assert type(found) is int
        for wrong in (3.0, True, np.True_, np.array([3])):
            with case_of(name), pytest.raises((ValueError, TypeError)):
                take(wrong)
    given: list[Any] = [jnp.int32(9), np.float32(9.5), 9]
    for seconds in given:
        assert cnr.Options(timeout_secs=seconds).timeout_secs >= 9
    expected = cnr.Options(bits="auto", expected_restores=jnp.int32(3))
    assert expected.auto_bits(3) == 3
    with pytest.raises(errors.OptionError, match="expected a finite number"):
        cnr.Options(bits="auto", expected_restores=True)


# ---- arguments of Orbax -------------------------------------------------------------------


def test_states_are_restored_by_all_arguments_of_orbax_for_states(
    tmp_path: Path,
) -> None:
    args, abstract = ocp.args, {k: STATE[k] for k in ("user", "w")}
    mesh = jax.make_mesh((1,), ("rows",))
    where = jax.NamedSharding(mesh, P("rows"))
    asked = {
        "user": ocp.ArrayRestoreArgs(sharding=where, dtype=jnp.bfloat16),
        "w": ocp.RestoreArgs(),
    }
    given = ocp.checkpoint_utils.construct_restore_args(STATE)
    taken = {
        "standard": (args.StandardRestore(STATE), STATE),
        "pytree": (args.PyTreeRestore(STATE), STATE),
        "whatever is there": (args.PyTreeRestore(), STATE),
        "with arguments": (args.PyTreeRestore(STATE, restore_args=given), STATE),
        "a part": (args.PyTreeRestore(abstract, partial_restore=True), abstract),
        "an older part": (args.PyTreeRestore(abstract, transforms={}), abstract),
        "converted": (
            args.PyTreeRestore(abstract, restore_args=asked, partial_restore=True),
            {**abstract, "user": STATE["user"].astype(jnp.bfloat16)},
        ),
        "arguments alone": (args.PyTreeRestore(restore_args=given), STATE),
        "a structure alone": (args.PyTreeRestore({**STATE, "w": object()}), STATE),
        "a structure, and arguments": (
            args.PyTreeRestore(dict.fromkeys(STATE, 0), restore_args=given),
            STATE,
        ),
        "a part, and arguments of all": (
            args.PyTreeRestore({"w": 0}, restore_args=given, partial_restore=True),
            {"w": STATE["w"]},
        ),
        "arguments alone, converted": (
            args.PyTreeRestore(restore_args={**asked, "n": ocp.RestoreArgs()}),
            {**STATE, "user": STATE["user"].astype(jnp.bfloat16)},
        ),
    }
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), STATE)
    refused = {
        "transforms": args.PyTreeRestore(STATE, transforms={"a": ocp.Transform()}),
        "a function": args.PyTreeRestore(STATE, legacy_transform_fn=lambda *_: STATE),
        "arrays of numpy": args.PyTreeRestore(STATE, restore_args=as_numpy),
        "another tree": args.PyTreeRestore(STATE, restore_args={"a": given}),
        "placeholders": args.PyTreeRestore({**STATE, "w": ocp.PLACEHOLDER}),
        "placeholders, and arguments": args.PyTreeRestore(
            {**STATE, "w": ocp.PLACEHOLDER}, restore_args=given
        ),
        "an array": args.ArrayRestore(),
        "json": args.JsonRestore(),
        "a key": args.JaxRandomKeyRestore(),
    }
    for item in (None, "model"):
        root = tmp_path / f"of {item}"

        def named(one: Any, item: str | None = item) -> Any:
            return args.Composite(**{item: one, "more": MORE}) if item else one

        with manager_of(root) as manager:
            saved = cnr.args.Save(STATE)
            more = args.JsonSave({"rate": 0.1})
            manager.save(
                1, args=args.Composite(model=saved, more=more) if item else saved
            )
        for name, (one, expected) in taken.items():
            for step in (1, None):
                with case_of((item, name, step)), manager_of(root) as manager:
                    found = manager.restore(step, args=named(one))
                    found = found[item] if item else found
                    same(found, expected)
                    if "n" in found:
                        assert type(found["n"]) is int
                    if name.endswith("converted"):
                        assert found["user"].dtype == jnp.bfloat16
                        assert found["user"].sharding == where
        for name, one in refused.items():
            with case_of((item, name)), manager_of(root) as manager:
                with pytest.raises(errors.OptionError) as caught:
                    manager.restore(1, args=named(one))
                assert "cnr_jax.args.Restore(state" in str(caught.value)
        more = dict.fromkeys([*STATE, "b"], 0)
        missing = {
            "b: not in the checkpoint": args.PyTreeRestore(
                more, restore_args=dict.fromkeys(more, ocp.RestoreArgs())
            ),
            "w: not in the state": args.PyTreeRestore({"user": object(), "n": 0}),
        }
        for text, one in missing.items():
            with case_of((item, text)), manager_of(root) as manager:
                with pytest.raises(errors.StateMismatchError, match=text):
                    manager.restore(1, args=named(one))


def test_keys_are_restored_by_arguments_that_orbax_makes_of_them(
    tmp_path: Path,
) -> None:
    keys = jax.random.split(jax.random.key(7), 3)
    state = {**STATE, "key": jax.random.key(5, impl="rbg"), "keys": keys}
    abstract = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state,
    )
    given = ocp.checkpoint_utils.construct_restore_args(state)
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables, options=RAW) as manager:
        manager.save(1, args=cnr.args.Save(state))
        for asked in (
            ocp.args.PyTreeRestore(state, restore_args=given),
            ocp.args.PyTreeRestore(abstract, restore_args=given),
            ocp.args.PyTreeRestore(restore_args=given),
            ocp.args.PyTreeRestore(dict.fromkeys(state, 0), restore_args=given),
            ocp.args.PyTreeRestore({**state, "keys": object()}),
            ocp.args.StandardRestore(abstract),
        ):
            found = manager.restore(1, args=asked)
            same({k: found[k] for k in STATE}, STATE)
            for name in ("key", "keys"):
                assert found[name].dtype == state[name].dtype
                same(
                    *(jax.random.key_data(each[name]) for each in (found, state)),
                )
        with pytest.raises(errors.StateMismatchError, match="w: shape"):
            other = {**given, "w": ocp.ArrayRestoreArgs(global_shape=(4,))}
            manager.restore(1, args=ocp.args.PyTreeRestore(restore_args=other))


MORE = ocp.args.JsonRestore()


def test_states_are_not_saved_by_arguments_of_orbax(tmp_path: Path) -> None:
    for number, kind in enumerate((ocp.args.StandardSave, ocp.args.PyTreeSave)):
        for wrap in (lambda x: x, lambda x: ocp.args.Composite(model=x)):
            with manager_of(tmp_path / f"{number}{wrap(1)}"[:60]) as manager:
                for first in (True, False):
                    with pytest.raises(
                        errors.OptionError, match=r"cnr\.args\.Save\(st"
                    ):
                        manager.save(1, args=wrap(kind(STATE)))
                    if first:
                        manager.save(0, args=wrap(cnr.args.Save(STATE)))
                manager.wait_until_finished()
                assert manager.all_steps() == [0]


# ---- names of steps -----------------------------------------------------------------------

NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "step_prefix=None)"),
    "prefix": ({"step_prefix": "ck"}, "step_prefix='ck')"),
    "fixed": ({"step_format_fixed_length": 6}, "step_format_fixed_length=6)"),
    "both": (
        {"step_prefix": "ck", "step_format_fixed_length": 4},
        "step_prefix='ck', step_format_fixed_length=4)",
    ),
    "own": (
        {"step_name_format": ocp.path.step.standard_name_format(step_prefix="z")},
        "step_prefix='z')",
    ),
}


def test_steps_of_other_names_are_told_with_the_options_that_list_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, (options, hint) in NAMED.items():
        root = tmp_path / name
        save(root, 12, 13, **options)
        for other, (others, _) in NAMED.items():
            if other == name:
                continue
            with case_of((name, other)), manager_of(root, **others) as manager:
                for call in (
                    lambda m: m.restore(None),
                    lambda m: m.restore(12),
                    lambda m: m.delete(13),
                ):
                    with pytest.raises(errors.NoStepError) as caught:
                        call(manager)
                    assert hint in str(caught.value)
                if other != "own":
                    assert manager.latest_step() is None
                    assert hint in caplog.text
                    with pytest.raises(errors.UsedRootError) as used:
                        manager.save(14, args=cnr.args.Save(STATE))
                    assert hint in str(used.value)
                caplog.clear()
        assert cnr.describe(root).latest_step == 13
        with manager_of(root, **options) as manager:
            same(manager.restore(None).state, STATE)


# ---- going on elsewhere -------------------------------------------------------------------


def test_a_run_that_follows_another_does_not_say_that_it_began_without_touched_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "old", 1)
    with manager_of(tmp_path / "new") as manager:
        state, touched = manager.restore(None, directory=tmp_path / "old")
        state = {**STATE, "user": state["user"]}
        for step in (2, 3):
            # Who records into them is told that nobody reads them here; who does not, nothing.
            touched = cnr.record(touched, {"user": np.array([step])})
            manager.save(step, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        assert manager.last_report.tracking == "fingerprint"
    text = [r.getMessage() for r in caplog.records if "touched rows" in r.getMessage()]
    assert len(text) == 1
    assert "as the one that was restored" in text[0]
    assert "its first save" not in text[0]


def test_tables_of_64_bits_name_x64(tmp_path: Path) -> None:
    wide = {"user": np.arange(32.0).reshape(8, 4), "w": np.ones(3, np.float32)}
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        manager.save(1, args=ocp.args.StandardSave(wide))
    with pytest.raises(errors.TableError, match=r"float64.*\n.*jax_enable_x64"):
        cnr.import_orbax(tmp_path / "old", tmp_path / "new", ["user"])
    adopting = cnr.Options(adopt=True)
    with cnr.CheckpointManager(tmp_path / "old", options=adopting) as manager:
        found = manager.restore(1).state
    with pytest.raises(errors.TableError, match=r"float64.*\n.*jax_enable_x64"):
        cnr.find_tables(found, ["user"])
