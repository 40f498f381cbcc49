"""`Exchanges`: exchanges costs and samples between ranks for balanced steps, and stops all ranks together.

All ranks take part in each exchange, up to the first one in which some rank has no samples: its epoch has ended, reading has
failed, or it stops. That exchange is the last one on every rank. So no rank waits for a rank that does not come:

    rank 0   step 5   step 6   stopped      a rank that stops sends that in the exchange that is due
    rank 1   step 5   step 6   step 7       the other rank learns there that step 7 does not take place

An exchange waits without a time limit, since a wait that times out breaks a gloo group for good. It runs in a thread of its
own, after the exchange before. A caller that stops, or has waited too long, leaves that thread behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty
from typing import Any, TypeVar

import numpy as np
import torch

from rescale_data.engine.message import PackedBytes, from_bytes, to_bytes
from rescale_data.engine.options import MAX_TIMEOUT_SECONDS
from rescale_data.engine.ranks.communicator import Call
from rescale_data.engine.ranks.ranks import Ranks, other_rank_error
from rescale_data.engine.runner import NoSamplesLeft
from rescale_data.engine.threads import TaskThread, WorkResult, call_at_exit
from rescale_data.errors import DataStateError
from rescale_data.state import Ints

T = TypeVar("T")

STATUS_MADE, STATUS_ENDED, STATUS_STOPPED, STATUS_UNREAD, STATUS_FAILED, STATUS_OUT_OF_STEP = range(6)
"""The status of a rank's samples of a step, from best to worst.

