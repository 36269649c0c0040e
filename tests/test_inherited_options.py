"""A run that goes on stores rows as before, where options do not say otherwise."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.format.encodings import encoding_told
from cnr_jax.format.fields import dump_document
from cnr_jax.format.manifest import to_json
from cnr_jax.rows.codecs import Asymmetric, Log, SharedCodebook, Symmetric
from cnr_jax.rows.codecs.bfloat16 import BFloat16
from cnr_jax.rows.codecs.greedy import Greedy
from cnr_jax.rows.codecs.kmeans import KMeans

from .conftest import each_of

OptionError = cnr.errors.OptionError


def state_of(*names: str) -> dict[str, Any]:
    rows = jax.random.normal(jax.random.key(0), (24, 16))
    tables = {name: rows + i for i, name in enumerate(names)}
    slots = {name: rows**2 for name in names}
    return {"params": tables, "opt": {"nu": slots}, "w": jnp.ones(3)}


STATE = state_of("user", "item")
TABLES = cnr.find_tables(STATE, ["user", "item"])


def save(
    root: Path,
    step: int,
    options: cnr.Options | None = None,
    *,
    begin: bool = False,
    restore: int | None = None,
    state: Any = STATE,
    exact: bool = False,
    full: bool = True,
    **asked: Any,
) -> cnr.SaveReport:
    """Begins a run, or goes on with one as a program does that is started again."""
    tables = TABLES
    if state is not STATE:
        tables = cnr.find_tables(state, list(state["params"]))
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        touched = cnr.init_touched(state, tables)
        if not begin:
            args = cnr.args.Restore(state, **asked)
            state, touched = manager.restore(restore, args=args)
        manager.save(step, args=cnr.args.Save(state, touched, full=full, exact=exact))
        manager.wait_until_finished()
        assert manager.last_report is not None
        return manager.last_report


def codecs(report: cnr.SaveReport) -> dict[str, str]:
    """What is stored of each table, and of its slot where that is not exact."""
    found: dict[str, str] = {}
    for table in report.tables:
        rows, slot = table.leaves
        found[table.name] = "/".join(rows.codecs)
        if slot.codecs != ("raw",):
            found[table.name] += f", {'/'.join(slot.codecs)}"
    return found


def each(user: str, item: str) -> dict[str, str]:
    return {"user": user, "item": item}


def manifest_of(root: Path, step: int) -> Path:
    return root / str(step) / "default" / "manifest.json"


def rewrite(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifests of all steps."""
    for path in root.glob("*/default/manifest.json"):
        document = json.loads(path.read_bytes())
        del document["sha256"]
        change(document)
        path.write_bytes(dump_document(document))


def test_a_run_that_is_resumed_without_options_goes_on_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 0, cnr.Options(codec="raw", compression="zstd"), begin=True)
    for step in (1, 2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "cnr_jax"):
            report = save(tmp_path, step)
        assert codecs(report) == each("raw", "raw")
        assert report.inherited == ("codec", "slot_codec", "compression")
        assert report.asdict()["inherited"] == [*report.inherited]
        assert not [r for r in caplog.records if r.levelno > logging.INFO]
        (said,) = [r for r in caplog.messages if "not given" in r]
        assert f"at step {step - 1}: codec='raw', " in said
        document = json.loads(manifest_of(tmp_path, step).read_bytes())
        assert document["required_features"] == ["blosc", "dense_tiles"]
    with cnr.CheckpointManager(tmp_path, tables=TABLES) as manager:
        got = manager.restore(None, args=cnr.args.Restore(STATE)).state
    assert jax.tree.all(jax.tree.map(np.array_equal, got, STATE))


ITEM8 = {"item": cnr.TableOptions(bits=8)}
AUTO: Any = {"codec": "asymmetric", "bits": "auto", "expected_restores": 1}


