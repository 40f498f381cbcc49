"""The data-parallel ranks of a run, and the few collectives that the loader makes among them.

Every collective runs on the CPU, on one gloo group of the loader's own, so that it never meets the trainer's.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import new_group
from torch.distributed.tensor import DTensor, Shard

from rescale_data.engine.rollcall import RollCall
from rescale_data.state import Ints

_logger = logging.getLogger("rescale_data")
_LOWEST = torch.iinfo(torch.int64).min
_MODEL_DIMS = {"tp", "tensor", "tensor_parallel", "pp", "pipeline", "cp", "context", "sp", "ep", "expert"}


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among the data-parallel ranks.

    Args:
        rank: Data-parallel rank, ``0 <= rank < world_size``.
        world_size: W.
        group: The loader's own gloo group; `None` without a process group.
        roll_call: Tells who is missing in that group.
        mesh: One-dimensional CPU mesh of exactly the W ranks; `None` where the group has other members too, or another order.
    """

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    roll_call: RollCall | None = None
    mesh: DeviceMesh | None = None

    @property
    def simulated(self) -> bool:
        """Whether the other ranks cannot be reached: ``dp_rank`` and ``dp_world_size`` were given without a process group."""
        return self.world_size > 1 and self.group is None

    def log(self, level: int, message: str, *values: object) -> None:
        """Say something once a run: on dp rank 0."""
        if self.rank == 0:
            _logger.log(level, message, *values)

    def merge(self, table: Ints) -> Ints:
        """The table with each row as the rank has it that served its shard last (collective).

        Args:
            table: ``int64[N, columns]``, the first column the samples that each shard has delivered.
        """
        if self.world_size == 1:
            return table.copy()
        rows = torch.from_numpy(table.copy())
        newest = rows[:, 0].clone()
        self._all_reduce(newest, dist.ReduceOp.MAX)
        rows[rows[:, 0] < newest] = _LOWEST
        self._all_reduce(rows, dist.ReduceOp.MAX)
        return rows.numpy()

    def gather(self, table: Ints, owned: range) -> Ints:
        """The table with each row as the rank has it that owns its shard (collective).

        Args:
            table: ``int64[N, columns]``.
            owned: The rows of this rank; every rank has ``N / W`` of them, rounded up or down.
        """
        if self.world_size == 1:
            return table.copy()
        mine = torch.full((-(-len(table) // self.world_size), 1 + table.shape[1]), -1, dtype=torch.int64)
        mine[: len(owned), 0] = torch.arange(owned.start, owned.stop)
        mine[: len(owned), 1:] = torch.from_numpy(table[owned.start : owned.stop])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        self._begin(dist.all_gather, parts, mine)()
        rows = torch.cat(parts)
        rows = rows[rows[:, 0] >= 0]
        whole = torch.from_numpy(table.copy())
        whole[rows[:, 0]] = rows[:, 1:]
        return whole.numpy()

    def meet(self, what: str) -> None:
        """Wait for all ranks to come to something that users call, before the first collective of it (collective).

        Raises:
            RuntimeError: Some did not come in time; they can still go on together.
        """
        if self.roll_call is not None:
            self.roll_call.meet(what)

    def least(self, value: int) -> Callable[[], int]:
        """Begin to find the smallest of all ranks' values in the background (collective); the result, called, waits for it."""
        least = torch.tensor([value], dtype=torch.int64)
        finish = self._begin_all_reduce(least, dist.ReduceOp.MIN)

        def result() -> int:
            finish()
            return int(least)

        return result

    def extremes(self, value: int) -> tuple[int, int]:
        """The smallest and the largest of all ranks' values (collective)."""
        ends = torch.tensor([-value, value], dtype=torch.int64)
        self._all_reduce(ends, dist.ReduceOp.MAX)
        return -int(ends[0]), int(ends[1])

    def require_same(self, what: dict[str, Any]) -> None:
        """``ValueError`` on every rank where some value differs between ranks, which names it (collective)."""
        if self.group is None:
            return
        digests = torch.tensor([_digest(value) for value in what.values()], dtype=torch.int64)
        low, high = digests.clone(), digests.clone()
        self._all_reduce(low, dist.ReduceOp.MIN)
        self._all_reduce(high, dist.ReduceOp.MAX)
        differing = [name for name, same in zip(what, (low == high).tolist(), strict=True) if not same]
        if differing:
            given = {name: what[name] for name in differing}
            raise ValueError(
                f"The ranks built their loaders with different {', '.join(differing)}; dp rank {self.rank} has {given}. "
                f"All ranks need the same arguments and the same files."
            )

    def require_complete(self) -> None:
        """``ValueError`` on every rank where some dp rank has no process: its shards would be read by nobody (collective)."""
        self.require_same({"dp_world_size": self.world_size})
        present = torch.zeros(self.world_size, dtype=torch.int64)
        present[self.rank] = 1
        self._all_reduce(present, dist.ReduceOp.MAX)
        missing = torch.nonzero(present == 0).flatten().tolist()
        if missing and self.group is not None:
            raise ValueError(
                f"dp_world_size={self.world_size}, but no process of the group was given dp_rank={missing[0]} ({len(missing)} "
                f"of the dp ranks are missing), so their logical shards would never be read. Give each dp rank to a process "
                f"at least, or pass mesh= in place of dp_rank= and dp_world_size=."
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

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        self._begin_all_reduce(tensor, op)()

    def _begin_all_reduce(self, tensor: torch.Tensor, op: Any) -> Callable[[], None]:
        return self._begin(dist.all_reduce, tensor, op=op)

    def _begin(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
        """Begin a collective; the result, called, waits for it."""
        if self.group is None or self.roll_call is None:
            return lambda: None
        roll_call = self.roll_call
        deadline = roll_call.come()
        work = collective(*args, **kwargs, group=self.group, async_op=True)

        def finish() -> None:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise roll_call.failure(error, deadline) from error

        return finish


def find_ranks(mesh: DeviceMesh | None, dp_rank: int | None, dp_world_size: int | None, timeout: float) -> Ranks:
    """The ranks that the arguments of a loader name (collective where there is a process group).

    Args:
        mesh: Mesh of the data-parallel ranks; several dims count row-major as one.
        dp_rank: In place of a mesh, together with ``dp_world_size``.
    """
    if (dp_rank is None) != (dp_world_size is None):
        raise ValueError(f"dp_rank={dp_rank} and dp_world_size={dp_world_size}: give both, or neither.")
    if mesh is not None and dp_rank is not None:
        raise ValueError("Give mesh= or dp_rank= and dp_world_size=, not both.")
    if mesh is not None and not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"mesh={mesh!r} is a {type(mesh).__name__}: give a DeviceMesh of the dp ranks, world_mesh['dp']."
        )
    if mesh is not None:
        return _from_mesh(mesh, timeout)
    distributed = dist.is_available() and dist.is_initialized()
    if dp_rank is not None and dp_world_size is not None:
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(
                f"dp_rank={dp_rank}, dp_world_size={dp_world_size}: a rank is at least 0 and less than the size."
            )
        reachable = distributed and dp_world_size > 1 and dist.get_world_size() > 1
        everyone = list(range(dist.get_world_size())) if reachable else []
        ranks = Ranks(dp_rank, dp_world_size, *_own_group(everyone, timeout))
        ranks.require_complete()
        return ranks
    if not distributed:
        return Ranks()
    _logger.info(
        "No mesh given: all %d ranks of the process group read different samples. With TP, PP or CP pass mesh= (the data-"
        "parallel dims alone), or peers that should read the same samples will not.",
        dist.get_world_size(),
    )
    return _from_ranks(list(range(dist.get_world_size())), timeout)


def _from_mesh(mesh: DeviceMesh, timeout: float) -> Ranks:
    model_dims = [name for name in mesh.mesh_dim_names or () if name.lower() in _MODEL_DIMS]
    if model_dims:
        raise ValueError(
            f"mesh has the dims {mesh.mesh_dim_names}; the ranks along {model_dims} share their samples. Pass the data-"
            f"parallel dims alone, for example mesh=world_mesh['dp']."
        )
    return _from_ranks(mesh.mesh.flatten().tolist(), timeout)


def _from_ranks(ranks: list[int], timeout: float) -> Ranks:
    me = dist.get_rank()
    if me not in ranks:
        raise ValueError(
            f"This process has rank {me}, but mesh holds the ranks {ranks}: pass the mesh that it is part of."
        )
    if len(ranks) == 1:
        return Ranks()
    in_order = sorted(ranks)
    group, roll_call = _own_group(in_order, timeout)
    mesh = None  # of ranks in another order than the group's torch makes none: they gather their rows
    if group is not None and ranks == in_order:
        mesh = DeviceMesh.from_group(group, "cpu", mesh=ranks, mesh_dim_names=("dp",))
    return Ranks(ranks.index(me), len(ranks), group, roll_call, mesh)


def _own_group(ranks: list[int], timeout: float) -> tuple[dist.ProcessGroup | None, RollCall | None]:
    if not ranks:
        return None, None
    wait = datetime.timedelta(seconds=timeout)
    group = new_group(  # not dist.new_group, which torch_xla replaces by one that takes less
        ranks, timeout=wait, backend="gloo", use_local_synchronization=True
    )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"This process is not one of the ranks {ranks}.")
    return group, RollCall(group, ranks, timeout)


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
