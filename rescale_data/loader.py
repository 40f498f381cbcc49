"""`DataLoader`: batches of this rank, and a position that reshards like the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, Self

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.as_pipeline import as_pipeline, refuse
from rescale_data.engine.collate import collate
from rescale_data.engine.opening import Opening
from rescale_data.engine.reading import Batches, Reading
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.report import Report
from rescale_data.engine.rescale import hand_over, rescale
from rescale_data.engine.setup import Setup, Tail, require_steps_per_epoch
from rescale_data.engine.states.statedict import Sharded
from rescale_data.engine.stream import OnSourceChange, Stream
from rescale_data.errors import checks_kinds, require_callable
from rescale_data.sources.dataset import MapStyle
from rescale_data.sources.iterable import IterableSource
from rescale_data.sources.source import Source

_READ_AHEAD = (
    "Something reads this loader ahead of training: its position is not that of training, and a state of it would leave out "
    "for good what is on its way. Iterate, save, load and ask what reads it (rescale_data.xla.DeviceLoader) in place of the "
    "loader."
)
_HAS_LEFT = "This rank has left the loader by rescale(): build one with join=True when it comes back."


class DataLoader:
    """Micro batches of this rank, in an order that no change of ranks, workers or micro batch size disturbs.

    The position belongs to the loader: ``iter(loader)`` goes on where the last batch was taken, `reset` begins again.
    A `Stateful`: put it into the dict that ``torch.distributed.checkpoint`` saves, beside model and optimizer.

    Args:
        pipeline: ``Shard -> node``, the node graph of one logical shard; or a source, or anything with ``__len__`` and
            ``__getitem__``: then each row is a sample. Or streams: an `IterableSource`, an ``IterableDataset`` of Hugging Face.
        shuffle: Of rows: `True`, or a window as in `Reader`. `False`: evaluation; the global batches hold the rows in the order
            of the dataset, each once. A pipeline says it itself (`Reader`).
        global_batch_size: O, samples per optimizer step over all ranks.
        micro_batch_size: b, samples of one batch of one rank; ``W * b`` divides O. Default O / W.
        num_logical_shards: N, fixed for the whole run. Default 4 * O; less where that is above 2,048 (`rd.plan`); with
            ``shuffle=False`` O times the number of workers, so name it where they are to change within an epoch.
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
            ``batch["valid"]: Bool[b]`` in every batch. Of a batch that is no dict the first `last_batch_samples` are real.
        collate_fn: A list of b samples -> batch, run where samples are made. Default: torch's `default_collate`.
        worker_init_fn: Called with its number in each worker process when that starts.
        prefetch_factor: Messages that each worker may be ahead.
        prefetch_batches: With ``num_workers=0``: a thread makes so many batches while training computes, and the state stays
            that of what was taken. Functions of a pipeline, and ``collate_fn``, run in that thread: torch's default device and
            grad mode are its own there. 0: each batch is made when it is asked for.
        pin_memory: Whether batches arrive in page-locked memory, where there is an accelerator.
        multiprocessing_context: How workers start. The default is safe although this process has used threads.
        slow_after: Seconds after which a wait for a batch is logged once, as a warning: what is read, called or waited for.
        timeout: Seconds to wait for a worker, or for another rank in a collective; not those in which that rank reads.
        save_timeout: Seconds to wait for other ranks in `state_dict`; default 60, or ``timeout`` if that is less.
        verify: Keep a digest of the rows that each logical shard has delivered, 8 bytes a shard and source in the state, and
            prove at the end of each epoch that every row was delivered once, across all legs of the run: else `DataStateError`.
        steps_per_epoch: Where the data has no epoch, or only reading tells its end: an iterator ends whenever `step` is a
            multiple of this. With ``repeat=False`` the data's own end comes within, and ends none (`progress` has its epochs).
        on_source_change: Of a state whose files were removed or changed since: "error", or "next_epoch": leave out what was
            left of the epoch, log how many rows that is, and begin the next one; what an open window has read of that already
            comes again. Files that were only added join at the next
            epoch that no logical shard has begun, in either case.
        join: This rank is new in a run whose other ranks call `rescale` meanwhile: go on where they are.

    Raises:
        ValueError: A topology that does not fit, an epoch without a whole global batch; the message lists what fits.
        TypeError: With workers, a pipeline that does not pickle; a pipeline with state that cannot be a position.

    Example:
        >>> import rescale_data as rd
        >>> loader = rd.DataLoader(range(8), shuffle=False, global_batch_size=4)
        >>> first = next(iter(loader))
        >>> state = loader.state_dict()
        >>> resumed = rd.DataLoader(range(8), shuffle=False, global_batch_size=4)
        >>> resumed.load_state_dict(state)
        >>> list(resumed)
        [tensor([4, 5, 6, 7])]
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        refuse(kwargs, len(args))
        return super().__new__(cls)

    @checks_kinds
    def __init__(
        self,
        pipeline: Pipeline | Source | IterableSource | MapStyle,
        *,
        shuffle: bool | int = True,
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
        worker_init_fn: Callable[[int], object] | None = None,
        prefetch_factor: int = 2,
        prefetch_batches: int = 0,
        pin_memory: bool = False,
        multiprocessing_context: str | BaseContext = "forkserver",
        slow_after: float = 10.0,
        timeout: float = 300.0,
        save_timeout: float | None = None,
        verify: bool = False,
        steps_per_epoch: int | None = None,
        on_source_change: OnSourceChange = "error",
        join: bool = False,
    ) -> None:
        require_callable(collate_fn=collate_fn, worker_init_fn=worker_init_fn)
        if prefetch_batches < 0 or (prefetch_batches and num_workers):
            raise ValueError(
                f"prefetch_batches={prefetch_batches}, num_workers={num_workers}: it is for num_workers=0, 0 or more; workers "
                f"have prefetch_factor."
            )
        if prefetch_factor < 1:
            raise ValueError(
                f"prefetch_factor={prefetch_factor}: give the messages that a worker may be ahead, at least 1."
            )
        if on_source_change not in ("error", "next_epoch"):
            raise ValueError(f"on_source_change={on_source_change!r}: give 'error' or 'next_epoch'.")
        if not slow_after > 0:
            raise ValueError(f"slow_after={slow_after!r}: give seconds, more than 0; math.inf for no warning.")
        if shuffle is False and num_logical_shards is None:
            num_logical_shards = global_batch_size * max(num_workers, 1)
        self.collate_fn = collate_fn or collate
        self._opening = Opening(
            as_pipeline(pipeline, shuffle),
            {"mesh": mesh, "group": group, "dp_rank": dp_rank, "dp_world_size": dp_world_size},
            keeps_order=shuffle is False,
            micro_batch_size=micro_batch_size,
            collate=collate_fn,
            prefetch_batches=prefetch_batches,
            pin_memory=pin_memory,
            workers={
                "prefetch_factor": prefetch_factor,
                "context": multiprocessing_context,
                "timeout": timeout,
                "slow_after": slow_after,
                "init_fn": worker_init_fn,
            },
            seed=seed,
            repeat=repeat,
            tail=tail,
            timeout=timeout,
            save_timeout=save_timeout,
            verify=verify,
            beside={"steps_per_epoch": steps_per_epoch, "on_source_change": on_source_change},
        )
        setup = self._opening.set_up(
            self._opening.where,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            num_logical_shards=num_logical_shards,
            num_workers=num_workers,
        )
        steps, stream = require_steps_per_epoch(setup, steps_per_epoch), self.stream_of(setup)
        stream.on_source_change = on_source_change
        self._reading: Reading | None = Reading(stream, steps_per_epoch=steps, slow_after=slow_after)
        self._close, self._why_not = self._reading.close, _READ_AHEAD
        if join:
            state, stream.meeting = hand_over(setup, None)
            self._reading.load_state_dict(state)

    def stream_of(self, setup: Setup) -> Stream:
        """What reads in a topology."""
        return self._opening.stream(setup)

    # Other ranks

    @checks_kinds
    def rescale(
        self,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        micro_batch_size: int | None = None,
        num_workers: int | None = None,
        step: int | None = None,
    ) -> bool:
        """Go on with other ranks in the same processes, after the same batch; iterators of this loader stay valid.

        Collective over the old ranks, at the end of a step. Those that are new build
        ``rd.DataLoader(..., mesh=new, join=True)`` meanwhile, with the other arguments as they are here. Nothing is read again,
        and workers live on as long as their number stays.

        After ranks have died those that live give ``step``. It is then collective over the new ranks alone, and what the dead
        had delivered is made out again by reading, from the last `state_dict` that all made on.

        Args:
            mesh: Of the new ranks; on a rank that leaves, too. Default, without ``group``: as the loader was built, so that
                one that was given neither has the ranks of the process group that there is now.
            group: In place of a mesh; what `torch.distributed.new_group` returned on a rank that leaves.
            micro_batch_size: b; default: as given when the loader was built, else O / W.
            num_workers: K; default: as it is.
            step: The number of steps that the model has done. One that has begun, or was the last, is then served again.

        Returns:
            Whether this rank goes on. If not, the loader is closed.

        Raises:
            ValueError: A topology that does not fit; a step that is not complete. Nothing has changed then.
            TypeError: What is no mesh, no group, no number.
        """
        reading = self.reading
        if rescale(reading, self._opening, self.stream_of, mesh, group, micro_batch_size, num_workers, step):
            return True
        reading.invalidate()
        reading.close()
        self._reading, self._why_not = None, _HAS_LEFT
        return False

    # Batches

    def __iter__(self) -> Batches:
        """Go on from the position, or with the next epoch where the last batch of this one has been taken.

        After a load of a state that was saved there, or a `rescale` there, the first iterator is empty, once. Older iterators
        are invalid.
        """
        return iter(self.reading)

    def __len__(self) -> int:
        """Micro batches of the whole epoch; ``TypeError`` where it has no end, or only reading would tell."""
        return len(self.reading)

    def __bool__(self) -> bool:
        return True

    @property
    def batches_left(self) -> int:
        """Micro batches until the iterator ends; 0 from when the last was taken; ``TypeError`` as `len`."""
        return self.reading.batches_left

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the trainer counts: at the end of the one before the loader moves on; within it nothing happens.

        Collective as iterating.

        Raises:
            ValueError: It is another epoch.
        """
        self.reading.set_epoch(epoch)

    def start(self) -> None:
        """Begin to read, so that the first batch is ready when training is: call it before the model is loaded.

        Worker processes, or the thread of ``prefetch_batches``, go ahead in the background; else the first batch is made now.
        A later load begins anew.
        """
        self.reading.start()

    def peek(self) -> Any:
        """The next batch, which stays the next: ``next`` may return the same memory, so leave it as it is.

        At the end of an epoch ``StopIteration``.

        Like iterating, collective over the dp ranks where an epoch's end is found by reading (``repeat=False`` with packing
        or filters): all ranks call it, or none. So are `start` and `skip`.
        """
        return self.reading.peek()

    def skip(self, num_samples: int) -> None:
        """Leave out samples, as if they had been delivered, also over the ends of epochs.

        At a constant cost where the pipeline allows it; whole epochs cost nothing where it knows its number of samples. Where
        rows must be read for it and that fails, what was skipped until then stays so: load a state before you ask again.

        Args:
            num_samples: Over all ranks, a multiple of ``W * b``.
        """
        self.reading.skip(num_samples)

    def set_global_batch_size(self, global_batch_size: int) -> None:
        """Go on with another global batch, in a ramp say; the micro batch stays, and iterators go on.

        As if the state were saved and loaded with the new one; collective over the dp ranks. `rd.plan` names an N that is
        aligned with several.

        Raises:
            ValueError: A step has begun, and the message says when the next one does; or this O does not fit.
        """
        self.reading.set_global_batch_size(global_batch_size)

    def exclude_steps(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out steps as if they had been delivered: those after which the loss went up, say.

        Their rows count as drawn. The state keeps them, so that the same call in a job that begins again changes nothing.

        Args:
            ranges: ``(first, stop)``, steps as `step` counts them, the first and the one after the last.

        Raises:
            ValueError: A range has passed, and the state does not have it. A later load of such a state: `DataStateError`.
        """
        self.reading.exclude_steps(ranges)

    def reset(self) -> None:
        """Go back to the beginning of the run."""
        self.reading.reset()

    def close(self) -> None:
        """Stop the worker processes, or the thread; the position stays, and the next batch starts them again."""
        self._close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A DataLoader does not pickle. In a checkpoint it is at the top level of the dict, {'model': ..., 'loader': "
            "loader}, where DCP asks it for its state; below that DCP takes it for a value."
        )

    def give_away(self) -> Reading:
        """What reads, for whoever reads ahead of training; the loader itself from now on only closes, all else raises."""
        reading, self._reading = self.reading, None
        reading.invalidate()
        return reading

    @property
    def reading(self) -> Reading:
        """What reads; ``RuntimeError`` where it was given away, or this rank has left."""
        if self._reading is None:
            raise RuntimeError(self._why_not)
        return self._reading

    # Where the run stands

    @property
    def setup(self) -> Setup:
        """What it runs with."""
        return self.reading.setup

    @property
    def stream(self) -> Stream:
        """What it reads, as far as it has read."""
        return self.reading.stream

    @property
    def step(self) -> int:
        """Global batches delivered."""
        return self.reading.step

    @property
    def epoch(self) -> int:
        """The epoch that is read: the next one from ``StopIteration`` on, or from the ``iter`` that begins it.

        0 with ``repeat=True`` and no ``steps_per_epoch``; each shard has its own there (see `progress`).
        """
        return self.reading.epoch

    @property
    def gradient_accumulation_steps(self) -> int:
        """A, batches of this rank in one optimizer step."""
        return self.setup.layout.gradient_accumulation_steps

    @property
    def last_batch_samples(self) -> int:
        """Real samples, its first, in the batch that was delivered last on this rank; less than b only with ``tail="pad"``."""
        return self.reading.last_batch_samples

    def progress(self) -> dict[str, float]:
        """Counters for a logger: of the run, of what this rank's shards have drawn, and of what it has waited for and read.

        ``dropped_samples`` and ``padded_samples`` count from when this loader was made or reset.
        """
        return self.reading.progress()

    def report(self) -> Report:
        """Which rank waits, and for what: numbers of `progress` over all dp ranks (collective), for a log line every so often.

        Returns:
            By name ``(minimum, median, maximum, worst)``, the last a dp rank; ``str`` makes a line of it.
        """
        return self.reading.report()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state that describes the batches delivered so far: a copy, and the same on every rank.

        Collective over the dp ranks: all of them call it, before any ``if rank == 0``. It pickles, and loads on any topology.

        Returns:
            ``{"shards": {path: plain tensor with N rows}, ...}``: see docs/design.md, 8.

        Raises:
            ValueError: Ranks are simulated, see `rescale_data.testing.full_state_dict`.
            RuntimeError: Another rank did not call it within a minute (within ``timeout``, where that is less).
            DataStateError: The ranks stand at different batches.
        """
        return self.reading.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict`, by the name it had when that returned the rows of one rank."""
        return self.state_dict()

    @property
    def sharded(self) -> Sharded:
        """What to save in place of the loader where all N rows on every rank are too many, or asking all ranks is too often.

        ``dcp.save({"loader": loader.sharded})``: its state holds `DTensor` rows without communication where W divides N. It
        does not pickle, and loads wherever the loader's own state does.
        """
        return self.reading.sharded

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of any topology, in any form; collective over the dp ranks where it is sharded.

        Raises:
            DataStateError: It belongs to another seed, N, dataset or pipeline, or is incomplete. Nothing has changed then.
        """
        self.reading.load_state_dict(state_dict)
