"""`bits="auto"`: small tables take 8 bits from the first save on, through real managers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.rows.codecs import Asymmetric

ROWS = {"user": 3000, "airport": 20, "day": 7}


pytestmark = pytest.mark.usefixtures("unsynced")


def made(**rows: int) -> tuple[Any, cnr.Tables]:
    """A state of tables of 4 columns, and these tables."""
    rng = np.random.default_rng(3)
    state = {
        name: jax.device_put(rng.normal(size=(count, 4)).astype(np.float32))
        for name, count in (ROWS | rows).items()
    }
    return state, cnr.find_tables(state, list(state))


class Saves:
    """Saves of one root, and what they hold."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root, self._steps = root, itertools.count()
        given: dict[str, Any] = {"codec": "asymmetric", "policy": cnr.Full()}
        given |= {"bits": "auto", "expected_restores": 1, "new_run": True}
        self.options = cnr.Options(**{**given, **options})

    def save(self, state: Any, tables: cnr.Tables, *, restore: bool = False) -> int:
        """Saves with a manager of its own, maybe after a restore; returns the step."""
        step = next(self._steps)
        with cnr.CheckpointManager(
            self.root, tables=tables, options=self.options
        ) as manager:
            if restore:
                state = manager.restore(None, args=cnr.args.Restore(state)).state
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
            self.report = manager.last_report
        return step

    def bits(self, step: int) -> dict[str, set[int | None]]:
        """Widths of each table's codes, None where rows are exact, by the manifests."""
        found: dict[str, set[int | None]] = {}
        for path in self.root.glob(f"{step}/*/manifest.p*.json"):
            manifest = json.loads(path.read_text())
            for tile in manifest["tiles"]:
                for segment in tile["segments"]:
                    configuration = manifest["codecs"][segment["codec"]][
                        "configuration"
                    ]
                    found.setdefault(tile["table"], set()).add(
                        configuration.get("bits")
                    )
        return found


def each(user: Any, airport: Any, day: Any) -> dict[str, set[Any]]:
    return {"user": {user}, "airport": {airport}, "day": {day}}


def test_small_tables_have_eight_bits_and_the_others_those_for_the_restores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves, (state, tables) = Saves(tmp_path), made()
    with caplog.at_level(logging.INFO, "cnr_jax.checkpointer.saving.widening"):
        first = saves.save(state, tables)
    assert saves.bits(first) == each(2, 8, 8)
    assert saves.report.auto_bits == 2
    assert [r.getMessage() for r in caplog.records if "bits" in r.getMessage()] == [
        "saves take 2 bits (8 for 2 small tables: airport, day), for 1 restores"
    ]
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        got = manager.restore(first, args=cnr.args.Restore(state)).state
    for name, codes in (("user", 3), ("airport", 255), ("day", 255)):
        saved = np.asarray(state[name])
        step = np.ptp(saved, axis=1, keepdims=True) / codes
        error = np.abs(np.asarray(got[name]) - saved)
        assert (error <= 0.52 * step).all() and error.any()
    assert saves.bits(saves.save(state, tables, restore=True)) == each(2, 8, 8)
    last = saves.save(state, tables, restore=True)
    assert saves.bits(last) == each(8, 8, 8), "more restores than expected"


