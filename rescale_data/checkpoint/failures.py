"""What goes wrong in a save or load, said clearly: DCP wraps each rank's error, a user wants the cause."""

from __future__ import annotations

import errno

from torch.distributed.checkpoint.api import CheckpointException

from rescale_data.errors import DataStateError


class DamagedCheckpointError(ValueError):
    """Files of a checkpoint are not those that were saved."""


_CURES = {
    errno.ENOSPC: "The disk is full. Free space, or keep fewer checkpoints (keep_latest, keep_every, keep_best).",
    errno.EDQUOT: "The disk quota is used up. Free space, or keep fewer checkpoints (keep_latest, keep_every, keep_best).",
    errno.EFBIG: "A file may not grow this large here (ulimit -f, or the file system's limit).",
    errno.EACCES: "No permission. Give a path that this user may write and read.",
    errno.EPERM: "No permission. Give a path that this user may write and read.",
    errno.EROFS: "The file system is read-only. Give another path.",
    errno.ENOTDIR: "A part of the path is a file. Give another path.",
}


def clear_error(error: BaseException, doing: str) -> BaseException:
    """The error to raise for ``error``.

    Errors of ours stay what they are. Errors of the system keep their type and number and say what was being done, what
    became of it and the cure. Anything else is a ``RuntimeError`` with the ranks that failed.
    """
    if isinstance(error, CheckpointException):
        return _of_ranks(error, doing)
    if isinstance(error, OSError) and error.errno is not None:
        cure = _CURES.get(error.errno, "The checkpoints before it are untouched.")
        name = f" ({error.filename})" if error.filename else ""
        return type(error)(error.errno, f"{doing} failed: {error.strerror}{name}. {cure}")
    return error


def _of_ranks(error: CheckpointException, doing: str) -> BaseException:
    first = min(error.failures)
    cause = error.failures[first][0]
    if isinstance(cause, OSError | DataStateError) or type(cause) in (ValueError, TypeError, DamagedCheckpointError):
        return clear_error(cause, doing)
    ranks = ", ".join(map(str, sorted(error.failures)))
    return RuntimeError(f"{doing} failed on rank {ranks}: {type(cause).__name__}: {cause}")
