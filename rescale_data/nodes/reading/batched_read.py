"""Reads documents of several readers in one pass, for mixtures of many sources that take only a few of each at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rescale_data.nodes.reading.fragment_documents import FragmentDocuments, ReadyDocuments
from rescale_data.nodes.reading.lent import locate_rows
from rescale_data.nodes.reading.spans import PositionUpdates, Spans
from rescale_data.state import Ints


def read_batched(
    requests: Sequence[tuple[FragmentDocuments, slice, int, bool]], position: memoryview
) -> tuple[Spans, Ints]:
    """Read documents of several readers at once; return them in any order, with the place of each reader's documents.

    Args:
        requests: For each reader its documents, its part of ``position``, the most documents to read, and true if documents of
            the next epochs follow.
        position: The row of which the readers' positions are parts.

    Returns:
        The documents, and ``int64[2, len(requests)]``: for each reader, the index of its first document and the number of its
        documents.
    """
    ready, others = dict[int, ReadyDocuments](), dict[int, Spans]()
    for number, (documents, part, most, crosses_epochs) in enumerate(requests):
        ready_documents = documents.find_ready(position[part], most, crosses_epochs)
        if ready_documents is None:
            others[number] = documents.read(position[part], most)
        else:
            ready[number] = ready_documents
    sizes = [len(each.rows) for each in ready.values()] + [len(each) for each in others.values()]
    places = np.zeros((2, len(requests)), dtype=np.int64)
    places[:, [*ready, *others]] = np.cumsum(sizes) - sizes, sizes
    parts, slots = list(others.values()), [requests[number][1].start for number in others]
    if ready:
        parts.insert(0, _joined([*ready.values()], [requests[number][1].start for number in ready]))
        slots.insert(0, 0)
    return Spans.join(parts, slots), places


def _joined(ready: Sequence[ReadyDocuments], first_slots: Sequence[int]) -> Spans:
    """Return the documents of all readers as one `Spans`, with position updates for the row that holds all readers."""
    firsts = np.cumsum([0, *(len(each.lent) for each in ready)])
    which = [each.which + first for each, first in zip(ready, firsts.tolist(), strict=False)]
    lent = [fragment for each in ready for fragment in each.lent]
    spans = locate_rows(np.concatenate([each.rows for each in ready]), np.concatenate(which), lent)
    runs = [(slot, *run) for each, slot in zip(ready, first_slots, strict=True) for run in each.runs]
    slot, epoch, first, num = np.array(runs).T
    row = np.arange(1, len(spans) + 1) + np.repeat(first - np.cumsum(num) + num, num)
    slots_written, ends = np.repeat(slot + 1, num), np.arange(len(spans) + 1)
    if (
        epoch_starts := np.flatnonzero(num == 0)
    ).size:  # the document behind an epoch's end also moves to the next epoch
        behind = (np.cumsum(num) - num)[epoch_starts]
        slots_written, row = (
            np.insert(slots_written, behind, slot[epoch_starts]),
            np.insert(row, behind, epoch[epoch_starts]),
        )
        ends[1:] += np.cumsum(np.bincount(behind, minlength=len(spans)))
    return spans.with_moves(PositionUpdates(ends, slots_written, row))
