"""Writes what programs and scripts can rely on by name: `tests/data/public_face.json`.

    python tests/public_face.py

Public names and signatures, options with their defaults, fields of reports, classes and kinds of
errors, verbs of the command line with their options, and exit codes. `tests/test_public_face.py`
compares the file with the package, so that no change of these goes unsaid: who changes one runs
this, and says it in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import types
from pathlib import Path
from typing import Any

import typer

import cnr_jax as cnr
from cnr_jax.cli.app import app
from cnr_jax.cli.exit_codes import Exit

PACKAGE = Path(cnr.__file__).parent
FILE = Path(__file__).parent / "data" / "public_face.json"


def face() -> dict[str, Any]:
    """All of it as JSON."""
    return {
        "cnr_jax": _names(cnr, _public(cnr)),
        "cnr_jax.args": _names(cnr.args, _public(cnr.args)),
        "cnr_jax.goodput": _names(cnr.goodput, _public(cnr.goodput)),
        "cnr_jax.optim": _names(cnr.optim, _public(cnr.optim)),
        "methods of CheckpointManager": {
            name: _signature(method)
            for name, method in inspect.getmembers(cnr.CheckpointManager, callable)
            if not name.startswith("_") and name in vars(cnr.CheckpointManager)
        },
        "properties of CheckpointManager": sorted(
            name
            for name, value in vars(cnr.CheckpointManager).items()
            if isinstance(value, property) and not name.startswith("_")
        ),
        "fields": {
            each.__name__: _fields(each)
            for each in (
                cnr.Options,
                cnr.TableOptions,
                cnr.SaveReport,
                cnr.RestoreReport,
            )
        },
        "errors": {
            name: sorted(base.__name__ for base in each.__bases__)
            for name, each in sorted(vars(cnr.errors).items())
            if isinstance(each, type) and issubclass(each, cnr.errors.CnrError)
        },
        "kinds of errors": kinds(),
        "exit codes": {each.name: int(each) for each in Exit},
        "verbs": verbs(),
    }


def _public(module: types.ModuleType) -> list[str]:
    """What a module names as its own, or else has, but for modules and what it imports."""
    listed = getattr(module, "__all__", None)
    own = (
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith(module.__name__)
    )
    return sorted(own if listed is None else listed)


def _names(module: types.ModuleType, names: list[str]) -> dict[str, str]:
    """Each name, and how it is called, or what it is."""
    found = {name: getattr(module, name) for name in names}
    return {name: _signature(value) for name, value in found.items()}


def _signature(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return "module"
    if not callable(value):
        return type(value).__name__
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "class"
    # Names and defaults are a promise; how a type is written is not.
    without = (
        each.replace(annotation=each.empty) for each in signature.parameters.values()
    )
    return str(
        signature.replace(
            parameters=list(without), return_annotation=inspect.Parameter.empty
        )
    )


def _fields(kind: type[Any]) -> dict[str, str]:
    """Fields of a dataclass in their order, each with its default."""
    return {field.name: _default(field) for field in dataclasses.fields(kind)}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    made = field.default_factory
    return "required" if made is dataclasses.MISSING else repr(made())


def kinds() -> list[str]:
    """Kinds of errors: a class's own, those its docstring lists, and literals where one is made."""
    found = set[str]()
    for file in PACKAGE.rglob("*.py"):
        if "testing" in file.relative_to(PACKAGE).parts:
            continue
        tree = ast.parse(file.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _makes_error(node):
                given = {word.arg: word.value for word in node.keywords}
                found |= _texts(given.get("kind"))
            elif file.stem == "errors" and isinstance(node, ast.ClassDef):
                found |= _kind_of(node)
    return sorted(found)


def _makes_error(call: ast.Call) -> bool:
    name = ast.unparse(call.func).lower()
    return "error" in name or name.endswith("problem")


def _kind_of(error: ast.ClassDef) -> set[str]:
    """A class's own kind, and those that its docstring lists."""
    _, _, listed = (ast.get_docstring(error) or "").partition("Kinds:\n")
    found = set(re.findall(r"^    (\w+): ", listed.partition("\n\n")[0], re.MULTILINE))
    for node in error.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(each) for each in targets] == ["kind"]:
                found |= _texts(node.value)
    return found


def _texts(value: ast.expr | None) -> set[str]:
    """Texts that an expression may give: a literal, or either of two."""
    nodes = [] if value is None else ast.walk(value)
    return {
        n.value
        for n in nodes
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def verbs() -> dict[str, dict[str, str]]:
    """Each verb of the command line: its arguments and options, and their defaults."""
    commands: Any = typer.main.get_command(app)
    return {
        name: {
            " ".join([*each.opts, *each.secondary_opts]): _of_parameter(each)
            for each in command.params
        }
        for name, command in sorted(commands.commands.items())
    }


def _of_parameter(each: Any) -> str:
    if each.required:
        return "required"
    if getattr(each, "is_flag", False):
        return "flag"
    # Releases of click differ in what says that there is no default.
    return repr(each.default if isinstance(each.default, str | int | float) else None)


def text() -> str:
    """What the file has to hold."""
    return json.dumps(face(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
