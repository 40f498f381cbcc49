"""`Communicator`: a fixed set of processes that exchange tensors over a gloo process group."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from rescale_data.engine.ranks.meeting import MissingRanks, arrive, call_within, digest, gloo, meet_at_barrier
from rescale_data.engine.threads import run_in_thread

T = TypeVar("T", bound=np.generic)
_SECONDS_AFTER_A_FAILURE = 10.0
"""Seconds in which each process has to report a failed exchange; a process that does not report is missing."""


@dataclass(frozen=True)
class Call:
    """The settings of one kind of exchange: its name, its timeout and the remedy in its error message.

    Args:
        name: The name, the same on all processes. Exchanges with other names may run at the same time.
        seconds: The time to wait for other processes.
        remedy: The end of the message about processes that did not come.
    """

    name: str
    seconds: float
    remedy: str

    @property
    def tag(self) -> int:
        """The tag of the messages of this call, which keeps exchanges of different threads and loaders apart."""
        return digest(self.name) % (1 << 31)


class Communicator:
    """A fixed set of processes that exchange tensors; all loaders over the same processes share one communicator.

    The first exchange makes the gloo group, after a barrier that names the processes which do not come. An exchange that fails
    breaks its group for good. The processes that see it fail find out which ones are missing, and the next exchange makes
    another group. A process that was in no exchange at that time notices the failure at its next exchange, and makes the new
    group with the others.

    Args:
        store: A part of a store that only this communicator uses.
        my_index: The index of this process.
        member_ranks: The ranks of the processes in the job, for messages.

    Attributes:
        num_loaders: The number of loaders that all processes have built, including failed ones.
    """

    def __init__(self, store: Any, my_index: int, member_ranks: Sequence[int]) -> None:
        self._store, self._me, self._member_ranks, self._process_id = store, my_index, list(member_ranks), os.getpid()
        self.num_loaders = 0
        self._group: _Group | None = None
        self._subgroups = dict[str, Communicator]()
        self._group_lock = threading.Lock()

    def exchange(self, call: Call, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send tensors to some processes and receive tensors from some, by index; shapes are the same on both sides."""
        self._begin_call(call, sends, receives)()

    def subgroup(self, members: Sequence[int]) -> Communicator:
        """Return the communicator of some of these processes, including this one; made once, with a gloo group of its own."""
        name = f"part/{digest(list(members))}"
        if name not in self._subgroups:
            names = [self._member_ranks[index] for index in members]
            self._subgroups[name] = Communicator(PrefixStore(name, self._store), list(members).index(self._me), names)
        return self._subgroups[name]

    def begin_gather(self, call: Call, values: npt.NDArray[T]) -> Callable[[], npt.NDArray[T]]:
        """Send an array to all processes; return a function that waits for the arrays of all, of one shape, and stacks them."""
        gathered = np.empty((len(self._member_ranks), *values.shape), values.dtype)
        gathered[self._me] = values
        tensor, rows = torch.from_numpy(gathered[self._me].copy()), torch.from_numpy(gathered)
        indices = [index for index in range(len(self._member_ranks)) if index != self._me]
        await_all = self._begin_call(call, dict.fromkeys(indices, tensor), {index: rows[index] for index in indices})

        def wait() -> npt.NDArray[T]:
            await_all()
            return gathered

        return wait

    def _begin_call(
        self, call: Call, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        """Start to send and receive tensors; return a function that waits until all of them have arrived."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this process was forked from the rank {self._process_id}, and is none: build a loader in it"
            )
        group = self._find_group(call)
        exchange = group.begin(call, sends, receives)

        def await_all() -> None:
            try:
                group.end(exchange, call.seconds)
                return
            except BaseException as error:
                self._discard_group(group)
                if not isinstance(error, RuntimeError | dist.DistError):
                    raise
                reason = str(error)
            # The error is freed here. Its frames held the connections open; the others notice that these close.
            missing = self._find_missing(group.meeting_number, call)
            if missing is None or self._member_ranks[self._me] not in missing:
                raise self._exchange_error(call, missing, reason)
            # The other processes gave up the gloo group of this exchange before this process came: once more
            self._begin_call(call, sends, receives)()

        return await_all

    def _find_group(self, call: Call) -> _Group:
        def find() -> _Group:
            with self._group_lock:
                if self._group is None:
                    _, number = meet_at_barrier(self._store, self._me, self._member_ranks, call.seconds)
                    try:
                        self._group = _Group(self._store, number, self._me, len(self._member_ranks), call.seconds)
                    except (RuntimeError, dist.DistError):
                        raise MissingRanks(self._find_missing(number, call)) from None
                return self._group

        group = self._group
        try:
            return call_within(3 * call.seconds + 20, find) if group is None else group
        except MissingRanks as missing:
            raise self._exchange_error(call, missing.ranks, "it did not begin") from missing.__cause__

    def _discard_group(self, group: _Group) -> None:
        group.close()
        if self._group is group:
            self._group = None

    def _find_missing(self, number: int, call: Call) -> list[int] | None:
        """Return the ranks that did not report a failure of the same exchange; `None` if the store cannot be reached."""
        seconds, own_tag = min(_SECONDS_AFTER_A_FAILURE, call.seconds), str(call.tag)
        store = PrefixStore(f"lost/{number}", self._store)
        try:
            tags = call_within(2 * seconds + 10, lambda: arrive(store, self._me, self._member_ranks, seconds, own_tag))
        except MissingRanks as missing:
            return missing.ranks
        me = self._member_ranks[self._me]  # another thread of this process may have seen another exchange fail
        return [rank for rank, tag in zip(self._member_ranks, tags, strict=True) if tag != own_tag and rank != me]

    def _exchange_error(self, call: Call, missing: list[int] | None, reason: str) -> RuntimeError:
        if missing is None:
            explanation = "and the process that holds the store (rank 0 of the job) cannot be reached either"
        elif missing:
            explanation = f"because the ranks {missing} did not come to it in time, or died in it"
        else:
            explanation = "although all ranks came: some came as others gave up, or the network failed"
        return RuntimeError(
            f"A collective of the data loader failed on rank {self._member_ranks[self._me]} after at most {call.seconds:g} s, "
            f"{explanation}. {call.remedy} ({reason})"
        )


@dataclass(eq=False)
class _Exchange:
    """An exchange in progress: its tensors and gloo work handles, or the error if it could not start."""

    tensors: list[torch.Tensor]
    works: list[Any]
    error: RuntimeError | dist.DistError | None = None


class _Group:
    """One gloo process group of all processes of a communicator.

    Args:
        number: The number of the meeting before it, the same on all processes.
        seconds: The time to wait for connections.
    """

    def __init__(self, store: Any, number: int, my_index: int, size: int, seconds: float) -> None:
        self.meeting_number = number
        self._gloo: Any = gloo(f"gloo/{number}", store, my_index, size, seconds)
        self._open: set[_Exchange] = set()  # kept: gloo still writes to the memory of exchanges that nobody waits for

    def begin(self, call: Call, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> _Exchange:
        """Start to receive tensors from some processes and to send tensors to some, by index."""
        exchange = _Exchange([*sends.values(), *receives.values()], [])
        group = self._gloo
        if group is None:
            exchange.error = RuntimeError("another thread has found the network of this exchange broken")
            return exchange
        self._open.add(exchange)
        recv_calls = [partial(group.recv, [tensor], index, call.tag) for index, tensor in receives.items()]
        send_calls = [partial(group.send, [tensor], index, call.tag) for index, tensor in sends.items()]
        for start in recv_calls + send_calls:  # also after one that fails: the living processes wait for their tensors
            try:
                exchange.works.append(start())
            except (RuntimeError, dist.DistError) as error:
                exchange.error = error.with_traceback(None)  # drop the frames, which hold the group
        return exchange

    def end(self, exchange: _Exchange, seconds: float) -> None:
        if exchange.error is not None:
            raise exchange.error
        works, deadline = list(exchange.works), monotonic() + seconds

        def wait() -> None:
            for work in works:
                work.wait(datetime.timedelta(seconds=max(0.001, deadline - monotonic())))

        run_in_thread(wait)
        self._open.discard(exchange)

    def close(self) -> None:
        """Close the connections; the other processes notice it."""
        self._gloo = None
        for exchange in self._open:
            exchange.works.clear()  # each handle holds the group
        self._open.clear()
