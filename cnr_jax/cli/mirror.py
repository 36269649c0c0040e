"""The verb `mirror`: copies the steps of a root to another one, and mends one from the other."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer

from cnr_jax.cli.arguments import AsJson, Item, Root, SingleWriter, number_option
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines

if TYPE_CHECKING:
    from cnr_jax.repository.mirroring.report import MirrorReport

# How often a root is looked at for new steps.
_LOOK_SECS = 2.0


def mirror(
    root: Root,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The mirror; made if missing.")
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until it is interrupted.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Mend what is damaged in one by the other."),
    ] = False,
    keep: Annotated[
        int | None,
        number_option("--keep", "Steps that stay in the mirror; without it all do."),
    ] = None,
    bytes_per_sec: Annotated[
        int | None,
        number_option("--bytes-per-sec", "Bytes that are written in a second."),
    ] = None,
    single_writer: SingleWriter = False,
    writer_is_dead: Annotated[
        bool,
        typer.Option("--writer-is-dead", help="Whoever saved to either has ended."),
    ] = False,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Copy committed steps to a mirror, each file checked on the way.

    A run may be saving in ROOT, but not with --repair.
    """
    from cnr_jax.cli.roots import use_cpu

    use_cpu()
    from cnr_jax.repository.mirroring.once import mirror as mirrored

    told: MirrorReport | None = None

    def follows(report: MirrorReport) -> bool:
        nonlocal told
        if not follow:
            return False
        seen = told and (told.copied_steps, told.problems)
        if seen != (report.copied_steps, report.problems) and not as_json:
            print_lines([(str(report), "")])
        told = report
        time.sleep(_LOOK_SECS)
        return True

    done = mirrored(
        root,
        url,
        keep=keep,
        repair=repair,
        bytes_per_sec=bytes_per_sec,
        single_writer=single_writer,
        writer_is_dead=writer_is_dead,
        item=item,
        follows=follows,
    )
    code = Exit.FINDINGS if done.problems else Exit.FINE
    if as_json:
        print_json("mirror", dataclasses.asdict(done))
        return code
    mended = [(f"mended: {path}", "") for path in done.mended]
    problems = [(f"not done: {text}", "red") for text in done.problems]
    print_lines([*mended, *problems, (str(done), "bold")])
    return code
