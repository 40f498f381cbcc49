"""For whoever reads ahead of the trainer: batches in hand, and the state of those that the trainer has received.

    loader    ... 5 6 7 | 8        the next that the loader makes
    in hand         [6 7]          read, on their way to the trainer
    trainer   ... 5                the state says: 5 was delivered

A `DataLoader`'s own state describes the batches that it has handed out. Where these go into a queue first, a checkpoint
would leave out for ever what is in that queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rescale_data.engine.position import Position
from rescale_data.engine.reading import refuse_epoch
from rescale_data.engine.statedict import Sharded, state_dict
from rescale_data.engine.stream import Stream
from rescale_data.loader import DataLoader


class _Read(NamedTuple):
    """A batch that was read, and where the trainer is when it has it."""

    batch: Any
    num_real: int
    epoch: int
    ended: bool
    position: Position


class LookAhead:
    """Batches of a loader, read some batches before the trainer wants them. One thread calls it.

    Args:
        loader: From now on read by this object alone: asked for batches, its position or a state, it raises `RuntimeError`.
        num_batches: How many may be in hand, at least 1.

    Attributes:
        last_batch_samples: As `DataLoader.last_batch_samples`, of the batch that was taken last.
    """

    def __init__(self, loader: DataLoader, num_batches: int) -> None:
        if not isinstance(loader, DataLoader):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"{type(loader).__name__} is not read ahead of training, only rd.DataLoader is. Where one reads for its peers "
                f"(rd.Broadcast), give it num_workers= or prefetch_batches=: these go ahead, and the state stays right."
            )
        if num_batches < 1:
            raise ValueError(f"num_batches={num_batches}: one batch at least must be in hand.")
        self._reading, self._loader, self._num_batches = loader.give_away(), loader, num_batches
        self.last_batch_samples = 0
        self._forget()

    @property
    def in_hand(self) -> list[Any]:
        """Batches that were read and not taken, in order."""
        return [read.batch for read in self._in_hand]

    @property
    def stream(self) -> Stream:
        """What the loader reads, as far as it has read: ahead of the trainer."""
        return self._reading.stream

    @property
    def step(self) -> int:
        """Global batches that the trainer has received."""
        return self._at.position.step

    @property
    def epoch(self) -> int:
        """The epoch in which the trainer is: the next one when it has seen the end."""
        return self._at.epoch

    @property
    def ended(self) -> bool:
        """Whether the trainer has the last batch of its epoch, and has not seen the end."""
        return self._at.ended

    def standing(self) -> Position:
        """Where the trainer is."""
        return self._at.position

    def begin(self) -> None:
        """Go on in the trainer's epoch, or with the next where that has ended."""
        if not self._in_hand:
            self._batches = iter(self._reading)
            self._at = self._read()

    def read(self) -> list[Any]:
        """Fill the hand, and return what is new in it; with nothing in it the trainer has seen the end of its epoch.

        An error of the loader is raised when the trainer comes to it; over several ranks at once, as the others may read on to
        where they wait for this one. Asked again it reads on, and nothing in hand is lost.
        """
        new: list[Any] = []
        while self._failure is None and len(self._in_hand) < self._num_batches:
            try:
                if self._batches is None:
                    self._batches = iter(self._reading)
                batch = next(self._batches)
            except StopIteration:
                if not self._in_hand:
                    self._at = self._read()
                break
            except Exception as error:
                if self.stream.ranks.circle is not None:
                    raise
                self._failure = error
                break
            new.append(batch)
            self._in_hand.append(self._read(batch))
        if self._failure is not None and not self._in_hand:
            failure, self._failure = self._failure, None
            raise failure
        return new

    def take(self) -> Any:
        """The oldest batch in hand; from here on the state says that the trainer has it."""
        self._at = self._in_hand.popleft()
        self.last_batch_samples = self._at.num_real
        return self._at.batch

    def __len__(self) -> int:
        """As `DataLoader.__len__`."""
        return len(self._reading)

    def __bool__(self) -> bool:
        return True

    @property
    def batches_left(self) -> int:
        """As `DataLoader.batches_left`, of the trainer's epoch."""
        if self.ended:
            return 0
        return len(self._in_hand) + (self._reading.batches_left if self._reading.epoch == self.epoch else 0)

    def set_epoch(self, epoch: int) -> None:
        """As `DataLoader.set_epoch`, of the trainer's epoch."""
        if epoch == self.epoch:
            return
        if self._in_hand or (self.ended and epoch != self.epoch + 1):
            refuse_epoch(epoch, self.epoch)
        self._reading.set_epoch(epoch)
        self._at = self._read()

    def skip(self, num_samples: int) -> None:
        """As `DataLoader.skip`, from where the trainer is; what is in hand is forgotten (collective as a state is)."""
        if self._in_hand:
            self.load_state_dict(self.state_dict())
        self._reading.skip(num_samples)
        self._forget()

    def set_global_batch_size(self, global_batch_size: int) -> None:
        """As `DataLoader.set_global_batch_size`, from where the trainer is; what is in hand is read again, in other batches."""
        self._go_back()
        self._loader.setup = self._reading.set_global_batch_size(global_batch_size)
        self._at = self._read()

    def exclude_steps(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `DataLoader.exclude_steps`, from where the trainer is (collective as a state is: what is in hand goes)."""
        self._go_back()
        self._reading.exclude_steps(ranges)
        self._at = self._read()

    def _go_back(self) -> None:
        """Have the loader stand where the trainer does, and go on from there."""
        if self._in_hand or self.epoch != self._reading.epoch:
            self.load_state_dict(self.state_dict())
            self._batches = None  # `iter` would leave out steps by the old global batch

    def start(self) -> None:
        """As `DataLoader.start`."""
        self._reading.start()

    def progress(self) -> dict[str, float]:
        """As `DataLoader.progress`, of the batches that were taken, without how long they were waited for."""
        made = self.stream.made()
        return {**made, "batches_ready": made["batches_ready"] + len(self._in_hand), **self._at.position.counters()}

    def state_dict(self) -> dict[str, Any]:
        """As `DataLoader.state_dict`, of the batches that were taken."""
        return state_dict(self._at.position)

    @property
    def sharded(self) -> Sharded:
        """As `DataLoader.sharded`, of the batches that were taken."""
        return Sharded(self.standing, self.load_state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `DataLoader.load_state_dict`; what is in hand is forgotten."""
        at, stream = self._at.position, self.stream
        self._reading.load_state_dict(state)
        stream.dropped_samples, stream.padded_samples = at.dropped_samples, at.padded_samples  # not those read ahead
        self._forget()

    def reset(self) -> None:
        """Go back to the beginning of the run."""
        self._reading.reset()
        self._forget()

    def _forget(self) -> None:
        self._in_hand: deque[_Read] = deque()
        self._batches: Iterator[Any] | None = iter(())  # `None`: goes on in this epoch
        self._failure: Exception | None = None
        self._at = self._read()

    def _read(self, batch: Any = None) -> _Read:
        reading = self._reading
        return _Read(batch, reading.last_batch_samples, reading.epoch, reading.ended, reading.stream.copy())
