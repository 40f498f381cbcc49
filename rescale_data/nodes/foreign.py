"""Nodes of torchdata, and of others, below ours: each is wrapped in a `Node` that keeps its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from rescale_data.nodes.base import BaseNode, Node, ParallelMapper, PinMemory, Prefetcher, View, as_node
from rescale_data.nodes.guard import Guard
from rescale_data.state import Field, Ints, field_of, flatten, nest

T = TypeVar("T")


class Foreign(Node[T]):
    """A torchdata node that is not ours: its `state_dict()`, taken after every sample, is the row."""

    def __init__(self, node: BaseNode[T]) -> None:
        self.node = node
        self._first = flatten(node.state_dict())
        super().__init__()

    def own_fields(self) -> tuple[Field, ...]:
        return tuple(field_of(path, value) for path, value in self._first)

    def initial(self) -> View:
        return self.encode(nest(self._first))

    def seek(self) -> None:
        self.node.reset(self.decode(self.position))

    def next(self) -> T:
        try:
            return next(self.node)
        finally:
            self.position[:] = self.encode(self.node.state_dict())

    def parameters(self) -> dict[str, Any]:
        public = {k: v for k, v in vars(self.node).items() if not k.startswith("_")}
        return {k: v for k, v in public.items() if isinstance(v, str | int | float | bool)}

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node[Any]]]:
        yield path, self
        for found, node in _own_below(self.node, path):
            yield from node.walk(found)


class Mapped(Node[Any]):
    """A torchdata `Mapper` without threads: one sample for each that its source yields, so its position is the source's."""

    def __init__(self, mapper: ParallelMapper[Any]) -> None:
        super().__init__(source=mapper.source)
        self._map = mapper.map_fn
        self._guard = Guard(self, "raise", "in the function of Mapper, given")
        self.one_for_one = True

    def next(self) -> Any:
        sample = next(self.children["source"])
        try:
            return self._map(sample)
        except Exception as error:
            self._guard.caught(error, self.locate(), 0)

    def skip(self, num_samples: int) -> None:
        self.children["source"].skip(num_samples)

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        return self.children["source"].epoch_end(rows, shards)


@as_node.register(BaseNode)
def _wrapped(node: BaseNode[Any]) -> Node[Any]:
    _refuse_threads(node)
    if isinstance(node, ParallelMapper) and node.prebatch is not None:
        raise TypeError(
            f"ParallelMapper(prebatch={node.prebatch}) maps in batches for the sake of its threads, which a logical shard's "
            f"pipeline has none of. Leave prebatch out."
        )
    return Mapped(node) if isinstance(node, ParallelMapper) else Foreign(node)


def _refuse_threads(node: BaseNode[Any]) -> None:
    """``TypeError`` where a node, or one below it, owns threads or processes."""
    workers = isinstance(node, ParallelMapper) and node.num_workers > 0
    if workers or isinstance(node, Prefetcher | PinMemory):
        raise TypeError(
            f"{type(node).__name__} owns threads or processes and reads ahead of what it yields, so it cannot be part of a "
            f"logical shard's pipeline. Put it above rd.LogicalShards, or use rd.DataLoader(num_workers=...)."
        )
    for _, child in _children(node):
        _refuse_threads(child)


def _own_below(node: BaseNode[Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node[Any]]]:
    for name, child in _children(node):
        if isinstance(child, Node):
            yield (*path, name), child
        else:
            yield from _own_below(child, (*path, name))


def _children(node: BaseNode[Any]) -> Iterator[tuple[str, BaseNode[Any]]]:
    for name, value in vars(node).items():
        if name.startswith("_") or (isinstance(node, Node) and name != "children"):
            continue
        members: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        if isinstance(value, list | tuple):
            members = {str(i): member for i, member in enumerate(value)}
        if isinstance(value, BaseNode):
            yield name, value
        yield from ((f"{name}.{k}", v) for k, v in members.items() if isinstance(v, BaseNode))
