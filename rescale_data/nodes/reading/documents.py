"""`Documents`: a token column read from any position, many documents at a time where the source can do that."""

from __future__ import annotations

from typing import Protocol

from rescale_data.nodes.reading.spans import Spans


class Documents(Protocol):
    """The documents of a node, in its order. ``position`` is a row of that node: int64 slots.

    Nothing moves here but what is written into ``position``: the caller reads ahead, and ``spans.move(position, n)`` says how
    far it has come.

        spans = documents.read(position, most)  # as many as are at hand
        spans.move(position, len(spans))        # behind all of them: read goes on there
    """

    def read(self, position: memoryview, most: int) -> Spans:
        """The next documents, whose moves are of slots of ``position``; none at the end of the epoch.

        How many is free, from one to ``most``, which is 1 at least. The arrays stay as they are while anybody has the spans.
        """
        ...

    def settle(self, position: memoryview) -> bool:
        """Let what has changed between legs take effect in ``position``, the beginning of a document: `Node.settle`.

        Returns:
            Whether it may have to wait, since ``position`` is within what a node below has begun.
        """
        ...

    def turn(self, position: memoryview) -> None:
        """Write the beginning of the next epoch into ``position``, after `read` has found the end of this one."""
        ...
