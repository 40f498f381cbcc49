"""`Exclude`: rows that are left out from now on: a take-down, a bad source found after a loss spike."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from rescale_data.errors import checks_kinds
from rescale_data.nodes.base import BaseNode, Node, View, copy_of
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.guard import described
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.spans import EMPTY, Moves, Spans
from rescale_data.state import COUNT, Field, Ints

_BLOCKED, _LIST, _NUM_OWN = 0, 1, 2
_KEPT = 16


@dataclass(frozen=True)
class Blocklist:
    """What is left out: rows of a source by number, or by the value of a column."""

    rows: Ints
    ids: frozenset[Any]

    @cached_property
    def digest(self) -> int:
        """A positive number that stands for it."""
        found = hashlib.blake2b(self.rows.tobytes(), digest_size=8)
        found.update(repr(sorted(map(repr, self.ids))).encode())
        return int.from_bytes(found.digest(), "little") >> 1 | 1


class Exclude(Node[Any]):
    """The rows of a `Reader` without those on a blocklist, which may be another one in each leg of a run.

    Put it into the pipeline when the run begins, with nothing to leave out: it keeps two integers. What is blocked counts as
    drawn and is counted apart (``blocked_rows``). A document that a `TokenPacker` is within when it is blocked ends there.
    A window (`WholeDocumentPacker`, `Shuffle`), and a document below a node that leaves out samples, such as `Filter`, is
    begun again if a state was saved within it and is loaded with another list: of the old one there is but a digest, too
    little to tell what was in it. That repeats what it had delivered, and a warning says in how many logical shards.

    Args:
        source: A `Reader`.
        rows: Numbers of rows of its source, in file order, the first is 0.
        ids: Values of ``column``. Each row is looked at before it is drawn, one at a time; ``rows`` cost nothing.
        column: Of the source, a string or an integer in each row.

    Both may be large: give the same array, set or frozenset to all logical shards, made outside of the pipeline.

    Raises:
        TypeError: ``source`` is no `Reader`; ``rows`` or ``ids`` are no collection, or ``rows`` no ints.
        ValueError: A row that the source has not; ``column`` is none of it.

    Example:
        >>> from rescale_data import Exclude, Reader, Shard
        >>> list(Exclude(Reader([10, 11, 12, 13], Shard(), shuffle=False), rows=[1, 3]))
        [10, 12]
    """

    FIELDS: ClassVar[tuple[Field, ...]] = (
        Field(("blocked",), counts=True, limits=COUNT),
        Field(("list",), counts=True),
    )
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"blocklist"})

    @checks_kinds
    def __init__(
        self, source: BaseNode[Any], *, rows: Collection[int] | Ints = (), ids: Collection[Any] = (), column: str = "id"
    ) -> None:
        if not isinstance(source, Reader):
            raise TypeError(
                f"Exclude is given a {type(source).__name__}: put it right over an rd.Reader, and others over it."
            )
        super().__init__(source=source)
        self._reader, self.column = source, column
        self.blocklist = _blocklist(rows, ids)
        numbers = self.blocklist.rows
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < source.source.num_rows:
            raise ValueError(
                f"Exclude(rows=) has rows from {numbers[0]} to {numbers[-1]}; {source.source.name} has the rows 0 to "
                f"{source.source.num_rows - 1}, numbered over all files in their order."
            )
        self._bound = Bound(self)
        source.before_row = lambda: self.pass_blocked(self.position)

    def initial(self) -> View:
        row = super().initial()
        row[_LIST] = self.blocklist.digest  # also where a first window begins, which a node above reads again
        return row

    def next(self) -> Any:
        while True:
            sample = next(self._reader)
            if not self.blocklist.ids or not self._has_listed_id(sample, self._reader.locate()):
                return sample
            self.position[_BLOCKED] += 1  # it could not be read when its id was looked up

    def documents(self, column: str) -> Documents | None:
        inner = None if self.blocklist.ids else self._reader.documents(column)
        return None if inner is None else ExcludedDocuments(self, inner)

    def pass_blocked(self, position: View) -> None:
        below, misses = position[_NUM_OWN:], 0
        while below[1] < self._reader.rows.size(below[0]):
            rows = self._reader.rows_from(below[0], below[1])
            num = self._num_leading(rows)
            if num:
                self._reader.advance(below, num)
                position[_BLOCKED] += num
                misses = self._bound.missed(misses, position)
            if num < len(rows):
                break
        position[_LIST] = self.blocklist.digest

    def is_blocked(self, position: View) -> bool:
        epoch, row = position[_NUM_OWN], position[_NUM_OWN + 1]
        within = row < self._reader.rows.size(epoch)
        return self.is_relisted(position) and within and self._num_leading(self._reader.rows_from(epoch, row)[:1]) > 0

    def is_lost(self, position: View) -> bool:
        return False

    def is_relisted(self, position: View) -> bool:
        return position[_LIST] not in (0, self.blocklist.digest)

    def on_list(self, rows: Ints) -> Any:
        """``bool[rows]``, by their numbers alone."""
        numbers = self.blocklist.rows
        at = np.minimum(numbers.searchsorted(rows), max(len(numbers) - 1, 0))
        return numbers[at] == rows if len(numbers) else np.zeros(len(rows), dtype=np.bool_)

    def parameters(self) -> dict[str, Any]:
        listed = self.blocklist
        return {"blocklist": {"rows": len(listed.rows), "ids": len(listed.ids), "digest": f"{listed.digest:x}"}}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        return {"blocked_rows": float(rows[:, _BLOCKED].sum())}

    def _num_leading(self, rows: Ints) -> int:
        """How many rows are blocked before the first that is not."""
        blocked = self.on_list(rows)
        if not self.blocklist.ids:
            return int(blocked.argmin()) if not blocked.all() else len(rows)
        for number, row in enumerate(rows.tolist()):
            if not blocked[number] and not self._is_found_by_id(row):
                return number
        return len(rows)

    def _is_found_by_id(self, row: int) -> bool:
        """True if a row of the source has an id on the list; a row that cannot be read is left to the reader."""
        source = self._reader.source
        try:
            sample = source.row(row)
        except Exception:
            return False  # the reader names the row, or leaves it out
        return self._has_listed_id(sample, source.locate(row))

    def _has_listed_id(self, sample: Any, where: str) -> bool:
        try:
            return sample[self.column] in self.blocklist.ids
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Exclude(ids=, column={self.column!r}) was given {described(sample)} in {where}. "
                f"Give as column= the one that holds the ids, a string or an integer in each row."
            ) from error


class ExcludedDocuments:
    """The documents of a reader that are not blocked; what follows one and is blocked is passed with it.

    So a position stands at the next document itself, and whoever is within it finds it with any list.
    """

    def __init__(self, node: Exclude, documents: Documents) -> None:
        self._node, self._documents, self.is_costly = node, documents, documents.is_costly

    def read(self, position: memoryview, most: int) -> Spans:
        at = copy_of(position)
        self._node.pass_blocked(at)
        spans = self._documents.read(at[_NUM_OWN:], most)
        if not len(spans):
            return EMPTY
        rows = self._node.children["source"].rows_from(at[_NUM_OWN], at[_NUM_OWN + 1])[: len(spans)]  # type: ignore[attr-defined]
        blocked = self._node.on_list(rows)
        kept = np.flatnonzero(~blocked)
        own = Moves.of([_BLOCKED], (at[_BLOCKED] + np.cumsum(blocked))[:, None])
        end = copy_of(at)
        end[_BLOCKED] += int(blocked.sum())
        spans.move(end[_NUM_OWN:], len(spans))
        behind = copy_of(end)
        self._node.pass_blocked(behind)
        moves = own.then(spans.moves.under(_NUM_OWN))
        moves = Moves.join([Moves.between(position, at), moves, Moves.between(end, behind)])
        stops = 1 + np.append(kept[1:], len(spans) + 1)
        return spans.take(kept).with_moves(moves.grouped(stops))

    def settle(self, position: memoryview) -> bool:
        self._node.pass_blocked(position)
        return False

    def turn(self, position: memoryview) -> None:
        self._node.pass_blocked(position)
        self._documents.turn(position[_NUM_OWN:])
        self._node.pass_blocked(position)


_made: dict[int, tuple[Any, Any, Blocklist]] = {}
"""By the given collections, which all logical shards are given alike, and which are kept so that they stay what they are."""


def _blocklist(rows: Any, ids: Any) -> Blocklist:
    known = _made.get(id(rows) ^ id(ids))
    if known is None or known[0] is not rows or known[1] is not ids:
        known = (rows, ids, Blocklist(_numbers(rows), frozenset(_require_several("ids", ids))))
        while len(_made) >= _KEPT:
            _made.pop(next(iter(_made)))
        _made[id(rows) ^ id(ids)] = known
    return known[2]


def _numbers(rows: Any) -> Ints:
    found = np.asarray([*_require_several("rows", rows)])
    if found.size and (found.ndim != 1 or found.dtype.kind not in "iu"):
        raise TypeError(f"Exclude(rows=) holds values of {found.dtype}: give the numbers of rows, ints.")
    return np.unique(found.astype(np.int64))


def _require_several(name: str, value: Any) -> Any:
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise TypeError(f"Exclude({name}={value!r}): give a list, a set or an array of them.")
    return value
