"""Leases: small files that a process rewrites at intervals, so that others see that it is still alive.

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
"""Seconds without a renewal after which a holder considers its lease lost; observers wait twice as long."""

ProcessIdentity: TypeAlias = dict[str, Any]
HolderState: TypeAlias = Literal["alive", "gone", "undecided"]


class LeaseLostError(OSError):
    """Error raised if a lease could not be renewed, so that others may consider its holder dead."""


def this_process() -> ProcessIdentity:
    """Return the identity of this process: host, boot, PID namespace, pid and start time, in clock ticks since the boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id, namespace = file.read().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: there are no namespaces, and the host is known by its name alone
        boot_id, namespace = socket.gethostname(), ""
    return {
        "host": socket.gethostname(),
        "boot": boot_id,
        "namespace": namespace,
        "pid": os.getpid(),
        "start": _start_time_of(os.getpid()),
    }


def is_running(process: Mapping[str, Any]) -> bool | None:
    """True or False if a process of this host and PID namespace runs or not; None if that cannot be seen from here."""
    own_process, pid = this_process(), process.get("pid")
    if any(process.get(key) != own_process[key] for key in ("boot", "namespace")) or type(pid) is not int:
        return None
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    start_time = _start_time_of(pid)
    return not start_time or start_time == process.get("start")


def _start_time_of(pid: int) -> str:
    """Return the start time of a process; "ended" for a zombie, an empty string if it is not known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            stat_fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if stat_fields[0] in "ZX" else stat_fields[19]


class Lease:
    """A lease file that a thread rewrites at intervals until it is released.

    Args:
        file_system: The file system; the folder of `path` exists, where there are folders.
        path: The lease's own name if it is shared (one file a holder), or one name for all if it is exclusive.
        lease_data: Data that the lease keeps, for observers.
        exclusive: True for only one holder at a time; for local folders.

    Raises:
        FileExistsError: An exclusive lease is held.
    """

    def __init__(
        self,
        file_system: AbstractFileSystem,
        path: str,
        lease_data: Mapping[str, Any] | None = None,
        *,
        exclusive: bool = False,
    ) -> None:
        self._file_system, self._path, self._process = cast(Any, file_system), path, this_process()
        self._lease_data, self._num_renewals = dict(lease_data or {}), 0
        self._write_lock, self._release_event = threading.Lock(), threading.Event()
        self._last_renewal = time.monotonic()
        if exclusive:
            with self._file_system.open(path, "xb") as stream:
                stream.write(self._lease_json())
        else:
            self._write_file()
        self._thread = threading.Thread(target=self._renew_until_released, daemon=True, name="lease")
        self._thread.start()

    def rewrite(self, lease_data: Mapping[str, Any]) -> None:
        """Write the lease again, with other content."""
        self._lease_data = dict(lease_data)
        self._write_file()

    def require_not_lost(self) -> None:
        """Raise `LeaseLostError` if the lease was not renewed for so long that others may consider its holder dead."""
        seconds_since_renewal = time.monotonic() - self._last_renewal
        if seconds_since_renewal > LOST_SECONDS:
            raise LeaseLostError(
                f"The lease {self._path} could not be renewed for {seconds_since_renewal:.0f} seconds, so what it protects may "
                f"have been "
                f"deleted. Start again when the file system answers."
            )

    def release(self) -> None:
        """Remove the lease file. Errors are ignored, since observers see that it is no longer renewed."""
        if self._process["pid"] != os.getpid():
            return  # the lease of a parent, in its forked child; a thread of the parent's may have held any lock
        self._release_event.set()
        self._thread.join(RENEW_SECONDS)  # a renewal may hang
        with suppress(Exception):
            self._file_system.rm_file(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew_until_released(self) -> None:
        while not self._release_event.wait(RENEW_SECONDS):
            with suppress(Exception):
                self._write_file()

    def _write_file(self) -> None:
        with self._write_lock:
            write_start_time = time.monotonic()
            self._file_system.pipe_file(self._path, self._lease_json())
            self._last_renewal = write_start_time

    def _lease_json(self) -> bytes:
        self._num_renewals += 1
        return json.dumps({**self._lease_data, "holder": self._process, "renewed": self._num_renewals}).encode()


class LeaseObserver:
    """Observer of leases, which compares their content with what it saw before."""

    def __init__(self, file_system: AbstractFileSystem) -> None:
        self._file_system: Any = file_system
        self._last_seen_contents: dict[str, tuple[bytes, float]] = {}

    def observe_holder(self, path: str) -> tuple[HolderState, Mapping[str, Any]]:
        """Return the state of the holder of the lease at `path`, and the lease's content, empty if it is incomplete."""
        try:
            content: bytes = self._file_system.cat_file(path)
        except FileNotFoundError:
            self._last_seen_contents.pop(path, None)
            return "gone", {}
        lease_fields = _parse_lease(content)
        is_holder_running = is_running(lease_fields.get("holder", {}))
        if is_holder_running is not None:
            return ("alive" if is_holder_running else "gone"), lease_fields
        last_content, last_change_time = self._last_seen_contents.setdefault(path, (content, time.monotonic()))
        if last_content != content:
            self._last_seen_contents[path] = content, time.monotonic()
            return "alive", lease_fields
        return ("gone" if time.monotonic() - last_change_time > DEAD_SECONDS else "undecided"), lease_fields


def _parse_lease(content: bytes) -> Mapping[str, Any]:
    with suppress(ValueError):
        lease_fields = json.loads(content)
        if isinstance(lease_fields, dict) and isinstance(lease_fields.get("holder"), dict):
            return cast("dict[str, Any]", lease_fields)
    return {}
