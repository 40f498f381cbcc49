"""`DataLoader`: batches of this rank, and a position that reshards like the model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.as_pipeline import as_pipeline
from rescale_data.engine.collate import collate, pin, with_valid
from rescale_data.engine.feed import Feed, InProcess, MicroBatch
from rescale_data.engine.moment import counters
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.runner import Runner
from rescale_data.engine.setup import Tail, set_up
from rescale_data.engine.statedict import full_state_dict, load_state_dict, state_dict
from rescale_data.engine.stream import OnSourceChange, Stream
from rescale_data.engine.workers import Pool
from rescale_data.errors import require_int
from rescale_data.sources.dataset import MapStyle
from rescale_data.sources.iterable import IterableSource
from rescale_data.sources.source import Source

_logger = logging.getLogger("rescale_data")


class DataLoader:
    """Micro batches of this rank, in an order that no change of ranks, workers or micro batch size disturbs.

    The position belongs to the loader: ``iter(loader)`` goes on where the last batch was taken, `reset` begins again.
    A `Stateful`: put it into the dict that ``torch.distributed.checkpoint`` saves, beside model and optimizer.

    Args:
        pipeline: ``Shard -> node``, the node graph of one logical shard; or a source, or anything with ``__len__`` and
            ``__getitem__``: then each row is a sample, in shuffled order.
        global_batch_size: O, samples per optimizer step over all ranks.
        micro_batch_size: b, samples of one batch of one rank; ``W * b`` divides O. Default O / W.
        num_logical_shards: N, fixed for the whole run. Default 4 * O.
        mesh: `DeviceMesh` of the data-parallel ranks, several dims counted row-major as one. Default: the whole
            process group where there is one, else a single rank.
        dp_rank: In place of a mesh, together with ``dp_world_size``: all ranks of the job then build the loader, and no group
            spans the TP, PP and CP peers that share a dp rank.
        group: The trainer's own process group of exactly the dp ranks, in their order, which exchanges CPU tensors
            ("cpu:gloo,cuda:nccl"). Default: one gloo group for all loaders over the same ranks.
        num_workers: K worker processes; 0 makes batches in this process.
        seed: Seed of every order.
        repeat: `False`: ``iter(loader)`` ends with the epoch. `True`: it never ends.
        tail: What becomes of the rest of an epoch that does not fill a global batch: "drop", or "pad" with real rows again, and
            ``batch["valid"]: Bool[b]`` in every batch.
        collate_fn: A list of b samples -> batch, run where samples are made. Default: torch's `default_collate`.
        prefetch_factor: Messages that each worker may be ahead.
        pin_memory: Whether batches arrive in page-locked memory, where there is an accelerator.
        multiprocessing_context: How workers start. The default is safe although this process has used threads.
        timeout: Seconds to wait for a worker, or for another rank in a collective; not those in which that rank reads.
        save_timeout: Seconds to wait for other ranks in `state_dict`; default 60, or ``timeout`` if that is less.
        verify: Keep a digest of the rows that each logical shard has delivered, 8 bytes a shard and source in the state, and
            prove at the end of each epoch that every row was delivered once, across all legs of the run: else `DataStateError`.
        on_source_change: Of a state whose files were removed or changed since: "error", or "next_epoch": leave out what was
            left of the epoch, log how many rows that is, and begin the next one. Files that were only added join at the next
            epoch that no logical shard has begun, in either case.

    Raises:
        ValueError: A topology that does not fit, an epoch without a whole global batch; the message lists what fits.
        TypeError: With workers, a pipeline that does not pickle; a pipeline with state that cannot be a position.
    """

    def __init__(
        self,
        pipeline: Pipeline | Source | IterableSource | MapStyle,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        num_logical_shards: int | None = None,
        mesh: DeviceMesh | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        group: ProcessGroup | None = None,
        num_workers: int = 0,
        seed: int = 0,
        repeat: bool = False,
        tail: Tail = "drop",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | BaseContext = "forkserver",
        timeout: float = 300.0,
        save_timeout: float | None = None,
        verify: bool = False,
        on_source_change: OnSourceChange = "error",
    ) -> None:
        if on_source_change not in ("error", "next_epoch"):
            raise ValueError(f"on_source_change={on_source_change!r}: give 'error' or 'next_epoch'.")
        self.setup = set_up(
            as_pipeline(pipeline),
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            num_logical_shards=num_logical_shards,
            mesh=mesh,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            group=group,
            num_workers=num_workers,
            seed=seed,
            repeat=repeat,
            tail=tail,
            timeout=timeout,
            save_timeout=save_timeout,
            verify=verify,
        )
        self.collate_fn = collate_fn or collate
        runner = Runner(self.setup.recipe, self.setup.schema)
        feed: Feed = InProcess(runner, collate_fn)
        if num_workers:
            feed = Pool(
                self.setup.recipe,
                collate_fn,
                num_workers,
                prefetch_factor=prefetch_factor,
                pin_memory=pin_memory and torch.accelerator.is_available(),
                context=multiprocessing_context,
                timeout=timeout,
            )
        self._pin = pin_memory and not num_workers
        self._stream = Stream(self.setup, runner, feed)
        self._stream.on_source_change = on_source_change
        self._is_handed_over = False
        self._num_iterators = 0  # the newest is the valid one
        self._last_taken = (-1, 0)  # from which iterator, and in which thread
        self._wait_seconds = 0.0
        self._last_batch_samples = 0

    # Batches

    def __iter__(self) -> Batches:
        """Go on from the position; an older iterator is invalid from now on."""
        self.stream.begin()
        self._num_iterators += 1
        return Batches(self.epoch, self._num_iterators, self._next)

    def __len__(self) -> int:
        """Micro batches left in this epoch; ``TypeError`` where it has no end or only reading would tell."""
        left = self.stream.num_micro_batches_left() if self.setup.recipe.repeat or self.setup.counts_are_known else None
        if left is None:
            why = (
                "repeat=True is endless"
                if self.setup.recipe.repeat
                else "the pipeline does not know its number of samples"
            )
            raise TypeError(f"The number of batches left has no len(): {why}.")
        return left

    def start(self) -> None:
        """Begin to read, so that the first batch is ready when training is: call it before the model is loaded.

        Worker processes start and go ahead in the background; with ``num_workers=0`` the first batch is made now. A later
        load begins anew.
        """
        self.stream.start()
        if not self.setup.layout.num_workers:
            self.stream.peek()

    def peek(self) -> Any:
        """The next batch, which stays the next: ``next`` may return the same memory, so leave it as it is.

        Like iterating, collective over the dp ranks where an epoch's end is found by reading (``repeat=False`` with packing
        or filters): all ranks call it, or none. So are `start` and `skip`.
        """
        return self._finish(self.stream.peek())

    def skip(self, num_samples: int) -> None:
        """Leave out samples, as if they had been delivered; at a constant cost where the pipeline allows it.

        Args:
            num_samples: Over all ranks, a multiple of ``W * b``.
        """
        whole = self.setup.layout.micro_step_samples
        require_int(num_samples=num_samples)
        if num_samples < 0 or num_samples % whole:
            raise ValueError(
                f"skip(num_samples={num_samples}): give a multiple of dp_world_size * micro_batch_size = {whole}, counted over "
                f"all ranks."
            )
        self.stream.skip(num_samples // whole)

    def reset(self) -> None:
        """Go back to the beginning of the run."""
        self.stream.reset()
        self._num_iterators += 1

    def close(self) -> None:
        """Stop the worker processes; the position stays, and the next batch starts them again."""
        self._stream.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A DataLoader does not pickle. In a checkpoint it is at the top level of the dict, {'model': ..., 'loader': "
            "loader}, where DCP asks it for its state; below that DCP takes it for a value."
        )

    # Where the run stands

    @property
    def stream(self) -> Stream:
        """What it reads, as far as it has read."""
        self._refuse_if_handed_over()
        return self._stream

    def hand_over(self) -> DataLoader:
        """This loader for whoever reads ahead of training; the object itself from now on only closes, all else raises."""
        self._refuse_if_handed_over()
        handed = object.__new__(type(self))
        vars(handed).update(vars(self))
        self._is_handed_over = True
        return handed

    def _refuse_if_handed_over(self) -> None:
        if self._is_handed_over:
            raise RuntimeError(
                "Something reads this loader ahead of training: its position is not that of training, and a state of it would "
                "leave out for good what is on its way. Iterate, save, load and ask what reads it (rescale_data.xla."
                "DeviceLoader, or rescale_data.lookahead.LookAhead) in place of the loader."
            )

    @property
    def step(self) -> int:
        """Global batches delivered."""
        return self.stream.clock.global_step(self.setup.layout.global_batch_size)

    @property
    def epoch(self) -> int:
        """Epochs that have ended; 0 with ``repeat=True``, where each shard has its own (see `progress`)."""
        return self.stream.epoch

    @property
    def gradient_accumulation_steps(self) -> int:
        """A, batches of this rank in one optimizer step."""
        return self.setup.layout.gradient_accumulation_steps

    @property
    def last_batch_samples(self) -> int:
        """Real samples in the batch that was delivered last on this rank, less than b only with ``tail="pad"``."""
        return self._last_batch_samples

    def progress(self) -> dict[str, float]:
        """Counters for a logger: of the run, and of what this rank's shards have drawn.

        ``dropped_samples`` and ``padded_samples`` count from when this loader was made or reset.
        """
        return {"wait_seconds": self._wait_seconds, **counters(self.stream)}

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state that describes the batches delivered so far, a copy.

        Collective over the dp ranks where W does not divide N, and in the last steps of an epoch; the other ranks then
        have ``timeout`` seconds to join.

        Returns:
            ``{"shards": {path: tensor with N rows}, ...}``: see docs/design.md, 8.

        Raises:
            ValueError: Ranks are simulated, see `rescale_data.testing.full_state_dict`.
        """
        self._warn_if_read_ahead()
        return state_dict(self.stream)

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` with plain tensors of all N rows on every rank (collective over the dp ranks)."""
        self._warn_if_read_ahead()
        return full_state_dict(self.stream)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of any topology, in either form (collective over the dp ranks).

        Raises:
            DataStateError: It belongs to another seed, N, dataset or pipeline, or is incomplete. Nothing has changed then.
        """
        load_state_dict(self.stream, state_dict)
        self._num_iterators += 1

    def _warn_if_read_ahead(self) -> None:
        """Who takes batches in another thread than training's is perhaps a queue, whose batches a checkpoint would lose."""
        iterator, thread = self._last_taken
        if iterator == self._num_iterators and thread != threading.get_ident():
            _logger.warning(
                "Another thread takes the batches of this loader, perhaps ahead of training: its state describes what that "
                "thread has taken, and a checkpoint leaves out for good what training has not received by then. Take the "
                "state in that thread, or read ahead with rescale_data.lookahead.LookAhead (XLA: rescale_data.xla."
                "DeviceLoader), whose state is that of training."
            )

    def _next(self, batches: Batches) -> Any:
        if batches.number != self._num_iterators:
            raise RuntimeError(
                "This iterator is no longer valid: a newer iter(loader), a reset or a load took its place. Use the newest."
            )
        stream = self.stream
        if stream.epoch != batches.epoch:
            raise StopIteration
        started = time.perf_counter()
        batch = self._finish(stream.peek())
        micro_batch = stream.take()  # no sooner: a batch that cannot be handed over has not been delivered
        self._last_taken = (batches.number, threading.get_ident())
        self._wait_seconds += time.perf_counter() - started
        self._last_batch_samples = micro_batch.num_real
        return batch

    def _finish(self, micro_batch: MicroBatch) -> Any:
        batch = micro_batch.batch
        if self.setup.tail == "pad":
            batch = with_valid(batch, micro_batch.num_real, self.setup.layout.micro_batch_size)
        return pin(batch) if self._pin else batch


class Batches(Iterator[Any]):
    """The batches of a loader to the end of the epoch in which it was asked for them."""

    def __init__(self, epoch: int, number: int, next_batch: Callable[[Batches], Any]) -> None:
        self.epoch, self.number, self._next_batch = epoch, number, next_batch

    def __next__(self) -> Any:
        return self._next_batch(self)
