"""`EpochEndFinder`: finds the ends of epochs by arithmetic or by reading ahead, jointly with the other ranks.

If only reading can find the end, shards are read ahead in rounds of a bounded size:

    round 1    each shard is read up to m samples ahead   some have m, some end before   these samples are redistributed
    round 2    from the end of round 1                    ...                            until no shard has any

So no call reads more than the samples of a few steps, however much is left. A round is a function of the table alone. Worker
processes draw its samples, if there are any.

The main phase before them ends at the step at which the first logical shard of any rank runs out. All ranks agree on that step
ahead of time. Each rank makes micro batches ahead, and sends how many it is sure of. The smallest of these counts is safe for
all ranks. The next exchange begins one step before that count is used up, so that no step waits for the other ranks.

A rank may fail ahead, in reading or in the proof of an epoch. Then it sends the failure in place of a count, and all ranks
raise before the same micro batch. If the error was temporary, all ranks may ask again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ranks.ranks import Ranks, call_on_all_ranks, other_rank_error
from rescale_data.engine.recipe import FIRST_SLOT, SAMPLES
from rescale_data.engine.segment import EpochSegment
from rescale_data.engine.setup import LoaderSetup
from rescale_data.errors import DataStateError
from rescale_data.layout.layout import block_of, owner_ranks
from rescale_data.state import Ints

STEPS_PER_REMAINDER_ROUND = 4
_UNKNOWN_END = -1
_READ_FAILED, _WRONG_ROWS = -1, -2


class EpochEndFinder:
    """Finds the ends of epochs of a run, by arithmetic or by reading ahead jointly with the other ranks.

    A load makes a new object. A call that fails keeps the ends found so far, and can be repeated.

    Each rank reads a block of logical shards. For a load with ``delivered=`` the layout is the one of the state: the ranks of
    that layout served the samples, and the current ranks read them.

    Attributes:
        owned: The shards that this rank reads.
        owners: ``int64[N]``, the rank that reads each shard.
        verify_error: The reason why the proof of an epoch failed; empty if none failed.
    """

    def __init__(self, setup: LoaderSetup) -> None:
        self.setup, self.runner = setup, setup.runner
        self.schema, self.layout, self.ranks = setup.schema, setup.layout, setup.ranks
        topology = self.ranks.world_size, self.layout.num_logical_shards
        self.owned, self.owners = np.array(block_of(self.ranks.rank, *topology), dtype=np.int64), owner_ranks(*topology)
        self.verify_error = ""
        self._agreement: _EndAgreement | None = None
        self._searched_place = -1, -1  # the epoch and the samples of the run that the next four describe
        self._round_table: Ints | None = None  # with all rows, of a round
        self._num_samples_ahead = 0  # samples of each shard that are read ahead in it
        self._round_plan: tuple[Ints, Ints] | None = None  # the planned round: Ctrl-C may come before the caller has it
        self._epoch_ends = np.empty((0, 0), dtype=np.int64)  # of each shard: samples at the end, and slots after it

    def ranks_at(self, cursor: Cursor, u: int) -> Ranks:
        """Return the ranks for exchanges of a call at a cursor that goes to micro batch ``u``, which mix with no others."""
        clock = cursor.clock_now(self.layout)
        return self.ranks.at_position_in_run(clock.epoch, clock.samples, u)

    def samples_left_in_epoch(self, table: Ints) -> Ints | None:
        """Return the samples left in the epoch of each shard, ``int64[N]``; `None` if endless, or known only by reading."""
        epoch_end = None if self.setup.recipe.repeat else self.schema.epoch_end(table)
        return None if epoch_end is None else epoch_end[0]

    def is_segment_over(self, cursor: Cursor, make_batches_until: Callable[[int], int]) -> bool:
        """True if no micro batch of the segment is left (collective if only reading can find the end of the segment).

        Args:
            make_batches_until: Makes micro batches ahead up to a given one, if it can; returns the first one that is not made.
        """
        segment = cursor.segment
        if segment is None or segment.stop is not None or self.setup.recipe.repeat:
            return segment is not None and segment.stop == cursor.u
        if self._agreement is None or self._agreement.segment is not segment:
            self._agreement = _EndAgreement(self.ranks, segment, cursor.u)
        return self._agreement.ends_before(cursor.u, make_batches_until)

    def table_after_skip(self, cursor: Cursor, num_delivered: Ints) -> Ints:
        """Return the table after this rank has advanced each of its shards to the given count of delivered samples."""
        table = cursor.positions.copy()
        self.runner.load(table, self.schema.histories)
        for shard in self.owned.tolist():
            self.runner.skip(shard, int(num_delivered[shard] - table[shard, SAMPLES]))
        table[self.owned] = self.runner.table[self.owned]
        return table

    def plan_remainder_round(self, cursor: Cursor) -> tuple[Ints, Ints]:
        """Read ahead to plan the next round of a remainder; return the whole table and each shard's samples to redistribute.

        The numbers add up to less than a global batch only if no shard has more samples.

        Collective over the dp ranks; each reads the shards that it owns. If one rank fails, for example at its disk, all ranks
        fail, and begin anew where this is called again. A rank that Ctrl-C has interrupted continues where it was.
        """
        self._start_epoch_search(cursor)
        if self._round_plan is not None:
            return self._round_plan
        if self._round_table is None:
            self._round_table = self.ranks_at(cursor, cursor.u).merge(cursor.positions, cursor.owners)
        table = self._round_table
        self.runner.load(table, self.schema.histories)
        min_samples, samples_read = STEPS_PER_REMAINDER_ROUND * self.layout.global_batch_size, 0
        self._num_samples_ahead = self._num_samples_ahead or -(-min_samples // len(table))
        while True:
            num_ahead = self._num_samples_ahead
            end_samples = self._read_ahead(table[:, SAMPLES], samples_read, num_ahead)
            samples_left = np.where(
                end_samples == _UNKNOWN_END, num_ahead, np.minimum(end_samples - table[:, SAMPLES], num_ahead)
            )
            num_unfinished = int((samples_left == num_ahead).sum())
            if samples_left.sum() >= min_samples or not num_unfinished:
                self._round_plan = table, samples_left
                return self._round_plan
            samples_read, self._num_samples_ahead = num_ahead, max(2 * num_ahead, -(-min_samples // num_unfinished))

    def next_epoch(self, cursor: Cursor) -> Ints:
        """Return the positions of all shards at the start of the next epoch (collective if only reading can find them)."""
        epoch_end = self.schema.epoch_end(cursor.positions)
        if epoch_end is not None:
            return epoch_end[1]
        self._start_epoch_search(cursor)
        if (self._epoch_ends[:, 0] == _UNKNOWN_END).any():  # these ends were found before a load
            self.plan_remainder_round(cursor)
        return self._epoch_ends[:, 1:]

    def verify_epoch(self, cursor: Cursor, dropped: Ints) -> None:
        """Raise ``DataStateError`` on all ranks unless every row of the epoch was delivered once or dropped (collective).

        The proof covers all segments of the run.
        """
        if not self.setup.recipe.verify:
            return
        self.runner.load(cursor.positions, self.schema.histories)
        owned = np.flatnonzero(cursor.owners == self.ranks.rank).tolist()
        ranks = self.ranks_at(cursor, cursor.u)
        try:
            call_on_all_ranks(ranks, lambda: [self.runner.verify(shard, int(dropped[shard])) for shard in owned])
        except DataStateError as error:
            self.verify_error = f"Epoch {cursor.clock.epoch} does not end as it should. {error}"
            raise DataStateError(self.verify_error) from None
        self.ranks.info(
            "Epoch %d: every row was delivered once, or is of the %d samples that are dropped, across all segments of the run.",
            cursor.clock.epoch,
            int(dropped.sum()),
        )

    def _start_epoch_search(self, cursor: Cursor) -> None:
        place = cursor.clock.epoch, cursor.clock_now(self.layout).samples
        if self._searched_place[0] != place[0]:
            n, num_columns = cursor.table.shape
            self._epoch_ends = np.full((n, 1 + num_columns - FIRST_SLOT), _UNKNOWN_END, dtype=np.int64)
        if self._searched_place != place:
            self._round_table, self._num_samples_ahead, self._round_plan, self._searched_place = None, 0, None, place

    def _read_ahead(self, sample_counts: Ints, samples_read: int, num_ahead: int) -> Ints:
        """Read shards up to ``num_ahead`` samples ahead; return the sample count of each at its epoch end, else `_UNKNOWN_END`.

        Args:
            samples_read: The number of samples already read ahead, of each shard whose end is not known yet.
        """

        def find() -> Ints:
            epoch_ends = self._epoch_ends.copy()
            shards = self.owned[epoch_ends[self.owned, 0] == _UNKNOWN_END].tolist()
            results = self.runner.look_ahead_in(shards, num_ahead - samples_read)
            for shard, (num_drawn, next_slots) in zip(shards, results, strict=True):
                if next_slots is not None:
                    epoch_ends[shard] = [sample_counts[shard] + samples_read + num_drawn, *next_slots]
            return epoch_ends

        ranks = self.ranks.at_position_in_run(int(sample_counts.sum()), num_ahead)
        try:
            self._epoch_ends = ranks.merge(call_on_all_ranks(ranks, find), self.owners)
        except Exception:  # an exchange may have failed on some ranks alone: all plan the round from its beginning
            self._round_table, self._num_samples_ahead = None, 0
            raise
        return self._epoch_ends[:, 0]


class _EndAgreement:
    """Finds the number of micro batches that all ranks can make before a shard of some rank ends, ahead of time.

    Args:
        segment: The main phase of an epoch.
        first_batch: The next micro batch.
    """

    def __init__(self, ranks: Ranks, segment: EpochSegment, first_batch: int) -> None:
        self.segment, self._ranks = segment, ranks
        self._micro_batches_per_step = segment.layout.gradient_accumulation_steps
        self._num_steps_ahead = 1 if ranks.world_size == 1 else 2  # made ahead: 1 if there is no other rank to wait for
        self._pending: Callable[[], Ints] | None = None  # waits for the exchange that has begun
        self._agreed_end, self._has_ended = first_batch, False  # True if the main phase ends there
        self._failure: Exception | None = None

    def ends_before(self, u: int, make_batches_until: Callable[[int], int]) -> bool:
        """True if the main phase of the epoch, until a shard runs out of samples, ends before micro batch ``u`` (collective).

        Args:
            u: The next micro batch.
            make_batches_until: Makes micro batches ahead up to a given one, if it can; returns the first one that is not made.
        """
        if u == self._agreed_end and not self._has_ended:
            wait_for_ends, self._pending = self._begin_exchange(u, make_batches_until), None
            num_made = int(wait_for_ends().min())
            if num_made < 0:
                failure, self._failure = self._failure, None
                raise failure or other_rank_error(wrong_rows=num_made == _WRONG_ROWS)
            step_end = num_made // self._micro_batches_per_step * self._micro_batches_per_step
            self._agreed_end, self._has_ended = max(u, step_end), step_end <= u
        if not self._has_ended and self._num_steps_ahead > 1 and u + self._micro_batches_per_step >= self._agreed_end:
            self._begin_exchange(u, make_batches_until)
        return self._has_ended and u == self._agreed_end

    def _begin_exchange(self, u: int, make_batches_until: Callable[[int], int]) -> Callable[[], Ints]:
        if self._pending is None:
            try:
                num_made = make_batches_until(u + self._num_steps_ahead * self._micro_batches_per_step)
            except Exception as error:
                self._failure, num_made = error, _WRONG_ROWS if isinstance(error, DataStateError) else _READ_FAILED
            self._pending = self._ranks.at_position_in_run(u).begin_gather_ints([num_made])
        return self._pending
