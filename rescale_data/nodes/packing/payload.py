"""Payload: columns with one value per document, such as images, which go into the sample in which the document begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rescale_data.errors import require_int, require_type
from rescale_data.nodes.reading.spans import Spans


class PerDocument(list[Any]):
    """List with one value for each document of a sample. A batch holds a list of these lists, which are not stacked."""


class DocumentPayload:
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
        return {
            **({"payload": list(self.columns)} if self.columns else {}),
            **({"limits": self.limits} if self.limits else {}),
        }

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
