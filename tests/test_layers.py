"""The import directions of the design, held by walking every module's imports."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "cnr_jax"
ROOT = Path(__file__).parent.parent

# parts: (parts they rest on: they may import these and all that they rest on; other packages).
# Of several parts in a row each may also import those before it. A part is a module or folder of
# the package, less the parts below it that are listed themselves; "cnr_jax" is what users import.
# etils: the type of the paths that Orbax hands over.
TABLE = {
    "waiting garbage texts errors integers": ("", ""),
    "policy": ("integers", ""),
    "format": ("integers", "numpy"),
    "state rows": ("integers", "numpy jax"),
    # optax in a function: it is no requirement.
    "optim": ("rows", "numpy jax optax"),
    # Without jax and TensorStore; see PLAIN.
    "repository.plain": ("format policy", "numpy ml_dtypes etils"),
    # obstore, boto3 and botocore in functions: they are no requirements.
    "repository": (
        "repository.plain rows",
        "numpy jax tensorstore obstore boto3 botocore",
    ),
    "telemetry given encoding options": ("rows repository.plain", "numpy jax"),
    "plain_args args": ("rows", "numpy jax orbax"),
    "checkpointer.orbax_compat": ("repository options", "numpy jax orbax etils"),
    "checkpointer checkpointer.multihost checkpointer.tracking checkpointer.saving"
    " checkpointer.listing checkpointer.restoring checkpointer.trying": (
        "checkpointer.orbax_compat args goodput",
        "numpy jax etils",
    ),
    "handler manager": ("checkpointer.restoring", "numpy jax orbax etils"),
    "importing": ("manager", "orbax"),
    "measuring": ("manager goodput", "numpy jax"),
    "exporting": ("checkpointer.orbax_compat", "numpy jax"),
    "simulation": ("format policy", "numpy"),
    "goodput": ("simulation repository.plain", "numpy"),
    "cnr_jax": ("importing measuring exporting optim goodput checkpointer.trying", ""),
    # Looks into roots; what decodes rows, and so needs jax, it imports in functions.
    "cli": ("repository goodput exporting measuring", "typer rich numpy"),
    "__main__": ("cli", ""),
    "testing": ("cnr_jax", "numpy jax optax hypothesis pytest"),
    # Stand outside the package and show its public face only; two import one another.
    "examples": (
        "",
        "cnr_jax numpy jax flax optax orbax grain pandas flights train_dlrm",
    ),
}
# Of each part: the parts it rests on; other packages.
PARTS = {
    part: ([*parts.split()[:before], *rests.split()], packages.split())
    for parts, (rests, packages) in TABLE.items()
    for before, part in enumerate(parts.split())
}
# What a root holds can be read without jax, Orbax and TensorStore: nothing here imports them, but
# in a function that decodes rows.
PLAIN = (
    "causes",
    "course",
    "committer",
    "describe",
    "description",
    "dtypes",
    "items",
    "layout",
    "markers",
    "index",
    "metrics",
    "mirroring",
    "orbax_steps",
    "step",
    "store",
    "table_sizes",
    "upkeep",
)
# But for the arrays of the store.
ARRAYS = (
    "store.array_specs",
    "store.arrays",
    "store.in_memory",
    "store.kept_chunks",
    "store.packed_arrays",
    "store.plain_arrays",
)
HEAVY = {"jax", "orbax", "tensorstore"}


def part_of(module: str) -> str:
    first, *rest = module.split(".")
    if first != PACKAGE or not rest:
        return first
    if rest[0] == "repository" and rest[1:2] and rest[1] in PLAIN:
        is_plain = ".".join(rest[1:]) not in ARRAYS
        return "repository.plain" if is_plain else "repository"
    inner = ".".join(rest[:2])
    return inner if inner in PARTS else rest[0]


@functools.cache
def below(part: str) -> set[str]:
    """A part, and all that it rests on."""
    return {part}.union(*(below(each) for each in PARTS[part][0]))


def imports_of(
    source: str, module: str, known: Mapping[str, str]
) -> Iterator[tuple[str, bool]]:
    """Yields the dotted name of every module imported, and whether that waits for a call.

    `module` ends in ".__init__" for a package; `from a import b` is `a.b` if that is a
    module (of `known`, or a part), else `a`.
    """
    tree = ast.parse(source)
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_part = base == PACKAGE and alias.name in PARTS
                name = inner if inner in known or is_part else base
                yield name, id(node) in late


def violations(sources: Mapping[str, str]) -> list[str]:
    """Returns one line per import that `TABLE` forbids, and per import cycle."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    known = {name.removesuffix(".__init__"): text for name, text in sources.items()}
    for path, source in sources.items():
        module = path.removesuffix(".__init__")
        part = part_of(module)
        if part not in PARTS:
            found.append(f"{module}: part {part!r} is not in the table of layers")
            continue
        for name, late in imports_of(source, path, known):
            # What is imported in a function may need what all of repository may.
            own = "repository" if late and part == "repository.plain" else part
            top = name.split(".")[0]
            if top == PACKAGE and part != "examples":
                # A package that imports its own modules is no cycle.
                graph.setdefault(module, set()).update({name} - {module})
                allowed = part_of(name) in below(own)
            else:
                packages = PARTS[own][1]
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
    sources = sources_of("examples")
    public = {PACKAGE, f"{PACKAGE}.testing"}
    assert violations(sources) == []
    for path, source in sources.items():
        names = {name for name, _ in imports_of(source, path, {})}
        assert {name for name in names if name.startswith(PACKAGE)} <= public


