"""What must not grow with the number of steps that a root keeps, through managers."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.format.manifest import MAX_HISTORY

_opened: collections.Counter[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is None or event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    writes = event == "open" and arguments[2] & os.O_ACCMODE
    if isinstance(path, (str, os.PathLike)) and not writes:
        _opened[os.fspath(path)] += 1


@pytest.fixture
def opened_to_read() -> Iterator[collections.Counter[str]]:
    """How often each file was opened to be read from, and each folder listed."""
    global _opened
    if not _note.__dict__:
        sys.addaudithook(_note)  # which stays
        _note.__dict__["added"] = True
    _opened = collections.Counter()
    yield _opened
    _opened = None


def manager_of(run: Any, root: Path, policy: cnr.Policy) -> cnr.CheckpointManager:
    options = cnr.Options(codec="raw", policy=policy)
    return cnr.CheckpointManager(root, tables=run.tables, options=options)


@pytest.mark.slow
def test_history_is_bounded_and_limits_of_chains_hold_beyond_it(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, policy = tiny_run(), cnr.Consecutive(max_chain=MAX_HISTORY + 6)
    with manager_of(run, tmp_path, policy) as manager:
        run.run(manager, range(MAX_HISTORY + 4))
        assert len(run.manifest(manager, MAX_HISTORY - 1).history) == MAX_HISTORY
    with manager_of(run, tmp_path, policy) as manager:
        run.restore(manager, None)
        run.run(manager, range(MAX_HISTORY + 4, MAX_HISTORY + 9))
        last = MAX_HISTORY + 6
        for step in (last - 2, last - 1, last):
            manifest = run.manifest(manager, step)
            assert manifest.kind == "delta"
            assert len(manifest.history) == MAX_HISTORY
            assert sum(entry.saves for entry in manifest.history) == step + 1
        assert run.manifest(manager, last + 1).kind == "full"
        assert len(run.manifest(manager, last + 2).history) == 2
        run.check(manager, last)


def test_opening_looks_into_steps_as_orbax_does_and_reads_one_file_of_each_more(
    tiny_run: Any, tmp_path: Path, opened_to_read: collections.Counter[str]
) -> None:
    run, steps = tiny_run(), range(12)
    with manager_of(run, tmp_path, cnr.Consecutive()) as manager:
        run.run(manager, steps)

    def looked(opening: Callable[[], Any]) -> collections.Counter[str]:
        opened_to_read.clear()
        opening().close()
        below = f"{tmp_path}{os.sep}"
        return collections.Counter(
            {k: n for k, n in opened_to_read.items() if k.startswith(below)}
        )

    theirs = looked(lambda: ocp.CheckpointManager(tmp_path))
    ours = looked(lambda: manager_of(run, tmp_path, cnr.Consecutive()))
    more = ours - theirs
    manifests = [os.fspath(tmp_path / f"{i}/default/{names.MANIFEST}") for i in steps]
    assert [more.pop(path) for path in manifests] == [1] * len(steps)
    # The item is that of the newest steps, up to eight, however many there are.
    assert sum(more.values()) <= 5 + 8, more


def test_manifest_of_a_save_is_read_once(
    tiny_run: Any, tmp_path: Path, opened_to_read: collections.Counter[str]
) -> None:
    run = tiny_run()
    with manager_of(run, tmp_path, cnr.Consecutive()) as manager:
        run.run(manager, [0, 1])
        found = [
            opened_to_read[os.fspath(path)]
            for path in sorted(tmp_path.glob(f"*/*/{names.MANIFEST}"))
        ]
        assert found == [1, 1]
        size = sum(f.stat().st_size for f in tmp_path.glob("1/*/manifest*.json"))
        assert manager.last_report is not None
        assert manager.last_report.manifest_bytes == size
