"""The verb `report`: draws a run."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated

import typer

from cnr_jax.cli.arguments import Accelerators, AsJson, Force, Item, Output, Root
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines
from cnr_jax.texts import count_of

Svg = Annotated[
    bool, typer.Option("--svg", help="The charts alone, as one SVG, instead of a page.")
]


def report(
    root: Root,
    output: Output,
    svg: Svg = False,
    prices: Annotated[
        Path | None,
        typer.Option(help="A file of TOML with prices: the page tells what it costs."),
    ] = None,
    accelerators: Accelerators = 1,
    force: Force = False,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Draw a run as a page of HTML, or as SVG, that needs nothing beside it.

    It shows the bytes of each save and of a plain full one, capacity, the share of rows that
    changed, seconds, and the chains; with prices also what a month of it costs.
    """
    from cnr_jax.cli.report.page import TOO_FEW, page_of
    from cnr_jax.cli.report.picture import picture_of
    from cnr_jax.cli.roots import read_root
    from cnr_jax.goodput.cost import Prices, cost_of
    from cnr_jax.goodput.measurements import read_measurements
    from cnr_jax.repository.course import course_of

    _check_output(output, root, force)
    known = None if prices is None else Prices.read(prices)
    if known is not None and svg:
        raise typer.BadParameter("--svg draws charts alone: --prices is for the page")
    if known is None and accelerators != 1:
        raise typer.BadParameter("--accelerators is for what --prices tells of costs")
    course = course_of(read_root(root, item))
    now = datetime.datetime.now(tz=datetime.UTC)
    measured = None if svg else read_measurements(course.root.root)
    profile = measured and measured.profile()
    priced = known and (cost_of(course, known, accelerators) or TOO_FEW)
    drawn = picture_of(course) if svg else page_of(course, now, profile, priced)
    return _written(output, drawn.encode(), force, len(course.saves), as_json)


def _check_output(output: Path, root: str, force: bool) -> None:
    """Checks that a file may be written, before anything is read, which may take seconds.

    Raises:
        OSError: if it is there already, its folder is not, or it would lie in the root.
    """
    from cnr_jax.repository.layout import open_root

    above = output.resolve()
    if Path(os.fspath(open_root(root))).resolve() in (above, *above.parents):
        raise PermissionError(
            f"{output} would lie in the root, where nothing is written; name another folder"
        )
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder; name a file")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {output.parent} to write to")
    if not force and os.path.lexists(output):
        raise FileExistsError(f"{output} is there already; --force replaces it")
    if output.exists() and not output.is_file():
        # Such as a device: a file would be put in its place, for all who use it.
        raise PermissionError(f"{output} is no file, and is not replaced")


def _written(output: Path, data: bytes, force: bool, saves: int, as_json: bool) -> Exit:
    """Writes a file as a whole, and prints its name."""
    if force:
        beside = output.with_name(f".{output.name}.{os.getpid()}")
        try:
            beside.write_bytes(data)
            beside.replace(output)
        finally:
            beside.unlink(missing_ok=True)
    else:
        # A file that came while the root was read is left alone.
        with output.open("xb") as file:
            file.write(data)
    if as_json:
        told = {"output": os.fspath(output), "bytes": len(data), "saves": saves}
        print_json("report", told)
        return Exit.FINE
    from cnr_jax.repository.description import amount

    line = f"{output}: {count_of(saves, 'save')}, {amount(len(data))}"
    print_lines([(line, "")])
    return Exit.FINE
