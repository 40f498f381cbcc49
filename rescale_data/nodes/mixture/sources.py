"""`MixtureSources`: the source nodes of one logical shard's mixture, of which there may be hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from rescale_data.nodes.base import Node, View, drop_position, is_position_bound
from rescale_data.nodes.column import documents_of
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache import DEFAULT_CACHE_BYTES, cache_share, owner_id
from rescale_data.sources.decoded.interest import served_shards
from rescale_data.sources.source import TokenSource


class MixtureSources:
    """The source nodes of a mixture, by number, opened for one logical shard.

    A `Reader` among them may belong to another shard (`share_memory_with`). This shard then opens a reader of its own, and
    keeps it as long as the cache has room for the order in which it reads.

    Args:
        nodes: The sources.
        slots: The slots of each source in the mixture's position.
        shard: The logical shard; `None` if there is none.

    Attributes:
        nodes: The sources, for questions whose answer is the same in all logical shards.
        last_node: The node that was drawn from last.
    """

    def __init__(self, nodes: Sequence[Node[Any]], slots: Sequence[slice], shard: Shard | None) -> None:
        self.nodes, self.slots, self._shard = nodes, slots, shard
        self.last_node: Node[Any] = nodes[0]
        self._own_readers: dict[int, Reader] = {}
        self._documents: dict[str, dict[int, DocumentReader]] = {}

    def share_memory_with(self, other_sources: MixtureSources) -> None:
        """Use another shard's readers in place of this shard's, if they differ only in the shard, to save memory."""
        pairs = [*zip(self.nodes, other_sources.nodes, strict=True)]
        shared = [
            isinstance(node, Reader) and node.shard == self._shard and node.reads_alike(other) for node, other in pairs
        ]
        if all(shared):
            self.nodes, self.slots = other_sources.nodes, other_sources.slots
        elif any(shared):
            self.nodes = [other if is_shared else node for (node, other), is_shared in zip(pairs, shared, strict=True)]
        self.last_node = self.nodes[0]
        self._documents.clear()

    def open(self, source: int) -> Node[Any]:
        """Return the node of a source for this shard; it need not be bound to a position."""
        node = self.nodes[source]
        if self._is_own(node) or not isinstance(node, Reader) or self._shard is None:
            return node
        reader = self._own_readers.get(source)
        if reader is None:
            sources_ref: ref[MixtureSources] = ref(self)
            reader = self._own_readers[source] = node.for_shard(self._shard, lambda: _drop_source(sources_ref, source))
        return reader

    def bound_node(self, source: int, position: View) -> Node[Any]:
        """Return the node of a source for this shard, bound to its part of the mixture's position."""
        self.last_node = node = self.open(source)
        if not is_position_bound(node):
            node.bind(position[self.slots[source]])
        return node

    def documents(self, source: int, column: str) -> DocumentReader:
        """Return the reader of documents in one column of a source, created on first use."""
        opened = self._documents.setdefault(column, {})
        reader = opened.get(source)
        if reader is None:
            reader = opened[source] = documents_of(self.open(source), column, "WeightedSampler")
        return reader

    def make_byte_limit(self) -> Callable[[], int]:
        """Return a function that returns, at each call, about how many bytes may be read at once."""
        num_shards = 1 if self._shard is None else self._shard.num_logical_shards
        sources_read = [child.reads for node in self.nodes for _, child in node.walk()]
        token_sources = [source for source in sources_read if isinstance(source, TokenSource)]
        if not token_sources:
            return lambda: DEFAULT_CACHE_BYTES // 8 // num_shards
        min_source = min(token_sources, key=lambda source: source.cache_bytes)
        source_key = owner_id(min_source)
        return lambda: cache_share(min_source) // 8 // max(1, len(served_shards(source_key, num_shards)))

    def close(self) -> None:
        """Unbind the readers of this shard and close the opened ones, because their positions are no longer valid."""
        for node in self.nodes:
            if self._is_own(node) and not node.children:
                drop_position(node)
        self._own_readers.clear()

    def _is_own(self, node: Node[Any]) -> bool:
        return self._shard is None or node.of_shard is None or node.of_shard.index == self._shard.index

    def drop_source(self, source: int) -> None:
        """Drop this shard's reader and documents of a source; they are opened again when needed."""
        self._own_readers.pop(source, None)
        for opened in self._documents.values():
            if isinstance(opened.get(source), FragmentDocuments):  # other kinds remember where they ended
                opened.pop(source, None)


def _drop_source(sources: ref[MixtureSources], source: int) -> None:
    owner = sources()
    if owner is not None:
        owner.drop_source(source)
