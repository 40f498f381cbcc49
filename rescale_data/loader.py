"""`DataLoader`: yields the batches of this rank; its position can be restored on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, Self

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.as_pipeline import as_pipeline, refuse_arguments
from rescale_data.engine.balance import Balance
from rescale_data.engine.base_loader import BaseLoader
from rescale_data.engine.opening import continue_stream, open_stream
from rescale_data.engine.options import OPTION_NAMES, Options, Tail
from rescale_data.engine.peers import RESULT, CallsSharedWithPeers, on_first_peer
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.stream import Stream
from rescale_data.engine.transfer import Transfer
from rescale_data.errors import checks_argument_types
from rescale_data.sources.dataset import MapStyle
from rescale_data.sources.iterable import IterableSource
from rescale_data.sources.source import Source

_RANK_ARGUMENTS = ("mesh", "dp_rank", "dp_world_size")
_PEER_ARGS = ("peers", "receives")
# Of the loader of a dp rank with peers; each of these processes keeps the last three in its part of `CallsSharedWithPeers`
_ARGS_FIXED_WITH_PEERS = ("pipeline", "dp_rank", "dp_world_size", "transfer", "pin_memory", "timeout")


class DataLoader(BaseLoader):
    """Iterates over the micro batches of this rank, in an order that does not depend on ranks, workers or micro batch size.

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
            one. Where only reading tells the end of an epoch, one rank may have to read four global batches alone. At most
            2,000,000, 23 days.
        verify: Keep a digest of the rows that each logical shard has delivered, 8 bytes a shard and source in the state, and
            prove at the end of each epoch that every row was delivered once, across all segments of the run: else
            `DataStateError`.
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
        refuse_arguments(kwargs, len(args))
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
        self.options = Options(**{name: value for name, value in locals().items() if name in OPTION_NAMES})
        self._pipeline = pipeline
        super().__init__(None if peers is None else CallsSharedWithPeers(pipeline, self.options))
        self._begin_stream()

    @on_first_peer(RESULT)
    def _begin_stream(self) -> None:
        self._own_stream = self._make_stream()

    @checks_argument_types
    def reopen(self, state: Mapping[str, Any] | None = None, delivered: int = 0, **changed: Any) -> None:
        """Continue with other arguments: a larger global batch, another micro batch, workers, or other ranks.

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
        refuse_arguments(changed, 1)
        if unknown := sorted(changed.keys() - {"pipeline", *vars(self.options)}):
            raise TypeError(
                f"reopen() has no argument {unknown}. It takes those of DataLoader: {sorted(vars(self.options))}."
            )
        fixed_args = _PEER_ARGS if self._peer_calls is None else _PEER_ARGS + _ARGS_FIXED_WITH_PEERS
        if names := [name for name in fixed_args if name in changed]:
            raise ValueError(
                f"reopen() keeps the peers of a dp rank, and with peers= what they share: {names} cannot change. Give mesh= of "
                f"the dp ranks."
            )
        if changed.keys() & set(_RANK_ARGUMENTS):
            changed = {**dict.fromkeys(_RANK_ARGUMENTS), **changed}
        options = replace(self.options, **{name: value for name, value in changed.items() if name != "pipeline"})
        arguments = {"_pipeline": changed.get("pipeline", self._pipeline), "options": options}
        self._reopen(state, delivered, changed, arguments)
        vars(self).update(arguments)  # on peers that have no stream

    @on_first_peer(RESULT)
    def _reopen(
        self, state: Mapping[str, Any] | None, delivered: int, changes: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        """Replace the stream by one with changed arguments, at a state or at the current position; on failure, change nothing.

        Args:
            changes: The arguments that the new stream is given, apart from the ones that stay.
            arguments: Attributes that change together with the stream.
        """
        old_stream = self._stream
        old_stream.rewind()  # a thread that reads ahead runs the pipeline's functions, and so does what follows
        fixed_sizes: dict[str, Any] = {"num_logical_shards": old_stream.layout.num_logical_shards}
        fixed_sizes |= {"micro_batch_size": old_stream.layout.micro_batch_size} if state is None else {}
        stream = self._make_stream(**{**fixed_sizes, **changes})
        continue_stream(stream, old_stream, state, delivered)
        iterator_epoch = self._iterator_epoch + stream.epoch - old_stream.epoch  # steps_per_epoch may count otherwise
        self.close()
        if state is not None:
            self._invalidate()
        # One call: after Ctrl-C between two the arguments would not describe the stream
        vars(self).update(arguments, _own_stream=stream, _iterator_epoch=iterator_epoch)

    def _make_stream(self, **changed_arguments: Any) -> Stream:
        """Return the stream of this rank, with some arguments changed."""
        arguments: dict[str, Any] = {"pipeline": self._pipeline, **vars(self.options), **changed_arguments}
        pipeline, options = arguments.pop("pipeline"), Options(**arguments)
        if self._peer_calls is not None:
            ahead_options = {"prefetch": options.batches_ahead, "pin_memory": options.pins_batches}
            pipeline, options = pipeline(), replace(options, peers=None, receives=True, transfer=None, **ahead_options)
        return open_stream(as_pipeline(pipeline, options.shuffle), options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A DataLoader does not pickle. In a checkpoint it is at the top level of the dict, {'model': ..., 'loader': "
            "loader}, where DCP asks it for its state; below that DCP takes it for a value. Another process "
            "(torch.multiprocessing.spawn, ddp_spawn) has its own ranks and files: build it in the function that is spawned, "
            "after init_process_group()."
        )

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: object) -> NoReturn:
        """Raise `TypeError`, for users who pass this loader as a dataset to torch's `DataLoader`."""
        raise TypeError(
            "rd.DataLoader makes the batches itself, in place of torch.utils.data.DataLoader: iterate over it, or give it to "
            "the trainer as it is. It is no dataset, and has no rows by number."
        )
