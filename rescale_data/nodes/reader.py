"""`Reader`: the node that yields the rows of one logical shard."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from rescale_data.errors import checks_argument_types
from rescale_data.nodes.base import Node, View, draw_and_drop
from rescale_data.nodes.error_handler import OnError
from rescale_data.nodes.provenance import with_provenance
from rescale_data.nodes.reading.blocklist import ExcludedRows, blocklist_of
from rescale_data.nodes.reading.core import ReaderArguments, core_of, first_shard_like
from rescale_data.nodes.reading.documents import DocumentReader, TextDocuments
from rescale_data.nodes.reading.epochs import DataVersion
from rescale_data.nodes.reading.fetching import ChunkFetcher, FragmentPrefetcher
from rescale_data.nodes.reading.fragment_documents import DOC_BLOCK, FragmentDocuments
from rescale_data.nodes.reading.proof import check_digest, digest_after, digests_after_each
from rescale_data.nodes.reading.row_ranges import ShardRowRanges
from rescale_data.nodes.reading.rows import DEFAULT_WINDOW_ROWS, SourceRows, WindowPlan
from rescale_data.nodes.reading.spans import PositionUpdates
from rescale_data.shard import Shard, require_shard
from rescale_data.sources.dataset import MapStyle, as_source
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.decoded.cache_demand import served_shards
from rescale_data.sources.source import FiledSource, Source, TokenSource
from rescale_data.state import COUNT_LIMITS, Field, Ints, copy_of, counter

__all__ = ["DEFAULT_WINDOW_ROWS", "Reader"]

_BLOCKED_COUNT_SLOT, _LIST_DIGEST_SLOT = -2, -1  # slots, if `exclude` is given
_CHANGEABLE_ARGUMENTS, _NO_ARGUMENTS = frozenset({"exclude"}), frozenset[str]()


class Reader(Node[Any]):
    """Yields the rows of one logical shard in their order; `StopIteration` ends each epoch.

    If a source has fewer rows than logical shards, a shard owns one row in some epochs and none in the others. In an endless
    stream it goes on at once to the next epoch in which it has a row, and ends when it has read all rows (a round of N epochs).

    Args:
        source: A source, or anything with ``__len__`` and ``__getitem__``.
        shard: The logical shard to read.
        shuffle: `False` keeps the order of the files. A number permutes the fragments, and permutes the rows in windows of that
            many rows. `True` uses windows of 1024 rows; map-style data is permuted as a whole.
        by_global_batch: With ``shuffle=False`` and ``repeat=False``: each global batch holds the next rows of the source, if a
            sample is a row and the topology is aligned. ``rd.DataLoader(source, shuffle=False)`` reads in this way. Otherwise a
            shard reads a contiguous range of the source, and a global batch has a row of each range.
        provenance: Add ``"provenance"`` to each sample: a line with its source, file and row. `Map`, `Tokenize` and packers
            pass it on. The order stays the same, but packers read a row at a time.
        on_error: As in `Map`, for a row that cannot be read. With "skip", errors of a disk or a network are still raised.
        exclude: Rows to leave out: ``{file: rows in it}`` for a source of files, else row numbers. `find_rows` makes the list
            from ids. The rows count as drawn and are counted apart (``blocked_rows``). The list may differ in each segment.
            Give ``()`` when the run begins. Give the same object, made outside of the pipeline, to all logical shards.
            A state may be loaded with another list than it was saved with. If it was saved while a `TokenPacker` was within a
            document that is now blocked, the document ends there. If it was saved within a window (`WholeDocumentPacker`,
            `Shuffle`), or within a document below a node that leaves out samples, such as `Filter`, this begins again: the
            state holds only a digest of the old list. Its samples then come again, and a warning says in how many logical
            shards. Below a mixture with ``stop="never"``, the first document of a source's epoch begins again without one.

    Yields:
        ``{column: value}`` of arrays, bytes, strings or numbers; from a map-style dataset, its own samples.

    Raises:
        ValueError: ``shuffle`` is no window, or ``exclude`` has a file or a row that the source has not. An error raised by
            reading a row comes with the file and the row.
        TypeError: ``provenance`` is set and samples are no dicts, or ``exclude`` is no collection of ints or no mapping of
            files.

    Example:
        >>> import rescale_data as rd
        >>> list(rd.Reader(["a", "b", "c", "d"], rd.Shard(index=1, num_logical_shards=2), shuffle=False))
        ['c', 'd']
        >>> list(rd.Reader([10, 11, 12, 13], rd.Shard(), shuffle=False, exclude=[1, 3]))
        [10, 12]
    """

    ROW: ClassVar[tuple[Field, ...]] = (
        Field(("epoch",), limits=(0, 2**62)),
        Field(("row",), limits=COUNT_LIMITS),
        counter("skipped"),
    )
    PROOF: ClassVar[Field] = Field(("digest",), counts=True)
    """Additional field if `Shard.verify` is set: the digest of the rows read."""
    BLOCKED: ClassVar[tuple[Field, ...]] = (counter("blocked"), Field(("list",), counts=True))
    """Last two fields if ``exclude`` is given: the number of rows left out, and the digest of the list."""
    epochs_are_equal = True

    @checks_argument_types
    def __init__(
        self,
        source: Source | MapStyle,
        shard: Shard,
        *,
        shuffle: bool | int = True,
        by_global_batch: bool = False,
        provenance: bool = False,
        on_error: OnError = "raise",
        exclude: ExcludedRows | None = None,
    ) -> None:
        require_shard(shard, self)
        source = as_source(source)
        self.reads, self.of_shard, self.shard = source, shard, shard
        blocklist = None if exclude is None else blocklist_of(source, exclude, shard.index)
        self.FIELDS = self.ROW + ((self.PROOF,) if shard.verify else ()) + (() if blocklist is None else self.BLOCKED)
        super().__init__()
        shards = first_shard_like(shard)
        self.core = core_of(
            ReaderArguments(type(self), source, shards, shuffle, by_global_batch, provenance, on_error, blocklist)
        )
        self.farthest_epoch = 0
        """The highest epoch that has been read."""
        self._plan: WindowPlan | None = None
        self._share: ShardRowRanges | None = None
        self._used_column: str | None = None  # the only column that is used, however the rows are read
        self._document_column: str | None = None  # the column that is read without its rows
        self._is_epoch_over = self._caches_pieces = False
        self._drawn_row = -1
        self._chunk_fetcher = ChunkFetcher(source) if source.batch_rows > 1 else None

    @property
    def source(self) -> Source:
        return self.core.source

    @property
    def rows(self) -> SourceRows:
        """The rows of the source that each logical shard reads."""
        return self.core.rows

    @property
    def changeable(self) -> frozenset[str]:
        return _NO_ARGUMENTS if self.core.blocklist is None else _CHANGEABLE_ARGUMENTS

    @property
    def provenance(self) -> bool:
        return self.core.has_provenance

    def cache_key(self, kind: str) -> Hashable:
        """Return the key in the cache of a value that no other reader has."""
        return self.rows.source_key, kind, ref(self)

    def drop_order(self) -> None:
        """Drop the order of the present window; it is made again when needed."""
        self._plan = self._share = None

    def num_epoch_rows(self, epoch: int) -> int:
        """Return the number of rows of this shard in an epoch, which is about to be read."""
        plan = self._plan
        if plan is not None and plan.epoch == epoch:
            return plan.num_epoch_rows
        self.farthest_epoch = max(self.farthest_epoch, epoch)
        return self.rows.order(epoch, self.shard.index).num_shard_rows

    def begin(self, row: View) -> None:
        if self.core.blocklist is not None:  # also at the beginning of the first window, which a node above reads again
            row[_LIST_DIGEST_SLOT] = self.core.blocklist.digest

    def seek(self) -> None:
        self._is_epoch_over = False
        if self.is_reread:
            self._document_column = None
        if self.rows.global_batch_order is None:
            num_shards = len(served_shards(self.rows.source_key, self.shard.num_logical_shards))
            self._caches_pieces = self.source.should_cache_pieces(num_shards, packed=self._document_column is not None)

    def next(self) -> Any:
        position, core = self.position, self.core
        while True:
            if self._is_epoch_over or not self.to_next_row(position):
                self._end_epoch()
                raise StopIteration
            epoch, row = position[0], position[1]
            plan = self.plan(epoch, row)
            plan_index = row - plan.first_row
            self._drawn_row = int(plan.rows[plan_index])
            try:
                sample = self._read_sample(plan, plan_index)
            except Exception as error:
                sample = core.error_handler.handle_error(error, self.locate(), position[2])
                if sample is None:
                    self.advance(position, 1)
                    position[2] += 1
                    continue
            if core.only_row_advances and plan_index + 1 < len(plan.rows):
                position[1] = row + 1  # equals `advance` if the epoch goes on after this row
            else:
                self.advance(position, 1)
            names_row = core.has_provenance and (core.arguments.provenance or isinstance(sample, Mapping))
            return with_provenance(sample, self.locate()) if names_row else sample

    def skip(self, num_samples: int) -> int:
        if self.core.error_handler.skips:  # only reading shows which rows are samples
            return draw_and_drop(self, num_samples)
        num_left = num_samples
        while num_left and not self._is_epoch_over and self.to_next_row(self.position):
            num_left -= self._skip_rows(1 if self.core.leaves_out_rows else num_left)
        if num_left:
            self._end_epoch()
        return num_samples - num_left

    def _skip_rows(self, num_rows: int) -> int:
        """Advance by ``num_rows`` rows, or fewer at the end of the epoch, none of them blocked; return how many."""
        epoch, row = self.position[0], self.position[1]
        if row + num_rows > self.num_epoch_rows(epoch):
            num_rows = min(num_rows, self.rows.epoch_end(epoch, self.shard.index)[0] - row)
        stop_row, num_to_advance = row + num_rows, num_rows
        if stop_row > self.num_epoch_rows(epoch):  # it goes on at once to other epochs
            self.position[0], num_before = self.rows.epoch_after_rows(epoch, stop_row, self.shard.index)
            self.position[1], num_to_advance = 0, stop_row - num_before
            if self.shard.verify:
                self.position[3] = 0
        self.advance(self.position, num_to_advance)
        return num_rows

    # Moves of a position: to the next row that is not left out, past rows, to the next epoch

    def to_next_row(self, position: View) -> bool:
        """Advance a position past rows on the blocklist; return true if another row follows in the epoch."""
        blocklist = self.core.blocklist
        if blocklist is None:
            return position[1] < self.num_epoch_rows(position[0])
        while position[1] < self.num_epoch_rows(position[0]) and (num_blocked := self._num_blocked(position)):
            self.advance(position, num_blocked)
            position[_BLOCKED_COUNT_SLOT] += num_blocked
        position[_LIST_DIGEST_SLOT] = blocklist.digest
        return position[1] < self.num_epoch_rows(position[0])

    def advance(self, position: View, num_rows: int) -> None:
        """Advance a position by ``num_rows`` rows."""
        if self.shard.verify:
            position[3] = digest_after(self, position[3], position[0], position[1], num_rows)
        position[1] += num_rows
        if position[1] >= self.num_epoch_rows(position[0]) and self._continues_round(position[0]):
            self.begin_next_epoch(position)

    def _continues_round(self, epoch: int) -> bool:
        return self.rows.continues_round(epoch, self.shard.index)

    def begin_next_epoch(self, position: View) -> None:
        """Set a position to the beginning of the next epoch; with `Shard.verify`, check the rows of the old one first.

        A packer has dropped all rows left in the old epoch.
        """
        if self.shard.verify:
            check_digest(self, position[0], position[1], position[3])
            position[3] = 0
        position[0], position[1] = self.rows.next_epoch(position[0], self.shard.index), 0

    def begin_epoch_at_unblocked_row(self, position: View) -> None:
        """Move a position whose epoch has only blocked rows left to the first row of the next epoch that is not blocked."""
        self.to_next_row(position)
        self.begin_next_epoch(position)
        self.skip_blocked_rows(position)

    def row_advances_by_one(self, epoch: int) -> bool:
        """True if reading any row of an epoch only adds 1 to the row number in the position."""
        return self.core.only_row_advances and not self._continues_round(epoch)

    def moves(self, position: View, start: View, num_rows: int) -> tuple[Ints | None, PositionUpdates]:
        """Return the indices of the next rows that are not blocked, and the position update of each of these rows.

        Args:
            position: The position from which the rows are read.
            start: The same position after `to_next_row`.
            num_rows: Number of rows from ``start`` on, all of one window.

        Returns:
            ``int64[k]`` indices among the rows, `None` for all of them; the updates of ``position``.
        """
        if self._continues_round(start[0]):  # the shard has no other row in this epoch
            next_position = copy_of(start)
            self.advance(next_position, num_rows)
            self.skip_blocked_rows(next_position)
            return None, PositionUpdates.between(position, next_position)
        if self.core.only_row_advances and start == position:
            ends = np.arange(start[1] + 1, start[1] + num_rows + 1)
            return None, PositionUpdates(np.arange(num_rows + 1), np.ones(num_rows, dtype=np.int64), ends)
        plan = self.plan(start[0], start[1])
        first_index = start[1] - plan.first_row
        unblocked = plan.unblocked_indices(first_index, first_index + num_rows) - first_index
        # Rows up to the end of those that are left out after each sample
        num_passed = np.append(unblocked[1:], num_rows)
        positions = np.repeat(np.asarray(start)[None], len(unblocked), axis=0)
        positions[:, 1] += num_passed
        if self.shard.verify:
            digests = digests_after_each(self, start[3], start[0], start[1], num_rows)
            positions[:, 3] = digests[num_passed - 1]
        if self.core.blocklist is not None:
            positions[:, _BLOCKED_COUNT_SLOT] += num_passed - np.arange(1, len(unblocked) + 1)
        self.skip_blocked_rows(positions[-1].data)
        slots = np.flatnonzero((positions != np.asarray(position)).any(axis=0))
        return unblocked, PositionUpdates.of(slots, positions[:, slots])

    def _num_blocked(self, position: View) -> int:
        """Return the number of blocked rows between a position and the next sample of its window."""
        plan = self.plan(position[0], position[1])
        return plan.num_blocked(position[1] - plan.first_row)

    def apply_changes_at(self, position: View) -> None:
        """Do nothing: `skip_blocked_rows` writes the digest of the present blocklist."""

    def skip_blocked_rows(self, position: View) -> None:
        if self.core.blocklist is None:
            return
        if position[1]:
            self.to_next_row(position)
        else:  # the epoch has not begun: files may join it, and another list hold from its first row
            position[_LIST_DIGEST_SLOT] = self.core.blocklist.digest

    def is_on_blocklist(self, position: View) -> bool:
        is_in_epoch = position[1] < self.num_epoch_rows(position[0])
        return self.is_old_position(position) and is_in_epoch and self._num_blocked(position) > 0

    def is_sample_untraceable(self, position: View) -> bool:
        """True if only the old blocklist can identify the row that was begun, because unreadable rows are skipped as well."""
        return self.core.error_handler.skips and self.is_old_position(position)

    def is_old_position(self, position: View) -> bool:
        return self.core.blocklist is not None and position[_LIST_DIGEST_SLOT] != self.core.blocklist.digest

    def is_node_change_due(self, position: View) -> bool:
        return self.is_old_position(position)

    def next_epoch(self, position: View, *, is_drawn: bool = False) -> None:
        if is_drawn or position[1]:
            position[0], position[1] = position[0] + 1, 0
            if self.shard.verify:
                position[3] = 0

    def verify(self) -> None:
        if self.shard.verify:
            check_digest(self, self.position[0], self.position[1], self.position[3])

    def use_history(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        source, versions = self.source, tuple[DataVersion, ...]()
        if len(history) > 1 and isinstance(source, FiledSource) and source.fragments is not None:
            fragment_lengths = np.diff(source.fragments)
            subsets = [source.subset(manifest) for _, manifest in history]
            versions = tuple(
                DataVersion(epoch, int(fragment_lengths[subset].sum()), subset, hash(subset.tobytes()))
                for (epoch, _), subset in zip(history, subsets, strict=True)
            )
        if versions != self.core.arguments.versions:
            self.core = core_of(self.core.arguments._replace(versions=versions))
            self.drop_order()
            self.farthest_epoch = 0
            cache().forget(self.cache_key(DOC_BLOCK))

    def open_documents(self, column: str) -> DocumentReader | None:
        source, gives_documents = self.source, self.core.gives_documents
        if not isinstance(source, TokenSource):
            return None
        if gives_documents and self._used_column != column:
            source.token_dtype(column)  # raises an error if these are no tokens
        self._used_column = column
        return self._open_fragments(source, column) if gives_documents else None

    def open_texts(self, column: str) -> DocumentReader | None:
        source = self.source
        if not self.core.gives_documents or not source.has_texts(column):
            return None
        if not isinstance(source, TokenSource):
            return TextDocuments(source, column, self)
        return self._open_fragments(source, column)

    def _open_fragments(self, source: TokenSource, column: str) -> FragmentDocuments:
        if self.core.fragments is None:
            raise TypeError(f"{source.name} can be read a fragment at a time, but says that it has no fragments.")
        self._document_column = column
        return FragmentDocuments(source, self.core.fragments, column, self)

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        source = self.source
        is_alone = source.columns == [column] and not self.provenance
        return source.token_dtype(column) if is_alone and isinstance(source, TokenSource) else None

    def prefetch(self, rows: Ints, shards: Ints) -> None:
        prefetcher = self.core.prefetcher
        if prefetcher is None:
            return
        self.seek()
        if not self._caches_pieces and not prefetcher.num_windows:
            return
        for (epoch, row, *_), shard in zip(rows.tolist(), shards.tolist(), strict=True):
            if row < self.rows.order(epoch, shard).num_shard_rows:
                share = self.rows.share(epoch, shard) if self._caches_pieces else None
                prefetcher.begin(self._document_column, self.rows.fragments_around(epoch, row, shard), share)

    def epochs_at(self, rows: Ints, shards: Ints) -> npt.NDArray[np.float64]:
        """Return ``float64[M]``, the number of epochs that shards have read, with the fraction of the present epoch."""
        return rows[:, 0] + rows[:, 1] / np.maximum(1, self.rows.sizes(rows[:, 0], shards))

    def share(self, epoch: int) -> ShardRowRanges | None:
        """Return the pieces of fragments that this shard reads in an epoch; `None` if it reads whole fragments."""
        if not self._caches_pieces:
            return None
        share = self._share
        if share is None or share.epoch != epoch:
            self._share = share = self.rows.share(epoch, self.shard.index)
        return share

    def rows_from(self, epoch: int, row: int) -> Ints:
        """Return the row numbers of the source that follow from ``row`` of the shard's epoch to the end of the window."""
        plan = self.plan(epoch, row)
        return plan.rows[row - plan.first_row :]

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        if self.core.error_handler.skips or self.core.leaves_out_rows:
            return None
        next_rows = rows.copy()
        num_left, next_rows[:, 0] = self.rows.epoch_ends(rows[:, 0], shards)
        next_rows[:, 1] = 0
        if self.shard.verify:
            next_rows[:, 3] = 0
        return num_left - rows[:, 1], next_rows

    def locate(self) -> str:
        return f"{self.source.name}: {self.source.locate(self._drawn_row)}" if self._drawn_row >= 0 else ""

    def parameters(self) -> dict[str, Any]:
        columns = [self._used_column] if self._used_column is not None else self.source.columns
        return {
            "shuffle": "full" if self.rows.permutes_all_rows else self.rows.window,
            **({"columns": columns} if columns is not None else {}),
            **({} if self.rows.global_batch_order is None else {"global_batch_size": self.shard.global_batch_size}),
            **({} if self.core.blocklist is None else {"exclude": self.core.blocklist.parameters()}),
        }

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        name = self.source.name
        return {
            f"rows/{name}": float((self.rows.sizes_before(rows[:, 0], shards) + rows[:, 1]).sum()),
            f"epoch_min/{name}": float(rows[:, 0].min()),
            f"epoch_max/{name}": float(rows[:, 0].max()),
            "skipped_rows": float(rows[:, 2].sum()),
            **({} if self.core.blocklist is None else {"blocked_rows": float(rows[:, _BLOCKED_COUNT_SLOT].sum())}),
        }

    def plan(self, epoch: int, row: int) -> WindowPlan:
        """Return the order of rows in the window around ``row``. If it is new, start to fetch the next windows' fragments."""
        plan = self._plan
        if plan is None or plan.epoch != epoch or not 0 <= row - plan.first_row < len(plan.rows):
            plan = self.rows.new_plan(epoch, row, self)
            cache().put(self.cache_key("plan"), plan)
            self._plan = plan  # until the cache drops it (`drop_order`)
            if self.core.prefetcher is not None:
                self._fetch_ahead(self.core.prefetcher, epoch, row)
        return plan

    def _fetch_ahead(self, fetching: FragmentPrefetcher, epoch: int, row: int) -> None:
        """Start to fetch the fragments that the windows after the window of ``row`` need."""
        shard = self.shard.index
        for _ in range(1 if self._caches_pieces else fetching.num_windows - 1):
            epoch, row = self.rows.next_window(epoch, row, shard)
            share = self.rows.share(epoch, shard) if self._caches_pieces else None
            fetching.begin(self._document_column, self.rows.fragments_around(epoch, row, shard), share)

    def _read_sample(self, plan: WindowPlan, index_in_plan: int) -> Any:
        if self._chunk_fetcher is not None:
            return self._chunk_fetcher.take(plan, index_in_plan)
        share = self.share(plan.epoch) if self._caches_pieces else None
        return self.source.row(self._drawn_row) if share is None else self.source.row_of(self._drawn_row, share)

    def _end_epoch(self) -> None:
        """Move to the beginning of the next epoch; there are no samples until the reader is bound again."""
        if not self._is_epoch_over:
            self._is_epoch_over = True
            self.begin_next_epoch(self.position)
