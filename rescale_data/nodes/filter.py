"""`Filter`: yields the samples of a node for which a predicate is true."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.below import dtype_of, open_documents, source_names
from rescale_data.nodes.column import ColumnDocuments, DocumentsOrSamples
from rescale_data.nodes.empty_draws import EmptyDrawLimit
from rescale_data.nodes.error_handler import OnError, error_handler
from rescale_data.nodes.function import function_identity
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.edited_documents import EditedDocuments
from rescale_data.nodes.reading.gather import SpecialTokens, join_documents
from rescale_data.nodes.reading.spans import Spans
from rescale_data.state import Ints, counter

_DROPS_PER_CHECK = 1000
_FILTERED_SLOT = 0
_log = logging.getLogger("rescale_data")
_counts_by_predicate: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, False])
"""Counts of this process by predicate: samples kept, samples dropped, and True if a warning was logged."""


class _SampleModifiedError(Exception):
    """Raised if the predicate has modified a sample; the modified sample has to be yielded."""


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

    FIELDS = (counter("filtered"), counter("skipped"))

    def __init__(
        self,
        source: BaseNode[Any],
        predicate: Callable[[Any], bool],
        *,
        on_error: OnError = "raise",
        version: str | int | None = None,
    ) -> None:
        super().__init__(source=source)
        self._fn_identity = function_identity(predicate, version)
        self.predicate = predicate
        self._source = self.children["source"]
        self._error_handler, self._draw_limit = error_handler(self, on_error), EmptyDrawLimit(self)
        name = getattr(predicate, "__qualname__", type(predicate).__name__)
        self._predicate_name = f"{name} over {', '.join(source_names(self))}"
        self._sample_counts = _counts_by_predicate[self._predicate_name]

    def next(self) -> Any:
        num_empty = 0
        while True:
            sample = next(self._source)
            try:
                stays = bool(self.predicate(sample))
            except Exception as error:
                stays = self._error_handler.handle_error(error, self.locate(), self.position[1])
            if stays:
                self._sample_counts[0] += 1
                return sample
            if stays is None:
                self.position[1] += 1
            else:
                self.position[_FILTERED_SLOT] += 1
                self._count_dropped_sample()
            num_empty = self._draw_limit.count_empty_draws(num_empty)

    def open_documents(self, column: str) -> DocumentReader | None:
        """Return a reader of many documents at a time if samples have this column alone; else `None`."""
        dtype = self.dtype_of(column)
        documents = None if self._error_handler.skips or dtype is None else open_documents(self._source, column)
        if documents is None or dtype is None:
            return None
        limit = EmptyDrawLimit(self._source, type(self).__name__)
        picked_documents = EditedDocuments(documents, partial(self._pieces, column, dtype), limit, [_FILTERED_SLOT])
        return DocumentsOrSamples(picked_documents, partial(ColumnDocuments, self, column, "Filter"))

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        return dtype_of(self._source, column)

    def _pieces(self, column: str, dtype: np.dtype[Any], spans: Spans) -> list[list[slice]]:
        """Return the parts to keep of each document (all or nothing), by calling the predicate until it raises an error."""
        tokens, ends = join_documents(spans, SpecialTokens(None, None, dtype))
        token_copies, kept_parts = tokens.astype(dtype), list[list[slice]]()
        for first_token, stop_token in pairwise(ends.tolist()):
            sample = {column: token_copies[first_token:stop_token]}
            column_tokens = sample[column]
            try:
                stays = bool(self.predicate(sample))
            except Exception:
                if not kept_parts:
                    raise
                break
            if sample.get(column) is not column_tokens:
                raise _SampleModifiedError
            kept_parts.append([slice(0, stop_token - first_token)] if stays else [])
        if not np.array_equal(token_copies, tokens):
            raise _SampleModifiedError
        for pieces in kept_parts:
            self._sample_counts[0] += len(pieces)
            if not pieces:
                self._count_dropped_sample()
        return kept_parts

    def _count_dropped_sample(self) -> None:
        self._sample_counts[1] += 1
        num_kept, num_dropped, has_warned = self._sample_counts
        if not num_dropped % _DROPS_PER_CHECK and num_dropped > 9 * num_kept and not has_warned:
            self._sample_counts[2] = True
            _log.warning(
                "Filter(%s) has dropped %d of %d samples, all of which were read. Filter the files once and read what is left, "
                "or give ParquetSource and ArrowSource a filter=, which reads no more than what matches.",
                self._predicate_name, num_dropped, num_kept + num_dropped,
            )  # fmt: skip

    def parameters(self) -> dict[str, Any]:
        return self._fn_identity

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        num_filtered, num_skipped = rows[:, :2].sum(axis=0).tolist()
        return {"filtered_rows": float(num_filtered), "skipped_rows": float(num_skipped)}
