"""What of the checkout is a page of the site, in which order, and the API: hooks of mkdocs.

The index, docs/README.md, has all pages of docs/ in their order, so the navigation is made of it.

The reference is made of docstrings when the site is built; on a forge the docstrings are the
reference.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

import cnr_jax as cnr

ROOT = Path(__file__).parents[1]
# By their paths in the checkout: pages, and what pages show or link to.
SHOWN = re.compile(
    r"(README|CHANGELOG|CONTRIBUTING)\.md|docs/.*\.(md|png|svg)"
    r"|cnr_jax/format/SPEC\.md|cnr_jax/testing/README\.md"
    r"|tests/(benchmarks|campaign)/README\.md|tests/benchmarks/results/.*\.svg"
    r"|examples/\w+\.(py|toml)|cnr_jax/checkpointer/tracking/audit\.py"
)
API = "docs/reference/api.md"
TOOLS = [
    "tests/benchmarks/README.md",
    "tests/campaign/README.md",
    "cnr_jax/testing/README.md",
]
# Headings of the reference, each with what stands below it: all public names stand somewhere.
PARTS = {
    "Save and restore": "CheckpointManager args.Save args.Restore Restored Options TableOptions"
    " SaveReport RestoreReport RestoredTable handler_registry tune try_bits"
    " TriedBits TriedWidth Loss import_orbax"
    " export Exported",
    "Tables and tracking": "find_tables Tables TableSpec Identity ModSharded init_touched record"
    " reset_touched Touched Lookup",
    "Policies": "Intermittent OneShot Consecutive Full Decision SaveRecord expected_restores"
    " simulate Simulation Schedule ByteModel advise",
    "Look into a root": "describe RootDescription StepDescription TableDescription"
    " LeafDescription verify Problem read_rows changed_rows read_metrics prune PrunePlan Fate",
}
MODULES = {"Goodput": "goodput", "Optimizers": "optim", "Errors": "errors"}


class Examples(griffe.Extension):
    """Takes what stands below `Example:` for code, as what stands below `Examples:` is taken."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with each object that has been read."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", text, flags=re.M
            )


def on_config(config: Any) -> Any:
    """The navigation: as the index has the pages, then those of tools."""
    sections: dict[str, list[str]] = {"Home": ["README.md", "docs/README.md"]}
    section = "Home"
    for line in (ROOT / "docs/README.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").partition(":")[0]
        in_table = line.startswith("|") or section == "Home"
        for link in re.findall(r"\]\(([^)#]+\.md)", line):
            page = (ROOT / "docs" / link).resolve().relative_to(ROOT).as_posix()
            pages = sections.setdefault(section if in_table else "Development", [])
            pages += [page] * (page not in pages)
    sections["Reference"].insert(0, API)
    sections["Development"] += TOOLS
    config["nav"] = [{title: pages} for title, pages in sections.items()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """The files of the site."""
    # What is not of the checkout belongs to the theme.
    shown = Files(
        [
            file
            for file in files
            if file.src_dir != config["docs_dir"] or SHOWN.fullmatch(file.src_uri)
        ]
    )
    shown.append(File.generated(config, API, content=reference()))
    return shown


def reference() -> str:
    """The page of the API: a heading for each part, and the docstring of each public name."""
    known = {
        name.partition(".")[0] for names in PARTS.values() for name in names.split()
    }
    left = [n for n in cnr.__all__ if n not in known and n not in MODULES.values()]
    parts = {**PARTS, "More": " ".join(left)} if left else PARTS
    lines = ["# API", "", "All that `import cnr_jax as cnr` gives."]
    for title, names in parts.items():
        lines += ["", f"## {title}"]
        for name in names.split():
            lines += ["", *entry(name)]
    for title, name in MODULES.items():
        lines += ["", f"## {title}", ""]
        module = f"cnr_jax.{name}"
        lines += [f"::: {module}", "    options:", "      show_root_heading: false"]
    return "\n".join(lines) + "\n"


def entry(name: str) -> list[str]:
    """What is replaced by a docstring. Nothing is imported for it, which would take seconds."""
    homes = {each: home for home, names in cnr._HOMES.items() for each in names.split()}
    where = f"{homes[name]}.{name}" if name in homes else name
    return [f"::: cnr_jax.{where}", "    options:", f"      heading: cnr.{name}"]