@each_of(
    ("first", "second", "expected", "inherited"),
    [
        (
            {"codec": "asymmetric", "bits": 2, "tables": ITEM8},
            {},
            each("asymmetric 2 bits", "asymmetric 8 bits"),
            "codec bits slot_codec compression tables.item.bits",
        ),
        # What is given wins, and only that.
        (
            {"codec": "asymmetric", "slot_codec": "bfloat16", "tables": ITEM8},
            {"bits": 2},
            each("asymmetric 2 bits, bfloat16", "asymmetric 8 bits, bfloat16"),
            "codec slot_codec compression tables.item.bits",
        ),
        (
            {"codec": "asymmetric", "bits": 2, "tables": ITEM8},
            {"tables": {"user": cnr.TableOptions(codec="raw")}, "slot_codec": "raw"},
            each("raw", "asymmetric 8 bits"),
            "codec bits compression tables.item.bits",
        ),
        # Bits that nothing takes any more are no error: nobody gave them.
        (
            {"codec": "asymmetric", "tables": ITEM8, "compression": "zstd"},
            {"codec": "raw", "compression": None},
            each("raw", "raw"),
            "slot_codec",
        ),
        (
            {"codec": "raw", "slot_codec": "bfloat16"},
            {"codec": "asymmetric"},
            each("asymmetric 4 bits, bfloat16", "asymmetric 4 bits, bfloat16"),
            "slot_codec compression",
        ),
        # Objects come back by what they are made of.
        (
            {
                "codec": Asymmetric(bits=2, refits=1),
                "slot_codec": Symmetric(bits=8),
                "tables": {"item": cnr.TableOptions(codec=Symmetric(bits=2))},
            },
            {"verify_reads": False},
            each(
                "adaptive 2 bits, symmetric 8 bits",
                "symmetric 2 bits, symmetric 8 bits",
            ),
            "codec slot_codec compression tables.item.codec",
        ),
        # The first restore is the one that is expected.
        (
            AUTO,
            {},
            each("asymmetric 2 bits", "asymmetric 2 bits"),
            "codec bits slot_codec expected_restores compression",
        ),
        (
            {"codec": "symmetric", "bits": 8},
            {"codec": "asymmetric"},
            each("asymmetric 8 bits", "asymmetric 8 bits"),
            "bits slot_codec compression",
        ),
    ],
)
def test_what_is_not_given_is_inherited(
    tmp_path: Path, first: Any, second: Any, expected: Any, inherited: str
) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    before = codecs(save(root, 0, cnr.Options(**first), begin=True))
    report = save(root, 1, cnr.Options(**second))
    assert sorted(report.inherited) == sorted(inherited.split())
    assert codecs(report) == expected
    if not second:
        assert before == expected
    # A codec in all its parts, as the process manifests have it.
    if "verify_reads" in second:
        stored = [
            json.loads((root / step / "default/manifest.p00000.json").read_bytes())
            for step in ("0", "1")
        ]
        assert stored[0]["codecs"] == stored[1]["codecs"]


def test_bits_that_follow_the_restores_go_on_following_them(tmp_path: Path) -> None:
    big = {"user": jnp.ones((3000, 16)), "item": STATE["params"]["item"]}
    state = {**STATE, "params": big, "opt": {}}
    reports = [
        save(tmp_path, 0, cnr.Options(**AUTO), begin=True, state=state),
        *(save(tmp_path, step, state=state) for step in (1, 2)),
    ]
    assert [report.auto_bits for report in reports] == [2, 2, 8]
    stored = [[t.leaves[0].codecs for t in report.tables] for report in reports]
    # What small tables have is no option of theirs.
    assert [found[1] for found in stored] == [("asymmetric 8 bits",)] * 3
    encoding = json.loads(manifest_of(tmp_path, 2).read_bytes())["encoding"]
    assert encoding["tables"] == {}
    assert (encoding["bits"], encoding["expected_restores"]) == ("auto", 1.0)


def test_an_exact_save_is_no_option_of_its_run(tmp_path: Path) -> None:
    save(tmp_path, 0, cnr.Options(codec="asymmetric", bits=2), begin=True)
    assert codecs(save(tmp_path, 1, exact=True)) == each("raw", "raw")
    assert codecs(save(tmp_path, 2)) == each("asymmetric 2 bits", "asymmetric 2 bits")


