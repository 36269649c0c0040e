"""What moments as integers cost a model that is restored again and again, under dense Adam.

    python tests/benchmarks/moments_harm.py [--quick] [--data DIR] [--seeds N] [--json PATH]

A small DLRM passes once over 300,000 flights (`adam_flights.py`; dim 16, rate 1e-3, 146 batches),
and is saved and restored 20 times, 7 batches apart, or 3 times, 30 apart. Each way to store it is
compared with the unbroken run of the same seed: area under the curve and log loss of 40,000 flights
after these, and of those that it is trained on, each before its update (*lifetime*).
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import adam_flights
import numpy as np
import traces
from commandline import make_parser, write_figures
from paired import auc, log_loss
from results import print_table

import cnr_jax as cnr

WAYS: dict[str, dict[str, Any]] = {
    "lattice; exact slots": {"codec": "lattice", "slot_codec": "raw"},
    "lattice; moments": {"codec": "lattice", "slot_codec": "moments"},
    "exact; moments": {"codec": "raw", "slot_codec": "moments"},
}
# Restores, and batches between them.
RESTORES = ((20, 7), (3, 30))
FLIGHTS, HELD, DIM = 300_000, 40_000, 16


def figures(
    training: adam_flights.Training, state: Any, lifetime: list[np.ndarray]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, logits in (
        ("held out", training.held_out(state)),
        ("lifetime", np.concatenate(lifetime)),
    ):
        labels = training.labels(held=name == "held out")
        found[f"{name}: AUC"] = 100 * float(auc(logits, labels))
        found[f"{name}: log loss"] = float(log_loss(logits, labels))
    return found


def unbroken(training: adam_flights.Training) -> dict[str, float]:
    state, logits = training.trained(training.begin(), 0, training.steps)
    return figures(training, state, [logits])


def restored(
    training: adam_flights.Training, way: dict[str, Any], count: int, apart: int
) -> dict[str, float]:
    state, lifetime, done = training.begin(), list[np.ndarray](), 0
    tables = cnr.find_tables(
        state,
        {name: f"params/tables/{name}" for name, _ in adam_flights.tables_of(state)},
    )
    options = cnr.Options(
        policy=cnr.Consecutive(),
        tracking="fingerprint",
        **(way if way["codec"] == "raw" else way | {"rounding": "dithered", "bits": 4}),
        keep_staging=False,
    )
    with (
        tempfile.TemporaryDirectory() as root,
        cnr.CheckpointManager(root, tables=tables, options=options) as manager,
    ):
        for number in range(1, count + 1):
            state, logits = training.trained(state, done, number * apart)
            lifetime.append(logits)
            done = number * apart
            manager.save(done, args=cnr.args.Save(state))
            manager.wait_until_finished()
            state = manager.restore(done, args=cnr.args.Restore(state)).state
        state, logits = training.trained(state, done, training.steps)
    return figures(training, state, [*lifetime, logits])


def main() -> None:
    parser = make_parser(
        __doc__,
        quick="one seed, two restores, few flights",
        data="the folder of the data",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args()
    data = traces.data_folder(args.data)
    flights, held, seeds = FLIGHTS, HELD, range(args.seeds)
    restores = RESTORES
    if args.quick:
        flights, held, seeds, restores = 20_000, 4_000, range(1), ((2, 4),)
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        training = adam_flights.Training(data, flights, held, DIM, ("adam", 1e-3), seed)
        whole = unbroken(training)
        for count, apart in restores:
            for name, way in WAYS.items():
                found = restored(training, way, count, apart)
                off = {key: found[key] - whole[key] for key in whole}
                runs.append({"stored": name, "restores": count, "seed": seed} | off)
                print(runs[-1], flush=True)
    table: list[list[str]] = []
    for count, _ in restores:
        for name in WAYS:
            ours = [r for r in runs if (r["stored"], r["restores"]) == (name, count)]
            row = [name, str(count)]
            for key in list(ours[0])[3:]:
                values = np.array([r[key] for r in ours])
                places = 3 if "AUC" in key else 5
                row.append(
                    f"{values.mean():+.{places}f} ± {values.std(ddof=len(values) > 1):.{places}f}"
                )
            table.append(row)
    header = ["stored", "restores", *list(runs[0])[3:]]
    print_table(
        "less the unbroken run, of the same seed: mean, deviation", header, table
    )
    write_figures(args.json, runs)


if __name__ == "__main__":
    main()
