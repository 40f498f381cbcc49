"""`Ends`: finds where epochs end, from counts, by reading, and from what the other ranks have read.

If only reading can find the end, shards are read ahead in rounds of a bounded size:

    round 1    each shard is read up to m samples ahead   some have m, some end before   these samples are redistributed
    round 2    from the end of round 1                    ...                            until no shard has any

So no call reads more than the samples of a few steps, however much is left. A round is a function of the table alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rescale_data.engine.agreement import Agreement, together
from rescale_data.engine.cursor import Cursor
from rescale_data.engine.leg import Leg
from rescale_data.engine.recipe import FIRST_SLOT, SAMPLES
from rescale_data.engine.runner import Runner
from rescale_data.engine.setup import Setup
from rescale_data.errors import DataStateError
from rescale_data.layout.layout import block_of, owners
from rescale_data.state import Ints

STEPS_OF_A_ROUND = 4
_UNKNOWN = -1


class Ends:
    """Finds the ends of epochs after a load. When a call fails, the ends found so far are kept, and it can be repeated.

    Each rank reads a block of logical shards. A load with ``delivered=`` uses the layout of the earlier run: the ranks of that
    layout served the samples, and the current ranks read them.

    Args:
        runner: Draws samples to count them, apart from the feed.

    Attributes:
        owned: The shards that this rank reads.
        owners: ``int64[N]``, the rank that reads each shard.
        unproven: The reason why the proof of an epoch failed; empty if none failed.
    """

    def __init__(self, setup: Setup, runner: Runner) -> None:
        self.setup, self.runner = setup, runner
        self.schema, self.layout, self.ranks = setup.schema, setup.layout, setup.ranks
        size = self.ranks.world_size, self.layout.num_logical_shards
        self.owned, self.owners = np.array(block_of(self.ranks.rank, *size), dtype=np.int64), owners(*size)
        self.unproven = ""
        self._agreement: tuple[Leg | None, Agreement | None] = None, None
        self._epoch = -1  # the epoch that the next three describe
        self._table: Ints | None = None  # with all rows, of a `look` that has not ended
        self._ahead = 0
        self._ends = np.empty((0, 0), dtype=np.int64)  # for each shard: its samples at the end, and its slots after it

    def left(self, table: Ints) -> Ints | None:
        """Return the samples that each shard has left of its epoch; `None` if it has no end, or only reading can find it."""
        end = None if self.setup.recipe.repeat else self.schema.epoch_end(table)
        return None if end is None else end[0]

    def is_over(self, at: Cursor, make_until: Callable[[int], int]) -> bool:
        """True if the segment is over before the next micro batch (collective if only reading can find its end).

        Args:
            make_until: Makes micro batches ahead up to a given one, if it can, and returns the first one that is not made.
        """
        leg = at.leg
        if leg is None or leg.stop is not None or self.setup.recipe.repeat:
            return leg is not None and leg.stop == at.u
        of, agreement = self._agreement
        if of is not leg or agreement is None:
            agreement = Agreement(self.ranks, at.u, self.layout.gradient_accumulation_steps)
            self._agreement = leg, agreement
        return agreement.end(at.u, make_until)

    def whole(self, at: Cursor) -> Ints:
        """Return the table with all rows right (collective, as part of saving a state)."""
        return self.ranks.saving.merge(at.positions, at.owners)

    def move(self, at: Cursor, reached: Ints) -> Ints:
        """Return the table with the shards of this rank moved on, to `reached` samples each."""
        table = at.positions.copy()
        self.runner.load(table, self.schema.histories)
        for shard in self.owned.tolist():
            self.runner.skip(shard, int(reached[shard] - table[shard, SAMPLES]))
        table[self.owned] = self.runner.table[self.owned]
        return table

    def look(self, at: Cursor) -> tuple[Ints, Ints]:
        """Return the table with all rows right, and the number of samples of each shard to redistribute next, ``int64[N]``.

        The numbers add up to less than a global batch only if no shard has more samples.

        Collective over the dp ranks; each reads the shards that it owns. If one rank fails, for example at its disk, all ranks
        fail. Called again, all ranks continue where they were.
        """
        self._go_to_epoch(at)
        if self._table is None:
            self._table = self.ranks.merge(at.positions, at.owners)
        table = self._table
        self.runner.load(table, self.schema.histories)
        enough, seen = STEPS_OF_A_ROUND * self.layout.global_batch_size, 0
        self._ahead = self._ahead or -(-enough // len(table))
        while True:
            ahead, ends = self._ahead, self._read(table[:, SAMPLES], seen, self._ahead)
            left = np.where(ends == _UNKNOWN, ahead, np.minimum(ends - table[:, SAMPLES], ahead))
            going = int((left == ahead).sum())
            if left.sum() >= enough or not going:
                self._table, self._ahead = None, 0
                return table, left
            seen, self._ahead = ahead, max(2 * ahead, -(-enough // going))

    def next_epoch(self, at: Cursor) -> Ints:
        """Return the slots of all shards at the beginning of the next epoch (collective if only reading can find them)."""
        end = self.schema.epoch_end(at.positions)
        if end is not None:
            return end[1]
        self._go_to_epoch(at)
        if (self._ends[:, 0] == _UNKNOWN).any():  # these ends were found before a load
            self.look(at)
        return self._ends[:, 1:]

    def prove(self, at: Cursor, dropped: Ints) -> None:
        """Raise ``DataStateError`` on all ranks unless each row of the epoch was delivered once or dropped.

        The proof covers all segments of the run.
        """
        if not self.setup.recipe.verify:
            return
        self.runner.load(at.positions, self.schema.histories)
        mine = np.flatnonzero(at.owners == self.ranks.rank).tolist()
        try:
            together(self.ranks, lambda: [self.runner.prove(shard, int(dropped[shard])) for shard in mine])
        except DataStateError as error:
            self.unproven = f"Epoch {at.clock.epoch} does not end as it should. {error}"
            raise DataStateError(self.unproven) from None
        self.ranks.info(
            "Epoch %d: every row was delivered once, or is of the %d samples that are dropped, across all legs of the run.",
            at.clock.epoch,
            int(dropped.sum()),
        )

    def _go_to_epoch(self, at: Cursor) -> None:
        if self._epoch != at.clock.epoch:
            n, columns = at.table.shape
            self._ends = np.full((n, 1 + columns - FIRST_SLOT), _UNKNOWN, dtype=np.int64)
            self._table, self._ahead, self._epoch = None, 0, at.clock.epoch

    def _read(self, samples: Ints, seen: int, ahead: int) -> Ints:
        """Return the samples of each shard at its end; `_UNKNOWN` if its end is not less than ``ahead`` samples away.

        Args:
            seen: The number of samples already read ahead, of each shard whose end is not known yet.
        """

        def find() -> Ints:
            ends = self._ends.copy()
            for shard in self.owned.tolist():
                if ends[shard, 0] == _UNKNOWN:
                    count, slots = self.runner.look_ahead(shard, ahead - seen)
                    if slots is not None:
                        ends[shard] = [samples[shard] + seen + count, *slots]
            return ends

        ranks = self.ranks.at(int(samples.sum()), ahead)
        self._ends = ranks.merge(together(ranks, find), self.owners)
        return self._ends[:, 0]
