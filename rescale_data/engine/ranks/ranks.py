"""The data-parallel ranks of a loader.

`Ranks`: the ranks, and the collectives among them. Each is one all-gather on the CPU; it begins when all ranks have come.
`call_on_all_ranks`: a call that raises on all ranks if it fails on one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from rescale_data.engine.ranks.communicator import Call, Communicator, T
from rescale_data.engine.ranks.meeting import digest
from rescale_data.errors import DataStateError
from rescale_data.state import Ints

R = TypeVar("R")
_logger = logging.getLogger("rescale_data")
Purpose: TypeAlias = Literal["read", "save", "load"]
BUILD_LATER_REMEDY = (
    "Build it after torch.distributed.init_process_group(): with Lightning in train_dataloader() of the module or of a "
    "DataModule, with Hugging Face after TrainingArguments(), with accelerate after Accelerator(), with Ray in the function "
    "that each worker runs. For one rank that reads all rows give dp_world_size=1."
)
"""The remedy that error messages name for a loader that was built before its process group."""
_BUILD_ON_ALL = "All ranks of mesh= build the loader (default: all of the job), with the same arguments."
_RESTART = "State that was saved is whole; restart from it."
_CALL_ON_ALL = "A state is made by all dp ranks together: call it on every rank, before `if rank == 0`."


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks of a run, the rank of this process, and the collectives among them.

    Args:
        rank: The data-parallel rank of this process, ``0 <= rank < world_size``.
        world_size: W.
        communicator: The processes of these ranks, in their order; `None` without a process group, and for a single rank.
        timeout: Seconds that a rank may keep the others waiting.
        loader: The number of the loader in its process, the same on all ranks (`with_new_loader`).
        num_state_loads: The number of loads and resets, which keeps exchanges before and after one apart: ranks may have
            stood at different batches.
        assumes_one_rank: True if there was no process group of several ranks, and no argument said that one rank is meant.
    """

    rank: int = 0
    world_size: int = 1
    communicator: Communicator | None = None
    timeout: float = 300.0
    loader: int = 0
    num_state_loads: int = 0
    assumes_one_rank: bool = False
    _purpose: Purpose = "read"
    _position_in_run: tuple[int, ...] = ()
    _agreed_loads: list[int] = field(default_factory=list[int])

    def require_no_group(self) -> None:
        """Raise ``RuntimeError`` if a process group of several ranks was made after the loader was built without one."""
        if self.assumes_one_rank and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"The loader was built before the process group of {dist.get_world_size()} ranks: as rank {self.rank} of "
                f"{self.world_size}, so rows would come several times or never. {BUILD_LATER_REMEDY}"
            )

    @property
    def simulated(self) -> bool:
        """True if the other ranks cannot be reached: ``dp_rank`` and ``dp_world_size`` were given without a process group."""
        return self.world_size > 1 and self.communicator is None

    def for_purpose(self, purpose: Purpose) -> Ranks:
        """Return the same ranks with other names of their collectives, so that different purposes never mix.

        Args:
            purpose: "save": a rank that saves alone gets an error that names the remedy; "load": ranks may have made different
                numbers of loads; or "read".
        """
        return replace(self, _purpose=purpose)

    def at_position_in_run(self, *position: int) -> Ranks:
        """Return the same ranks for a collective at numbers that say where in the run the ranks are."""
        return replace(self, _position_in_run=position)

    @property
    def with_load_counted(self) -> Ranks:
        """The same ranks after a load or a reset; their exchanges do not mix with earlier ones."""
        return replace(self, num_state_loads=max(self.num_state_loads, *self._agreed_loads, 0) + 1, _agreed_loads=[])

    def subset(self, members: Sequence[int]) -> Ranks:
        """Return some of these ranks, ascending and with this one, as ranks that exchange over a group of their own."""
        communicator = self.communicator if len(members) > 1 else None
        communicator = None if communicator is None else communicator.subgroup(members)
        return replace(self, rank=members.index(self.rank), world_size=len(members), communicator=communicator)

    def warn(self, message: str, *values: object) -> None:
        """Log a warning on dp rank 0 alone."""
        if self.rank == 0:
            _logger.warning(message, *values)

    def info(self, message: str, *values: object) -> None:
        """Log an info message on dp rank 0 alone."""
        if self.rank == 0:
            _logger.info(message, *values)

    def merge(self, table: Ints, owner: Ints) -> Ints:
        """Return the table with each row taken from the rank that owns it (collective); for a single rank, `table` itself.

        Args:
            table: ``int64[N, columns]``.
            owner: ``int64[N]``, the rank that owns each row; the same on every rank.
        """
        if self.communicator is None:
            return table
        rows_per_rank = np.bincount(owner, minlength=self.world_size)
        own_rows = np.zeros((rows_per_rank.max(), table.shape[1]), dtype=np.int64)
        own_rows[: rows_per_rank[self.rank]] = table[owner == self.rank]
        rank_blocks = self._begin_gather(own_rows, "rows")()
        merged = np.empty_like(table)
        merged[np.argsort(owner, kind="stable")] = np.concatenate(
            [block[:count] for block, count in zip(rank_blocks, rows_per_rank, strict=True)]
        )
        return merged

    def gather_ints(self, values: Sequence[int]) -> Ints:
        """Gather a few integers from every rank: ``int64[W, len(values)]`` (collective)."""
        return self.begin_gather_ints(values)()

    def begin_gather_ints(self, values: Sequence[int], content: str = "ints") -> Callable[[], Ints]:
        """Send a few integers to all ranks; return a function that waits for the integers of every rank (collective)."""
        return self._begin_gather(np.array(values, dtype=np.int64), content)

    def gather_floats(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Gather floating-point numbers from every rank: ``float64[W, len(values)]`` (collective)."""
        return self._begin_gather(np.array(values, dtype=np.float64), "numbers")()

    def require_same(self, content: dict[str, Any], action: str = "built their loaders") -> None:
        """Raise ``ValueError`` on every rank if some value differs between ranks; the message names the value (collective)."""
        self._require(content, self.begin_gather_ints([*map(digest, content.values())], "same")(), action)

    def with_new_loader(self, content: dict[str, Any]) -> Ranks:
        """Return the same ranks, with the number of the loader that all of them are building (collective).

        Some ranks may have failed to build earlier loaders, so the number is the largest that any rank has reached.

        Args:
            content: The arguments by name, which must be the same on all ranks; otherwise every rank raises ``ValueError``.
        """
        communicator = self.communicator
        if communicator is None:
            return self
        own_values = np.array([communicator.num_loaders + 1, *map(digest, content.values())])
        all_values = communicator.begin_gather(Call("build", self.timeout, _BUILD_ON_ALL), own_values)()
        communicator.num_loaders = int(all_values[:, 0].max())
        self._require(content, all_values[:, 1:])
        return replace(self, loader=communicator.num_loaders)

    def _require(self, content: dict[str, Any], digests: Ints, action: str = "built their loaders") -> None:
        is_different = (digests != digests[0]).any(axis=0).tolist()
        differing = {name: content[name] for name, differs in zip(content, is_different, strict=True) if differs}
        if differing:
            raise ValueError(
                f"The ranks {action} with different {', '.join(differing)}; dp rank {self.rank} has {differing}. "
                f"All ranks need the same arguments and the same files."
            )

    def _begin_gather(self, values: npt.NDArray[T], content: str) -> Callable[[], npt.NDArray[T]]:
        if self.communicator is None:
            return lambda: values[None]
        return self.communicator.begin_gather(self._make_call(content), values)

    def _make_call(self, content: str) -> Call:
        name = f"{self._purpose}/{content}/{self.loader}/{self._position_in_run}"
        if self._purpose == "read":
            name += f"/{self._agreed_state_loads()}"
        return Call(name, self.timeout, _CALL_ON_ALL if self._purpose == "save" else _RESTART)

    def _agreed_state_loads(self) -> int:
        """Return the largest number of loads of any rank; ranks differ if a load failed on some of them."""
        if self.num_state_loads > 1 and not self._agreed_loads and self.communicator is not None:
            call = Call(f"read/loads/{self.loader}", self.timeout, _RESTART)
            self._agreed_loads.append(
                int(self.communicator.begin_gather(call, np.array([self.num_state_loads]))().max())
            )
        return self._agreed_loads[0] if self._agreed_loads else self.num_state_loads


def other_rank_error(*, wrong_rows: bool) -> Exception:
    """Return the error that this rank raises because another rank failed; the failing rank reports the cause."""
    if wrong_rows:
        return DataStateError("Another dp rank found that its rows are not those of the epoch; its error says more.")
    return RuntimeError(
        "Another dp rank could not make its samples; its error says why. If the cause passes, the next call "
        "goes on from here on all ranks."
    )


def call_on_all_ranks(ranks: Ranks, work: Callable[[], R]) -> R:
    """Return `work()`; if the call fails on some rank, all ranks raise an error (collective)."""
    results: list[R] = []
    failure = None
    try:
        results.append(work())
    except Exception as error:
        failure = error
    wrong_rows = isinstance(failure, DataStateError)
    worst = int(ranks.gather_ints([wrong_rows + (failure is not None)]).max())
    if worst:
        raise failure if failure is not None and (wrong_rows or worst < 2) else other_rank_error(wrong_rows=worst == 2)
    return results[0]
