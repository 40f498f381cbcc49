"""`Broadcast`: one process of a dp rank reads, and its TP, PP and CP peers are given what it has read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.as_pipeline import refuse
from rescale_data.engine.message import Bytes, to_bytes
from rescale_data.engine.options import require_seconds
from rescale_data.engine.ranks.meeting import by_dp_rank, digest
from rescale_data.engine.ranks.peers import BATCH, RESULT, Peers
from rescale_data.engine.reading import Batches
from rescale_data.engine.report import Report
from rescale_data.errors import picklable, require_callable
from rescale_data.loader import DataLoader


class _Numbers(NamedTuple):
    """Of the loader: what each peer knows without asking. A string is why there is no such number."""

    num_batches: int | str
    batches_left: int | str
    gradient_accumulation_steps: int


class Broadcast:
    """A `DataLoader` for all processes that share a dp rank (TP, PP and CP peers), of which the first alone reads.

    The others open no file, make no request and start no worker; what they iterate over, and the state that they save, is that
    of the first. Iterating and every method that is no property, but for `progress` and `close`, is collective over the peers:
    all of them make the same calls in the same order, in one thread. Errors of the first are raised on all.

    Args:
        open_data: Without arguments, returns what `DataLoader` takes first: a pipeline, a source, a dataset. Called where it is
            read, and nowhere else.
        peers: A `DeviceMesh` of the processes that share this process's dp rank (several dims count as one), or their process
            group, on any backend: batches go from CPU to CPU, over a gloo group of their own.
        receives: Whether this process is to have batches. A pipeline stage that needs none says `False`, gets `None` for each,
            and is sent 56 bytes a batch. The first of the peers always has them.
        arguments: Those of `DataLoader`, among them ``mesh=`` or ``dp_rank=`` and ``dp_world_size=`` of the dp
            ranks.

    Attributes:
        loader: The `DataLoader` on the first of the peers; `None` elsewhere.

    Raises:
        ValueError: Peers were given different arguments (of functions the names are compared); on all of them.

    Example:
        >>> import rescale_data as rd
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> def train():  # on 8 processes
        ...     mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        ...     return rd.Broadcast(lambda: range(1000), mesh["tp"], mesh=mesh["dp"], global_batch_size=32)
    """

    def __init__(
        self, open_data: Callable[[], Any], peers: DeviceMesh | ProcessGroup, *, receives: bool = True, **arguments: Any
    ) -> None:
        require_callable(open_data=open_data)
        refuse(arguments, 1)
        bound = inspect.signature(DataLoader.__init__).bind(None, open_data, **arguments)
        bound.apply_defaults()
        if all(arguments.get(name) is None for name in ("mesh", "dp_rank")):
            raise ValueError(
                "rd.Broadcast must be told which ranks read different samples: give mesh=mesh['dp'], or dp_rank= and "
                "dp_world_size= (0 and 1 where all processes are peers)."
            )
        timeout = float(arguments.get("timeout", 300.0))
        require_seconds(timeout=timeout)
        self._pin = bool(arguments.get("pin_memory", False)) and torch.accelerator.is_available()
        told = {"open_data": _told(open_data)}
        told |= {name: _told(value) for name, value in bound.arguments.items() if name not in ("self", "pipeline")}
        self._peers, self.loader = Peers(_members(peers), receives, told, timeout), None
        if arguments.get("dp_rank") is not None:
            _come_to_the_meeting(arguments["dp_rank"], arguments.get("dp_world_size"), timeout)
        self._at = [0] * 3
        self._numbers = _Numbers(0, 0, 0)
        self._call("rd.Broadcast", lambda: self._open(open_data, arguments))

    def _open(self, open_data: Callable[[], Any], arguments: dict[str, Any]) -> None:
        self.loader = DataLoader(open_data(), **arguments)

    @property
    def _reads(self) -> bool:
        return self._peers.me == 0

    # Batches

    def __iter__(self) -> Iterator[Any]:
        """As `DataLoader.__iter__`."""
        own: list[Iterator[Any]] = []
        self._call("iter", lambda: own.extend([iter(self._own)]))
        return Batches(self.epoch, 0, lambda _: self._call("next", lambda: next(own[0]), BATCH))

    def peek(self) -> Any:
        """As `DataLoader.peek`."""
        return self._call("peek", lambda: self._own.peek(), BATCH)

    def __len__(self) -> int:
        """As `DataLoader.__len__`; not collective."""
        return _known(self._numbers.num_batches)

    def __bool__(self) -> bool:
        return True

    @property
    def batches_left(self) -> int:
        """As `DataLoader.batches_left`."""
        return _known(self._numbers.batches_left)

    @property
    def step(self) -> int:
        """As `DataLoader.step`."""
        return self._at[0]

    @property
    def epoch(self) -> int:
        """As `DataLoader.epoch`."""
        return self._at[1]

    @property
    def last_batch_samples(self) -> int:
        """As `DataLoader.last_batch_samples`."""
        return self._at[2]

    @property
    def gradient_accumulation_steps(self) -> int:
        """As `DataLoader.gradient_accumulation_steps`."""
        return self._numbers.gradient_accumulation_steps

    def progress(self) -> dict[str, float]:
        """As `DataLoader.progress` on the first of the peers; on the others ``global_step`` alone."""
        return {"global_step": float(self.step)} if self.loader is None else self.loader.progress()

    def report(self) -> Report:
        """As `DataLoader.report`, of the processes that read."""
        return self._ask("report")

    def start(self) -> None:
        """As `DataLoader.start`."""
        self._ask("start")

    def skip(self, num_samples: int) -> None:
        """As `DataLoader.skip`."""
        self._ask("skip", num_samples)

    def set_epoch(self, epoch: int) -> None:
        """As `DataLoader.set_epoch`."""
        self._ask("set_epoch", epoch)

    def reopen(self, state: Mapping[str, Any] | None = None, delivered: int = 0, **changed: Any) -> None:
        """As `DataLoader.reopen`, of the processes that read; which these are, and what they read, stays.

        The state of the first of the peers is the one that counts.
        """
        kept = [name for name in ("pipeline", "dp_rank", "dp_world_size") if name in changed]
        if kept:
            raise ValueError(f"reopen() of rd.Broadcast cannot change {kept}: give mesh= of the dp ranks.")
        self._call(
            f"reopen({_counts(state)}, {delivered}, {_told(changed)})",
            lambda: self._own.reopen(state, delivered, **changed),
        )

    def reset(self) -> None:
        """As `DataLoader.reset`."""
        self._ask("reset")

    def close(self) -> None:
        """As `DataLoader.close`; not collective."""
        if self.loader is not None:
            self.loader.close()

    def __enter__(self) -> Broadcast:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "rd.Broadcast does not pickle: in a checkpoint it is at the top level of the dict, as a DataLoader is."
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """As `DataLoader.state_dict`, equal on all peers of all dp ranks."""
        return self._ask("state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any], delivered: int = 0) -> None:
        """As `DataLoader.load_state_dict`; the state of the first of the peers is the one that counts."""
        name = f"load_state_dict({_counts(state_dict)}, {delivered})"
        self._call(name, lambda: self._own.load_state_dict(state_dict, delivered))

    # Calls

    @property
    def _own(self) -> DataLoader:
        if self.loader is None:
            raise RuntimeError("This process reads nothing.")
        return self.loader

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the loader returns, on all of them."""
        name = f"{method}({', '.join(map(repr, arguments))})"
        return self._call(name, lambda: getattr(self._own, method)(*arguments))

    def _call(self, name: str, work: Callable[[], Any], kind: int = RESULT) -> Any:
        """What a call returns on the process that reads, on all of them; a batch on those that receive batches."""
        self._peers.require_no_fork()
        if not self._reads:
            return self._hear(name)
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
        if self.loader is not None:
            self._at = [self.loader.step, self.loader.epoch, self.loader.last_batch_samples]
        self._peers.say(kind, [self._peers.digest_of(name), *self._at], said)

    def _hear(self, name: str) -> Any:
        kind, (called, *at), value = self._peers.hear(self._pin)
        if called != self._peers.digest_of(name):
            raise RuntimeError(
                f"This rank calls {name} of rd.Broadcast, the one that reads for it another method, with other arguments, or "
                f"that of another rd.Broadcast. All peers of a dp rank make the same calls in the same order."
            )
        self._at = at
        if kind == BATCH:
            self._count(name)
            return value
        self._numbers, result, error = value
        if error is not None:
            raise error
        return result

    def _count(self, name: str) -> None:
        left = self._numbers.batches_left
        if name == "next" and isinstance(left, int):
            self._numbers = self._numbers._replace(batches_left=left - 1)

    def _read_numbers(self) -> _Numbers:
        loader = self.loader
        if loader is not None:
            num_batches, left = _or_why(lambda: len(loader)), _or_why(lambda: loader.batches_left)
            self._numbers = _Numbers(num_batches, left, loader.gradient_accumulation_steps)
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
        raise RuntimeError("rd.Broadcast needs a process group: call torch.distributed.init_process_group first.")
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
    """Where all of the job say of which dp rank they are, those too that read nothing; before any reads, which may fail."""
    if not isinstance(dp_rank, int) or not isinstance(dp_world_size, int) or dist.get_world_size() == 1:
        return
    if dp_world_size > 1 and 0 <= dp_rank < dp_world_size:  # else the loader says what is wrong
        by_dp_rank(dp_rank, dp_world_size, timeout)


def _counts(state: Mapping[str, Any] | None) -> str:
    """Return a digest of the numbers and strings of a state, which tells it from others."""
    return f"{digest({name: value for name, value in (state or {}).items() if isinstance(value, int | str)}):x}"


def _told(value: Any) -> str:
    """An argument, so that two processes can compare it."""
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
