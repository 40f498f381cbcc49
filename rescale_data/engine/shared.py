"""`Shared`: the `Reading` that the TP, PP and CP peers of a dp rank share.

The first peer reads, and sends its batches to the other peers. These build no pipeline, open no file, make no request and start
no worker. All calls except the numbers, `progress` and `close` are collective over the peers: the first peer makes the call,
and all peers get its result or its error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.message import Bytes, to_bytes
from rescale_data.engine.options import Options
from rescale_data.engine.ranks.meeting import by_dp_rank, digest
from rescale_data.engine.ranks.peers import BATCH, RESULT, Peers
from rescale_data.engine.reading import Batches, Reading
from rescale_data.engine.stream import ENDS_NOTHING
from rescale_data.engine.transfer import function_of
from rescale_data.errors import picklable, require_callable

_CALLS = ("report", "start", "skip", "set_epoch", "reset", "state_dict", "local_state_dict")


class _Numbers(NamedTuple):
    """Numbers of the loader that each peer knows without asking. A string says why there is no such number."""

    num_batches: int | str
    batches_left: int | str
    gradient_accumulation_steps: int


class Shared:
    """The methods of `Reading`, on each of the peers.

    Args:
        open_reading: Returns the `Reading` of the dp rank, with some arguments changed. Only the first peer calls it.
        pipeline: A function that returns the first argument of a `DataLoader` without peers.
        options: The other arguments of `DataLoader`.

    Raises:
        ValueError: Peers were given different arguments (functions are compared by name); all peers raise it.
    """

    def __init__(self, open_reading: Callable[..., Reading], pipeline: object, options: Options) -> None:
        require_callable(pipeline=pipeline)
        if options.mesh is None and options.dp_rank is None:
            raise ValueError(
                "With peers= say which ranks read different samples: give mesh=mesh['dp'], or dp_rank= and dp_world_size= (0 "
                "and 1 where all processes are peers)."
            )
        self._pin = options.pin_memory and torch.accelerator.is_available()
        self._send = function_of(options.transfer)
        given = {"pipeline": pipeline, **vars(options)}
        told = {name: _told(value) for name, value in given.items() if name not in ("peers", "receives")}
        self._peers = Peers(_members(options.peers), options.receives, told, options.timeout)
        if options.dp_rank is not None:
            _come_to_the_meeting(options.dp_rank, options.dp_world_size, options.timeout)
        self._reading: Reading | None = None
        self.step = self.epoch = self.last_batch_samples = 0
        self._numbers = _Numbers(0, 0, 0)
        self._call("DataLoader", lambda: self._open(open_reading))

    def _open(self, open_reading: Callable[..., Reading]) -> None:
        self._reading = open_reading()

    def __getattr__(self, name: str) -> Any:
        """Return a method of the `Reading`, which all peers have to call."""
        if name not in _CALLS:
            raise AttributeError(f"A loader that peers share has no {name}.")
        return lambda *arguments: self._call(  # pyright: ignore[reportUnknownLambdaType]
            f"{name}({', '.join(map(repr, arguments))})", lambda: getattr(self._own, name)(*arguments)
        )

    def __iter__(self) -> Batches:
        own: list[Iterator[Any]] = []
        self._call("iter", lambda: own.extend([iter(self._own)]))
        return Batches(self.epoch, 0, lambda _: self._call("next", lambda: next(own[0]), BATCH))

    def peek(self) -> Any:
        return self._call("peek", lambda: self._own.peek(), BATCH)

    def __len__(self) -> int:
        return _known(self._numbers.num_batches)

    @property
    def batches_left(self) -> int:
        return _known(self._numbers.batches_left)

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._numbers.gradient_accumulation_steps

    def progress(self) -> dict[str, float]:
        return {"global_step": float(self.step)} if self._reading is None else self._reading.progress()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()

    def load_state_dict(self, state: Mapping[str, Any], delivered: int = 0) -> None:
        name = f"load_state_dict({_counts(state)}, {delivered})"  # only the first peer's state is loaded
        self._call(name, lambda: self._own.load_state_dict(state, delivered))

    def reopen(
        self,
        open_reading: Callable[..., Reading],
        state: Mapping[str, Any] | None,
        delivered: int,
        changed: Mapping[str, Any],
    ) -> None:
        kept = [name for name in ("pipeline", "dp_rank", "dp_world_size", "transfer") if changed.get(name) is not None]
        if kept:
            raise ValueError(f"reopen() with peers= cannot change {kept}: give mesh= of the dp ranks.")
        name = f"reopen({_counts(state)}, {delivered}, {_told(changed)})"
        self._call(name, lambda: self._own.reopen(open_reading, state, delivered, changed))

    # Calls

    @property
    def _own(self) -> Reading:
        if self._reading is None:
            raise RuntimeError("This process reads nothing.")
        return self._reading

    def _call(self, name: str, work: Callable[[], Any], kind: int = RESULT) -> Any:
        """Return the result of the first peer's call on all peers; a batch only on peers that receive batches."""
        self._peers.require_no_fork()
        if self._peers.me:
            kind, value = self._hear(name)
        else:
            value = self._work(name, work, kind)
        return self._sent(value) if kind == BATCH and value is not None else value

    def _sent(self, batch: Any) -> Any:
        try:
            return batch if self._send is None else self._send(batch)
        except StopIteration as error:
            raise RuntimeError(ENDS_NOTHING) from error

    def _work(self, name: str, work: Callable[[], Any], kind: int) -> Any:
        try:
            value = work()
            said = to_bytes(value if kind == BATCH else (self._read_numbers(), value, None))
        except Exception as error:
            self._say(name, RESULT, to_bytes((self._read_numbers(), None, picklable(error))))
            raise
        if kind == BATCH:
            self._count(name)
        self._say(name, kind, said)
        return value

    def _say(self, name: str, kind: int, said: Bytes) -> None:
        if self._reading is not None:
            of = self._reading
            self.step, self.epoch, self.last_batch_samples = of.step, of.epoch, of.last_batch_samples
        self._peers.say(kind, [self._peers.digest_of(name), self.step, self.epoch, self.last_batch_samples], said)

    def _hear(self, name: str) -> tuple[int, Any]:
        kind, (called, *at), value = self._peers.hear(self._pin)
        if called != self._peers.digest_of(name):
            raise RuntimeError(
                f"This rank calls {name} of a loader with peers=, the one that reads for it another method, with other "
                f"arguments, or that of another loader. All peers of a dp rank make the same calls in the same order."
            )
        self.step, self.epoch, self.last_batch_samples = at
        if kind == BATCH:
            self._count(name)
            return kind, value
        self._numbers, result, error = value
        if error is not None:
            raise error
        return kind, result

    def _count(self, name: str) -> None:
        left = self._numbers.batches_left
        if name == "next" and isinstance(left, int):
            self._numbers = self._numbers._replace(batches_left=left - 1)

    def _read_numbers(self) -> _Numbers:
        of = self._reading
        if of is not None:
            left = _or_why(lambda: of.batches_left)
            self._numbers = _Numbers(_or_why(partial(len, of)), left, of.gradient_accumulation_steps)
        return self._numbers


