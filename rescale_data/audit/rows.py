"""Finds the rows of a source that a text names, and the positions at which logical shards read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rescale_data.engine.states.codec import SavedState
from rescale_data.nodes.reader import Reader
from rescale_data.sources.source import FiledSource, Source
from rescale_data.state import Ints

_EPOCH_STRIDE = 1 << 40  # more rows than any source has
_NO_END_POSITION = np.iinfo(np.int64).max


def find_rows(source: Source, name: str) -> range:
    """Return the rows that a text names: ``"17"``, ``"part-3.parquet"``, or ``"part-3.parquet, row 17"`` as in messages.

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
class SourcePositions:
    """Positions of all logical shards in one source, at each checkpoint of the run.

    Args:
        position_table: ``int64[checkpoints + 1, N]``, from the beginning of the run: the next row, counted over all epochs
            with a gap in between.
        num_window_nodes: Number of nodes above the reader that read ahead of their samples. Each of them may be within a
            window, which was read up to what a later checkpoint says.
    """

    position_table: Ints
    num_window_nodes: int

    @classmethod
    def from_states(cls, states: Sequence[SavedState], path: Sequence[str], num_window_nodes: int) -> SourcePositions:
        """Return the positions of the reader at a path of the pipeline, in all states; 0 in a state without this reader."""
        n = len(states[-1].table)
        epochs, rows = (
            [np.zeros(n, dtype=np.int64), *(_column(state, (*path, name), n) for state in states)]
            for name in ("epoch", "row")
        )
        return cls(np.stack(epochs) * _EPOCH_STRIDE + np.stack(rows), num_window_nodes)

    def save_intervals_of(self, shard: int, position: int) -> Iterator[int]:
        """Yield the intervals between checkpoints in which a shard may have served the row at ``position``."""
        shard_positions = self.position_table[:, shard]
        known_positions = np.append(np.unique(shard_positions), np.full(self.num_window_nodes + 1, _NO_END_POSITION))
        read_until = known_positions[np.searchsorted(known_positions, shard_positions) + self.num_window_nodes]
        if not self.num_window_nodes:
            read_until = read_until - 1
        return iter(np.flatnonzero((shard_positions[:-1] <= position) & (position <= read_until[1:])).tolist())

    def save_intervals_read_ahead(self, shard: int) -> Iterator[int]:
        """Yield the intervals in which a shard may have read ahead beyond the last position that a checkpoint shows."""
        return self.save_intervals_of(shard, _NO_END_POSITION) if self.num_window_nodes else iter(())

    def is_drawn(self, shard: int, position: int) -> bool:
        return bool(position < self.position_table[:, shard].max())

    def positions(self, reader: Reader, rows: Ints) -> Iterator[tuple[int, int]]:
        """Yield ``(shard, position)`` for each time a shard reads one of the rows, in all epochs that the run has begun."""
        last_epoch = int(self.position_table.max()) // _EPOCH_STRIDE + (self.num_window_nodes > 0)
        for epoch in range(last_epoch + 1):
            for shard, row in reader.rows.find_shard_rows(rows, epoch):
                yield shard, epoch * _EPOCH_STRIDE + row


def _column(state: SavedState, path: Sequence[str], num_shards: int) -> Ints:
    field_values = state.values.get(".".join(path))
    return np.zeros(num_shards, dtype=np.int64) if field_values is None else field_values.numpy()
