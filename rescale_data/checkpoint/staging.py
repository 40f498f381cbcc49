"""Staging: a copy of the state that training cannot change any more, made while the next forward and backward run.

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

from rescale_data.checkpoint.devices import address, copied
from rescale_data.checkpoint.entry import Entry
from rescale_data.checkpoint.state import plain_of
from rescale_data.checkpoint.tree import mapped

Staged = dict[str, Any]
Late: TypeAlias = dict[tuple[Any, ...], torch.Tensor]
"""What is copied in the background, by its path."""


class Stager:
    """Copies states for one manager, into host memory that is kept from save to save."""

    def __init__(self) -> None:
        self._stager = _new_stager()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._stream = torch.Stream() if torch.accelerator.is_available() else contextlib.nullcontext()
        pending = self._pending = list[Future[None]]()
        # Any optimizer's, since any optimizer may own the parameters; the hook alone does not keep the copies alive.
        self._hook = register_optimizer_step_pre_hook(functools.partial(_wait, pending))

    def stage(self, entries: list[Entry]) -> tuple[Future[None], Callable[[], Staged]]:
        """Copy the state of ``entries`` as it is now. One at a time: the memory is used again.

        Returns:
            Done when it is copied; and what gives the copy.
        """
        steady = {place for entry in entries for tensor in entry.steady() if (place := address(tensor))}
        late: Late = {}
        plain = mapped(plain_of(entries), lambda path, leaf: _copy(path, leaf, steady, late))
        done = self._thread.submit(self._copy, late, _asked_for(late))
        self._pending[:] = [done]

        def copies() -> Staged:
            done.result()
            return mapped(plain, lambda path, leaf: late.get(path, leaf))

        return done, copies

    def _copy(self, late: Late, asked_for: list[torch.Event]) -> None:
        """Put copies in the place of live tensors."""
        for event in asked_for:
            event.synchronize()
        with self._stream:
            try:
                staged = self._stager.stage(cast(Any, late))
            except KeyError:  # in torch 2.10 and 2.11 a stager ends with its first copy, and keeps no memory
                self._stager = _new_stager()
                staged = self._stager.stage(cast(Any, late))
        late |= cast(Late, staged)

    def wait(self) -> None:
        """Return when the state may change. An error of the copy belongs to the save and is raised there."""
        _wait(self._pending)

    def close(self) -> None:
        self.wait()
        self._hook.remove()
        self._thread.shutdown()
        self._stager.close()


def _new_stager() -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


def _wait(pending: list[Future[None]], *_: object) -> None:
    for future in pending:
        future.exception()


def _asked_for(tensors: Late) -> list[torch.Event]:
    """Return an event of each accelerator that happens when it has done all that it was asked for so far."""
    devices = {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}
    events = [torch.Event(device, blocking=True) for device in devices]
    for event, device in zip(events, devices, strict=True):
        event.record(torch.accelerator.current_stream(device))
    return events


def _copy(path: tuple[Any, ...], value: Any, steady: set[int], late: Late) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    is_steady = address(value) in steady
    tensor = value.detach() if is_steady else copied(value)
    if not is_steady and tensor.device.type == "cpu":
        return tensor
    late[path] = tensor
    return None
