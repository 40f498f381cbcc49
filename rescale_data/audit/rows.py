"""Rows of a source that a text means, and the places where a run reads them: integers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rescale_data.engine.states.codec import Saved
from rescale_data.nodes.reader import Reader
from rescale_data.sources.source import FiledSource, Source
from rescale_data.state import Ints

_ROWS_OF_AN_EPOCH = 1 << 40  # more than any source has
_NEVER = np.iinfo(np.int64).max


def rows_named(source: Source, name: str) -> range:
    """The rows that a text names: ``"17"``, ``"part-3.parquet"``, or ``"part-3.parquet, row 17"`` as messages have it.

    Raises:
        ValueError: There are none.
    """
    if name.isdigit():
        row = int(name)
        if row >= source.num_rows:
            raise ValueError(
                f"{source.name} has the rows 0 to {source.num_rows - 1}, numbered over all files: no {row}."
            )
        return range(row, row + 1)
    file, comma, _ = name.rpartition(", ")
    rows = range(source.num_rows)
    if isinstance(source, FiledSource):
        rows = source.rows_of_file(file if comma else name)
        if not comma:
            return rows
    index = next((row for row in rows if source.locate(row) == name or source.locate(row).endswith(f"/{name}")), None)
    if index is None:
        raise ValueError(f"No row of {source.name} is {name!r}. A row is called, say, {source.locate(rows[0])!r}.")
    return range(index, index + 1)


@dataclass(frozen=True)
class Course:
    """Positions of the logical shards in a source at each checkpoint.

    Args:
        at: ``int64[checkpoints + 1, N]``, from the beginning of the run: the next row, counted over all epochs with a gap in
            between.
        num_windows: How many nodes above read further than their samples. Each of them may be within a window, which was read
            up to what a later checkpoint says.
    """

    at: Ints
    num_windows: int

    @classmethod
    def of(cls, states: Sequence[Saved], path: Sequence[str], num_windows: int) -> Course:
        """Return the course of the reader at a path of the pipeline; it may have been added or removed during the run."""
        n = len(states[-1].table)
        epochs, rows = (
            [np.zeros(n, dtype=np.int64), *(_field(state, (*path, name), n) for state in states)]
            for name in ("epoch", "row")
        )
        return cls(np.stack(epochs) * _ROWS_OF_AN_EPOCH + np.stack(rows), num_windows)

    def stretches_of(self, shard: int, place: int) -> Iterator[int]:
        """Between which checkpoints, by the first, samples with the row at a place may have been served."""
        column = self.at[:, shard]
        known = np.append(np.unique(column), np.full(self.num_windows + 1, _NEVER))
        until = known[np.searchsorted(known, column) + self.num_windows]
        if not self.num_windows:
            until = until - 1
        return iter(np.flatnonzero((column[:-1] <= place) & (place <= until[1:])).tolist())

    def is_drawn(self, shard: int, place: int) -> bool:
        return bool(place < self.at[:, shard].max())

    def places(self, reader: Reader, rows: Ints) -> Iterator[tuple[int, int]]:
        """Each shard that reads one of the rows, and where, in the epochs that the run has read or is within."""
        last = int(self.at.max()) // _ROWS_OF_AN_EPOCH + (self.num_windows > 0)
        for epoch in range(last + 1):
            for shard, row in reader.rows.places(rows, epoch):
                yield shard, epoch * _ROWS_OF_AN_EPOCH + row


def _field(state: Saved, path: Sequence[str], num_shards: int) -> Ints:
    rows = state.values.get(".".join(path))
    return np.zeros(num_shards, dtype=np.int64) if rows is None else rows.numpy()
