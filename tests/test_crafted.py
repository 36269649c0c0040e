"""Roots that somebody has made to do harm: refused or passed over, with no hang and no damage."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.format.fields import dump_document
from cnr_jax.repository.step import read_manifest

from .conftest import case_of, flip, skip_below
from .older_steps import leave_dense_to_orbax

UUID = "ab" * 16
WRITER = "cnr_jax.writer.json"


def claim(**aside: Any) -> dict[str, Any]:
    """A claim of a process that is no more, with what it had moved aside."""
    return {
        "id": UUID,
        "host": "nowhere",
        "pid": 2**22 + 1,
        "since": "2026-01-01T00:00:00+00:00",
        "aside": {
            "uuid": UUID,
            "directory": "9",
            "item": "default",
            "moved": [["9", f"9.abandoned-g1-{UUID}"]],
            **aside,
        },
    }


# Names before and now, of which one leads out of the root, or is of a form that no rollback makes.
RENAMES = {
    "to outside": ["../taken", f"1.abandoned-g1-{UUID}"],
    "from outside": ["9", "../victim"],
    "both": ["../taken9", f"../victim9.abandoned-g1-{UUID}"],
    "absolute": ["{out}/taken9", "{out}/victim"],
    "any folder of the root": ["9", "mine"],
    "a step": ["9", "1"],
    "to no step": ["mine", f"mine.abandoned-g1-{UUID}"],
    "of another step": ["9", f"1.abandoned-g1-{UUID}"],
    "short": ["9", "9.abandoned-g1-ab"],
    "no generation": ["9", f"9.abandoned-g-{UUID}"],
    "a file in it": ["9", f"9.abandoned-g1-{UUID}/../mine"],
    "nul": ["9", f"9\0.abandoned-g1-{UUID}"],
    "half a pair": ["\ud8009", f"\ud8009.abandoned-g1-{UUID}"],
    "three": ["9", f"9.abandoned-g1-{UUID}", "9"],
    "numbers": [9, 9],
}


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def two_steps(run: Any, root: Path) -> None:
    with run.open(root, policy=cnr.Full()) as manager:
        run.run(manager, range(2))


def goes_on(run: Any, root: Path) -> None:
    """Opening, restoring and saving work, and nothing that was there is gone."""
    with run.open(root, policy=cnr.Full()) as manager:
        steps = manager.all_steps()
        assert steps == [*range(len(steps))] and len(steps) > 1
        run.restore(manager, None)
        run.run(manager, [len(steps)])


def all_restore(run: Any, root: Path) -> None:
    with run.open(root) as manager:
        assert manager.all_steps() == [*run.truth]
        for step in run.truth:
            run.check(manager, step)


def test_crafted_claims_rename_nothing(tmp_path: Path, tiny_run: Any) -> None:
    run, root, victim = tiny_run(), tmp_path / "root", tmp_path / "victim"
    two_steps(run, root)
    for folder in (
        victim,
        tmp_path / f"victim9.abandoned-g1-{UUID}",
        root / "mine",
        root / f"1.abandoned-g1-{UUID}",
        root / f"mine.abandoned-g1-{UUID}",
    ):
        folder.mkdir()
        (folder / "file").write_text("mine")
    before = {p: tree(p) for p in tmp_path.iterdir() if p != root}
    for case, names in RENAMES.items():
        moved = [
            name.replace("{out}", str(tmp_path)) if isinstance(name, str) else name
            for name in names
        ]
        (root / WRITER).write_text(json.dumps(claim(moved=[moved])))
        inside = tree(root).keys()
        with case_of(case):
            goes_on(run, root)
            assert {p: tree(p) for p in tmp_path.iterdir() if p != root} == before
            assert inside <= tree(root).keys()
    all_restore(run, root)


def test_claims_that_name_a_save_elsewhere_are_not_understood(
    tmp_path: Path, tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be looked there whether steps are to be brought back."""
    run, root = tiny_run(), tmp_path / "root"
    two_steps(run, root)
    (root / f"9.abandoned-g1-{UUID}").mkdir()
    cases = itertools.product(
        ("directory", "item"), ("../victim", "", "a/b", "..", "a\0b", 3, None)
    )
    for key, name in cases:
        caplog.clear()
        (root / WRITER).write_text(json.dumps(claim(**{key: name})))
        with case_of((key, name)):
            goes_on(run, root)
            assert (root / f"9.abandoned-g1-{UUID}").is_dir()
            assert f"aside.{key}" in caplog.text
    all_restore(run, root)


