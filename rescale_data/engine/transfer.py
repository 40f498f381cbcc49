"""Transfers batches to devices: by a function of the user, to a torch device, or to devices of other frameworks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch

from rescale_data.engine.collate import map_tensors
from rescale_data.engine.feed import BatchFeed, FunctionFeed
from rescale_data.engine.segment import EpochSegment
from rescale_data.errors import require_callable
from rescale_data.state import Ints


class DpTransfer(ABC):
    """A transfer of batches to devices that depends on the dp rank of the batches."""

    @abstractmethod
    def bind(self, dp_rank: int, dp_world_size: int) -> Callable[[Any], Any]:
        """Return the function that transfers the batches of one dp rank."""


Transfer: TypeAlias = Callable[[Any], Any] | torch.device | str | DpTransfer


def require_transfer(transfer: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` if `transfer` is neither a device nor a function."""
    if isinstance(transfer, str):
        try:
            torch.device(transfer)
        except RuntimeError as error:
            raise ValueError(f"transfer={transfer!r}: give a device, or a function of a batch. {error}") from error
    elif not isinstance(transfer, torch.device | DpTransfer):
        require_callable(transfer=transfer)


def with_transfer(feed: BatchFeed, transfer: Transfer, dp_rank: int, dp_world_size: int) -> BatchFeed:
    """Return a feed that applies a transfer to each batch of another feed."""
    if isinstance(transfer, torch.device | str):
        return ToDeviceFeed(feed, torch.device(transfer))
    return FunctionFeed(feed, transfer.bind(dp_rank, dp_world_size) if isinstance(transfer, DpTransfer) else transfer)


def transfer_function(transfer: Transfer | None) -> Callable[[Any], Any] | None:
    """Return a transfer as a function of a batch, for peers that share batches; it copies in the current stream of the peer."""
    if isinstance(transfer, DpTransfer):
        raise ValueError(
            f"transfer={transfer!r} with peers=: each host of XLA reads for itself, so give mesh=host_mesh() alone."
        )
    return partial(_to_device, torch.device(transfer)) if isinstance(transfer, torch.device | str) else transfer


def _to_device(device: torch.device, batch: Any) -> Any:
    return map_tensors(batch, "to", lambda value: value.to(device, non_blocking=True))


class ToDeviceFeed(FunctionFeed):
    """A feed that copies the tensors of each batch to a device, in the stream that was current at `begin`.

    A copy is queued behind the work that training has queued, as if training itself copied with ``non_blocking=True``.
    """

    def __init__(self, feed: BatchFeed, device: torch.device) -> None:
        super().__init__(feed, partial(_to_device, device))
        self._device, self._device_stream = device, nullcontext()

    def begin(self, segment: EpochSegment, table: Ints, first_batch: int) -> None:
        if is_accelerator(self._device):
            self._device_stream: Any = torch.accelerator.current_stream(self._device)
        super().begin(segment, table, first_batch)

    def next(self) -> Any:
        with self._device_stream:
            return super().next()


def is_accelerator(device: Transfer | None) -> bool:
    """True if `device` is a torch device of the current accelerator type, which copies from page-locked memory."""
    if not isinstance(device, torch.device | str) or not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and torch.device(device).type == accelerator.type
