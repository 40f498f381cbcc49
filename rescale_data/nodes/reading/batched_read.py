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
    """Read documents of several readers at once; return them in any order, with the range of each reader's documents.

    Args:
        requests: For each reader: its documents, its slots of ``position``, the largest number of documents to read, and true
            if documents of the next epochs follow.
        position: The row of which the readers' positions are parts.

    Returns:
        The documents, and ``int64[2, len(requests)]``: for each reader, the index of its first document and the number of its
        documents.
    """
    ready, unready = dict[int, ReadyDocuments](), dict[int, Spans]()
    for reader_index, (documents, slots, max_documents, crosses_epochs) in enumerate(requests):
        ready_documents = documents.find_decoded(position[slots], max_documents, crosses_epochs)
        if ready_documents is None:
            unready[reader_index] = documents.read(position[slots], max_documents)
        else:
            ready[reader_index] = ready_documents
    document_counts = [len(docs.rows) for docs in ready.values()] + [len(docs) for docs in unready.values()]
    ranges = np.zeros((2, len(requests)), dtype=np.int64)
    ranges[:, [*ready, *unready]] = np.cumsum(document_counts) - document_counts, document_counts
    all_spans, first_slots = list(unready.values()), [requests[reader_index][1].start for reader_index in unready]
    if ready:
        all_spans.insert(0, _join_ready([*ready.values()], [requests[reader_index][1].start for reader_index in ready]))
        first_slots.insert(0, 0)
    return Spans.join(all_spans, first_slots), ranges


def _join_ready(ready: Sequence[ReadyDocuments], first_slots: Sequence[int]) -> Spans:
    """Return the documents of all readers as one `Spans`, with position updates for the row that holds all readers."""
    first_fragments = np.cumsum([0, *(len(docs.fragments) for docs in ready)])
    indices = [docs.fragment_index + start for docs, start in zip(ready, first_fragments.tolist(), strict=False)]
    fragments = [fragment for docs in ready for fragment in docs.fragments]
    spans = locate_rows(np.concatenate([docs.rows for docs in ready]), np.concatenate(indices), fragments)
    runs = [(slot, *run) for docs, slot in zip(ready, first_slots, strict=True) for run in docs.runs]
    slot, epoch, start, run_lengths = np.array(runs).T
    rows_written = np.arange(1, len(spans) + 1) + np.repeat(start - np.cumsum(run_lengths) + run_lengths, run_lengths)
    slots_written, ends = np.repeat(slot + 1, run_lengths), np.arange(len(spans) + 1)
    if (
        epoch_starts := np.flatnonzero(run_lengths == 0)
    ).size:  # the document behind an epoch's end also moves to the next epoch
        epoch_first_docs = (np.cumsum(run_lengths) - run_lengths)[epoch_starts]
        slots_written, rows_written = (
            np.insert(slots_written, epoch_first_docs, slot[epoch_starts]),
            np.insert(rows_written, epoch_first_docs, epoch[epoch_starts]),
        )
        ends[1:] += np.cumsum(np.bincount(epoch_first_docs, minlength=len(spans)))
    return spans.with_moves(PositionUpdates(ends, slots_written, rows_written))
