"""`Sources`: the sources of one logical shard's mixture; there may be hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from rescale_data.nodes.base import Node, View, is_bound, unbind
from rescale_data.nodes.below import open_documents
from rescale_data.nodes.column import ColumnDocuments
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache import DEFAULT_BYTES, owner_of, room_for
from rescale_data.sources.decoded.interest import shards_of
from rescale_data.sources.source import TokenSource


class Sources:
    """The sources of a mixture, by number.

    A `Reader` among them may belong to another shard (`borrow`). This shard then opens a reader of its own, and keeps it as
    long as the cache has room for the order in which it reads.

    Args:
        nodes: The sources.
        slots: The slots of each source in the mixture's position.
        shard: The logical shard; `None` if there is none.

    Attributes:
        nodes: The sources, for questions whose answer is the same in all logical shards.
        last: The node that was drawn from last.
    """

    def __init__(self, nodes: Sequence[Node[Any]], slots: Sequence[slice], shard: Shard | None) -> None:
        self.nodes, self.slots, self._shard = nodes, slots, shard
        self.last: Node[Any] = nodes[0]
        self._open: dict[int, Reader] = {}
        self._documents: dict[str, dict[int, Documents]] = {}

    def borrow(self, others: Sources) -> None:
        """Use another shard's readers in place of own readers that differ from them in the shard alone."""
        pairs = [*zip(self.nodes, others.nodes, strict=True)]
        alike = [isinstance(own, Reader) and own.shard == self._shard and own.is_like(other) for own, other in pairs]
        if all(alike):
            self.nodes, self.slots = others.nodes, others.slots
        elif any(alike):
            self.nodes = [other if is_alike else own for (own, other), is_alike in zip(pairs, alike, strict=True)]
        self.last = self.nodes[0]
        self._documents.clear()

    def open(self, source: int) -> Node[Any]:
        """Return this shard's own node, bound or not."""
        node = self.nodes[source]
        if self._is_own(node) or not isinstance(node, Reader) or self._shard is None:
            return node
        found = self._open.get(source)
        if found is None:
            this: ref[Sources] = ref(self)
            found = self._open[source] = node.for_shard(self._shard, lambda: _leave(this, source))
        return found

    def bound(self, source: int, position: View) -> Node[Any]:
        """Return this shard's own node, bound to its slots in the mixture's position if it was not bound."""
        self.last = node = self.open(source)
        if not is_bound(node):
            node.bind(position[self.slots[source]])
        return node

    def documents(self, source: int, column: str) -> Documents:
        """Return the documents of a source."""
        opened = self._documents.get(column)
        if opened is None:
            opened = self._documents[column] = {}
        found = opened.get(source)
        if found is None:
            node = self.open(source)
            found = opened[source] = open_documents(node, column) or ColumnDocuments(node, column, "WeightedSampler")
        return found

    def room(self, num_shards: int) -> Callable[[], int]:
        """Return a function that returns about how many bytes may be read at once, at the time of its call.

        Args:
            num_shards: Number of logical shards in all.
        """
        read = [below.reads for node in self.nodes for _, below in node.walk() if below.reads is not None]
        found = [source for source in read if isinstance(source, TokenSource)]
        if not found:
            return lambda: DEFAULT_BYTES // 8 // num_shards
        least = min(found, key=lambda source: source.cache_bytes)
        owner = owner_of(least)
        return lambda: room_for(least) // 8 // max(1, len(shards_of(owner, num_shards)))

    def close(self) -> None:
        """Unbind the own readers and close the opened ones: no node stands where the position says."""
        for node in self.nodes:
            if self._is_own(node) and not node.children:
                unbind(node)
        self._open.clear()

    def _is_own(self, node: Node[Any]) -> bool:
        return self._shard is None or node.of_shard is None or node.of_shard.index == self._shard.index

    def leave(self, source: int) -> None:
        """Drop this shard's own reader and documents of a source; they are made again when needed."""
        self._open.pop(source, None)
        for opened in self._documents.values():
            if isinstance(opened.get(source), FragmentDocuments):  # other kinds remember where they ended
                opened.pop(source, None)


def _leave(sources: ref[Sources], source: int) -> None:
    found = sources()
    if found is not None:
        found.leave(source)
