"""Nodes of torchdata or of other packages within a pipeline: a `Node` wraps each of them and keeps its state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from rescale_data.nodes.base import BaseNode, Node, View, as_node, torchdata_nodes
from rescale_data.nodes.error_handler import error_handler
from rescale_data.shard import Shard
from rescale_data.sources.iterable import Stateful
from rescale_data.state import Field, field_of, flatten, row_of, state_of

T = TypeVar("T")

_NUM_COMPARED_SAMPLER_INDICES = 8
_UNSUPPORTED_SAMPLER = "StatefulDistributedSampler"  # by name, because importing it would import torchdata's loader
_BEGUN_FIELD = Field(("begun",))
_UNBATCHER_KEYS = {torchdata_nodes.Unbatcher.SOURCE_KEY, torchdata_nodes.Unbatcher.BATCH_IDX_KEY}
_STATUS_AS_BUILT, _STATUS_EPOCH_START, _STATUS_WITHIN_EPOCH = range(3)


class Foreign(Node[T]):
    """Wraps a torchdata node that this package does not define; its position is its `state_dict()` after every sample.

    Epochs end and begin as under torchdata's `Loader`: at `StopIteration` the node and all nodes below it are reset. A `Node`
    below it then goes on with its next epoch. A row whose slot ``begun`` is 0 stands for the state in which the node was
    built. That state may differ from shard to shard.
    """

    def __init__(self, node: BaseNode[T]) -> None:
        self.wrapped_node = node
        self._samplers = [inner for inner in _all_below(node) if isinstance(inner, torchdata_nodes.SamplerWrapper)]
        self._built_state = node.state_dict()
        self.FIELDS = (_BEGUN_FIELD, *(field_of(path, value) for path, value in flatten(self._built_state)))
        super().__init__()

    def seek(self) -> None:
        self._reset(self.position)

    def next(self) -> T:
        status = _STATUS_WITHIN_EPOCH
        try:
            return next(self.wrapped_node)
        except StopIteration:
            status = _STATUS_EPOCH_START
            self._begin_epoch()
            raise
        finally:
            self._save_state(self.position, status)

    def next_epoch(self, position: View, *, is_drawn: bool = False) -> None:
        if is_drawn or position[0] == _STATUS_WITHIN_EPOCH:
            self._reset(position)
            self._begin_epoch()
            self._save_state(position, _STATUS_EPOCH_START)

    def _begin_epoch(self) -> None:
        epochs = [(sampler, sampler.epoch) for sampler in self._samplers if isinstance(sampler.sampler, Stateful)]
        for sampler in self._samplers:  # a sampler without a call since a resume would stay in its epoch
            if not isinstance(sampler.sampler, Stateful):
                next(sampler, None)
        self.wrapped_node.reset(None)
        for sampler, epoch in epochs:
            if sampler.epoch == epoch:  # so would this one, and a call would move its place
                sampler.epoch = sampler.epoch_updater(epoch)
                sampler.reset(None)

    def _reset(self, position: View) -> None:
        state = state_of(self.fields, position)
        as_built = state.pop(_BEGUN_FIELD.key) == _STATUS_AS_BUILT
        # the node may go on writing into the state that it receives
        self.wrapped_node.reset(_with_unbatcher_copies(copy.deepcopy(self._built_state) if as_built else state))

    def _save_state(self, position: View, status: int) -> None:
        state = {_BEGUN_FIELD.key: status, **self.wrapped_node.state_dict()}
        position[:] = row_of(self.fields, state, type(self.wrapped_node).__name__)

    def parameters(self) -> dict[str, Any]:
        return _parameters(self.wrapped_node)

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node[Any]]]:
        yield path, self
        for inner_path, node in _nodes_below(self.wrapped_node, path):
            yield from node.walk(inner_path)


class _UnbatcherState(dict[str, Any]):
    """State of a torchdata `Unbatcher`; reading a value returns a copy.

    An `Unbatcher` resets its source to a dict, keeps this same dict and saves it later. A `MultiNodeWeightedSampler` as the
    source goes on writing into the dict which of its sources are exhausted.
    """

    def __getitem__(self, key: str) -> Any:
        return copy.deepcopy(super().__getitem__(key))


def _with_unbatcher_copies(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state to reset a node with, in which `Unbatcher` states return copies that no other node can modify."""
    copies = {key: _with_unbatcher_copies(value) if type(value) is dict else value for key, value in state.items()}
    return _UnbatcherState(copies) if copies.keys() == _UNBATCHER_KEYS else copies


