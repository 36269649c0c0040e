"""What differences are taken to: read from the right step, and without keeping others waiting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format.manifest import ParentRef
from cnr_jax.repository import parent_rows
from cnr_jax.repository.parent_rows import ParentRows
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.codecs.lattice import Lattice

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")

ROWS, DIM = 32, 8
KEY = ("t", "table", ((0, ROWS), (0, DIM)))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[epath.Path, ParentRef]:
    """A root of two steps, and the second as a parent."""
    table = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    state = {"t": jnp.asarray(table)}
    tables = cnr.find_tables(state, ["t"])
    options = cnr.Options(codec="lattice", policy=cnr.Consecutive())
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(2):
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
            state = {"t": state["t"] + 0.01}
    root = epath.Path(tmp_path)
    uuid = read_manifest(tmp_path / "1" / "default").uuid
    return root, ParentRef(directory="1", uuid=uuid, clock=1)


def test_nobody_waits_while_a_chain_is_read(
    saved: tuple[epath.Path, ParentRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, parent = saved
    parents, reads, goes_on = ParentRows(), threading.Event(), threading.Event()
    open_chain, opened = parent_rows.open_chain, list[str]()

    def slow(*args: Any) -> Any:
        opened.append(threading.current_thread().name)
        reads.set()
        assert goes_on.wait(30)
        return open_chain(*args)

    monkeypatch.setattr(parent_rows, "open_chain", slow)
    found: list[Any] = []

    def ask() -> None:
        found.append(parents.of(root, "default", parent, {KEY: Lattice()}))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert reads.wait(30)
    threads[1].start()
    # Another save writes, and says so, from start to end.
    with parents.writing("other"):
        parents.note("other", None, {})
    goes_on.set()
    for thread in threads:
        thread.join(30)
    first, second = found
    # Read once: the second waited for the first.
    assert len(opened) == 1
    assert first[KEY]["integers"] is second[KEY]["integers"]


def test_rows_of_another_checkpoint_are_refused(
    saved: tuple[epath.Path, ParentRef],
) -> None:
    root, parent = saved
    other = ParentRef(directory=parent.directory, uuid="0" * 32, clock=1)
    parents = ParentRows()
    with pytest.raises(errors.ChainError, match="another checkpoint"):
        parents.of(root, "default", other, {KEY: Lattice()})
    assert KEY in parents.of(root, "default", parent, {KEY: Lattice()})
