"""Processes that share a dp rank: the first one reads, and broadcasts the result of each call to the others.

every call         header to all: the call, the place of the run, the number of bytes that follow
a batch            its bytes, to the peers that receive batches
any other result   the value or the error, to all
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BroadcastOptions

from rescale_data.engine.message import PackedBytes, from_bytes
from rescale_data.engine.ranks.meeting import digest, gather_texts, gloo, make_once

_counter = itertools.count()
BATCH_MESSAGE, PEEKED_MESSAGE, RESULT = range(3)
NUM_BATCH_COUNTS = 5
"""The number of counts in a message header, besides the kind and the size of the body."""


class PeerGroup:
    """The processes of one dp rank, in the order of their ranks in the job; each of them makes this object.

    Args:
        members: The ranks of the peers in the job.
        receives: True if this process is to receive batches; the first peer always does.
        settings: Values that must be the same on all peers, by name.
        timeout: Seconds that one peer may keep the others waiting. They include the time in which the first peer reads.

    Raises:
        ValueError: Some setting differs; all peers raise it.
    """

    def __init__(self, members: Sequence[int], receives: bool, settings: dict[str, str], timeout: float) -> None:
        self.rank, self._members, self._timeout = dist.get_rank(), list(members), timeout
        self._process = os.getpid()
        self.my_index = self._members.index(self.rank)
        self._connections = make_once(None, ("peers", *members), _Connections)
        message = [str(int(receives)), str(next(_counter)), str(self._connections.attempt)]
        message += [f"{digest(setting):x}" for setting in settings.values()]
        texts, store = gather_texts(f"peers/{digest(self._members)}", members, timeout, " ".join(message))
        messages = [text.split() for text in texts]
        _require_same(settings, [fields[3:] for fields in messages], members)
        self._number = messages[0][1]  # as the first peer counts: keeps its loaders for training and validation apart
        self._attempt = max(int(attempt) for _, _, attempt, *_ in messages)
        self._connections.renew(self._attempt)
        receivers = [rank for rank, mine in zip(members, messages, strict=True) if mine[0] == "1" or rank == members[0]]
        self.receives_batches = self.rank in receivers
        with self._whole_message():
            self._all_peers = self._connections.group(self._members, store, timeout)
            self._receivers_group = (
                self._connections.group(receivers, store, timeout) if self.receives_batches else None
            )

    def digest_of(self, call: str) -> int:
        """Return a number that names a call: the same on all peers, and another one for the same call of another loader."""
        return digest((self._number, call))

    def require_no_fork(self) -> None:
        """Raise `RuntimeError` in a forked child process, which must not use the connections of its parent."""
        if len(self._members) > 1 and os.getpid() != self._process:
            raise RuntimeError(f"this process was forked from the rank {self.rank}, and is none: build a loader in it")

    def send(self, message_kind: int, counts: Sequence[int], packed_value: PackedBytes) -> None:
        """Broadcast a message from the first peer to the others: its kind, ``NUM_BATCH_COUNTS`` counts and a packed value."""
        value_bytes, start = packed_value
        header = torch.tensor([message_kind, value_bytes.numel(), start, *counts], device="cpu")
        with self._whole_message():
            self._exchange(self._all_peers, header)
            self._exchange(self._receivers_group if message_kind != RESULT else self._all_peers, value_bytes)

    def receive(self, pin_memory: bool) -> tuple[int, list[int], Any]:
        """Return the kind, the counts and the value of the first peer's next message.

        The value is `None` for a batch if this process receives none.
        """
        header = torch.zeros(3 + NUM_BATCH_COUNTS, dtype=torch.int64, device="cpu")
        with self._whole_message():
            self._exchange(self._all_peers, header)
            kind, num_bytes, start, *counts = header.tolist()
            if kind != RESULT and not self.receives_batches:
                return kind, counts, None
            pin_memory = pin_memory and kind != RESULT
            value_bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
            self._exchange(self._receivers_group if kind != RESULT else self._all_peers, value_bytes)
        return kind, counts, from_bytes(value_bytes, start)

    @contextmanager
    def _whole_message(self) -> Generator[None]:
        """Send or receive nothing more after a message that an error or Ctrl-C has cut: other peers wait for its rest."""
        if self._connections.attempt != self._attempt:
            raise RuntimeError(self._connections.broken_reason)
        try:
            yield
        except BaseException as error:
            if len(self._members) > 1:
                self._connections.break_off(
                    f"A message between rank {self.rank} and its peers {self._members} was cut: "
                    f"{str(error) or type(error).__name__}. Build their loaders anew, on all of them, and load a state."
                )
            raise

    def _exchange(self, group: Any, tensor: torch.Tensor) -> None:
        if group is None or group.size() == 1:
            return
        broadcast_options = BroadcastOptions()
        broadcast_options.timeout = datetime.timedelta(seconds=self._timeout)
        try:
            group.broadcast([tensor], broadcast_options).wait()
        except RuntimeError as error:
            awaited_text = (
                f"one of the ranks {self._members[1:]}"
                if self.my_index == 0
                else f"rank {self._members[0]}, which reads"
            )
            raise RuntimeError(
                f"Rank {self.rank} waited at most {self._timeout:g} s for {awaited_text}: it makes no call, or has died. "
                f"All peers of a dp rank make the same calls of their loader, in the same order. ({error})"
            ) from error


class _Connections:
    """The gloo groups of the peers of one dp rank, shared by all of their loaders, until a message was cut in one of them.

    Attributes:
        attempt: The number of times that peers have made such groups anew; the peers agree on the largest.
        broken_reason: The reason why the groups of earlier attempts are not used any more.
    """

    def __init__(self) -> None:
        self.attempt, self.broken_reason = (
            0,
            "The peers have made new connections: build the loader anew on all of them.",
        )
        self._groups = dict[tuple[int, ...], Any]()

    def renew(self, attempt: int) -> None:
        if attempt > self.attempt:
            self.attempt, self._groups = attempt, {}

    def break_off(self, reason: str) -> None:
        """Make all loaders of these peers raise an error with the text ``reason``, until they are built anew."""
        self.broken_reason = reason
        self.renew(self.attempt + 1)

    def group(self, members: list[int], store: Any, timeout: float) -> Any:
        """Return the gloo group of some of the peers, made once in an attempt."""
        if tuple(members) not in self._groups:
            me = members.index(dist.get_rank())
            self._groups[tuple(members)] = gloo(f"gloo/{digest(members)}", store, me, len(members), timeout)
        return self._groups[tuple(members)]


def _require_same(settings: dict[str, str], texts: list[list[str]], members: Sequence[int]) -> None:
    for index, (name, mine) in enumerate(settings.items()):
        if len({fields[index] for fields in texts}) > 1:
            differing = [rank for rank, fields in zip(members, texts, strict=True) if fields[index] != texts[0][index]]
            raise ValueError(
                f"The peers {list(members)} of one dp rank built a loader with different {name}: rank {dist.get_rank()} "
                f"has {mine}, and the ranks {differing} another than rank {members[0]}. All of them need the same arguments."
            )
