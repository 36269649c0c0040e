"""Roots that somebody has made to do harm: links, pipes, claims and manifests that lie."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import judging
import training
from bench import Bench
from children import Ended
from outcomes import Outcome, Tally, Verdict
from scenarios import FULL, Note, System, steps_from
from systems import Ours

from cnr_jax.format.fields import dump_document

NAME = "crafted"
ABOUT = "links, pipes, claims and manifests made to do harm"
ALLOWED = frozenset({Outcome.EQUAL, Outcome.OLDER})
STEPS = 3
UUID = "ab" * 16
# Changes a root of full steps; the folder beside it must stay as it is.
Craft = Callable[[Path, Path], None]


def _linked_step(root: Path, outside: Path) -> None:
    (root / "0").rename(outside / "0")
    (root / "0").symlink_to(outside / "0")


def _linked(name: str) -> Craft:
    return lambda root, outside: (root / name).symlink_to(outside)


def _claim(text: str) -> Craft:
    def craft(root: Path, outside: Path) -> None:
        (root / "cnr_jax.writer.json").write_text(text)

    return craft


def _renaming(name: str, now: str) -> Craft:
    def craft(root: Path, outside: Path) -> None:
        beside = f"../{outside.name}"
        moved = [[name.format(out=beside), now.format(out=beside)]]
        aside = {"uuid": UUID, "directory": "9", "item": "default", "moved": moved}
        claim = {"id": UUID, "host": "nowhere", "pid": 1, "since": "", "aside": aside}
        (root / "cnr_jax.writer.json").write_text(json.dumps(claim))

    return craft


def _pipe(file: str) -> Craft:
    def craft(root: Path, outside: Path) -> None:
        (path,) = root.glob(file)
        path.unlink()
        os.mkfifo(path)

    return craft


def _lying(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Craft:
    """Manifests of the newest step say something else, under the right digests."""

    def craft(root: Path, outside: Path) -> None:
        item = root / str(STEPS - 1) / "default"
        path, inner = item / "manifest.json", item / "manifest.p00000.json"
        manifest, process = (
            json.loads(path.read_bytes()),
            json.loads(inner.read_bytes()),
        )
        change(manifest, process)
        del manifest["sha256"], process["sha256"]
        data = dump_document(process)
        inner.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        manifest["processes"][0] |= {"bytes": len(data), "sha256": digest}
        path.write_bytes(dump_document(manifest))

    return craft


def _without_rows(manifest: dict[str, Any], process: dict[str, Any]) -> None:
    for tile in process["tiles"]:
        tile["segments"] = []


def _promising(manifest: dict[str, Any], process: dict[str, Any]) -> None:
    for array in process["arrays"].values():
        array["length"] *= 10**9
        array |= {"chunk": array["length"], "crc32c": array["crc32c"][:1]}


def _nul(manifest: dict[str, Any], process: dict[str, Any]) -> None:
    manifest["processes"][0]["path"] = "manifest\0json"


CRAFTS: dict[str, Craft] = {
    "a step is a link": _linked_step,
    "a leftover is a link": _linked(f"0.removed-{UUID[:16]}"),
    "a temporary folder is a link": _linked("9.orbax-checkpoint-tmp"),
    "a claim that moves out": _renaming("{out}/taken", "1"),
    "a claim that moves in": _renaming("9", "{out}"),
    "a claim of 1e400": _claim('{"id": 1, "pid": 1e400, "host": "", "since": ""}'),
    "a claim nested deeply": _claim("[" * 100_000),
    "a claim that is a pipe": _pipe("cnr_jax.writer.json"),
    "a chunk that is a pipe": _pipe(f"{STEPS - 1}/default/rows.p*/raw.rows.*/c/0"),
    "Orbax's metadata a pipe": _pipe(f"{STEPS - 1}/_CHECKPOINT_METADATA"),
    "tiles without rows": _lying(_without_rows),
    "rows that are not stored": _lying(_promising),
    "a name with NUL": _lying(_nul),
}


def run(bench: Bench) -> Iterator[Tally]:
    for name in bench.sample(tuple(CRAFTS), 2):
        if Ours in bench.systems and bench.wants(NAME, name, Ours):
            tally = Tally(NAME, name, Ours.name, ALLOWED)
            tally.add(_tried(bench, CRAFTS[name]), name)
            yield tally


def _tried(bench: Bench, craft: Craft) -> Verdict:
    root = bench.new_root()
    outside = root.with_name(root.name + "-outside")
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "file").write_text("mine")
    trainer = Ours(root, policy=FULL)
    steps_from(trainer, 0, STEPS)
    trainer.close()
    craft(root, outside)
    before = _files(outside)
    with bench.server() as server:
        ended = server.run(Ours.name, NAME, root)
    verdict = _judged(ended)
    if _files(outside) != before:
        verdict = Verdict(Outcome.LOST, f"outside of the root: {_files(outside)}")
    for folder in (root, outside):
        shutil.rmtree(folder)
    return verdict


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _judged(ended: Ended) -> Verdict:
    if ended.status is None:
        return Verdict(Outcome.HANG)
    if ended.status != 0:
        return Verdict(Outcome.UNCLEAR, "\n".join(map(str, ended.notes[-2:])))
    (told,) = (note for note in ended.notes if "newest" in note)
    if told["wrong"]:
        return Verdict(Outcome.WRONG, str(told["wrong"]))
    return Verdict(Outcome.EQUAL if told["newest"] == STEPS - 1 else Outcome.OLDER)


def act(system: System, root: Path, note: Note) -> None:
    """Goes on from the newest step, with retention, and restores what is listed; in a child."""
    trainer = system(root, keep=2, policy=FULL, verify_reads=False)
    newest = trainer.go_on()
    assert newest is not None
    wrong = _differs(trainer, newest)
    steps_from(trainer, newest + 1, newest + 3)
    trainer.close()
    for step in judging.listed(system, root):
        trainer = system(root)
        trainer.go_on(step)
        wrong += _differs(trainer, step)
        trainer.close()
    note({"newest": newest, "wrong": wrong})


def _differs(trainer: Any, step: int) -> list[str]:
    got = training.values_of(trainer.state)
    want = training.values_of(training.state_after(step))
    exact = sorted(set(training.differing(got, want)) - training.QUANTIZED)
    return [f"step {step}: {path}" for path in exact]
