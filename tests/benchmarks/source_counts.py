"""What is counted in the source of the package, by its syntax trees.

All take the folder of the package, and leave out `testing`, which no user's program imports, but
for `functions_used_once`: there a use in `testing` is one too.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orbax.checkpoint as ocp

# Marks of a line's end and of its indentation, which are neither code nor comment.
_LAYOUT = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Functions of `os` that look at no file; all its others do, or take what was opened.
_NO_FILES = {
    *(
        "cpu_count",
        "fsdecode",
        "fsencode",
        "fspath",
        "getpid",
        "kill",
        "process_cpu_count",
    ),
    *("register_at_fork", "setpriority", "strerror"),
}
_OS_PATH = {
    *(
        "exists",
        "getmtime",
        "getsize",
        "isdir",
        "isfile",
        "islink",
        "ismount",
        "lexists",
    ),
    *("realpath", "samefile"),
}
_OPENERS = {"open", "ts.open", "ts.KvStore.open", "fsspec.filesystem"}
_OF_PATHS = {
    *("exists", "glob", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir"),
    *(
        "read_bytes",
        "read_text",
        "readlink",
        "rename",
        "resolve",
        "rglob",
        "rmdir",
        "rmtree",
    ),
    *("stat", "symlink_to", "touch", "unlink", "write_bytes", "write_text"),
}
# Where files are to be handled. Exports, drawings and pages stand where the user says, which is
# not in a root, and neither is what the system tells of processes.
_STORE = ("repository/store/",)
_NOT_IN_ROOTS = (
    "cli/",
    "exporting/",
    "goodput/",
    "repository/upkeep/processes.py",
    "__main__.py",
)


class Lines(NamedTuple):
    """Lines of source: with code, with comments, and all there are."""

    code: int
    comments: int
    all: int


class Called(NamedTuple):
    """A call, and where it stands."""

    file: str
    line: int
    name: str


@functools.cache
def _trees(package: Path) -> dict[str, ast.Module]:
    """Syntax trees of all modules, by path below the package."""
    return {
        file.relative_to(package).as_posix(): ast.parse(file.read_text("utf-8"))
        for file in sorted(package.rglob("*.py"))
    }


def _trees_of_the_product(package: Path) -> dict[str, ast.Module]:
    trees = _trees(package).items()
    return {file: tree for file, tree in trees if not file.startswith("testing/")}


def lines(package: Path) -> Lines:
    """Lines with code: neither blank, nor a comment alone, nor part of a docstring."""
    found = Lines(0, 0, 0)
    for file, tree in _trees_of_the_product(package).items():
        text = (package / file).read_text("utf-8")
        code, comments = set[int](), set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in _LAYOUT:
                code.update(range(token.start[0], token.end[0] + 1))
        code -= _lines_of_docstrings(tree)
        counts = len(code), len(comments), len(text.splitlines())
        found = Lines(*(a + b for a, b in zip(found, counts, strict=True)))
    return found


def _lines_of_docstrings(tree: ast.Module) -> set[int]:
    found = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first:
                found.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return found


def calls_of_files(package: Path) -> list[Called]:
    """Calls outside the store that look at, open or change files of a root.

    By name: functions of `os`, `os.path`, `shutil` and `tempfile`, methods that only paths have,
    what opens files and arrays. What a variable holds is not followed; `store` is the store.
    """
    return [
        Called(file, call.lineno, ast.unparse(call.func))
        for file, call in _calls(package)
        if not file.startswith((*_STORE, *_NOT_IN_ROOTS)) and _is_of_files(call)
    ]


def _is_of_files(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    owner, _, attribute = name.rpartition(".")
    if name in _OPENERS or owner in ("shutil", "tempfile"):
        return True
    if owner in ("os", "os.path"):
        return (
            attribute in _OS_PATH if owner == "os.path" else attribute not in _NO_FILES
        )
    if attribute == "open":
        # Of a path, which takes a mode; gates, claims and listings are opened too.
        mode = call.args[0] if call.args else None
        given = mode.value if isinstance(mode, ast.Constant) else None
        return isinstance(given, str) and set(given) <= set("rwabx+t")
    return owner not in ("", "store") and attribute in _OF_PATHS


def calls_of_is_local(package: Path) -> list[Called]:
    """Calls outside the store of `is_local`, which guesses from a path what storage can do."""
    return [
        Called(file, call.lineno, name)
        for file, call in _calls(package)
        if (name := ast.unparse(call.func)).split(".")[-1] == "is_local"
        and not file.startswith(_STORE)
    ]


def _calls(package: Path) -> Iterator[tuple[str, ast.Call]]:
    for file, tree in _trees_of_the_product(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, node


def functions_used_once(package: Path) -> tuple[int, int]:
    """Functions whose name stands once elsewhere than where it is defined; and all there are.

    Names are not resolved: of two functions of one name both have the uses of either.
    """
    defined, used = list[str](), Counter[str]()
    for tree in _trees(package).values():
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTIONS):
                defined.append(node.name)
            elif isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
    return sum(used[name] == 1 for name in defined), len(defined)


def private_names_of_orbax(package: Path) -> set[str]:
    """Names with an underscore of Orbax's that modules which import it take.

    Attributes of anything but `self`, also as text for `getattr`, if the name stands in Orbax's
    sources; private methods of Orbax's classes that ours replace; and modules below a private one.
    """
    known = _private_words(Path(ocp.__file__).parent)
    found = set[str]()
    for tree in _trees_of_the_product(package).values():
        imported = set(_imported(tree))
        if any(module.split(".")[0] == "orbax" for module in imported):
            found.update(m for m in imported if m.startswith("orbax.") and "._" in m)
            found.update(name for name in _taken(tree) if name in known)
            found.update(_replaced(tree))
    return found


@functools.cache
def _private_words(folder: Path) -> set[str]:
    texts = (file.read_text("utf-8") for file in folder.rglob("*.py"))
    return {word for text in texts for word in re.findall(r"\b_[A-Za-z]\w+", text)}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _taken(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "setattr",
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)):
                yield str(name.value)


def _replaced(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = (ast.unparse(base).removeprefix("ocp.") for base in node.bases)
            theirs = [getattr(ocp, base) for base in bases if hasattr(ocp, base)]
            for each in node.body:
                if isinstance(each, _FUNCTIONS) and _is_private(each.name):
                    yield from [each.name] * any(hasattr(t, each.name) for t in theirs)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_there(package: Path, file: str, name: str) -> bool:
    """Whether a module has a function or class of this name; with dots, one within another."""
    return _found(package, file, name) is not None


def fields(package: Path, file: str, name: str) -> list[str]:
    """Annotated fields of a class.

    Raises:
        LookupError: if there is no such class.
    """
    found = _found(package, file, name)
    if not isinstance(found, ast.ClassDef):
        raise LookupError(f"{file} has no class {name}")
    return [ast.unparse(n.target) for n in found.body if isinstance(n, ast.AnnAssign)]


def attributes(package: Path, file: str, name: str) -> set[str]:
    """Fields of a class, and what its methods assign to `self`.

    Raises:
        LookupError: if there is no such class.
    """
    assigned = {
        node.attr
        for node in ast.walk(_found(package, file, name) or ast.Module([], []))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    return assigned.union(fields(package, file, name))


def _found(package: Path, file: str, name: str) -> ast.AST | None:
    node: ast.AST | None = _trees(package).get(file)
    for each in name.split("."):
        inner = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
        named = (n for n in inner if isinstance(n, (ast.ClassDef, *_FUNCTIONS)))
        node = next((n for n in named if n.name == each), None)
    return node
