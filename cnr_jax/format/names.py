"""Names of the files and folders in a root, in its steps and in their items, and of features.

An item is `<root>/<step directory>/<item>/`. Orbax names the step directory and, while a save is in
flight, adds `TEMPORARY_SUFFIX` to it and to the item.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

FORMAT = "cnr_jax"
VERSION = 1
# Arrays whose chunks are compressed by zstd.
ZSTD = "zstd"
# Arrays that are compressed with the bytes of numbers apart: all first ones, all second ones, ...
BLOSC = "blosc"
# Codec of arrays of integers with chunks of packed rows. The feature stands for these, and for
# segments that are added to the rows below them.
PACKED_ROWS, LATTICE = "packed_rows", "lattice"
# Codecs of moments of gradients. The feature says that rows are in them: centres are added too,
# and two leaves share parts.
MOMENT_CODECS, MOMENTS = ("cnr.octave", "cnr.unit"), "moments"
# Dense leaves that are stored as tiles, like rows, rather than by Orbax.
DENSE_TILES = "dense_tiles"
# Steps that stand for others, and may hold rows in several layers.
MERGED = "merged"
# Full checkpoints that bring a merged baseline along: rows that they have saved themselves are in a
# layer over it, and may be added to it.
BASELINE = "baseline"
# Segments that are added to rows of which a CRC-32 is noted, where there was a BLAKE2b digest.
CRC32 = "crc32"
# What this reader understands beyond version 1 itself. A checkpoint that requires a feature
# not listed here is refused, never read partly.
KNOWN_FEATURES: frozenset[str] = frozenset(
    {ZSTD, BLOSC, DENSE_TILES, LATTICE, MOMENTS, MERGED, BASELINE, CRC32}
)

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

# In a step directory of a store without renames, or one that came from there. Where files are put
# under a condition, the first says which attempt holds the step, and whether that has committed it.
# The second is what Orbax looks for; it commits a step without the first. A removal takes both in
# turn.
ATTEMPT = "cnr_jax.attempt.txt"
ORBAX_COMMITTED = "commit_success.txt"
MARKERS = (ATTEMPT, ORBAX_COMMITTED)
# Text of the first while the step is being removed.
REMOVED = b"removed"
# Files right in the folder of a step, beside its items.
OF_STEP = (ORBAX_METADATA, *MARKERS)

# In the root: who saves there, and what is locked while a save is being written.
WRITER = "cnr_jax.writer.json"
WRITER_LOCK = "cnr_jax.writer.lock"
# In the root: which steps may lack rows, as an audit has found.
SUSPECTS = "cnr_jax.suspects.json"
# In a root where each look is a request: what is known of its steps.
CATALOGUE = "cnr_jax.catalogue.json"
# In the root, if asked for: a line for each save and restore.
METRICS = "cnr_jax.metrics.jsonl"
# In the root: what the newest saves took, as their manager has measured it; advice.
MEASUREMENTS = "cnr_jax.measurements.json"
# A folder in the root in which storage is measured. It ends as no step does.
MEASURING = "cnr_jax.measuring-{token}.root"
# In a near root: the root that its steps are copied to.
FAR = "cnr_jax.far.txt"

# Forms that whole names have: a root is a folder of the user's too, and other names there may
# contain ours, or begin or end with them. Digits are ASCII; "." is any character.
_GENERATION = r"\.g(?P<generation>[1-9][0-9]*)\.branch"
_BRANCHED = re.compile(rf"(?P<plain>.*[0-9]){_GENERATION}", re.DOTALL)
_STEP = rf"(?:.*[0-9](?:{_GENERATION.replace('?P<generation>', '?:')})?)"
# A save in flight; an older Orbax puts a number behind the suffix.
_UNFINISHED = f"{_STEP}{re.escape(TEMPORARY_SUFFIX)}(?:-[0-9]+)?"
_TEMPORARY = re.compile(f"(.+?){re.escape(TEMPORARY_SUFFIX)}(?:-[0-9]+)?", re.DOTALL)
_ABANDONED = (
    rf"(?P<step>{_STEP}){re.escape(ABANDONED_MARK)}g(?:0|[1-9][0-9]*)-[0-9a-f]{{32}}"
)
_EARLIER = rf"{EARLIER_RUN}[0-9a-f]{{32}}\.root"
_ANY = "|".join((_STEP, _UNFINISHED, _ABANDONED.replace("?P<step>", "?:"), _EARLIER))
# Kinds of folders in a root, in the order in which they are tried.
_FOLDERS = {
    kind: re.compile(form, re.DOTALL)
    for kind, form in {
        "removed": rf"(?:{_ANY}){re.escape(REMOVED_MARK)}[0-9a-f]{{16}}",
        "unfinished": _UNFINISHED,
        "abandoned": _ABANDONED,
        "earlier_runs": _EARLIER,
    }.items()
}
_OWN = re.compile(r"manifest\.json|manifest\.p[0-9]{5,}\.json|rows\.p[0-9]{5,}")
_PROCESS_MANIFEST = re.compile(r"manifest\.p[0-9]{5,}\.json")
_REPLACED = (WRITER, SUSPECTS, MEASUREMENTS, FAR)
_FILES = {MANIFEST, WRITER_LOCK, CATALOGUE, *_REPLACED, *OF_STEP}
_REPLACING = re.compile(
    rf"(?:{'|'.join(map(re.escape, _REPLACED))})\.[0-9a-f]{{8}}\.tmp"
)
# Below `dense/`, what Orbax and TensorStore ask for by name: which leaves there are, how they are
# sharded, older forms of both; the database, with a part from every process, and its data files,
# which its nodes name. Arrays outside of a database are not among these: `manifest.ocdbt` is always
# there, and tells Orbax that there is a database.
_PART, _DATA = "ocdbt\\.process_[A-Za-z0-9_]+", "(?:d|ocdbt_data|ocdbt_meta)"
_LOOKED_UP = re.compile(
    r"_METADATA|_sharding|checkpoint|_strings\.json|array_metadatas/process_[0-9]+"
    rf"|(?:{_PART}/)?(?:manifest\.(?:ocdbt|[0-9a-f]{{16}})|{_DATA}/[0-9a-f]{{32}})"
)
_LEADS_THERE = re.compile(rf"array_metadatas|{_PART}|(?:{_PART}/)?{_DATA}")


def process_manifest(process: int) -> str:
    """Name of the manifest that one process writes after its arrays.

    Example:
        >>> process_manifest(3)
        'manifest.p00003.json'
    """
    return f"manifest.p{process:05d}.json"


def rows_directory(process: int) -> str:
    """Name of the folder that holds the arrays of one process.

    Example:
        >>> rows_directory(0)
        'rows.p00000'
    """
    return f"rows.p{process:05d}"


def dense_array(process: int) -> str:
    """Path of the array that holds the dense leaves of one process.

    Example:
        >>> dense_array(0)
        'dense/p00000'
    """
    return f"{DENSE}/p{process:05d}"


def array_name(codec: str, part: str, dtype: str) -> str:
    """Name of the array into which all rows of one codec, part and dtype are concatenated.

    Example:
        >>> array_name("cnr.asymmetric", "codes", "uint8")
        'asymmetric.codes.uint8'
    """
    return f"{codec.removeprefix('cnr.')}.{part}.{dtype}"


def abandoned(directory: str, generation: int, uuid: str) -> str:
    """Name under which a step directory of an abandoned branch is kept.

    It has the whole uuid: all checkpoints of a manager share the first digits, and a manager can
    abandon the same step and generation twice if a save in between failed.

    Example:
        >>> abandoned("1200", 1, "00ff" * 8)
        '1200.abandoned-g1-00ff00ff00ff00ff00ff00ff00ff00ff'
    """
    return f"{directory}{ABANDONED_MARK}g{generation}-{uuid}"


def abandoned_step(name: str) -> str | None:
    """Step directory that a rollback has moved to a name; None for any other name.

    Example:
        >>> abandoned_step(abandoned("ck_12", 1, "00ff" * 8)), abandoned_step("12.abandoned-g1")
        ('ck_12', None)
    """
    found = _FOLDERS["abandoned"].fullmatch(name)
    return found["step"] if found else None


def another_name(name: str) -> str:
    """Another name of the same form, for a folder that a rollback or a new run has moved away.

    Example:
        >>> another_name(abandoned("1200", 1, "00ff" * 8))
        '1200.abandoned-g2-00ff00ff00ff00ff00ff00ff00ff00ff'
        >>> another_name(earlier_run("00ff" * 8)) == earlier_run("00ff" * 8)
        False

    Raises:
        ValueError: if the name has neither of these forms.
    """
    if _FOLDERS["earlier_runs"].fullmatch(name):
        return earlier_run(secrets.token_hex(16))
    step = abandoned_step(name)
    if step is None:
        raise ValueError(f"{name!r} is no name of a folder that was moved away")
    generation, _, uuid = name.rpartition(f"{ABANDONED_MARK}g")[2].partition("-")
    return abandoned(step, int(generation) + 1, uuid)


def branched(directory: str, generation: int) -> str:
    """Name of a step directory when another checkpoint has the plain name.

    The other one is of an older generation and cannot be renamed, or a merged step stands for it.
    Orbax does not list such a name, since it does not end in a digit.

    Args:
        directory: the plain name, which the options of a manager make of the step's number.
        generation: generation of the save; for a merged step, above that in the name of the other.

    Example:
        >>> branched("1200", 2), branched("ck_0012", 13)
        ('1200.g2.branch', 'ck_0012.g13.branch')
    """
    return f"{directory}.g{generation}.branch"


def plain(directory: str) -> str:
    """Plain name of a step directory, as the options of a manager make it.

    Example:
        >>> plain("1200.g2.branch"), plain("1200")
        ('1200', '1200')
    """
    found = _branched(directory)
    return found["plain"] if found else directory


def branch_generation(directory: str) -> int:
    """Generation in the name of a step directory; 0 for a plain name, which is the oldest.

    Example:
        >>> branch_generation("1200.g2.branch"), branch_generation("1200")
        (2, 0)
    """
    found = _branched(directory)
    return int(found["generation"]) if found else 0


def superseded(directories: Iterable[str]) -> set[str]:
    """Step directories that share their plain name with one of a later generation.

    Example:
        >>> sorted(superseded(["6", "7", "7.g2.branch", "7.g3.branch", "07.g4.branch"]))
        ['7', '7.g2.branch']
    """
    alike: dict[str, list[str]] = {}
    for name in directories:
        alike.setdefault(plain(name), []).append(name)
    newest = (max(names, key=branch_generation) for names in alike.values())
    return {n for names in alike.values() for n in names}.difference(newest)


def _branched(directory: str) -> re.Match[str] | None:
    # Quick for other names, which are most.
    is_likely = directory.endswith(".branch")
    return _BRANCHED.fullmatch(directory) if is_likely else None


_SEPARATOR = re.compile(r"[/\\\0]")
_HEX = re.compile("[0-9a-f]*")


def is_hex(text: str, digits: int) -> bool:
    """Whether a text has exactly so many lower-case hexadecimal digits."""
    return len(text) == digits and _HEX.fullmatch(text) is not None


def is_component(name: str) -> bool:
    """Whether a name is that of one file or folder, and leads nowhere else.

    Example:
        >>> is_component("user.table"), is_component("../x"), is_component("..")
        (True, False, False)
    """
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:  # TensorStore takes only paths of UTF-8
            return False
    return name not in ("", ".", "..") and _SEPARATOR.search(name) is None


def earlier_run(uuid: str) -> str:
    """Name of the folder of a root into which a new run moves the steps of earlier ones.

    It is never listed as a step, since it does not end in a digit.

    Args:
        uuid: uuid of the first save of the new run, or another.

    Example:
        >>> earlier_run("00ff" * 8)
        'earlier-run-00ff00ff00ff00ff00ff00ff00ff00ff.root'
    """
    return f"{EARLIER_RUN}{uuid}.root"


def removed(directory: str, token: str) -> str:
    """Name under which a removed directory lies until its files are deleted.

    Args:
        directory: old name of the directory, which may be that of a save never committed.
        token: 16 hexadecimal digits that tell two removals of the same name apart.

    Example:
        >>> removed("1200", "00ff" * 4)
        '1200.removed-00ff00ff00ff00ff'
    """
    return f"{directory}{REMOVED_MARK}{token}"


def replacing(file: str, token: str) -> str:
    """Name under which a file of a root is written before it replaces the old one.

    Args:
        file: name of the file.
        token: 8 hexadecimal digits that no other writer has.

    Example:
        >>> replacing(WRITER, "00ff" * 2)
        'cnr_jax.writer.json.00ff00ff.tmp'
    """
    return f"{file}.{token}.tmp"


def is_replacing(name: str) -> bool:
    """Whether `replacing` makes such a name for a file of a root.

    Example:
        >>> is_replacing(f"{WRITER}.00ff00ff.tmp"), is_replacing(f"{WRITER}.bak")
        (True, False)
    """
    return _REPLACING.fullmatch(name) is not None


def may_be_step(name: str) -> bool:
    """Whether a name may be that of a committed step: a plain or a branched one, and not special.

    A name that is not UTF-8 is refused: no array could be stored there, nor read.

    Example:
        >>> may_be_step("ck_0120"), may_be_step("120.removed-00ff00ff00ff0011")
        (True, False)
    """
    # To Orbax a name with the suffix anywhere is that of an unfinished save.
    ends_in_digit = plain(name)[-1:] in set("0123456789")
    if not ends_in_digit or not (name.isascii() or is_component(name)):
        return False
    return TEMPORARY_SUFFIX not in name and not kind_of_folder(name)


def kind_of_folder(name: str) -> str | None:
    """Kind of a folder of a root that is not a step, by its name: one of the kinds of `beside`.

    None: it is a step, or not a folder of ours.

    Example:
        >>> kind_of_folder("7.orbax-checkpoint-tmp"), kind_of_folder("7.orbax-checkpoint-tmp.bak")
        ('unfinished', None)
    """
    # Quick for steps, which are asked for most often: all other kinds have a mark with a hyphen.
    if "-" not in name:
        return None
    return next((kind for kind, form in _FOLDERS.items() if form.fullmatch(name)), None)


def beside(folders: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Sorts the folders in a root that are not steps by their kind.

    Args:
        folders: names of the folders in the root.

    Returns:
        Sorted names by kind: `removed`, `unfinished` (being written, or left by a kill),
        `abandoned`, `earlier_runs`. Each name has one kind; other names are left out.

    Example:
        >>> token = "00ff" * 4
        >>> beside(["7", f"8.removed-{token}", "plots.removed-axes"])["removed"]
        ('8.removed-00ff00ff00ff00ff',)
    """
    held: dict[str, list[str]] = {kind: [] for kind in _FOLDERS}
    for name in sorted(folders):
        kind = kind_of_folder(name)
        if kind is not None:
            held[kind].append(name)
    return {kind: tuple(each) for kind, each in held.items()}


