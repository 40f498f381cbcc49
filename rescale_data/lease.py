"""Leases: small files that their holders write anew, so that others see whether somebody is still there.

    holder     puts its lease, writes it anew every RENEW_SECONDS, removes it at the end
    observer   a holder of this host and PID namespace: alive or gone, at once
               any other: gone if its lease stands still for DEAD_SECONDS between two looks, by the observer's own clock

For local folders and buckets alike, by any fsspec file system. No clock is compared with another one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, Self, TypeAlias, cast

from fsspec.spec import AbstractFileSystem

RENEW_SECONDS = 5.0
DEAD_SECONDS = 60.0
LOST_SECONDS = 30.0
"""After this time without a renewal a holder takes its lease for lost; observers wait for twice as long."""

Process: TypeAlias = dict[str, Any]
Seen: TypeAlias = Literal["alive", "gone", "undecided"]


class LeaseLostError(OSError):
    """A lease could not be renewed, so others may take its holder for gone."""


def this_process() -> Process:
    """Return what identifies this process: host, boot, PID namespace, pid and start, in clock ticks since the boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot, namespace = file.read().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: there are no namespaces, and the host is known by its name alone
        boot, namespace = socket.gethostname(), ""
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "namespace": namespace,
        "pid": os.getpid(),
        "start": _start_of(os.getpid()),
    }


def is_running(process: Mapping[str, Any]) -> bool | None:
    """True or False if a process of this host and PID namespace runs; None if that cannot be seen from here."""
    here, pid = this_process(), process.get("pid")
    if any(process.get(key) != here[key] for key in ("boot", "namespace")) or type(pid) is not int:
        return None
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    start = _start_of(pid)
    return not start or start == process.get("start")


def _start_of(pid: int) -> str:
    """The start of a process; "ended" if its parent has not taken its exit yet, empty where it cannot be known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]


class Lease:
    """A lease that is renewed in a thread while it is held.

    Args:
        files: The file system; the folder of `path` exists, where there are folders.
        path: The lease's own name if it is shared (one file a holder), or one name for all if it is exclusive.
        about: Kept in the lease, for observers.
        exclusive: Only one holder at a time; for local folders.

    Raises:
        FileExistsError: An exclusive lease is held.
    """

    def __init__(
        self,
        files: AbstractFileSystem,
        path: str,
        about: Mapping[str, Any] | None = None,
        *,
        exclusive: bool = False,
    ) -> None:
        self._files, self._path, self._process = cast(Any, files), path, this_process()
        self._about, self._count = dict(about or {}), 0
        self._mutex, self._done = threading.Lock(), threading.Event()
        self._renewed = time.monotonic()
        if exclusive:
            with self._files.open(path, "xb") as stream:
                stream.write(self._content())
        else:
            self._put()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lease")
        self._thread.start()

    def tell(self, about: Mapping[str, Any]) -> None:
        """Write the lease anew, with something else in it."""
        self._about = dict(about)
        self._put()

    def check(self) -> None:
        """Raise `LeaseLostError` if the lease was not renewed for so long that others may take its holder for gone."""
        silent = time.monotonic() - self._renewed
        if silent > LOST_SECONDS:
            raise LeaseLostError(
                f"The lease {self._path} could not be renewed for {silent:.0f} seconds, so what it protects may have been "
                f"deleted. Start again when the file system answers."
            )

    def release(self) -> None:
        """Remove the lease; errors are swallowed, since observers see that it stands still."""
        if self._process["pid"] != os.getpid():
            return  # the lease of a parent, in its forked child; a thread of the parent's may have held any lock
        self._done.set()
        self._thread.join(RENEW_SECONDS)  # a renewal may hang
        with suppress(Exception):
            self._files.rm_file(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._done.wait(RENEW_SECONDS):
            with suppress(Exception):
                self._put()

    def _put(self) -> None:
        with self._mutex:
            before = time.monotonic()
            self._files.pipe_file(self._path, self._content())
            self._renewed = before

    def _content(self) -> bytes:
        self._count += 1
        return json.dumps({**self._about, "holder": self._process, "renewed": self._count}).encode()


class Watch:
    """An observer of leases: keeps what it has seen from one look to the next."""

    def __init__(self, files: AbstractFileSystem) -> None:
        self._files: Any = files
        self._seen: dict[str, tuple[bytes, float]] = {}

    def look(self, path: str) -> tuple[Seen, Mapping[str, Any]]:
        """Return the state of the holder of the lease at `path`, and the content of the lease; empty if it is half written."""
        try:
            content: bytes = self._files.cat_file(path)
        except FileNotFoundError:
            self._seen.pop(path, None)
            return "gone", {}
        about = _parsed(content)
        running = is_running(about.get("holder", {}))
        if running is not None:
            return ("alive" if running else "gone"), about
        before, since = self._seen.setdefault(path, (content, time.monotonic()))
        if before != content:
            self._seen[path] = content, time.monotonic()
            return "alive", about
        return ("gone" if time.monotonic() - since > DEAD_SECONDS else "undecided"), about


def _parsed(content: bytes) -> Mapping[str, Any]:
    with suppress(ValueError):
        about = json.loads(content)
        if isinstance(about, dict) and isinstance(about.get("holder"), dict):
            return cast("dict[str, Any]", about)
    return {}
