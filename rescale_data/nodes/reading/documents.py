"""`Documents`: a token column read from any position, many documents at a time where the source can do that."""

from __future__ import annotations

from typing import Protocol


class Documents(Protocol):
    """The documents of a node, in its order. ``position`` is a row of that node: int64 slots.

    Nothing but ``position`` moves: the caller reads ahead, and says by `advance` how far it has come.
    """

    def read(self, position: memoryview) -> list[memoryview]:
        """The next documents, each a contiguous view of integers of one dtype; none at the end of the epoch.

        How many is free, as long as there is one. They are to be copied, and not kept.
        """
        ...

    def advance(self, position: memoryview, num_documents: int) -> None:
        """Write into ``position`` where to go on after some of the documents that `read` has returned last."""
        ...

    def settle(self, position: memoryview) -> None:
        """Let what has changed between legs take effect in ``position``, the beginning of a document: `Node.settle`."""
        ...

    def where(self) -> str | None:
        """Where the document comes from that `read` has returned last; `None` where nobody asks (`Reader(provenance=True)`)."""
        ...

    def turn(self, position: memoryview) -> None:
        """Write the beginning of the next epoch into ``position``, after `read` has found the end of this one."""
        ...
