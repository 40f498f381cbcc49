"""Simulate several ranks in one process, and check that a pipeline rescales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from rescale_data.engine.collate import collate, with_valid_mask
from rescale_data.engine.recipe import Recipe
from rescale_data.engine.shards import LogicalShards
from rescale_data.engine.states.statedict import merged_state_dict
from rescale_data.engine.stream import HasStream, stream_of
from rescale_data.errors import checks_argument_types, require_type
from rescale_data.loader import DataLoader
from rescale_data.nodes.base import Node
from rescale_data.testing.epochs import check_epochs
from rescale_data.testing.source_contract import rows_equal

Topology: TypeAlias = tuple[int, int, int]
MakeLoader: TypeAlias = Callable[[int, int, int, int], DataLoader]


def full_state_dict(loaders: Sequence[DataLoader | LogicalShards]) -> dict[str, Any]:
    """Return the state of all N logical shards that the loaders of all dp ranks would save together.

    Args:
        loaders: One of each simulated rank, in any order, all at the same batch.

    Raises:
        ValueError: A rank is missing, there are none, or the loaders stand at different batches.

    Example:
        >>> import rescale_data as rd
        >>> from rescale_data import testing
        >>> sizes = {"global_batch_size": 4, "micro_batch_size": 2, "dp_world_size": 2}
        >>> loaders = [rd.DataLoader(range(16), dp_rank=rank, **sizes) for rank in range(2)]
        >>> batches = [next(iter(loader)) for loader in loaders]
        >>> testing.full_state_dict(loaders)["table"].shape
        torch.Size([16, 6])
    """
    expected = "a list of the loaders of all simulated ranks"
    require_type(Sequence, expected, loaders=loaders)
    if not loaders:
        raise ValueError(f"loaders is empty: give {expected}.")
    require_type(HasStream, expected, **{f"loaders[{i}]": loader for i, loader in enumerate(loaders)})
    return merged_state_dict([stream_of(loader) for loader in loaders])


@checks_argument_types
def assert_rescalable(
    make_loader: MakeLoader, topologies: Iterable[Topology], *, steps: int = 3, whole_epochs: bool = True
) -> None:
    """Run a chain of topologies, each from the last state, and compare every batch with an uninterrupted run.

    In each segment ``steps`` global batches and one more micro batch are taken on every rank. Each sample must be the next one
    of its logical shard, as the pipeline of that shard yields it when nothing interrupts it. Where these samples are rows of
    the sources, or lists of rows, three epochs must have each row once, but for those counted as filtered, skipped or blocked.

    Args:
        make_loader: ``(dp_rank, dp_world_size, micro_batch_size, num_workers) -> DataLoader``, all of one run.
        topologies: ``(dp_world_size, micro_batch_size, num_workers)`` of each segment.
        steps: Global batches of a segment.
        whole_epochs: False for a pipeline that leaves out or repeats rows on purpose, without counting them.

    Raises:
        AssertionError: A batch differs; the message names segment, rank, micro batch and column. Or an epoch has not its rows.
        ValueError: There is no topology.

    Example:
        >>> import rescale_data as rd
        >>> from rescale_data import testing
        >>> def make_loader(rank: int, ranks: int, micro_batch_size: int, num_workers: int) -> rd.DataLoader:
        ...     sizes = {"global_batch_size": 4, "micro_batch_size": micro_batch_size, "num_workers": num_workers}
        ...     return rd.DataLoader(range(32), dp_rank=rank, dp_world_size=ranks, **sizes)
        >>> testing.assert_rescalable(make_loader, [(1, 4, 0), (2, 1, 0)], steps=1)
    """
    reference: _ReferenceRun | None = None
    state: dict[str, Any] | None = None
    for segment, (dp_world_size, micro_batch_size, num_workers) in enumerate(topologies):
        loaders = [make_loader(rank, dp_world_size, micro_batch_size, num_workers) for rank in range(dp_world_size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        if reference is None:
            recipe = stream_of(loaders[0]).setup.recipe
            reference = _ReferenceRun(recipe)
            if whole_epochs:
                check_epochs(recipe)
        location = f"segment {segment} (W={dp_world_size}, b={micro_batch_size}, K={num_workers})"
        for u in range(steps * loaders[0].gradient_accumulation_steps + 1):
            reference.check_next_batch(loaders, f"{location}, micro batch {u}")
        state = full_state_dict(loaders)
        for loader in loaders:
            loader.close()
    if reference is None:
        raise ValueError("topologies is empty: give at least one (dp_world_size, micro_batch_size, num_workers).")


class _ReferenceRun:
    """The samples of each logical shard in a run that is never interrupted."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._nodes = [recipe.build(shard) for shard in range(recipe.num_logical_shards)]
        self._epoch = 0

    def check_next_batch(self, loaders: Sequence[DataLoader], location: str) -> None:
        """Take one micro batch on every rank, and compare its samples with the uninterrupted run."""
        self._begin_epoch(loaders)
        for rank, loader in enumerate(loaders):
            micro_batch = stream_of(loader).take()
            samples = [self._next_sample(shard) for shard in micro_batch.shards[: micro_batch.num_real]]
            if len(samples) == len(micro_batch.shards):
                expected = (loader.options.collate_fn or collate)(samples)
                if loader.options.tail == "pad":
                    expected = with_valid_mask(expected, len(samples), len(samples))
                _compare_batches(micro_batch.batch, expected, f"{location}, rank {rank}")

    def _begin_epoch(self, loaders: Sequence[DataLoader]) -> None:
        for loader in loaders:
            stream = stream_of(loader)
            while stream.is_epoch_over():
                stream.begin_next_epoch()
        while self._epoch < stream_of(loaders[0]).clock.epoch:
            self._epoch += 1
            for node in self._nodes:
                _finish_epoch(node)

    def _next_sample(self, shard: int) -> Any:
        node = self._nodes[shard]
        for _ in range(3):
            try:
                return next(node)
            except StopIteration:
                if not self._recipe.repeat:
                    raise AssertionError(f"logical shard {shard} was asked for more samples than it has") from None
                node.reset(node.get_state())
        raise AssertionError(f"logical shard {shard} yields no samples")


def _finish_epoch(node: Node[Any]) -> None:
    """Consume the samples that a shard has left in its epoch, and begin the next epoch."""
    for _ in node:
        pass
    node.reset(node.get_state())


def _compare_batches(actual: Any, expected: Any, location: str) -> None:
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        for key, value in expected.items():
            _compare_batches(actual[key], value, f"{location}, {key!r}")
    elif not rows_equal(actual, expected):
        raise AssertionError(
            f"{location}: the batch is not the one of an uninterrupted run: got {actual}, expected {expected}"
        )
