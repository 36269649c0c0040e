"""A proxy before a service like S3 that counts requests, and does harm to some of them."""

from __future__ import annotations

import collections
import contextlib
import http.client
import http.server
import json
import re
import secrets
import ssl
import threading
import time
import urllib.parse
import xml.sax.saxutils
from collections.abc import Callable, Iterator
from pathlib import Path

# What is done to a request: "drop" its answer, which is lost after the request was carried out;
# "truncate" it in the middle; "reset" the connection before it is carried out; "veil" that there is
# nothing, as services do for who may not list; wait for some seconds; answer with a code instead.
Harm = str | int | float
# Whom requests are of.
KEY, SECRET = "AKIAOFATEST", "a-secret/of+a-test"
# As much as a service that takes any signature looks at.
_SIGNED = {
    "authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/1/us-east-1/s3/aws4_request"
}


class Proxy:
    """Passes requests on.

    Args:
        target: URL of the service.
        certificate: file with a key and its certificate; None: connections are not secured.

    Attributes:
        url: of the proxy.
        counts: requests by kind: GET, HEAD, PUT, LIST, DELETE.
        log: each of them, with its path.
        harm: told the kind, the path, and how many of that kind there were before; says what is
            done to a request. None: it is passed on.
        harmed: requests that something was done to.
        rounds: how often a request came while none was under way.
        says: what is said with a code; or what makes that of what was sent.
        signed: `Authorization` of each request.
        headers: of the last one.
        bodies: of all.
        delay_secs: that each request takes longer.
        bytes_per_sec: passed on of what is put, one request after the other; 0: as fast as may be.
        stripped: headers that are left out, in lower case.
    """

    def __init__(self, target: str, certificate: Path | None = None) -> None:
        self._target = urllib.parse.urlsplit(target).netloc
        self.counts: collections.Counter[str] = collections.Counter()
        self.log: list[tuple[str, str]] = []
        self.harm: Callable[[str, str, int], Harm | None] = lambda *_: None
        self.says: bytes | Callable[[bytes], bytes] = (
            b"<Error><Code>Harm</Code></Error>"
        )
        self.signed: list[str] = []
        self.headers: dict[str, str] = {}
        self.bodies: list[bytes] = []
        self.harmed = self.rounds = self._under_way = 0
        self.delay_secs = self.bytes_per_sec = 0.0
        self._line = threading.Lock()
        self.stripped: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # The headers of an answer and what follows leave at once.
            wbufsize = 1 << 16
            disable_nagle_algorithm = True

            def handle_one(self) -> None:
                with proxy._lock:
                    proxy.rounds += not proxy._under_way
                    proxy._under_way += 1
                try:
                    proxy._pass(self)
                finally:
                    with proxy._lock:
                        proxy._under_way -= 1

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

            def log_message(self, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: object) -> None:
                pass  # of connections that are cut

        self._server = Server(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            plain = self._server.socket
            self._server.socket = context.wrap_socket(plain, server_side=True)
        how = "http" if certificate is None else "https"
        self.url = f"{how}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def ask(
        self, command: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Code, headers and body of the answer to a request with headers in lower case."""
        with contextlib.closing(http.client.HTTPConnection(self._target)) as service:
            service.request(command, path, body or None, headers)
            answer = service.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextlib.contextmanager
    def counting(self) -> Iterator[collections.Counter[str]]:
        """Counts the requests made meanwhile."""
        before, found = self.counts.copy(), collections.Counter[str]()
        self.log.clear()
        yield found
        found.update(self.counts - before)

    def _pass(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        kind = _kind(asked.command, asked.path)
        with self._lock:
            number = self.counts[kind]
            self.counts[kind] += 1
            self.log.append((kind, asked.path))
            self.signed.append(asked.headers.get("Authorization", ""))
            self.headers = {k.lower(): v for k, v in asked.headers.items()}
            self.bodies.append(body)
        time.sleep(self.delay_secs)
        if self.bytes_per_sec:
            with self._line:
                time.sleep(len(body) / self.bytes_per_sec)
        harm = self.harm(kind, asked.path, number)
        self.harmed += harm is not None
        if isinstance(harm, int):
            said = self.says if isinstance(self.says, bytes) else self.says(body)
            self._answer(asked, harm, {}, said)
            return
        if isinstance(harm, float):
            time.sleep(harm)
        if harm == "reset":
            asked.close_connection = True
            return
        # Of who was told of a proxy the path has the host before it.
        path = re.sub(r"^https?://[^/]*", "", asked.path)
        given = {k.lower(): v for k, v in asked.headers.items()}
        sent = {k: v for k, v in given.items() if k not in self.stripped}
        if path != asked.path:
            sent["host"] = self._target
        status, headers, data = self.ask(asked.command, path, body, sent)
        if harm == "drop":
            asked.close_connection = True
            return
        if harm == "veil" and status == 404:
            self._answer(asked, 403, {}, b"<Error><Code>AccessDenied</Code></Error>")
            return
        self._answer(asked, status, headers, data, cut=harm == "truncate")

    def _answer(
        self,
        asked: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        data: bytes,
        *,
        cut: bool = False,
    ) -> None:
        asked.send_response_only(status)
        kept = {"connection", "transfer-encoding", "content-length"}
        for name, value in headers.items():
            if name.lower() not in kept:
                asked.send_header(name, value)
        length = str(len(data))
        if asked.command == "HEAD":
            length = {k.lower(): v for k, v in headers.items()}.get(
                "content-length", "0"
            )
        asked.send_header("Content-Length", length)
        asked.end_headers()
        if asked.command != "HEAD":
            asked.wfile.write(data[: len(data) // 2] if cut else data)
        asked.wfile.flush()
        asked.close_connection |= cut


class GoogleProxy(Proxy):
    """Speaks as Google Cloud Storage does, before a service like S3.

    The one's XML differs from the other's in how conditions and copies are asked for: by the number
    of what was read, of which this keeps what the service calls it. And nobody deletes what is not
    there.
    """

    def __init__(self, target: str) -> None:
        self._tags = {0: ""}
        super().__init__(target)

    def ask(
        self, command: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        headers = headers | _SIGNED
        number = headers.pop("x-goog-if-generation-match", None)
        if number == "0":
            headers["if-none-match"] = "*"
        elif number is not None:
            headers["if-match"] = self._tags[int(number)]
        source = headers.pop("x-goog-copy-source", None)
        if source is not None:
            headers["x-amz-copy-source"] = source
        # Of the bucket's name what is no letter comes quoted.
        path = re.sub(r"^/[^/?]*", lambda found: urllib.parse.unquote(found[0]), path)
        if command == "DELETE":
            status, _, _ = super().ask("HEAD", path, b"", _SIGNED)
            if status == 404:
                return status, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        status, told, data = super().ask(command, path, body, headers)
        tag = next((v for k, v in told.items() if k.lower() == "etag"), None)
        if tag is not None:
            with self._lock:
                known = {tag: number for number, tag in self._tags.items()}
                number = known.setdefault(tag, len(self._tags))
                self._tags[number] = tag
            told["x-goog-generation"] = str(number)
        return status, told, data


class UploadProxy(Proxy):
    """Puts and copies objects by Google's JSON, as `fake-gcs-server` wants it.

    The server answers what is read, listed and deleted by XML, which is what clients speak, but it
    takes objects by JSON alone; conditions it looks at in uploads of several parts.
    """

    def ask(
        self, command: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        if command != "PUT":
            return super().ask(command, path, body, headers)
        bucket, name = _bucket_and_name(urllib.parse.urlsplit(path).path)
        number = headers.get("x-goog-if-generation-match")
        query = {} if number is None else {"ifGenerationMatch": number}
        source = headers.get("x-goog-copy-source")
        if source is None:
            query["uploadType"] = "multipart"
            mark = secrets.token_hex(16).encode()
            named = json.dumps({"name": name}).encode()
            parts = (b"application/json", named), (b"application/octet-stream", body)
            body = b"".join(
                b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n" % (mark, *part)
                for part in parts
            )
            body += b"--%s--\r\n" % mark
            sort = f"multipart/related; boundary={mark.decode()}"
            path = f"/upload/storage/v1/b/{bucket}/o"
        else:
            sort, body = "application/json", b"{}"
            of, copied = (urllib.parse.quote(p, "") for p in _bucket_and_name(source))
            path = f"/storage/v1/b/{of}/o/{copied}/rewriteTo"
            path += f"/b/{bucket}/o/{urllib.parse.quote(name, '')}"
        path += f"?{urllib.parse.urlencode(query)}"
        status, told, data = super().ask("POST", path, body, {"content-type": sort})
        if status == 200:
            made = json.loads(data)
            made = made.get("resource", made)
            told |= {
                "etag": f'"{made["etag"]}"',
                "x-goog-generation": made["generation"],
            }
            data = b""
        return status, told, data


def _bucket_and_name(path: str) -> tuple[str, str]:
    bucket, _, name = path.removeprefix("/").partition("/")
    return urllib.parse.unquote(bucket), urllib.parse.unquote(name)


class FolderProxy(Proxy):
    """Lists folders in which nothing is any more, as SeaweedFS does for some minutes."""

    def __init__(self, target: str) -> None:
        self._folders: set[str] = set()
        super().__init__(target)

    def _answer(
        self,
        asked: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        data: bytes,
        *,
        cut: bool = False,
    ) -> None:
        url = urllib.parse.urlsplit(asked.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if asked.command == "PUT":
            *parts, _ = urllib.parse.unquote(url.path).split("/")[2:]
            ends = range(1, len(parts) + 1)
            self._folders |= {"/".join(parts[:end]) + "/" for end in ends}
        elif query.get("delimiter") and status == 200:
            start = query.get("prefix", "")
            below = (
                f.removeprefix(start) for f in self._folders if f.startswith(start)
            )
            for name in sorted({each.partition("/")[0] for each in below} - {""}):
                folder = xml.sax.saxutils.escape(f"{start}{name}/")
                told = f"<Prefix>{folder}</Prefix>".encode()
                if told not in data:
                    told = b"<CommonPrefixes>" + told + b"</CommonPrefixes>"
                    data = data.replace(b"</ListB", told + b"</ListB")
        super()._answer(asked, status, headers, data, cut=cut)


def _kind(command: str, path: str) -> str:
    query = urllib.parse.urlsplit(path).query
    if command == "GET" and "list-type" in query:
        return "LIST"
    return "DELETE" if command == "POST" and "delete" in query else command