def test_tables_are_small_by_what_they_are_at_the_save(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    assert saves.bits(saves.save(*made())) == each(2, 8, 8)
    grown, tables = made(airport=200)
    step = saves.save(grown, tables)
    assert saves.bits(step) == each(2, 2, 8)
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        got = manager.restore(step, args=cnr.args.Restore(grown)).state
    assert got["airport"].shape == (200, 4)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"tables": {"day": cnr.TableOptions(bits=3)}}, each(2, 8, 3)),
        # Without `user` there is no table among which others are small.
        ({"tables": {"user": cnr.TableOptions(bits=4)}}, each(4, 2, 2)),
        (
            {
                "bits": 4,
                "tables": {
                    "user": cnr.TableOptions(bits="auto"),
                    "day": cnr.TableOptions(bits="auto"),
                },
            },
            each(2, 4, 8),
        ),
        ({"tables": {"user": cnr.TableOptions(codec="raw")}}, each(None, 2, 2)),
        (
            {"tables": {"day": cnr.TableOptions(codec=Asymmetric(bits=3, refits=0))}},
            each(2, 8, 3),
        ),
        ({"expected_restores": 20}, each(4, 8, 8)),
        ({"bits": 2, "expected_restores": None}, each(2, 2, 2)),
    ],
    ids=["small", "great", "some", "exact", "object", "more restores", "no auto"],
)
def test_only_tables_of_auto_bits_are_small_and_count(
    tmp_path: Path, options: dict[str, Any], bits: Any
) -> None:
    saves = Saves(tmp_path, **options)
    assert saves.bits(saves.save(*made())) == bits


class Naming:
    """Full saves, each with a codec that the policy names."""

    name = "naming"

    def __init__(self, *codecs: str | None) -> None:
        self._codecs = iter(codecs)

    def decide(self, history: Any) -> cnr.Decision:
        found = cnr.Full().decide(history)
        return dataclasses.replace(found, codec=next(self._codecs))


def test_a_codec_that_a_policy_names_follows_the_restores_too(tmp_path: Path) -> None:
    # The first save of a root is full whatever a policy says, and does not ask it.
    saves = Saves(
        tmp_path, codec="raw", policy=Naming("asymmetric", None, "asymmetric")
    )
    state, tables = made()
    with cnr.CheckpointManager(
        tmp_path, tables=tables, options=saves.options
    ) as manager:
        for step in range(4):
            manager.save(step, args=cnr.args.Save(state))
    found = [saves.bits(step) for step in range(4)]
    exact, auto = each(None, None, None), each(2, 8, 8)
    assert found == [exact, auto, exact, auto]


@pytest.mark.parametrize("bits", [4, "auto"])
def test_a_codec_that_a_policy_names_and_nobody_knows_leaves_nothing_behind(
    tmp_path: Path, bits: Any
) -> None:
    policy = Naming("no such codec", None)
    restores = 1 if bits == "auto" else None
    options = {"bits": bits, "expected_restores": restores, "policy": policy}
    state, tables = made()
    saves = Saves(tmp_path, **options)
    with cnr.CheckpointManager(
        tmp_path, tables=tables, options=saves.options
    ) as manager:
        manager.save(0, args=cnr.args.Save(state))
        with pytest.raises(cnr.errors.OptionError, match="no such codec"):
            manager.save(1, args=cnr.args.Save(state))
        assert not [p.name for p in tmp_path.iterdir() if p.name.startswith("1")]
        manager.save(2, args=cnr.args.Save(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2]


def test_shards_and_padding_have_no_say(tmp_path: Path) -> None:
    """A table of a hundredth, beside one that lies in shards and is mostly padding."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))
    state = {
        "user": jax.device_put(np.eye(4000, 4, dtype=np.float32)),
        "day": np.eye(32, 4, dtype=np.float32),
    }
    for name in state:
        state[name] = jax.device_put(state[name], NamedSharding(mesh, P("rows")))
    specs = {"user": cnr.TableSpec(rows=800), "day": cnr.TableSpec(rows=8)}
    tables = cnr.find_tables(state, specs)
    saves = Saves(tmp_path / "both")
    assert saves.bits(saves.save(state, tables)) == {"user": {2}, "day": {8}}
    # As small by its array, but not by its rows.
    tables = cnr.find_tables(state, {**specs, "day": cnr.TableSpec(rows=9)})
    saves = Saves(tmp_path / "nine")
    assert saves.bits(saves.save(state, tables)) == {"user": {2}, "day": {2}}
