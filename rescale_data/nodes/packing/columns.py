"""Further columns of documents: one value a token, such as a loss mask, or one a document, such as images (payload).

Values of tokens are cut and packed with the tokens. Payload goes into the sample in which its document begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rescale_data.errors import require_int, require_type
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

    def num_untrained(self, documents: Spans) -> int:
        """Return the number of documents without a learned token in their loss mask."""
        return sum(not values[MASK].any() for values in documents.document_values())

    def values_in_range(self, spans: Spans, offset: int, num: int, special_tokens: SpecialTokens) -> ColumnArrays:
        """Return the columns for ``num`` successive tokens of documents, from ``offset`` in the first document on."""
        values = self.concatenate(special_tokens.documents_within(spans, offset + num), special_tokens)
        return {name: array[offset : offset + num] for name, array in values.items()}

    def _add_special_tokens(self, values: Mapping[str, Any], special_tokens: SpecialTokens) -> ColumnArrays:
        num_before, num_after = int(special_tokens.bos_id is not None), int(special_tokens.eos_id is not None)
        padded_values = {name: np.pad(values[name], (num_before, num_after)) for name in self.dtypes}
        if num_after and MASK in padded_values and len(values[MASK]):
            padded_values[MASK][-1] = values[MASK][-1]
        return padded_values


class PerDocValues(list[Any]):
    """List with one value for each document of a sample. A batch holds a list of these lists, which are not stacked."""


class PayloadColumns:
    """Columns with one value of any kind per document, and limits on what one sample may hold of them.

    Args:
        columns: Columns of the source.
        limits: For some columns, the most that a sample holds, as `payload_size` counts.
        reserved: Names that the packer uses itself.
        long: As in `WholeDocumentPacker`. A document that alone exceeds a limit is dropped with "drop", and an error otherwise.
        packer: Name of the packer, for messages.
    """

    def __init__(
        self, columns: Sequence[str], limits: Mapping[str, int], reserved: set[str], *, long: str, packer: str
    ) -> None:
        require_type(Iterable, "a list of columns", payload=columns)
        if isinstance(columns, str | bytes) or {type(name) for name in columns} - {str}:
            raise TypeError(f"{packer}(payload={columns!r}): give a list of columns, [{columns!r}].")
        if not isinstance(limits, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{packer}(limits={limits!r}): give {{column: most}}, such as {{'images': 16}}.")
        taken = sorted(reserved.intersection(columns))
        if taken:
            raise ValueError(f"{packer}(payload=) has {taken}, which it yields itself: give these columns other names.")
        for name, limit in limits.items():
            require_int(**{f"limits[{name!r}]": limit})
            if name not in columns or limit < 1:
                raise ValueError(
                    f"{packer}(limits={{{name!r}: {limit}}}): give at least 1, for columns of payload={list(columns)}."
                )
        self.columns, self.limits = tuple(sorted(set(columns))), dict(sorted(limits.items()))
        self._drops_long_documents, self._packer = long == "drop", packer

    def __bool__(self) -> bool:
        return bool(self.columns)

    @property
    def as_json(self) -> dict[str, Any]:
        """The columns and limits in use, as JSON values."""
        values: dict[str, Any] = {"payload": list(self.columns), "limits": self.limits}
        return {name: value for name, value in values.items() if value}

    def extract_columns(self, sample: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        """Return the payload columns of a sample; ``ValueError`` if one is missing or exceeds the limit of a sample."""
        del num_tokens
        self._check_sample(sample)
        return {name: sample[name] for name in self.columns}

    def collect_payload(self, spans: Spans) -> dict[str, list[Any]]:
        """Return the payload of several documents: for each column, a list with one value per document."""
        return {name: [values[name] for values in spans.document_values()] for name in self.columns}

    def _check_sample(self, sample: Mapping[str, Any]) -> None:
        for name in self.columns:
            if name not in sample:
                raise ValueError(
                    f"{self._packer}(payload=) has {name!r}, but a sample has the keys {list(sample)}. Where a document has "
                    f"none, give None."
                )
            limit = self.limits.get(name)
            if limit is not None and not self._drops_long_documents and payload_size(sample[name]) > limit:
                raise ValueError(
                    f"{self._packer}(limits={{{name!r}: {limit}}}): a document has {payload_size(sample[name])}, more than a "
                    f"whole sample may. Raise the limit, leave such documents out with rd.Filter, or give long='drop', which "
                    f"counts them."
                )


def payload_size(value: Any) -> int:
    """Return the size of a value for a limit: the length of a list, tuple, array or tensor, 0 for `None`, 1 for all else."""
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray | torch.Tensor) and value.ndim):
        return len(value)
    return int(value is not None)
