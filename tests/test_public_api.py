"""What users import, and that importing it changes nothing for them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import cnr_jax as cnr

PACKAGE = Path(cnr.__file__).parent
# Where a distribution is not imported by its own name.
IMPORTED_AS = {"orbax-checkpoint": "orbax", "ml-dtypes": "ml_dtypes"}

PUBLIC = {
    "ByteModel",
    "CheckpointManager",
    "CompactionPlan",
    "Consecutive",
    "Decision",
    "Exported",
    "Fate",
    "Full",
    "Identity",
    "IncrementLog",
    "Intermittent",
    "LeafDescription",
    "Lookup",
    "Loss",
    "MirrorReport",
    "ModSharded",
    "NOT_GIVEN",
    "OneShot",
    "Options",
    "Problem",
    "PrunePlan",
    "RestoreReport",
    "Restored",
    "RestoredTable",
    "RootDescription",
    "SaveRecord",
    "SaveReport",
    "Schedule",
    "Simulation",
    "StepDescription",
    "TableDescription",
    "TableOptions",
    "TableSpec",
    "Tables",
    "Touched",
    "TriedBits",
    "TriedWidth",
    "advise",
    "args",
    "changed_rows",
    "compact",
    "describe",
    "errors",
    "expected_restores",
    "export",
    "find_tables",
    "goodput",
    "handler_registry",
    "import_orbax",
    "measure_store",
    "init_touched",
    "mirror",
    "optim",
    "plan_compaction",
    "prune",
    "read_metrics",
    "read_rows",
    "record",
    "reset_touched",
    "simulate",
    "try_bits",
    "tune",
    "verify",
}


def test_public_names_are_exactly_these():
    assert set(cnr.__all__) == PUBLIC
    assert all(hasattr(cnr, name) for name in PUBLIC)


def test_type_checkers_see_the_names_that_programs_get():
    tree = ast.parse(Path(cnr.__file__).read_text("utf-8"))
    seen = {
        # `import X as X`: else type checkers take it for private.
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("cnr_jax")
        for alias in node.names
    }
    assert set(seen) == PUBLIC
    for name, module in seen.items():
        if module == "cnr_jax":
            assert getattr(cnr, name) is importlib.import_module(f"cnr_jax.{name}")
        else:
            found = getattr(importlib.import_module(module), name)
            assert getattr(cnr, name) is found


def test_names_are_imported_when_they_are_asked_for():
    code = (
        "import sys, cnr_jax\n"
        f"assert {PUBLIC} | {{'__version__'}} == set(dir(cnr_jax))\n"
        "assert issubclass(cnr_jax.errors.SaveError, OSError)\n"
        "assert not {'jax', 'orbax', 'tensorstore'} & sys.modules.keys()\n"
        "assert cnr_jax.args.Save and cnr_jax.optim.__name__ == 'cnr_jax.optim'\n"
        "assert not hasattr(cnr_jax, 'no_such_name')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_has_a_docstring():
    missing = [
        name for name in PUBLIC if not (getattr(cnr, name).__doc__ or "").strip()
    ]
    assert not missing


def test_methods_of_a_manager_are_described_by_their_own_docstrings():
    # Else `help` shows those of Orbax.
    own = vars(cnr.CheckpointManager).items()
    public = [(name, each) for name, each in own if not name.startswith("_")]
    assert [name for name, each in public if not each.__doc__] == []
    said = cnr.CheckpointManager.__init__.__doc__ or ""
    names = [*inspect.signature(cnr.CheckpointManager).parameters]
    assert [name for name in names if name not in said] == []


def test_import_starts_no_backend_and_leaves_the_global_handlers_of_orbax_alone():
    code = (
        "import jax, orbax.checkpoint as ocp\n"
        "before = ocp.type_handlers.get_type_handler(jax.Array)\n"
        "from cnr_jax import *\n"
        "assert ocp.type_handlers.get_type_handler(jax.Array) is before\n"
        "assert before._use_replica_parallel\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def imported_packages() -> set[str]:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found


def test_what_is_required_is_imported():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    required = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    assert "jax" in required
    modules = {IMPORTED_AS.get(name, name) for name in required}
    assert modules <= imported_packages()


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert cnr.__version__ == project["version"]


def test_type_checkers_are_told_that_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