def step_number(directory: str) -> int:
    """Number at the end of a step directory's plain name; 0 for a name without digits.

    Example:
        >>> step_number("ck_000120"), step_number("120.g2.branch")
        (120, 120)
    """
    directory = plain(directory)
    digits = directory[len(directory.rstrip("0123456789")) :]
    return int(digits) if digits else 0


def place(directory: str) -> tuple[int, str]:
    """Key that sorts folders and files of a root by the step whose number their name begins with.

    Example:
        >>> sorted(["10", "9.g2.branch", "9.orbax-checkpoint-tmp-77", "9"], key=place)
        ['9', '9.g2.branch', '9.orbax-checkpoint-tmp-77', '10']
    """
    return step_number(directory.partition(".")[0]), directory


def strays(directories: Iterable[str], parents: Iterable[str] = ()) -> set[str]:
    """Step directories that are not named like the steps of their root: copies, and renamed ones.

    Steps of one root have names of one form, and a copy has another. The names of parents, which
    their writers chose, show the form. Without parents it is that of most names, unless others
    have a shorter one: the name of a copy is that of a step with something added. If this does not
    tell which are the steps, no name is returned.

    Args:
        directories: names of step directories in the root.
        parents: names of parents, as manifests in the root have them.

    Example:
        >>> sorted(strays(["8", "9", "10", "010", "backup_9"]))
        ['010', 'backup_9']
        >>> copied = ["9", "backup_8", "backup_9"]
        >>> strays(copied), sorted(strays(copied, parents=["8"]))
        (set(), ['backup_8', 'backup_9'])
    """
    found = {name: _form(name) for name in directories}
    told = {name: _form(name) for name in parents}
    kinds = {(p, widths[0]) for p, widths in (*found.values(), *told.values())}
    if told:
        kinds = {k for k in kinds if all(_is_of(k, form) for form in told.values())}
    begun: dict[str, list[str]] = {}
    for name, (prefix, _) in found.items():
        begun.setdefault(prefix, []).append(name)
    alike = {k: {n for n in begun.get(k[0], ()) if _is_of(k, found[n])} for k in kinds}
    most = sorted(alike, key=lambda kind: len(alike[kind]), reverse=True)
    if not most or (most[1:] and len(alike[most[0]]) == len(alike[most[1]])):
        return set()
    prefix, width = most[0]
    others = {n: form for n, form in found.items() if n not in alike[most[0]]}
    if not told:
        is_longer = any(p in prefix and w[0] <= width for p, w in others.values())
        return set() if is_longer else {*others}
    # One name does not show a form in which no two steps begin alike, as with dates.
    return {
        name
        for name, (p, _) in others.items()
        if len(told) > 1 or p in prefix or prefix in p
    }


