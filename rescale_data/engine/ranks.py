"""The data-parallel ranks of a run, and the few collectives that the loader makes among them.

Every collective is one all-gather on the CPU, among exactly these ranks, once all have come to it (`RollCall`).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.distributed.tensor import DTensor, Shard

from rescale_data.engine.meeting import by_dp_rank, digest, meet, part, part_of_store
from rescale_data.engine.rollcall import Missing, RollCall, Store
from rescale_data.state import Ints

_logger = logging.getLogger("rescale_data")
_MODEL_DIMS = {"tp", "tensor", "tensor_parallel", "pp", "pipeline", "cp", "context", "sp", "ep", "expert"}
_SECONDS_AFTER_A_FAILURE = 10.0  # within which those that live say so


class Exchanges(Protocol):
    """What is asked of a group: torch's process groups and their backends have it."""

    def allgather(self, output_tensors: Any, input_tensors: Any) -> Any: ...


class Circle:
    """A fixed set of processes, shared by all loaders of this process over it.

    Args:
        group: Of exactly these processes.
        store: A part of a store that is theirs alone.
        me: Index of this process.
        names: Their ranks in the job, for messages.
    """

    def __init__(self, group: Exchanges, store: Store, me: int, names: Sequence[int]) -> None:
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
                gathered = torch.empty((len(self._names), *tensor.shape), dtype=tensor.dtype)
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


