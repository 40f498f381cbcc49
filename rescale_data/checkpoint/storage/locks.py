"""Who writes into a folder: a lock on a file that says so, and ends with the process that holds it.

Where there are no files to lock, in an object store, a lock holds within this process alone. A forked child does not hold
what its parent does.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket

_HELD: dict[str, int | None] = {}
"""By path the file that is open, if there is one."""
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class HeldError(Exception):
    """Somebody has the lock; the text says who."""


def take(path: str, *, file: bool = True) -> bool:
    """Take the lock of ``path``, where a file is made.

    Args:
        file: False where none can be.

    Returns:
        Whether no other process can have it, which a file system without locks does not tell.

    Raises:
        HeldError: somebody has it.
    """
    if path in _HELD:
        raise HeldError("this process")
    if not file:
        _HELD[path] = None
        return False
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        works = _locked(descriptor)
    except HeldError:
        os.close(descriptor)
        raise
    _HELD[path] = descriptor
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk: the lock holds without it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode())
    return works


def release(path: str) -> None:
    """Let go of a lock; nothing where this process does not have it."""
    descriptor = _HELD.pop(path, None)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            # Closing would not do: a process that this one has started keeps a copy of the file open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


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
    for descriptor in filter(None, _HELD.values()):
        os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget)
