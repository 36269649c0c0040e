"""One script of saves, kills, rollbacks, retention and damage, by an older version and by this one.

    python tests/campaign/differential.py [--old REVISION] [--seed N] [--keep FOLDER]

Both draw their ids from one seed and take the time from one clock (`differential_worker.py`), so
that they are to write the same files and to restore the same bits, but for what a stated change
explains: `CHANGES`. Then each reads the roots of the other. Ends with an error if anything else
differs. The older version is taken from git, and runs with the packages that are installed here.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from math import isclose
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
WORKER = HERE / "differential_worker.py"
OLD = "29a61f3"  # before the middle of the package was taken apart
VERSIONS = ("old", "new")
ORBAX_METADATA = "_CHECKPOINT_METADATA"
HEX = re.compile(r"[0-9a-f]{16,}")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same in both.

    Attributes:
        where: the run, then the act, or the file below its root and the field in it.
        field: of a JSON document or of what an act says, with dots; empty: of the whole.
        old: what the older version has; None: nothing.
        new: what this version has.
    """

    where: str
    field: str
    old: Any
    new: Any

    @property
    def alike(self) -> tuple[str, str]:
        """The same for the same file or act, in whichever step and process."""
        of_step = re.sub(r"^.*?: (process \d+: )?([^/]*\d[^/]*/)?", "", self.where)
        return of_step, re.sub(r"\[\d+\]", "[]", self.field)

    def __str__(self) -> str:
        values = f"    old: {_short(self.old)}\n    new: {_short(self.new)}"
        return f"{self.where} {self.field}\n{values}"


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) < 300 else text[:300] + "..."


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change since the older version, and the differences that it explains."""

    what: str
    explains: Callable[[Difference], bool]


def _new(file: str, field: str) -> Callable[[Difference], bool]:
    """Whether a difference is a field that only the newer version writes."""
    return lambda d: (
        d.old is None and d.where.endswith(file) and bool(re.fullmatch(field, d.field))
    )


# Fields of manifests and of reports.
_OF_DENSE_LEAVES = (
    r"dense(_files)?\b|required_features|dense_leaves\[\d+\]\.numpy|.*\bdense_bytes$"
)
_OF_EXACT_ROWS = (
    r"arrays\.raw\.rows\.|(history\[\d+\]\.|totals\.)?(slot_|table_)?bytes$"
)
# What is not rounding to nearest since a restore is not here: workers ask for that.
CHANGES = (
    Change(
        "manifests say how the rows of a run are encoded",
        _new("/manifest.json", "encoding"),
    ),
    Change("manifests say how far rows have moved", _new(".json", "motion")),
    Change(
        "and are longer by that",
        lambda d: d.field == "totals.manifest_bytes" and d.old < d.new,
    ),
    Change(
        "figures of the errors of rows differ in their last digit",
        lambda d: (
            d.field.startswith("row_errors.") and isclose(d.old, d.new, rel_tol=1e-5)
        ),
    ),
    Change(
        "dense leaves are written by this library, not by Orbax",
        lambda d: "/dense/" in d.where or bool(re.match(_OF_DENSE_LEAVES, d.field)),
    ),
    Change(
        "one file in the folder of a step says that it is committed, none in its item",
        lambda d: d.where.endswith("/default/commit_success.txt") and d.new is False,
    ),
    Change(
        "what a killed save leaves is in a folder of the attempt's own name",
        lambda d: ".orbax-checkpoint-tmp" in d.where,
    ),
    Change(
        "claims say which boot, namespaces and start their process has",
        _new("cnr_jax.writer.json", "boot_id|namespaces|started_ticks"),
    ),
    Change(
        "managers note what they have measured",
        lambda d: "/cnr_jax.measurements.json" in d.where.replace(": ", "/"),
    ),
    Change(
        "where arrays are compressed, exact rows are packed by their bytes apart",
        lambda d: (
            ", compressed, " in d.where
            and ("/raw.rows." in d.where or bool(re.match(_OF_EXACT_ROWS, d.field)))
        ),
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A run, and what happens to it, process by process."""

    name: str
    options: Mapping[str, Any]
    orbax: Mapping[str, Any]
    moments: tuple[str, ...]


