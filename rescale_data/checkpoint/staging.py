"""Staging: copy a state before it is saved in the background, while the next forward and backward run.

What only an optimizer's step changes, parameters and optimizer state, is copied by DCP's stager in the background, and any
``optimizer.step()`` waits for it. Everything else (buffers, the loader's rows, plain values) is copied before ``stage``
returns; on a GPU, where that copy is only asked for, it comes to the host in the background.

An accelerator runs behind the program: the thread waits until it has come to the call of ``stage``, and copies in a stream of
its own, so that what the program asks for afterwards is not waited for. DCP's own async staging does not wait for the first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rescale_data.checkpoint.devices import detached_copy, memory_address
from rescale_data.checkpoint.entry import Entry
from rescale_data.checkpoint.state import state_dict_of
from rescale_data.checkpoint.tree import map_leaves

StagedState = dict[str, Any]
DeferredTensors: TypeAlias = dict[tuple[Any, ...], torch.Tensor]
"""Tensors that are copied in the background, by their path in the state."""


class Stager:
    """Copies states for one manager into host memory, which the next save uses again."""

    def __init__(self) -> None:
        self._dcp_stager = _new_stager()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._copy_stream = torch.Stream() if torch.accelerator.is_available() else contextlib.nullcontext()
        pending_copies = self._pending_copies = list[Future[None]]()
        # Any optimizer's, since any optimizer may own the parameters; the hook alone does not keep the copies alive.
        self._hook = register_optimizer_step_pre_hook(functools.partial(_wait_for_futures, pending_copies))

    def stage(self, entries: list[Entry]) -> tuple[Future[None], Callable[[], StagedState]]:
        """Copy the current state of ``entries``. One copy exists at a time: the next call reuses its memory.

        Returns:
            A future that is done when the state is copied, and a function that returns the copy.
        """
        optimizer_owned = {
            addr for entry in entries for tensor in entry.get_optimizer_tensors() if (addr := memory_address(tensor))
        }
        deferred: DeferredTensors = {}
        state_dict = map_leaves(state_dict_of(entries), lambda path, leaf: _copy(path, leaf, optimizer_owned, deferred))
        done_future = self._executor.submit(self._copy_deferred, deferred, _queued_work(deferred))
        self._pending_copies[:] = [done_future]

        def get_copies() -> StagedState:
            done_future.result()
            return map_leaves(state_dict, lambda path, leaf: deferred.get(path, leaf))

        return done_future, get_copies

    def _copy_deferred(self, deferred_tensors: DeferredTensors, queued_work: list[torch.Event]) -> None:
        """Wait for the accelerator, then replace the live tensors by copies in host memory."""
        for event in queued_work:
            event.synchronize()
        with self._copy_stream:
            try:
                copied_tensors = self._dcp_stager.stage(cast(Any, deferred_tensors))
            except KeyError:  # in torch 2.10 and 2.11 a stager ends with its first copy, and keeps no memory
                self._dcp_stager = _new_stager()
                copied_tensors = self._dcp_stager.stage(cast(Any, deferred_tensors))
        deferred_tensors |= cast(DeferredTensors, copied_tensors)

    def wait(self) -> None:
        """Wait until the copy is done, so that the state may change. An error of the copy is raised by its save."""
        _wait_for_futures(self._pending_copies)

    def close(self) -> None:
        self.wait()
        self._hook.remove()
        self._executor.shutdown()
        self._dcp_stager.close()


def _new_stager() -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


def _wait_for_futures(pending_copies: list[Future[None]], *_: object) -> None:
    for future in pending_copies:
        future.exception()


def _queued_work(tensors: DeferredTensors) -> list[torch.Event]:
    """Return an event for each accelerator, which fires when the work queued there so far is done."""
    devices = {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}
    events = [torch.Event(device, blocking=True) for device in devices]
    for event, device in zip(events, devices, strict=True):
        event.record(torch.accelerator.current_stream(device))
    return events


def _copy(path: tuple[Any, ...], value: Any, optimizer_addresses: set[int], deferred_tensors: DeferredTensors) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    is_optimizer_owned = memory_address(value) in optimizer_addresses
    tensor = value.detach() if is_optimizer_owned else detached_copy(value)
    if not is_optimizer_owned and tensor.device.type == "cpu":
        return tensor
    deferred_tensors[path] = tensor
    return None
