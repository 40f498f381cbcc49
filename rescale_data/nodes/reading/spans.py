"""`Spans`: documents as ranges within arrays of tokens, with the position update of each document; nothing is copied.

    arrays   | uint16, 400,000 tokens of a row group | uint16, another |
    spans      (0, 7_100, 512)  (1, 0, 87)  (0, 1_024, 900)  ...              which array, from where, how many tokens

There is no Python object for a document: a hundred thousand documents are a few arrays of numbers, which are sliced, permuted
and joined as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.state import Ints

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]


class MemoryOwner(Protocol):
    """An object that owns the memory of an array, with its size in bytes."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PositionUpdates:
    """Position updates of documents: the numbers that each document writes into a position, a row of int64 slots.

    After document i, ``position[slot[k]] = slot_values[k]`` for k from ``ends[i]`` to ``ends[i + 1] - 1``, in this order.

    Args:
        ends: ``int64[D + 1]``, beginning with 0.
        slot, slot_values: ``int64[M]``.
    """

    ends: Ints
    slot: Ints
    slot_values: Ints

    @staticmethod
    def of(slot: Ints | Sequence[int], value: Ints) -> PositionUpdates:
        """Return position updates in which every document writes the same slots of the position, each with values of its own.

        Args:
            slot: ``int64[k]``.
            value: ``int64[D, k]``.
        """
        num_documents, num_slots = value.shape
        slots = np.empty((num_documents, num_slots), dtype=np.int64)
        slots[:] = slot
        ends = np.arange(0, (num_documents + 1) * num_slots, num_slots, dtype=np.int64)
        return PositionUpdates(ends, slots.reshape(-1), np.ascontiguousarray(value).reshape(-1))

    @staticmethod
    def between(earlier: memoryview, later: memoryview) -> PositionUpdates:
        """Return the position updates of one document that change the position ``earlier`` into ``later``."""
        old_position, new_position = np.asarray(earlier), np.asarray(later)
        slot = np.flatnonzero(old_position != new_position)
        return PositionUpdates(np.array([0, len(slot)]), slot, new_position[slot])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, items: slice) -> PositionUpdates:
        start, stop, _ = items.indices(len(self))
        ends = self.ends[start : max(start, stop) + 1]
        update_range = slice(int(ends[0]), int(ends[-1]))
        return PositionUpdates(ends - ends[0], self.slot[update_range], self.slot_values[update_range])

    def take(self, index: Ints) -> PositionUpdates:
        """Return the position updates of some documents, in a new order."""
        updates_per_document = np.diff(self.ends)[index]
        ends = np.concatenate([[0], np.cumsum(updates_per_document)])
        update_index = np.arange(ends[-1]) + np.repeat(self.ends[index] - ends[:-1], updates_per_document)
        return PositionUpdates(ends, self.slot[update_index], self.slot_values[update_index])

    def merge_document_groups(self, stops: Ints) -> PositionUpdates:
        """Merge the position updates of documents into one update per group; groups end at ``stops[0]``, ``stops[1]``, ..."""
        ends = np.concatenate([[0], self.ends[stops]])
        return PositionUpdates(ends, self.slot[: ends[-1]], self.slot_values[: ends[-1]])

    def combined_with(self, other_updates: PositionUpdates) -> PositionUpdates:
        """Merge the position updates of two nodes for the same documents; for each document, this node's come first."""
        ends = self.ends + other_updates.ends
        own_index = np.arange(len(self.slot)) + np.repeat(other_updates.ends[:-1], np.diff(self.ends))
        other_index = np.arange(len(other_updates.slot)) + np.repeat(self.ends[1:], np.diff(other_updates.ends))
        slot, value = np.empty((2, ends[-1]), dtype=np.int64)
        slot[own_index], slot[other_index] = self.slot, other_updates.slot
        value[own_index], value[other_index] = self.slot_values, other_updates.slot_values
        return PositionUpdates(ends, slot, value)

    def preceded_by(self, earlier: PositionUpdates) -> PositionUpdates:
        """Return these position updates, in which the first document also makes the updates ``earlier``, before its own."""
        num_earlier = len(earlier)
        return PositionUpdates.join([earlier, self]).merge_document_groups(
            np.arange(num_earlier, num_earlier + len(self)) + 1
        )

    def shifted(self, first_slot: int) -> PositionUpdates:
        """Return the same position updates for a larger row, in which the position begins at ``first_slot``."""
        return PositionUpdates(self.ends, self.slot + first_slot, self.slot_values)

    @staticmethod
    def join(all_updates: Sequence[PositionUpdates], slot_shifts: Sequence[int] = ()) -> PositionUpdates:
        """Concatenate position updates of successive documents; each item is shifted by its first slot if these are given."""
        updates_per_document = [len(updates.slot) for updates in all_updates]
        slot = np.concatenate([updates.slot for updates in all_updates])
        value = np.concatenate([updates.slot_values for updates in all_updates])
        ends = np.concatenate([[0], *[updates.ends[1:] for updates in all_updates]])
        ends[1:] += np.repeat(np.cumsum([0, *updates_per_document[:-1]]), [len(updates) for updates in all_updates])
        return PositionUpdates(
            ends, slot + np.repeat(slot_shifts, updates_per_document) if len(slot_shifts) else slot, value
        )

    def apply(self, position: memoryview, num_documents: int) -> None:
        """Write the updates of the first ``num_documents`` documents into ``position``, which is then behind them."""
        stop = int(self.ends[num_documents])
        # If a slot comes twice, NumPy keeps the last of the values
        np.asarray(position)[self.slot[:stop]] = self.slot_values[:stop]


