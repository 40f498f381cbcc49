"""`Spans`: documents as places in arrays, and what each of them does to the position. Nothing is copied.

    arrays   | uint16, 400,000 tokens of a row group | uint16, another |
    spans      (0, 7_100, 512)  (1, 0, 87)  (0, 1_024, 900)  ...              which array, from where, how many tokens

There is no Python object for a document: a hundred thousand of them are a few arrays of numbers, which are sliced, permuted
and joined as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.state import Ints

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]


class Kept(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Moves:
    """Writes of documents into a position, a row of int64 slots: after document i, ``position[slot[k]] = value[k]`` for k from
    ``ends[i]`` to ``ends[i + 1] - 1``, in this order.

    Args:
        ends: ``int64[D + 1]``, from 0.
        slot, value: ``int64[M]``.
    """

    ends: Ints
    slot: Ints
    value: Ints

    @staticmethod
    def of(slot: Ints | Sequence[int], value: Ints) -> Moves:
        """The same slots for each document.

        Args:
            slot: ``int64[k]``.
            value: ``int64[D, k]``.
        """
        num, width = value.shape
        slots = np.empty((num, width), dtype=np.int64)
        slots[:] = slot
        ends = np.arange(0, (num + 1) * width, width, dtype=np.int64)
        return Moves(ends, slots.reshape(-1), np.ascontiguousarray(value).reshape(-1))

    @staticmethod
    def between(before: memoryview, after: memoryview) -> Moves:
        """Return the moves of one document, which leads from one position to another."""
        old, new = np.asarray(before), np.asarray(after)
        slot = np.flatnonzero(old != new)
        return Moves(np.array([0, len(slot)]), slot, new[slot])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, part: slice) -> Moves:
        first, stop, _ = part.indices(len(self))
        ends = self.ends[first : max(first, stop) + 1]
        inside = slice(int(ends[0]), int(ends[-1]))
        return Moves(ends - ends[0], self.slot[inside], self.value[inside])

    def take(self, index: Ints) -> Moves:
        """Return the moves of some documents, in a new order."""
        counts = np.diff(self.ends)[index]
        ends = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(ends[-1]) + np.repeat(self.ends[index] - ends[:-1], counts)
        return Moves(ends, self.slot[at], self.value[at])

    def grouped(self, stops: Ints) -> Moves:
        """Join the moves of several documents to those of one: of the first ``stops[0]``, of those up to ``stops[1]``, ..."""
        ends = np.concatenate([[0], self.ends[stops]])
        return Moves(ends, self.slot[: ends[-1]], self.value[: ends[-1]])

    def then(self, other: Moves) -> Moves:
        """Join the moves of two nodes for the same documents, both in one row: of each document these first."""
        ends = self.ends + other.ends
        mine = np.arange(len(self.slot)) + np.repeat(other.ends[:-1], np.diff(self.ends))
        theirs = np.arange(len(other.slot)) + np.repeat(self.ends[1:], np.diff(other.ends))
        slot, value = np.empty((2, ends[-1]), dtype=np.int64)
        slot[mine], slot[theirs] = self.slot, other.slot
        value[mine], value[theirs] = self.value, other.value
        return Moves(ends, slot, value)

    def led_by(self, before: Moves) -> Moves:
        """The same, where the first document does before all else what those would."""
        ends = self.ends + len(before.slot)
        ends[0] = 0
        return Moves(ends, np.concatenate([before.slot, self.slot]), np.concatenate([before.value, self.value]))

    def under(self, first_slot: int) -> Moves:
        """The same in a row of which that position is a part."""
        return Moves(self.ends, self.slot + first_slot, self.value)

    @staticmethod
    def join(parts: Sequence[Moves], first_slots: Sequence[int] = ()) -> Moves:
        """Join the moves of some documents and of others behind them; each `under` a slot of its own, if these are given."""
        sizes = [len(part.slot) for part in parts]
        slot = np.concatenate([part.slot for part in parts])
        value = np.concatenate([part.value for part in parts])
        ends = np.concatenate([[0], *[part.ends[1:] for part in parts]])
        ends[1:] += np.repeat(np.cumsum([0, *sizes[:-1]]), [len(part) for part in parts])
        return Moves(ends, slot + np.repeat(first_slots, sizes) if len(first_slots) else slot, value)

    def apply(self, position: memoryview, num_documents: int) -> None:
        """Move a position behind the first of the documents."""
        stop = int(self.ends[num_documents])
        np.asarray(position)[self.slot[:stop]] = self.value[
            :stop
        ]  # where a slot comes twice, NumPy keeps the last value


@dataclass(frozen=True, slots=True)
class Spans:
    """Documents in the order of a stream: document i is ``arrays[array[i]][start[i] : start[i] + length[i]]``.

    Where ``array[i]`` is -1 there is no document but a *mark*: what happens to the position before the next document is begun,
    when a new epoch begins or other weights take effect. It has no token, no bos and no eos.

    Args:
        arrays: Of integers, 1-D and contiguous, any dtypes; read-only (`plain`). They are alive as long as this is.
        array, start, length: ``int64[D]``.
        moves: What each document does to the position from which they were read.
        keeps: What each array is a part of, and has to stay; `None` where it is an array of its own.
        where: Where each comes from, if anybody asked (`Reader(provenance=True)`).
    """

    arrays: tuple[TokenArray, ...]
    array: Ints
    start: Ints
    length: Ints
    moves: Moves
    keeps: tuple[Kept | None, ...]
    where: tuple[str, ...] | None = None

    @staticmethod
    def of(array: TokenArray, moves: Moves, where: str | None = None) -> Spans:
        """One document, a whole array."""
        zero = np.zeros(1, dtype=np.int64)
        named = None if where is None else (where,)
        return Spans((plain(array),), zero, zero, np.array([len(array)]), moves, (None,), named)

    @staticmethod
    def mark(before: memoryview, after: memoryview) -> Spans:
        """Return a mark, which leads from one position to another without a document."""
        zero = np.zeros(1, dtype=np.int64)
        return Spans((), zero - 1, zero, zero, Moves.between(before, after), ())

    @staticmethod
    def join(parts: Sequence[Spans], first_slots: Sequence[int] = ()) -> Spans:
        """The documents of all parts, one part after the other, whose moves are of one row, or `Moves.under` these slots."""
        if len(parts) <= 1 and not any(first_slots):
            return parts[0] if parts else EMPTY
        sizes = [len(part.length) for part in parts]
        array = np.concatenate([part.array for part in parts])
        first = np.repeat(np.cumsum([0, *[len(part.arrays) for part in parts[:-1]]]), sizes)
        return Spans(
            tuple([array for part in parts for array in part.arrays]),
            np.where(array < 0, -1, array + first),
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.length for part in parts]),
            Moves.join([part.moves for part in parts], first_slots),
            tuple([kept for part in parts for kept in part.keeps]),
            tuple(name for part in parts for name in part.where or ("",) * len(part))
            if any(p.where for p in parts)
            else None,
        )

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, part: slice) -> Spans:
        where = None if self.where is None else self.where[part]
        return Spans(
            self.arrays, self.array[part], self.start[part], self.length[part], self.moves[part], self.keeps, where
        )

    def take(self, index: Ints, moves: Moves | None = None) -> Spans:
        """Some of the documents, in a new order; their moves with them, or these."""
        where = None if self.where is None else tuple(self.where[i] for i in index.tolist())
        return Spans(
            self.arrays,
            self.array[index],
            self.start[index],
            self.length[index],
            self.moves.take(index) if moves is None else moves,
            self.keeps,
            where,
        )

    def with_moves(self, moves: Moves) -> Spans:
        """The same documents in the row of another node."""
        return Spans(self.arrays, self.array, self.start, self.length, moves, self.keeps, self.where)

    def move(self, position: memoryview, num_documents: int) -> None:
        """Write into the position from which they were read where to go on after the first of them."""
        self.moves.apply(position, num_documents)

    @property
    def nbytes(self) -> int:
        """Bytes of all that this keeps alive; parts that were joined may keep the same."""
        kept = [array if of is None else of for array, of in zip(self.arrays, self.keeps, strict=True)]
        num_bytes = sum({id(each): each.nbytes for each in kept}.values())
        return num_bytes + 24 * len(self) + 16 * len(self.moves.slot)

    def require_within(self) -> None:
        """``IndexError`` if a document is not within its array."""
        size = np.array([*map(len, self.arrays), 0], dtype=np.int64)  # the last is that of a mark
        which, last = self.array, len(self.arrays) - 1
        room = size[np.clip(which, -1, last)] - self.length - self.start
        if len(which) and ((which + 1) | (last - which) | self.start | self.length | room).min() < 0:
            raise IndexError("a document reaches beyond its array, or lies in none")

    def views(self) -> list[memoryview]:
        """Each document without the marks, for those who look at them one by one; errors as in `require_within`."""
        each = zip(self.array.tolist(), self.start.tolist(), (self.start + self.length).tolist(), strict=True)
        data, places = [array.data for array in self.arrays], [place for place in each if place[0] >= 0]
        if not all(0 <= start <= stop <= len(data[array]) for array, start, stop in places):  # few: NumPy takes longer
            self.require_within()
        return [data[array][start:stop] for array, start, stop in places]


def plain(array: npt.NDArray[Any]) -> TokenArray:
    """The same numbers, contiguous and in the machine's byte order; a copy where they are not."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


_NONE = np.zeros(0, dtype=np.int64)
NOTHING = Moves(np.zeros(1, dtype=np.int64), _NONE, _NONE)
MANY = 1 << 62
"""Documents: as many as are at hand."""
EMPTY = Spans((), _NONE, _NONE, _NONE, NOTHING, ())
"""No document."""
