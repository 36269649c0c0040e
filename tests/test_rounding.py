"""Saves that round rows say so, and by how much."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax.rows.codecs import Asymmetric

from .conftest import xla_flags

SAMPLE_ROWS = 16_384


def make_state(rows: int = 3000) -> dict[str, Any]:
    user, item = jax.random.split(jax.random.key(0))
    return {
        "user": jax.random.normal(user, (rows, 16)),
        "item": jax.random.laplace(item, (500, 24)).astype(jnp.bfloat16),
        "acc": {"user": jnp.ones((rows, 16))},
        "w": jnp.ones(3),
    }


def saved(root: Path, state: Any, **options: Any) -> tuple[cnr.SaveReport, Any]:
    """The report of a save, and what is restored from it."""
    tables = cnr.find_tables(state, ["user", "item"])
    given = cnr.Options(**options)
    with cnr.CheckpointManager(root, tables=tables, options=given) as manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=cnr.args.Restore(state))
        assert manager.last_report is not None
        return manager.last_report, restored.state


def row_errors(state: Any, restored: Any, names: tuple[str, ...]) -> np.ndarray:
    """Relative errors of all rows but those of zeros, in double precision."""
    found = []
    for name in names:
        rows, read = (np.asarray(s[name]).astype(np.float64) for s in (state, restored))
        norms = np.linalg.norm(rows, axis=1)
        errors = np.linalg.norm(rows - read, axis=1)
        found.append(errors[norms > 0] / norms[norms > 0])
    return np.concatenate(found)


# Which way of staging is tried without `slow`, for each; None: neither, as both are slow to
# compile. That such come back is in test_codecs_in_saves.py and test_chain_equals_model.py.
STAGED: list[tuple[dict[str, Any], str | None]] = [
    ({}, "host"),
    ({"bits": 2}, None),
    ({"codec": "asymmetric", "bits": 2}, "device"),
    ({"codec": "symmetric", "bits": 8}, "host"),
    ({"codec": "codebook"}, None),
    ({"codec": "kmeans", "bits": 2}, None),
    ({"bits": "auto"}, "host"),
    ({"slot_codec": "bfloat16"}, "host"),
]


@pytest.mark.parametrize(
    ("options", "staging"),
    [
        pytest.param(
            options,
            way,
            marks=[pytest.mark.slow] * (way != tried),
            id=f"{options}-{way}",
        )
        for options, tried in STAGED
        for way in ("host", "device")
    ],
)
def test_reported_errors_are_those_of_the_restored_rows(
    options: Any, staging: str, tmp_path: Path
) -> None:
    state = make_state()
    report, restored = saved(tmp_path, state, staging=staging, **options)
    errors = row_errors(state, restored, ("user", "item"))
    assert report.sample_rows == len(errors) == 3500
    assert report.mean_row_error == pytest.approx(errors.mean(), rel=1e-4)
    assert report.worst_row_error == pytest.approx(errors.max(), rel=1e-4)
    assert errors.min() > 0
    mean, worst = f"{100 * errors.mean():.2g} %", f"{100 * errors.max():.2g} %"
    assert f"3,500 rows rounded by {mean} (worst {worst})," in str(report)


def test_errors_are_those_of_the_numbers_that_the_dtype_has(tmp_path: Path) -> None:
    def rows(scale: float, dtype: Any) -> jax.Array:
        drawn = np.random.default_rng(3).normal(size=(200, 16))
        return jnp.asarray((drawn * scale).astype(dtype))

    # Of float16 below 6e-5 the steps between numbers are as large as rounding to few bits.
    half = {f"half_{scale}": rows(scale, np.float16) for scale in (1e-6, 1e-4, 1e4)}
    wide = {f"wide_{scale}": rows(scale, np.float32) for scale in (1e-28, 1e34)}
    state = {**half, **wide, "short": rows(1e30, jnp.bfloat16)}
    tables = cnr.find_tables(state, list(state))
    options = cnr.Options(codec="asymmetric", bits=8)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        report = manager.last_report
        restored = manager.restore(0, args=cnr.args.Restore(state)).state
    assert report is not None
    for table in report.tables:
        errors = row_errors(state, restored, (table.name,))
        assert table.sample_rows == 200
        assert table.mean_row_error == pytest.approx(errors.mean(), rel=1e-4)
        assert table.worst_row_error == pytest.approx(errors.max(), rel=1e-4)


# Which rows count is told by what a codec gives up, on a device of one that is soon compiled.
@pytest.mark.parametrize(
    ("codec", "staging"),
    [
        ("adaptive", "host"),
        ("asymmetric", "device"),
        pytest.param("adaptive", "device", marks=pytest.mark.slow),
        pytest.param("asymmetric", "host", marks=pytest.mark.slow),
    ],
)
def test_zero_rows_are_left_out_and_rows_stored_as_they_are_count_as_exact(
    codec: str, staging: str, tmp_path: Path
) -> None:
    state = make_state()
    user = state["user"].at[:1000].set(0.0).at[1000:1010].set(jnp.nan)
    user = user.at[1010:1030].set(3.0).at[1030, 0].set(1e30).at[1031].multiply(1e37)
    state["user"] = user.at[1032].multiply(1e-30)
    report, restored = saved(tmp_path, state, staging=staging, codec=codec)
    with np.errstate(invalid="ignore"):
        errors = row_errors(state, restored, ("user", "item"))
    errors = np.nan_to_num(errors)  # NaN is restored as NaN
    assert report.sample_rows == 2000 + 500
    assert report.mean_row_error == pytest.approx(errors.mean() * len(errors) / 2500)
    assert report.worst_row_error == pytest.approx(errors.max(), rel=1e-4)


def test_sample_is_bounded_and_spread_evenly(tmp_path: Path) -> None:
    state = make_state(rows=100_000)
    # Rows of the second half are hard to round, so a sample of one half would show.
    hard = jnp.where(jnp.arange(16) == 0, 40.0, 1.0)
    state["user"] = state["user"].at[50_000:].multiply(hard)
    report, restored = saved(tmp_path, state)
    errors = row_errors(state, restored, ("user", "item"))
    assert report.sample_rows is not None
    assert SAMPLE_ROWS / 2 < report.sample_rows <= SAMPLE_ROWS
    assert report.mean_row_error == pytest.approx(errors.mean(), rel=0.03)
    assert report.worst_row_error is not None
    assert np.quantile(errors, 0.999) < report.worst_row_error <= errors.max() * 1.001


def test_delta_reports_the_errors_of_its_own_rows(tmp_path: Path) -> None:
    state = make_state()
    tables = cnr.find_tables(state, ["user", "item"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
        state["user"] = state["user"].at[7].add(1.0).at[2000].add(1.0)
        manager.save(1, args=cnr.args.Save(state))
        manager.wait_until_finished()
        report = manager.last_report
        restored = manager.restore(1, args=cnr.args.Restore(state)).state
    assert report is not None and report.kind == "delta" and report.sample_rows == 2
    errors = row_errors(state, restored, ("user",))[[7, 2000]]
    assert report.mean_row_error == pytest.approx(errors.mean(), rel=1e-4)


@pytest.mark.parametrize(
    "options", [{"codec": "raw"}, {"codec": "raw", "slot_codec": "bfloat16"}], ids=str
)
def test_exact_saves_report_no_errors(options: Any, tmp_path: Path) -> None:
    report, _ = saved(tmp_path, make_state(), **options)
    assert report.sample_rows is None
    assert report.mean_row_error is report.worst_row_error is None
    assert "rounded" not in str(report)


def test_a_codec_that_does_not_decode_costs_the_figures_and_not_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, refused = Asymmetric.decode, list[Any]()

    def refuse(rows: Any) -> Any:
        refused.append(rows.shape)
        raise MemoryError("no room")

    def decode(self: Asymmetric, *args: Any, **kwargs: Any) -> jax.Array:
        rows = own(self, *args, **kwargs)
        like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        return jax.pure_callback(refuse, like, rows)

    state = make_state()
    tables = cnr.find_tables(state, ["user", "item"])
    # A width of its own, so that nothing compiled before is used.
    options = cnr.Options(codec=Asymmetric(bits=3, refits=0))
    with monkeypatch.context() as patch:
        patch.setattr(Asymmetric, "decode", decode)
        manager = cnr.CheckpointManager(tmp_path, tables=tables, options=options)
    with manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        assert refused and manager.last_report is not None
        assert manager.last_report.sample_rows is None
        assert manager.restore(0, args=cnr.args.Restore(state)).state is not None


# ---- the log ------------------------------------------------------------------------------

# Once in a process, so each case needs one.
SCRIPT = """
import json, logging, sys, tempfile, threading
import jax, jax.numpy as jnp, numpy as np
import cnr_jax as cnr
from jax.sharding import NamedSharding, PartitionSpec as P

