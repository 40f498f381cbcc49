"""`woven`: puts documents of several sources in the order in which a mixture draws them; in C by `draws.c`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rescale_data.nodes.reading.gather import kernel
from rescale_data.nodes.reading.spans import Moves, Spans
from rescale_data.state import Ints


def woven(chosen: Ints, spans: Spans, begins: Ints, first: int, counted: Sequence[tuple[int, list[int]]]) -> Spans:
    """Return the documents of draws in their order, with moves that also count the draws.

    Args:
        chosen: The source of each draw.
        spans: The next documents of all these sources, source by source, with moves of the mixture's row.
        begins: Index in ``spans`` of the first document of each source.
        first: Number of draws before.
        counted: The result of `MixtureRow.counted_at`: the first slot and the values of the numbers of documents, and by tokens
            also of the numbers of tokens.
    """
    moves, num = spans.moves, len(chosen)
    slots, counts = np.array([slot for slot, _ in counted]), np.array([count for _, count in counted])
    if kernel is None:
        index, moves = _in_numpy(chosen, spans, begins, first, slots, counts)
        return spans.take(index, moves)
    index, ends = np.empty(num, dtype=np.int64), np.empty(num + 1, dtype=np.int64)
    slot, value = np.empty((2, len(moves.slot) + num * (1 + len(slots))), dtype=np.int64)
    given = (chosen, begins.copy(), spans.length, moves.ends, moves.slot, moves.value, slots, counts)
    kernel.weave(first, *map(np.ascontiguousarray, given), index, ends, slot, value)
    return spans.take(index, Moves(ends, slot[: ends[-1]], value[: ends[-1]]))


def _in_numpy(chosen: Ints, spans: Spans, begins: Ints, first: int, slots: Ints, counts: Ints) -> tuple[Ints, Moves]:
    """Return the index of each draw's document, and the moves."""
    order, each = np.argsort(chosen, kind="stable"), np.bincount(chosen, minlength=len(begins))
    before = np.cumsum(each) - each
    index, number = np.empty_like(chosen), np.arange(len(chosen))
    index[order] = number + np.repeat(begins - before, each)
    slot, value = np.zeros((2, len(chosen), 1 + len(slots)), dtype=np.int64)
    value[:, 0] = first + 1 + number
    for kind, steps in enumerate([np.ones_like(chosen), spans.length[index]][: len(slots)]):
        totals = np.cumsum([0, *steps[order]])
        slot[:, 1 + kind] = slots[kind] + chosen
        value[order, 1 + kind] = totals[1:] + np.repeat(counts[kind] - totals[before], each)
    return index, spans.moves.take(index).then(Moves.of(slot, value))