def test_claims_of_the_right_form_are_still_followed(
    tmp_path: Path, tiny_run: Any
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    two_steps(run, root)
    (root / "1").rename(root / f"1.abandoned-g1-{UUID}")
    moved = [["1", f"1.abandoned-g1-{UUID}"]]
    (root / WRITER).write_text(json.dumps(claim(moved=moved)))
    goes_on(run, root)
    all_restore(run, root)


def deep(path: Path) -> None:
    path.write_text('{"aside": ' + "[" * 100_000 + "]" * 100_000 + "}")


def numbers(path: Path) -> None:
    text = json.dumps({**claim(), "pid": "NUMBER"})
    path.write_text(text.replace('"NUMBER"', "1e400"))


def long_number(path: Path) -> None:
    text = json.dumps({**claim(), "pid": "NUMBER"})
    path.write_text(text.replace('"NUMBER"', "9" * 4000))


def own_group(path: Path) -> None:
    path.write_text(json.dumps({**claim(), "pid": 0}))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    """A file of 1 TB, which takes no room."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\0")


def listed(path: Path) -> None:
    path.write_text("[1]")


NO_CLAIMS = (
    deep,
    numbers,
    long_number,
    own_group,
    pipe,
    endless,
    large,
    no_text,
    listed,
)


def test_whatever_is_in_the_place_of_a_claim_a_run_goes_on(
    tmp_path: Path, tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    two_steps(run, root)
    for make in NO_CLAIMS:
        caplog.clear()
        (root / WRITER).unlink()
        make(root / WRITER)
        with case_of(make):
            goes_on(run, root)
            assert "cannot be understood" in caplog.text
            assert json.loads((root / WRITER).read_text())["pid"] == os.getpid()
    all_restore(run, root)


def test_a_folder_in_the_place_of_a_claim_keeps_a_run_from_saving_with_an_error(
    tmp_path: Path, tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    caplog.set_level(logging.CRITICAL)
    two_steps(run, root)
    (root / WRITER).unlink()
    (root / WRITER).mkdir()
    with cnr.CheckpointManager(root, tables=run.tables) as manager:
        run.restore(manager, None)
        with pytest.raises((cnr.errors.CnrError, OSError), match=WRITER):
            run.run(manager, [2])
        assert manager.all_steps() == [0, 1]


def resealed(
    item: Path,
    change: Callable[[dict[str, Any]], None] = lambda manifest: None,
    of_process: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Changes the manifests of a checkpoint and gives them the right digests again."""
    path = item / "manifest.json"
    manifest = json.loads(path.read_bytes())
    if of_process is not None:
        inner = item / "manifest.p00000.json"
        process = json.loads(inner.read_bytes())
        of_process(process)
        data = dump_document({k: v for k, v in process.items() if k != "sha256"})
        inner.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        manifest["processes"][0] |= {"bytes": len(data), "sha256": digest}
    change(manifest)
    del manifest["sha256"]
    path.write_bytes(dump_document(manifest))


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is saved once for all tests."""
    return SimpleNamespace(root=tmp_path_factory.mktemp("saved") / "root", run=None)


@pytest.fixture
def two_fulls(tiny_run: Any, once: Any, tmp_path: Path) -> tuple[Any, Path, Path]:
    """A run, its root of two steps that do not rest on each other, the item of the newer."""
    if once.run is None:
        once.run = tiny_run()
        two_steps(once.run, once.root)
    root = tmp_path / "root"
    shutil.copytree(once.root, root)
    run = dataclasses.replace(once.run, truth=dict(once.run.truth))
    return run, root, root / "1" / "default"


def is_refused(run: Any, root: Path, match: str, **options: Any) -> None:
    """Step 1 cannot be restored by its number, is passed over without one, and `verify` says so."""
    found = [problem for problem in cnr.verify(root) if "1" in problem.consequence]
    assert found, "verify"
    reading = cnr.Options(codec="raw", **options)
    for args in (cnr.args.Restore(run.state), cnr.args.Restore()):
        with cnr.CheckpointManager(root, tables=run.tables, options=reading) as manager:
            with pytest.raises(cnr.errors.CnrError, match=match) as caught:
                manager.restore(1, args=args)
            assert isinstance(caught.value, cnr.errors.DAMAGE)
    with cnr.CheckpointManager(root, tables=run.tables, options=reading) as manager:
        run.restore(manager, None)
    run.same(run.state, run.truth[0])


@pytest.mark.parametrize("which", ["all", "one table", "a slot"])
def test_full_checkpoints_that_lack_rows_do_not_restore_as_zeros(
    two_fulls: Any, which: str
) -> None:
    run, root, item = two_fulls

    def drop(process: dict[str, Any]) -> None:
        for tile in process["tiles"]:
            table = tile["table"] == "item" and tile["leaf"] == "table"
            slot = tile["table"] == "user" and tile["leaf"] != "table"
            if {"all": True, "one table": table, "a slot": slot}[which]:
                tile["segments"] = []

    resealed(item, of_process=drop)
    is_refused(run, root, "lacks rows")


def exchanged_rows(item: Path) -> None:
    """Two tiles of a table take each other's rows; the digest in the file is right again."""
    path = item / "manifest.p00000.json"
    process = json.loads(path.read_bytes())
    first, second, *_ = (
        tile
        for tile in process["tiles"]
        if (tile["table"], tile["leaf"]) == ("user", "table")
    )
    parts = [tile["segments"][0]["parts"] for tile in (first, second)]
    assert parts[0] != parts[1]
    second["segments"][0]["parts"], first["segments"][0]["parts"] = parts
    del process["sha256"]
    path.write_bytes(dump_document(process))


def anothers(item: Path) -> None:
    shutil.copy(item.parents[1] / "0" / "default" / "manifest.p00000.json", item)


PROCESS_MANIFESTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit flipped": (lambda item: flip(item / "manifest.p00000.json"), "file_damaged"),
    "empty": (
        lambda item: (item / "manifest.p00000.json").write_bytes(b""),
        "file_damaged",
    ),
    "gone": (lambda item: (item / "manifest.p00000.json").unlink(), "file_missing"),
    "of another step": (anothers, "file_damaged"),
    "rows exchanged": (exchanged_rows, "file_damaged"),
}


