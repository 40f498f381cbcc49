"""What the shards still have at the end of an epoch, where only reading can tell: looked at a bounded stretch at a time.

    round 1    every shard looks up to m samples ahead    some have m, some end before    those samples are dealt
    round 2    from where that left them                  ...                             until no shard has any

So no call reads more than a few steps' samples, whatever is left, and a round is a function of the table alone.
"""

from __future__ import annotations

import numpy as np

from rescale_data.engine.agreement import together
from rescale_data.engine.position import Position
from rescale_data.engine.recipe import FIRST_SLOT, SAMPLES, Histories
from rescale_data.state import Ints

STEPS_OF_A_ROUND = 4
_UNKNOWN = -1


class Rest:
    """The rest of one epoch.

    Args:
        at: A position in it, whose runner draws samples to count them.
    """

    def __init__(self, at: Position) -> None:
        self._ranks, self._runner, self._global_batch_size = at.ranks, at.runner, at.layout.global_batch_size
        self._owned, self._owners = at.owned.tolist(), at.owners
        self._table: Ints | None = None  # whole, of a look that has not ended
        self._ahead = 0
        self._ends = np.full((len(at.table), 1 + at.table.shape[1] - FIRST_SLOT), _UNKNOWN, dtype=np.int64)

    def look(self, table: Ints, owners: Ints, histories: Histories) -> tuple[Ints, Ints]:
        """The table with all rows, and samples of each shard to deal next: ``int64[N]``, less than a global batch in all
        where no shard has more.

        Collective over the dp ranks; each reads the shards that it owns. Where one of them fails, say for its disk, all do, and
        asked again all go on where they were.

        Args:
            owners: ``int64[N]``, the rank that has each row of the table right.
        """
        if self._table is None:
            self._table = self._ranks.merge(table, owners)
        table = self._table
        self._runner.load(table, histories)
        enough, seen = STEPS_OF_A_ROUND * self._global_batch_size, 0
        self._ahead = self._ahead or -(-enough // len(table))
        while True:
            ahead = self._ahead
            self._read(table[:, SAMPLES], seen, ahead)
            left = np.where(
                self._ends[:, 0] == _UNKNOWN, ahead, np.minimum(self._ends[:, 0] - table[:, SAMPLES], ahead)
            )
            going = int((left == ahead).sum())
            if left.sum() >= enough or not going:
                self._table, self._ahead = None, 0
                return table, left
            seen, self._ahead = ahead, max(2 * ahead, -(-enough // going))

    def next_epoch(self, table: Ints, owners: Ints, histories: Histories) -> Ints:
        """The slots at which the next epoch begins, of all shards (collective): asked when `look` has seen the last sample."""
        if (self._ends[:, 0] == _UNKNOWN).any():  # seen before a load
            self.look(table, owners, histories)
        return self._ends[:, 1:]

    def _read(self, samples: Ints, seen: int, ahead: int) -> None:
        """Find the ends that are less than ``ahead`` samples away; ``seen`` have been read of the shards that may have more."""

        def find() -> Ints:
            ends = self._ends.copy()
            for shard in self._owned:
                if ends[shard, 0] == _UNKNOWN:
                    count, slots = self._runner.look_ahead(shard, ahead - seen)
                    if slots is not None:
                        ends[shard] = [samples[shard] + seen + count, *slots]
            return ends

        ranks = self._ranks.at(int(samples.sum()), ahead)
        self._ends = ranks.merge(together(ranks, find), self._owners)
