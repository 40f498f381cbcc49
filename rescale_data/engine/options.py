"""`Options`: the arguments of a data loader, each checked on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.balance import Balance
from rescale_data.engine.transfer import Transfer, is_accelerator, require_transfer
from rescale_data.errors import checks_argument_types, require_callable, require_type

Tail: TypeAlias = Literal["drop", "pad"]
MAX_TIMEOUT_SECONDS = 2_000_000


@checks_argument_types
@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a loader as the user gave them (see `DataLoader`), each checked on its own."""

    shuffle: bool | int = True
    global_batch_size: int
    micro_batch_size: int | None = None
    num_logical_shards: int | None = None
    mesh: DeviceMesh | ProcessGroup | None = None
    dp_rank: int | None = None
    dp_world_size: int | None = None
    peers: DeviceMesh | ProcessGroup | None = None
    receives: bool = True
    num_workers: int = 0
    seed: int = 0
    repeat: bool = False
    tail: Tail = "drop"
    collate_fn: Callable[[list[Any]], Any] | None = None
    worker_init_fn: Callable[[int], object] | None = None
    prefetch: int | None = None
    transfer: Transfer | None = None
    pin_memory: bool = False
    multiprocessing_context: str | BaseContext = "forkserver"
    timeout: float = 300.0
    verify: bool = False
    steps_per_epoch: int | None = None
    balance: Balance | None = None

    def __post_init__(self) -> None:
        require_callable(collate_fn=self.collate_fn, worker_init_fn=self.worker_init_fn)
        require_type((Balance, type(None)), "rd.Balance(cost=...), or leave it out", balance=self.balance)
        if self.tail not in ("drop", "pad"):
            raise ValueError(f"tail={self.tail!r}: give 'drop' or 'pad'.")
        if self.batches_ahead < (self.num_workers > 0):
            raise ValueError(
                f"prefetch={self.prefetch}, num_workers={self.num_workers}: give the batches that a thread is to be ahead, 0 "
                f"for no thread; with workers the messages that each of them may be ahead, at least 1."
            )
        require_transfer(self.transfer)
        if not 0 < self.timeout <= MAX_TIMEOUT_SECONDS:
            raise ValueError(
                f"timeout={self.timeout!r}: give the seconds to wait for a worker or another rank, more than 0, at most "
                f"{MAX_TIMEOUT_SECONDS:,} (23 days)."
            )

    @property
    def batches_ahead(self) -> int:
        """The number of batches that a thread may be ahead of training; with workers, the number of messages of each worker."""
        if self.prefetch is not None:
            return self.prefetch
        return 2 if self.num_workers or self.transfer is not None else 0

    @property
    def pins_batches(self) -> bool:
        """True if batches arrive in page-locked memory: there is an accelerator, and `pin_memory` or `transfer` asks for it."""
        return torch.accelerator.is_available() and (self.pin_memory or is_accelerator(self.transfer))


OPTION_NAMES = frozenset(field.name for field in fields(Options))
