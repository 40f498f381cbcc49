"""`weights_by_size`: computes the weights of a mixture from the sizes of its sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from rescale_data.errors import checks_argument_types
from rescale_data.sources.source import Source


@checks_argument_types
def weights_by_size(
    sources: Mapping[str, Source],
    by: Literal["rows", "tokens"] = "rows",
    *,
    temperature: float = 1.0,
    column: str | None = None,
) -> dict[str, float]:
    """Return weights in proportion to ``size ** (1 / temperature)`` for `WeightedSampler`; the largest is 1.

    They count the files that exist now. Files that are added later count when a run is built again.

    Args:
        sources: The sources by name.
        by: Unit of the sizes: "rows", or "tokens" if all sources know them (`Source.num_tokens`).
        temperature: A number above 0. 1 gives weights in proportion to the sizes, larger numbers give weights that are more
            alike.
        column: The column of the tokens, if a source has several.

    Raises:
        ValueError: The temperature is not above 0; a source does not know its tokens.

    Example:
        >>> import rescale_data as rd
        >>> sources = {"web": rd.DatasetSource(range(900)), "code": rd.DatasetSource(range(100))}
        >>> rd.weights_by_size(sources, temperature=2)
        {'web': 1.0, 'code': 0.333333333}
    """
    if by not in ("rows", "tokens") or not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"weights_by_size(by={by!r}, temperature={temperature}): give 'rows' or 'tokens', and a number above 0; 1 for "
            f"weights in proportion."
        )
    source_sizes = {name: _size_of_source(source, by, column) for name, source in sources.items()}
    largest_size = max(1, *source_sizes.values(), 0)
    # rounded, so that the weights are the same on every processor
    return {name: float(f"{(size / largest_size) ** (1 / temperature):.9g}") for name, size in source_sizes.items()}


def _size_of_source(source: Source, by: str, column: str | None) -> int:
    source_size = source.num_rows if by == "rows" else source.num_tokens(column)
    if source_size is None:
        raise ValueError(
            f"weights_by_size(by='tokens'): {source.name} does not know how many tokens it has without reading them all. Give "
            f"the weights as numbers, or by='rows'."
        )
    return source_size
