"""How long a save holds training up: the call, and the slowdown of the steps after it.

    python tests/benchmarks/stall.py [--quick] [--json PATH] [--repeats N]

A table of 4 M x 64 float32 with one accumulator a row, train steps that are donated (torch: in
place) and update 8192 looked-up rows, and a dense part such that a step takes about 30 ms:
*saturated* steps use all cores (matrix products), the others one core (a sequential loop in
XLA), so that on two cores one is free. On a GPU (`JAX_PLATFORMS=cuda,cpu` and
`XLA_PYTHON_CLIENT_PREALLOCATE=false`) there are only the former, which run there. The stall of a
save is the time of the call plus what the next ten steps take longer than ten median steps without
a save. Ten steps may end before the save does, so the same is also stated for all steps until it is
complete. Then, with saturated steps, a save is issued while one is in flight. A first save is made
before, and what each case saved is restored and compared once. torchsnapshot does not sync its
files: there, complete is not durable. A full run takes about 15 minutes: 3 turns, of which the
variants and torch take part in the first. A quick one takes 60 s.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import harness
import peers
import workload
from checks import check_restored, first_check
from harness import Case, Figures, Results, middle, print_mark, print_table, spread
from trainers import DIM, JaxTrainer, TorchTrainer

STEP_SECS = 0.03
COUNTED_STEPS = 10
KINDS = {"saturated": "all cores", "free": "one core"}
# Label: system, policy, share of rows touched; None for systems that know no rows.
CASES: dict[str, tuple[str, str | None, float]] = {
    "orbax": ("orbax", None, 0.26),
    "orbax-uncompressed": ("orbax-uncompressed", None, 0.26),
    "cnr 26 %": ("cnr-4bit", "OneShot", 0.26),
    "cnr 1 %": ("cnr-4bit", "OneShot", 0.01),
    "cnr full": ("cnr-4bit", "Full", 0.26),
    "cnr raw 26 %": ("cnr-raw", "OneShot", 0.26),
    "cnr lattice 26 %": ("cnr-lattice", "OneShot", 0.26),
    "cnr 26 %, not audited": ("cnr-4bit", "OneShot", 0.26),
    "dcp-async": ("dcp-async", None, 0.26),
    "torchsnapshot-async": ("torchsnapshot-async", None, 0.26),
}
EVERY_TURN = ("orbax", "orbax-uncompressed", "cnr 26 %", "cnr 1 %", "cnr full")
QUICK = ("orbax-uncompressed", "cnr 26 %", "cnr 1 %", "dcp-async")
# A row that is smaller than most has a coarser step on a lattice, but none like that of 2 bits.
BITS = {"cnr-4bit": 4, "cnr-lattice": 2}


def plan(quick: bool) -> list[Case]:
    """Every case of `CASES`; steps are made equally long for this machine first."""
    harness.devices(1)
    import jax

    rows = 100_000 if quick else 4_000_000
    # Steps on a GPU leave all cores free.
    kinds = KINDS if jax.default_backend() == "cpu" else ["saturated"]
    work = {
        kind: workload.calibrate(STEP_SECS, kind == "saturated", rows, DIM)
        for kind in kinds
    }
    cases = []
    for label in QUICK if quick else CASES:
        system, policy, share = CASES[label]
        params = {"system": system, "policy": policy, "share": share}
        params |= {"rows": rows, "work": work, "audits": "not audited" not in label}
        once = label not in EVERY_TURN
        cases.append(Case(label, params, needs=peers.needs(system), once=once))
    return cases


def child(params: dict[str, Any], root: Path) -> Figures:
    """Measures one system under both kinds of steps."""
    harness.devices(1)
    name, rows = params["system"], params["rows"]
    system_type = peers.system_of(name)
    trainer_type = TorchTrainer if system_type.torch else JaxTrainer
    trainer = trainer_type(params)
    system = peers.make(name, root, trainer.state, **options_of(params))
    trainer.save(system, 0)
    system.wait()
    figures: Figures = {"rows": rows}
    for number, (kind, work) in enumerate(params["work"].items()):
        trainer.use(work)
        first = 10 * number + 1
        found = measure(
            system, trainer, first, first_check(root, {**params, "kind": kind})
        )
        if kind == "saturated":
            found["in_flight_call_secs"] = measure_in_flight(system, trainer, first + 1)
        figures.update({f"{kind}.{key}": value for key, value in found.items()})
    system.close()
    return figures


def options_of(params: dict[str, Any]) -> dict[str, Any]:
    if params["policy"] is None:
        return {}
    import cnr_jax as cnr

    options = {"policy": getattr(cnr, params["policy"])()}
    return options if params["audits"] else {**options, "audit_bytes": 0}


def measure(
    system: Any, trainer: Any, number: int, checked: bool, quiet_steps: int = 40
) -> Figures:
    """One save while nothing is in flight.

    Args:
        system: that saves; an earlier save is complete.
        trainer: that has taken a step.
        number: of the save.
        checked: whether it is restored and compared.
        quiet_steps: that tell how long a step takes, half of them before, half after.
    """
    trainer.touch()
    quiet = [trainer.step() for _ in range(quiet_steps // 2)]
    expected = trainer.copy() if checked else None
    call, steps, complete = save_and_go_on(system, trainer, number)
    system.wait()
    quiet += [trainer.step() for _ in range(quiet_steps // 2)]
    usual = statistics.median(quiet)
    found: Figures = (
        {}
        if expected is None
        else {"restored": check(system, trainer, number, expected)}
    )
    return found | {
        "step_secs": usual,
        "call_secs": call,
        "stall_secs": call + sum(steps[:COUNTED_STEPS]) - COUNTED_STEPS * usual,
        "slowest_secs": max(steps[:COUNTED_STEPS]),
        "until_durable_secs": complete,
        "slowdown_until_durable_secs": call + sum(steps) - len(steps) * usual,
        "steps_until_durable": len(steps),
    }


def measure_in_flight(system: Any, trainer: Any, number: int) -> float:
    """Seconds of the call of a save while the one before it, `number`, is in flight."""
    trainer.touch()
    trainer.save(system, number)
    for _ in range(3):
        trainer.step()
    start = time.perf_counter()
    trainer.save(system, number + 1)
    called = time.perf_counter() - start
    system.wait()
    return called


def save_and_go_on(
    system: Any, trainer: Any, number: int
) -> tuple[float, list[float], float]:
    """Seconds of the call, of each step (ten at least), and until the save is complete."""
    start = time.perf_counter()
    trainer.save(system, number)
    call = time.perf_counter() - start
    complete, steps = None, []
    while complete is None or len(steps) < COUNTED_STEPS:
        steps.append(trainer.step())
        if complete is None and system.done():
            complete = time.perf_counter() - start
    return call, steps, complete


def check(system: Any, trainer: Any, number: int, expected: Any) -> str:
    """Whether the save holds the state as it was when it was called."""
    restored = system.restore(number, trainer.abstract)
    try:
        check_restored(restored, expected, BITS.get(system.name))
    except AssertionError as error:
        # A peer that tears states is still measured, and named.
        if system.name.startswith("cnr"):
            raise
        return f"NOT what was saved: {error}"
    return "as saved"


def present(results: Results) -> None:
    """Tables and marks, for each kind of step."""
    kinds = next(iter(results)).params["work"]
    for kind in kinds:
        where = KINDS[kind] if len(kinds) > 1 else "the GPU"
        lengths = [case.median(f"{kind}.step_secs") for case in results]
        header = (
            *("save", "s of the call", "stall s (10 steps)", "slowest step s"),
            *("slowdown s until durable", "durable after s", "s if one is in flight"),
        )
        keys = (
            *("call_secs", "stall_secs", "slowest_secs"),
            *(
                "slowdown_until_durable_secs",
                "until_durable_secs",
                "in_flight_call_secs",
            ),
        )
        lines = [
            [case.label, *(case.text(f"{kind}.{key}", "{:.3f}") for key in keys)]
            for case in results
        ]
        print_table(
            f"Steps on {where}, {min(lengths) * 1e3:.0f} to {max(lengths) * 1e3:.0f} ms:"
            " medians (ranges)",
            header,
            lines,
        )
        marks = {"saturated": (0.8, 0.15, 1.0), "free": (0.3, 0.05, None)}[kind]
        for label, most in zip(("cnr 26 %", "cnr 1 %", "cnr full"), marks, strict=True):
            present_ratios(results, kind, label, most)
    for case in results:
        told = {
            str(run[f"{kind}.restored"])
            for run in case.runs.values()
            for kind in kinds
            if f"{kind}.restored" in run
        }
        if told - {"as saved"}:
            print(f"{case.label}: {'; '.join(sorted(told))}")


def present_ratios(results: Results, kind: str, label: str, most: float | None) -> None:
    """Our stall against that of Orbax; the mark is against the better of its settings."""
    stalls: list[float] = []
    for to in ("orbax", "orbax-uncompressed"):
        stall = results.ratios(label, to, f"{kind}.stall_secs")
        slower = results.ratios(label, to, f"{kind}.slowdown_until_durable_secs")
        if stall:
            stalls.append(middle(stall))
            print(
                f"  {label}: {spread(stall)} of the stall of {to},"
                f" {spread(slower)} of its slowdown until durable"
            )
    if most is not None and stalls:
        print_mark(f"{label}, stall against the better Orbax", max(stalls), most)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
