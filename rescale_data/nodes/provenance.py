"""Provenance: the source, file and row of a sample, as text that the sample carries under its own key.

It is text, one line a document, so that it passes through every collate function and between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PROVENANCE = "provenance"


def with_provenance(sample: Any, location: str | list[str]) -> dict[str, Any]:
    """Return the sample with its provenance under one more key; ``TypeError`` if the sample is no mapping."""
    if not isinstance(sample, Mapping):
        raise TypeError(
            f"Reader(provenance=True) adds the key {PROVENANCE!r} to each sample, but a sample is a {type(sample).__name__}. "
            f"Let the dataset return dicts, or leave provenance out."
        )
    return {**sample, PROVENANCE: location}


def copy_provenance(sample: Any, result: Any) -> Any:
    """Return a function's result with the provenance of the sample added, unless the result has its own."""
    if not (isinstance(sample, Mapping) and isinstance(result, Mapping)) or PROVENANCE not in sample:
        return result
    return {PROVENANCE: sample[PROVENANCE], **result}


def provenance_of(document_values: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the provenance of each document, given by `Spans.document_values`; an empty list if none has any."""
    lines = [values.get(PROVENANCE, "") for values in document_values]
    return lines if any(lines) else []


def join_provenance(lines: Iterable[str]) -> str:
    """Return the provenance of a sample that is made of several documents: one line for each document."""
    return "\n".join(lines)
