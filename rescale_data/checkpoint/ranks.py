"""The ranks that save or load together, and how they fail together."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """A process group, or a single process where there is none.

    Each call is a collective: all ranks of the group make it, and what one of them raises, all raise, so that no rank
    waits for one that has gone.

    Args:
        group: The group; ``None`` for the default group, or a single process where none was initialized.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1
        if self.rank < 0:
            raise ValueError(
                "This rank is not in process_group; only the ranks of process_group save and load with it."
            )

    @classmethod
    def alone(cls) -> Ranks:
        """This process by itself, whatever process groups there are."""
        ranks = cls.__new__(cls)
        ranks.distributed, ranks.group, ranks.rank, ranks.size = False, None, 0, 1
        return ranks

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on rank 0, on all ranks."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [_attempt(work, self.rank) if self.is_first else None]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(outcome, src=source, group=self.group)
        return cast(T, _unwrap(outcome))[0]  # type: ignore[index]

    def on_each(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returns on each rank, in rank order, on all ranks."""
        if self.size == 1:
            return [work()]
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, _attempt(work, self.rank), group=self.group)
        return cast(list[T], _unwrap(outcomes))

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on this rank, once it has not raised on any."""
        done: list[T] = []
        self.on_each(lambda: done.append(work()))
        return done[0]


class _Failure:
    def __init__(self, error: Exception, rank: int) -> None:
        self.rank = rank
        self.error = error


def _attempt(work: Callable[[], T], rank: int) -> T | _Failure:
    try:
        return work()
    except Exception as error:
        return _Failure(portable(error), rank)


def portable(error: Exception) -> Exception:
    """The error itself where it survives the way to another process, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _unwrap(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, _Failure):
            raise outcome.error
    return outcomes
