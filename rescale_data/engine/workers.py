"""Inside a worker process: it makes every K-th micro batch of a segment, and packs some of them into each message.

A message carries, with each micro batch, the rows of the table that it advanced; of a mixture, whose rows are long, the slots.
So the trainer's process knows exactly where the batches it has received leave every shard, and workers are never asked for
state.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rescale_data.engine.board import Board
from rescale_data.engine.feed import InProcess
from rescale_data.engine.leg import Leg
from rescale_data.engine.message import MOST_PARTS, Message, Packed, Slabs
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.recipe import Recipe
from rescale_data.engine.runner import Collate, Exhausted, Runner
from rescale_data.engine.schema import Schema
from rescale_data.engine.watch import Watch, describe
from rescale_data.errors import picklable
from rescale_data.sources.counts import MADE, MAKE_SECONDS, counts
from rescale_data.state import Ints

_MESSAGE_BYTES = 4 * 2**20  # enough to make the cost of a message small, little enough to keep few in flight
_MESSAGE_SECONDS = 0.05


@dataclass(frozen=True)
class Begin:
    """The command to make the micro batches of a segment: a leg from a micro batch on.

    Args:
        number: Of the segment, in the life of a pool.
        first: The first micro batch; worker i makes ``first + i``, ``first + i + K``, ...
        num_slabs: Slabs that a worker uses in turn.
        shards: The shards that the rank may serve in this leg.
        rows: The row of the table of each.
        num_logical_shards: N.
    """

    number: int
    leg: Leg
    first: int
    num_slabs: int
    shards: slice
    rows: Ints
    num_logical_shards: int

    @classmethod
    def of(cls, number: int, leg: Leg, table: Ints, first: int, num_slabs: int) -> Begin:
        owned = leg.layout.owned(leg.rank) if leg.deal is None else range(len(table))
        shards = slice(owned.start, owned.stop)
        return cls(number, leg.for_a_worker(), first, num_slabs, shards, table[shards].copy(), len(table))

    @property
    def table(self) -> Ints:
        """The table, in which the rows of other ranks are zero."""
        table = np.zeros((self.num_logical_shards, self.rows.shape[1]), dtype=np.int64)
        table[self.shards] = self.rows
        return table


class Worker:
    """Makes micro batches in a worker process, as the trainer's process would."""

    def __init__(self, recipe: Recipe, collate: Collate | None, slow_after: float) -> None:
        self.recipe, self._collate, self._slow_after = recipe, collate, slow_after
        self._feed: InProcess | None = None
        self._told: Ints | None = None  # of a mixture, whose rows are long: the table as the trainer's process has it

    def attach(self, number: int, board: Board) -> None:
        """Become a worker, which writes on the board what it does where that takes long."""
        self._number, self._board = number, board
        self.watch = Watch(self._slow_after / 2, lambda _, frame: board.write(number, describe(frame)))

    def messages(self, begin: Begin, await_slab: Callable[[], object]) -> Iterator[Message]:
        """Make the micro batches of a segment, until another one is wanted; an error, or `Exhausted`, is the last value.

        The first messages are small, so that the first batch does not wait for others.

        Args:
            await_slab: Returns when the next slab is free.
        """
        slabs, slab, most = Slabs(), 0, 1
        values = self._values(begin)
        while True:
            await_slab()
            started, packed, num_bytes = time.perf_counter(), list[Packed](), 0
            for value in islice(values, most):
                packed.append(value)
                num_bytes += value.num_bytes
                if num_bytes >= _MESSAGE_BYTES or time.perf_counter() - started >= _MESSAGE_SECONDS:
                    break
            if not packed or not self._is_wanted(begin):
                return
            message = slabs.pack(slab, packed)
            counts().add(MAKE_SECONDS, time.perf_counter() - started)
            yield message
            slab, most = (slab + 1) % begin.num_slabs, min(2 * most, MOST_PARTS)

    def _is_wanted(self, begin: Begin) -> bool:
        return self._board.wanted == begin.number

    def _values(self, begin: Begin) -> Iterator[Packed]:
        stop = sys.maxsize if begin.leg.stop is None else begin.leg.stop
        try:
            feed = self._begin(begin)
            for u in range(begin.first + self._number, stop, begin.leg.layout.workers):
                if not self._is_wanted(begin):
                    return
                packed = Packed(self._make(feed, u))
                counts().add(MADE, 1)
                yield packed
        except Exhausted as error:
            yield Packed(error)
        except Exception as error:
            told = picklable(error)
            told.add_note(f"In worker process {self._number}:\n{traceback.format_exc()}")
            yield Packed(told)

    def _begin(self, begin: Begin) -> InProcess:
        self._board.write(self._number, "")
        counts().values[MADE] = 0
        feed = self._feed
        if feed is None:
            schema = Schema(self.recipe.build(0))  # as in the trainer's process
            feed = self._feed = InProcess(Runner(self.recipe, schema), self._collate)
        feed.begin(begin.leg, begin.table, 0)
        # In a deal another worker may have changed a slot that this one changes back.
        tells_slots = begin.leg.deal is None and feed.runner.schema.is_mixture
        self._told = begin.table if tells_slots else None
        return feed

    def _make(self, feed: InProcess, u: int) -> MicroBatch:
        watch = self.watch
        watch.began = time.perf_counter()
        try:
            made = feed.make(u)
        finally:
            watch.began = None
        if watch.said:
            watch.said = False
            self._board.write(self._number, "")
        return made if self._told is None else made.since(self._told)
