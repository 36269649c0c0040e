"""Every fault that storage and processes produce, and what becomes of it.

    python tests/campaign/run.py [--quick] [--json PATH] [--only TEXT ...] [--in-flight N] [--sums]
        [--merges]

Ends with an error if anything of this library's ended as it should not. README.md, beside this
file, says what the cases do.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = ""
if "--sums" in sys.argv:
    os.environ["CNR_CAMPAIGN_SUMS"] = "1"  # before the state is made
if "--merges" in sys.argv:
    os.environ["CNR_CAMPAIGN_MERGES"] = "1"

# Imports of jax must come after the platform is set.
import children  # noqa: E402
import crafted  # noqa: E402
import damages  # noqa: E402
import failing  # noqa: E402
import jax  # noqa: E402
import kills  # noqa: E402
import mistakes  # noqa: E402
import once  # noqa: E402
import power  # noqa: E402
import runs  # noqa: E402
from bench import Bench  # noqa: E402
from outcomes import Tally, print_tallies, write_json  # noqa: E402
from systems import IN_FLIGHT, SYSTEMS, Ours  # noqa: E402

CASES = (kills, damages, power, failing, once, mistakes, crafted, runs)


def main() -> None:
    args = _parser().parse_args()
    os.environ[IN_FLIGHT] = str(args.in_flight)
    # What was mounted and made is undone also if somebody ends this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    # What is logged is what is to be expected of damaged roots.
    logging.disable(logging.ERROR)
    for name, value in children.SETTINGS.items():
        jax.config.update(name, value)
    tallies: list[Tally] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cnr-campaign-", dir=args.dir) as name:
        folder = Path(name).resolve()
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        with children.servers(folder, args.workers) as servers:
            bench = Bench(
                folder,
                servers,
                quick=args.quick,
                only=args.only,
                systems=args.systems,
            )
            for case in CASES:
                for tally in case.run(bench):
                    tallies.append(tally)
                    print_tallies([tally])
                    if args.json:
                        write_json(args.json, tallies, args.quick)
    present(tallies, time.monotonic() - started)


def present(tallies: list[Tally], secs: float) -> None:
    """Prints all, and ends the program with an error if ours was wrong."""
    print(f"\n{secs:.0f} s")
    print_tallies(tallies)
    wrong = 0
    for tally in tallies:
        for detail in tally.details:
            print(f"\n{tally.system}, {tally.case}: {tally.what}\n  {detail}")
        wrong += tally.wrong if tally.system == Ours.name else 0
    if wrong:
        sys.exit(f"\n{wrong} faults ended as they should not")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="samples, within 60 s")
    parser.add_argument("--json", type=Path, help="also write the report here")
    parser.add_argument("--only", nargs="+", default=[], help="cases with such a name")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="all"
    )
    parser.add_argument(
        "--in-flight", type=int, default=1, help="max_in_flight of ours (default: 1)"
    )
    parser.add_argument(
        "--sums", action="store_true", help="rows on a lattice, and moments"
    )
    parser.add_argument(
        "--merges",
        action="store_true",
        help="a log of increments, whose chains are merged",
    )
    parser.add_argument("--workers", type=int, default=2, help="children at a time")
    parser.add_argument("--dir", type=Path, help="where to write (default: temporary)")
    return parser


if __name__ == "__main__":
    main()
