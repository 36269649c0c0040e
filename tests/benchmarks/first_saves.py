"""The stall of each of the first saves of a run in its default configuration, audits included.

    python tests/benchmarks/first_saves.py [--quick] [--json PATH] [--repeats N] [--only ...]

Saves 1 to 12 of a run with recorded rows, each alone (see `stall.py`, where the state, the steps
and the stall are explained): 26 % and 1 % of 4 M x 64 rows touched before each save, on one
device and on eight that share this machine's cores, beside steps that use all cores or leave one
free. The policy is the default one, so that some of the saves are full. For each number of a save
its stall is held against that of the same save by Orbax, and against that of a run without audits
(`audit_bytes=0`). Orbax writes everything every time and takes long to: its runs end after 3
saves, the last two of which stand for those that are not made. What the audit of a save takes is
also timed by itself, as part of the call, as it may be less than the noise of stalls. The last save
of the first turn is restored and compared. A full run is 5 turns of 24 cases of about 40 s, 80
minutes; a quick one of 4 saves takes 60 s.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import Any

import harness
import peers
import stall
import workload
from checks import first_check
from harness import Case, Figures, Results, print_mark, print_table, spread
from trainers import DIM, JaxTrainer

SAVES, PEER_SAVES = 12, 3
SHARES = {"26 %": 0.26, "1 %": 0.01}
# Of Orbax's stall; of that without audits.
MOST = {"26 %": 0.6, "1 %": 0.4}
MOST_OF_UNAUDITED = 1.1
# Around each of a dozen saves: fewer than around the one of `stall.py`.
QUIET_STEPS = 20
PEERS = ("orbax", "orbax-uncompressed")


def plan(quick: bool) -> list[Case]:
    """Every system under both kinds of steps, on one device and on eight."""
    harness.devices(1)
    rows = 100_000 if quick else 4_000_000
    cases = []
    for kind in ("saturated",) if quick else stall.KINDS:
        work = workload.calibrate(stall.STEP_SECS, kind == "saturated", rows, DIM)
        for devices in (8,) if quick else (1, 8):
            given = {"rows": rows, "work": work, "devices": devices, "kind": kind}
            group = f"{kind}, {devices} device(s)"
            for name in PEERS[1:] if quick else PEERS:
                params = {**given, "system": name, "share": 0.26, "saves": PEER_SAVES}
                cases.append(Case(f"{group}, {name}", params, group))
            for label, share in SHARES.items():
                for audits in (True, False):
                    params = {**given, "system": "cnr-4bit", "share": share}
                    params["saves"] = 4 if quick else SAVES
                    what = label if audits else f"{label} not audited"
                    params["audits"] = audits
                    cases.append(Case(f"{group}, {what}", params, group))
    return cases


def child(params: dict[str, Any], root: Path) -> Figures:
    """Stalls of the saves of one run, by their number."""
    harness.devices(params["devices"])
    trainer = JaxTrainer(params)
    options = _options(params) if params["system"].startswith("cnr") else {}
    system = peers.make(params["system"], root, trainer.state, **options)
    trainer.use(params["work"])
    # Else the first collection of all that was imported takes 0.1 s of whichever save it meets.
    gc.collect()
    gc.freeze()
    figures: Figures = {"rows": params["rows"]}
    checked = first_check(root, {k: v for k, v in params.items() if k != "work"})
    for number in range(1, params["saves"] + 1):
        last = number == params["saves"] and checked
        found = stall.measure(system, trainer, number, last, QUIET_STEPS)
        if options:
            report = system.manager.last_report
            found |= {"kind": report.kind, "audit_secs": report.fingerprint_secs}
        figures.update({f"{number}.{key}": value for key, value in found.items()})
    system.close()
    return figures


def _options(params: dict[str, Any]) -> dict[str, Any]:
    import cnr_jax as cnr

    options: dict[str, Any] = {"policy": cnr.Intermittent()}
    return options if params["audits"] else {**options, "audit_bytes": 0}


def present(results: Results) -> None:
    """A table for each kind of steps and number of devices, and marks."""
    for group in dict.fromkeys(case.group for case in results):
        cases = results.group(group)
        lines = [
            [case.label.removeprefix(f"{group}, "), *_numbers(case)] for case in cases
        ]
        saves = max((_saves_of(case) for case in cases), key=len)
        header = ("stall s", *(f"save {n}" for n in saves))
        lines = [line + [""] * (len(header) - len(line)) for line in lines]
        print_table(f"{group}: medians; f is a full save", header, lines)
        for label in SHARES:
            _present_marks(results, group, label)
    for case in results:
        told = {
            str(run.get(f"{_saves_of(case)[-1]}.restored", "as saved"))
            for run in case.runs.values()
        }
        if told - {"as saved"}:
            print(f"{case.label}: {'; '.join(sorted(told))}")


def _numbers(case: harness.Measured) -> list[str]:
    return [
        f"{case.median(f'{n}.stall_secs'):.3f}{' f' * (_kind(case, n) == 'full')}"
        for n in _saves_of(case)
    ]


def _saves_of(case: harness.Measured) -> range:
    return range(1, case.params["saves"] + 1)


def _kind(case: harness.Measured, number: int) -> str:
    return next((str(run.get(f"{number}.kind")) for run in case.runs.values()), "")


def _present_marks(results: Results, group: str, label: str) -> None:
    audited, plain = f"{group}, {label}", f"{group}, {label} not audited"
    if audited not in results or plain not in results:
        return
    case = results[audited]
    numbers = _saves_of(case)
    deltas = [n for n in numbers if _kind(case, n) == "delta"]
    for to in (f"{group}, {peer}" for peer in PEERS):
        if to in results and deltas:
            found = [_of_peer(results, audited, to, n) for n in deltas]
            print_mark(f"{audited}, worst delta of {to}", max(found), MOST[label])
    found = [_ratio(results, audited, plain, n) for n in numbers]
    what = f"{audited}: stall of that without audits, of each save"
    print(f"  {what}: {spread(found)}")
    print_mark(
        f"{audited}, worst of that without audits", max(found), MOST_OF_UNAUDITED
    )
    timed = [
        1 + case.median(f"{n}.audit_secs") / results[plain].median(f"{n}.stall_secs")
        for n in numbers
    ]
    secs = [case.median(f"{n}.audit_secs") for n in numbers]
    print(f"  {audited}: the audit itself takes {spread(secs, '{:.4f}')} s")
    print_mark(f"{audited}, the same, audits timed", max(timed), MOST_OF_UNAUDITED)


def _of_peer(results: Results, label: str, to: str, number: int) -> float:
    """Of the same save by a peer, or of its later ones where it made no such save."""
    peer = results[to]
    numbers = [number] if number in _saves_of(peer) else _saves_of(peer)[1:]
    stalls = [
        float(run[f"{n}.stall_secs"]) for run in peer.runs.values() for n in numbers
    ]
    return results[label].median(f"{number}.stall_secs") / statistics.median(stalls)


def _ratio(results: Results, label: str, to: str, number: int) -> float:
    """Of the medians: single stalls scatter."""
    key = f"{number}.stall_secs"
    return results[label].median(key) / results[to].median(key)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(5, 1))