class MappedNode(Node[Any]):
    """Wraps a torchdata `Mapper` without threads: it yields one sample per sample of its source and has the same position."""

    one_for_one = True

    def __init__(self, mapper: torchdata_nodes.ParallelMapper[Any]) -> None:
        super().__init__(source=mapper.source)
        self._map = mapper.map_fn
        self._error_handler = error_handler(self, "raise", "in the function of Mapper, given")

    def next(self) -> Any:
        sample = next(self.children["source"])
        try:
            return self._map(sample)
        except Exception as error:
            self._error_handler.handle_error(error, self.locate(), 0)


@as_node.register(BaseNode)
def _wrap(node: BaseNode[Any]) -> Node[Any]:
    for inner in _all_below(node):
        _refuse_threads(inner)
        _refuse_one_pass(inner)
        _refuse_nested(inner)
    return MappedNode(node) if isinstance(node, torchdata_nodes.ParallelMapper) else Foreign(node)


def refuse_rank_readers(root: Node[Any], shard: Shard) -> None:
    """Raise ``TypeError`` if a part of the pipeline reads the rows of a rank instead of the rows of a logical shard."""
    wrapped_nodes = [node.wrapped_node for _, node in root.walk() if isinstance(node, Foreign)]
    inner_nodes = [inner for wrapped_node in wrapped_nodes for inner in _all_below(wrapped_node)]
    for reader in [*inner_nodes, *map(_wrapped_iterable, inner_nodes)]:
        rank, num_replicas = getattr(reader, "rank", None), getattr(reader, "num_replicas", None)
        world_size = getattr(reader, "world_size", num_replicas)  # as torchdata calls it, or `DistributedSampler`
        is_by_rank = rank is not None and world_size is not None
        if is_by_rank and (rank, world_size) not in ((0, 1), (shard.index, shard.num_logical_shards)):
            raise TypeError(
                f"{type(reader).__name__} reads as rank {rank} of {world_size}, so another number of ranks would read other "
                f"samples. A pipeline knows no ranks: give it rank=shard.index and as the number of ranks "
                f"shard.num_logical_shards, of the shard that the pipeline is called with."
            )


def _refuse_threads(node: BaseNode[Any]) -> None:
    """Raise ``TypeError`` if a node uses threads or processes, or maps samples in batches for its threads."""
    if isinstance(node, torchdata_nodes.ParallelMapper) and not node.num_workers:
        if node.prebatch is not None:
            raise TypeError(
                f"ParallelMapper(prebatch={node.prebatch}) maps in batches for the sake of its threads, which a logical "
                f"shard's pipeline has none of. Leave prebatch out."
            )
    elif isinstance(node, torchdata_nodes.ParallelMapper | torchdata_nodes.Prefetcher | torchdata_nodes.PinMemory):
        raise TypeError(
            f"{type(node).__name__} owns threads or processes and reads ahead of what it yields, so it cannot be part of a "
            f"logical shard's pipeline. Put it above rd.LogicalShards, or use rd.DataLoader(num_workers=...)."
        )