SCENARIOS = (
    Scenario(
        "recorded, 4 bits, consecutive, three kept",
        {"policy": "Consecutive", "bits": 4, "tracking": "recorded"},
        {"max_to_keep": 3},
        ("begin", "commit", "removal"),
    ),
    Scenario(
        "fingerprints, 2 and 8 bits, intermittent, all kept",
        {
            "policy": "Intermittent",
            "tracking": "fingerprint",
            "slot_codec": "auto",
            "tables": {"user": {"bits": 2}, "item": {"bits": 8}},
        },
        {},
        ("manifest", "committed", "aside"),
    ),
    Scenario(
        "audited, raw, compressed, one-shot, every fourth kept",
        {
            "policy": "OneShot",
            "codec": "raw",
            "compression": "zstd",
            "tracking": "audited",
        },
        {"max_to_keep": 2, "keep_period": 4},
        ("manifest", "removal", "committed"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", default=OLD, help="revision to compare with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep all roots in this folder")
    parser.add_argument("--only", default="", help="runs with this in their names")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="differential-") as name:
        folder = args.keep or Path(name)
        differences = run(folder.resolve(), args.old, args.seed, args.only)
    sys.exit(present(differences))


def present(differences: list[Difference]) -> int:
    """Prints what differed, by what explains it; 1 if something nothing explains."""
    explained = collections.Counter[str]()
    others: dict[tuple[str, str], list[Difference]] = {}
    for each in differences:
        found = next((c.what for c in CHANGES if c.explains(each)), None)
        if found is None:
            others.setdefault(each.alike, []).append(each)
        else:
            explained[found] += 1
    for what, count in explained.items():
        print(f"{count:5} differences: {what}")
    print(f"{sum(map(len, others.values())):5} differences that nothing explains")
    for alike in others.values():
        print(f"{len(alike):5} as this: {alike[0]}")
    return 1 if others else 0


def run(folder: Path, revision: str, seed: int, only: str = "") -> list[Difference]:
    """Runs scenarios in both versions; returns all that differed."""
    packages = {"old": folder / "package", "new": REPOSITORY}
    unpack(revision, packages["old"])
    found: list[Difference] = []
    for number, scenario in enumerate(SCENARIOS):
        if only not in scenario.name:
            continue
        pair = [
            Course(folder / str(number) / v, packages[v], scenario, f"{seed}/{number}")
            for v in VERSIONS
        ]
        said = Counts()
        found += compare_courses(scenario, pair, seed, said)
        print(f"{scenario.name}: {said}")
    return found


@dataclasses.dataclass(slots=True)
class Counts:
    """How much was compared."""

    acts: int = 0
    kills: int = 0
    files: int = 0
    read: int = 0
    refused: int = 0

    def __str__(self) -> str:
        return (
            f"{self.acts} acts, {self.kills} kills, {self.files} files, {self.read} steps"
            f" restored by the other version, {self.refused} refused by it for a new feature"
        )


def unpack(revision: str, folder: Path) -> None:
    """Puts the package of a revision into a folder."""
    command = ["git", "-C", str(REPOSITORY), "archive", revision, "cnr_jax"]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        opened.extractall(folder, filter="data")


@dataclasses.dataclass(slots=True)
class Course:
    """A scenario in one version.

    Attributes:
        folder: of its root, and of copies of that.
        package: the folder that holds `cnr_jax`.
        scenario: what goes on.
        seed: of all that is drawn.
        part: how many processes there were.
    """

    folder: Path
    package: Path
    scenario: Scenario
    seed: str
    part: int = 0

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def act(self, acts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a process says of acts; the last thing is how it ended."""
        self.part += 1
        self.root.parent.mkdir(parents=True, exist_ok=True)
        request = {
            "root": str(self.root),
            "seed": f"{self.seed}/{self.part}",
            "state_seed": 7,
            "minute": 100 * self.part,
            "options": self.scenario.options,
            "orbax": self.scenario.orbax,
            "acts": acts,
        }
        said = json.dumps(ask(self.package, request))
        return json.loads(said.replace(str(self.folder), "..."))

    def copy(self) -> Path:
        """A copy of the root as it is now."""
        copy = self.folder / f"copy-{self.part}"
        shutil.copytree(self.root, copy)
        return copy


def ask(package: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """What a process by one version says; the last is its exit code."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COMPILATION_CACHE_DIR": str(
            Path(tempfile.gettempdir()) / "differential-jax"
        ),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        input=json.dumps({**request, "package": str(package)}),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode not in (0, -9):
        sys.exit(f"{package}: ended with {done.returncode}\n{done.stderr[-4000:]}")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return [*said, {"act": "end", "code": done.returncode}]


def chapters(scenario: Scenario, seed: int) -> Iterator[list[dict[str, Any]] | str]:
    """What goes on, process by process; a text is what is done to the files in between."""
    draw = random.Random(f"{scenario.name}/{seed}")

    def save(step: int, full: bool = False) -> dict[str, Any]:
        rows = draw.choice((3, 20, 90))
        return {"act": "save", "step": step, "full": full, "rows": rows}

    newest = {"act": "restore", "step": None}
    full = draw.randint(1, 4)
    yield [save(step, step == full) for step in range(6)]
    step = 6
    for moment in scenario.moments[:-1]:
        kill = {"act": "kill", "moment": moment, "step": step + 1}
        yield [newest, save(step), kill, save(step + 1)]
        step += 1
    yield [newest, save(step + 1), save(step + 2), {"act": "verify"}]
    last = step + 2
    back = {"act": "restore", "step": last - 1}
    kill = {"act": "kill", "moment": scenario.moments[-1], "step": last}
    yield [back, kill, save(last), save(last + 1)]
    yield [newest, save(last + 2, full=True), save(last + 3), save(last + 4)]
    yield [{"act": "prune", "keep": 2}]
    yield draw.choice(("rows", "process manifest"))
    yield [{"act": "verify"}, newest, save(last + 5), save(last + 6)]
    yield "manifest"
    ends = [{"act": "delete", "step": step} for step in (last + 8, 0)]
    yield [{"act": "verify"}, newest, save(last + 7, full=True), save(last + 8), *ends]
    yield [newest, save(last + 9)]


def compare_courses(
    scenario: Scenario, pair: list[Course], seed: int, counts: Counts
) -> Iterator[Difference]:
    """Goes through a scenario in both versions at once; yields what differed."""
    old, new = pair
    copies: list[tuple[Path, Path]] = []
    with ThreadPoolExecutor(2) as pool:
        for acts in chapters(scenario, seed):
            if isinstance(acts, str):
                harmed = damage(old.root, acts), damage(new.root, acts)
                where = f"{scenario.name}: damage of {acts}"
                yield from compare("", *harmed, where)
                continue
            said = list(pool.map(Course.act, pair, [acts, acts]))
            where = f"{scenario.name}: process {old.part}"
            counts.acts += len(acts)
            met = any(act["act"] == "kill" for act in acts)
            killed = said[0][-1]["code"] == -9
            counts.kills += killed
            if met and not killed:
                moment = next(a["moment"] for a in acts if a["act"] == "kill")
                yield Difference(where, f"kill {moment}", "not met", "")
            yield from check(said[0], where)
            yield from compare("", said[0], said[1], where)
            yield from compare_roots(old.root, new.root, where, counts)
            if old.part >= len(scenario.moments):
                copies.append((old.copy(), new.copy()))
        roots = [str(root) for both in copies for root in both]
        asked = {"seed": "", "minute": 0, "roots": roots}
        by_old, by_new = pool.map(lambda course: ask(course.package, asked), pair)
    yield from compare_readers(by_old[:-1], by_new[:-1], scenario.name, counts)


def check(said: list[dict[str, Any]], where: str) -> Iterator[Difference]:
    """Acts of a process that failed, though nothing of the script makes them fail."""
    for each in said:
        error, act = each.get("error"), each["act"]
        is_meant = (
            error and act == "delete" and error[0] in ("NoStepError", "ChainError")
        )
        if (error and not is_meant) or not each.get("saved", True):
            yield Difference(where, act, error or "not saved", "")


def damage(root: Path, what: str) -> list[str]:
    """Damages the newest step; returns what was damaged, and how."""
    step = max((p for p in root.iterdir() if p.name.isdigit()), key=_number)
    item = step / "default"
    if what == "manifest":
        path = item / "manifest.json"
        path.write_bytes(path.read_bytes()[:10])
    elif what == "process manifest":
        path = item / "manifest.p00000.json"
        path.unlink()
    else:
        chunks = [p for p in item.glob("rows.p00000/**/*") if "c" in p.parts]
        path = max((p for p in chunks if p.is_file()), key=lambda p: (_size(p), str(p)))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    return [step.name, str(path.relative_to(step))]


def _number(path: Path) -> int:
    return int(path.name)


def _size(path: Path) -> int:
    return path.stat().st_size


def compare(field: str, old: Any, new: Any, where: str) -> Iterator[Difference]:
    """How two values of JSON differ, down to the fields."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{field}.{key}".lstrip(".")
            yield from compare(inner, old.get(key), new.get(key), where)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from compare(f"{field}[{index}]", a, b, where)
    elif old != new:
        yield Difference(where, field, old, new)


def files_of(root: Path) -> dict[str, Path]:
    """Files of a root; of those that Orbax calls at will, and in any number, one of each kind."""
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        # What Orbax tells of a save in flight it writes beside that: a kill meets it, or not.
        is_beside = ".orbax-checkpoint-tmp" in name and path.name == ORBAX_METADATA
        if path.is_file() and not is_beside:
            found.setdefault(HEX.sub("*", name) if "/dense/" in name else name, path)
    return found


def is_ruled_by_orbax(name: str) -> bool:
    """Whether a file says when it was written, or has another content each time."""
    in_database = "/dense/" in name and "*" in name
    return in_database or name.endswith(("manifest.ocdbt", "/commit_success.txt"))


def compare_roots(
    old: Path, new: Path, where: str, counts: Counts
) -> Iterator[Difference]:
    """How the files of two roots differ; arrays of Orbax are compared where they are read."""
    ours, theirs = files_of(new), files_of(old)
    counts.files += len(theirs)
    for name in sorted({*ours, *theirs}):
        what = f"{where}: {name}"
        if name not in ours or name not in theirs:
            is_old = name in theirs
            yield Difference(what, "", is_old and "a file", not is_old and "a file")
            continue
        a, b = theirs[name].read_bytes(), ours[name].read_bytes()
        if is_ruled_by_orbax(name):
            continue
        try:
            before, after = _masked(name, json.loads(a)), _masked(name, json.loads(b))
        except ValueError:
            before, after = hashlib.sha256(a).hexdigest(), hashlib.sha256(b).hexdigest()
        yield from compare("", before, after, what)


def _masked(name: str, document: Any) -> Any:
    """A document without what the seed and the clock do not rule."""
    if not isinstance(document, dict):
        return document
    if name.endswith("cnr_jax.writer.json"):  # of this process
        return dict.fromkeys(document, "")
    if name.endswith(ORBAX_METADATA):
        times = ("init_timestamp_nsecs", "commit_timestamp_nsecs")
        return {k: v for k, v in document.items() if k not in times}
    # The versions that wrote it, and digests and lengths of what is compared by itself.
    document = {k: v for k, v in document.items() if k not in ("writer", "sha256")}
    if "processes" in document:
        document["processes"] = [each["path"] for each in document["processes"]]
    if "dense_files" in document:
        paths = {HEX.sub("*", each["path"]) for each in document["dense_files"]}
        document["dense_files"] = sorted(paths)
        document["totals"] = {**document["totals"], "dense_bytes": 0}
    return document


def compare_readers(
    by_old: list[dict[str, Any]],
    by_new: list[dict[str, Any]],
    where: str,
    counts: Counts,
) -> Iterator[Difference]:
    """How what both versions read of the roots of either differs.

    The newer one has to read all that the older one wrote. The older one has to read what the newer
    one wrote, or to refuse a step by the name of a feature that it does not know.
    """
    for number, (old, new) in enumerate(zip(by_old, by_new, strict=True)):
        writer, root = VERSIONS[number % 2], Path(old.pop("root"))
        what = f"{where}: {root.name}, which the {writer} version wrote"
        new.pop("root")
        features = features_in(root) if writer == "new" else set()
        for step, read in old["steps"].items():
            if names_feature(read, features):
                counts.refused += 1
                old["steps"][step] = new["steps"][step]
                # What it cannot read it does not list, and knows nothing else of.
                old = {**new, "steps": old["steps"]}
            else:
                counts.read += 1
        yield from compare("", old, new, what)


def features_in(root: Path) -> set[str]:
    """The features that readers of a root need, of any of its steps that can be parsed."""
    found: set[str] = set()
    for path in root.glob("*/default/manifest.json"):
        with contextlib.suppress(ValueError):
            found |= set(json.loads(path.read_bytes())["required_features"])
    return found


def names_feature(read: Any, features: set[str]) -> bool:
    """Whether a step was refused for a feature, by the name of it."""
    is_refused = isinstance(read, list) and read[0] == "UnsupportedVersionError"
    return is_refused and any(name in read[2] for name in features)


if __name__ == "__main__":
    main()
