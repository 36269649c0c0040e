"""The catalogue of a root: one object that describes its steps, for stores where a look costs.

The catalogue is advice, and may lack steps: a manager that finds another step in the root reads
that one itself. What it says of a step must hold as long as the folder of that step exists. So it
names the `epoch` of the claim under which it was written, and counts under no other. The writer
draws a new epoch when it claims the root, and before it removes a step or uses a name again. The
claim, which is read anyway, therefore gives away a catalogue that is old or of another root.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.fields import Fields, dump_document, json_text, open_document
from cnr_jax.format.manifest import (
    Manifest,
    dump,
    load,
    read_fork,
    read_motion,
    read_parent,
    read_totals,
    read_uuids,
    to_json,
)
from cnr_jax.repository.index.entries import (
    Entry,
    Summary,
    brings_baseline,
    entry_of,
    tables_digest,
)
from cnr_jax.repository.store import AnyPath, can, store_of
from cnr_jax.repository.upkeep.claim import read_writer
from cnr_jax.texts import logger

_log = logger(__name__)
_FORMAT = "cnr_jax catalogue"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Facts about a step beside its state, as the catalogue keeps them.

    Attributes:
        unix_secs: Unix time of the commit, in seconds.
        metrics: metrics that the step was saved with, as JSON; None if there are none.
    """

    unix_secs: float
    metrics: Any = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Catalogue of some steps of a root, or of none.

    Attributes:
        epoch: epoch of the claim; empty if there is none.
        item: name of the item that holds the state of the steps.
        entries: entries by directory; that of the newest step has its manifest.
        noted: facts by directory, for the steps where they are known.
    """

    epoch: str = ""
    item: str = ""
    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    noted: Mapping[str, Noted] = dataclasses.field(default_factory=dict)


def read(root: AnyPath) -> Catalogue:
    """Reads the catalogue of a root; it lists no steps if it is out of date, or not needed."""
    found = Catalogue()
    if not can(root).conditions:
        return found
    path = root / names.CATALOGUE
    try:
        writer = read_writer(root)
        if writer is not None and writer.epoch:
            found = Catalogue(epoch=writer.epoch)
            stored = store_of(path).read_version(path)
            if stored is not None:
                found = _parsed(stored[0], writer.epoch) or found
    except (errors.CnrError, OSError) as error:
        _log.info("the catalogue is not used, and each step is looked at: %s", error)
    return found


def dumped(
    item: str, epoch: str, entries: Iterable[Entry], noted: Mapping[str, Noted]
) -> bytes:
    """Bytes of a catalogue of these committed steps, which this library saved."""
    digests: dict[int, str] = {}
    steps: dict[str, Any] = {}
    newest: Manifest | None = None
    for entry in entries:
        newest = entry.manifest or newest
        steps[entry.directory] = _document(entry, noted.get(entry.directory), digests)
    return dump_document(
        {
            "format": _FORMAT,
            "version": names.VERSION,
            "epoch": epoch,
            "item": item,
            "steps": steps,
            "newest": dump(newest).decode() if newest else None,
        }
    )


def _document(
    entry: Entry, noted: Noted | None, digests: dict[int, str]
) -> dict[str, Any]:
    summary, manifest = entry.summary, entry.manifest
    if manifest is not None:
        # The steps of a run mostly share one `tables` object, so it is digested once.
        known = id(manifest.tables)
        if known not in digests:
            digests[known] = tables_digest(manifest)
        summary = Summary(
            lineage=manifest.lineage,
            recorded_clock=manifest.recorded_clock,
            totals=manifest.totals,
            motion=manifest.motion,
            tables=digests[known],
            brings=brings_baseline(manifest),
        )
    document = {
        "uuid": entry.uuid,
        "generation": entry.generation,
        "parent": to_json(entry.parent),
        "run": entry.run,
        "forks": to_json(entry.forks),
        **({"stands_for": list(entry.stands_for)} if entry.stands_for else {}),
        **to_json(summary),
    }
    if noted is not None:
        try:
            json_text(noted.metrics)
        except (TypeError, ValueError):
            return document  # JSON cannot hold the metrics: readers take them from the step
        document["noted"] = to_json(noted)
    return document


@functools.lru_cache(maxsize=1)  # several callers ask for it while a root is opened
def _parsed(data: bytes, epoch: str) -> Catalogue | None:
    """Parses a catalogue; None if it was written under another epoch.

    Raises:
        FormatError: if it is damaged, or of a newer version.
    """
    fields = open_document(data, names.CATALOGUE, _FORMAT)
    if fields.text("epoch") != epoch:
        return None
    noted: dict[str, Noted] = {}
    entries: dict[str, Entry] = {}
    steps = fields.child("steps")
    for directory in steps.keys():
        step = steps.child(directory)
        entries[directory] = _entry(directory, step)
        if step.has("noted"):
            note = step.child("noted")
            secs, metrics = note.number("unix_secs"), note.any("metrics")
            noted[directory] = Noted(unix_secs=secs, metrics=metrics)
    item = fields.name("item")
    if fields.problems:
        raise errors.ManifestError(
            f"{names.CATALOGUE} cannot be understood", fields.problems
        )
    if fields.has("newest"):
        newest = load(fields.text("newest").encode(), f"newest in {names.CATALOGUE}")
        for directory, entry in entries.items():
            if entry.uuid == newest.uuid:
                entries[directory] = entry_of(directory, newest)
    return Catalogue(epoch=epoch, item=item, entries=entries, noted=noted)


def _entry(directory: str, fields: Fields) -> Entry:
    has = fields.has
    summary = Summary(
        lineage=fields.hexadecimal("lineage", 32),
        recorded_clock=fields.integer("recorded_clock")
        if has("recorded_clock")
        else None,
        totals=read_totals(fields.child("totals")),
        motion=read_motion(fields.child("motion")) if has("motion") else None,
        tables=fields.hexadecimal("tables", 32),
        brings=has("brings") and fields.boolean("brings"),
    )
    return Entry(
        directory=directory,
        step=names.step_number(directory) if names.may_be_step(directory) else 0,
        uuid=fields.hexadecimal("uuid", 32),
        generation=fields.integer("generation", minimum=1),
        parent=read_parent(fields.child("parent")) if has("parent") else None,
        run=fields.text("run"),
        forks=fields.objects("forks", read_fork) if has("forks") else None,
        summary=summary,
        stands_for=read_uuids(fields, "stands_for") if has("stands_for") else (),
    )
