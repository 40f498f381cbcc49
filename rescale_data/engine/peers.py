"""`CallsSharedWithPeers`: the calls of a loader that the TP, PP and CP peers of a dp rank share.

The first peer reads, and broadcasts its batches to the other peers. These build no pipeline, open no file, make no request and
start no worker. All calls except the numbers, `progress` and `close` are collective over the peers: the first peer makes the
call, and all peers get its result or its error.

    every call         header to all: the call, the place of the run, the number of bytes that follow
    a batch            its bytes, to the peers that receive batches
    any other result   the value or the error, to all
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BroadcastOptions

from rescale_data.engine.message import PackedBytes, from_bytes, to_bytes
from rescale_data.engine.options import Options
from rescale_data.engine.ranks.find_ranks import MESH_TYPES, members_of, ranks_in
from rescale_data.engine.ranks.meeting import digest, gather_texts, gloo, make_once, members_by_dp_rank
from rescale_data.engine.stream import STOP_ITERATION_MESSAGE, Stream
from rescale_data.engine.transfer import transfer_function
from rescale_data.errors import require_callable, require_type, to_picklable

P = ParamSpec("P")
R = TypeVar("R")
_loader_numbers = itertools.count()
BATCH_MESSAGE, PEEKED_MESSAGE, RESULT = range(3)
_NO_COUNTS = (0, 0, 0, 0)
_HEADER_SIZE = 4 + len(_NO_COUNTS)
"""The count of numbers in a header: kind of the message, size of its value in bytes, start of its pickle, call, counts."""
_UNTRANSFERRED_NOTE = (
    "The batch of which transfer= failed is lost on this rank: its peers have it, and it counts as delivered. Load a state on "
    "all of them."
)


class BatchCounts(NamedTuple):
    """The counts of a `Stream`, by the same names, known on each peer without communication."""

    step: int = 0
    epoch: int = 0
    last_batch_samples: int = 0
    gradient_accumulation_steps: int = 0
    num_batches: int | str = 0
    batches_left: int | str = 0

    @classmethod
    def of(cls, loader: Any) -> BatchCounts:
        """Return the present counts of a loader's stream; all are zero without one, because building the loader failed."""
        stream: Stream | None = loader._own_stream
        return cls() if stream is None else cls(*(_count_or_reason(stream, name) for name in cls._fields))


