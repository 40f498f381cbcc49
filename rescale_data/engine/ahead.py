"""`Ahead`: micro batches that were made and not taken."""

from __future__ import annotations

from collections import deque

from rescale_data.engine.feed import Feed, Leg, MicroBatch
from rescale_data.engine.ranks import Ranks
from rescale_data.engine.runner import Exhausted
from rescale_data.state import Ints


class Ahead:
    """In hand, in order, what a feed has made of a leg.

    Attributes:
        made: Oldest first; whoever takes one takes it from here.
        is_started: Whether the feed has begun.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.made: deque[MicroBatch] = deque()
        self.is_started = self._is_exhausted = False

    def copy(self) -> Ahead:
        copied = object.__new__(Ahead)
        vars(copied).update(vars(self), made=self.made.copy())
        return copied

    def start(self, leg: Leg, table: Ints, u: int) -> None:
        """Let the feed begin with a micro batch, if it has not begun."""
        if not self.is_started:
            self.feed.start(leg, table, u)
            self.is_started = True

    def make(self, count: int, ranks: Ranks) -> int:
        """Have so many in hand, if no shard ends before; how many there are."""
        while not self._is_exhausted and len(self.made) < count:
            try:
                with ranks.reading():
                    self.made.append(self.feed.take())
            except Exhausted:
                self._is_exhausted = True
            except BaseException:
                self.forget()  # the runner is past what was taken: whoever goes on begins from the table
                raise
        return len(self.made)

    def forget(self) -> None:
        """No more is made until `start`."""
        self.feed.stop()
        self.made = deque()
        self.is_started = self._is_exhausted = False

    def progress(self) -> dict[str, float]:
        made = self.feed.progress()
        return {**made, "batches_ready": made.get("batches_ready", 0.0) + len(self.made)}
