"""Read documents of several readers in one pass: a mixture of many sources takes only a few of each at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rescale_data.nodes.reading.fragment_documents import FragmentDocuments, Near
from rescale_data.nodes.reading.lent import located
from rescale_data.nodes.reading.spans import Moves, Spans
from rescale_data.state import Ints


def read_together(
    asked: Sequence[tuple[FragmentDocuments, slice, int, bool]], position: memoryview
) -> tuple[Spans, Ints]:
    """Read documents of several readers at once, in any order; most readers only add a few numbers.

    Args:
        asked: For each reader its documents, its part of ``position``, the most documents to read, and true if documents of
            the next epochs follow.
        position: The row of which the readers' positions are parts.

    Returns:
        The documents, and ``int64[2, len(asked)]``: for each reader, the index of its first document and the number of its
        documents.
    """
    near, others = dict[int, Near](), dict[int, Spans]()
    for number, (documents, part, most, turns) in enumerate(asked):
        found = documents.at_hand(position[part], most, turns)
        if found is None:
            others[number] = documents.read(position[part], most)
        else:
            near[number] = found
    sizes = [len(each.rows) for each in near.values()] + [len(each) for each in others.values()]
    places = np.zeros((2, len(asked)), dtype=np.int64)
    places[:, [*near, *others]] = np.cumsum(sizes) - sizes, sizes
    parts, slots = list(others.values()), [asked[number][1].start for number in others]
    if near:
        parts.insert(0, _joined([*near.values()], [asked[number][1].start for number in near]))
        slots.insert(0, 0)
    return Spans.join(parts, slots), places


def _joined(near: Sequence[Near], first_slots: Sequence[int]) -> Spans:
    """Return all documents; their moves are in one row, in which each reader's position begins at its first slot."""
    firsts = np.cumsum([0, *(len(each.lent) for each in near)])
    which = [each.which + first for each, first in zip(near, firsts.tolist(), strict=False)]
    lent = [fragment for each in near for fragment in each.lent]
    spans = located(np.concatenate([each.rows for each in near]), np.concatenate(which), lent)
    runs = [(slot, *run) for each, slot in zip(near, first_slots, strict=True) for run in each.runs]
    slot, epoch, first, num = np.array(runs).T
    row = np.arange(1, len(spans) + 1) + np.repeat(first - np.cumsum(num) + num, num)
    moved, ends = np.repeat(slot + 1, num), np.arange(len(spans) + 1)
    if (turned := np.flatnonzero(num == 0)).size:  # the document behind an epoch's end also moves to the next epoch
        behind = (np.cumsum(num) - num)[turned]
        moved, row = np.insert(moved, behind, slot[turned]), np.insert(row, behind, epoch[turned])
        ends[1:] += np.cumsum(np.bincount(behind, minlength=len(spans)))
    return spans.with_moves(Moves(ends, moved, row))