@dataclass(frozen=True, slots=True)
class Spans:
    """Documents as ranges of arrays: document i is ``arrays[array[i]][start[i] : start[i] + length[i]]``.

    If ``array[i]`` is -1, i is not a document but a *mark*: a move of the position before the next document begins, when a new
    epoch begins or other weights take effect. A mark has no token, no bos and no eos.

    Args:
        arrays: Arrays of integers, 1-D and contiguous, of any dtypes; read-only (`as_native_array`). They live as
            long as the spans.
        array, start, length: ``int64[D]``.
        moves: The moves by each document of the position from which they were read.
        owners: For each array, the object that owns its memory, and that has to stay; `None` if the array owns it itself. Of a
            document with further values, a mapping with these values and the array, by name (`document_values`).
    """

    arrays: tuple[TokenArray, ...]
    array: Ints
    start: Ints
    length: Ints
    moves: PositionUpdates
    owners: tuple[MemoryOwner | None, ...]

    @staticmethod
    def of_one_document(array: TokenArray, moves: PositionUpdates, owner: MemoryOwner | None = None) -> Spans:
        """Return a `Spans` that holds a single document, whose tokens are the whole of ``array``."""
        zero = np.zeros(1, dtype=np.int64)
        return Spans((as_native_array(array),), zero, zero, np.array([len(array)]), moves, (owner,))

    @staticmethod
    def position_update_only(earlier: memoryview, later: memoryview) -> Spans:
        """Return a `Spans` without a document, which only updates the position, from ``earlier`` to ``later``."""
        zero = np.zeros(1, dtype=np.int64)
        return Spans((), zero - 1, zero, zero, PositionUpdates.between(earlier, later), ())

    @staticmethod
    def join(all_spans: Sequence[Spans], slot_shifts: Sequence[int] = ()) -> Spans:
        """Concatenate the documents of several `Spans`.

        Their moves are in one row, or are shifted by their first slots if these are given (`PositionUpdates.shifted`).
        """
        if len(all_spans) <= 1 and not any(slot_shifts):
            return all_spans[0] if all_spans else EMPTY_SPANS
        document_counts = [len(spans.length) for spans in all_spans]
        array = np.concatenate([spans.array for spans in all_spans])
        first_array = np.repeat(np.cumsum([0, *[len(spans.arrays) for spans in all_spans[:-1]]]), document_counts)
        return Spans(
            tuple([array for spans in all_spans for array in spans.arrays]),
            np.where(array < 0, -1, array + first_array),
            np.concatenate([spans.start for spans in all_spans]),
            np.concatenate([spans.length for spans in all_spans]),
            PositionUpdates.join([spans.moves for spans in all_spans], slot_shifts),
            tuple([owner for spans in all_spans for owner in spans.owners]),
        )

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, items: slice) -> Spans:
        array, start, length = self.array[items], self.start[items], self.length[items]
        return Spans(self.arrays, array, start, length, self.moves[items], self.owners)

    def take(self, index: Ints, moves: PositionUpdates | None = None) -> Spans:
        """Return some of the documents in a new order, with their position updates or with given ones."""
        moves = self.moves.take(index) if moves is None else moves
        return Spans(self.arrays, self.array[index], self.start[index], self.length[index], moves, self.owners)

    def with_moves(self, moves: PositionUpdates) -> Spans:
        """Return the same documents with other position updates, as for the position of another node."""
        return Spans(self.arrays, self.array, self.start, self.length, moves, self.owners)

    def document_values(self) -> list[Mapping[str, Any]]:
        """Return, for each document (not for marks), the columns that it has besides its tokens, by name."""
        owners = [self.owners[array] for array in self.array.tolist() if array >= 0]
        return [owner if isinstance(owner, Mapping) else {} for owner in owners]

    def move(self, position: memoryview, num_documents: int) -> None:
        """Advance the position from which the documents were read past the first ``num_documents`` documents."""
        self.moves.apply(position, num_documents)

    @property
    def nbytes(self) -> int:
        """Number of bytes that the documents keep in memory. An object that owns several arrays is counted once."""
        owners = [array if owner is None else owner for array, owner in zip(self.arrays, self.owners, strict=True)]
        num_bytes = sum({id(owner): owner.nbytes for owner in owners}.values())
        return num_bytes + 24 * len(self) + 16 * len(self.moves.slot)

    def require_within_arrays(self) -> None:
        """Raise ``IndexError`` if a document reaches beyond its array."""
        array_sizes = np.array([*map(len, self.arrays), 0], dtype=np.int64)  # the last size is for marks
        index, last_index = self.array, len(self.arrays) - 1
        room = array_sizes[np.clip(index, -1, last_index)] - self.length - self.start
        if len(index) and ((index + 1) | (last_index - index) | self.start | self.length | room).min() < 0:
            raise IndexError("a document reaches beyond its array, or lies in none")

    def document_views(self) -> list[memoryview]:
        """Return a memory view of the tokens of each document, without the marks; errors as in `require_within_arrays`."""
        all_ranges = zip(self.array.tolist(), self.start.tolist(), (self.start + self.length).tolist(), strict=True)
        data, ranges = [array.data for array in self.arrays], [span for span in all_ranges if span[0] >= 0]
        if not all(0 <= start <= stop <= len(data[array]) for array, start, stop in ranges):  # NumPy is slower for few
            self.require_within_arrays()
        return [data[array][start:stop] for array, start, stop in ranges]


def as_native_array(array: npt.NDArray[Any]) -> TokenArray:
    """Return the array in contiguous memory and native byte order; a copy only if needed."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


_EMPTY_INTS = np.zeros(0, dtype=np.int64)
NO_UPDATES = PositionUpdates(np.zeros(1, dtype=np.int64), _EMPTY_INTS, _EMPTY_INTS)
UNLIMITED_DOCUMENTS = 1 << 62
"""Number of documents that means: all that are at hand."""
EMPTY_SPANS = Spans((), _EMPTY_INTS, _EMPTY_INTS, _EMPTY_INTS, NO_UPDATES, ())
"""Spans without a document."""
