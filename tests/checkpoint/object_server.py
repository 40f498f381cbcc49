"""An S3 server on loopback, and a proxy before it that fails as networks do."""

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

BUCKET = "bucket"
FAULTS = ("403", "404", "500", "503", "reset", "cut", "short", "stall")
"""Ways in which a request fails: an answer of that status; a connection that is reset, or closed within the upload; an answer
that ends in its middle; none at all."""
_CODES = {"403": "AccessDenied", "404": "NoSuchKey", "500": "InternalError", "503": "SlowDown"}


class Request(NamedTuple):
    """A request that reached the proxy."""

    method: str
    path: str
    """With its query."""
    range: str
    """The header of that name, or nothing."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        fault = self.server.receive(Request(self.command, self.path, self.headers.get("Range", "")))
        if fault in ("reset", "cut"):
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.shutdown(socket.SHUT_RD)
            else:
                self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length)
        if fault == "stall":
            self.server.released.wait(60)
            self.close_connection = True
        elif fault in _CODES:
            self._answer(int(fault), {}, f"<Error><Code>{_CODES[fault]}</Code><Message>No.</Message></Error>".encode())
        else:
            target = http.client.HTTPConnection(*self.server.target)
            target.request(self.command, self.path, body, dict(self.headers.items()))
            answer = target.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read(), is_short=fault == "short")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, is_short: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            body = body[: len(body) // 2] if is_short else body
            self.wfile.write(body)
            self.server.count_sent(len(body))
        self.close_connection |= is_short

    def log_message(self, format: str, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    """A proxy before an S3 server. ``options`` go to fsspec.

    with server.recording() as requests:
        operation()
    with server.failing(requests[3], "503"):  # as often as the client makes it
        operation()

    Attributes:
        fault: Returns one of `FAULTS` for a request, or None.
        sent_bytes: Bytes of bodies that were sent to clients.
        patience: Seconds after which a client gives a request up; on a busy machine any may take seconds.
    """

    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.url = target, f"http://127.0.0.1:{self.server_address[1]}"
        self.fault, self.sent_bytes, self.patience = no_fault, 0, 60.0
        self.released = threading.Event()
        self._lock, self._logs = threading.Lock(), list[list[Request]]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def options(self) -> dict[str, Any]:
        timeouts = {"read_timeout": self.patience, "connect_timeout": self.patience}
        return {
            "key": "key",
            "secret": "secret",
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
            "config_kwargs": {"retries": {"max_attempts": 3, "mode": "standard"}, **timeouts},
            "default_block_size": 5 * 2**20,
        }

    @contextmanager
    def recording(self) -> Iterator[list[Request]]:
        log: list[Request] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs = [each for each in self._logs if each is not log]

    @contextmanager
    def failing(self, request: Request, fault: str) -> Iterator[list[Request]]:
        """Let `request` fail in one of `FAULTS` each time that it is made within the block, and yield the list of these."""
        before, failed = self.fault, list[Request]()

        def decide(made: Request) -> str | None:
            if made != request:
                return None
            failed.append(made)
            return fault

        self.fault = decide
        try:
            yield failed
        finally:
            self.fault = before
            self.released.set()  # whoever still waits
            self.released = threading.Event()

    def receive(self, request: Request) -> str | None:
        with self._lock:
            for log in self._logs:
                log.append(request)
            return self.fault(request)

    def count_sent(self, num_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += num_bytes


def no_fault(_: Request) -> str | None:
    return None


@contextmanager
def serving() -> Iterator[Server]:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    server = Server(moto.get_host_and_port())
    try:
        connection = http.client.HTTPConnection(*moto.get_host_and_port())
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        yield server
    finally:
        server.released.set()
        server.shutdown()
        moto.stop()
