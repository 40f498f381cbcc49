"""Processes that share a dp rank: the first of them reads, and says to the others what came of each call.

every call    header to all: what was called, where the run is, how many bytes follow
a batch       its bytes to those that receive batches
all else      what it returned or raised, to all
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BroadcastOptions

from rescale_data.engine.message import Bytes, from_bytes
from rescale_data.engine.ranks.meeting import digest, gloo, meet_in_job, once

_numbers = itertools.count()
BATCH, RESULT = range(2)
NUM_COUNTS = 4
"""That a header holds beside the kind and the size of what follows."""


class Heard(NamedTuple):
    """The body that followed a header; `None` for a batch if this process receives none."""

    kind: int
    counts: list[int]
    value: Any


class Peers:
    """The processes of one dp rank, in the order of their ranks in the job (all of them make it).

    Args:
        members: Their ranks in the job.
        receives: Whether this one is to have batches; the first always does.
        settings: What must be the same on all of them, by name.
        timeout: Seconds that one of them may keep the others waiting, those included in which the first one reads.

    Raises:
        ValueError: Some setting differs; on all of them.
    """

    def __init__(self, members: Sequence[int], receives: bool, settings: dict[str, str], timeout: float) -> None:
        self.rank, self._members, self._timeout = dist.get_rank(), list(members), timeout
        self._process = os.getpid()
        self.me = self._members.index(self.rank)
        mine = [str(int(receives)), str(next(_numbers)), *(f"{digest(setting):x}" for setting in settings.values())]
        said, store = meet_in_job(f"peers/{digest(self._members)}", members, timeout, " ".join(mine))
        words = [text.split() for text in said]
        _require_same(settings, [given[2:] for given in words], members)
        self._number = words[0][1]  # as the first one counts: tells apart what it reads for training and for validation
        receivers = [rank for rank, mine in zip(members, words, strict=True) if mine[0] == "1" or rank == members[0]]
        self.receives = self.rank in receivers
        self._all = _group(self._members, store, timeout)
        self._receivers = _group(receivers, store, timeout) if self.receives else None
        self._broken: str | None = None

    def digest_of(self, call: str) -> int:
        """The same on all of them, and of no other `Peers`."""
        return digest((self._number, call))

    def require_no_fork(self) -> None:
        """Raise `RuntimeError` in a forked child: it would send on its parent's connections, and a lock may have been held."""
        if len(self._members) > 1 and os.getpid() != self._process:
            raise RuntimeError(f"this process was forked from the rank {self.rank}, and is none: build a loader in it")

    def say(self, kind: int, counts: Sequence[int], said: Bytes) -> None:
        """From the first one to the others, with ``NUM_COUNTS`` counts."""
        body, start = said
        self._exchange(self._all, torch.tensor([kind, body.numel(), start, *counts], device="cpu"))
        self._exchange(self._receivers if kind == BATCH else self._all, body)

    def hear(self, pin_memory: bool) -> Heard:
        """Receive the next message of the first peer."""
        header = torch.zeros(3 + NUM_COUNTS, dtype=torch.int64, device="cpu")
        self._exchange(self._all, header)
        kind, size, start, *counts = header.tolist()
        if kind == BATCH and not self.receives:
            return Heard(kind, counts, None)
        body = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin_memory and kind == BATCH)
        self._exchange(self._receivers if kind == BATCH else self._all, body)
        return Heard(kind, counts, from_bytes(body, start))

    def _exchange(self, group: Any, tensor: torch.Tensor) -> None:
        if group is None or group.size() == 1:
            return
        if self._broken is not None:  # others may wait for the rest of a message: nothing else is to come in its place
            raise RuntimeError(self._broken)
        options = BroadcastOptions()
        options.timeout = datetime.timedelta(seconds=self._timeout)
        try:
            group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            others = (
                f"one of the ranks {self._members[1:]}" if self.me == 0 else f"rank {self._members[0]}, which reads"
            )
            self._broken = (
                f"Rank {self.rank} waited at most {self._timeout:g} s for {others}: it makes no call, or has died. All peers "
                f"of a dp rank make the same calls of their loader, in the same order. ({error})"
            )
            raise RuntimeError(self._broken) from error


def _require_same(settings: dict[str, str], said: list[list[str]], members: Sequence[int]) -> None:
    for number, (name, mine) in enumerate(settings.items()):
        if len({words[number] for words in said}) > 1:
            others = [rank for rank, words in zip(members, said, strict=True) if words[number] != said[0][number]]
            raise ValueError(
                f"The peers {list(members)} of one dp rank built a loader with different {name}: rank {dist.get_rank()} "
                f"has {mine}, and the ranks {others} another than rank {members[0]}. All of them need the same arguments."
            )


def _group(members: list[int], store: Any, timeout: float) -> Any:
    """One for all that is broadcast among the same processes."""
    me = members.index(dist.get_rank())
    return once(None, ("peers", *members), lambda: gloo(f"gloo/{digest(members)}", store, me, len(members), timeout))
