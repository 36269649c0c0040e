"""How the command line is called, and how it ends: arguments, streams, errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli import roots
from cnr_jax.cli.app import app
from cnr_jax.format.names import abandoned


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 2 of an exact run; row i of `user` begins with i, plus 100 times the step."""
    root = tmp_path_factory.mktemp("calls") / "root"
    state = {"user": jnp.arange(40.0).reshape(20, 2) / 2, "item": jnp.zeros((4, 2))}
    tables = cnr.find_tables(state, ["user", "item"])
    options = cnr.Options(codec="raw", metrics=True)
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(3):
            manager.save(step, args=cnr.args.Save(state))
            state = {**state, "user": state["user"] + 100.0}
    return root


def call(*words: Any) -> tuple[int, str, str]:
    """The exit code of a command, what it printed, and what it said of an error."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit | None)
    return result.exit_code, result.stdout, result.stderr


def as_json(*words: Any) -> tuple[int, Any]:
    code, out, err = call(*words, "--json")
    document = json.loads(out)
    assert document["schema"] == 2 and ("error" in document) == bool(err)
    if err:
        assert err == f"cnr-jax: {document['error']['message']}\n"
    return code, document


VERBS: dict[str, list[Any]] = {
    "ls": [],
    "show": [1],
    "verify": [],
    "explain": [1],
    "diff": [0, 1],
    "export": [1, "--to", "never-written"],
    "rows": ["user", 0],
    "cost": [],
    "advise": ["--failures", "exponential:1", "--job-hours", 9],
    "report": ["-o", "never-written.html"],
}


# ---- arguments ------------------------------------------------------------------------------


def test_latest_is_a_step_wherever_one_is_taken(root: Path, tmp_path: Path) -> None:
    assert as_json("show", root, "latest")[1]["step"] == 2
    assert as_json("show", root, "latest", "user", "--rows", 1)[1]["step"] == 2
    assert as_json("explain", root, "latest")[1]["step"] == 2
    code, found = as_json("diff", root, 0, "latest")
    assert (code, found["before"], found["after"]) == (3, 0, 2)
    assert call("diff", root, "latest", 2)[0] == 0
    assert as_json("rows", root, "user", 3, "--step", "latest")[1]["step"] == 2
    assert as_json("export", root, "latest", "--to", tmp_path / "a")[1]["step"] == 2
    assert as_json("export", root, "--to", tmp_path / "b")[1]["step"] == 2
    (tmp_path / "root" / abandoned("3", 1, "0" * 32)).mkdir(parents=True)
    code, found = as_json("show", tmp_path / "root", "latest")
    assert (code, found["error"]["kind"]) == (13, "no_step")


def test_negative_ids_are_rows_from_the_end(root: Path) -> None:
    code, found = as_json("rows", root, "user", -1, "-20", "-3:-1", "-1:2", "5")
    assert code == 0 and found["ids"] == [-1, -20, -3, -2, -1, 0, 1, 5]
    first = np.float32(found["leaves"]["table"])[:, 0]
    assert first.tolist() == [219, 200, 217, 218, 219, 200, 201, 205]
    whole = jnp.asarray(cnr.read_rows(root, "user", np.arange(20)))
    ids = np.array([[-1, -20], [19, 0]])
    np.testing.assert_array_equal(cnr.read_rows(root, "user", ids), whole[ids])
    code, out, _ = call("rows", root, "user", "--step", 0, "--", -1)
    assert code == 0 and out.splitlines()[1].split()[:2] == ["-1", "19"]
    for given in (-21, 20, "-21:3", "0:9000000000000000000", "-9000000000000000000:1"):
        code, found = as_json("rows", root, "user", given)
        assert (code, found["error"]["kind"]) == (13, "no_row"), given
    # Not as many ids as nobody can hold, before it is known that there is no such table.
    assert call("rows", root, "usr", "0:9000000000000000000")[0] == 13
    code, _, err = call("rows", root, "user", "--stepp", 3)
    assert code == 2 and "no such option: --stepp" in err


def test_ids_wrap_as_in_the_array_that_is_looked_up(
    tmp_path: Path, unsynced: None
) -> None:
    """A table with padding: -1 is its last stored row, which holds nothing that was saved."""
    state = {"t": jnp.arange(12.0).reshape(6, 2)}
    tables = cnr.find_tables(state, {"t": cnr.TableSpec(rows=4)})
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
    code, found = as_json("rows", tmp_path, "t", -3, -6)
    assert code == 0 and found["leaves"]["table"] == [[6.0, 7.0], [0.0, 1.0]]
    for given in (-1, -2, -7, 4):
        assert call("rows", tmp_path, "t", given)[0] == 13, given
        with pytest.raises(cnr.errors.OptionError, match="out of range"):
            cnr.read_rows(tmp_path, "t", given)


@pytest.mark.parametrize(
    "wrong", ["1_0", "\u0663", "+1", " 1", "0x1", "1.0", "1e3", f"{2**63}", "9" * 5000]
)
def test_numbers_are_decimal_digits_of_64_bits(root: Path, wrong: str) -> None:
    for words in (
        ["show", root, wrong],
        ["explain", root, wrong],
        ["diff", root, 0, wrong],
        ["export", root, wrong, "--to", "never-written"],
        ["rows", root, "user", wrong],
        ["rows", root, "user", f"0:{wrong}"],
        ["rows", root, "user", 0, "--step", wrong],
        ["show", root, 0, "user", "--rows", wrong],
        ["prune", root, "--keep", wrong],
        ["prune", root, "--keep", 1, "--min-fulls", wrong],
        ["simulate", "--accesses", "x", "--every", wrong],
        ["simulate", "--accesses", "x", "--rows", f"user={wrong}"],
        ["simulate", "--failures", "x", "--nodes", wrong],
        ["cost", root, "--accelerators", wrong],
        ["advise", root, "--failures", "x", "--job-hours", 1, "--nodes", wrong],
    ):
        code, found = as_json(*words)
        assert (code, found["error"]["kind"]) == (2, "usage"), words
    assert call("show", root, "9" * 18)[0] == 13


def test_the_version_is_that_of_the_package() -> None:
    assert call("--version") == (0, f"cnr-jax {cnr.__version__}\n", "")


# ---- errors ---------------------------------------------------------------------------------


def test_a_wrong_call_is_told_as_json_too(root: Path) -> None:
    for words, said in (
        (["ls"], "Missing argument 'ROOT'"),
        (["show", root], "Missing argument 'STEP'"),
        (["ls", root, "--nothing"], "No such option: --nothing"),
        (
            ["export", root, "--to", "x", "--format", "hdf5"],
            "'--format': 'hdf5' is not one of",
        ),
        (["nothing", root], "No such command 'nothing'"),
    ):
        code, found = as_json(*words)
        assert (code, found["error"]["kind"]) == (2, "usage")
        assert said in found["error"]["message"].splitlines()[0]
        assert "--help" in found["error"]["message"].splitlines()[1]
        assert found["verb"] == (words[0] if words[0] != "nothing" else "")
    # A name is no option.
    code, out, _ = call("ls", "--", "--json")
    assert (code, out) == (10, "")


def test_every_verb_names_the_package_that_a_store_needs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for verb, rest in VERBS.items():
        code, found = as_json(verb, "s3://bucket/run", *rest)
        assert (code, found["error"]["kind"]) == (12, "not_installed"), verb
        code, found = as_json(verb, "gs://bucket/run", *rest)
        assert (code, found["error"]["kind"]) == (12, "not_installed"), verb
        message = found["error"]["message"]
        assert 'is not installed; hint: pip install "cnr-jax[gs]"' in message
        assert "\n" not in message
        for url in ("az://bucket/run", "https://host/run", "memory://run"):
            code, _, err = call(verb, url, *rest)
            assert code == 12 and "is no root" in err.splitlines()[0], verb
    # Another is of no store at all.
    with pytest.raises(cnr.errors.OptionError, match=r"cnr-jax\[gs\]"):
        cnr.CheckpointManager("gs://bucket/run")
    assert not list(Path().glob("never-written*"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(13, "Permission denied", "x"), "os_error"),
        (MemoryError(), "unexpected"),
        (TypeError("unhashable type: 'list'"), "unexpected"),
        (ImportError("no such library"), "unexpected"),
        (RecursionError("too deep"), "unexpected"),
    ],
)
def test_what_nobody_has_thought_of_is_no_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(roots, "describe", fail)
    code, found = as_json("ls", root)
    assert (code, found["error"]["kind"]) == (1, kind)
    assert str(error) in found["error"]["message"]
    if kind == "unexpected":
        first, where = found["error"]["message"].splitlines()
        assert first.startswith(type(error).__name__) and "test_calls.py" in where


# ---- as a program ---------------------------------------------------------------------------


def test_streams_that_are_closed_full_or_unread_are_no_tracebacks(root: Path) -> None:
    program = f"'{sys.executable}' -m cnr_jax"
    cases = {
        f"{program} ls '{root}' >&-": 0,
        f"{program} ls '{root}.no' >&- 2>&-": 10,
        f"{program} ls '{root}' --json >/dev/full": 1,
        f"{program} ls '{root}' | true": 141,
    }
    running = [
        subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {case}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
        for case in cases
    ]
    for (case, code), each in zip(cases.items(), running, strict=True):
        _, err = each.communicate(timeout=240)
        assert each.returncode == code, (case, err)
        assert "Traceback" not in err and "Exception ignored" not in err, case
        if code in (0, 141):
            assert not err, case
        if "/dev/full" in case:
            assert "No space left on device" in err


def test_what_a_library_writes_to_a_closed_stderr_is_in_no_file(
    root: Path, tmp_path: Path
) -> None:
    code = (
        "import os, sys\n"
        "from cnr_jax.__main__ import main\n"
        "sys.argv = ['cnr-jax', 'report', sys.argv[1], '-o', sys.argv[2]]\n"
        "opened = open\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    file = open(sys.argv[4], 'ab')\n"
        "    os.write(2, b'noise')\n"
        "    os.write(1, b'noise')\n"
    )
    page = tmp_path / "page.html"
    command = [sys.executable, "-c", code, str(root), str(page)]
    shell = ["bash", "-c", '"$@" >&- 2>&-', "bash", *command]
    assert subprocess.run(shell, timeout=240).returncode == 0
    assert page.read_bytes().endswith(b"</html>\n")
