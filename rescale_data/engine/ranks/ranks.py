"""The data-parallel ranks of a run, and the few collectives that the loader makes among them.

Every collective is one all-gather on the CPU, among exactly these ranks, once all have come to it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rescale_data.engine.ranks.circle import Call, Circle
from rescale_data.engine.ranks.meeting import digest
from rescale_data.state import Ints

_logger = logging.getLogger("rescale_data")
_RESTART = "State that was saved is whole; restart from it."
_CALL_ON_ALL = "A state is made by all dp ranks together: call it on every rank, before `if rank == 0`."

_FREE = contextlib.nullcontext()


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

    def warn(self, message: str, *values: object) -> None:
        """Say something once a run: on dp rank 0."""
        if self.rank == 0:
            _logger.warning(message, *values)

    def info(self, message: str, *values: object) -> None:
        """The same of what is as it should be."""
        if self.rank == 0:
            _logger.info(message, *values)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """While this rank reads, others may wait for it: that time does not count."""
        return _FREE if self.circle is None else self.circle.roll_call.reading()

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
        return self._gather(torch.tensor(values, dtype=torch.float64, device="cpu"), "numbers").numpy()

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
        digests = self._gather(torch.tensor([digest(value) for value in what.values()], device="cpu"), "same")
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
