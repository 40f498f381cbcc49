"""Who writes into a local folder: a lock on a file that says so, and ends with the process that holds it.

Within a process a lock may be taken more than once. A forked child does not hold what its parent does.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass


@dataclass
class _Held:
    descriptor: int
    count: int = 1


_HELD: dict[str, _Held] = {}
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class HeldError(Exception):
    """Another process has the lock; the text says which."""


def take(path: str) -> bool:
    """Take the lock of the file at ``path``, which is made.

    Returns:
        Whether nobody can have it: it is new to this process, and its file system has locks.

    Raises:
        HeldError: another process has it.
    """
    if path in _HELD:
        _HELD[path].count += 1
        return False
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        works = _locked(descriptor)
    except HeldError:
        os.close(descriptor)
        raise
    _HELD[path] = _Held(descriptor)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk: the lock holds without it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode())
    return works


def release(path: str) -> None:
    """Let go of a lock; nothing where this process does not have it."""
    held = _HELD.get(path)
    if held is None:
        return
    held.count -= 1
    if not held.count:
        del _HELD[path]
        with contextlib.suppress(OSError):
            # Closing would not do: a process that this one has started keeps a copy of the file open.
            fcntl.flock(held.descriptor, fcntl.LOCK_UN)
        os.close(held.descriptor)


def is_held(path: str) -> bool:
    """Whether this process has the lock."""
    return path in _HELD


def holder(path: str) -> str | None:
    """Who has the lock of a file; empty where nobody has, or there is no file; None where that cannot be known."""
    if path in _HELD:
        return "this process"
    try:
        descriptor = _opened(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:
        return None
    try:
        return "" if _locked(descriptor) else None
    except HeldError as error:
        return str(error)
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except PermissionError:  # another user's; to read will do, where the file system is a local one
        return os.open(path, os.O_RDONLY)


def _locked(descriptor: int) -> bool:
    """Lock the file, or return False where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise HeldError(_who(descriptor)) from error
        return False
    return True


def _who(descriptor: int) -> str:
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {said['pid']} on {said['host']} since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _forget() -> None:
    for held in _HELD.values():
        os.close(held.descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget)
