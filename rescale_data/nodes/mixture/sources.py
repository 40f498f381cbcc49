"""`MixtureSources`: the source nodes of one logical shard's mixture, of which there may be hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rescale_data.nodes.base import Node, View, bind_once, drop_position
from rescale_data.nodes.column import documents_of
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache import DEFAULT_CACHE_BYTES, cache_share, owner_id
from rescale_data.sources.decoded.cache_demand import served_shards
from rescale_data.sources.source import TokenSource


class MixtureSources:
    """The source nodes of a mixture, by number. A node without children is bound when it is first drawn from.

    Args:
        nodes: The sources.
        slots: The slots of each source in the mixture's position.
        shard: The logical shard; `None` if there is none.

    Attributes:
        last_node: The node that was drawn from last.
    """

    def __init__(self, nodes: Sequence[Node[Any]], slots: Sequence[slice], shard: Shard | None) -> None:
        self.nodes, self.slots, self._shard = nodes, slots, shard
        self.last_node: Node[Any] = nodes[0]
        self._documents: dict[str, dict[int, DocumentReader]] = {}

    def seek(self, position: View) -> None:
        """Go on from a position of the mixture."""
        for node, slots in zip(self.nodes, self.slots, strict=True):
            if node.children:
                node.bind(position[slots])
            else:
                drop_position(node)

    def bound_node(self, source: int, position: View) -> Node[Any]:
        """Return the node of a source, bound to its part of the mixture's position."""
        self.last_node = node = self.nodes[source]
        bind_once(node, position[self.slots[source]])
        return node

    def documents(self, source: int, column: str) -> DocumentReader:
        """Return the reader of documents in one column of a source."""
        opened = self._documents.setdefault(column, {})
        documents = opened.get(source)
        if documents is None:
            documents = documents_of(self.nodes[source], column, "WeightedSampler")
            if not isinstance(documents, FragmentDocuments):  # other kinds remember where they ended
                opened[source] = documents
        return documents

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
