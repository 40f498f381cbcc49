"""How ranks find, ahead of time, the step at which the first shard of any of them ends.

Each rank makes micro batches ahead and says how many it is sure of; the smallest of these counts is safe for all. The
next exchange begins one step before that is used up, so that no step waits for the other ranks, only for three requests to
the store.

A rank whose proof of an epoch fails ahead says so in place of a count: all ranks raise, before the same micro batch.
"""

from __future__ import annotations

from collections.abc import Callable

from rescale_data.engine.ranks import Ranks
from rescale_data.errors import DataStateError

_FAILED = -1


class Agreement:
    """How far every rank can go.

    Args:
        first: The next micro batch.
        steps_of: A, micro batches of a step.
    """

    def __init__(self, ranks: Ranks, first: int, micro_batches_per_step: int) -> None:
        self._ranks, self._a = ranks, micro_batches_per_step
        self._pending: Callable[[], int] | None = None
        self._sure = first
        self._failure = DataStateError("Another dp rank found that its rows are not those of the epoch, and says more.")

    def end(self, u: int, make_until: Callable[[int], int]) -> bool:
        """Whether the main phase ends before micro batch u (collective, in step with the other ranks).

        Args:
            u: The next micro batch.
            make_until: Makes micro batches ahead up to a given one, if it can, and returns the first that is not made.
        """
        if u == self._sure:
            self._exchange(u, make_until)
            sure = self._wait()
            if sure == _FAILED:
                raise self._failure
            self._sure = sure // self._a * self._a
            if self._sure <= u:
                return True
        if u + self._a >= self._sure:
            self._exchange(u, make_until)
        return False

    def _exchange(self, u: int, make_until: Callable[[int], int]) -> None:
        if self._pending is None:
            try:
                sure = make_until(u + 2 * self._a)
            except DataStateError as error:
                self._failure, sure = error, _FAILED
            self._pending = self._ranks.least(sure)

    def _wait(self) -> int:
        pending, self._pending = self._pending, None
        return pending() if pending is not None else 0
