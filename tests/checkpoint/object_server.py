"""An S3 server on loopback, and a proxy before it that fails as networks do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
Fault = Callable[[str, str], str | None]
"""``(method, path)`` to ``"503"``, ``"cut"``, ``"stall"`` or None."""


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target: tuple[str, int]
    fault: Fault = staticmethod(lambda method, path: None)
    released = threading.Event()

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        fault = type(self).fault(self.command, self.path)
        if fault == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length)
        if fault == "stall":
            type(self).released.wait(60)
            self.close_connection = True
            return
        if fault == "503":
            self._answer(503, {}, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>")
            return
        server = http.client.HTTPConnection(*self.target)
        server.request(self.command, self.path, body, dict(self.headers.items()))
        answer = server.getresponse()
        self._answer(answer.status, dict(answer.getheaders()), answer.read())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


class Server:
    """``options`` go to fsspec; ``fault`` decides what happens to each request."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.handler = type("Proxy", (_Proxy,), {"target": target, "released": threading.Event()})
        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.proxy.daemon_threads = True
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        self.requests: list[tuple[str, str]] = []
        self.set_fault(lambda method, path: None)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "key": "key",
            "secret": "secret",
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
            "config_kwargs": {
                "retries": {"max_attempts": 3, "mode": "standard"},
                "read_timeout": 2,
                "connect_timeout": 2,
            },
            "default_block_size": 5 * 2**20,
        }

    def set_fault(self, fault: Fault) -> None:
        def recorded(method: str, path: str) -> str | None:
            self.requests.append((method, path))
            return fault(method, path)

        self.handler.fault = staticmethod(recorded)


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
        server.handler.released.set()
        server.proxy.shutdown()
        moto.stop()
