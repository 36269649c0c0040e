"""The verb `simulate`: policies on a recorded trace of look-ups, jobs on traces of failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cnr_jax.cli.arguments import TRACE_HELP, AsJson, number, number_option
from cnr_jax.cli.exit_codes import Exit, print_json
from cnr_jax.cli.printing import print_lines
from cnr_jax.errors import OptionError

if TYPE_CHECKING:
    from cnr_jax.goodput import Failures, JobRun, Plan, Profile
    from cnr_jax.simulation import Simulation


def simulate(
    accesses: Annotated[
        Path | None,
        typer.Option(help="An .npz file: by table the ids looked up, int[steps, ...]."),
    ] = None,
    every: Annotated[
        int, number_option("--every", "Train steps between two saves.")
    ] = 100,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="TABLE=N: the rows of a table, if more than its ids show."),
    ] = None,
    dim: Annotated[int, number_option("--dim", "Elements of a row.")] = 64,
    bits: Annotated[int, number_option("--bits", "Of each element.", most=32)] = 4,
    slot_bytes: Annotated[
        int, number_option("--slot-bytes", "Of a row, for its optimizer's slots.", 0)
    ] = 4,
    failures: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACE", help=f"{TRACE_HELP}; may be given several times."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="What steps and saves take: a file of JSON, or a run's root."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        number_option(
            "--nodes", "Nodes that the job needs; else all of a trace, or one."
        ),
    ] = None,
    hours: Annotated[
        int, number_option("--hours", "To draw from a distribution.", most=10**6)
    ] = 720,
    seed: Annotated[int, number_option("--seed", "Of these draws.", 0)] = 0,
    as_json: AsJson = False,
) -> Exit:
    """Say what the saves of a run would take, and what failures would leave of it.

    The rows that train steps looked up tell what saves take under each policy. Failures and a
    profile tell what is left under each policy, and in other systems. Nothing is saved.
    """
    if accesses is None and not failures:
        raise typer.BadParameter("nothing to simulate: give --accesses or --failures")
    if failures and profile is None:
        raise typer.BadParameter(
            "--failures needs --profile: what steps and saves take"
        )
    found = None
    if accesses is not None:
        sizes = dict(_rows_of(each) for each in rows or ())
        found = _policies(accesses, every, sizes, dim, bits, slot_bytes)
    runs: list[JobRun] = []
    if failures and profile is not None:
        from cnr_jax.goodput import failures_from

        traces = [failures_from(each, nodes, hours, seed) for each in failures]
        runs = _runs(profile, traces, every, found)
    if as_json:
        document = found.asdict() if found else {}
        print_json("simulate", {**document, "jobs": [run.asdict() for run in runs]})
        return Exit.FINE
    if found:
        _print_policies(found)
    _print_jobs(runs)
    return Exit.FINE


def _policies(
    path: Path, every: int, sizes: dict[str, int], dim: int, bits: int, slot_bytes: int
) -> Simulation:
    """Simulates the saves of a trace of look-ups under all policies."""
    from cnr_jax.simulation import ByteModel
    from cnr_jax.simulation import simulate as simulated

    trace = _trace(path)
    try:
        model = ByteModel(dim=dim, bits=bits, slot_bytes=slot_bytes)
        return simulated(trace, every, rows=sizes, model=model)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error


def _trace(path: Path) -> Mapping[str, Any]:
    """Reads a trace of look-ups.

    Raises:
        OptionError: if there is none.
    """
    import numpy as np

    try:
        # A file of another kind may give an array, which has no files.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise OptionError(f"there is no trace {path}") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever numpy and zipfile raise for other files
        raise OptionError(
            f"{path} is no trace: expected an .npz file of integer arrays, one a table"
        ) from error


def _runs(
    path: str, traces: Sequence[Failures], every: int, found: Simulation | None
) -> list[JobRun]:
    """Plays jobs of a profile over traces of failures, each under all plans.

    Raises:
        OptionError: if there is no profile.
    """
    from cnr_jax.cli.profiles import read_profile
    from cnr_jax.goodput import simulate_job

    profile = read_profile(path)
    if profile is None:
        raise OptionError(f"{path} is no profile: it has not saved often enough")
    return [
        simulate_job(profile, trace, plan)
        for trace in traces
        for plan in _plans(profile, every, trace, found)
    ]


def _plans(
    profile: Profile, every: int, failures: Failures, found: Simulation | None
) -> list[Plan]:
    """Plans of all policies, by the saves of a trace of look-ups if given, and of other systems."""
    from cnr_jax.goodput import (
        Plan,
        advised_plan,
        best_plan,
        checkfreq_plan,
        pccheck_plan,
        plain_plan,
        plan_of,
    )
    from cnr_jax.goodput.plans import POLICIES

    if found:
        own = [Plan(name, every, each) for name, each in found.schedules.items()]
    else:
        own = [plan_of(profile, every, policy) for policy in POLICIES]

    def best_of_orbax(every: int) -> Plan:
        return plain_plan(profile, every, name="orbax, best")

    return [
        *own,
        plain_plan(profile, every),
        advised_plan(profile, failures),
        best_plan(profile, failures, best_of_orbax),
        checkfreq_plan(profile, failures.nodes),
        pccheck_plan(profile),
    ]


def _print_policies(found: Simulation) -> None:
    head, *rest = str(found).splitlines()
    told = (
        f"{found.rows:,} rows, of which an interval touches {100 * found.touched_share:.1f} %"
        " on average"
    )
    print_lines([(head, "bold"), *((line, "") for line in rest), (told, "dim")])


def _print_jobs(runs: list[JobRun]) -> None:
    """Prints a table for each trace of failures."""
    from cnr_jax.goodput import run_lines

    for name in dict.fromkeys(run.failures for run in runs):
        of_trace = [run for run in runs if run.failures == name]
        head, *rest = run_lines(of_trace)
        first = of_trace[0]
        told = (
            f"{name}: {first.failed:,} failures in {first.up_secs / 3600:,.0f} h, and"
            f" {first.down_secs / 3600:,.0f} h without all nodes"
        )
        print_lines([(told, "dim"), (head, "bold"), *((line, "") for line in rest)])


def _rows_of(given: str) -> tuple[str, int]:
    """Parses `TABLE=N`, a table and its number of rows."""
    name, _, count = given.rpartition("=")
    try:
        if name:
            return name, number()(count)
    except typer.BadParameter:
        pass
    raise typer.BadParameter(f"expected TABLE=N, got {given!r}", param_hint="--rows")
