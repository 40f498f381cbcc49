"""`Circle`: a fixed set of processes, and the calls that they make together, each one once all have come to it (`RollCall`)."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rescale_data.engine.ranks.rollcall import Missing, RollCall
from rescale_data.state import Ints

_SECONDS_AFTER_A_FAILURE = 10.0  # within which those that live say so


class Circle:
    """A fixed set of processes, shared by all loaders of this process over it.

    Args:
        group: Of exactly these processes.
        store: A part of a store that is theirs alone.
        me: Index of this process.
        names: Their ranks in the job, for messages.
    """

    def __init__(self, group: Any, store: Any, me: int, names: Sequence[int]) -> None:
        self._group, self._me, self._names = group, me, list(names)
        self.roll_call = RollCall(store, me, names)
        self.num_loaders = 0
        self._broken: str | None = None

    def agree(self, call: Call, values: Sequence[int], decide: Callable[[Ints], Ints]) -> Callable[[], Ints]:
        """Say a few integers; the result, called, waits for what follows from those of all.

        Args:
            decide: ``int64[W, len(values)] -> int64[any]``, run on one process.
        """
        text = " ".join(map(str, values))
        with call.errors(self._names[self._me]):
            coming = self.roll_call.come(call.name, text, lambda texts: _text(decide(_table(texts))), call.seconds)

        def result() -> Ints:
            with call.errors(self._names[self._me]):
                return _table([self.roll_call.wait(coming, call.seconds, call.is_reading)])[0]

        return result

    def gather(self, call: Call, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of one shape, stacked, one of each process."""
        with call.errors(self._names[self._me]):
            coming = self.roll_call.come(call.name, "", self.roll_call.ticket, call.seconds)
            ticket = int(self.roll_call.wait(coming, call.seconds, call.is_reading))
            with self.roll_call.in_turn(ticket, call.seconds):
                if self._broken is not None:
                    raise RuntimeError(self._broken)
                gathered = torch.empty((len(self._names), *tensor.shape), dtype=tensor.dtype, device="cpu")
                work = self._group.allgather([list(gathered)], [tensor.contiguous()])
                try:
                    work.wait(datetime.timedelta(seconds=call.seconds))
                except RuntimeError as error:
                    self._broken = str(error)
                    self._find_lost(coming.base)
                    raise
        return gathered

    def _find_lost(self, name: str) -> None:
        """`Missing` where some process does not say that it too saw an exchange fail."""
        seconds = _SECONDS_AFTER_A_FAILURE
        self.roll_call.wait(self.roll_call.come(f"{name}/lost", "", lambda _: "", seconds), seconds)


@dataclass(frozen=True)
class Call:
    """One kind of thing that processes do together.

    Args:
        name: The same on all of them.
        seconds: How long to wait for a process that does nothing.
        is_reading: Whether a process may be reading before it comes, which does not count.
        cure: Ends the message about processes that did not come.
    """

    name: str
    seconds: float
    is_reading: bool
    cure: str

    @contextlib.contextmanager
    def errors(self, rank: int) -> Generator[None]:
        """Whatever goes wrong as a ``RuntimeError`` that names who is missing."""
        try:
            yield
        except Missing as missing:
            raise self._failure(rank, missing.ranks, "it did not begin") from None
        except (RuntimeError, dist.DistError) as error:
            raise self._failure(rank, [], str(error)) from error

    def _failure(self, rank: int, missing: list[int] | None, reason: str) -> RuntimeError:
        if missing is None:
            who = "and the process that holds the store (rank 0 of the job) cannot be reached either"
        elif missing:
            who = f"because the ranks {missing} did not come to it, or died in it"
        else:
            who = "although all ranks came: the network failed"
        return RuntimeError(
            f"A collective of the data loader failed on rank {rank} after at most {self.seconds:g} s, {who}. {self.cure} "
            f"({reason})"
        )


def _text(values: Ints) -> str:
    return " ".join(map(str, values.tolist()))


def _table(texts: Sequence[str]) -> Ints:
    return np.array([text.split() for text in texts], dtype=np.int64)
