"""`SharedFragment`: a decoded fragment that stays in memory as long as documents point into it; `Spans` of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from rescale_data.nodes.reading.gather import copy_documents, offsets_and_lengths
from rescale_data.nodes.reading.spans import NO_UPDATES, PositionUpdates, Spans, as_native_array
from rescale_data.sources.source import Tokens
from rescale_data.state import Ints


class SharedFragment:
    """A decoded fragment that stays in memory as long as documents of one or more logical shards point into it.

    Args:
        tokens: The decoded tokens.
        first_row: The row of the source at which the fragment begins.
        num_sharing_shards: About the number of shards that keep it at once; each of them counts its part of the bytes.
    """

    __slots__ = ("__weakref__", "_tokens", "first_row", "nbytes", "offsets", "tokens")

    def __init__(self, tokens: Tokens, first_row: int, num_sharing_shards: int = 1) -> None:
        self._tokens = tokens  # kept because it may release pages when it is deleted
        self.tokens, self.offsets = as_native_array(tokens.values), np.ascontiguousarray(tokens.offsets, dtype=np.int64)
        self.first_row, self.nbytes = first_row + tokens.first_row, tokens.nbytes // num_sharing_shards


shared_fragments: WeakValueDictionary[tuple[int, str, int, int], SharedFragment] = WeakValueDictionary()
"""Fragments that a packer of any shard still holds, by source, column, number of the fragment, and piece of it."""


def locate_rows(rows: Ints, index: Ints, fragments: list[SharedFragment]) -> Spans:
    """Return rows as `Spans` that point into decoded fragments, without position updates."""
    start, length = offsets_and_lengths(rows, index, [f.first_row for f in fragments], [f.offsets for f in fragments])
    return Spans(tuple([f.tokens for f in fragments]), index, start, length, NO_UPDATES, tuple(fragments))


def copy_rows(rows: Ints, fragment: SharedFragment) -> Spans:
    """Return copies of some rows of one fragment as `Spans`, without position updates."""
    spans = locate_rows(rows, np.zeros_like(rows), [fragment])
    no_updates = PositionUpdates(np.zeros(len(rows) + 1, dtype=np.int64), NO_UPDATES.slot, NO_UPDATES.slot_values)
    array, length = copy_documents(fragment.tokens, spans.start, spans.length), spans.length
    return Spans((array,), spans.array, np.cumsum(length) - length, length, no_updates, (None,))


@dataclass(frozen=True, slots=True)
class ReadyDocuments:
    """Locations of documents within decoded fragments, for documents that need not be copied.

    Args:
        runs: ``(epoch, row, number)`` for each run of documents: their epoch, the shard's row of the first document, and their
            number. The number is 0 where an epoch has ended and documents of the next one follow.
        rows: Rows of the source.
        fragment_index: For each row, the index of its fragment in ``fragments``.
        fragments: The decoded fragments.
    """

    runs: list[tuple[int, int, int]]
    rows: Ints
    fragment_index: Ints
    fragments: list[SharedFragment]


def join_ready(ready: Sequence[ReadyDocuments], slot_shifts: Sequence[int]) -> Spans:
    """Return the documents of all readers as one `Spans`, with position updates for the row that holds all readers."""
    first_fragments = np.cumsum([0, *(len(docs.fragments) for docs in ready)])
    indices = [docs.fragment_index + start for docs, start in zip(ready, first_fragments.tolist(), strict=False)]
    fragments = [fragment for docs in ready for fragment in docs.fragments]
    spans = locate_rows(np.concatenate([docs.rows for docs in ready]), np.concatenate(indices), fragments)
    runs = [(slot, *run) for docs, slot in zip(ready, slot_shifts, strict=True) for run in docs.runs]
    slot, epoch, start, run_lengths = np.array(runs).T
    rows_written = np.arange(1, len(spans) + 1) + np.repeat(start - np.cumsum(run_lengths) + run_lengths, run_lengths)
    slots_written, ends = np.repeat(slot + 1, run_lengths), np.arange(len(spans) + 1)
    # The document behind an epoch's end also moves to the next epoch
    if (epoch_starts := np.flatnonzero(run_lengths == 0)).size:
        epoch_first_docs = (np.cumsum(run_lengths) - run_lengths)[epoch_starts]
        slots_written = np.insert(slots_written, epoch_first_docs, slot[epoch_starts])
        rows_written = np.insert(rows_written, epoch_first_docs, epoch[epoch_starts])
        ends[1:] += np.cumsum(np.bincount(epoch_first_docs, minlength=len(spans)))
    return spans.with_moves(PositionUpdates(ends, slots_written, rows_written))