class CallsSharedWithPeers:
    """Makes each call of a loader together with its peers: the first peer does the work, and sends the result to the others.

    Args:
        pipeline: A function that returns the first argument of a `DataLoader` without peers.
        options: The other arguments of `DataLoader`; its ``timeout`` includes the time in which the first peer reads.

    Attributes:
        counts: The counts that the first peer has sent; `None` on the first peer itself.

    Raises:
        ValueError: Peers were given different arguments (functions are compared by name); all peers raise it.
    """

    def __init__(self, pipeline: object, options: Options) -> None:
        require_callable(pipeline=pipeline)
        if options.mesh is None and options.dp_rank is None:
            raise ValueError(
                "With peers= say which ranks read different samples: give mesh=mesh['dp'], or dp_rank= and dp_world_size= (0 "
                "and 1 where all processes are peers)."
            )
        self._pins_batches, self._transfer = options.pins_batches, transfer_function(options.transfer)
        self._members, self._timeout = _peer_ranks(options.peers), options.timeout
        self._rank, self._process_id = dist.get_rank(), os.getpid()
        self._is_first = self._rank == self._members[0]
        self.counts = None if self._is_first else BatchCounts()
        arguments = {"pipeline": pipeline, **vars(options)}
        settings = {name: _as_text(value) for name, value in arguments.items() if name not in ("peers", "receives")}
        self._connect(settings, is_receiver=options.receives or self._is_first)
        dp_rank, dp_world_size = options.dp_rank, options.dp_world_size or 1
        # Wait for all processes of the job, also the ones that read nothing, before any read, since reads may fail
        if dp_rank is not None and dist.get_world_size() > 1 and 0 <= dp_rank < dp_world_size > 1:
            members_by_dp_rank(dp_rank, dp_world_size, options.timeout)

    def share_call(self, loader: object, call_text: str, message_kind: int, work: Callable[[], Any]) -> Any:
        """Return the result of the first peer's `work` on all peers; a batch only on peers that receive batches.

        Args:
            loader: The `BaseLoader` whose call it is.
            call_text: The method and its arguments, the same on all peers.
        """
        if len(self._members) > 1 and os.getpid() != self._process_id:  # its connections are those of its parent
            raise RuntimeError(f"this process was forked from the rank {self._rank}, and is none: build a loader in it")
        value = self._run_work(loader, call_text, message_kind, work) if self._is_first else self._receive(call_text)
        return self._transfer_batch(value, message_kind) if message_kind != RESULT and value is not None else value

    def _connect(self, settings: Mapping[str, str], *, is_receiver: bool) -> None:
        """Compare the arguments of all peers, and make their gloo groups: of all, and of the receivers of batches."""
        self._connections = make_once(None, ("peers", *self._members), _Connections)
        digests = [f"{digest(setting):x}" for setting in settings.values()]
        message = " ".join(map(str, (int(is_receiver), next(_loader_numbers), self._connections.attempt, *digests)))
        texts, store = gather_texts(f"peers/{digest(self._members)}", self._members, self._timeout, message)
        messages = dict(zip(self._members, (text.split() for text in texts), strict=True))
        first_message = messages[self._members[0]]
        for index, (name, own_setting) in enumerate(settings.items(), start=3):
            differing = [rank for rank, fields in messages.items() if fields[index] != first_message[index]]
            if differing:
                raise ValueError(
                    f"The peers {self._members} of one dp rank built a loader with different {name}: rank {self._rank} has "
                    f"{own_setting}, and the ranks {differing} another than rank {self._members[0]}. All of them need the same "
                    f"arguments."
                )
        self._loader_number = first_message[
            1
        ]  # as the first peer counts: keeps its loaders for training and validation apart
        receivers = [rank for rank, fields in messages.items() if fields[0] == "1"]
        self._attempt = max(int(fields[2]) for fields in messages.values())
        self._connections.renew(self._attempt)
        with self._message_guard():
            self._all_peers = self._connections.group(self._members, store, self._timeout)
            self._receivers = self._connections.group(receivers, store, self._timeout) if is_receiver else None

    def _run_work(self, loader: Any, call_text: str, message_kind: int, work: Callable[[], Any]) -> Any:
        try:
            value = work()
            packed_value = to_bytes(value if message_kind != RESULT else (BatchCounts.of(loader), value, None))
        except Exception as error:
            self._send(RESULT, call_text, _NO_COUNTS, to_bytes((BatchCounts.of(loader), None, to_picklable(error))))
            raise
        header_counts = _NO_COUNTS
        if message_kind != RESULT:
            stream: Stream = loader._own_stream
            header_counts = stream.step, stream.epoch, stream.last_batch_samples, stream.epoch_ended
        self._send(message_kind, call_text, header_counts, packed_value)
        return value

    def _send(self, kind: int, call_text: str, counts: tuple[int, ...], packed_value: PackedBytes) -> None:
        value_bytes, pickle_start = packed_value
        header = [kind, value_bytes.numel(), pickle_start, digest((self._loader_number, call_text)), *counts]
        with self._message_guard():
            self._broadcast(self._all_peers, torch.tensor(header, device="cpu"))
            self._broadcast(self._all_peers if kind == RESULT else self._receivers, value_bytes)

    def _receive(self, call_text: str) -> Any:
        """Return the value of the first peer's next message, or raise its error; `None` for a batch that is not received."""
        header, value_bytes = torch.zeros(_HEADER_SIZE, dtype=torch.int64, device="cpu"), None
        with self._message_guard():
            self._broadcast(self._all_peers, header)
            kind, num_bytes, pickle_start, call_digest, step, epoch, num_real, has_ended = header.tolist()
            group = self._all_peers if kind == RESULT else self._receivers
            if group is not None:
                pins_memory = self._pins_batches and kind != RESULT
                value_bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pins_memory)
                self._broadcast(group, value_bytes)
        value: Any = None if value_bytes is None else from_bytes(value_bytes, pickle_start)
        if call_digest != digest((self._loader_number, call_text)):
            raise RuntimeError(
                f"This rank calls {call_text:.200} of a loader with peers=, the one that reads for it another method, with "
                f"other arguments, or that of another loader. All peers of a dp rank make the same calls in the same order."
            )
        if kind != RESULT:
            counts = self.counts or BatchCounts()
            remaining = counts.batches_left
            remaining = remaining - 1 if kind == BATCH_MESSAGE and isinstance(remaining, int) else remaining
            remaining = 0 if has_ended else remaining
            self.counts = counts._replace(step=step, epoch=epoch, last_batch_samples=num_real, batches_left=remaining)
            return value
        self.counts, call_result, error = value
        if error is not None:
            raise error
        return call_result

    @contextmanager
    def _message_guard(self) -> Generator[None]:
        """Context of one message. If it is cut, all loaders of these peers raise until they are built anew."""
        if self._connections.attempt != self._attempt:
            raise RuntimeError(self._connections.broken_reason)
        try:
            yield
        except BaseException as error:
            if len(self._members) > 1:
                self._connections.break_off(
                    f"On rank {self._rank} a message among the peers {self._members} was cut: "
                    f"{str(error) or type(error).__name__}. Build their loaders anew, on all of them, and load a state."
                )
            raise

    def _broadcast(self, group: Any, tensor: torch.Tensor) -> None:
        """Send a tensor from the first peer to the others of a group, or receive it there, in place."""
        if group.size() == 1:
            return
        broadcast_options = BroadcastOptions()
        broadcast_options.timeout = datetime.timedelta(seconds=self._timeout)
        try:
            group.broadcast([tensor], broadcast_options).wait()
        except RuntimeError as error:
            first_peer, *others = self._members
            awaited_text = f"one of the ranks {others}" if self._is_first else f"rank {first_peer}, which reads"
            raise RuntimeError(
                f"Rank {self._rank} waited at most {self._timeout:g} s for {awaited_text}: it makes no call, or has died. "
                f"All peers of a dp rank make the same calls of their loader, in the same order. ({error})"
            ) from error

    def _transfer_batch(self, batch: Any, message_kind: int) -> Any:
        try:
            try:
                return batch if self._transfer is None else self._transfer(batch)
            except StopIteration as cause:
                raise RuntimeError(STOP_ITERATION_MESSAGE) from cause
        except Exception as error:
            if message_kind == BATCH_MESSAGE:
                error.add_note(_UNTRANSFERRED_NOTE)
            raise


