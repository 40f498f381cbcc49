"""`DataLoader`: batches of this rank, and a position that reshards like the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.context import BaseContext, get_spawning_popen
from typing import Any, NoReturn, Self, cast

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.as_pipeline import as_pipeline, refuse
from rescale_data.engine.balance import Balance
from rescale_data.engine.opening import open_stream
from rescale_data.engine.options import Options, Tail
from rescale_data.engine.reading import Batches, Reading
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.report import Report
from rescale_data.engine.shared import Shared
from rescale_data.engine.stream import Stream
from rescale_data.engine.transfer import Transfer
from rescale_data.errors import checks_kinds
from rescale_data.sources.dataset import MapStyle
from rescale_data.sources.iterable import IterableSource
from rescale_data.sources.source import Source

SLOW_AFTER = 10.0
"""Seconds after which a wait for a batch is logged, once, as a warning: what is read, called or waited for."""


_WHERE = ("mesh", "dp_rank", "dp_world_size")


class DataLoader:
    """Micro batches of this rank, in an order that no change of ranks, workers or micro batch size disturbs.

    The position belongs to the loader: ``iter(loader)`` goes on where the last batch was taken, `reset` begins again.
    A `Stateful`: put it into the dict that ``torch.distributed.checkpoint`` saves, beside model and optimizer.

    Args:
        pipeline: ``Shard -> node``, the node graph of one logical shard; or a source, or anything with ``__len__`` and
            ``__getitem__``: then each row is a sample. Or streams: an `IterableSource`, an ``IterableDataset`` of Hugging Face.
        shuffle: Of rows: `True` (default), or a window as in `Reader`. `False`: evaluation; the global batches hold the rows in
            the order of the dataset, each once. Leave it out with a pipeline, which says it itself (`Reader`).
        global_batch_size: O, samples per optimizer step over all ranks.
        micro_batch_size: b, samples of one batch of one rank; ``W * b`` divides O. Required, since a default would grow as
            ranks become fewer; but for one rank or with ``shuffle=False``, where it is O / W.
        num_logical_shards: N, fixed for the whole run. Default 4 * O; less where that is above 2,048 (`rd.plan`); with
            ``shuffle=False`` O times the number of workers, so name it where they are to change within an epoch.
        mesh: The data-parallel ranks: a `DeviceMesh`, several dims counted row-major as one, or a process group of exactly
            these ranks in their order. Default: the whole process group where there is one, else a single rank. Tensors never
            go through it: all loaders over the same ranks share a gloo group of their own.
        dp_rank: In place of a mesh, together with ``dp_world_size``: all ranks of the job then build the loader, and no group
            spans the TP, PP and CP peers that share a dp rank. ``dp_world_size=1`` alone: this process reads all rows.
        peers: The processes that share this one's dp rank (TP, PP, CP), as a `DeviceMesh` (several dims count as one) or their
            process group, on any backend. The first of them reads, and sends all of them its batches, from CPU to CPU, its
            state and its errors; the others build no pipeline, read nothing and start no worker. ``pipeline`` is then a
            function without arguments that returns what is read, called on the first alone, and the dp ranks are named. Every
            method, but for `progress` and `close`, is collective over the peers, in one thread.
        receives: `False`: this one of the ``peers`` needs no batches (a pipeline stage), and gets `None` for each. The first
            always has them.
        num_workers: K worker processes; 0 makes batches in this process.
        seed: Seed of every order.
        repeat: `False`: ``iter(loader)`` ends with the epoch. `True`: it never ends.
        tail: What becomes of the rest of an epoch that does not fill a global batch: "drop", or "pad" with real rows again, and
            ``batch["valid"]: Bool[b]`` in every batch. Of a batch that is no dict the first `last_batch_samples` are real.
        collate_fn: A list of b samples -> batch, run where samples are made. Default: torch's `default_collate`.
        worker_init_fn: Called with its number in each worker process when that starts.
        prefetch: Batches that a thread makes ahead while training computes; with workers, messages that each may be ahead. The
            state stays that of what was taken. Functions of a pipeline, and ``collate_fn``, run in that thread: torch's default
            device and grad mode are its own there. Default: 2 with workers or ``transfer``; else 0, no thread.
        transfer: A device (``"cuda"``), or a function of a batch that returns it on the device: batches come through it, in the
            thread of ``prefetch``. Copies of pinned batches to a device are queued without waiting, in the stream that is
            current when reading begins. For XLA: ``rescale_data.xla.Transfer``.
        pin_memory: True if batches arrive in page-locked memory, where there is an accelerator; on with ``transfer="cuda"``.
        multiprocessing_context: How workers start. The default is safe although this process has used threads.
        timeout: Seconds to wait for a worker, or for another rank in a collective: more than a rank may ever be behind another
            one, so more than reading two steps takes where data is slowest. At most 2,000,000, 23 days.
        verify: Keep a digest of the rows that each logical shard has delivered, 8 bytes a shard and source in the state, and
            prove at the end of each epoch that every row was delivered once, across all legs of the run: else `DataStateError`.
        steps_per_epoch: Where the data has no epoch, or only reading tells its end: an iterator ends whenever `step` is a
            multiple of this. With ``repeat=False`` the data's own end comes within, and ends none (`progress` has its epochs).
        balance: Samples of a step change places, so that ranks finish together (`Balance`). The global batch stays the same
            set, and a state within a step is that of its beginning. Over several ranks iterating, `skip`, `reset`, loading and
            `close` are collective. ``collate_fn`` then runs in this process, behind the exchange.

    Attributes:
        options: The arguments, as they were given here or to `reopen` (`Options`, frozen).

    Raises:
        ValueError: A topology that does not fit, an epoch without a whole global batch; the message lists what fits. Or
            there is no process group yet (``WORLD_SIZE`` is above 1).
        RuntimeError: At a use: a process group of several ranks has come since.
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

    def __init__(
        self,
        pipeline: Pipeline | Source | IterableSource | MapStyle,
        *,
        shuffle: bool | int | None = None,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        num_logical_shards: int | None = None,
        mesh: DeviceMesh | ProcessGroup | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        peers: DeviceMesh | ProcessGroup | None = None,
        receives: bool = True,
        num_workers: int = 0,
        seed: int = 0,
        repeat: bool = False,
        tail: Tail = "drop",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        prefetch: int | None = None,
        transfer: Transfer | None = None,
        pin_memory: bool = False,
        multiprocessing_context: str | BaseContext = "forkserver",
        timeout: float = 300.0,
        verify: bool = False,
        steps_per_epoch: int | None = None,
        balance: Balance | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "pipeline")}
        self._pipeline, self.options = pipeline, Options(**given)
        if peers is not None:
            self._opened: Reading = cast(Any, Shared(self._open, pipeline, self.options))
            return
        stream = open_stream(as_pipeline(pipeline, self.options.shuffle), self.options, SLOW_AFTER)
        self._opened = Reading(stream, slow_after=SLOW_AFTER)

    def reopen(self, state: Mapping[str, Any] | None = None, delivered: int = 0, **changed: Any) -> None:
        """Go on with other arguments: a larger global batch, another micro batch, workers, or other ranks.

        Without ``state`` the ranks stay, all of them call it, and the newest iterator goes on. Other ranks go on from one
        state: all old ranks call `state_dict`, those that leave then `close`, one sends the state to all new ones, and all load
        it, those that stay by ``reopen(state, mesh=new)``. Iterators are then invalid, as after `load_state_dict`.

        Args:
            state: Default: that of this moment.
            delivered: See `load_state_dict`.
            changed: Arguments of `DataLoader`; the others stay as they are. ``num_logical_shards`` does, also by default, and
                ``micro_batch_size`` where the ranks stay.

        Raises:
            ValueError: What does not fit; without ``state``, other ranks, or a step that has begun, and the message says when
                the next one does. Nothing has changed then.
            DataStateError: See `load_state_dict`; nothing has changed then.
        """
        if changed.keys() & {"peers", "receives"}:
            raise ValueError("reopen() keeps the peers of a dp rank: peers= and receives= stay as they are.")
        if changed.keys() & set(_WHERE):
            changed = {**dict.fromkeys(_WHERE), **changed}
        self._opened.reopen(self._open, state, delivered, changed)
        self._pipeline = changed.pop("pipeline", self._pipeline)
        self.options = replace(self.options, **changed)

    def _open(self, **changed: Any) -> Reading:
        """Return what this process is to read for its dp rank, with some arguments changed."""
        given: dict[str, Any] = {"pipeline": self._pipeline, **vars(self.options), **changed}
        if given["peers"] is not None:
            given |= {"pipeline": given["pipeline"](), "peers": None, "receives": True, "transfer": None}
        return DataLoader(**given)._reading

    # Batches

    def __iter__(self) -> Batches:
        """Go on from the position, or with the next epoch where the last batch of this one has been taken.

        After a load of a state that was saved there iterators are empty until ``next`` of one has raised
        ``StopIteration``. Older iterators are invalid.
        """
        return iter(self._reading)

    def __len__(self) -> int:
        """Number of micro batches in the whole epoch; ``TypeError`` if it has no end, or if only reading finds it."""
        return len(self._reading)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: object) -> NoReturn:
        """Raise `TypeError`: for torch's `DataLoader` that is given this one as its dataset."""
        raise TypeError(
            "rd.DataLoader makes the batches itself, in place of torch.utils.data.DataLoader: iterate over it, or give it to "
            "the trainer as it is. It is no dataset, and has no rows by number."
        )

    @property
    def batches_left(self) -> int:
        """Micro batches until the iterator ends; 0 from when the last was taken; ``TypeError`` as `len`."""
        return self._reading.batches_left

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the trainer counts: at the end of the one before the loader moves on; within it nothing happens.

        Collective as iterating.

        Raises:
            ValueError: It is another epoch.
        """
        self._reading.set_epoch(epoch)

    def start(self) -> None:
        """Begin to read, so that the first batch is ready when training is: call it before the model is loaded.

        Worker processes, or the thread of ``prefetch``, go ahead in the background; else the first batch is made now.
        A later load begins anew.
        """
        self._reading.start()

    def peek(self) -> Any:
        """The next batch, which stays the next: ``next`` may return the same memory, so leave it as it is.

        At the end of an epoch ``StopIteration``.

        Like iterating, collective over the dp ranks where an epoch's end is found by reading (``repeat=False`` with packing
        or filters): all ranks call it, or none. So are `start` and `skip`.
        """
        return self._reading.peek()

    def skip(self, num_samples: int) -> None:
        """Leave out samples, as if they had been delivered, also over the ends of epochs.

        At a constant cost where the pipeline allows it; whole epochs cost nothing where it knows its number of samples. Else
        rows are read for it; where that fails, nothing has moved. The state keeps what was left out, as ranges of samples.
        Collective over the dp ranks: each of them calls it, with the same number.

        Args:
            num_samples: Over all ranks, a multiple of ``W * b``.
        """
        self._reading.skip(num_samples)

    def reset(self) -> None:
        """Go back to the beginning of the run."""
        self._reading.reset()

    def close(self) -> None:
        """Stop the worker processes, or the thread; the position stays, and the next batch starts them again."""
        self._opened.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        if get_spawning_popen() is not None:
            raise TypeError(
                "A DataLoader does not go to another process (torch.multiprocessing.spawn, ddp_spawn): each has its own ranks "
                "and files. Build it in the function that is spawned, after init_process_group()."
            )
        raise TypeError(
            "A DataLoader does not pickle. In a checkpoint it is at the top level of the dict, {'model': ..., 'loader': "
            "loader}, where DCP asks it for its state; below that DCP takes it for a value."
        )

    @property
    def _reading(self) -> Reading:
        """The `Reading` that all calls use.

        Raises:
            RuntimeError: The process group is younger than the loader.
        """
        if self.options.peers is None:  # else the first reads by a loader of its own
            self._opened.stream.ranks.require_no_group()
        return self._opened

    @property
    def _stream(self) -> Stream:
        """The stream of micro batches of this rank (`HasStream`)."""
        return self._reading.stream

    # Where the run stands

    @property
    def step(self) -> int:
        """Global batches delivered."""
        return self._reading.step

    @property
    def epoch(self) -> int:
        """The epoch that is read: the next one from ``StopIteration`` on, or from the ``iter`` that begins it.

        0 with ``repeat=True`` and no ``steps_per_epoch``; each shard has its own there (see `progress`).
        """
        return self._reading.epoch

    @property
    def gradient_accumulation_steps(self) -> int:
        """A, batches of this rank in one optimizer step."""
        return self._reading.gradient_accumulation_steps

    @property
    def last_batch_samples(self) -> int:
        """Real samples, its first, in the batch that was delivered last on this rank; less than b only with ``tail="pad"``."""
        return self._reading.last_batch_samples

    def progress(self) -> dict[str, float]:
        """Counters for a logger: of the run, of what this rank's shards have drawn, and of what it has waited for and read.

        ``dropped_samples`` and ``padded_samples`` count from the beginning of the run; they are in the state.
        """
        return self._reading.progress()

    def report(self) -> Report:
        """Return numbers of `progress` over all dp ranks (collective), for a log line: which rank waits, and for what.

        Returns:
            By name ``(minimum, median, maximum, worst)``, the last a dp rank; ``str`` makes a line of it.
        """
        return self._reading.report()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state that describes the batches delivered so far: a copy, and the same on every rank.

        Collective over the dp ranks: all of them call it, before any ``if rank == 0``. It pickles, and loads on any topology.

        Returns:
            ``{"table": int64[N, columns], "header": str}``: see docs/design.md, 8.

        Raises:
            ValueError: Ranks are simulated, see `rescale_data.testing.full_state_dict`.
            RuntimeError: Another rank did not call it within ``timeout``.
            DataStateError: The ranks stand at different batches.
        """
        return self._reading.state_dict()

    def local_state_dict(self) -> dict[str, Any]:
        """The state as this rank knows it, without communication, for snapshots that are taken often and seldom needed.

        It does not pickle. `rd.whole_state` makes it what `state_dict` would have returned (collective).
        """
        return self._reading.local_state_dict()

    @checks_kinds
    def load_state_dict(self, state_dict: Mapping[str, Any], delivered: int = 0) -> None:
        """Go on from a state of any topology.

        Collective over the dp ranks where it is one rank's own, and with ``delivered``, for which they read as for `skip`.

        Args:
            state_dict: What `state_dict` returned, or DCP loaded into it.
            delivered: Samples that were delivered after the state, over all ranks of the topology that it names, and that are
                in the model: a multiple of its ``W * b``. They count as served, and the run goes on behind them.

        Raises:
            DataStateError: It belongs to another seed, N, dataset or pipeline, or is incomplete. Nothing has changed then.
            ValueError: ``delivered`` is not a multiple of that, or further than a state can count.

        Example:
            >>> import rescale_data as rd
            >>> loader = rd.DataLoader(range(12), shuffle=False, global_batch_size=4)
            >>> state = loader.state_dict()
            >>> _ = next(iter(loader))  # and then the process dies
            >>> loader = rd.DataLoader(range(12), shuffle=False, global_batch_size=4)
            >>> loader.load_state_dict(state, delivered=4)
            >>> next(iter(loader))
            tensor([4, 5, 6, 7])
        """
        self._reading.load_state_dict(state_dict, delivered)
