"""The verb `bits`: errors and bytes of a step's rows in each width, of what can be told."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import cnr_jax as cnr

from .test_cli import as_json, call

# Columns as in tests of all verbs: they share what is compiled.
ROWS, DIM = 300, 4
OPTIONS = cnr.Options(codec="asymmetric", tables={"item": cnr.TableOptions(bits=8)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0, in 4 and 8 bits; 1, exact, of other values; 2, a delta on that in 4 and 8 bits."""
    root = tmp_path_factory.mktemp("bits") / "root"
    rng = np.random.default_rng(0)
    user = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    user[7] = 3.0  # what no width holds
    state = {"user": jnp.asarray(user), "item": jnp.asarray(user[::-1] * 2)}
    tables = cnr.find_tables(
        state, {"user": cnr.TableSpec(rows=ROWS - 20), "item": cnr.TableSpec()}
    )
    with cnr.CheckpointManager(root, tables=tables, options=OPTIONS) as manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.save(1, args=cnr.args.Save(state, exact=True, full=True))
        state = {**state, "user": state["user"].at[3].add(1.0)}
        manager.save(2, args=cnr.args.Save(state))
    return root


def test_exact_rows_are_compared_in_every_width(saved: Path) -> None:
    code, found = as_json("bits", saved, 1)
    assert code == 0 and found["step"] == 1
    user, item = found["tables"]
    assert (user["table"], user["rows"], user["sampled_rows"]) == ("user", 280, 280)
    assert user["stored_bits"] is None is item["stored_bits"]
    assert [each["bits"] for each in user["widths"]] == [2, 3, 4, 8, None]
    # As `try_bits` has them, which is held to what saves say.
    rows = jnp.asarray(cnr.read_rows(saved, "user", np.arange(280), 1))
    state = {"user": rows}
    tried = cnr.try_bits(
        state,
        cnr.find_tables(state, ["user"]),
        lambda state: 0.0,
        better="lower",
        bits=[2, "raw"],
    )
    for width, want in zip(
        (user["widths"][0], user["widths"][-1]), tried.widths, strict=True
    ):
        assert width["mean_row_error"] == pytest.approx(want.mean_row_error or 0)
        assert width["worst_row_error"] == pytest.approx(want.worst_row_error or 0)
        # A full save holds the padding too.
        assert width["bytes"] == pytest.approx(want.table_bytes * 300 / 280, abs=64)


def test_of_rounded_rows_narrower_widths_alone_are_told(saved: Path) -> None:
    for step, stored in (0, {"user": 4, "item": 8}), (2, {"user": 4, "item": None}):
        code, found = as_json("bits", saved, step)
        assert code == 0
        assert {t["table"]: t["stored_bits"] for t in found["tables"]} == stored
        for table in found["tables"]:
            most = table["stored_bits"] or 99
            for width in table["widths"]:
                known = width["bits"] is None or width["bits"] < most
                assert (width["mean_row_error"] is not None) == known
    code, out, _ = call("bits", saved, "--table", "user")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "step 2"
    assert lines[-2].startswith("rounded already: user in 4 bits;")
    assert lines[-1].endswith("cnr_jax.try_bits")
    assert [line.split()[-2:] for line in lines[4:6]] == [["-", "-"]] * 2
    assert "item" not in out


def test_exact_rows_that_a_restore_brought_rounded_are_told_apart(
    saved: Path, tmp_path: Path
) -> None:
    rows = {
        name: jnp.asarray(cnr.read_rows(saved, name, np.arange(280), 0))
        for name in ("user", "item")
    }
    tables = cnr.find_tables(rows, list(rows))
    with cnr.CheckpointManager(tmp_path, tables=tables, options=OPTIONS) as manager:
        manager.save(0, args=cnr.args.Save(rows, exact=True))
    _, out, _ = call("bits", tmp_path)
    # Eight bits err by least, whether rows were theirs or not.
    said = "rows of user lie on codes of 4 bits, as a restore brought them"
    assert said in out
    assert "rows of item" not in out


def test_what_is_not_there_is_said(saved: Path) -> None:
    code, _, err = call("bits", saved, "--table", "who")
    assert code == 13 and "no table 'who'" in err
    assert call("bits", saved, 9)[0] == 13