def on_first_peer(kind: int) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Return a decorator for methods of a `BaseLoader`: its peers call them together, and the first peer does the work.

    Args:
        kind: `BATCH_MESSAGE` if the methods return the next batch, `PEEKED_MESSAGE` if it stays the next; only some peers
            receive it. Else `RESULT`.
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            if self._peer_calls is None:
                return method(self, *args, **kwargs)
            call_text = f"{method.__name__.strip('_')}({_as_text(args)}, {_as_text(kwargs)})"
            return self._peer_calls.share_call(self, call_text, kind, functools.partial(method, self, *args, **kwargs))

        return call

    return decorate


class _Connections:
    """The gloo groups of the peers of one dp rank, shared by all of their loaders, until a message was cut in one of them.

    Attributes:
        attempt: The number of times that peers have made such groups anew; the peers agree on the largest.
        broken_reason: The reason why the groups of earlier attempts are not used any more.
    """

    def __init__(self) -> None:
        self.attempt, self._groups = 0, dict[tuple[int, ...], Any]()
        self.broken_reason = "The peers have made new connections: build the loader anew on all of them."

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


def _count_or_reason(stream: Stream, name: str) -> Any:
    try:
        return getattr(stream, name)
    except Exception as error:  # the search for the end of the epoch has failed: the next batch raises it
        return str(error)


def _peer_ranks(peers: Any) -> list[int]:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("peers= needs a process group: call torch.distributed.init_process_group first.")
    require_type(MESH_TYPES, "the DeviceMesh or the process group of the ranks that share a dp rank", peers=peers)
    return sorted(ranks_in(peers=peers))


def _as_text(value: Any) -> str:
    """Return an argument of the loader as text that peers can compare."""
    if isinstance(value, MESH_TYPES):
        members, rank = members_of(value), dist.get_rank()
        return (
            f"dp rank {members.index(rank)} of {len(members)}" if rank in members else f"{members} without rank {rank}"
        )
    if isinstance(value, functools.partial):
        return f"{_as_text(value.func)} of {_as_text(value.args)} and {_as_text(value.keywords)}"  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_text, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_as_text(item)}' for name, item in value.items())}}}"  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    named_object = value if hasattr(value, "__qualname__") else type(value)
    return f"{named_object.__module__}.{named_object.__qualname__}"
