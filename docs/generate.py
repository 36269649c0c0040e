"""Writes the entries of `docs/reference/errors.md` from the docstrings of `cnr_jax.errors`.

    python docs/generate.py

What stands before and after the entries in the page is written by hand, and stays.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.step_errors import StepExistsError

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "errors.md"
BEGIN, END = "<!-- generated from cnr_jax/errors.py -->", "<!-- end -->"

# Where somebody meets them.
GROUPS = {
    "While a program is written": (
        errors.TableError,
        errors.StateMismatchError,
        errors.TouchedError,
        errors.OptionError,
        errors.CallError,
    ),
    "When a manager is made": (errors.RootError,),
    "In a save": (
        errors.AuditError,
        errors.SaveError,
        errors.UsedRootError,
        errors.WriterError,
        errors.DependentsExistError,
        # With Orbax's own, which `cnr_jax.errors` does without.
        StepExistsError,
    ),
    "In a restore": (
        errors.NoStepError,
        errors.ChainError,
        errors.ParentMissingError,
        errors.IntegrityError,
        errors.FormatError,
        errors.ManifestError,
        errors.UnsupportedVersionError,
    ),
    "In an export": (errors.ExportError,),
    "Any of them": (errors.CnrError,),
}


def page() -> str:
    """The whole page, with the entries as they must be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    entries = [
        f"## {group}\n\n" + "\n".join(entry(each) for each in classes)
        for group, classes in GROUPS.items()
    ]
    return (
        f"{before}{BEGIN}\n\n" + "\n".join(entries) + f"\n{END}{rest.partition(END)[2]}"
    )


def entry(error: type[errors.CnrError]) -> str:
    """What the page says of a class."""
    text, sections = docstring(error)
    bases = [each for each in error.__bases__ if each is not Exception]
    bases = [each for each in bases if each is not errors.CnrError]
    told = "".join(
        f"; {'an' if each.__name__[0] in 'AIO' else 'a'} `{each.__name__}`"
        for each in bases
    )
    lines = [
        f"### `{error.__name__}`",
        "",
        f'`kind` `"{error.kind}"`{told}. {text}',
        "",
    ]
    for title, heading in (("Attributes", "It carries"), ("Kinds", "Other kinds")):
        own = sections.get(title, {})
        own.pop(error.kind, None)
        if own:
            quote = '"' if title == "Kinds" else ""
            found = (f"* `{quote}{name}{quote}`: {told}" for name, told in own.items())
            lines += [f"{heading}:", "", *found, ""]
    return "\n".join(lines)


def docstring(error: type[errors.CnrError]) -> tuple[str, dict[str, dict[str, str]]]:
    """The text of a class, links made of the pages it names, and its sections by title."""
    document = inspect.getdoc(error) or ""
    text, *rest = re.split(r"\n\n(\w+):\n", document)
    sections = {}
    for title, block in zip(rest[::2], rest[1::2], strict=True):
        items = re.findall(
            r"^(\w+): (.*?)(?=^\w+: |\Z)", textwrap.dedent(block), re.S | re.M
        )
        sections[title] = {name: _line(told) for name, told in items}
    return "\n\n".join(map(_line, text.split("\n\n"))), sections


def _line(text: str) -> str:
    text = " ".join(text.split())
    return re.sub(
        r"docs/guides/([\w-]+)\.md",
        lambda found: f"[{found[1].replace('-', ' ')}](../guides/{found[1]}.md)",
        text,
    )


def raised_kinds(package: Path) -> dict[str, set[str]]:
    """The kinds with which each class is made anywhere in a package, by the name of the class."""
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            given = [k.value for k in node.keywords if k.arg == "kind"]
            if name == "damage":
                name, given = "IntegrityError", given + node.args[2:]
            for each in given:
                for inner in ast.walk(each):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                        found.setdefault(name, set()).add(inner.value)
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
