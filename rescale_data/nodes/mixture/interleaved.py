"""`interleave_documents`: arranges documents of several sources in the order in which a mixture draws them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rescale_data.nodes.reading.gather import kernel
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
    if kernel is None:
        document_index, moves = _interleave_numpy(sources, spans, first_indices, num_drawn, slots, counts)
        return spans.take(document_index, moves)
    document_index, ends = np.empty(num_draws, dtype=np.int64), np.empty(num_draws + 1, dtype=np.int64)
    new_slots, new_values = np.empty((2, len(moves.slot) + num_draws * (1 + len(slots))), dtype=np.int64)
    arrays = (sources, first_indices.copy(), spans.length, moves.ends, moves.slot, moves.slot_values, slots, counts)
    kernel.interleave(num_drawn, *map(np.ascontiguousarray, arrays), document_index, ends, new_slots, new_values)
    return spans.take(document_index, PositionUpdates(ends, new_slots[: ends[-1]], new_values[: ends[-1]]))


def _interleave_numpy(
    sources: Ints, spans: Spans, first_indices: Ints, num_drawn: int, slots: Ints, counts: Ints
) -> tuple[Ints, PositionUpdates]:
    """Return the index of each draw's document, and the position updates, computed in NumPy."""
    order, num_per_source = (np.argsort(sources, kind="stable"), np.bincount(sources, minlength=len(first_indices)))
    num_before = np.cumsum(num_per_source) - num_per_source
    document_index, draw_number = np.empty_like(sources), np.arange(len(sources))
    document_index[order] = draw_number + np.repeat(first_indices - num_before, num_per_source)
    new_slots, new_values = np.zeros((2, len(sources), 1 + len(slots)), dtype=np.int64)
    new_values[:, 0] = num_drawn + 1 + draw_number
    for counter, amounts in enumerate([np.ones_like(sources), spans.length[document_index]][: len(slots)]):
        totals = np.cumsum([0, *amounts[order]])
        new_slots[:, 1 + counter] = slots[counter] + sources
        new_values[order, 1 + counter] = totals[1:] + np.repeat(counts[counter] - totals[num_before], num_per_source)
    return document_index, spans.moves.take(document_index).combined_with(PositionUpdates.of(new_slots, new_values))
