"""README.md and docs/: their code runs, their links lead somewhere, one figure stands in a cell."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.testing

import cnr_jax as cnr
from cnr_jax.cli.app import app

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


class Block(NamedTuple):
    """A block of code of a page.

    Attributes:
        mark: of the comment on the line before it, such as "fragment"; empty without one.
        language: after the fence.
        code: the lines between the fences.
        line: number of the first of these, from 1.
    """

    mark: str
    language: str
    code: str
    line: int


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code of a page, in order."""
    text = page.read_text()
    pattern = r"(?:^<!-- ([\w-]+) -->\n)?^```(\w*)\n(.*?)^```$"
    for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(found[1] or "", found[2], found[3], line)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# ---- code -----------------------------------------------------------------------------------


def shape_of(printed: str) -> list[str]:
    """What was printed, without the figures, which differ from machine to machine."""
    figure = r"\d[\d,.]*(?:e-?\d+)?"
    return re.sub(figure, "N", printed).strip().splitlines()


def table_of(printed: str) -> list[list[str]]:
    """The words of what a command has printed, without its figures, times and random names."""
    plain = re.sub(r"\d+ (?:s|min|h)\b", "AGE", printed)
    plain = re.sub(r"\d[\d,.]* (?:B|kB|MB|GB|TB|PB)\b", "BYTES", plain)
    plain = re.sub(r"(abandoned-g1-)[0-9a-f]+", r"\1UUID", plain)
    return [line.split() for line in shape_of(re.sub(r"(?<!\w)-(?=\d)", "", plain))]


def test_commands_are_compared_by_their_words() -> None:
    shown = "10  full  302 kB  1 s  yes"
    assert table_of(shown) == table_of("10    full   1.2 MB   2 min  yes")
    assert table_of(shown) != table_of("10  full  302 kB  1 s  no")


# It trains a model in each width; what it calls is tested in test_try_bits.py.
SLOW = ROOT / "docs/guides/how-many-bits.md"


def pages_with_code() -> list[Any]:
    found = (p for p in DOCS if any(b.language == "python" for b in blocks(p)))
    return [
        pytest.param(page, marks=pytest.mark.slow) if page == SLOW else page
        for page in found
    ]


@pytest.mark.parametrize("page", pages_with_code(), ids=name_of)
def test_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if "s3://bucket" in page.read_text():
        request.getfixturevalue("make_bucket")("bucket")
    scope: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in blocks(page):
        if block.mark == "output":
            as_shown: Any = str.splitlines
            if "stall" in block.code:
                as_shown = shape_of
            elif "row error" in block.code:
                as_shown = table_of
            assert as_shown(printed.strip()) == as_shown(block.code.strip()), name_of(
                page
            )
        if block.language == "console":
            command, _, shown = block.code.partition("\n")
            prompt, program, *words = shlex.split(command)
            assert (prompt, program) == ("$", "cnr-jax")
            result = typer.testing.CliRunner().invoke(app, words)
            told = result.output.replace(str(tmp_path), "")
            assert table_of(told) == table_of(shown), f"{name_of(page)}: {command}"
        if block.language != "python":
            continue
        # So that what fails is shown with its line in the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if block.mark != "fragment":
            exec(code, scope)
            printed = capsys.readouterr().out


# ---- links ----------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What a forge makes of the headings of a page."""
    found: dict[str, int] = {}
    names = set[str]()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        times = found[slug] = found.get(slug, -1) + 1
        names.add(f"{slug}-{times}" if times else slug)
    return names


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(linked), target


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"\]\(([^)#\s]+)", prose(index))
    listed = {(index.parent / link).resolve() for link in links}
    assert [name_of(page) for page in DOCS if page not in {index, *listed}] == []


# ---- tables ---------------------------------------------------------------------------------

# Not within a word, such as float32; a figure may have a power, and what it is sure to.
FIGURE = re.compile(
    r"(?<![\w.^])[-+\u2212]?\d[\d,]*(?:\.\d+)?(?:\^-?\d+)?(?:\s*±\s*[\d.]+)?(?!\w)"
)


def cells(row: str) -> list[str]:
    """The cells of a row of a table, without marks of emphasis and the like."""
    plain = re.sub(r"`[^`]*`", "`code`", row).replace(r"\|", "/")
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return [cell.strip(" *_~<>≈") for cell in plain.strip().strip("|").split("|")]


def tables(text: str) -> Iterator[list[list[str]]]:
    """The rows of each table, its header left out."""
    for found in re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        header, _, *rows = found.strip().splitlines()
        assert header.startswith("|")
        yield [cells(row) for row in rows]


def crowded(text: str) -> list[str]:
    """Cells with several figures, of columns that mostly hold figures."""
    found: list[str] = []
    for rows in tables(text):
        for column in zip(*rows, strict=True):
            filled = [cell for cell in column if cell.strip("\u2013-")]
            figures = [cell for cell in filled if FIGURE.match(cell)]
            if 2 * len(figures) >= len(filled):
                found += [cell for cell in filled if len(FIGURE.findall(cell)) > 1]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_cell_holds_one_figure(page: Path) -> None:
    assert crowded(prose(page)) == []


