"""`LogicalShards`: the loader as a torchdata node, for use under `torchdata.nodes.Loader`, `Prefetcher` or `PinMemory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.feed import InProcessFeed
from rescale_data.engine.options import OPTION_NAMES, Options
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.setup import make_setup
from rescale_data.engine.states.load import load_state_dict
from rescale_data.engine.states.statedict import local_state_dict
from rescale_data.engine.stream import Stream
from rescale_data.errors import checks_argument_types
from rescale_data.nodes.base import BaseNode
from rescale_data.nodes.function import require_function

_STALE_STATE_WARNING = (
    "The state was of the end of an epoch, and the next one begins. If torchdata.nodes.Loader did that (torchdata 0.11), its "
    "state_dict() returns the state of that end from now on, whatever is read: who goes on from it reads all again. Give it "
    "restart_on_stop_iteration=False: then the first loop after such a load is empty, as with rd.DataLoader."
)


class LogicalShards(BaseNode[list[Any]]):
    """A torchdata node that runs the logical shards of this rank, and yields lists of b samples.

    Some nodes above it go on from an earlier state, and then draw as many batches again (``snapshot_frequency`` of `Prefetcher`
    and `ParallelMapper`). They count batches of the earlier topology: leave ``snapshot_frequency`` at 1, the default, or go on
    with the same W and b. With several ranks, the state of this node holds the rows of its own rank alone. To keep a state,
    pass it, or the state of a node above, to `rd.whole_state`. Give ``torchdata.nodes.Loader`` above it
    ``restart_on_stop_iteration=False``. By default, a ``Loader`` that has loaded the state of an epoch's end returns that state
    for ever (torchdata 0.11); this node warns of that.

    Args:
        pipeline: ``Shard -> node``, the node graph of one logical shard.
        num_logical_shards: N, fixed for the whole run.
        global_batch_size: O, the samples of an optimizer step over all ranks.
        micro_batch_size: b. Default for a single rank: O.
        mesh: The `DeviceMesh` or process group of the data-parallel ranks. Default: the process group, if there is one.
        dp_rank: The data-parallel rank, in place of a mesh, together with ``dp_world_size``.
        seed: The seed of every order.
        repeat: True for an endless stream; False for a `StopIteration` at the end of each epoch. Then the rest of an epoch that
            does not fill a global batch is dropped.

    Raises:
        ValueError: The topology does not fit; the message lists the ones that do.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.SyntheticSource(64, length=8)
        >>> sizes = {"num_logical_shards": 4, "global_batch_size": 4}
        >>> shards = rd.LogicalShards(lambda shard: rd.Reader(source, shard), **sizes, repeat=False)
        >>> [sample["tokens"].shape for sample in next(shards)]
        [(8,), (8,), (8,), (8,)]
    """

    @checks_argument_types
    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_logical_shards: int,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        mesh: DeviceMesh | ProcessGroup | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        seed: int = 0,
        repeat: bool = True,
    ) -> None:
        super().__init__()
        require_function(pipeline, "a logical shard")
        options = {name: value for name, value in locals().items() if name in OPTION_NAMES}
        setup = make_setup(pipeline, Options(**options))
        self._stream = Stream(setup, InProcessFeed(setup.runner, list))
        self._state_was_requested: bool | None = None  # True if a state was asked for since a reset to an epoch's end
        self._samples_at_reset = 0  # samples after the last reset; a second reset there changes nothing

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        """Load a state; without one, begin the run again or, at the end of an epoch, begin the next epoch."""
        super().reset(None)
        self._stream.ranks.require_no_group()
        samples_at_reset, self._samples_at_reset = self._samples_at_reset, -1
        state_was_requested, self._state_was_requested = self._state_was_requested, None
        if initial_state is not None:
            load_state_dict(self._stream, initial_state)
            self._state_was_requested = False if self._stream.cursor.epoch_ended else None
            return
        if self._stream.cursor.epoch_ended:
            if state_was_requested:
                self._stream.ranks.warn(_STALE_STATE_WARNING)
            self._stream.begin_next_epoch()
        elif self._stream.clock.samples != samples_at_reset:
            self._stream.reset()
        self._samples_at_reset = self._stream.clock.samples

    def next(self) -> list[Any]:
        self._stream.ranks.require_no_group()
        return self._stream.take().batch

    def get_state(self) -> dict[str, Any]:
        self._stream.ranks.require_no_group()
        self._state_was_requested = None if self._state_was_requested is None else True
        return local_state_dict(self._stream.cursor, self._stream.ends)
