"""The loaders of all ranks of a topology, called together, and what their trainers see."""

import copy
import io
import pickle
from typing import Any, NamedTuple

import torch

import rescale_data as rd
from tests.histories.books import Books, Failure, require, same_state
from tests.histories.crew import Block, Crew, run
from tests.histories.plans import as_samples, split

RETRIES = 6


class Top(NamedTuple):
    """W, b, O, K, and how many batches a `DeviceLoader` sends ahead (0: there is none)."""

    w: int
    b: int
    o: int
    k: int = 0
    ahead: int = 0


def passes(error: Exception) -> bool:
    """Whether a trainer may ask again."""
    return isinstance(error, OSError) or "asked again" in str(error)


def again(fn: Any) -> Any:
    for _ in range(RETRIES):
        try:
            return fn()
        except (OSError, RuntimeError) as error:
            if not passes(error):
                raise
    raise Failure("an error that does not pass")


class Seat:
    """One rank's trainer, with a loader, or a `DeviceLoader` made of it."""

    on_devices = False

    def __init__(self, loader: rd.DataLoader, ahead: int) -> None:
        if self.on_devices and ahead and loader.setup.ranks.world_size == 1 and loader.collate_fn is not as_samples:
            from rescale_data.xla import DeviceLoader

            loader = DeviceLoader(loader, read_ahead=ahead)
        self.loader = loader
        self._batches: Any = None

    @property
    def stream(self) -> Any:
        return self.loader.stream

    @property
    def ended(self) -> bool:
        return self.loader.reading.ended

    @property
    def data_epoch(self) -> int:
        return self.stream.clock.epoch

    def iterate(self) -> None:
        again(self._iter)

    def _iter(self) -> None:
        self._batches = iter(self.loader)

    def next(self) -> Any:
        """``(batch, micro batch, epoch, is_dealt)``, or `None`."""
        if self._batches is None:  # it has joined
            self.iterate()
        self.stream.taken = []
        batch = again(lambda: next(self._batches, None))
        return None if batch is None else (batch, *self.stream.taken[0])


