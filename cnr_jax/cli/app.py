"""The verbs of `cnr-jax`."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cnr_jax.cli.arguments import AsJson, Item, Root, Step, number_option
from cnr_jax.cli.bits import bits
from cnr_jax.cli.exporting import export
from cnr_jax.cli.outcome import Exit, Verbs, print_json, verb
from cnr_jax.cli.pictures import report
from cnr_jax.cli.printing import print_lines, print_text, progress
from cnr_jax.cli.pruning import prune
from cnr_jax.cli.rows import rows, rows_json, rows_lines
from cnr_jax.cli.trying import simulate
from cnr_jax.texts import count_of

if TYPE_CHECKING:
    import numpy as np

    from cnr_jax.repository.description import StepDescription
    from cnr_jax.repository.step_reader import StepReader

# Plain help, without rich: it comes sooner, and reads alike wherever it is shown.
app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Looks into a root of checkpoints of cnr_jax. Only `prune --yes` changes it.",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print_text(f"cnr-jax {version('cnr-jax')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
@verb
def ls(root: Root, item: Item = None, as_json: AsJson = False) -> Exit:
    """List all steps, chain by chain, and which restore.

    Manifests and the sizes of files are looked at; `verify` reads the files.
    """
    from cnr_jax.cli.roots import read_root
    from cnr_jax.repository.description import footer, step_lines

    found = read_root(root, item)
    whole = Exit.FINE if found.latest_step is not None else Exit.NOTHING_RESTORABLE
    if as_json:
        print_json("ls", found.asdict())
        return whole
    now = datetime.datetime.now(tz=datetime.UTC)
    lines = [(line, _style(step)) for line, step in step_lines(found, now)]
    print_lines([*lines, *((line, "dim") for line in footer(found))])
    return whole


def _style(step: StepDescription | None) -> str:
    if step is None:
        return "bold"
    if step.kind == "orbax":
        return "dim"
    if step.problem:
        return "red"
    return "yellow" if step.may_lack_rows else "green" if step.kind == "full" else ""


@app.command()
@verb
def show(
    root: Root,
    step: Step,
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="A table of which to decode rows."),
    ] = None,
    rows: Annotated[
        int, number_option("--rows", "How many of its rows to decode.")
    ] = 5,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Show what one step holds of each table.

    With TABLE the first rows of that, as a restore gives them; this imports jax, which takes
    seconds.
    """
    from cnr_jax.cli.roots import chain_of, opened, read_root, step_of

    found = read_root(root, item)
    chosen = step_of(found, step.number)
    chain = [each.step for each in chain_of(found, chosen)]
    document: dict[str, Any] = {**chosen.asdict(), "chain": chain}
    lines = _step_lines(chosen, chain)
    if table is not None:
        read = opened(found, chosen)
        decoded = _decoded(read, table, rows)
        document = {"step": chosen.step, "table": table, "leaves": rows_json(decoded)}
        count = len(decoded["table"])
        lines = [(line, "") for line in rows_lines(decoded, range(count))]
    if as_json:
        print_json("show", document)
    else:
        print_lines(lines)
    return Exit.DAMAGED if chosen.problem else Exit.FINE


def _step_lines(step: StepDescription, chain: list[int]) -> list[tuple[str, str]]:
    from cnr_jax.repository.description import aligned, amount, share_told

    what = step.kind if step.parent is None else f"{step.kind} on {step.parent}"
    verdict = f"no: {step.problem}" if step.problem else "yes"
    if step.may_lack_rows:
        verdict += "; an audit found later that rows may be missing in it"
    lines = [(f"step {step.step}: {what}", "bold")]
    if step.kind != "unreadable":
        less = step.reduction
        times = f"{less:.1f} times fewer than" if less >= 1 else f"{1 / less:.1f} times"
        saved = f"{step.saved_at:%Y-%m-%d %H:%M:%S} UTC" if step.saved_at else "?"
        lines += [
            (f"saved:       {saved}, in {step.secs or 0:.2f} s", ""),
            (f"reason:      {step.reason}", ""),
            (f"chain:       {' <- '.join(map(str, chain))}", ""),
            (
                f"bytes:       {amount(step.total_bytes)}, {times} a plain full save"
                f" ({amount(step.state_bytes)})",
                "",
            ),
            (
                f"of these:    tables {amount(step.table_bytes)},"
                f" slots {amount(step.slot_bytes)}, dense {amount(step.dense_bytes)},"
                f" manifests {amount(step.manifest_bytes)}",
                "",
            ),
        ]
    lines.append((f"restorable:  {verdict}", "red" if step.problem else ""))
    if not step.tables:
        return lines
    cells = [["table", "leaf", "shape", "dtype", "codecs", "rows", "bytes", "tiles"]]
    cells[0] += ["mean error", "worst"]
    for table in step.tables:
        for i, leaf in enumerate(table.leaves):
            shape = " x ".join(f"{n:,}" for n in leaf.shape)
            row = [leaf.name, shape, leaf.dtype, ", ".join(leaf.codecs) or "-"]
            row += [f"{leaf.rows:,}", amount(leaf.bytes), str(leaf.tiles)]
            # Errors are those of rows of tables; slots are not compared.
            off = (None, None) if i else (table.mean_row_error, table.worst_row_error)
            cells.append(["" if i else table.name, *row, *map(share_told, off)])
    header, *rest = aligned(cells, right={5, 6, 7, 8, 9})
    return [*lines, ("", ""), (header, "bold"), *((line, "") for line in rest)]


