"""Committed checkpoints made of nothing but a manifest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cnr_jax.format.manifest import (
    HistoryEntry,
    LeafEntry,
    Manifest,
    NamedConfiguration,
    ParentRef,
    TableEntry,
    Totals,
)
from cnr_jax.repository.index.entries import Entry, entry_of
from cnr_jax.repository.index.ledger import Ledger


def table(rows: int = 8) -> TableEntry:
    leaf = LeafEntry(name="table", path=("user",), shape=(rows, 4), dtype="float32")
    layout = NamedConfiguration(name="identity", configuration={})
    return TableEntry(
        name="user", rows=rows, padded_rows=rows, layout=layout, leaves=(leaf,)
    )


def make_manifest(
    step: int,
    parent: Entry | None = None,
    *,
    clock: int = 0,
    parent_clock: int = 0,
    generation: int = 1,
    lineage: str = "a" * 32,
    history: tuple[HistoryEntry, ...] | None = None,
    **changes: Any,
) -> Manifest:
    kind = "full" if parent is None else "delta"
    saved = HistoryEntry(step=step, kind=kind, bytes=100, rows=8, secs=0.5)
    before = ()
    if parent is not None:
        assert parent.manifest is not None
        before = parent.manifest.history
    fields: dict[str, Any] = {
        "uuid": f"{step:024x}{generation:08x}",
        "step": step,
        "kind": kind,
        "generation": generation,
        "lineage": lineage,
        "tracking": "recorded",
        "recorded_clock": clock,
        "fingerprint_clock": None,
        "parent": None
        if parent is None
        else ParentRef(
            directory=parent.directory, uuid=parent.uuid, clock=parent_clock
        ),
        "processes": (),
        "dense_files": (),
        "dense_leaves": (),
        "tables": (table(),),
        "totals": Totals(
            rows=8, table_bytes=90, slot_bytes=10, dense_bytes=0, manifest_bytes=1
        ),
        "policy": "test",
        "reason": "test",
        "history": (*before, saved) if history is None else history,
        "restores": 0,
        "written_at_unix_secs": 0.0,
        "writer": {},
    }
    return Manifest(**{**fields, **changes})


class Root:
    """A ledger and what it would have read."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def add(self, step: int, parent: Entry | None = None, **kwargs: Any) -> Entry:
        """A committed step in a directory of its number."""
        directory = kwargs.pop("directory", str(step))
        entry = entry_of(directory, make_manifest(step, parent, **kwargs))
        self.ledger.add(entry)
        return entry


@pytest.fixture
def root() -> Root:
    return Root()


@pytest.fixture
def manifest_of() -> Callable[..., Manifest]:
    return make_manifest


@pytest.fixture
def make_table() -> Callable[..., TableEntry]:
    return table