class Seats:
    """All ranks."""

    def __init__(self, make: Any, top: Top, crew: Crew | None = None) -> None:
        self.top, self.crew = top, crew or Crew(top.w)
        self.seats: list[Seat] = self.crew.all(lambda _: Seat(make(top), top.ahead)) if make else []
        self.begun = self.steps = False
        self.left: int | None = None  # batches that were promised until the epoch's end

    @property
    def lead(self) -> Seat:
        return self.seats[0]

    def all(self, fn: Any) -> list[Any]:
        return self.crew.all(lambda i: fn(self.seats[i]))

    def same(self, fn: Any, what: str) -> Any:
        found = self.all(fn)
        require(all(value == found[0] for value in found), f"the ranks differ in {what}: {found}")
        return found[0]

    def close(self) -> None:
        self.all(lambda seat: seat.loader.close())
        self.crew.close()

    # States

    def state(self, form: str = "plain") -> dict[str, Any]:
        if form == "sharded":
            return _joined(self.all(lambda seat: seat.loader.sharded.state_dict()))
        states = self.all(lambda seat: seat.loader.state_dict())
        for other in states[1:]:
            difference = same_state(states[0], other)
            require(not difference, f"states of ranks differ in {difference}")
        state = states[-1]
        if form == "pickle":
            return pickle.loads(pickle.dumps(state))
        if form == "torch":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            return torch.load(file, weights_only=True)
        return state

    def load(self, state: dict[str, Any], form: str = "plain") -> None:
        def load(seat: Seat) -> None:
            mine = copy.deepcopy(state)
            if form == "sharded":
                into = seat.loader.sharded.state_dict()
                mine["shards"] = {
                    key: _part(value, state["shards"][key], seat) for key, value in into["shards"].items()
                }
                seat.loader.sharded.load_state_dict(mine)
            else:
                seat.loader.load_state_dict(mine)

        self.all(load)
        self.begun, self.left = False, None

    # Batches

    def mark(self) -> tuple[int, int]:
        return self.lead.data_epoch, self.lead.stream.standing.dropped_samples

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

    def next(self, books: Books, number: int = 0) -> Any:
        """A micro batch of each rank; `None` at an iterator's end."""
        if not self.begun:
            self.iterate(books)
        before = self.mark()
        ended, epoch = self.same(lambda seat: (seat.ended, seat.loader.epoch), "epoch")
        found = self.all(lambda seat: seat.next())
        require(len({each is None for each in found}) == 1, "R3: the ranks end at different micro batches")
        now = self.same(lambda seat: seat.loader.epoch, "epoch")
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
        self._record(books, found, number)
        self.tally(books, before)
        return found

    def _record(self, books: Books, found: list[Any], number: int) -> None:
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
                    books.lists[epoch, shard].append(number)
                mine.append((shard, sample, real))
        if len(books.open[0]) == self.top.o // self.top.w:
            rows = [row for rank in books.open for row in rank]
            books.batches.append((rows, any(dealt for *_, dealt in found)))
            books.open = [[] for _ in range(self.top.w)]

    def take(self, num: int, books: Books, number: int = 0) -> None:
        for _ in range(num):
            empty = 0
            while self.next(books, number) is None:
                empty += 1
                require(empty < 3, "three empty iterators")

    # Other ranks

    def rescale(self, top: Top, make: Any, order: list[int], step: int | None = None) -> "Seats":
        """Go on with others: ``order`` has the old rank of each new one, -1 for one that joins."""
        stay = {old: new for new, old in enumerate(order) if old >= 0}
        old = self.crew.processes
        crew = Crew(0)
        crew = Crew(top.w, [old[i] if i >= 0 else Crew(1).processes[0] for i in order])
        crew.enter()
        for i, process in enumerate(old):
            process.leaves, process.new_w = i not in stay, top.w  # type: ignore[attr-defined]
        for process in crew.processes:
            process.new_w = top.w  # type: ignore[attr-defined]
        new = Seats(None, top, crew)
        went = {"micro_batch_size": top.b, "num_workers": top.k, "step": step}
        calls: list[Any] = []
        for i, process in enumerate(old):
            if i in stay or step is None:
                calls.append((process, lambda i=i: self.seats[i].loader.rescale(**went)))
        num_old = len(calls)
        for i, process in zip(order, crew.processes, strict=True):
            if i < 0:
                calls.append((process, lambda: Seat(make(top, join=True), 0)))
        found = run(calls)
        require(sum(map(bool, found[:num_old])) == len(stay), "who goes on")
        joined = iter(found[num_old:])
        new.seats = [self.seats[i] if i >= 0 else next(joined) for i in order]
        for i, process in enumerate(old):
            if i not in stay:
                process.leaves = False  # type: ignore[attr-defined]
                Crew(1, [process]).close()
        new.begun, new.steps, new.left = self.begun, self.steps, None
        return new


def _joined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What DCP has on disk of the states of all ranks."""
    shards = {key: [state["shards"][key] for state in states] for key in states[0]["shards"]}
    whole = {
        key: torch.cat([each.as_subclass(torch.Tensor) for each in values])
        if isinstance(values[0], Block)
        else values[0]
        for key, values in shards.items()
    }
    for state in states[1:]:
        difference = same_state({**state, "shards": {}}, {**states[0], "shards": {}})
        require(not difference, f"sharded states differ in {difference}")
    return {**states[0], "shards": {key: value.clone() for key, value in whole.items()}}


def _part(into: torch.Tensor, whole: torch.Tensor, seat: Seat) -> torch.Tensor:
    """What DCP writes into a rank's tensor."""
    if not isinstance(into, Block):
        return whole.clone()
    first = seat.stream.ranks.rank * len(into)
    return whole[first : first + len(into)].clone().as_subclass(Block)