@pytest.mark.parametrize("name", PROCESS_MANIFESTS)
def test_process_manifests_for_which_the_manifest_does_not_vouch_are_refused(
    two_fulls: Any, name: str
) -> None:
    """That of the step itself is as it was written."""
    if name == "rows exchanged":
        skip_below(2)  # of tiles
    run, root, item = two_fulls
    change, kind = PROCESS_MANIFESTS[name]
    change(item)
    (found,) = (problem for problem in cnr.verify(root) if problem.consequence)
    assert (found.directory, found.file) == ("1", "default/manifest.p00000.json")
    assert (found.kind, found.consequence) == (kind, ("1",))
    is_refused(run, root, r"manifest\.p00000\.json")


def not_files() -> dict[str, Callable[[Path], None]]:
    return {
        "a pipe": os.mkfifo,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a folder": os.mkdir,
    }


@pytest.mark.parametrize(
    ("made", "verify_reads"),
    [("a pipe", True), ("a pipe", False), ("a device", False), ("a folder", True)],
)
def test_chunks_that_are_no_files_are_refused(
    two_fulls: Any, made: str, verify_reads: bool
) -> None:
    run, root, item = two_fulls
    (chunk,) = item.glob("rows.p00000/raw.rows.float32/c/0")
    chunk.unlink()
    not_files()[made](chunk)
    is_refused(run, root, "is not a file", verify_reads=verify_reads)


@pytest.mark.parametrize(
    ("made", "file"),
    [
        ("a pipe", "manifest.json"),
        ("a device", "manifest.json"),
        ("a device", "manifest.p00000.json"),
        ("a pipe", "dense/p00000/c/0"),
        ("a pipe", "dense/_METADATA"),
    ],
)
def test_small_files_that_are_no_files_are_refused(
    two_fulls: Any, made: str, file: str
) -> None:
    run, root, item = two_fulls
    if file == "dense/_METADATA":
        leave_dense_to_orbax(item)
    (item / file).unlink()
    not_files()[made](item / file)
    is_refused(run, root, "is not a file|does not exist")