_RESTART = "State that was saved is whole; restart from it."
_CALL_ON_ALL = "A state is made by all dp ranks together: call it on every rank, before `if rank == 0`."


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among the data-parallel ranks.

    Args:
        rank: Data-parallel rank, ``0 <= rank < world_size``.
        world_size: W.
        circle: The processes of these ranks, in their order; `None` without a process group, and for a single rank.
        mesh: One-dimensional CPU mesh of the ranks, only to name them; `None` where torch has no group of just these.
        timeout: Seconds that a rank which does nothing may keep the others waiting.
        save_timeout: The same for a state.
        loader: Tells the loaders of a process apart.
        leg: Tells apart what a loader exchanges before a load and after it: ranks may have stood at different batches.
    """

    rank: int = 0
    world_size: int = 1
    circle: Circle | None = None
    mesh: DeviceMesh | None = None
    timeout: float = 300.0
    save_timeout: float = 60.0
    loader: int = 0
    leg: int = 0
    _saves: bool = False

    @property
    def simulated(self) -> bool:
        """Whether the other ranks cannot be reached: ``dp_rank`` and ``dp_world_size`` were given without a process group."""
        return self.world_size > 1 and self.circle is None

    @property
    def saving(self) -> Ranks:
        """The same ranks for what all of them call to have a state: a rank that calls alone is told so, and soon."""
        return replace(self, _saves=True)

    @property
    def next_leg(self) -> Ranks:
        """The same ranks after a load."""
        return replace(self, leg=self.leg + 1)

    def log(self, level: int, message: str, *values: object) -> None:
        """Say something once a run: on dp rank 0."""
        if self.rank == 0:
            _logger.log(level, message, *values)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """While this rank reads, others may wait for it: that time does not count."""
        return contextlib.nullcontext() if self.circle is None else self.circle.roll_call.reading()

    def merge(self, table: Ints, owner: Ints) -> Ints:
        """The table with each row as the rank has it that owns it (collective); where there is but one rank, the table itself.

        Args:
            table: ``int64[N, columns]``.
            owner: ``int64[N]``, the rank that has each row right; the same on every rank.
        """
        if self.circle is None:
            return table
        counts = np.bincount(owner, minlength=self.world_size)
        mine = np.zeros((counts.max(), table.shape[1]), dtype=np.int64)
        mine[: counts[self.rank]] = table[owner == self.rank]
        blocks = self._gather(torch.from_numpy(mine)).numpy()
        merged = np.empty_like(table)
        merged[np.argsort(owner, kind="stable")] = np.concatenate(
            [block[:count] for block, count in zip(blocks, counts, strict=True)]
        )
        return merged

    def share(self, data: bytes) -> bytes:
        """What some ranks have, the same on each of them, on all ranks (collective): each that has it gives a part of it."""
        if self.circle is None:
            return data
        sizes = self.each([len(data)])[:, 0]
        givers = np.flatnonzero(sizes)
        part = np.zeros(-(-int(sizes.max()) // max(1, len(givers))), dtype=np.uint8)
        if data:
            first = int(np.searchsorted(givers, self.rank)) * len(part)
            mine = np.frombuffer(data, dtype=np.uint8)[first : first + len(part)]
            part[: len(mine)] = mine
        return self._gather(torch.from_numpy(part)).numpy()[givers].tobytes()[: int(sizes.max())]

    def each(self, values: Sequence[int]) -> Ints:
        """A few integers of every rank: ``int64[W, len(values)]`` (collective)."""
        return self._agree("each", values, np.ravel)().reshape(-1, len(values))

    def numbers(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Numbers of every rank: ``float64[W, len(values)]`` (collective)."""
        return self._gather(torch.tensor(values, dtype=torch.float64), "numbers").numpy()

    def least(self, value: int) -> Callable[[], int]:
        """Say a value ahead of time; the result, called, waits for the smallest of all ranks' values (collective)."""
        finish = self._agree("sure", [value], lambda values: values.min(axis=0))
        return lambda: int(finish()[0])

    def extremes(self, value: int) -> tuple[int, int]:
        """The smallest and the largest of all ranks' values (collective)."""
        low, high = self._agree("extremes", [value], lambda values: np.array([values.min(), values.max()]))().tolist()
        return low, high

    def require_same(self, what: dict[str, Any]) -> None:
        """``ValueError`` on every rank where some value differs between ranks, which names it (collective)."""
        digests = self._gather(torch.tensor([digest(value) for value in what.values()]), "same")
        differing = [name for name, values in zip(what, digests.T, strict=True) if (values != values[0]).any()]
        if differing:
            given = {name: what[name] for name in differing}
            raise ValueError(
                f"The ranks built their loaders with different {', '.join(differing)}; dp rank {self.rank} has {given}. "
                f"All ranks need the same arguments and the same files."
            )

    def shard(self, tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
        """This rank's block of rows as a `DTensor` over all ranks; ``num_rows`` is a multiple of W."""
        if self.mesh is None:
            raise ValueError("These ranks have no mesh.")
        shape = (num_rows, *tensor.shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All rows of what `shard` made, or of any other `DTensor` (collective); a plain tensor as it is."""
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.device_mesh is not self.mesh:
            return tensor.full_tensor()
        return self._gather(tensor.to_local()).flatten(0, 1)

    def _gather(self, tensor: torch.Tensor, what: str = "rows") -> torch.Tensor:
        return tensor[None] if self.circle is None else self.circle.gather(self._call(what), tensor)

    def _agree(self, what: str, values: Sequence[int], decide: Callable[[Ints], Ints]) -> Callable[[], Ints]:
        if self.circle is None:
            alone = decide(np.array([values], dtype=np.int64))
            return lambda: alone
        return self.circle.agree(self._call(what), values, decide)

    def _call(self, what: str) -> Call:
        seconds, cure = (self.save_timeout, _CALL_ON_ALL) if self._saves else (self.timeout, _RESTART)
        name = f"save/{what}/{self.loader}" if self._saves else f"read/{what}/{self.loader}.{self.leg}"
        return Call(name, seconds, not self._saves, cure)


def find_ranks(
    mesh: DeviceMesh | None,
    dp_rank: int | None,
    dp_world_size: int | None,
    group: dist.ProcessGroup | None,
    timeout: float,
    save_timeout: float,
) -> Ranks:
    """The ranks that the arguments of a loader name (collective where there is a process group).

    Args:
        mesh: Mesh of the data-parallel ranks; several dims count row-major as one.
        dp_rank: In place of a mesh, together with ``dp_world_size``.
        group: Of exactly these ranks in their order, and able to exchange CPU tensors; without, one is made.
    """
    if (dp_rank is None) != (dp_world_size is None):
        raise ValueError(f"dp_rank={dp_rank} and dp_world_size={dp_world_size}: give both, or neither.")
    if mesh is not None and dp_rank is not None:
        raise ValueError("Give mesh= or dp_rank= and dp_world_size=, not both.")
    if mesh is not None and not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"mesh={mesh!r} is a {type(mesh).__name__}: give a DeviceMesh of the dp ranks, world_mesh['dp']."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"group={group!r} is a {type(group).__name__}: give a process group of the dp ranks.")
    if dp_rank is not None and dp_world_size is not None and not 0 <= dp_rank < dp_world_size:
        raise ValueError(
            f"dp_rank={dp_rank}, dp_world_size={dp_world_size}: a rank is at least 0 and less than the size."
        )
    distributed = dist.is_available() and dist.is_initialized()
    if (
        not distributed
        or (dp_world_size == 1 and group is None)
        or (dp_rank is not None and dist.get_world_size() == 1)
    ):
        return Ranks(dp_rank or 0, dp_world_size or 1)
    if dp_rank is not None and dp_world_size is not None and group is None:
        members = by_dp_rank(dp_rank, dp_world_size, timeout)
    else:
        members = _named(mesh, group)
    me = members.index(dist.get_rank())
    if dp_rank is not None and (me, len(members)) != (dp_rank, dp_world_size):
        raise ValueError(
            f"This process is rank {me} of {len(members)} in group=, but dp_rank={dp_rank} and dp_world_size={dp_world_size} "
            f"were given: the group holds exactly the dp ranks, in their order."
        )
    if len(members) == 1:
        return Ranks()
    if group is not None and "cpu:" not in dist.get_backend_config(group):
        raise ValueError(
            f"group= has the backend {dist.get_backend_config(group)!r} and exchanges no CPU tensors, which the loader does. "
            f"Give a group with one for them, 'cpu:gloo,cuda:nccl', or mesh= of the same ranks: the loader then makes its own."
        )
    circle = _circle(members, group, timeout)
    circle.num_loaders += 1
    named = _mesh(members, mesh, group)
    return Ranks(me, len(members), circle, named, timeout, save_timeout, circle.num_loaders)


def _named(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of a mesh, of a group, or of the whole job."""
    me = dist.get_rank()
    of_group = None if group is None else dist.get_process_group_ranks(group)
    if mesh is not None:
        members = _of_mesh(mesh)
        if of_group not in (None, members):
            raise ValueError(
                f"mesh holds the ranks {members}, group the ranks {of_group}: give the same, in one order."
            )
    elif of_group is not None:
        members = of_group
    else:
        members = list(range(dist.get_world_size()))
        _logger.info(
            "No mesh given: all %d ranks of the process group read different samples. With TP, PP or CP pass mesh= (the data-"
            "parallel dims alone), or peers that should read the same samples will not.",
            len(members),
        )
    if me not in members:
        raise ValueError(
            f"This process has rank {me}, but {'group' if mesh is None else 'mesh'} holds the ranks {members}: pass the one "
            f"that it is part of."
        )
    return members


def _of_mesh(mesh: DeviceMesh) -> list[int]:
    model_dims = [name for name in mesh.mesh_dim_names or () if name.lower() in _MODEL_DIMS]
    if model_dims:
        raise ValueError(
            f"mesh has the dims {mesh.mesh_dim_names}; the ranks along {model_dims} share their samples. Pass the data-"
            f"parallel dims alone, for example mesh=world_mesh['dp']."
        )
    return mesh.mesh.flatten().tolist()


def _mesh(members: list[int], mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> DeviceMesh | None:
    """The members as a CPU mesh over a group that torch knows."""
    if group is None and members == list(range(dist.get_world_size())):
        group = dist.group.WORLD
    if group is None and mesh is not None and mesh.ndim == 1:
        group = mesh.get_group()
    if group is None or dist.get_process_group_ranks(group) != members:
        return None
    return DeviceMesh.from_group(group, "cpu", mesh=members, mesh_dim_names=("dp",))


_circles: WeakKeyDictionary[Any, dict[Any, Circle]] = WeakKeyDictionary()
"""Of each process group: those that were made beside it, by their members; of a job's: all that have no group of torch's."""


def _circle(members: list[int], group: dist.ProcessGroup | None, timeout: float) -> Circle:
    """One circle for all loaders over the same ranks, as long as the job's process group, or the given one, exists."""
    beside = dist.group.WORLD if group is None else group
    known = _circles.setdefault(beside, {})
    if tuple(members) not in known:
        known[tuple(members)] = _new_circle(members, group, timeout)
    return known[tuple(members)]


def _new_circle(members: list[int], group: dist.ProcessGroup | None, timeout: float) -> Circle:
    me, store = members.index(dist.get_rank()), part_of_store(f"circle/{digest(members)}", len(members), group)
    exchanges: Any = group
    if exchanges is None:
        meet(store, me, members, timeout)
        wait = datetime.timedelta(seconds=timeout)
        exchanges = ProcessGroupGloo(part("gloo", store), me, len(members), wait)
    return Circle(exchanges, store, me, members)