def _is_of(kind: tuple[str, int], form: tuple[str, range]) -> bool:
    """Whether a name has the prefix of a kind, and a number that may be padded to its width."""
    return kind[0] == form[0] and kind[1] in form[1]


def are_alike(one: str, other: str) -> bool:
    """Whether two names can be those of steps of one root: they differ in the number alone.

    Example:
        >>> are_alike("ck_5", "ck_12"), are_alike("005", "120"), are_alike("005", "12")
        (True, True, False)
    """
    (prefix, widths), (other_prefix, other_widths) = _form(one), _form(other)
    return prefix == other_prefix and bool({*widths}.intersection(other_widths))


def are_all_alike(directories: Iterable[str]) -> bool:
    """Whether names can be those of steps of one root.

    Example:
        >>> are_all_alike(["8", "9", "10"]), are_all_alike(["8", "9", "backup_9"])
        (True, False)
    """
    forms = [_form(name) for name in directories]
    if len({prefix for prefix, _ in forms}) > 1:
        return False
    least = max((widths.start for _, widths in forms), default=0)
    return all(least in widths for _, widths in forms)


def _form(directory: str) -> tuple[str, range]:
    """Prefix of a step name before its number, and the widths to which that may be padded."""
    directory = plain(directory)
    prefix = directory.rstrip("0123456789")
    digits = len(directory) - len(prefix)
    is_filled = digits > 1 and directory[len(prefix)] == "0"
    return prefix, range(digits if is_filled else 1, digits + 1)


