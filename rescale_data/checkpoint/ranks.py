"""The ranks that save or load together; if one fails, all raise an error with the cause."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rescale_data.errors import DamagedCheckpointError, DataStateError, to_picklable

T = TypeVar("T")


class Ranks:
    """A process group in which an error on one rank is raised on all ranks; or a single process.

    Each call is a collective: all ranks of the group make it, and what one of them raises, all raise, so that no rank
    waits for one that has gone.

    Args:
        group: The group; ``None`` for the default group, or a single process where none was initialized.
        single_process: This process by itself, whatever process groups there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, single_process: bool = False) -> None:
        self.is_distributed = not single_process and dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.world_size = dist.get_world_size(group) if self.is_distributed else 1
        if self.rank < 0:
            raise ValueError(
                "This rank is not in process_group; only the ranks of process_group save and load with it."
            )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0, and return its result on all ranks."""
        if self.world_size == 1:
            return work()
        outcome: list[Any] = [_result_or_error(work) if self.is_first else None]
        source_rank = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(outcome, src=source_rank, group=self.group)
        return _unpack_results(outcome)[0]

    def on_each(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank, and return all results on every rank, in rank order."""
        if self.world_size == 1:
            return [work()]
        outcomes: list[Any] = [None] * self.world_size
        dist.all_gather_object(outcomes, _result_or_error(work), group=self.group)
        return _unpack_results(outcomes)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank, and return this rank's own result; raise on all ranks if it fails on one."""
        results: list[T] = []
        self.on_each(lambda: results.append(work()))
        return results[0]


def _result_or_error(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, to_picklable(error)


def _unpack_results(outcomes: list[Any]) -> list[Any]:
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            if len(outcomes) > 1:
                error.add_note(f"Raised by rank {rank} of {len(outcomes)}.")
            raise error
    return [value for value, _ in outcomes]


_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "The disk is full. Free space, or keep fewer checkpoints (keep_latest, keep_every, keep_best).",
    errno.EDQUOT: "The disk quota is used up. Free space, or keep fewer checkpoints (keep_latest, keep_every, keep_best).",
    errno.EFBIG: "A file may not grow this large here (ulimit -f, or the file system's limit).",
    errno.EACCES: "No permission. Give a path that this user may write and read.",
    errno.EPERM: "No permission. Give a path that this user may write and read.",
    errno.EROFS: "The file system is read-only. Give another path.",
    errno.ENOTDIR: "A part of the path is a file. Give another path.",
}


def error_with_advice(error: BaseException, activity: str) -> BaseException:
    """Return a clearer error to raise in place of ``error``: with the operation that failed and a cure.

    Errors of ours stay what they are. Errors of the system keep their type and number and say what was being done, what
    became of it and the cure. Anything else is a ``RuntimeError`` with the ranks that failed.
    """
    if isinstance(error, CheckpointException):
        return _from_dcp_error(error, activity)
    if isinstance(error, OSError) and error.errno is not None:
        advice = _ADVICE_BY_ERRNO.get(error.errno, "The checkpoints before it are untouched.")
        filename_text = f" ({error.filename})" if error.filename else ""
        return type(error)(error.errno, f"{activity} failed: {error.strerror}{filename_text}. {advice}")
    return error


def _from_dcp_error(error: CheckpointException, activity: str) -> BaseException:
    first_rank = min(error.failures)
    cause = error.failures[first_rank][0]
    if isinstance(cause, OSError | DataStateError) or type(cause) in (ValueError, TypeError, DamagedCheckpointError):
        return error_with_advice(cause, activity)
    rank_list = ", ".join(map(str, sorted(error.failures)))
    return RuntimeError(f"{activity} failed on rank {rank_list}: {type(cause).__name__}: {cause}")
