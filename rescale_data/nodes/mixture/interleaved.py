"""`interleave_documents`: arranges documents of several sources in the order in which a mixture draws them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rescale_data.nodes.reading.extension import kernel
from rescale_data.nodes.reading.spans import PositionUpdates, Spans
from rescale_data.state import Ints


def interleave_documents(
    sources: Ints, spans: Spans, first_indices: Ints, num_drawn: int, counts_by_slot: Sequence[tuple[int, list[int]]]
) -> Spans:
    """Return documents in the order of their draws, with position updates that also count the draws.

    Args:
        sources: The source of each draw.
        spans: The next documents of all these sources, source by source, with moves of the mixture's row.
        first_indices: Index in ``spans`` of the first document of each source.
        num_drawn: Number of draws before these.
        counts_by_slot: The result of `MixtureRow.counts_at`: first slot and values of the numbers of documents, and by tokens
            also of the numbers of tokens.
    """
    moves, num_draws = spans.moves, len(sources)
    slots, counts = np.array([slot for slot, _ in counts_by_slot]), np.array([count for _, count in counts_by_slot])
    document_index, ends = np.empty(num_draws, dtype=np.int64), np.empty(num_draws + 1, dtype=np.int64)
    new_slots, new_values = np.empty((2, len(moves.slot) + num_draws * (1 + len(slots))), dtype=np.int64)
    arrays = (sources, first_indices.copy(), spans.length, moves.ends, moves.slot, moves.slot_values, slots, counts)
    kernel.interleave(num_drawn, *map(np.ascontiguousarray, arrays), document_index, ends, new_slots, new_values)
    return spans.take(document_index, PositionUpdates(ends, new_slots[: ends[-1]], new_values[: ends[-1]]))
