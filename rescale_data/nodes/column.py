"""`ColumnDocuments` reads a node's documents one at a time; `DocumentsOrSamples` reads blocks of them until one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rescale_data.nodes.base import Node, View, go_to
from rescale_data.nodes.below import may_change, open_documents
from rescale_data.nodes.changing import skip_blocked_rows
from rescale_data.nodes.error_handler import add_location_note, describe
from rescale_data.nodes.provenance import PROVENANCE
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.spans import EMPTY_SPANS, PositionUpdates, Spans
from rescale_data.sources.decoded.sizes import memory_bytes_of
from rescale_data.state import copy_of

ValueExtractor: TypeAlias = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""Function of a sample and its number of tokens, which returns the values to keep alongside the tokens, by name."""


class DocumentValues(dict[str, Any]):
    """The tokens of one document and its further values, by column name; `Spans` keep them with the document."""

    @property
    def nbytes(self) -> int:
        return memory_bytes_of(self)


def documents_of(node: Node[Any], column: str, reader_name: str, *extractors: ValueExtractor) -> DocumentReader:
    """Return a reader of a node's token column: in blocks if the node has that and there are no extractors, else one by one.

    The arguments are those of `ColumnDocuments`.
    """
    documents = None if extractors else open_documents(node, column)
    return documents or ColumnDocuments(node, column, reader_name, *extractors)


class ColumnDocuments:
    """Reads a token column of any node through the interface `DocumentReader`, by drawing one sample at a time.

    The node is bound again whenever another position is read.

    Args:
        node: The node.
        column: The column of its samples that holds tokens.
        reader_name: The name of the node that reads the documents, for messages.
        extractors: Functions that take further values out of each sample, for the `Spans` to keep.
    """

    def __init__(self, node: Node[Any], column: str, reader_name: str, *extractors: ValueExtractor) -> None:
        self._extractors = extractors
        self._node, self._column, self._reader_name = node, column, reader_name
        for _, inner in node.walk():
            inner.is_reread = True
        self._has_ended, self._has_changeable_node = False, any(may_change(inner) for _, inner in node.walk())

    is_costly_to_read = True

    def read(self, position: memoryview, max_documents: int) -> Spans:
        del max_documents
        has_ended, self._has_ended = self._has_ended, True  # also by an error, after which a generator yields nothing
        if has_ended or self._node.position != position:
            go_to(self._node, position)
        try:
            sample = next(self._node)
        except StopIteration:
            return EMPTY_SPANS
        self._has_ended = False
        try:
            tokens = _convert_to_tokens(sample, self._column, self._reader_name).copy()
            document_values = DocumentValues({self._column: tokens})
            if PROVENANCE in sample:
                document_values[PROVENANCE] = sample[PROVENANCE]
            for extract in self._extractors:
                document_values.update(extract(sample, len(tokens)))
        except (TypeError, ValueError) as error:
            add_location_note(error, self._reader_name, self._node.locate())
            raise
        next_position = copy_of(self._node.position)
        if self._has_changeable_node:
            skip_blocked_rows(self._node, next_position)
        owner = document_values if len(document_values) > 1 else None
        return Spans.of_one_document(tokens, PositionUpdates.between(position, next_position), owner)

    def begin_next_epoch(self, position: memoryview) -> None:
        position[:] = self._node.position
        skip_blocked_rows(self._node, position)


def tokens_of_sample(sample: Any, column: str, reader: str, node: Node[Any]) -> npt.NDArray[Any]:
    """Return the token column of a sample of ``node`` as an array; an error names the row and ``reader``, the node above."""
    try:
        return _convert_to_tokens(sample, column, reader)
    except (TypeError, ValueError) as error:
        add_location_note(error, reader, node.locate())
        raise


class DocumentsOrSamples:
    """Reads documents many at a time until a read fails, then one at a time, as samples of the node.

    So a user's function sees samples that cannot be read in a block, and an error comes with its row.

    Args:
        documents: The documents of the node. Each costs a call of a user's function.
        make_sample_reader: Returns a reader of the same documents, read by drawing samples.
    """

    is_costly_to_read = True

    def __init__(self, documents: DocumentReader, make_sample_reader: Callable[[], DocumentReader]) -> None:
        self._documents: DocumentReader = documents
        self._make_sample_reader: Callable[[], DocumentReader] | None = make_sample_reader  # `None` after an error

    def read(self, position: View, max_documents: int) -> Spans:
        if self._make_sample_reader is not None:
            try:
                return self._documents.read(position, max_documents)
            except Exception:
                self._documents, self._make_sample_reader = self._make_sample_reader(), None
        return self._documents.read(position, max_documents)

    def begin_next_epoch(self, position: View) -> None:
        self._documents.begin_next_epoch(position)


def num_tokens_of(sample: Any, column: str, node: Node[Any]) -> int:
    """Return the number of tokens in a sample of ``node``, for a mixture by tokens; ``TypeError`` if it has no length."""
    try:
        return len(sample[column])
    except (TypeError, LookupError) as cause:
        error = TypeError(
            f"WeightedSampler(unit='tokens', column={column!r}) was given a sample with {describe(sample)}, and under that "
            f"key nothing that has a length. Yield dicts with the tokens of one document there, or leave such samples out "
            f"with rd.Filter."
        )
        add_location_note(error, "WeightedSampler", node.locate())
        raise error from cause


def _convert_to_tokens(sample: Any, column: str, reader_name: str) -> npt.NDArray[Any]:
    if not isinstance(sample, Mapping) or column not in sample:
        raise ValueError(
            f"{reader_name}(column={column!r}) was given a sample with {describe(sample)}. Yield dicts with the tokens of one "
            f"document under that key."
        )
    value: Any = sample[column]
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else _to_array(value)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise TypeError(
            f"{reader_name}(column={column!r}) was given {_describe(value, array)}. Tokens are a 1-D array, tensor or "
            f"list of integers; of text rd.Tokenize makes them, and rd.Filter leaves out rows that have none."
        )
    return np.ascontiguousarray(array if array.dtype.kind in "iu" else array.astype(np.int64))


def _to_array(value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError:  # lists of lists of different lengths
        return np.empty((0, 0), dtype=object)


def _describe(value: Any, array: npt.NDArray[Any]) -> str:
    return f"a {type(value).__name__} of shape {list(array.shape)} and dtype {array.dtype}"
