"""What must not grow with the number of steps that a root keeps, through managers."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.format.manifest import MAX_HISTORY

_opened: collections.Counter[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        path, _, flags = arguments
        if isinstance(path, (str, os.PathLike)) and not flags & os.O_ACCMODE:
            _opened[os.fspath(path)] += 1


@pytest.fixture
def opened_to_read() -> Iterator[collections.Counter[str]]:
    """How often each file was opened to be read from."""
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