def final_name(temporary: str) -> str:
    """Name that a directory has once it is committed.

    Example:
        >>> final_name("1200.orbax-checkpoint-tmp"), final_name("1200")
        ('1200', '1200')
    """
    found = _TEMPORARY.fullmatch(temporary)
    return found[1] if found else temporary


def is_own(name: str) -> bool:
    """Whether only this library writes a file or folder of that name into an item.

    Example:
        >>> is_own("rows.p00012"), is_own("manifest.json"), is_own("manifest.ocdbt")
        (True, True, False)
    """
    return _OWN.fullmatch(name) is not None


def is_file(name: str) -> bool:
    """Whether a name stands for a file wherever it occurs in a root.

    Example:
        >>> is_file("manifest.json"), is_file(ATTEMPT), is_file("rows.p00012"), is_file("7")
        (True, True, False, False)
    """
    return name in _FILES or _PROCESS_MANIFEST.fullmatch(name) is not None


def is_looked_up(path: str) -> bool:
    """Whether Orbax's reader may open a file below `dense/` because of its name.

    It never sees any other file there: when it lists a folder, it is shown these names alone.

    Args:
        path: path of the file, or of a folder in its place, relative to `dense/`.

    Example:
        >>> is_looked_up("_METADATA"), is_looked_up("d/" + "00ff" * 8)
        (True, True)
        >>> is_looked_up(".DS_Store"), is_looked_up("_METADATA~"), is_looked_up("d/.nfs0001")
        (False, False, False)
    """
    parts = path.split("/")
    # What lies in a folder in the place of such a file counts too.
    above = ("/".join(parts[: i + 1]) for i in range(len(parts)))
    return any(map(_LOOKED_UP.fullmatch, above))


def leads_to_looked_up(path: str) -> bool:
    """Whether a file that Orbax's reader may open can lie in a folder below `dense/`.

    Example:
        >>> leads_to_looked_up("ocdbt.process_0/d"), leads_to_looked_up(".snapshot")
        (True, False)
    """
    return _LEADS_THERE.fullmatch(path) is not None
