"""`woven`: documents of several sources in the order in which a mixture draws them. In C by `draws.c`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rescale_data.nodes.reading.gather import kernel
from rescale_data.nodes.reading.spans import Moves, Spans
from rescale_data.state import Ints


def woven(chosen: Ints, spans: Spans, begins: Ints, first: int, counted: Sequence[tuple[int, list[int]]]) -> Spans:
    """The documents of draws, whose moves count those as well.

    Args:
        chosen: The source of each draw.
        spans: The next documents of all of these, each source's one behind the other, whose moves are of the mixture's row.
        begins: The number of the first of each source.
        first: Draws before.
        counted: What the mixture keeps of each source: the first slot of the numbers of documents, and these; by tokens, the
            same of those.
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
    """The number of each draw's document, and the moves."""
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
