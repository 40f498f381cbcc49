"""The loaders of all ranks of a topology, called together, and what their trainers see."""

import copy
import io
import pickle
from typing import Any, NamedTuple

import torch

import rescale_data as rd
from tests.histories.books import Books, Failure, Reference, difference, require
from tests.histories.crew import Crew
from tests.histories.plans import split

RETRIES = 6


class Top(NamedTuple):
    """W, b, O and K."""

    w: int
    b: int
    o: int
    k: int = 0


def passes(error: Exception) -> bool:
    """Whether a trainer may ask again."""
    return isinstance(error, OSError) or "the next call goes on" in str(error)


def again(fn: Any) -> Any:
    for _ in range(RETRIES):
        try:
            return fn()
        except (OSError, RuntimeError) as error:
            if not passes(error):
                raise
    raise Failure("an error that does not pass")


class Seat:
    """One rank's trainer, with a loader."""

    def __init__(self, loader: rd.DataLoader) -> None:
        self.loader = loader
        self._batches: Any = None

    @property
    def stream(self) -> Any:
        return self.loader._stream

    @property
    def ended(self) -> bool:
        return self.loader._stream.epoch_ended

    @property
    def data_epoch(self) -> int:
        return self.stream.clock.epoch

    def iterate(self) -> None:
        again(self._iter)

    def _iter(self) -> None:
        self._batches = iter(self.loader)

    def next(self) -> Any:
        """``(batch, micro batch, epoch, has_remainder)`` or `None`; and ``(ended before, loader.epoch before, and after)``."""
        self.stream.taken, ended, epoch = [], self.ended, self.loader.epoch
        batch = again(lambda: next(self._batches, None))
        found = None if batch is None else (batch, *self.stream.taken[0])
        return found, (ended, epoch, self.loader.epoch)


class Seats:
    """All ranks."""

    def __init__(self, make: Any, top: Top, sit: Any = None, *, steps: bool = False) -> None:
        self.make, self.top, self.crew = make, top, Crew(top.w)
        self.seats: list[Seat] = self.crew.all(sit or (lambda _: Seat(make(top))))
        self.begun, self.steps = False, steps
        self.left: int | None = None  # batches that were promised until the epoch's end

    @property
    def lead(self) -> Seat:
        return self.seats[0]

    def all(self, fn: Any) -> list[Any]:
        return self.crew.all(lambda i: fn(self.seats[i]))

    def reference(self, histories: Any = None) -> Reference:
        """Return what each shard yields; `histories` of the sources are those that a state keeps, without others."""
        kept = self.lead.stream.schema.histories
        return Reference(self.lead.stream.setup.recipe, dict(kept) if histories is None else copy.deepcopy(histories))

    def same(self, fn: Any, what: str) -> Any:
        found = self.all(fn)
        require(all(value == found[0] for value in found), f"the ranks differ in {what}: {found}")
        return found[0]

    def close(self) -> None:
        self.all(lambda seat: seat.loader.close())

    # States

    def state(self, form: str = "plain") -> dict[str, Any]:
        if form == "local":
            states = self.all(lambda seat: rd.whole_state(seat.loader.local_state_dict()))
        else:
            states = self.all(lambda seat: seat.loader.state_dict())
        for other in states[1:]:
            found = difference(states[0], other)
            require(not found, f"states of ranks differ in {found}")
        state = states[-1]
        if form == "pickle":
            return pickle.loads(pickle.dumps(state))
        if form == "torch":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            return torch.load(file, weights_only=True)
        return state

    def load(self, state: dict[str, Any]) -> None:
        self.all(lambda seat: seat.loader.load_state_dict(state))
        self.begun, self.left = False, None

    # Batches

    def mark(self) -> tuple[int, int]:
        return self.lead.data_epoch, self.lead.stream.clock.dropped_samples

    def tally(self, books: Books, before: tuple[int, int], *, moved: bool = False) -> None:
        """What was dropped in one call is of the epoch that ended in it; ``moved``: the loader went on to the next then."""
        epoch, dropped = self.mark()
        books.dropped[before[0] if moved else epoch] += dropped - before[1]
        if dropped > before[1] and (epoch > before[0] + 1 or (epoch > before[0] and self.steps)):
            books.counts = False  # it may be of either

    def iterate(self, books: Books) -> None:
        before = self.mark()
        self.all(lambda seat: seat.iterate())
        self.begun = True
        self.tally(books, before)

    def next(self, books: Books) -> Any:
        """A micro batch of each rank; `None` at an iterator's end."""
        if not self.begun:
            self.iterate(books)
        before = self.mark()
        found, epochs = zip(*self.all(lambda seat: seat.next()), strict=True)
        require(len({each is None for each in found}) == 1, "R3: the ranks end at different micro batches")
        require(len(set(epochs)) == 1, f"the ranks differ in epoch: {epochs}")
        ended, epoch, now = epochs[0]
        if found[0] is None:
            require(self.left in (None, 0), f"{self.left} batches were promised, and the epoch is over")
            require(now == epoch + 1, f"loader.epoch goes from {epoch} to {now} at an epoch's end")
            self.begun, self.left = False, None
            self.tally(books, before, moved=True)
            return None
        require(not ended, "a batch after the last of an epoch")
        require(now == epoch, f"loader.epoch goes from {epoch} to {now} within an epoch")
        self.left = None if self.left is None else self.left - 1
        require(self.left is None or self.left >= 0, "more batches than were promised")
        self._record(books, found)
        self.tally(books, before)
        return found

    def _record(self, books: Books, found: Any) -> None:
        require(len({epoch for _, _, epoch, _ in found}) == 1, "the ranks are in different epochs")
        if len(books.open) != self.top.w:
            books.open = [[] for _ in range(self.top.w)]
        for mine, seat, (batch, micro_batch, epoch, _) in zip(books.open, self.seats, found, strict=True):
            samples, shards, num_real = split(batch, self.top.b), micro_batch.shards, micro_batch.num_real
            require(len(samples) == len(shards) == self.top.b, "size of a batch")
            require(seat.loader.last_batch_samples == num_real, "last_batch_samples")
            is_real = [i < num_real for i in range(self.top.b)]
            if "valid" in batch:
                require(batch["valid"].tolist() == is_real, "valid")
            for sample, shard, real in zip(samples, shards, is_real, strict=True):
                if real:
                    books.delivered[epoch, shard].append(sample)
                mine.append((shard, sample, real))
        if len(books.open[0]) == self.top.o // self.top.w:
            rows = [row for rank in books.open for row in rank]
            books.batches.append((rows, any(in_remainder for *_, in_remainder in found)))
            books.open = [[] for _ in range(self.top.w)]

    def take(self, num: int, books: Books) -> None:
        for _ in range(num):
            empty = 0
            while self.next(books) is None:
                empty += 1
                require(empty < 3, "three empty iterators")

    # Other ranks

    def rescale(self, top: Top, make: Any, order: list[int], state: dict[str, Any], delivered: int = 0) -> "Seats":
        """Go on from a state with others: ``order`` has the old rank of each new one, -1 for one that is new."""
        self.all(lambda seat: self.seats.index(seat) in order or seat.loader.close())
        changed = {"micro_batch_size": top.b, "num_workers": top.k, "prefetch": None}

        def sit(rank: int) -> Seat:
            if order[rank] < 0:
                seat = Seat(make(top))
                seat.loader.load_state_dict(state, delivered)
            else:
                seat = self.seats[order[rank]]
                seat.loader.reopen(state, delivered, **changed)
            return seat

        return Seats(make, top, sit, steps=self.steps)