@each_of(
    ("first", "given", "message"),
    [
        (
            {"codec": "raw"},
            {"bits": 8},
            "bits=8 has no effect: codec 'raw' has no bits",
        ),
        ({"codec": "raw"}, {"bits": "auto"}, "bits='auto' has nothing .*'raw' has no"),
        (
            {"codec": Asymmetric(refits=0)},
            {"bits": 8},
            r"bits=8 has no effect: Asymmetric\(bits=4.* has bits of its own",
        ),
        (
            {"codec": "asymmetric", "tables": {"item": cnr.TableOptions(codec="raw")}},
            {"tables": ITEM8},
            "table 'item': bits=8 has no effect: codec 'raw' has no bits",
        ),
    ],
)
def test_bits_that_do_not_go_with_an_inherited_codec_are_refused(
    tmp_path: Path, first: Any, given: Any, message: str
) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    save(root, 0, cnr.Options(**first), begin=True)
    options = cnr.Options(**given)
    with cnr.CheckpointManager(root, tables=TABLES, options=options) as manager:
        with pytest.raises(OptionError, match=message):
            manager.restore(None, args=cnr.args.Restore(STATE))
        touched = cnr.init_touched(STATE, TABLES)
        with pytest.raises(cnr.errors.UsedRootError):
            manager.save(1, args=cnr.args.Save(STATE, touched))
    assert cnr.describe(root).steps[-1].step == 0
    if given != {"bits": 8}:
        return
    # Who only looks needs no options that go together.
    reads = ocp.CheckpointManagerOptions(read_only=True)
    for kinds in ({"tables": TABLES, "orbax_options": reads}, {}):
        with cnr.CheckpointManager(root, options=options, **kinds) as manager:
            manager.restore(None)


class Rounding(cnr.Full):
    """Names a codec for each save that it is asked for."""

    def decide(self, history: Any) -> cnr.Decision:
        return dataclasses.replace(super().decide(history), codec="asymmetric")


def test_bits_are_those_of_a_codec_that_a_policy_names_in_an_exact_run(
    tmp_path: Path,
) -> None:
    save(tmp_path, 0, cnr.Options(codec="raw"), begin=True)
    # The second time they are inherited themselves.
    for step, given in ((1, {"bits": 2}), (2, {})):
        options = cnr.Options(policy=Rounding(), **given)
        report = save(tmp_path, step, options, full=False)
        assert codecs(report) == each("asymmetric 2 bits", "asymmetric 2 bits")
    # Without that policy they are for nothing.
    report = save(tmp_path, 3)
    assert codecs(report) == each("raw", "raw") and "bits" not in report.inherited


@each_of("codec", ["residual", {"name": "cnr.residual", "configuration": {"bits": 4}}])
def test_a_codec_that_is_not_known_here_is_to_be_given(
    tmp_path: Path, codec: Any
) -> None:
    root = tmp_path / type(codec).__name__
    save(root, 0, cnr.Options(codec="asymmetric", bits=8), begin=True)
    rewrite(root, lambda document: document["encoding"].update(codec=codec))
    with pytest.raises(OptionError, match=r"residual' is not known(.|\n)*give codec="):
        save(root, 1)
    report = save(root, 1, cnr.Options(codec="asymmetric"))
    assert codecs(report) == each("asymmetric 8 bits", "asymmetric 8 bits")


@each_of("name", ["lz4", "", "z" * 10_000])
@each_of("field", ["compression", "bits", "codec", "slot_codec", "stored codec"])
def test_what_is_not_known_here_is_refused_at_the_restore(
    tmp_path: Path, field: str, name: str
) -> None:
    root = tmp_path / field / name[:5]
    save(root, 0, cnr.Options(codec="asymmetric", bits=8), begin=True)
    said: Any = name
    if field == "stored codec":
        field, said = "codec", {"name": name, "configuration": {}}
    rewrite(root, lambda document: document["encoding"].update({field: said}))
    with pytest.raises(OptionError, match=f"not known(.|\n)*give {field}=") as caught:
        save(root, 1)
    assert len(str(caught.value)) < 500
    if field == "compression":
        save(root, 1, cnr.Options(compression="zstd"))


