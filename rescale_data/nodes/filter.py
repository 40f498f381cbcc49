"""`Filter`: the samples that a predicate keeps."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rescale_data.nodes.base import BaseNode, Node, View
from rescale_data.nodes.below import dtype_of, open_documents, source_names
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.column import ColumnDocuments
from rescale_data.nodes.function import identity
from rescale_data.nodes.guard import OnError, guard_of
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.gather import Around, joined
from rescale_data.nodes.reading.picked import PickedDocuments
from rescale_data.nodes.reading.spans import Spans
from rescale_data.state import COUNT, Field, Ints

_LOOK_AFTER = 1000
_log = logging.getLogger("rescale_data")
_seen: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, False])
"""Counts of this process by predicate: samples kept, samples dropped, and True if a warning was logged."""


class _WrittenError(Exception):
    """The predicate has changed a sample, which has to be yielded with that change."""


class FilteredDocuments:
    """The documents of a `Filter`, read in blocks for as long as the blocks hold the same as its samples.

    This ends at the first block that cannot be read, for which the predicate raises, or into which the predicate writes. From
    there on samples are read one at a time. So the predicate sees nulls, an error names its row, and changed samples are
    yielded.
    """

    is_costly = True

    def __init__(self, node: Filter, column: str, blocks: Documents) -> None:
        self._node, self._column, self._documents = node, column, blocks
        self._in_blocks = True

    def read(self, position: View, most: int) -> Spans:
        if self._in_blocks:
            try:
                return self._documents.read(position, most)
            except Exception:
                self._documents, self._in_blocks = ColumnDocuments(self._node, self._column, "Filter"), False
        return self._documents.read(position, most)

    def turn(self, position: View) -> None:
        self._documents.turn(position)


class Filter(Node[Any]):
    """Yields the samples for which ``predicate`` is true. The others are drawn, dropped and counted (``filtered_rows``).

    If more than 90 % are dropped, one warning says so, because dropped samples are read too.

    Args:
        source: A node.
        predicate: Function of a sample that returns true if the sample stays. It keeps no memory of earlier samples. An error
            in it names the row.
        version: Version of the predicate. When a state is loaded, another version is an error. Without versions, another name
            or source code of the predicate only logs a warning.
        on_error: As in `Map`. With "skip", samples for which the predicate raises are counted apart (``skipped_rows``).

    Raises:
        DataStateError: No sample was kept in two whole epochs of an endless source.

    Example:
        >>> import rescale_data as rd
        >>> list(rd.Filter(rd.Reader(range(6), rd.Shard(), shuffle=False), lambda row: row % 2 == 0))
        [0, 2, 4]
    """

    FIELDS = (
        Field(("filtered",), counts=True, limits=COUNT),
        Field(("skipped",), counts=True, limits=COUNT),
    )

    def __init__(
        self,
        source: BaseNode[Any],
        predicate: Callable[[Any], bool],
        *,
        on_error: OnError = "raise",
        version: str | int | None = None,
    ) -> None:
        super().__init__(source=source)
        self._identity = identity(predicate, version)
        self.predicate = predicate
        self._source = self.children["source"]
        self._guard, self._bound = guard_of(self, on_error), Bound(self)
        self._name = (
            f"{getattr(predicate, '__qualname__', type(predicate).__name__)} over {', '.join(source_names(self))}"
        )
        self._seen = _seen[self._name]

    def next(self) -> Any:
        misses = 0
        while True:
            sample = next(self._source)
            try:
                stays = bool(self.predicate(sample))
            except Exception as error:
                stays = self._guard.caught(error, self.locate(), self.position[1])
            if stays:
                self._seen[0] += 1
                return sample
            if stays is None:
                self.position[1] += 1
            else:
                self.position[0] += 1
                self._drop()
            misses = self._bound.missed(misses)

    def open_documents(self, column: str) -> Documents | None:
        """Return documents in blocks if samples have this column alone: the predicate then needs no rows."""
        dtype = self.dtype_of(column)
        inner = None if self._guard.skips or dtype is None else open_documents(self._source, column)
        if inner is None or dtype is None:
            return None
        bound = Bound(self._source, type(self).__name__)
        return FilteredDocuments(
            self, column, PickedDocuments(inner, partial(self._pieces, column, dtype), bound, dropped=0)
        )

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        return dtype_of(self._source, column)

    def _pieces(self, column: str, dtype: np.dtype[Any], spans: Spans) -> list[list[slice]]:
        """Call the predicate for each document, with a copy as in a sample, up to the first for which it raises."""
        tokens, ends = joined(spans, Around(None, None, dtype))
        copies, found = tokens.astype(dtype), list[list[slice]]()
        for start, stop in pairwise(ends.tolist()):
            sample = {column: copies[start:stop]}
            given = sample[column]
            try:
                stays = bool(self.predicate(sample))
            except Exception:
                if not found:
                    raise
                break
            if sample.get(column) is not given:
                raise _WrittenError
            found.append([slice(0, stop - start)] if stays else [])
        if not np.array_equal(copies, tokens):
            raise _WrittenError
        for pieces in found:
            self._seen[0] += len(pieces)
            if not pieces:
                self._drop()
        return found

    def _drop(self) -> None:
        self._seen[1] += 1
        kept, dropped, said = self._seen
        if not dropped % _LOOK_AFTER and dropped > 9 * kept and not said:
            self._seen[2] = True
            _log.warning(
                "Filter(%s) has dropped %d of %d samples, all of which were read. Filter the files once and read what is left, "
                "or give ParquetSource and ArrowSource a filter=, which reads no more than what matches.",
                self._name, dropped, kept + dropped,
            )  # fmt: skip

    def parameters(self) -> dict[str, Any]:
        return self._identity

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        filtered, skipped = rows[:, :2].sum(axis=0).tolist()
        return {"filtered_rows": float(filtered), "skipped_rows": float(skipped)}
