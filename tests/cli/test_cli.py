"""The command line: what it prints, how it ends, and that it changes nothing."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli import roots
from cnr_jax.cli.app import app


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the root lies that is saved once for all tests."""
    return tmp_path_factory.mktemp("saved") / "root"


@pytest.fixture
def root(tiny_run: Any, first: Path, tmp_path: Path) -> Path:
    """Steps 0 (full), 1 to 3 (deltas on it), exact; the values beside it."""
    truth = first.parent / "truth.npz"
    if not first.exists():
        run = tiny_run()
        with run.open(first, policy=cnr.Intermittent()) as m:
            run.run(m, range(4))
        np.savez(
            truth, **{f"{s}{k}": v for s, t in run.truth.items() for k, v in t.items()}
        )
    shutil.copytree(first, tmp_path / "root")
    shutil.copy(truth, tmp_path)
    return tmp_path / "root"


def truth_of(root: Path, step: int, leaf: str) -> np.ndarray:
    """What was saved of `leaf`, such as `params/user`."""
    top, table = leaf.split("/")
    return np.load(root.parent / "truth.npz")[
        f"{step}['{top}']['{table}']['embedding']"
    ]


def call(*words: Any) -> tuple[int, str, str]:
    """The exit code of a command, what it printed, and what it said of an error."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def as_json(*words: Any) -> tuple[int, Any]:
    code, out, _ = call(*words, "--json")
    document = json.loads(out)
    assert (document["schema"], document["verb"]) == (2, words[0])
    return code, document


def lose(root: Path, step: int) -> None:
    """Loses a file of a step, which its deltas do not rest on."""
    next((root / f"{step}" / "default" / "rows.p00000").rglob("c/0")).unlink()


def tree(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))}


# ---- verbs ----------------------------------------------------------------------------------


def test_ls_lists_chains_and_what_restores(root: Path) -> None:
    lose(root, 2)
    before = tree(root)
    code, out, err = call("ls", root)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [line[0] for line in lines[:-1]] == ["step", "0", "├", "├", "└"]
    assert "age" in lines[0] and "branch" not in lines[0]
    assert lines[2][1:4] == ["1", "delta", "0"] and lines[2][-1] == "yes"
    assert lines[3][-2:] == ["is", "missing"]
    assert "restore(None) takes 3; 1 cannot be restored" in out
    assert tree(root) == before
    code, found = as_json("ls", root)
    assert code == 0 and found["latest_step"] == 3
    described = cnr.describe(root).asdict()["steps"]
    assert found["steps"] == json.loads(json.dumps(described))


def test_show_takes_a_step_apart(root: Path) -> None:
    code, out, _ = call("show", root, 2)
    assert code == 0
    assert "step 2: delta on 0" in out and "chain:       0 <- 2" in out
    assert "rows since the baseline (step 0)" in out
    (line,) = (each for each in out.splitlines() if each.startswith("user"))
    assert line.split()[:8] == [
        "user",
        "table",
        "64",
        "x",
        "4",
        "float32",
        "raw",
        line.split()[7],
    ]
    assert line.split()[-2:] == ["-", "-"]  # it is stored exactly
    code, found = as_json("show", root, 2)
    assert code == 0 and found["chain"] == [0, 2]
    assert found["tables"][0]["leaves"][1]["path"] == "acc/user/embedding"


def test_show_decodes_the_first_rows_of_a_table(root: Path) -> None:
    code, found = as_json("show", root, 3, "user", "--rows", 7)
    assert code == 0 and (found["step"], found["table"]) == (3, "user")
    leaves = found["leaves"]
    (slot,) = leaves.keys() - {"table"}
    for leaf, saved in (("table", "params/user"), (slot, "acc/user")):
        want = truth_of(root, 3, saved)[:7]
        np.testing.assert_array_equal(np.float32(leaves[leaf]), want)
    code, out, _ = call("show", root, 3, "item", "--rows", 100)
    assert code == 0 and len(out.splitlines()) == 1 + 32
    value = truth_of(root, 3, "params/item")[31, 0]
    assert out.splitlines()[-1].split()[:2] == ["31", f"{value:.4g}"]


def test_rows_shows_those_that_are_asked_for(root: Path) -> None:
    code, found = as_json("rows", root, "user", 40, "3:6", 40)
    assert code == 0 and (found["step"], found["ids"]) == (3, [40, 3, 4, 5, 40])
    slot = found["leaves"].keys() - {"table"}
    want = truth_of(root, 3, "params/user")[found["ids"]]
    np.testing.assert_array_equal(np.float32(found["leaves"]["table"]), want)
    want = truth_of(root, 3, "acc/user")[found["ids"]]
    np.testing.assert_array_equal(np.float32(found["leaves"][slot.pop()]), want)
    code, out, _ = call("rows", root, "item", 31, "--step", 1)
    value = truth_of(root, 1, "params/item")[31, 0]
    assert code == 0 and out.splitlines()[1].split()[:2] == ["31", f"{value:.4g}"]
    code, out, err = call("rows", root, "item", 5, "30:33")
    assert (code, out) == (13, "") and "'item' has rows 0 to 31, got 32" in err
    assert call("rows", root, "other", 5)[0] == 13
    assert call("rows", root, "user", 5, "--step", 9)[0] == 13
    for wrong in ("x", "5:2", "3:3", "1:", "\u0663"):
        assert call("rows", root, "user", wrong)[0] == 2, wrong
    for newest in ([], ["--step", "latest"]):
        head, columns, _ = call("rows", root, "user", 40, *newest)[1].splitlines()
        assert head == "step 3" and columns.split()[:2] == ["row", "table"]
    lose(root, 3)
    assert as_json("rows", root, "user", 5)[1]["step"] == 2
    code, out, err = call("rows", root, "user", 5, "--step", 3)
    assert (code, out) == (14, "") and "is missing" in err


def test_rows_are_shown_by_their_logical_ids(tmp_path: Path, unsynced: None) -> None:
    rows = np.arange(12 * 4, dtype=np.float32).reshape(12, 4)
    layout = cnr.ModSharded(shards=3, rows_per_shard=4)
    stored = np.zeros((12, 4), np.float32)
    stored[[layout.to_physical(i) for i in range(12)]] = rows
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    spec = jax.sharding.PartitionSpec("x", "y")
    state = {"t": jax.device_put(stored, jax.sharding.NamedSharding(mesh, spec))}
    specs = {"t": cnr.TableSpec("t", layout=layout)}
    tables = cnr.find_tables(state, specs)
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(tmp_path / "root", tables=tables, options=options) as m:
        m.save(0, args=cnr.args.Save(state))
    _, found = as_json("show", tmp_path / "root", 0, "t", "--rows", 12)
    np.testing.assert_array_equal(found["leaves"]["table"], rows)
    _, found = as_json("rows", tmp_path / "root", "t", 7, 2)
    np.testing.assert_array_equal(found["leaves"]["table"], rows[[7, 2]])


def test_values_that_json_has_no_number_for_are_texts(
    tmp_path: Path, unsynced: None
) -> None:
    values = jnp.array([[np.nan, 1], [np.inf, 2], [0, 3]], jnp.bfloat16)
    state = {"t": values}
    tables = cnr.find_tables(state, ["t"])
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(
        tmp_path / "root", tables=tables, options=options
    ) as manager:
        manager.save(0, args=cnr.args.Save(state))
    _, found = as_json("show", tmp_path / "root", 0, "t")
    assert found["leaves"]["table"][:2] == [["nan", 1.0], ["inf", 2.0]]


def test_verify_lists_problems_and_ends_with_a_finding(root: Path) -> None:
    assert call("verify", root)[:2] == (0, "nothing is wrong\n")
    (root / "9.orbax-checkpoint-tmp").mkdir()
    code, out, _ = call("verify", root)
    assert code == 0 and "0 problems, 1 note" in out
    lose(root, 0)
    code, out, _ = call("verify", root, "--level", "structure")
    assert code == 3 and "cannot be restored: 0, 1, 2, 3" in out
    lines = out.splitlines()
    assert len(lines) == 3 and lines[0].startswith("0/default/rows.p00000/")
    assert lines[0].count("rows.p00000") == 1 and lines[1].startswith("9.orbax-")
    code, found = as_json("verify", root)
    assert code == 3 and found["lost"] == ["0", "1", "2", "3"]
    problems = cnr.verify(root)
    assert [each["kind"] for each in found["problems"]] == [
        each.kind for each in problems
    ]


def test_verify_goes_by_the_numbers_of_steps(tmp_path: Path) -> None:
    state = {"user": jnp.ones((4, 2))}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(policy=cnr.Full())
    with cnr.CheckpointManager(
        tmp_path / "run", tables=tables, options=options
    ) as manager:
        for step in (9, 10, 101):
            manager.save(step, args=cnr.args.Save(state))
    for step in (9, 10, 101):
        (tmp_path / "run" / str(step) / "default" / "manifest.json").write_text("{")
    problems = cnr.verify(tmp_path / "run")
    assert [each.directory for each in problems] == ["9", "10", "101"]
    _, out, _ = call("verify", tmp_path / "run")
    assert "cannot be restored: 9, 10, 101" in out


def test_verify_tells_how_far_it_is(root: Path) -> None:
    told: list[tuple[int, int]] = []
    cnr.verify(root, on_step=lambda done, of: told.append((done, of)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_explain_says_what_the_policy_saw(root: Path) -> None:
    code, out, _ = call("explain", root, 2)
    assert code == 0
    assert "step 2: delta on 0, by the policy 'intermittent'" in out
    assert "chain:   0 (full) <- 2 (delta)" in out
    assert "seen:    2 saves since the baseline\n" in out
    _, found = as_json("explain", root, 2)
    seen = [cnr.SaveRecord(**each) for each in found["seen"]]
    assert [each.step for each in seen] == [0, 1]
    described = cnr.describe(root).steps
    rows = [each.table_bytes + each.slot_bytes for each in described]
    dense = [each.dense_bytes for each in described]
    assert [each.depth for each in seen] == [1, 2]
    assert seen[0].restore_bytes == rows[0] + dense[0]
    assert seen[1].restore_bytes == rows[0] + rows[1] + dense[1]
    decision = cnr.Intermittent().decide(seen)
    assert (decision.kind, decision.reason) == (found["kind"], found["reason"])
    assert found["is_due"] is False
    assert found["average_bytes"] == sum(each.bytes for each in seen) / 2
    out = call("explain", root, 0)[1]
    assert "seen:    no save: it is the first of its run or branch, or" in out
    assert "none yet, without a delta to go by" in call("explain", root, 1)[1]


def test_explain_finds_what_was_seen_before_a_full_save(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.Intermittent(max_deltas=2)) as manager:
        run.run(manager, range(4))
    code, out, _ = call("explain", tmp_path, 3)
    assert code == 0 and "max_deltas is 2" in out
    assert "seen:    3 saves since the baseline, as step 2 lists them" in out
    for step in (0, 1, 2):
        shutil.rmtree(tmp_path / f"{step}")
    assert "is not there any more" in call("explain", tmp_path, 3)[1]


def test_explain_takes_no_saves_of_another_branch(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.Full()) as manager:
        run.run(manager, [0, 10, 20])
        run.restore(manager, 0)
        run.run(manager, [5, 6])
    assert as_json("explain", tmp_path, 5)[1]["seen"] == []
    assert "it is the first of its run or branch" in call("explain", tmp_path, 5)[1]
    found = as_json("explain", tmp_path, 6)[1]
    assert ([each["step"] for each in found["seen"]], found["seen_in"]) == ([5], 5)


def test_prune_tells_what_goes_and_deletes_it_only_if_told(root: Path) -> None:
    claim = root / "cnr_jax.writer.json"
    before, written = tree(root), claim.read_bytes()
    code, out, _ = call("prune", root, "--keep", 1)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and tree(root) == before
    verdicts = {
        line[0]: [word for word in line if word in ("stays", "goes")] for line in lines
    }
    assert verdicts["0"] == verdicts["3"] == ["stays"]
    assert verdicts["1"] == verdicts["2"] == ["goes"]
    assert "3 rests on it" in out and "older than the newest 1" in out
    assert lines[-1][:3] == ["nothing", "was", "changed:"]
    # It is not known of whoever saved here that it has ended: it was this very process.
    code, found = as_json("prune", root, "--keep", 1, "--yes")
    assert (code, found["error"]["kind"]) == (11, "writer_busy")
    assert tree(root) == before
    code, found = as_json("prune", root, "--keep", 1, "--yes", "--writer-is-dead")
    assert code == 0 and found["is_done"]
    # What is not known stays so: nobody but the user said that it was dead.
    assert claim.read_bytes() == written
    assert [fate["step"] for fate in found["fates"] if fate["stays"]] == [0, 3]
    assert call("ls", root)[1].count("yes") == 2


def test_prune_does_not_take_a_folder_for_somebody_who_saves(root: Path) -> None:
    (root / "cnr_jax.writer.json").unlink()
    (root / "cnr_jax.writer.json").mkdir()
    code, _, err = call("prune", root, "--keep", 1, "--yes", "--writer-is-dead")
    assert code == 1 and "is in the way of who saves here" in err


def test_prune_keeps_as_many_full_steps_as_it_is_told(
    tiny_run: Any, tmp_path: Path, unsynced: None
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root, policy=cnr.Full()) as manager:
        run.run(manager, range(3))
    for fulls, stay in ((1, [2]), (2, [1, 2]), (9, [0, 1, 2])):
        words = ("prune", root, "--keep", 1, "--min-fulls", fulls)
        code, found = as_json(*words)
        assert code == 0
        assert [fate["step"] for fate in found["fates"] if fate["stays"]] == stay
    assert call("prune", root, "--keep", 1, "--min-fulls", 0)[0] == 2
    assert call("prune", root, "--keep", 0)[0] == 2
    words = ("prune", root, "--keep", 1, "--min-fulls", 2, "--yes", "--writer-is-dead")
    assert call(*words)[0] == 0
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"1", "2"}


def test_prune_deletes_other_runs_only_if_told(
    tiny_run: Any, tmp_path: Path, unsynced: None
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    for _ in range(2):
        with run.open(root, policy=cnr.Full(), new_run=True) as manager:
            run.run(manager, range(2))
    (earlier,) = root.glob("earlier-run-*")
    sure = ("--yes", "--writer-is-dead")
    assert call("prune", root, "--keep", 5, *sure)[0] == 0
    assert earlier.exists()
    before = tree(root)
    code, found = as_json("prune", root, "--keep", 5, "--other-runs")
    (gone,) = [fate for fate in found["fates"] if not fate["stays"]]
    assert code == 0 and earlier.name in json.dumps(gone) and tree(root) == before
    assert call("prune", root, "--keep", 5, "--other-runs", *sure)[0] == 0
    assert not earlier.exists() and {"0", "1"} <= set(os.listdir(root))


def test_names_do_not_act_on_the_terminal(tmp_path: Path) -> None:
    name = "us\x1b[31m\n\u202eer"
    state = {name: jnp.zeros((4, 2))}
    tables = cnr.find_tables(state, [name])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
    (tmp_path / "0.abandoned-\x1b[0m\udcff").mkdir()
    escaped = r"us\x1b[31m\n\u202eer"
    assert escaped in call("show", tmp_path, 0)[1]
    code, out, said = call("show", tmp_path, 0, "\x1b[31m")
    assert (code, out) == (13, "") and escaped in said
    for encoding in ("ascii", "utf-8:strict"):
        done = subprocess.run(
            [sys.executable, "-m", "cnr_jax", "ls", str(tmp_path)],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
        )
        assert done.returncode == 0 and not done.stderr
        assert b"\x1b" not in done.stdout


def test_diff_counts_rows_and_tells_how_far_they_moved(root: Path) -> None:
    assert call("diff", root, 2, 2)[0] == 0
    code, found = as_json("diff", root, 1, 3)
    assert code == 3
    by_leaf = {(each["table"], each["leaf"]): each for each in found["leaves"]}
    assert len(by_leaf) == 4
    for table in ("user", "item"):
        old, new = (truth_of(root, step, f"params/{table}") for step in (1, 3))
        rows = (old != new).any(axis=1)
        each = by_leaf[table, "table"]
        assert each["rows"] == len(old)
        assert each["changed_rows"] == rows.sum() > 0
        moved = np.linalg.norm((new - old)[rows], axis=1)
        change = moved / np.linalg.norm(old[rows], axis=1)
        assert each["mean_change"] == pytest.approx(change.mean(), rel=1e-5)
        assert each["worst_change"] == pytest.approx(change.max(), rel=1e-5)
    # Slots of rows that were zero have no relative change.
    slots = [each for each in found["leaves"] if each["leaf"] != "table"]
    assert all(each["changed_rows"] > 0 for each in slots)
    _, out, _ = call("diff", root, 1, 3)
    assert out.splitlines()[0].split()[:4] == ["table", "leaf", "rows", "changed"]


def test_diff_of_blocks_is_that_of_the_whole(root: Path, tiny_limits: Any) -> None:
    whole = as_json("diff", root, 0, 3)[1]["leaves"]
    tiny_limits(compared_block_bytes=8 * 4 * 10)
    for each, other in zip(
        as_json("diff", root, 0, 3)[1]["leaves"], whole, strict=True
    ):
        assert each == pytest.approx(other)


def test_export_writes_a_step_and_says_what_is_lossy(root: Path) -> None:
    to = root.parent / "out" / "step"
    before = tree(root)
    code, out, err = call("export", root, "--to", to, "--format", "safetensors")
    assert (code, err) == (0, "") and tree(root) == before
    assert out.startswith("step 3 as safetensors: ") and f"in {to}" in out
    assert "rounded" not in out
    code, _, err = call("export", root, "--to", to)
    assert code == 1 and "exists already" in err
    code, found = as_json("export", root, 1, "--to", f"{to}2", "--table", "user")
    assert code == 0 and (found["step"], found["format"]) == (1, "orbax")
    assert found["leaves"] == ["acc/user/embedding", "params/user/embedding"]
    plain = ocp.StandardCheckpointer().restore(f"{to}2")
    want = truth_of(root, 1, "params/user")
    np.testing.assert_array_equal(plain["params"]["user"]["embedding"], want)
    assert call("export", root, "--to", f"{to}3", "--table", "usr")[0] == 13
    # What no option of the verb can do.
    assert "like=state" in call("export", "--help")[1]
    assert call("export", root, "--to", root / "out")[0] == 1
    lose(root, 2)
    assert call("export", root, 2, "--to", f"{to}3")[0] == 14
    assert sorted(os.listdir(to.parent)) == ["step", "step2"]


def test_export_that_cannot_be_written_has_an_exit_code_and_a_kind(
    tmp_path: Path, unsynced: None
) -> None:
    state = {"user": jnp.ones((4, 2)), "few": jnp.ones(2, jnp.int4)}
    root, to = tmp_path / "root", tmp_path / "out"
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(root, tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
    before = tree(root)
    (tmp_path / "there").mkdir()
    for target, form, kind in (
        (tmp_path / "there", "zarr", "target_exists"),
        (root / "out", "orbax", "no_target"),
        ("gs://bucket/out", "orbax", "no_target"),
        (to, "safetensors", "not_held"),
    ):
        words = ("export", root, "--to", target, "--format", form)
        code, out, err = call(*words)
        assert (code, out) == (1, "") and err.startswith("cnr-jax: "), kind
        code, found = as_json(*words)
        assert (code, found["error"]["kind"]) == (1, kind)
    code, out, err = call("export", root, "--to", to, "--format", "hdf5")
    assert (code, out) == (2, "") and "'safetensors'" in err
    assert tree(root) == before and not to.exists()


# ---- how they end ---------------------------------------------------------------------------

WHAT_FAILS = ["--failures", "exponential:1", "--job-hours", "9"]
VERBS = {
    "ls": ["ls"],
    "show": ["show", "@", "1"],
    "verify": ["verify"],
    "explain": ["explain", "@", "1"],
    "diff": ["diff", "@", "0", "1"],
    "export": ["export", "@", "1", "--to", "/nowhere/export"],
    "rows": ["rows", "@", "user", "0"],
    "bits": ["bits", "@", "1"],
    "prune": ["prune", "@", "--keep", "1"],
    "compact": ["compact", "@", "--dry-run"],
    "cost": ["cost"],
    "report": ["report", "@", "-o", "never-written.html"],
}


def ending(verb: str, root: Any) -> int:
    """The exit code of a verb on a root; it says why, also as JSON."""
    first, *rest = VERBS[verb]
    words = [str(root) if word == "@" else word for word in [first, *(rest or ["@"])]]
    code, out, err = call(*words)
    assert out == "" and err.startswith("cnr-jax: ")
    again, document = as_json(*words)
    assert again == code
    assert document["error"]["message"] == err.strip()[len("cnr-jax: ") :]
    return code


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_root_has_exit_codes_of_its_own(
    root: Path, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert ending(verb, tmp_path / "nowhere") == 10
    assert ending(verb, root / "1") == 12
    assert ending(verb, tmp_path / "empty") == 12
    assert ending(verb, tmp_path / "file") == 12
    assert ending(verb, "az://bucket/run") == 12
    assert not list(Path().glob("never-written.*"))


def test_compact_tells_what_it_merges_and_does_it(root: Path) -> None:
    code, out, _ = call("compact", root, "--dry-run")
    assert code == 0
    assert out.startswith("step 3: a full checkpoint and 1 delta to be merged\n")
    code, found = as_json("compact", root)
    assert (code, found["error"]["kind"]) == (11, "writer_busy")
    given = ("--step", 2, "--writer-is-dead")
    code, found = as_json("compact", root, *given)
    assert (code, found["merged_directory"], found["is_done"]) == (
        0,
        "2.g1.branch",
        True,
    )
    assert found["chain"] == ["0", "2"] and found["restore_secs"] is None
    assert call("compact", root, *given)[1].startswith("nothing to merge")
    code, out, _ = call("ls", root)
    assert code == 0 and "\n2     full " in out
    code, found = as_json("rows", root, "user", 3, "--step", 2)
    assert code == 0 and "error" not in found


def test_what_every_verb_finds_parses_as_json(root: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    np.savez(trace, user=np.arange(40).reshape(20, 2))
    out = tmp_path / "out"
    words: dict[str, list[Any]] = VERBS | {
        "export": ["export", "@", 1, "--to", out],
        "report": ["report", "@", "-o", f"{out}.html"],
        "simulate": ["simulate", "--accesses", trace, "--every", 5],
        "advise": ["advise", "@", *WHAT_FAILS],
        "mirror": ["mirror", "@", tmp_path / "mirror"],
    }
    assert as_json(*words["simulate"])[1]["jobs"] == []
    commands = app.registered_commands
    assert set(words) == {getattr(each.callback, "__name__", "") for each in commands}
    for verb, (first, *rest) in words.items():
        given = [root if word == "@" else word for word in rest or ["@"]]
        code, document = as_json(first, *given)
        assert code == (3 if verb == "diff" else 0), verb
        assert "error" not in document
    np.save(tmp_path / "trace.npy", np.arange(40))
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes(trace.read_bytes()[:-9])
    for name, said in (
        ("truth.txt", "there is no trace"),
        ("trace.npy", "is no trace"),
        ("empty.npz", "is no trace"),
        ("cut.npz", "is no trace"),
    ):
        code, document = as_json("simulate", "--accesses", tmp_path / name)
        assert (code, document["error"]["kind"]) == (12, "option")
        assert said in document["error"]["message"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "@", 9], 13, "no step 9 among 4 steps in"),
        (["explain", "@", 9], 13, "which run from 0 to 3"),
        (["diff", "@", 0, 9], 13, "no step 9"),
        (
            ["show", "@", 1, "usr"],
            13,
            "no table 'usr' in step 1, expected one of: 'user'",
        ),
        (["show", "@", "one"], 2, "Invalid value"),
        (["ls"], 2, "Missing argument"),
        (["ls", "@/0"], 12, "\n  hint: "),
    ],
)
def test_what_is_not_there_is_named(
    root: Path, words: Any, code: int, said: str
) -> None:
    got, _, err = call(*(word.replace("@", str(root)) for word in map(str, words)))
    assert got == code and said in err


def test_damaged_steps_have_an_exit_code(root: Path) -> None:
    lose(root, 2)
    code, out, _ = call("show", root, 2)
    assert code == 14 and "restorable:  no: " in out
    assert call("show", root, 3)[0] == call("explain", root, 2)[0] == 0
    assert call("show", root, 2, "user")[0] == 14
    assert call("diff", root, 2, 3)[0] == 14
    (root / "2" / "default" / "manifest.json").unlink()
    assert call("show", root, 2)[0] == call("explain", root, 2)[0] == 14
    assert call("ls", root)[0] == 0
    (root / "0" / "default" / "manifest.json").unlink()
    code, out, _ = call("ls", root)
    assert code == 4 and "none restores" in out


def test_steps_of_orbax_are_listed_and_left_to_it(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as plain:
        plain.save(7, args=ocp.args.StandardSave({"a": jnp.ones(3)}))
    code, out, _ = call("ls", tmp_path)
    assert code == 4 and "by Orbax" in out
    assert "none restores but by Orbax, or with Options(adopt=True)" in out
    code, _, err = call("show", tmp_path, 7)
    assert code == 13 and "was saved by plain Orbax" in err


def test_an_interrupt_ends_without_a_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(roots, "describe", interrupted)
    assert call("ls", root) == (130, "", "")


# ---- as a program ---------------------------------------------------------------------------


def test_commands_that_read_manifests_import_neither_jax_nor_orbax(root: Path) -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from cnr_jax.cli.app import app\n"
        "root, *argv = sys.argv[1:]\n"
        "page = ['report', '-o', root + '.html']\n"
        "prune = ['prune', '--keep', 1, '--yes', '--writer-is-dead']\n"
        "looks = ['ls'], ['ls', '--help'], ['show', 3], ['explain', 3], page\n"
        "looks += ['cost'], ['advise', *argv]\n"
        "for words in (*looks, prune):\n"
        "    words = [words[0], root, *map(str, words[1:])]\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0, words\n"
        "    found = {'jax', 'orbax', 'tensorstore'} & sys.modules.keys()\n"
        "    assert not found, (words, found)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(root), *WHAT_FAILS], check=True, timeout=240
    )


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['typer'] = None\n"
        "from cnr_jax.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "cnr-jax: typer is not installed; hint: pip install 'cnr-jax[cli]'\n"
    )


def test_colours_are_for_terminals(root: Path) -> None:
    lose(root, 2)
    command = [sys.executable, "-m", "cnr_jax", "ls", str(root)]
    piped = subprocess.run(command, capture_output=True, timeout=240)
    assert piped.returncode == 0 and b"\x1b" not in piped.stdout + piped.stderr
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=theirs, env=environment) as shown:
        os.close(theirs)
        printed = b""
        while True:
            try:
                more = os.read(ours, 4096)
            except OSError:  # Linux: the other side was closed
                break
            if not more:
                break
            printed += more
    os.close(ours)
    assert shown.returncode == 0
    assert b"\x1b[31m" in printed  # red: the step that does not restore
    # Lines are as long as they are, however wide the terminal is.
    plain = piped.stdout.splitlines()
    assert any(len(line) > 80 for line in plain)
    assert len(printed.splitlines()) == len(plain)