@each_of(
    "codec",
    [
        Asymmetric(bits=3),
        Asymmetric(bits=2, refits=0, metadata_bits=32),
        Greedy(bits=2, bins=7, ratio=0.5),
        KMeans(bits=3, iterations=2),
        SharedCodebook(bits=2),
        SharedCodebook(bits=2, levels=(-1.5, -0.1, 0.1, 1.5)),
        BFloat16(),
        Log(bits=8),
    ],
)
def test_codec_objects_come_back_by_their_configuration(codec: Any) -> None:
    given = cnr.Options(
        tables={"item": cnr.TableOptions(slot_codec=codec)}, codec=codec
    )
    text = json.dumps(to_json(given.encoding.entry()))
    got = cnr.Options().encoding.inheriting(encoding_told(json.loads(text)), ["item"])
    assert (got.codec, got.tables["item"].slot_codec) == (codec, codec)


def test_inherited_bits_that_a_given_codec_cannot_take_are_named() -> None:
    entry = cnr.Options(bits=8).encoding.entry()
    with pytest.raises(OptionError, match=r"bits is 8,(.|\n)*from the run: bits=8"):
        cnr.Options(codec="kmeans").encoding.inheriting(entry, [])


OLD = {
    "raw": ({"codec": "raw"}, "codec slot_codec compression"),
    "tables": (
        {"codec": "asymmetric", "bits": 2, "tables": ITEM8, "compression": "zstd"},
        "codec bits slot_codec compression tables.item.bits",
    ),
    "slots": (
        {"codec": "symmetric", "bits": 3, "slot_codec": "auto"},
        "codec bits slot_codec compression",
    ),
    "objects": (
        {
            "codec": Asymmetric(bits=4, refits=1),
            "tables": {"item": cnr.TableOptions(codec="raw", slot_codec="bfloat16")},
        },
        # As many elements are raw.
        "codec slot_codec compression tables.user.codec tables.item.slot_codec",
    ),
}


