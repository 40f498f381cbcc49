"""`MixedDocuments`: reads many documents of a mixture at a time: chooses their sources, then reads source by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from rescale_data.nodes.base import View
from rescale_data.nodes.empty_draws import MAX_EMPTY_EPOCHS
from rescale_data.nodes.mixture.circle import WeightArcs
from rescale_data.nodes.mixture.draws import MixtureDraws
from rescale_data.nodes.mixture.lengths import TokenWeightArcs
from rescale_data.nodes.mixture.rules import CurrentWeights
from rescale_data.nodes.mixture.source_buffer import KeptDocuments, SourceBuffer
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments
from rescale_data.nodes.reading.gather import interleave_documents
from rescale_data.nodes.reading.shared_fragment import ReadyDocuments, join_ready
from rescale_data.nodes.reading.spans import EMPTY_SPANS, PositionUpdates, Spans
from rescale_data.order import UInts
from rescale_data.state import Ints, copy_of

# Draws in the first read and in the second; then so many times more each
_FIRST_READ_DRAWS, _SECOND_READ_DRAWS, _READ_GROWTH_FACTOR = (16, 256, 4)
_MAX_DRAWS, _MAX_MEAN_DRAWS = 2**15, 2048  # most draws at once, in all and on average for each source
_MAX_READS = 256  # reads of sources after which a call ends (at least 4 for each): an epoch may hold only a row or two
_MAX_READY_DOCS = 16  # documents of each source in the second read, if they lie at hand: a few cost as much as one
_MIN_BATCHED_DOCS = 2  # by tokens, expected documents from which on a source is read together with others
_SPAN_BYTES = 128
_NO_RANGES = np.zeros((2, 0), dtype=np.int64)


class MixedDocuments:
    """Reads documents of a mixture in one token column, as `DocumentReader` does; positions are rows of the mixture's state.

    Few documents are read at first, then more each time: the first batch does not wait for later documents.

    Args:
        mixture: The draws, which choose the sources.
        column: The column of the tokens.
        documents: The documents of each source; they are opened again when they are read.
    """

    def __init__(self, mixture: MixtureDraws, column: str, documents: Sequence[DocumentReader]) -> None:
        self._mixture, self._column, self._repeats = mixture, column, mixture.repeats_sources
        self._by_tokens, self._byte_limit = mixture.by_tokens, mixture.sources.make_byte_limit()
        self._slots, self._num_sources = mixture.sources.slots, len(documents)
        self.is_costly_to_read = any(docs.is_costly_to_read for docs in documents)
        self._kept_documents: dict[int, KeptDocuments | MixedDocuments] = {}
        self._next_num_draws, self._num_reads = _FIRST_READ_DRAWS, 0
        self._max_reads = max(_MAX_READS, 4 * len(documents))
        num_read_together = sum([isinstance(docs, FragmentDocuments) for docs in documents])
        self._second_read_draws = max(_SECOND_READ_DRAWS, _MAX_READY_DOCS * num_read_together)
        self._drop_documents()

    def _drop_documents(self) -> None:
        """Drop the documents that a call of `read` has read, since hundreds of sources in each shard would take much memory."""
        self._buffers: dict[int, SourceBuffer] = {}
        self._batched_spans, self._batched_ranges = EMPTY_SPANS, _NO_RANGES
        self._errors: dict[int, Exception] = {}  # of sources, each for the turn of its document

    def _documents_of(self, source: int) -> DocumentReader:
        documents = self._kept_documents.get(source) or self._mixture.sources.documents(source, self._column)
        if documents.is_costly_to_read and source not in self._kept_documents:
            kept_documents = documents if isinstance(documents, MixedDocuments) else KeptDocuments(documents)
            documents = self._kept_documents[source] = kept_documents
        return documents

    def drop_documents_before(self, position: View) -> None:
        """Drop the documents of costly sources that lie before a position, and keep the later ones."""
        for source, documents in self._kept_documents.items():
            documents.drop_documents_before(position[self._slots[source]])

    def read(self, position: View, max_documents: int, points: UInts | None = None) -> Spans:
        """Return up to ``max_documents`` next documents; an outer mixture passes the ``points`` that choose their sources."""
        self._next_position = copy_of(position)
        if points is None:
            self.drop_documents_before(position)
        num_empty: Counter[int] = Counter()
        while True:
            current_weights = self._mixture.weights.current(self._next_position)
            arcs = self._mixture.weight_arcs_at(self._next_position, current_weights)
            if arcs is None:
                break
            self._ending_sources, self._weights_until = current_weights.end_epochs, current_weights.weights_until
            num_drawn = self._next_position[0]
            max_draws = max_documents if points is not None else min(max_documents, self._next_num_draws)
            if self._weights_until is not None and not self._by_tokens:
                max_draws = min(max_draws, max(1, self._weights_until - num_drawn))
            circle = self._mixture.circle
            next_points = circle.points(num_drawn, max_draws) if points is None else points[:max_draws]
            spans, ended_source = self._draw_documents(self._next_position, arcs, next_points)
            if len(spans):
                self._set_next_num_draws(spans)
                if self._by_tokens and self._weights_until is not None:
                    spans = self._append_weight_change(spans, current_weights)
                if self._next_position != position:
                    passed_ends = PositionUpdates.between(position, self._next_position)
                    spans = spans.with_moves(spans.moves.preceded_by(passed_ends))
                self._next_position = self._start_position = position  # frees the copy: there may be many shards
                return spans
            num_empty[ended_source] += 1
            is_ending = ended_source in self._ending_sources
            if self._repeats and (not is_ending or num_empty[ended_source] > MAX_EMPTY_EPOCHS):
                self._mixture.refuse_empty(ended_source)
            self._documents_of(ended_source).begin_next_epoch(self._next_position[self._slots[ended_source]])
            self._mixture.weights.record_epoch_end(self._next_position, ended_source, current_weights)
            if not self._repeats and self._mixture.record_source_end(self._next_position, ended_source):
                break
        return EMPTY_SPANS

    def begin_next_epoch(self, position: View) -> None:
        position[:] = self._next_position

    def _append_weight_change(self, spans: Spans, current_weights: CurrentWeights) -> Spans:
        """Return the same documents; the position update of the last one includes a change of weights, if one is due."""
        position_before = copy_of(self._next_position)
        spans.move(position_before, len(spans))
        position_after = copy_of(position_before)
        self._mixture.weights.record_change(position_after, current_weights)
        if position_after == position_before:
            return spans
        moves = PositionUpdates.join([spans.moves, PositionUpdates.between(position_before, position_after)])
        return spans.with_moves(moves.merge_document_groups(np.array([*range(1, len(spans)), len(spans) + 1])))

    def _set_next_num_draws(self, spans: Spans) -> None:
        arrays_and_owners = zip(spans.arrays, spans.owners, strict=True)
        num_bytes = sum([array.nbytes for array, owner in arrays_and_owners if owner is None])
        mean_bytes = _SPAN_BYTES + num_bytes // len(spans)
        max_draws = min(_MAX_DRAWS, _MAX_MEAN_DRAWS * self._num_sources, self._byte_limit() // mean_bytes)
        next_num_draws = max(self._second_read_draws, _READ_GROWTH_FACTOR * self._next_num_draws)
        if self._num_reads > self._num_sources:  # some sources give few at a time
            next_num_draws = min(next_num_draws, len(spans) * self._max_reads // self._num_reads)
        self._next_num_draws = max(_FIRST_READ_DRAWS, min(next_num_draws, max_draws))

    def _draw_documents(self, position: View, arcs: WeightArcs | TokenWeightArcs, points: UInts) -> tuple[Spans, int]:
        """Return the documents of the next draws until a source ends, and the number of that source, or -1."""
        self._start_position, self._num_reads = position, 0
        try:
            if isinstance(arcs, TokenWeightArcs):
                sources, ended = self._choose_sources(points, arcs)
            else:
                sources, ended = self._read_chosen(arcs.end_points.searchsorted(points, side="right"), points, arcs)
            spans = self._in_draw_order(position[0], sources) if len(sources) else EMPTY_SPANS
            if not len(sources) and ended in self._errors:
                raise self._errors[ended]
        finally:  # also after a read that fails: the next one may be at another position
            self._drop_documents()
        return spans, ended

    def _read_sources_together(self, num_wanted: Sequence[int]) -> Ints:
        """Read up to ``num_wanted`` documents of each source in one pass, where possible; return how many were read."""
        ready, unready = dict[int, ReadyDocuments](), dict[int, Spans]()
        for source, num in enumerate(num_wanted):
            if num and isinstance(documents := self._documents_of(source), FragmentDocuments):
                position = self._start_position[self._slots[source]]
                goes_on = self._repeats and source not in self._ending_sources
                with suppress(Exception):  # `_fill_buffer` reads again, and keeps the error
                    ready_documents = documents.find_decoded(position, num, goes_on)
                    if ready_documents is None:
                        unready[source] = documents.read(position, num)
                    else:
                        ready[source] = ready_documents
        self._num_reads += len(ready) + len(unready)
        counts = [len(docs.rows) for docs in ready.values()] + [len(spans) for spans in unready.values()]
        self._batched_ranges = np.zeros((2, self._num_sources), dtype=np.int64)
        self._batched_ranges[:, [*ready, *unready]] = np.cumsum(counts) - counts, counts
        slots = [self._slots[source].start for source in (*ready, *unready)]
        joined = join_ready([*ready.values()], slots[: len(ready)]) if ready else EMPTY_SPANS
        self._batched_spans = Spans.join([joined, *unready.values()], [0, *slots[len(ready) :]])
        return self._batched_ranges[1]

    def _spans_in_batch(self, source: int) -> Spans:
        """Return the documents of a source that the last batched read has read."""
        first_document, num_documents = self._batched_ranges[:, source].tolist()
        return self._batched_spans[first_document : first_document + num_documents]

    def _choose_sources(self, points: UInts, arcs: TokenWeightArcs) -> tuple[Ints, int]:
        """Choose the sources of the next draws by tokens; return them, and a source that has ended, or -1."""
        fractions = arcs.draw_fractions()
        chosen_sources, counters = np.empty(len(points), dtype=np.int64), arcs.counters()
        counts = counters[4]
        expected = [int(num_more + num_more**0.5) for num_more in (len(points) * fraction for fraction in fractions)]
        num_wanted = [num_more if num_more >= _MIN_BATCHED_DOCS else 0 for num_more in expected]
        num_read = self._read_sources_together(num_wanted)
        lengths = [self._spans_in_batch(source).length if num else None for source, num in enumerate(num_read.tolist())]
        num, missing_source = 0, -1
        change_at = -1 if self._weights_until is None else self._weights_until
        while True:
            num, missing_source = arcs.choose_sources(points, chosen_sources, num, counters, lengths, change_at)
            if missing_source < 0:
                break
            count = int(counts[missing_source])
            num_more = (len(points) - num) * fractions[missing_source]  # about as many, and some to spare
            is_costly_to_read = self._documents_of(missing_source).is_costly_to_read
            num_to_read = max(1, int(num_more)) if is_costly_to_read else 1 + int(num_more + num_more**0.5)
            buffer = self._fill_buffer(missing_source, count + num_to_read)
            if buffer.num_documents == count:
                break
            lengths[missing_source] = buffer.lengths
        return chosen_sources[:num], missing_source

    def _read_chosen(self, chosen_sources: Ints, points: UInts, arcs: WeightArcs) -> tuple[Ints, int]:
        """Read the documents of chosen draws; return the draws before one whose source has ended, and that source or -1."""
        num_draws, ended_source = len(chosen_sources), -1
        num_wanted = np.bincount(chosen_sources, minlength=self._num_sources)
        if (self._read_sources_together(num_wanted.tolist()) == num_wanted).all():
            return chosen_sources, -1
        draws_by_source = np.argsort(chosen_sources.astype(np.min_scalar_type(self._num_sources)), kind="stable")
        for source, draws in enumerate(np.split(draws_by_source, np.cumsum(num_wanted[:-1]))):
            if self._batched_ranges[1, source] == len(draws):
                continue
            documents = self._documents_of(source)
            if isinstance(documents, MixedDocuments):
                documents = NestedDocuments(documents, arcs.points_within_arc(points[draws], source))
            buffer = self._fill_buffer(source, len(draws), documents)
            if buffer.num_documents < len(draws) and draws[buffer.num_documents] < num_draws:
                num_draws, ended_source = int(draws[buffer.num_documents]), source
        return chosen_sources[:num_draws], ended_source

    def _fill_buffer(self, source: int, num: int, documents: DocumentReader | None = None) -> SourceBuffer:
        """Read documents of a source until its buffer has ``num``, or fewer if there are no more; return the buffer."""
        buffer = self._buffers.get(source)
        if buffer is None:
            slots, spans_in_batch = self._slots[source], self._spans_in_batch(source)
            spans_in_batch = spans_in_batch.with_moves(spans_in_batch.moves.shifted(-slots.start))
            documents = documents or self._documents_of(source)
            buffer = SourceBuffer(documents, self._start_position[slots], self._by_tokens, spans_in_batch)
            self._buffers[source] = buffer
        while buffer.num_documents < num and not (buffer.num_documents and self._num_reads >= self._max_reads):
            self._num_reads += 1
            try:
                if buffer.read_documents(num):
                    continue
            except Exception as error:
                self._errors[source] = error
                break
            if not self._repeats or source in self._ending_sources:
                break
            if buffer.num_empty_epochs == MAX_EMPTY_EPOCHS:
                if self._by_tokens:  # its documents without tokens may have been drawn
                    self._mixture.refuse_empty(source)
                break
            buffer.begin_next_epoch()
        return buffer

    def _in_draw_order(self, num_drawn: int, sources: Ints) -> Spans:
        """Return the documents in the order of their draws, with position updates that also count the draws."""
        spans, slots = [self._batched_spans], [0]
        starts, next_index = self._batched_ranges[0].copy(), len(self._batched_spans)
        counts = np.bincount(sources, minlength=self._num_sources).tolist()
        for source, buffer in self._buffers.items():
            spans += buffer.spans(counts[source])
            slots += [self._slots[source].start] * (len(spans) - len(slots))
            starts[source], next_index = next_index, next_index + counts[source]
        counts_by_slot = self._mixture.row.slot_counts(self._start_position)
        return interleave_documents(sources, Spans.join(spans, slots), starts, num_drawn, counts_by_slot)


class NestedDocuments:
    """Documents of an inner mixture, drawn at points that the outer mixture gives."""

    is_costly_to_read = True

    def __init__(self, documents: MixedDocuments, points: UInts) -> None:
        self._documents, self._points_of_next_draws = documents, points

    def read(self, position: View, max_documents: int) -> Spans:
        spans = self._documents.read(position, max_documents, self._points_of_next_draws)
        self._points_of_next_draws = self._points_of_next_draws[len(spans) :]
        return spans

    def begin_next_epoch(self, position: View) -> None:
        self._documents.begin_next_epoch(position)
