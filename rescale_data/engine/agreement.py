"""Lets all ranks agree, ahead of time, on the step at which the first logical shard of any rank runs out of samples.

Each rank makes micro batches ahead, and sends how many it is sure of. The smallest of these counts is safe for all ranks. The
next exchange begins one step before that count is used up, so that no step waits for the other ranks.

A rank may fail ahead, in reading or in the proof of an epoch. Then it sends the failure in place of a count, and all ranks
raise before the same micro batch. If the error was temporary, all ranks may ask again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.errors import DataStateError
from rescale_data.state import Ints

T = TypeVar("T")
_READ_FAILED, _WRONG_ROWS = -1, -2


def other_rank_error(*, wrong_rows: bool) -> Exception:
    """Return the error that this rank raises because another rank failed; the failing rank reports the cause."""
    if wrong_rows:
        return DataStateError("Another dp rank found that its rows are not those of the epoch; its error says more.")
    return RuntimeError(
        "Another dp rank could not make its samples; its error says why. If the cause passes, the next call "
        "goes on from here on all ranks."
    )


def call_on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> T:
    """Return `work()`; if the call fails on some rank, all ranks raise an error (collective)."""
    results: list[T] = []
    failure = None
    try:
        results.append(work())
    except Exception as error:
        failure = error
    wrong_rows = isinstance(failure, DataStateError)
    worst = int(ranks.gather_ints([wrong_rows + (failure is not None)]).max())
    if worst:
        raise failure if failure is not None and (wrong_rows or worst < 2) else other_rank_error(wrong_rows=worst == 2)
    return results[0]


class EpochEndAgreement:
    """Finds the number of micro batches that all ranks can make before a shard of some rank ends, ahead of time.

    Args:
        first_batch: The next micro batch.
        micro_batches_per_step: A, the number of micro batches in a step.
    """

    def __init__(self, ranks: Ranks, first_batch: int, micro_batches_per_step: int) -> None:
        self._ranks, self._micro_batches_per_step = ranks, micro_batches_per_step
        self._num_steps_ahead = 1 if ranks.world_size == 1 else 2  # made ahead: 1 if there is no other rank to wait for
        self._pending: Callable[[], Ints] | None = None  # waits for the exchange that has begun
        self._agreed_end = first_batch
        self._last_u, self._has_ended = -1, False  # the micro batch of the last call of `ends_before`, and its result
        self._failure: Exception | None = None

    def ends_before(self, u: int, make_batches_until: Callable[[int], int]) -> bool:
        """True if the main phase of the epoch, until a shard runs out of samples, ends before micro batch ``u`` (collective).

        Args:
            u: The next micro batch.
            make_batches_until: Makes micro batches ahead up to a given one, if it can; returns the first one that is not made.
        """
        if u > self._last_u:
            self._has_ended, self._last_u = self._is_end(u, make_batches_until), u
        return self._has_ended and u == self._last_u

    def _is_end(self, u: int, make_batches_until: Callable[[int], int]) -> bool:
        if u == self._agreed_end:
            wait_for_ends, self._pending = self._begin_exchange(u, make_batches_until), None
            num_made = int(wait_for_ends().min())
            if num_made < 0:
                failure, self._failure = self._failure, None
                raise failure or other_rank_error(wrong_rows=num_made == _WRONG_ROWS)
            self._agreed_end = num_made // self._micro_batches_per_step * self._micro_batches_per_step
            if self._agreed_end <= u:
                return True
        if self._num_steps_ahead > 1 and u + self._micro_batches_per_step >= self._agreed_end:
            self._begin_exchange(u, make_batches_until)
        return False

    def _begin_exchange(self, u: int, make_batches_until: Callable[[int], int]) -> Callable[[], Ints]:
        if self._pending is None:
            try:
                num_made = make_batches_until(u + self._num_steps_ahead * self._micro_batches_per_step)
            except Exception as error:
                self._failure, num_made = error, _WRONG_ROWS if isinstance(error, DataStateError) else _READ_FAILED
            self._pending = self._ranks.at_position(u).begin_gather_ints([num_made])
        return self._pending