@pytest.mark.parametrize("made", ["a pipe", "a device"])
def test_metadata_of_orbax_that_is_no_file_is_refused(
    two_fulls: Any, made: str
) -> None:
    run, root, item = two_fulls
    file = item.parent / "_CHECKPOINT_METADATA"
    file.unlink()
    not_files()[made](file)
    is_refused(run, root, "_CHECKPOINT_METADATA is not a file")
    with cnr.CheckpointManager(
        root, tables=run.tables, options=cnr.Options(codec="raw")
    ) as manager:
        run.restore(manager, 0)
        run.run(manager, range(2, 4))
        run.check(manager, 3)


def test_metrics_that_are_no_file_do_not_keep_a_run_from_going_on(
    tmp_path: Path, tiny_run: Any
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    options = cnr.Options(codec="raw")
    for steps in (range(2), range(2, 4)):
        with cnr.CheckpointManager(
            root, tables=run.tables, options=options, orbax_options=best
        ) as manager:
            if steps.start:
                run.restore(manager, None)
            for step in steps:
                run.run(manager, [step], metrics={"loss": float(step)})
            assert manager.best_step() == steps[-1]
        (root / "0" / "metrics" / "metrics").unlink(missing_ok=True)
        os.mkfifo(root / "0" / "metrics" / "metrics")


ROWS = 10**9


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("layout", ["as saved", "another"])
def test_rows_that_are_promised_but_not_stored_take_no_memory(
    tmp_path: Path, compressed: bool, layout: str
) -> None:
    """A manifest of 2 KB promises 10^9 rows: 256 GB."""
    state = {"user": jnp.ones((512, 64))}
    tables = cnr.find_tables(state, ["user"])
    root, item = tmp_path / "root", tmp_path / "root" / "0" / "default"
    compression = "zstd" if compressed else None
    options = cnr.Options(codec="raw", compression=compression)
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))

    def promise(manifest: dict[str, Any]) -> None:
        table = manifest["tables"][0]
        table |= {"rows": ROWS, "padded_rows": ROWS}
        table["leaves"][0]["shape"] = [ROWS, 64]
        if layout == "another":
            shards = {"shards": 1, "rows_per_shard": ROWS}
            table["layout"] = {"name": "mod", "configuration": shards}

    def of_process(process: dict[str, Any]) -> None:
        process["row_ids"][0]["count"] = ROWS
        process["tiles"][0]["box"] = [0, ROWS, 0, 64]
        for array in process["arrays"].values():
            array |= {"length": 64 * ROWS, "chunk": 64 * ROWS}

    resealed(item, promise, of_process)
    assert (item / "manifest.json").stat().st_size < 4096
    assert [problem.kind for problem in cnr.verify(root) if problem.consequence]
    wanted = {"user": jax.ShapeDtypeStruct((ROWS, 64), jnp.float32)}
    tables = cnr.find_tables(wanted, ["user"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for args in (cnr.args.Restore(), cnr.args.Restore(wanted, tables=tables)):
        with cnr.CheckpointManager(root) as manager:
            with pytest.raises(cnr.errors.IntegrityError, match=r"size|cannot hold"):
                manager.restore(0, args=args)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 20, "in KiB"


def claim_rows(process: dict[str, Any], manifest: dict[str, Any]) -> None:
    """The last rows of the table are very many, and all there, as far as manifests tell."""
    table = manifest["tables"][0]
    table |= {"rows": CLAIMED, "padded_rows": CLAIMED}
    table["leaves"][0]["shape"][0] = CLAIMED
    tile = max(process["tiles"], key=lambda tile: tile["box"])
    first = tile["box"][0]
    tile["box"][1] = CLAIMED
    for segment in tile["segments"]:
        segment["row_ids"] = len(process["row_ids"])
    count = CLAIMED - first
    process["row_ids"].append({"form": "all", "offset": 0, "bytes": 0, "count": count})


def claim_columns(process: dict[str, Any], manifest: dict[str, Any]) -> None:
    manifest["tables"][0]["leaves"][0]["shape"][1] = CLAIMED
    for tile in process["tiles"]:
        tile["box"][3] = CLAIMED


def claim_arrays(process: dict[str, Any], manifest: dict[str, Any]) -> None:
    claim_rows(process, manifest)
    for name, array in process["arrays"].items():
        if name != "row_ids":
            array |= {"length": 64 * CLAIMED, "chunk": 64 * CLAIMED}


CLAIMED = 2**33
READERS: dict[str, Callable[[Path], Any]] = {
    "changed_rows": lambda root: cnr.changed_rows(root, 1, "user"),
    "changed_rows of a full": lambda root: cnr.changed_rows(root, 0, "user"),
    "read_rows": lambda root: cnr.read_rows(root, "user", [3, 500, CLAIMED - 1], 1),
    "read_rows with slots": lambda root: cnr.read_rows(
        root, "user", [3, 511], slots=True
    ),
}


@pytest.mark.parametrize(("level", "chunks"), [("data", 200), ("structure", 100_000)])
def test_of_many_chunks_that_are_not_there_some_are_listed(
    two_fulls: Any, level: Any, chunks: int
) -> None:
    _, root, item = two_fulls
    claimed = {"length": chunks, "chunk": 1, "crc32c": [1] * chunks}
    changed: list[str] = []

    def of_process(process: dict[str, Any]) -> None:
        changed.extend(name for name in process["arrays"] if name != "row_ids")
        for name in changed:
            process["arrays"][name] |= claimed

    resealed(item, of_process=of_process)
    found = [p for p in cnr.verify(root, level) if "/rows.p00000/" in p.file]
    assert all(p.consequence == ("1",) for p in found) and changed
    for name in changed:
        of_array = [p for p in found if name in p.file.split("/")]
        single = [p for p in of_array if "/c/" in p.file]
        (others,) = [p for p in of_array if p not in single]
        assert len(single) == 32
        assert others.message.startswith(f"{chunks - 32:,} more chunks are not listed")


@pytest.mark.parametrize("codec", ["raw", "adaptive"])
@pytest.mark.parametrize("claim", [claim_rows, claim_columns, claim_arrays])
def test_single_rows_that_are_promised_but_not_stored_take_no_memory(
    tmp_path: Path, claim: Any, codec: str
) -> None:
    """Of tiles that are joined, the last one has all rows, and others have a list of them."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], "rows")
    rows = jax.NamedSharding(mesh, jax.P("rows"))
    state = {"user": jax.device_put(jnp.ones((512, 64)), rows)}
    tables, root = cnr.find_tables(state, ["user"]), tmp_path / "root"
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec=codec, policy=cnr.Consecutive())
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(2):
            manager.save(step, args=cnr.args.Save(state, touched))
            touched = cnr.record(
                touched, {"user": jnp.r_[jnp.arange(0, 384, 3), jnp.arange(384, 512)]}
            )
    for step in ("0", "1"):
        item = root / step / "default"
        manifest = json.loads((item / "manifest.json").read_bytes())

        def of_process(found: dict[str, Any], told: Any = manifest) -> None:
            claim(found, told)

        resealed(item, of_process=of_process)
        resealed(item, lambda found, told=manifest: found.update(tables=told["tables"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, read in READERS.items():
        with case_of(name):
            if claim is claim_rows and name == "read_rows with slots":
                # The rows that are asked for are there: they may be read.
                with contextlib.suppress(*cnr.errors.DAMAGE):
                    assert read(root)[0].tolist() == [[1.0] * 64] * 2
                continue
            with pytest.raises(cnr.errors.CnrError) as caught:
                read(root)
            is_no_row = caught.value.kind == "no_row"
            assert isinstance(caught.value, cnr.errors.DAMAGE) or is_no_row
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 18, "in KiB"


def nul(text: str) -> str:
    return text[:-1] + "\0" + text[-1]


def half(text: str) -> str:
    return text[:-1] + "\ud800" + text[-1]


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("process", nul),
        ("dense", half),
        ("array", nul),
        ("array", half),
        ("parent", nul),
    ],
)
def test_names_that_no_file_can_have_are_refused(
    two_fulls: Any, where: str, change: Callable[[str], str]
) -> None:
    run, root, item = two_fulls
    if where == "dense":
        leave_dense_to_orbax(item)

    def manifest(found: dict[str, Any]) -> None:
        if where == "process":
            found["processes"][0]["path"] = change(found["processes"][0]["path"])
        if where == "dense":
            found["dense_files"][0]["path"] = change(found["dense_files"][0]["path"])
        if where == "parent":
            found["kind"] = "delta"
            parent = {"directory": change("00"), "uuid": UUID, "clock": 0}
            found["parent"] = parent

    def process(found: dict[str, Any]) -> None:
        if where != "array":
            return
        text = json.dumps(found)
        for name in list(found["arrays"]):
            text = text.replace(json.dumps(name), json.dumps(change(name)))
        found.clear()
        found.update(json.loads(text))

    resealed(item, manifest, process)
    is_refused(run, root, "is not valid|cannot be restored")


def put(manifest: dict[str, Any], key: str, value: int) -> None:
    if key == "rows":
        manifest["tables"][0]["rows"] = value
    elif key == "secs":
        manifest["history"][-1]["secs"] = value
    elif key == "clock":
        manifest["recorded_clock"] = value
    else:
        manifest[key] = value


def test_numbers_past_any_array_are_refused(two_fulls: Any) -> None:
    """By whoever reads the manifest; and a step in which it is, by all who read that."""
    run, root, item = two_fulls
    good = (item / "manifest.json").read_bytes()
    keys = ("generation", "restores", "rows", "secs", "clock")
    for key, value in itertools.product(keys, (2**63, 10**400, 10**4000)):
        (item / "manifest.json").write_bytes(good)
        resealed(item, lambda manifest, k=key, v=value: put(manifest, k, v))
        with case_of(key), pytest.raises(cnr.errors.ManifestError, match="not valid"):
            read_manifest(item)
    is_refused(run, root, "is not valid")


LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    "changes",
    [
        {"restores": LARGEST},
        {"generation": LARGEST},
        {
            "history": [
                {"step": 1, "kind": kind, "bytes": LARGEST, "rows": LARGEST}
                | {"secs": 0.5, "saves": 1}
                for kind in ["full", *["delta"] * 47]
            ]
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_counters_at_their_limit_give_no_save_that_cannot_be_read(
    tiny_run: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = tiny_run()
    policy = cnr.Consecutive(max_chain=200)
    with run.open(tmp_path, policy=policy) as manager:
        run.run(manager, [1, 2])
    at = "2" if "generation" in changes else "1"  # then a branch needs a higher one
    path = tmp_path / at / "default" / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["sha256"]
    path.write_bytes(dump_document({**document, **changes}))
    with run.open(tmp_path, policy=policy) as manager:
        run.restore(manager, 1)
        saved = {1}
        for step in (3, 4):
            run.train(step)
            with contextlib.suppress(cnr.errors.SaveError):
                run.save(manager, step)
                manager.wait_until_finished()
                saved.add(step)
    with run.open(tmp_path) as manager:
        assert saved <= {*manager.all_steps()}


@pytest.mark.parametrize("key", ["chunk", "length"])
@pytest.mark.parametrize("size", [2**59, 2**62, LARGEST])
def test_arrays_of_more_bytes_than_can_be_counted_are_refused(
    two_fulls: Any, key: str, size: int
) -> None:
    """As damage that names the file and the field, not by what TensorStore makes of it."""
    run, root, item = two_fulls
    changed: list[str] = []

    def of_process(process: dict[str, Any]) -> None:
        name = next(iter(process["arrays"]))
        process["arrays"][name] |= {"chunk": size, key: size}
        changed.append(name)

    resealed(item, of_process=of_process)
    is_refused(
        run, root, rf"arrays\.{changed[0]}\.{key}: expected .*at most {2**59 - 1}"
    )
    (problem, *_) = cnr.verify(root)
    assert problem.file == "default/manifest.p00000.json"


@pytest.mark.parametrize(
    "case", ["below a table", "a table above", "the same", "twice"]
)
def test_leaves_that_no_state_has_all_of_are_refused(two_fulls: Any, case: str) -> None:
    run, root, item = two_fulls

    def change(manifest: dict[str, Any]) -> None:
        table = manifest["tables"][0]["leaves"][0]["path"]
        dense = manifest["dense_leaves"]
        if case == "twice":
            dense[0]["path"] = dense[1]["path"]
        else:
            more = {"below a table": ["w"], "the same": []}
            manifest["dense_leaves"][0]["path"] = [*table, *more.get(case, [])]
        if case == "a table above":
            manifest["tables"][0]["leaves"][0]["path"] = [*table, "rows"]

    resealed(item, change)
    is_refused(run, root, r"path \[.*\]: is at or below another leaf's, \[")
