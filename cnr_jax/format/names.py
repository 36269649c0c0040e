"""Names of the files and folders of one checkpoint item, and of the fields in them.

A step is `<root>/<step directory>/<item>/`; everything below that is named here. Orbax names the
step directory and, while a save is in flight, adds `TEMPORARY_SUFFIX` to it and to the item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FORMAT = "cnr_jax"
VERSION = 1
# Arrays whose chunks are compressed by zstd.
ZSTD = "zstd"
# What this reader understands beyond version 1 itself. A checkpoint that requires a feature
# not listed here is refused, never read partly.
KNOWN_FEATURES: frozenset[str] = frozenset({ZSTD})

# Reserved: they will mean what SPEC.md, section 11, says, and are refused until then.
RESERVED_FEATURES: frozenset[str] = frozenset({"tombstones"})

MANIFEST = "manifest.json"
DENSE = "dense"
# Written by Orbax into every step, whoever saved its items.
ORBAX_METADATA = "_CHECKPOINT_METADATA"
# Where Orbax looks up which leaves there are, and where they are.
DENSE_INDEX = (f"{DENSE}/_METADATA", f"{DENSE}/manifest.ocdbt")
ROW_IDS_ARRAY = "row_ids"
TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
# Marks a step directory that a rollback moved out of the way; Orbax does not list such names.
ABANDONED_MARK = ".abandoned-"
# Marks a step directory that is removed and only waits for its files to be deleted.
REMOVED_MARK = ".removed-"
# Begins the name of a folder that holds the steps of an earlier run, and is a root itself.
EARLIER_RUN = "earlier-run-"

# In a step directory of a store without renames: Orbax writes it last, to commit the step.
COMMITTED = "commit_success.txt"

# In the root: who saves there, and what is locked while a save is being written.
WRITER = "cnr_jax.writer.json"
WRITER_LOCK = "cnr_jax.writer.lock"
# In the root: which steps may lack rows, as an audit has found.
SUSPECTS = "cnr_jax.suspects.json"
# In the root, if asked for: a line for each save and restore.
METRICS = "cnr_jax.metrics.jsonl"


def process_manifest(process: int) -> str:
    """The manifest that one process writes after its arrays.

    Example:
        >>> process_manifest(3)
        'manifest.p00003.json'
    """
    return f"manifest.p{process:05d}.json"


def rows_directory(process: int) -> str:
    """The folder that holds the arrays of one process.

    Example:
        >>> rows_directory(0)
        'rows.p00000'
    """
    return f"rows.p{process:05d}"


def array_name(codec: str, part: str, dtype: str) -> str:
    """The array into which all rows of one codec, part and dtype are concatenated.

    Example:
        >>> array_name("cnr.asymmetric", "codes", "uint8")
        'asymmetric.codes.uint8'
    """
    return f"{codec.removeprefix('cnr.')}.{part}.{dtype}"


def abandoned(directory: str, generation: int, uuid: str) -> str:
    """The name under which a step directory of an abandoned branch is kept.

    With the whole uuid: its first digits are those of all checkpoints of a run, and a run can
    abandon the same step and generation twice where a save in between failed.

    Example:
        >>> abandoned("1200", 1, "00ff" * 8)
        '1200.abandoned-g1-00ff00ff00ff00ff00ff00ff00ff00ff'
    """
    return f"{directory}{ABANDONED_MARK}g{generation}-{uuid}"


def is_abandoned(name: str, directory: str) -> bool:
    """Whether a name is one under which a step directory is kept that a rollback moved.

    Example:
        >>> is_abandoned("1200.abandoned-g1-" + "00ff" * 8, "1200"), is_abandoned("x", "1200")
        (True, False)
    """
    generation, _, uuid = name.removeprefix(f"{directory}{ABANDONED_MARK}g").partition(
        "-"
    )
    digits = generation.isascii() and generation.isdecimal()
    return (
        digits
        and is_hex(uuid, 32)
        and name == abandoned(directory, int(generation[:20]), uuid)
    )


_SEPARATOR = re.compile(r"[/\\\0]")
_HEX = re.compile("[0-9a-f]*")


def is_hex(text: str, digits: int) -> bool:
    """Whether a text is so many lower-case hexadecimal digits."""
    return len(text) == digits and _HEX.fullmatch(text) is not None


def is_component(name: str) -> bool:
    """Whether a name is that of one file or folder, which leads nowhere else.

    Example:
        >>> is_component("user.table"), is_component("../x"), is_component("..")
        (True, False, False)
    """
    if not name.isascii():
        try:
            name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half of a pair: no file system has such a name
            return False
    return name not in ("", ".", "..") and _SEPARATOR.search(name) is None


def earlier_run(uuid: str) -> str:
    """The folder of a root that a new run moves the steps of earlier ones into.

    Never listed as a step: it does not end in a digit.

    Args:
        uuid: of the first save of the new run.

    Example:
        >>> earlier_run("00ff" * 8)
        'earlier-run-00ff00ff00ff00ff00ff00ff00ff00ff.root'
    """
    return f"{EARLIER_RUN}{uuid}.root"


def removed(directory: str, token: str) -> str:
    """The name under which a removed directory lies until its files are deleted.

    Args:
        directory: as it was called, also that of a save that was never committed.
        token: tells two removals of the same name apart.

    Example:
        >>> removed("1200", "00ff")
        '1200.removed-00ff'
    """
    return f"{directory}{REMOVED_MARK}{token}"


def is_set_aside(name: str) -> bool:
    """Whether a directory of this name is no step, though it was one or may become one.

    Example:
        >>> is_set_aside("1200.removed-00ff"), is_set_aside("1200")
        (True, False)
    """
    marks = (TEMPORARY_SUFFIX, ABANDONED_MARK, REMOVED_MARK)
    return any(mark in name for mark in marks)


def beside(found: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What lies in a root beside its steps, sorted.

    Args:
        found: names of all that lies in the root.

    Returns:
        Names by what they say: `removed` and `unfinished` (being written, or left by a kill),
        `abandoned`, `earlier_runs`. Each is in one of them only, the first that it says, as what
        was unfinished or abandoned may be removed since.

    Example:
        >>> beside(["7", "8.removed-0", "9.orbax-checkpoint-tmp.removed-0"])["removed"]
        ('8.removed-0', '9.orbax-checkpoint-tmp.removed-0')
    """
    held: dict[str, list[str]] = {
        kind: [] for kind in ("removed", "unfinished", "abandoned", "earlier_runs")
    }
    for name in sorted(found):
        if REMOVED_MARK in name:
            held["removed"].append(name)
        elif TEMPORARY_SUFFIX in name:
            held["unfinished"].append(name)
        elif ABANDONED_MARK in name:
            held["abandoned"].append(name)
        elif name.startswith(EARLIER_RUN):
            held["earlier_runs"].append(name)
    return {kind: tuple(each) for kind, each in held.items()}


def step_number(directory: str) -> int:
    """The step that a step directory's name ends in; 0 for a name without digits.

    Example:
        >>> step_number("ck_000120")
        120
    """
    digits = directory[len(directory.rstrip("0123456789")) :]
    return int(digits) if digits else 0


def final_name(temporary: str) -> str:
    """The name a directory has once it is committed.

    Example:
        >>> final_name("1200.orbax-checkpoint-tmp")
        '1200'
    """
    return temporary.split(TEMPORARY_SUFFIX)[0]


def is_own(name: str) -> bool:
    """Whether a file or folder of an item is one that this library alone writes.

    Example:
        >>> is_own("rows.p00012"), is_own("manifest.json"), is_own("manifest.ocdbt")
        (True, True, False)
    """
    stem, dot, number = name.removesuffix(".json").partition(".p")
    return name == MANIFEST or (
        bool(dot) and stem in ("rows", "manifest") and number.isdecimal()
    )
