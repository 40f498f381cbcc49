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
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rescale_data.checkpoint.devices import address, copied
from rescale_data.checkpoint.entry import Entry
from rescale_data.checkpoint.state import plain_of
from rescale_data.checkpoint.tree import mapped

Staged = dict[str, Any]


class Stager:
    """Copies states for one manager, into host memory that is kept from save to save."""

    def __init__(self) -> None:
        self._stager = _new_stager()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._stream = torch.Stream() if torch.accelerator.is_available() else contextlib.nullcontext()
        self._pending: Future[Any] | None = None
        # Any optimizer's, since any optimizer may own the parameters; the hook alone does not keep the copies alive.
        self._hook = register_optimizer_step_pre_hook(_waiter(weakref.ref(self)))

    def stage(self, entries: list[Entry]) -> tuple[Future[None], Callable[[], Staged], set[str]]:
        """Copy the state of ``entries`` as it is now. One at a time: the memory is used again.

        Returns:
            Done when it is copied; what gives the copy; and the names in it that may differ between ranks.
        """
        steady = {place for entry in entries for tensor in entry.steady() if (place := address(tensor))}
        late: dict[str, torch.Tensor] = {}
        live, loose = plain_of(entries)
        plain = mapped(live, lambda _, leaf: _copy(leaf, steady, late))
        pending = self._pending = self._thread.submit(self._copy, late, _asked_for(late))
        done: Future[None] = Future()
        pending.add_done_callback(
            lambda copied: done.set_exception(error) if (error := copied.exception()) else done.set_result(None)
        )

        def copies() -> Staged:
            return mapped(plain, lambda _, leaf: pending.result()[leaf.key] if isinstance(leaf, _Late) else leaf)

        return done, copies, loose

    def _copy(self, late: dict[str, torch.Tensor], asked_for: list[torch.Event]) -> dict[str, torch.Tensor]:
        for event in asked_for:
            event.synchronize()
        with self._stream:
            try:
                staged = self._stager.stage(cast(Any, late))
            except KeyError:  # in torch 2.10 and 2.11 a stager ends with its first copy, and keeps no memory
                self._stager = _new_stager()
                staged = self._stager.stage(cast(Any, late))
        return cast("dict[str, torch.Tensor]", staged)

    def wait(self) -> None:
        """Return when the state may change. An error of the copy belongs to the save and is raised there."""
        if (pending := self._pending) is not None:
            pending.exception()

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


def _waiter(reference: weakref.ref[Stager]) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stager = reference()
        if stager is not None:
            stager.wait()

    return before_step


def _asked_for(tensors: dict[str, torch.Tensor]) -> list[torch.Event]:
    """What happens on each accelerator when it has done all that it was asked for so far."""
    devices = {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}
    events = [torch.Event(device, blocking=True) for device in devices]
    for event, device in zip(events, devices, strict=True):
        event.record(torch.accelerator.current_stream(device))
    return events


class _Late:
    """Where in the plain state a tensor belongs that is copied in the background."""

    def __init__(self, key: str) -> None:
        self.key = key


def _copy(value: Any, steady: set[int], late: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    is_steady = address(value) in steady
    tensor = value.detach() if is_steady else copied(value)
    if not is_steady and tensor.device.type == "cpu":
        return tensor
    late[key := str(len(late))] = tensor
    return _Late(key)