MADE: the samples are made. ENDED: none are left in the epoch. STOPPED: not made, because the rank stops. UNREAD: not made,
because of an error. FAILED: they are not the rows of the epoch. OUT_OF_STEP: they are of another step than the samples of
another rank."""
COST, TOKENS, WEIGHT, SHARD, IS_REAL = range(5)
"""The columns of the array in which ranks exchange the numbers of their samples, a row for each sample."""
_SECONDS_TO_STOP = 5.0
_RESTART_REMEDY = (
    "State that was saved is whole; restart from it. timeout= of the loader is how long a rank may keep others waiting."
)


class Exchanges:
    """Exchanges costs and samples with other ranks, after a feed's `begin`; first stops the exchanges of an earlier `begin`.

    Args:
        ranks: All data-parallel ranks.
        sample_group: The group within which samples move.
        weight_ranks: The group whose weights are summed: the sample group, or all ranks.
        step_size: The number of samples of a rank in a step.
        previous: The exchanges of the `begin` before.
    """

    def __init__(
        self, ranks: Ranks, sample_group: Ranks, weight_ranks: Ranks, step_size: int, previous: Exchanges | None
    ) -> None:
        self._ranks, self._sample_group, self._weight_ranks, self._size = ranks, sample_group, weight_ranks, step_size
        needs_no_exchange = sample_group.communicator is None and weight_ranks.communicator is None
        if previous is not None:
            previous.stop()
        self._thread = None if needs_no_exchange else TaskThread("balance") if previous is None else previous._thread
        self._pending_result = WorkResult[Any]()
        self._lock, self._process_id = threading.Lock(), os.getpid()
        self.is_stopped = self._is_over = False
        call_at_exit(self, Exchanges.stop)  # which informs the other ranks

    # In the thread of the caller

    def run_exchange(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, one collective exchange, run in a background thread so that the wait can be given up.

        Raises:
            NoSamplesLeft: `stop` was called, or the last exchange is over.
            RuntimeError: The other ranks did not come within ``timeout``.
        """
        if self._thread is None:
            return work()
        result = WorkResult[T]()
        with self._lock:
            if self.is_stopped or self._is_over:
                raise NoSamplesLeft
            self._pending_result = result
            self._thread.put(lambda: result.run_work(work))
        try:
            return result.get(self._ranks.timeout)
        except Empty:
            raise RuntimeError(
                f"Dp rank {self._ranks.rank} waited timeout={self._ranks.timeout:g} s for the samples of the step of other "
                f"ranks: one of them reads slowly, makes no batches, or made other calls of the loader before. "
                f"{_RESTART_REMEDY}"
            ) from None

    def stop(self) -> None:
        """Make a waiting `run_exchange` raise `NoSamplesLeft`, inform other ranks in the next exchange; return at once."""
        if os.getpid() != self._process_id:  # a forked process has neither the thread nor the connections
            return
        with self._lock:
            if self.is_stopped:
                return
            if not (self._thread is None or self._is_over):
                self._thread.put(self._send_stopped)
            self.is_stopped = True  # only now, since Ctrl-C may come in between
        self._pending_result.fail(NoSamplesLeft())

    def close(self) -> None:
        """Stop, and wait until the last exchange is over, at most 5 seconds."""
        self.stop()
        if self._thread is not None:
            self._thread.end(_SECONDS_TO_STOP)

    def _send_stopped(self) -> None:
        if not self._is_over:
            self._is_over = True
            with suppress(Exception):  # the other ranks are gone, or raise an error of their own
                self._gather_all(STATUS_STOPPED, -1, np.zeros((0, 5), dtype=np.int64))

    # In the thread of an exchange

    def agree(self, failure: Exception | None, num_delivered: int, samples: Ints, *, is_last: bool) -> tuple[Ints, int]:
        """Exchange the costs of this rank's samples of a step, or the reason why it has no samples (collective).

        Args:
            failure: The reason, `NoSamplesLeft` at the end of the epoch; `None` if there are samples.
            num_delivered: The number of samples that the run delivered before the step, the same on all ranks.
            samples: ``int64[samples, 5]``, the columns `COST` to `IS_REAL`.
            is_last: True if no step follows.

        Returns:
            The measures of all samples of the group, in the order of its ranks, and the weight of the whole global batch.

        Raises:
            Exception: Some rank has no samples. That rank raises its own error; the others raise an error that says so.
        """
        measures_of_all_ranks, rank_states = self._gather_all(_status(failure), num_delivered, samples)
        statuses, delivered_counts = rank_states[:, 0], np.unique(rank_states[rank_states[:, 0] != STATUS_STOPPED, 1])
        max_status = STATUS_OUT_OF_STEP if len(delivered_counts) > 1 else int(statuses.max())
        self._is_over = max_status != STATUS_MADE or is_last
        if max_status == STATUS_OUT_OF_STEP:
            raise RuntimeError(
                f"The dp ranks are at different places of the run, {delivered_counts.tolist()} samples from its beginning: an "
                f"error came on some of them alone, or they made other calls. Load one state on all of them."
            )
        if max_status != STATUS_MADE:
            raise failure if failure is not None and _status(failure) == max_status else _other_rank_error(max_status)
        return measures_of_all_ranks[:, : len(samples)].reshape(-1, 5), int(rank_states[:, 2].sum())

    def exchange_lists(self, outgoing: Mapping[int, list[Any]], incoming: Sequence[int]) -> dict[int, list[Any]]:
        """Send a list to each rank in `outgoing`; return the lists received from the ranks in `incoming`, by rank index.

        In place of a list that does not pickle, `None` is sent. Its rank raises the error; the other rank says so.
        """
        communicator = self._sample_group.communicator
        if communicator is None or not (outgoing or incoming):
            return {}
        packed, failure = dict[int, PackedBytes](), None
        for index, samples in outgoing.items():
            try:
                packed[index] = to_bytes(samples)
            except Exception as error:
                packed[index], failure = to_bytes(None), error
        outgoing_bytes = {index: body for index, (body, _) in packed.items()}
        sizes = {index: torch.tensor([body.numel(), start], device="cpu") for index, (body, start) in packed.items()}
        incoming_sizes = {index: torch.empty(2, dtype=torch.int64, device="cpu") for index in incoming}
        self._run_call("sizes", lambda call: communicator.exchange(call, sizes, incoming_sizes))
        incoming_bytes = {
            index: torch.empty(int(size[0]), dtype=torch.uint8, device="cpu") for index, size in incoming_sizes.items()
        }
        self._run_call("samples", lambda call: communicator.exchange(call, outgoing_bytes, incoming_bytes))
        received = {index: from_bytes(body, int(incoming_sizes[index][1])) for index, body in incoming_bytes.items()}
        if failure is not None or any(samples is None for samples in received.values()):
            raise failure or other_rank_error(wrong_rows=False)
        return received

    def _gather_all(self, status: int, num_delivered: int, sample_measures: Ints) -> tuple[Ints, Ints]:
        """Gather the sample measures in the sample group, and the status, position and weight of ranks in the weight group."""
        outgoing_rows = np.zeros((1 + self._size, 5), dtype=np.int64)
        outgoing_rows[0, :3] = status, num_delivered, sample_measures[:, WEIGHT] @ sample_measures[:, IS_REAL]
        outgoing_rows[1 : 1 + len(sample_measures)] = sample_measures
        gathered_rows = self._gather(self._sample_group, "costs", outgoing_rows)
        rank_states = gathered_rows[:, 0, :3]
        if self._weight_ranks is not self._sample_group:
            rank_states = self._gather(self._weight_ranks, "weights", outgoing_rows[0, :3].copy())
        return gathered_rows[:, 1:], rank_states

    def _gather(self, group: Ranks, name: str, numbers: Ints) -> Ints:
        communicator = group.communicator
        if communicator is None:
            return numbers[None]
        return self._run_call(name, lambda call: communicator.begin_gather(call, numbers)())

    def _run_call(self, name: str, work: Callable[[Call], T]) -> T:
        """Return ``work(call)``, where ``call`` has the name of the exchange; a failure ends all exchanges, on all ranks."""
        try:
            return work(Call(f"balance/{name}/{self._ranks.loader}", MAX_TIMEOUT_SECONDS, _RESTART_REMEDY))
        except BaseException:
            self._is_over = True
            raise


def _status(failure: Exception | None) -> int:
    if isinstance(failure, DataStateError):
        return STATUS_FAILED
    return STATUS_MADE if failure is None else STATUS_ENDED if isinstance(failure, NoSamplesLeft) else STATUS_UNREAD


def _other_rank_error(status: int) -> Exception:
    if status == STATUS_ENDED:
        return NoSamplesLeft()
    if status == STATUS_STOPPED:
        return RuntimeError(
            "Another dp rank has stopped: an error came there, or it closed, loaded or reset its loader, or ended. All ranks "
            "make the same calls."
        )
    return other_rank_error(wrong_rows=status == STATUS_FAILED)
