"""`StreamReader`: the node that yields the rows of one logical shard's streams."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

import torch

from rescale_data.errors import DataStateError, require_type
from rescale_data.nodes.base import Node, View, initial
from rescale_data.nodes.provenance import with_provenance
from rescale_data.shard import Shard, require_shard
from rescale_data.sources.iterable import IterableSource, Stateful
from rescale_data.state import COUNT_LIMITS, Field, Ints, counter

_log = logging.getLogger("rescale_data")
_warned_sources: set[str] = set()
_EPOCH_SLOT, _STREAM_SLOT, _ROW_COUNT_SLOT, _STATE_LENGTH, _STATE_SLOT = range(5)


class StreamReader(Node[Any]):
    """Yields the rows of one logical shard's streams, one stream after the other; `StopIteration` ends each epoch.

    Logical shard i of N reads the streams i, i + N, i + 2N, ... of the source. Nothing is shuffled.

    Args:
        source: The streams.
        shard: The logical shard to read.

    Yields:
        The rows of the streams, unchanged.

    Raises:
        ValueError: The stream is endless (`Shard.repeat`), and there are more logical shards than streams.
        DataStateError: A stream's state is too large, is not JSON, or a stream ends before the row at which it was left.

    Example:
        >>> import rescale_data as rd
        >>> list(rd.StreamReader(rd.IterableSource([["a", "b"], ["c", "d"]]), rd.Shard()))
        ['a', 'b', 'c', 'd']
    """

    ROW: ClassVar[tuple[Field, ...]] = (
        Field(("epoch",), limits=(0, 2**62)),
        Field(("stream",), limits=COUNT_LIMITS),
        Field(("count",), limits=COUNT_LIMITS),
    )

    def __init__(self, source: IterableSource, shard: Shard) -> None:
        require_shard(shard, self)
        require_type(IterableSource, "an rd.IterableSource", source=source)
        self.source = source
        self.FIELDS = self.ROW + (_state_fields(source.state_bytes) if source.keeps == "state" else ())
        super().__init__()
        self.reads, self.of_shard, self.provenance = source, shard, shard.provenance
        self._stream_numbers = range(shard.index, source.num_streams, shard.num_logical_shards)
        self._rows: Iterator[Any] | None = None
        self._stateful_stream: Stateful | None = None
        self._is_epoch_over = False
        if shard.repeat and source.num_streams < shard.num_logical_shards:
            raise ValueError(
                f"{source.name} has {source.num_streams} streams for {shard.num_logical_shards} logical shards, so some own "
                f"none, and an endless stream (repeat=True) cannot be made of none. Give num_logical_shards of at most "
                f"{source.num_streams}, or split the data into more streams."
            )
        _warn_of_no_state(source)

    def seek(self) -> None:
        self._rows, self._is_epoch_over = None, False

    def next(self) -> Any:
        while not self._is_epoch_over and self.position[_STREAM_SLOT] < len(self._stream_numbers):
            rows, self._rows = self._rows or self._open(), None  # an error ends a generator: the stream is opened again
            try:
                row = next(rows)
            except StopIteration:
                self._begin_stream(self.position[_EPOCH_SLOT], self.position[_STREAM_SLOT] + 1)
                continue
            self._rows = rows
            self.position[_ROW_COUNT_SLOT] += 1
            if self._stateful_stream is not None:
                self._save_state(self._stateful_stream)
            has_provenance = self.provenance and isinstance(row, Mapping)
            return with_provenance(row, self.locate()) if has_provenance else row
        if not self._is_epoch_over:
            self._begin_stream(self.position[_EPOCH_SLOT] + 1, 0)
            self._is_epoch_over = True
        raise StopIteration

    def next_epoch(self, position: View, *, is_drawn: bool = False) -> None:
        epoch, is_drawn = position[_EPOCH_SLOT], is_drawn or position[_STREAM_SLOT] + position[_ROW_COUNT_SLOT] > 0
        position[:] = initial(self)
        position[_EPOCH_SLOT] = epoch + is_drawn

    def locate(self) -> str:
        stream, num_rows_read = self.position[_STREAM_SLOT], self.position[_ROW_COUNT_SLOT]
        has_row = stream < len(self._stream_numbers) and num_rows_read > 0
        return f"{self.source.name}: stream {self._stream_numbers[stream]}, row {num_rows_read - 1}" if has_row else ""

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        name = self.source.name
        return {f"epoch_min/{name}": float(rows[:, 0].min()), f"epoch_max/{name}": float(rows[:, 0].max())}

    def _begin_stream(self, epoch: int, stream_index: int) -> None:
        """Set the position to the beginning of a stream in an epoch."""
        self._rows = None
        self.position[_EPOCH_SLOT], self.position[_STREAM_SLOT], self.position[_ROW_COUNT_SLOT] = epoch, stream_index, 0
        if self.source.keeps == "state":
            self.position[_STATE_LENGTH] = 0
            _stream_state_bytes(self.position)[:] = bytes(len(_stream_state_bytes(self.position)))

    def _open(self) -> Iterator[Any]:
        """Open the stream at the position and return an iterator over its remaining rows."""
        epoch, number, count = self.position[_EPOCH_SLOT], self.position[_STREAM_SLOT], self.position[_ROW_COUNT_SLOT]
        stream = self.source.stream(self._stream_numbers[number], epoch)
        is_restored = self._restore_stream(stream)  # before it is read
        rows = iter(stream)
        is_restored = is_restored or (self._stateful_stream is None and self._restore_stream(rows))
        if not is_restored and sum(1 for _ in islice(rows, count)) < count:
            raise DataStateError(
                f"{self.source.name}: stream {self._stream_numbers[number]} ended before row {count}, at which it was left. It "
                f"must yield the same rows again when it is read again."
            )
        return rows

    def _restore_stream(self, stream: object) -> bool:
        """Load the saved state into a stream or its iterator, if it keeps one; return True if there was a state to load."""
        self._stateful_stream = stream if self.source.keeps == "state" and isinstance(stream, Stateful) else None
        state_length = self.position[_STATE_LENGTH] if self._stateful_stream is not None else 0
        if self._stateful_stream is None or not state_length:
            return False
        try:
            state = json.loads(bytes(_stream_state_bytes(self.position)[:state_length]))
        except ValueError as error:
            raise DataStateError(
                f"{self.source.name}: the state of a stream is no JSON ({error}): it was changed or damaged. Load another one."
            ) from None
        self._stateful_stream.load_state_dict(state)
        return True

    def _save_state(self, stream: Stateful) -> None:
        try:
            state = json.dumps(stream.state_dict(), separators=(",", ":")).encode()
        except TypeError as error:
            raise DataStateError(
                f"{self.source.name}: the state of a stream is not made of JSON values: {error}. Let its state_dict() return "
                f"numbers, strings, lists and dicts, or give state_bytes=0 to count rows instead."
            ) from error
        limit = self.source.state_bytes
        if len(state) > limit:
            raise DataStateError(
                f"{self.source.name}: the state of a stream takes {len(state)} bytes, {len(state) - limit} more than "
                f"state_bytes={limit}, which is fixed for a whole run. Give IterableSource(state_bytes={2 * len(state)}), or "
                f"state_bytes=0 to count rows instead."
            )
        state_view = _stream_state_bytes(self.position)
        state_view[: len(state)] = state
        state_view[len(state) : self.position[_STATE_LENGTH]] = bytes(max(0, self.position[_STATE_LENGTH] - len(state)))
        self.position[_STATE_LENGTH] = len(state)


def _state_fields(num_bytes: int) -> tuple[Field, ...]:
    """Return the fields of a stream's state; they count as progress, as a stream may give another state for a row later."""
    return (counter("length"), Field(("state",), torch.uint8, (num_bytes,), counts=True))


def _stream_state_bytes(position: View) -> memoryview:
    return position[_STATE_SLOT:].cast("B")


def _warn_of_no_state(source: IterableSource) -> None:
    if source.keeps == "count" and source.name not in _warned_sources:
        _warned_sources.add(source.name)
        _log.warning(
            "%s: its streams have no state_dict(), or one that leaves out a shuffle buffer. A resumed run reads each again to "
            "the row at which it was left, which takes the longer the later that is.", source.name,
        )  # fmt: skip
