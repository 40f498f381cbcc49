"""`PeerCalls`: the calls of a loader that the TP, PP and CP peers of a dp rank share.

The first peer reads, and sends its batches to the other peers. These build no pipeline, open no file, make no request and start
no worker. All calls except the numbers, `progress` and `close` are collective over the peers: the first peer makes the call,
and all peers get its result or its error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

from rescale_data.engine.message import to_bytes
from rescale_data.engine.options import Options
from rescale_data.engine.ranks.find_ranks import MESH_TYPES, members_of, ranks_in
from rescale_data.engine.ranks.meeting import members_by_dp_rank
from rescale_data.engine.ranks.peers import BATCH_MESSAGE, RESULT, PeerGroup
from rescale_data.engine.stream import STOP_ITERATION_MESSAGE, Stream
from rescale_data.engine.transfer import transfer_function
from rescale_data.errors import require_callable, require_type, to_picklable

P = ParamSpec("P")
R = TypeVar("R")
_NO_COUNTS = (0, 0, 0, 0)
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


class PeerCalls:
    """Makes each call of a loader together with its peers: the first peer does the work, and sends the result to the others.

    Args:
        pipeline: A function that returns the first argument of a `DataLoader` without peers.
        options: The other arguments of `DataLoader`.

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
        self._pins_batches = options.pins_batches
        self._transfer = transfer_function(options.transfer)
        arguments = {"pipeline": pipeline, **vars(options)}
        settings = {name: _setting(value) for name, value in arguments.items() if name not in ("peers", "receives")}
        self._peers = PeerGroup(_peer_ranks(options.peers), options.receives, settings, options.timeout)
        self.counts = BatchCounts() if self._peers.my_index else None
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
        self._peers.require_no_fork()
        value = (
            self._receive(call_text) if self._peers.my_index else self._run_work(loader, call_text, message_kind, work)
        )
        return self._transfer_batch(value, message_kind) if message_kind != RESULT and value is not None else value

    def _run_work(self, loader: Any, call_text: str, message_kind: int, work: Callable[[], Any]) -> Any:
        call_digest = self._peers.digest_of(call_text)
        try:
            value = work()
            packed_bytes = to_bytes(value if message_kind != RESULT else (BatchCounts.of(loader), value, None))
        except Exception as error:
            packed_bytes = to_bytes((BatchCounts.of(loader), None, to_picklable(error)))
            self._peers.send(RESULT, [call_digest, *_NO_COUNTS], packed_bytes)
            raise
        batch_counts = _NO_COUNTS
        if message_kind != RESULT:
            stream: Stream = loader._own_stream
            batch_counts = stream.step, stream.epoch, stream.last_batch_samples, stream.epoch_ended
        self._peers.send(message_kind, [call_digest, *batch_counts], packed_bytes)
        return value

    def _receive(self, name: str) -> Any:
        message_kind, (call_digest, step, epoch, num_real, has_ended), value = self._peers.receive(self._pins_batches)
        if call_digest != self._peers.digest_of(name):
            raise RuntimeError(
                f"This rank calls {name:.200} of a loader with peers=, the one that reads for it another method, with other "
                f"arguments, or that of another loader. All peers of a dp rank make the same calls in the same order."
            )
        if message_kind != RESULT:
            counts = self.counts or BatchCounts()
            num_left = counts.batches_left
            num_left = num_left - 1 if message_kind == BATCH_MESSAGE and isinstance(num_left, int) else num_left
            num_left = 0 if has_ended else num_left
            self.counts = counts._replace(step=step, epoch=epoch, last_batch_samples=num_real, batches_left=num_left)
            return value
        self.counts, call_result, error = value
        if error is not None:
            raise error
        return call_result

    def _transfer_batch(self, batch: Any, message_kind: int) -> Any:
        try:
            return batch if self._transfer is None else self._transfer(batch)
        except Exception as cause:
            error = RuntimeError(STOP_ITERATION_MESSAGE) if isinstance(cause, StopIteration) else cause
            if message_kind == BATCH_MESSAGE:
                error.add_note(_UNTRANSFERRED_NOTE)
            raise error from cause.__cause__


def on_first_peer(kind: int) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Return a decorator for methods of a `BaseLoader`: its peers call them together, and the first peer does the work.

    Args:
        kind: `BATCH_MESSAGE` if the methods return the next batch, `PEEKED_MESSAGE` if it stays the next; only some peers
            receive it. Else `RESULT`.
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            if self._shared is None:
                return method(self, *args, **kwargs)
            call_text = f"{method.__name__.strip('_')}({_setting(args)}, {_setting(kwargs)})"
            return self._shared.share_call(self, call_text, kind, functools.partial(method, self, *args, **kwargs))

        return call

    return decorate


def _count_or_reason(stream: Stream, name: str) -> Any:
    try:
        return getattr(stream, name)
    except Exception as error:  # the search for the end of the epoch has failed: the next batch raises it
        return str(error)


def require_number(number: int | str) -> int:
    """Return a count of batches; raise ``TypeError`` with the reason, a text, if it is not known."""
    if isinstance(number, str):
        raise TypeError(number)
    return number


def _peer_ranks(peers: Any) -> list[int]:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("peers= needs a process group: call torch.distributed.init_process_group first.")
    require_type(MESH_TYPES, "the DeviceMesh or the process group of the ranks that share a dp rank", peers=peers)
    return sorted(ranks_in(peers=peers))


def _setting(value: Any) -> str:
    """Return an argument of the loader as text that peers can compare."""
    if isinstance(value, MESH_TYPES):
        members, rank = members_of(value), dist.get_rank()
        return (
            f"dp rank {members.index(rank)} of {len(members)}" if rank in members else f"{members} without rank {rank}"
        )
    if isinstance(value, functools.partial):
        return f"{_setting(value.func)} of {_setting(value.args)} and {_setting(value.keywords)}"  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_setting, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_setting(item)}' for name, item in value.items())}}}"  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    named_object = value if hasattr(value, "__qualname__") else type(value)
    return f"{named_object.__module__}.{named_object.__qualname__}"
