"""Columns with one value per token, cut and packed with the tokens: loss mask, rewards, segment numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rescale_data.nodes.reading.gather import SpecialTokens
from rescale_data.nodes.reading.spans import Spans

MASK = "loss_mask"
"""Name of the column that is true for tokens that are learned."""
_NUMPY_TYPES = {
    torch.bool: np.bool_, torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64,
    torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64,
}  # fmt: skip

ColumnArrays: TypeAlias = dict[str, npt.NDArray[Any]]
"""By column, the values for the tokens of a document, or of several documents end to end."""


class AlignedColumns:
    """Columns with one value per token: takes their values out of samples and arranges them like the packed tokens.

    Args:
        columns: ``{name: dtype}``; the name is the same in source samples and packed samples.
        column: The column of the tokens.
        reserved: Names that the packer uses itself.
        packer: Name of the packer, for messages.
    """

    def __init__(self, columns: Mapping[str, torch.dtype], column: str, reserved: set[str], packer: str) -> None:
        self._column, self._packer_name = column, packer
        if not isinstance(columns, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"{packer}(columns={columns!r}): give {{name: dtype}}, such as {{'loss_mask': torch.bool}}."
            )
        taken = sorted((reserved | {column}) & columns.keys())
        if taken:
            raise ValueError(f"{packer}(columns=) has {taken}, which it yields itself: give these columns other names.")
        for name, dtype in columns.items():
            if dtype not in _NUMPY_TYPES:
                raise TypeError(f"{packer}(columns={{{name!r}: {dtype}}}): give one of {list(_NUMPY_TYPES)}.")
        if columns.get(MASK, torch.bool) is not torch.bool:
            raise TypeError(f"{packer}(columns={{{MASK!r}: {columns[MASK]}}}): which tokens are learned is torch.bool.")
        self.dtypes = {name: np.dtype(_NUMPY_TYPES[dtype]) for name, dtype in columns.items()}

    def __bool__(self) -> bool:
        return bool(self.dtypes)

    @property
    def has_mask(self) -> bool:
        return MASK in self.dtypes

    @property
    def as_json(self) -> dict[str, str]:
        """The columns and their dtypes as JSON values."""
        return {name: str(dtype) for name, dtype in sorted(self.dtypes.items())}

    def extract_columns(self, sample: Mapping[str, Any], num_tokens: int) -> ColumnArrays:
        """Return the columns of a sample as arrays with one value for each of its ``num_tokens`` tokens."""
        return {name: self._column_array(sample, name, dtype, num_tokens) for name, dtype in self.dtypes.items()}

    def _column_array(
        self, sample: Mapping[str, Any], name: str, dtype: np.dtype[Any], num_tokens: int
    ) -> npt.NDArray[Any]:
        if name not in sample:
            raise ValueError(f"{self._packer_name}(columns=) has {name!r}, but a sample has the keys {list(sample)}.")
        value = sample[name]
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if array.shape != (num_tokens,):
            raise ValueError(
                f"{name!r} has shape {list(array.shape)}, and {self._column!r} {num_tokens} tokens: give one value a token."
            )
        converted = array.astype(dtype)
        if array.dtype.kind not in "biuf" or (dtype.kind in "biu" and not np.array_equal(converted, array)):
            raise TypeError(
                f"{name!r} holds values of {array.dtype} that {dtype} does not: give the column another dtype."
            )
        return converted

    def concatenate(self, spans: Spans, special_tokens: SpecialTokens) -> ColumnArrays:
        """Return the columns of documents, concatenated as `rescale_data.nodes.reading.gather.join_documents` does with tokens.

        The bos and eos tokens around a document have the value 0. An eos is learned if the last token of its document is.
        """
        columns = [self._add_special_tokens(values, special_tokens) for values in spans.document_values()]
        return {name: np.concatenate([values[name] for values in columns]) for name in self.dtypes} if columns else {}

    def num_untrained(self, spans: Spans, special_tokens: SpecialTokens) -> int:
        """Return the number of documents that have tokens, but no learned token in their loss mask."""
        documents = special_tokens.documents_with_tokens(spans)
        return sum(not values[MASK].any() for values in documents.document_values())

    def values_in_range(self, spans: Spans, offset: int, num: int, special_tokens: SpecialTokens) -> ColumnArrays:
        """Return the columns for ``num`` successive tokens of documents, from ``offset`` in the first document on."""
        document_ends = np.cumsum(special_tokens.lengths(spans))
        values = self.concatenate(spans[: int(document_ends.searchsorted(offset + num)) + 1], special_tokens)
        return {name: array[offset : offset + num] for name, array in values.items()}

    def _add_special_tokens(self, values: Mapping[str, Any], special_tokens: SpecialTokens) -> ColumnArrays:
        num_before, num_after = int(special_tokens.bos_id is not None), int(special_tokens.eos_id is not None)
        padded_values = {name: np.pad(values[name], (num_before, num_after)) for name in self.dtypes}
        if num_after and MASK in padded_values and len(values[MASK]):
            padded_values[MASK][-1] = values[MASK][-1]
        return padded_values