def test_table_of_layers_has_no_cycle_and_names_only_its_parts() -> None:
    parts = {part: set(rests) for part, (rests, _) in PARTS.items()}
    graphlib.TopologicalSorter(parts).prepare()
    assert set().union(*parts.values()) <= set(PARTS)


def test_orbax_and_tensorstore_are_confined() -> None:
    users = {
        package: {part for part, row in PARTS.items() if package in row[1]}
        for package in ("orbax", "tensorstore")
    }
    hosts = {"args", "handler", "manager", "importing", "checkpointer.orbax_compat"}
    hosts |= {"plain_args", "examples"}
    assert users == {"orbax": hosts, "tensorstore": {"repository"}}


def test_what_a_root_holds_is_read_without_jax_orbax_and_tensorstore() -> None:
    modules = {name.removesuffix(".__init__") for name in sources_of(PACKAGE)}
    plain = below("repository.plain")
    modules = sorted(name for name in modules if part_of(name) in plain)
    assert f"{PACKAGE}.repository.upkeep.verify" in modules
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    found = {HEAVY} & sys.modules.keys()\n"
        "    assert not found, f'{name} imports {found}'\n"
    )
    subprocess.run([sys.executable, "-c", code, *modules], check=True, timeout=120)


def test_modules_and_functions_are_no_longer_than_one_reads_at_once() -> None:
    too_long = list[str]()
    for module, source in sources_of(PACKAGE).items():
        lines = source.count("\n")
        too_long += [f"{module}: {lines} lines"] * (lines > 600)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                told = text.count("\n") + 1 if text else 0
                lines = (node.end_lineno or 0) - node.lineno + 1 - told
                too_long += [f"{module}.{node.name}: {lines} lines"] * (lines > 70)
    assert not too_long


@pytest.mark.tools
@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cnr_jax.policy.bad", "import jax"),
        ("cnr_jax.rows.bad", "import cnr_jax.policy.baseline as b"),
        ("cnr_jax.rows.bad", "from ..format import rowids"),
        ("cnr_jax.rows.codecs.__init__", "from ...format import rowids"),
        ("cnr_jax.policy.bad", "from cnr_jax import format"),
        ("cnr_jax.repository.step", "import tensorstore"),
        ("cnr_jax.repository.step", "from cnr_jax.repository.store import arrays"),
        ("cnr_jax.repository.bad", "import orbax.checkpoint as ocp"),
        ("cnr_jax.handler", "def f():\n    import tensorstore"),
        ("cnr_jax.rows.bad", "if TYPE_CHECKING:\n    from cnr_jax import Options"),
        ("cnr_jax.checkpointer.multihost", "import cnr_jax.checkpointer.saving"),
        ("cnr_jax.handler", "from cnr_jax.manager import CheckpointManager"),
        ("cnr_jax.unheard_of", ""),
    ],
)
def test_checker_catches_a_forbidden_import(module: str, source: str) -> None:
    known = {"cnr_jax.repository.store.arrays": "", "cnr_jax.format.rowids": ""}
    assert len(violations({module: source, **known})) == 1


@pytest.mark.tools
@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cnr_jax.policy.good", "import math\nfrom cnr_jax.errors import CnrError"),
        ("cnr_jax.rows.codecs.__init__", "from . import base\nfrom .base import Raw"),
        ("cnr_jax.rows.codecs.base", "from ..touched import f\nfrom ... import errors"),
        ("cnr_jax.repository.good", "import tensorstore as ts\nimport numpy"),
        ("cnr_jax.repository.step", "def f():\n    import tensorstore"),
        ("examples.good", "import cnr_jax as cnr\nfrom cnr_jax import testing"),
    ],
)
def test_checker_passes_an_allowed_import(module: str, source: str) -> None:
    assert violations({module: source}) == []


@pytest.mark.tools
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