def _or_why(number: Callable[[], int]) -> int | str:
    try:
        return number()
    except Exception as error:
        return str(error)


def _known(number: int | str) -> int:
    if isinstance(number, str):
        raise TypeError(number)
    return number


def _members(peers: object) -> list[int]:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("peers= needs a process group: call torch.distributed.init_process_group first.")
    if isinstance(peers, DeviceMesh):
        members: list[int] = sorted(peers.mesh.flatten().tolist())
    elif isinstance(peers, ProcessGroup):
        members = sorted(dist.get_process_group_ranks(peers))
    else:
        raise TypeError(
            f"peers={peers!r} is a {type(peers).__name__}: give the DeviceMesh or the process group of the ranks that share a "
            f"dp rank."
        )
    if dist.get_rank() not in members:
        raise ValueError(f"This process has rank {dist.get_rank()}, but peers holds the ranks {members}: pass its own.")
    return members


def _come_to_the_meeting(dp_rank: Any, dp_world_size: Any, timeout: float) -> None:
    """Meet all processes of the job, also the ones that read nothing. This comes before any read, since reads may fail."""
    if not isinstance(dp_rank, int) or not isinstance(dp_world_size, int) or dist.get_world_size() == 1:
        return
    if dp_world_size > 1 and 0 <= dp_rank < dp_world_size:  # otherwise the loader raises an error
        by_dp_rank(dp_rank, dp_world_size, timeout)


def _counts(state: Mapping[str, Any] | None) -> str:
    """Return a digest of the numbers and strings of a state, by which peers compare their states."""
    return f"{digest({name: value for name, value in (state or {}).items() if isinstance(value, int | str)}):x}"


def _told(value: Any) -> str:
    """Return an argument as text that two processes can compare."""
    if isinstance(value, DeviceMesh):
        return f"dp rank {value.mesh.flatten().tolist().index(dist.get_rank())} of {value.size()}"
    if isinstance(value, ProcessGroup):
        return f"dp rank {value.rank()} of {value.size()}"
    if isinstance(value, functools.partial):
        return f"{_told(value.func)} of {_told(value.args)} and {_told(value.keywords)}"  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_told, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_told(of)}' for name, of in value.items())}}}"  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
