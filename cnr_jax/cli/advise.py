"""The verb that advises when to save."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from cnr_jax.cli.arguments import NOTED_BY, TRACE_HELP, AsJson, Item, number_option
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines

if TYPE_CHECKING:
    from cnr_jax.goodput import Profile


def advise(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT", help="The folder of the run, or a profile (JSON)."
        ),
    ],
    failures: Annotated[str, typer.Option(metavar="TRACE", help=TRACE_HELP)],
    job_hours: Annotated[
        float, typer.Option(min=0, help="Hours that the job trains for, in all.")
    ],
    nodes: Annotated[
        int | None,
        number_option(
            "--nodes", "Nodes that the job needs; else all of a trace, or one."
        ),
    ] = None,
    slowdown: Annotated[
        float, typer.Option(min=0, help="Share by which saves may slow training down.")
    ] = 0.03,
    restart_secs: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds of a restart and of the first save's call; no restore."
        ),
    ] = None,
    notice_secs: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds by which the job is told of a failure before it comes."
        ),
    ] = 0.0,
    damage: Annotated[
        float, typer.Option(min=0, max=1, help="Chance that a restore finds damage.")
    ] = 0.0,
    seed: Annotated[int, number_option("--seed", "Of all draws.", 0)] = 0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure its storage for two minutes.")
    ] = False,
    item: Item = None,
    as_json: AsJson = False,
) -> Exit:
    """Say how often a run should save, under which policy, and what to expect of it.

    Goes by what the run has noted and by its failures, and takes the plan of most goodput that
    keeps to the slowdown, with saves further apart than storage can write them.
    """
    from cnr_jax.cli.profiles import read_profile
    from cnr_jax.goodput.advice import advise as advised

    profile = read_profile(root, item, measures=measure)
    if profile is not None and restart_secs is not None:
        profile = dataclasses.replace(profile, restart_secs=restart_secs)
    found = advised(
        profile,
        failures,
        job_hours=job_hours,
        nodes=nodes,
        budget=slowdown,
        notice_secs=notice_secs,
        damage=damage,
        seed=seed,
    )
    if as_json:
        document = {"advice": found and found.asdict()}
        print_json("advise", {**document, "profile": profile and profile.asdict()})
        return Exit.FINE
    if found is None:
        print_lines([(line, "") for line in _unknown(profile)])
        return Exit.FINE
    head, *rest = str(found).splitlines()
    print_lines([(head, "bold"), *((line, "") for line in rest)])
    return Exit.FINE


def _unknown(profile: Profile | None) -> list[str]:
    """Lines that say what is not known yet, because too few saves tell of it."""
    if profile is None:
        return [
            "not known yet: what a train step takes",
            "  five saves in a row tell it that have not waited for the one before",
        ]
    lines = [
        f"not known yet: {what}, told by {line.samples} saves of 5"
        for what, line in (
            ("seconds of a train step", profile.step),
            ("how long saves hold training up", profile.blocking),
            ("how long saves are written", profile.write),
        )
        if not line.known
    ]
    if not profile.blocking.known:
        lines.append(f"  hint: {NOTED_BY}")
    return lines