@each_of("name", OLD)
def test_an_older_run_tells_by_the_codecs_of_its_newest_full_step(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / name
    first, inherited = OLD[name]
    before = save(root, 0, cnr.Options(**first), begin=True)
    save(root, 1, exact=True)
    rewrite(root, lambda document: document.pop("encoding"))
    # All bits of one step were asked for, which is no choice of the run.
    report = save(root, 2)
    assert codecs(report) == codecs(before)
    assert sorted(report.inherited) == sorted(inherited.split())
    features = [
        json.loads(manifest_of(root, step).read_bytes())["required_features"]
        for step in (0, 2)
    ]
    assert features[0] == features[1]


def test_what_is_given_otherwise_is_told_of_single_tables_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user = {"user": cnr.TableOptions(codec="raw")}
    save(tmp_path, 0, cnr.Options(codec="asymmetric", tables=user), begin=True)
    user = {"user": cnr.TableOptions(codec="adaptive"), "item": cnr.TableOptions()}
    with caplog.at_level(logging.INFO, "cnr_jax"):
        save(tmp_path, 1, cnr.Options(bits=8, tables=user))
    (said,) = [r for r in caplog.messages if "given otherwise" in r]
    assert said.endswith(
        "at step 0: bits=8 (was 4), tables.user.codec='adaptive' (was 'raw')"
    )


def test_a_step_that_one_goes_back_to_says_what_is_inherited(tmp_path: Path) -> None:
    save(tmp_path, 0, cnr.Options(codec="raw"), begin=True)
    save(tmp_path, 1, cnr.Options(codec="asymmetric", bits=8))
    with cnr.CheckpointManager(tmp_path, tables=TABLES) as manager:
        for step, expected in ((1, "asymmetric 8 bits"), (0, "raw")):
            state, touched = manager.restore(step, args=cnr.args.Restore(STATE))
            manager.save(7 + step, args=cnr.args.Save(state, touched, full=True))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None and codecs(report) == each(expected, expected)


def test_a_run_is_gone_on_with_by_whoever_saves(tmp_path: Path) -> None:
    root, raw = tmp_path / "root", each("raw", "raw")
    save(root, 0, cnr.Options(codec="raw"), begin=True)

    def saved(root: Path, step: int, state: Any, touched: Any, **given: Any) -> Any:
        options = cnr.Options(**given)
        with cnr.CheckpointManager(root, tables=TABLES, options=options) as manager:
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            return manager.last_report

    # One manager restores, without any intention to save; others save.
    with cnr.CheckpointManager(root) as manager:
        args = cnr.args.Restore(STATE, tables=TABLES)
        state, touched = manager.restore(None, args=args)
    assert codecs(saved(root, 1, state, touched)) == raw
    # Of the state in memory, without a restore.
    report = saved(root, 2, state, cnr.record(touched, {"user": jnp.array([1])}))
    assert codecs(report) == raw and "codec" in report.inherited
    with pytest.raises(OptionError, match="bits=4 has no effect: codec 'raw'"):
        saved(root, 3, state, touched, bits=4)
    # Another root, and another run of this one, begin anew.
    four = each("adaptive 4 bits", "adaptive 4 bits")
    for place, given in ((tmp_path / "other", {}), (root, {"new_run": True})):
        report = saved(place, 9, state, cnr.init_touched(state, TABLES), **given)
        assert codecs(report) == four and report.inherited == ()


def test_a_run_that_starts_from_another_root_inherits_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, 0, cnr.Options(codec="raw"), begin=True)
    with cnr.CheckpointManager(new, tables=TABLES) as manager:
        args = cnr.args.Restore(STATE)
        state, touched = manager.restore(None, directory=old, args=args)
        manager.save(0, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        report = manager.last_report
    assert report is not None and report.inherited == ()
    assert codecs(report) == each("adaptive 4 bits", "adaptive 4 bits")


def test_a_loop_that_begins_again_in_a_run_that_went_on_inherits_nothing(
    tmp_path: Path,
) -> None:
    save(tmp_path, 5, cnr.Options(codec="raw"), begin=True)
    with cnr.CheckpointManager(tmp_path, tables=TABLES) as manager:
        restored = manager.restore(None, args=cnr.args.Restore(STATE))
        runs, found = [], []
        for step, (state, touched) in (
            (6, restored),
            (1, (STATE, cnr.init_touched(STATE, TABLES))),
        ):
            manager.save(step, args=cnr.args.Save(state, touched, full=True))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None
            runs.append(report.run)
            found.append((bool(report.inherited), codecs(report)))
    assert runs[0] != runs[1]
    assert found == [
        (True, each("raw", "raw")),
        (False, each("adaptive 4 bits", "adaptive 4 bits")),
    ]


def test_an_adopted_step_of_orbax_gives_nothing_to_inherit(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(STATE))
    report = save(tmp_path, 1, cnr.Options(adopt=True, bits=8, codec="asymmetric"))
    assert report.inherited == () and codecs(report)["user"] == "asymmetric 8 bits"
    report = save(tmp_path, 2, cnr.Options(adopt=True))
    assert codecs(report)["user"] == "asymmetric 8 bits" and "bits" in report.inherited


def test_tables_come_go_and_are_renamed(tmp_path: Path) -> None:
    own = {
        "user": cnr.TableOptions(codec="raw"),
        "item": cnr.TableOptions(bits=8),
    }
    options = cnr.Options(codec="asymmetric", bits=2, tables=own)
    save(tmp_path, 0, options, begin=True)
    # "item" is "thing" now, "user" is gone, and "extra" is new: as the others are.
    state = state_of("thing", "extra")
    report = save(
        tmp_path, 1, state=state, partial=True, rename={"item": "thing", "user": None}
    )
    assert codecs(report) == {
        "thing": "asymmetric 8 bits",
        "extra": "asymmetric 2 bits",
    }
    encoding = json.loads(manifest_of(tmp_path, 1).read_bytes())["encoding"]
    assert list(encoding["tables"]) == ["thing"]
    report = save(tmp_path, 2, state=state)
    assert report.inherited[-1] == "tables.thing.bits"