def _refuse_one_pass(node: BaseNode[Any]) -> None:
    """Raise ``TypeError`` if the iterable or sampler of a node can be read only once, or changes its order each time."""
    wrapped = _wrapped_iterable(node)
    if any(kind.__name__ == _UNSUPPORTED_SAMPLER for kind in type(wrapped).__mro__):
        raise TypeError(
            f"The {type(wrapped).__name__} of {type(node).__name__} yields nothing in its second epoch, and forgets its place "
            f"when it is saved before the first row that follows a resume. Use torch.utils.data.DistributedSampler(dataset, "
            f"num_replicas=shard.num_logical_shards, rank=shard.index), or rd.Reader(dataset, shard)."
        )
    if wrapped is None or isinstance(wrapped, Stateful):
        return
    if isinstance(wrapped, Iterator):
        raise TypeError(
            f"{type(node).__name__} was given a {type(wrapped).__name__}, which can be read once: neither a resume nor a "
            f"second epoch could begin it again. Give an object whose __iter__ begins anew, or use rd.IterableSource."
        )
    if isinstance(node, torchdata_nodes.SamplerWrapper):
        first_order, second_order = (list(islice(iter(node.sampler), _NUM_COMPARED_SAMPLER_INDICES)) for _ in range(2))
        if str(first_order) != str(second_order):
            raise TypeError(
                f"The {type(wrapped).__name__} of SamplerWrapper yields another order each time ({first_order}, then "
                f"{second_order}), so a resume would lose and repeat rows. Use rd.Reader(dataset, shard), which "
                f"shuffles, or a sampler whose order follows from set_epoch(epoch)."
            )


def _refuse_nested(node: BaseNode[Any]) -> None:
    """Raise ``TypeError`` if a `MultiNodeWeightedSampler` of torchdata reads another one.

    The inner one would not begin its next epoch after some resumes.
    """
    if isinstance(node, torchdata_nodes.MultiNodeWeightedSampler):
        for inner in _all_below(node):
            if inner is not node and isinstance(inner, torchdata_nodes.MultiNodeWeightedSampler):
                raise TypeError(
                    "A MultiNodeWeightedSampler reads another, which after some resumes would not begin its next epoch. Make "
                    "one of both with the products of their weights, or use rd.WeightedSampler."
                )


def _wrapped_iterable(node: BaseNode[Any]) -> Any:
    """Return the iterable or sampler that a node of torchdata wraps; `None` if it wraps none."""
    if isinstance(node, torchdata_nodes.SamplerWrapper):
        return node.sampler
    return node.iterable if isinstance(node, torchdata_nodes.IterableWrapper) else None


def _parameters(node: BaseNode[Any]) -> dict[str, Any]:
    """Return the public attributes of a torchdata node, and of torchdata nodes below it, that JSON can hold."""
    public = {k: v.item() if isinstance(v, np.generic) else v for k, v in vars(node).items() if not k.startswith("_")}
    children = [(name, child) for name, child in _children(node) if not isinstance(child, Node)]
    child_parameters = {name: {"node": type(child).__name__, **_parameters(child)} for name, child in children}
    return {**{k: v for k, v in public.items() if _is_json_value(v)}, **child_parameters}


def _is_json_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(k, str) and _is_json_value(v) for k, v in value.items())
    return isinstance(value, str | int | float | bool)


def _nodes_below(node: BaseNode[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node[Any]]]:
    """Yield ``(path, node)`` for each `Node` that a torchdata node reads, directly or through other torchdata nodes."""
    for name, child in _children(node):
        if isinstance(child, Node):
            yield (*path, name), child
        else:
            yield from _nodes_below(child, (*path, name))


def _all_below(node: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    yield node
    for _, child in _children(node):
        yield from _all_below(child)


def _children(node: BaseNode[Any]) -> Iterator[tuple[str, BaseNode[Any]]]:
    for name, value in vars(node).items():
        if name.startswith("_") or (isinstance(node, Node) and name != "children"):
            continue
        nested_values: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        if isinstance(value, list | tuple):
            nested_values = {str(i): member for i, member in enumerate(value)}
        if isinstance(value, BaseNode):
            yield name, value
        yield from ((f"{name}.{k}", v) for k, v in nested_values.items() if isinstance(v, BaseNode))