def _decoded(
    chain: tuple[StepReader, ...], table: str, rows: int
) -> dict[str, np.ndarray]:
    """The first rows of a table and of its slots."""
    from cnr_jax.repository.compare import logical_rows
    from cnr_jax.repository.reading import table_entry

    entry = table_entry(chain[-1].manifest, table)
    stop = min(rows, entry.rows)
    names = [leaf.name for leaf in entry.leaves]
    return {name: logical_rows(chain, table, name, 0, stop) for name in names}


@app.command()
@verb
def verify(
    root: Root,
    level: Annotated[
        Literal["structure", "data"],
        typer.Option(help="Look at manifests and sizes only, or read every byte."),
    ] = "data",
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """List everything that is wrong, and what it costs.

    What a run left behind is listed too, and is no finding.
    """
    from cnr_jax.cli.roots import check_root, use_cpu

    check_root(root)
    use_cpu()
    from cnr_jax.repository.layout import open_root
    from cnr_jax.repository.upkeep import verify as verifying

    with progress(f"verifying {level}") as tell:
        found = verifying.verify(root, level, item=item, on_step=tell)
    lost = sorted({name for problem in found for name in problem.consequence})
    code = Exit.FINDINGS if lost else Exit.FINE
    if as_json:
        problems = [dataclasses.asdict(problem) for problem in found]
        print_json("verify", {"level": level, "problems": problems, "lost": lost})
        return code
    above = f"{open_root(root)}/"  # files are named by where they lie in the root
    lines = [
        (str(each).replace(above, ""), "red" if each.consequence else "dim")
        for each in found
    ]
    harmless = sum(not problem.consequence for problem in found)
    verdict = "nothing is wrong"
    if found:
        verdict = f"{count_of(len(found) - harmless, 'problem')}"
        verdict += f", {count_of(harmless, 'note')} of what does no harm"
    if lost:
        verdict += f"; cannot be restored: {', '.join(lost)}"
    print_lines([*lines, (verdict, "bold red" if lost else "bold")])
    return code


@app.command()
@verb
def explain(root: Root, step: Step, item: Item = None, as_json: AsJson = False) -> Exit:
    """Say why a step is full or a delta.

    Lists the saves that its policy saw, and what the predictor of the default policy, at its
    defaults, makes of them.
    """
    from cnr_jax.cli.explain import explained, lines_of
    from cnr_jax.cli.roots import read_root, step_of

    root_found = read_root(root, item)
    found = explained(root_found, step_of(root_found, step.number))
    if as_json:
        print_json("explain", found.asdict())
    else:
        print_lines(lines_of(found))
    return Exit.FINE


@app.command()
@verb
def diff(
    root: Root,
    before: Step,
    after: Step,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Compare the rows of two steps, table by table.

    Decodes both, which imports jax and reads both chains. The change of a row is the norm of
    the difference over the norm that it had in the first step.
    """
    from cnr_jax.cli.roots import opened, read_root, step_of
    from cnr_jax.repository.description import aligned, share_told

    found = read_root(root, item)
    chosen = [step_of(found, each.number) for each in (before, after)]
    old, new = (opened(found, each) for each in chosen)
    from cnr_jax.repository.compare import compare

    with progress("comparing rows") as tell:
        leaves = sorted(compare(old, new, tell), key=lambda d: d.table)
    differs = any(each.changed_rows or each.note for each in leaves)
    code = Exit.FINDINGS if differs else Exit.FINE
    if as_json:
        found_leaves = [dataclasses.asdict(each) for each in leaves]
        told = {"before": chosen[0].step, "after": chosen[1].step}
        print_json("diff", {**told, "leaves": found_leaves})
        return code
    cells = [["table", "leaf", "rows", "changed", "share", "mean change", "worst", ""]]
    for each in leaves:
        share = 100 * each.changed_rows / each.rows if each.rows else 0
        cells.append(
            [
                each.table,
                each.leaf,
                f"{each.rows:,}",
                f"{each.changed_rows:,}",
                f"{share:.2f} %",
                share_told(each.mean_change),
                share_told(each.worst_change),
                each.note,
            ]
        )
    header, *rest = aligned(cells, right={2, 3, 4, 5, 6})
    print_lines([(header, "bold"), *((line, "") for line in rest)])
    return code


# So that -1 is a row, and no option.
app.command(context_settings={"ignore_unknown_options": True})(verb(rows))
app.command()(verb(bits))
app.command()(verb(export))
app.command()(verb(report))
app.command()(verb(simulate))
app.command()(verb(prune))