def test_crowded_cells_are_found() -> None:
    head = "| a | b |\n|---|---|\n"
    for cell in ("1.0 s; 1.2 s", "0.41 (0.36 to 1.10)", "51 of 51", "-1 -2"):
        assert crowded(f"{head}| x | {cell} |\n| y | 3 s |\n") == [cell]
    for cell in (
        "0.013 ± 0.016",
        "3 of float32",
        "10^-17",
        "1,040 MB",
        "-0.5 %",
        "\u2013",
    ):
        assert crowded(f"{head}| x | {cell} |\n| y | 3 s |\n") == []


# ---- reference ------------------------------------------------------------------------------


def entries(page: str) -> dict[str, str]:
    """The entries of a page of the reference, by the name in their heading."""
    text = (ROOT / "docs" / "reference" / page).read_text()
    return dict(re.findall(r"^### `([\w.]+)`\n\n(.*?)(?=^##|\Z)", text, re.S | re.M))


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def test_every_option_has_an_entry_with_its_default() -> None:
    found = entries("options.md")
    fields = {f.name: f for f in dataclasses.fields(cnr.Options)}
    fields |= {
        f"TableOptions.{f.name}": f for f in dataclasses.fields(cnr.TableOptions)
    }
    assert set(found) == set(fields)
    scope = {name: getattr(cnr, name) for name in cnr.__all__}
    for name, text in found.items():
        stated = re.match(r"Default: `([^`]+)`", text)
        assert stated, name
        assert eval(stated[1], scope) == default_of(fields[name]), name


def literals(hint: Any) -> set[str]:
    """The texts that a type names."""
    if typing.get_origin(hint) is typing.Literal:
        return {value for value in typing.get_args(hint) if isinstance(value, str)}
    return {value for each in typing.get_args(hint) for value in literals(each)}


def test_every_value_that_an_option_may_have_is_in_its_entry_and_docstring() -> None:
    found, hints = entries("options.md"), typing.get_type_hints(cnr.Options)
    named = (inspect.getdoc(cnr.Options) or "").partition("\nRaises:")[0]
    pieces = re.split(r"^    (\w+): ", named, flags=re.MULTILINE)
    said = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    assert set(said) == set(hints)
    assert literals(hints["staging"]) == {"auto", "host", "device"}
    for name, hint in hints.items():
        for value in literals(hint):
            if name != "tracking":
                assert f'`"{value}"`' in found[name], (name, value)
            assert f'"{value}"`' in said[name], (name, value)
    # On what "auto" depends.
    for text in (found["staging"], said["staging"]):
        assert re.search(r"by\s+platform\s+and\s+size", text)


def kinds_of_problems() -> set[str]:
    """The kinds of what `verify` finds, as far as they are said where it makes a problem."""
    found: set[str] = set()
    for name in ("upkeep/verify", "upkeep/verify_item", "index/chains"):
        path = ROOT / f"cnr_jax/repository/{name}.py"
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[ast.expr] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in KINDS_AT:
                given = node.args[KINDS_AT[ast.unparse(node.func)] :][:1]
            elif (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "meanings"
            ):
                assert isinstance(node.value, ast.Dict)
                given = [key for key in node.value.keys if key]
            elif isinstance(node, ast.Assign):
                names = getattr(node.targets[0], "elts", node.targets)
                values = getattr(node.value, "elts", [node.value])
                pairs = zip(names, values, strict=False)
                given = [v for n, v in pairs if ast.unparse(n) == "kind"]
            found |= {
                each.value
                for each in given
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    return found


# Which argument is the kind.
KINDS_AT = {"Problem": 2, "Finding": 1, "cls": 1, "Flaw": 0}


def test_every_error_and_every_kind_has_an_entry(modules_in: Any) -> None:
    generate = modules_in(ROOT / "docs")("generate")
    assert (ROOT / "docs/reference/errors.md").read_text() == generate.page(), (
        "python docs/generate.py"
    )
    classes = {
        name: each
        for name, each in inspect.getmembers(cnr.errors, inspect.isclass)
        if issubclass(each, cnr.errors.CnrError)
    }
    shown = {each for group in generate.GROUPS.values() for each in group}
    assert shown == {*classes.values(), generate.StepExistsError}
    kinds = {
        name: {each.kind, *generate.docstring(each)[1].get("Kinds", {})}
        for name, each in classes.items()
    }
    raised = generate.raised_kinds(ROOT / "cnr_jax")
    assert "foreign_chunk" in raised["IntegrityError"]
    for name in classes:
        assert raised.get(name, set()) <= kinds[name], name
    # Those of what `verify` finds are kinds of errors too, or stand in a table of their own.
    page = (ROOT / "docs/reference/errors.md").read_text()
    shown = page.partition("## Kinds of a `Problem`")[2]
    found = kinds_of_problems()
    assert {"no_checkpoint", "orbax", "generation", "abandoned"} <= found
    others = found - set.union(*kinds.values())
    assert others == set(
        re.findall(r'`"(\w+)"`', shown.partition("\n\n<")[0].partition("|\n\n")[0])
    )
    literals = " ".join(p.read_text() for p in (ROOT / "cnr_jax").rglob("*.py"))
    for name, some in kinds.items():
        assert all(f'"{kind}"' in literals for kind in some), name