found, threads = [], []
class Keep(logging.Handler):
    def emit(self, record):
        if record.name.startswith("cnr_jax") and "but rounded" in record.getMessage():
            found.append((record.levelname, record.getMessage()))
            threads.append(threading.current_thread() is threading.main_thread())
logger = logging.getLogger("cnr_jax")
logger.setLevel(logging.INFO)
logger.addHandler(Keep())

mesh = jax.make_mesh((2,), ("rows",))
rows = jax.random.normal(jax.random.key(0), (512, 16))
rows = jax.device_put(rows, NamedSharding(mesh, P("rows")))
state = {"user": rows, "item": rows + 1, "w": jnp.ones(3)}
tables = cnr.find_tables(state, ["user", "item"])
TableOptions = cnr.TableOptions
for run, options in enumerate(cnr.Options(**given) for given in OPTIONS):
    with cnr.CheckpointManager(tempfile.mkdtemp(), tables=tables, options=options) as manager:
        zeros = jax.tree.map(jnp.zeros_like, state)
        if EXACT and run == EXACT:
            manager.save(0, args=cnr.args.Save(zeros))
            manager.wait_until_finished()
            assert not found, found
        for step in range(1, 3):
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
            state = {**state, "user": state["user"] + 1}
print(json.dumps([found, threads]))
"""


def said(options: str, *, exact: int = 0) -> list[tuple[str, str]]:
    """What a process logs of rounding, with managers that save on two devices.

    Two of them are given the options, after some that are exact; then these begin with zeros.
    """
    given = [*["{'codec': 'raw'}"] * exact, *[f"dict({options})"] * 2]
    code = SCRIPT.replace("in OPTIONS)", f"in [{', '.join(given)}])", 1)
    code = code.replace("EXACT", str(exact))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=2"),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, in_main = json.loads(done.stdout.splitlines()[-1])
    assert not any(in_main), "measured in the way of training"
    return [(level, text) for level, text in found]


def test_default_options_warn_once_in_a_process_and_name_the_way_out() -> None:
    ((level, text),) = said("", exact=1)
    assert level == "WARNING"
    # Nothing was said of what is exact: of rows as they are, and of zeros.
    assert text.startswith("step 1: ") and "to 4 bits an element" in text
    assert "of 1,024 sampled rows" in text and "codec='raw'" in text


# Each is a program; what else counts as asked for is below.
@pytest.mark.parametrize(
    ("options", "level"),
    [
        pytest.param("bits=4", "INFO", marks=pytest.mark.slow),
        pytest.param("codec='asymmetric'", "INFO", marks=pytest.mark.slow),
        pytest.param("codec='adaptive'", "INFO", marks=pytest.mark.slow),
        ("tables={'user': TableOptions(bits=8)}", "WARNING"),
        pytest.param(
            "tables={'user': TableOptions(bits=8), 'item': TableOptions(codec='adaptive')}",
            "INFO",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "tables={'user': TableOptions(codec='raw'), 'item': TableOptions(bits=2)}",
            "INFO",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rounding_that_was_asked_for_is_information(options: str, level: str) -> None:
    ((found, text),) = said(options)
    assert found == level
    assert ("Options(codec='raw')" in text) == (level == "WARNING")


def test_options_replaced_still_know_what_was_given() -> None:
    options = dataclasses.replace(cnr.Options(), verify_reads=False)
    assert not options.encoding.says_rounding("user")
    assert dataclasses.replace(options, bits=4).encoding.says_rounding("user")
    one = cnr.Options(tables={"user": cnr.TableOptions(bits=8)})
    assert one.encoding.says_rounding("user") and not one.encoding.says_rounding("item")
    defaults = cnr.Options().codec_for("user", "table", 64, np.float32)
    explicit = cnr.Options(codec="adaptive", bits=4)
    assert defaults == explicit.codec_for("user", "table", 64, np.float32)
