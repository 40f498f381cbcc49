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
        """Let the feed begin with a micro batch."""
        self.feed.start(leg, table, u)
        self.is_started = True

    def make(self, count: int, ranks: Ranks) -> int:
        """Have so many in hand, if no shard ends before; how many there are."""
        while len(self.made) < count and (one := self._make_one(ranks)) is not None:
            self.made.append(one)
        return len(self.made)

    def take(self, ranks: Ranks) -> MicroBatch | None:
        """The oldest, made now where there is none; `None` where the feed has not begun, or a shard has ended."""
        if self.made:
            return self.made.popleft()
        return self._make_one(ranks) if self.is_started else None

    def _make_one(self, ranks: Ranks) -> MicroBatch | None:
        if self._is_exhausted:
            return None
        try:
            with ranks.reading():
                return self.feed.take()
        except Exhausted:
            self._is_exhausted = True
            return None
        except BaseException:
            self.forget()  # the runner is past what was taken: whoever goes on begins from the table
            raise

    def forget(self) -> None:
        """No more is made until `start`."""
        self.feed.stop()
        self.made = deque()
        self.is_started = self._is_exhausted = False

    def progress(self) -> dict[str, float]:
        made = self.feed.progress()
        return {**made, "batches_ready": made.get("batches_ready", 0.0) + len(self.made)}
