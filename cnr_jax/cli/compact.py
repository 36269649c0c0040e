"""The verb `compact`: merges the chain of a step into one full checkpoint that stands for it."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_jax.cli.arguments import (
    AsJson,
    Item,
    Root,
    SingleWriter,
    StepOption,
    WriterIsDead,
)
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines


def compact(
    root: Root,
    step: StepOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would be merged.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Merge what a run asks for, IncrementLog(elsewhere=True), until interrupted.",
        ),
    ] = False,
    writer_is_dead: WriterIsDead = False,
    single_writer: SingleWriter = False,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Merge a step and what it rests on into one full checkpoint, which takes its place.

    What is restored stays the same, bit for bit. If a run may still be saving, nothing is changed.
    With --follow the run that saves takes up what is merged.
    """
    from cnr_jax.cli.roots import use_cpu

    use_cpu()
    if follow:
        if step is not None or dry_run or writer_is_dead or single_writer or item:
            raise typer.BadParameter(
                "--follow merges what runs ask for: it goes with --json alone"
            )
        return _follow(root, as_json=as_json)
    from cnr_jax.goodput.measurements import read_measurements
    from cnr_jax.repository.compaction.compact import plan_compaction

    measured = read_measurements(root)
    profile = measured.profile() if measured is not None else None
    plan = plan_compaction(
        root,
        step=step.number if step is not None else None,
        item=item,
        restore_secs=profile.reading.of if profile else None,
    )
    if not dry_run:
        plan = plan.execute(writer_is_dead=writer_is_dead, single_writer=single_writer)
    if as_json:
        print_json("compact", plan.asdict())
    else:
        print_lines([(line, "") for line in str(plan).splitlines()])
    return Exit.FINE


def _follow(root: str, *, as_json: bool) -> Exit:
    """Merges what runs ask for, and tells of each merge."""
    from cnr_jax.format import names
    from cnr_jax.repository import layout
    from cnr_jax.repository.compaction.requests import Request, serve

    path = layout.open_root(root)
    layout.check_can_be_read(path, None)

    def told(request: Request, problem: str) -> None:
        if as_json:
            step = names.step_number(request.directory)
            found = {"step": step, "problem": problem or None}
            print_json("compact", found, on_a_line=True)
        elif problem:
            print_lines([(f"step {request.directory} is not merged: {problem}", "red")])
        else:
            print_lines([(f"step {request.directory} is merged with its chain", "")])

    serve(path, told)
    return Exit.FINE
