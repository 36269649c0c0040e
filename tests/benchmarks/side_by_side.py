"""Bytes, files, time until durable and memory of saves: peers, fulls, deltas, policies.

    python tests/benchmarks/side_by_side.py [--quick] [--json PATH] [--repeats N]

A table of 4 M x 64 float32 with one float32 accumulator a row (1.04 GB). First single saves:
a full one by every system, and deltas of 0.1 to 50 % of the rows, one after the other, each
against the save before. Then 12 saves by policy, with a retention of the latest one, as rows
touched since the baseline grow as in Check-N-Run (of a quarter of the rows: only bytes are told).
Every save ends when all is synced; a tiny state is saved first, so that nobody pays for imports
and first calls. What each case wrote is restored and compared once. A full run takes about 10
minutes: 3 turns, of which the floors, the variants and the policies take part in the first.
A quick one takes 50 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import peers
from harness import Case, Figures, Results, middle, print_mark, print_table, spread
from saves import DIM, POLICIES, delta_saves, full_save, run_of_saves

SHARES = (0.001, 0.01, 0.10, 0.26, 0.50)
SHARES_RAW = (0.01, 0.26)
FULLS = (
    *("orbax", "orbax-uncompressed", "dcp-async", "torchsnapshot-async"),
    *("safetensors", "numpy", "cnr-4bit", "cnr-raw"),
)
ONCE = ("torchsnapshot-async", "safetensors", "numpy", "cnr-raw")
QUICK_FULLS = ("orbax-uncompressed", "dcp-async", "cnr-4bit")
STAGING_BYTES = 64 << 20
SLACK_BYTES = 64 << 20
UNCOMPRESSED = "full, orbax-uncompressed"


def plan(quick: bool) -> list[Case]:
    """Every system's full save, our deltas, and a run of each policy; fewer if quick."""
    rows = 100_000 if quick else 4_000_000
    given = {"rows": rows, "what": "full"}
    cases = [
        Case(
            f"full, {name}",
            {**given, "system": name},
            group="full",
            needs=peers.needs(name),
            once=name in ONCE,
        )
        for name in (QUICK_FULLS if quick else FULLS)
    ]
    given = {"rows": rows, "what": "deltas", "system": "cnr-4bit"}
    cases.append(Case("deltas, cnr-4bit", {**given, "shares": SHARES}, "deltas"))
    one = {**given, "shares": [0.26]}
    variants: dict[str, Any] = (
        {}
        if quick
        else {
            "deltas, cnr-raw": {**one, "system": "cnr-raw", "shares": SHARES_RAW},
            "deltas, cnr-4bit-zstd": {**one, "system": "cnr-4bit-zstd"},
            "staging bounded to 64 MiB": {
                **one,
                "options": {"max_staging_bytes": STAGING_BYTES},
            },
            "not audited": {**one, "options": {"audit_bytes": 0}},
        }
    )
    cases += [Case(k, v, "variants", once=True) for k, v in variants.items()]
    wide = {**one, "rows": rows // 4, "wide": True}
    cases.append(Case("wide slots", wide, "bytes", once=True))
    given = {"rows": rows // 4, "what": "run"}
    cases += [
        Case(f"12 saves, {name}", {**given, "policy": name}, "run", once=True)
        for name in (*POLICIES, "orbax-uncompressed")
        if not quick or name in ("Intermittent", "orbax-uncompressed")
    ]
    return cases


def child(params: dict[str, Any], root: Path) -> Figures:
    """Measures one case."""
    harness.devices(1)
    measure = {"full": full_save, "deltas": delta_saves, "run": run_of_saves}
    return measure[params["what"]](params, root)


def present(results: Results) -> None:
    """Tables and marks."""
    present_saves(results)
    present_marks(results)
    present_runs(results)


def present_saves(results: Results) -> None:
    header = "save", "MB", "files", "s until durable", "s of the call", "extra MiB"
    lines = []
    for case in results.group("full"):
        lines.append(line(case, case.label, ""))
    for case in [*results.group("deltas"), *results.group("variants")]:
        for share in case.params["shares"]:
            lines.append(line(case, f"{case.label}, {share:.1%}", f"{share:g}."))
    print_table(
        "Single saves, medians (ranges); Orbax's default compresses by zstd",
        header,
        lines,
    )


def line(case: harness.Measured, label: str, key: str) -> list[str]:
    return [
        label,
        f"{case.median(f'{key}bytes') / 1e6:.2f}",
        f"{case.median(f'{key}files'):.0f}",
        case.text(f"{key}secs", "{:.2f}"),
        case.text(f"{key}call_secs", "{:.3f}"),
        case.text(f"{key}extra_bytes", "{:.0f}", 1 / (1 << 20)),
    ]


def present_marks(results: Results) -> None:
    ours = "deltas, cnr-4bit"
    print("\nDeltas at 4 bits against full saves by Orbax")
    for share in SHARES:
        fewer = results.ratios(UNCOMPRESSED, ours, "bytes", f"{share:g}.bytes")
        secs = [
            spread(results.ratios(ours, to, f"{share:g}.secs", "secs"))
            for to in (UNCOMPRESSED, "full, orbax")
        ]
        print(
            f"  {share:5.1%}: {middle(fewer):7.1f}x fewer bytes than uncompressed;"
            f" {secs[0]} of its time, {secs[1]} of the default's"
        )
    if ours in results:
        table = results[ours].params["rows"] * DIM * 4
        alone = table / results[ours].median("0.26.table_bytes")
        print(
            f"  26.0%, table rows alone: {alone:.1f}x fewer bytes than all in float32"
        )
    if "wide slots" in results:
        wide = results["wide slots"]
        fewer = wide.median("state.bytes") / wide.median("0.26.bytes")
        print(f"  26.0%, slots of the table's shape, exact: {fewer:.1f}x fewer bytes")
    print("Marks")
    for share, least in ((0.26, 23.0), (0.01, 500.0)):
        fewer = results.ratios(UNCOMPRESSED, ours, "bytes", f"{share:g}.bytes")
        print_mark(f"{share:.0%}, times fewer bytes", middle(fewer), least, least=True)
    for to, most in ((UNCOMPRESSED, 0.6), ("full, orbax", 0.2)):
        ratio = middle(results.ratios(ours, to, "0.26.secs", "secs"))
        print_mark(f"26 %, time against {to}", ratio, most)
    if ours in results and UNCOMPRESSED in results:
        limit = 0.1 * results[UNCOMPRESSED].median("secs") + 0.1
        print_mark("1 %, s until durable", results[ours].median("0.01.secs"), limit)
    for label, staging in (
        ("deltas, cnr-4bit", 2 << 30),
        ("staging bounded to 64 MiB", STAGING_BYTES),
    ):
        if label in results:
            case = results[label]
            limit = case.median("0.26.bytes") + staging + SLACK_BYTES
            extra = max(case.values("0.26.extra_bytes"), default=float("nan"))
            print_mark(f"26 %, extra bytes of memory, {label}", extra, limit)


def present_runs(results: Results) -> None:
    full = (
        results["12 saves, orbax-uncompressed"]
        if ("12 saves, orbax-uncompressed" in results)
        else None
    )
    if full is None:
        return
    written, one = full.median("written_bytes"), full.median("steady_bytes")
    header = (
        *("12 saves", "fulls", "MB", "times fewer", "all bytes, times fewer"),
        *("steady", "transient"),
    )
    lines = []
    for case in results.group("run"):
        lines.append(
            [
                case.label.removeprefix("12 saves, "),
                f"{case.median('fulls'):.0f}",
                f"{case.median('written_bytes') / 1e6:.1f}",
                f"{written / case.median('written_bytes'):.2f}",
                f"{written / _all_bytes(case):.2f}",
                f"{case.median('steady_bytes') / one:.3f}",
                f"{case.median('transient_bytes') / one:.3f}",
            ]
        )
    print_table(
        "12 saves at 4 bits, the latest kept; capacity in full float32 saves, greatest",
        header,
        lines,
    )
    label = "12 saves, Intermittent"
    if label in results:
        case = results[label]
        fewer = written / case.median("written_bytes")
        print_mark("Intermittent, times fewer bytes", fewer, 12, least=True)
        print_mark("Intermittent, steady", case.median("steady_bytes") / one, 0.25)


def _all_bytes(case: harness.Measured) -> float:
    """Bytes that training has written, and merges beside it."""
    return case.median("written_bytes") + case.median("merged_bytes")


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
