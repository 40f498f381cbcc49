"""`Texts`: a column of strings read from any position, many at a time where the source can do that."""

from __future__ import annotations

from typing import Protocol

from rescale_data.nodes.reading.fragment_documents import Rows
from rescale_data.nodes.reading.spans import NOTHING, Moves
from rescale_data.sources.source import TextSource


class Texts(Protocol):
    """What `Documents` are of tokens. ``position`` is a row of the node whose texts they are."""

    def read(self, position: memoryview, most: int) -> tuple[list[str], Moves]:
        """The next texts, from one to ``most``, and what each does to ``position``; none at the end of the epoch.

        Whatever it raises, the samples of the node are read instead, and say why.
        """
        ...

    def turn(self, position: memoryview) -> None:
        """Write the beginning of the next epoch into ``position``, after `read` has found the end of this one."""
        ...


class RowTexts:
    """Those of one logical shard; positions are those of its `Reader`, (epoch, row, ...)."""

    def __init__(self, source: TextSource, column: str, rows: Rows) -> None:
        self._source, self._column, self._rows = source, column, rows

    def read(self, position: memoryview, most: int) -> tuple[list[str], Moves]:
        epoch, row = position[0], position[1]
        if row >= self._rows.size(epoch):
            return [], NOTHING
        rows = self._rows.rows_from(epoch, row)[:most]
        return self._source.texts(self._column, rows), self._rows.moves(position, len(rows))

    def turn(self, position: memoryview) -> None:
        self._rows.turn(position)
