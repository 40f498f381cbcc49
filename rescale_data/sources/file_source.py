"""`FileSource`: base class of the sources that read files; rows are read through the cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from rescale_data.sources.counts import READ_BYTES, read_counters
from rescale_data.sources.decoded.ahead import fetch_runner
from rescale_data.sources.decoded.cache import CostlyValue, Sized, cache, cache_share, open_files, owner_id
from rescale_data.sources.decoded.cache_demand import num_sources_and_shards
from rescale_data.sources.files.ranges import ArrowBuffer, RangeReader
from rescale_data.sources.fragmented import FragmentedSource
from rescale_data.sources.source import BadRow, RowRanges

V = TypeVar("V", bound=Sized)

# Its multiples, modulo 2**32, are spread evenly (Knuth, "The Art of Computer Programming", 6.4)
_HASH_MULTIPLIER = 2654435769


class FragmentRows(Sized, Protocol):
    """The rows of one fragment, in memory."""

    def row(self, index: int) -> dict[str, Any]:
        """Return a copy of one row, which the caller owns; raise `BadRow` if the row cannot be used."""
        ...


@dataclass(frozen=True)
class OpenFile:
    """An open file whose fragments are byte ranges, and what its format keeps with it, such as where its rows begin."""

    ranges: RangeReader
    kept: Any


@dataclass(frozen=True)
class FetchedBytes:
    """Bytes of a fragment of a remote file, fetched but not decoded yet."""

    data: ArrowBuffer

    @property
    def nbytes(self) -> int:
        return self.data.size


@dataclass(frozen=True)
class FileIndex(FetchedBytes, CostlyValue):
    """The bytes of a file's footer or index, which the cache keeps longer than fragments."""


class FileSource(FragmentedSource):
    """Base class of sources whose files have fragments. A subclass for each format reads footers and fragments."""

    @abstractmethod
    def _open(self, file: int) -> Any:
        """Open a file, and return a handle from which its fragments are read. The process keeps some handles open."""

    def _load(self, fragment: int) -> Any:
        """Return the rows of a fragment (`FragmentRows`), read from its file."""
        data = self._read_raw_bytes(fragment)
        rows = self._rows_from_bytes(data, fragment)
        # A packer may keep the rows longer than the cache does
        self._file_handle(self._index.file_of(fragment)).ranges.release_with(rows, data)
        return rows

    def _rows_from_bytes(self, data: ArrowBuffer, fragment: int) -> FragmentRows:
        """Return the rows of a fragment, given its bytes. Called for formats whose index has byte ranges."""
        raise NotImplementedError

    def _needs_decoding(self, fragment: int) -> bool:
        """True if a background thread that fetches a fragment also decodes it; else it fetches the bytes alone.

        If only the bytes are fetched, the thread does not interrupt the trainer's thread at each step to make the rows, which
        costs more than it saves.
        """
        return False

    def row(self, index: int) -> dict[str, Any]:
        fragment = self._index.fragment_at(index)
        return self._row_in(self._rows(fragment), index, int(self._index.starts[fragment]))

    def _row_in(self, rows: FragmentRows, index: int, first_row: int) -> dict[str, Any]:
        """Return a row of the source, given decoded rows from ``first_row`` on; an error names the file and the row."""
        try:
            return rows.row(index - first_row)
        except BadRow as bad:
            raise self._bad_row_error(index, bad) from None
        except (ValueError, OverflowError) as error:  # as of a string that is not UTF-8
            raise self._bad_row_error(index, BadRow(f"it cannot be read: {error}. Fix it, or leave it out.")) from error

    def prefetch(self, column: str | None, fragment: int, share: RowRanges | None = None) -> None:
        key = self._cache_key(fragment, column, share)
        if not self.reads_ahead or cache().get(key) is not None:
            return
        if share is not None or self._needs_decoding(fragment):
            fetch_runner.begin(key, partial(self._fill_cache, column, fragment, share))
        elif cache().get(key := self._bytes_key(fragment)) is None:
            fetch_runner.begin(key, partial(self._fetch_bytes, fragment))

    def _fill_cache(self, column: str | None, fragment: int, share: RowRanges | None) -> None:
        """Put a fragment into the cache before it is needed. Runs in a background thread, once at a time for a key.

        A format with token columns or pieces overrides this.
        """
        self._get_or_make(self._cache_key(fragment), partial(self._load, fragment))

    def _fetch_bytes(self, fragment: int) -> None:
        self._get_or_make(self._bytes_key(fragment), lambda: FetchedBytes(self._bytes_in_file(fragment)))

    def _read_raw_bytes(self, fragment: int) -> ArrowBuffer:
        """Return the bytes of a fragment; they were fetched ahead, or are read now."""
        key = self._bytes_key(fragment)
        if self.reads_ahead:
            fetch_runner.wait(key)
        fetched: FetchedBytes | None = cache().get(key)
        if fetched is None:
            return self._bytes_in_file(fragment)
        cache().forget(key)
        return fetched.data

    def _read_footer_bytes(self, file: int) -> ArrowBuffer:
        """Read the bytes of a file's footer or index. Called for formats that read more than rows from an open file."""
        raise NotImplementedError

    def _footer_bytes(self, file: int, *, read_soon: bool = True) -> ArrowBuffer:
        """Return the bytes of a file's footer or index. For a remote file, the cache keeps them after the file is closed.

        Args:
            file: Number of the file.
            read_soon: True if the file is about to be read. Otherwise the bytes are kept only if as many bytes for each file
                take at most a sixteenth of the cache.
        """
        if self._files.filesystem is None:
            return self._read_footer_bytes(file)
        key = (owner_id(self), "footer", file)
        with cache().lock_for(key):
            cached: FileIndex | None = cache().get(key)
            file_index = FileIndex(self._read_footer_bytes(file)) if cached is None else cached
            if read_soon or file_index.nbytes * len(self._files.names) <= cache_share(self) // 16:
                cache().register(self)
                cache().put(key, file_index)
        return file_index.data

    def _bytes_key(self, fragment: int) -> tuple[Any, ...]:
        return (owner_id(self), "bytes", fragment)

    def _bytes_in_file(self, fragment: int) -> ArrowBuffer:
        """Read the bytes of a fragment from its file. Called for formats whose index has byte ranges."""
        offset, length = self._index.location("offset", fragment), self._index.location("length", fragment)
        return self._file_handle(self._index.file_of(fragment)).ranges.read(offset, length)

    def _rows(self, fragment: int) -> FragmentRows:
        key = self._cache_key(fragment)
        return cache().get(key) or self._read(key, fragment, self._load)

    def _read(self, key: tuple[Any, ...], fragment: int, load: Callable[[int], V], *, cached: bool = True) -> V:
        """Return a value that is missing in the cache: loaded now, or by another thread that has already begun to load it.

        Args:
            cached: Whether the cache keeps the value. If not, this thread reads it without a look at other threads.
        """
        with self._record_file_reading(fragment):
            return self._get_or_make(key, partial(load, fragment)) if cached else _count_read_bytes(load(fragment))

    @contextmanager
    def _record_file_reading(self, fragment: int) -> Generator[None]:
        """Name the file that this thread waits for, in counters and in errors."""
        file = self._index.file_of(fragment)
        with read_counters().timed_read(self._files.path(file)), self._name_file_in_errors(file):
            yield

    def _get_or_make(self, cache_key: tuple[Any, ...], make_value: Callable[[], V]) -> V:
        """Return the value at a key of the cache. If it is missing, one thread makes it while the others wait."""
        cache().register(self)
        return cache().get_or_make(cache_key, lambda: _count_read_bytes(make_value()))

    def _may_stay_cached(self, fragment: int) -> bool:
        """True if a memory-mapped fragment may stay in the cache; False for some fragments if not all of them fit.

        Each fragment is read once an epoch. If a source is larger than the cache and all its fragments were kept, most would be
        evicted before they are read again. So some fragments stay, always the same ones: as many as the cache holds in addition
        to the fragments that are being read.
        """
        num_sources, num_shards = num_sources_and_shards(owner_id(self))
        room_bytes = cache_share(self)
        spare_bytes = room_bytes - 2 * num_sources * num_shards * self.fragment_bytes
        total_bytes = num_sources * len(self._index) * self.fragment_bytes
        if self._files.filesystem is not None or total_bytes <= room_bytes or 2 * spare_bytes < room_bytes:
            return True
        return fragment * _HASH_MULTIPLIER % 2**32 * total_bytes < spare_bytes * 2**32

    def _cache_key(self, fragment: int, column: str | None = None, share: RowRanges | None = None) -> tuple[Any, ...]:
        """Return the cache key of a fragment, of one of its columns, or of the piece that one logical shard reads."""
        column_key = () if column is None else (column,)
        return (owner_id(self), fragment, *column_key, *(() if share is None else ("piece", share.shard_key)))

    def _file_handle(self, file: int) -> Any:
        return open_files().get_or_make((owner_id(self), file), lambda: self._open(file))

    def _bad_row_error(self, index: int, bad_row: BadRow) -> ValueError:
        return ValueError(f"{self.locate(index)}: {bad_row}")


def _count_read_bytes(decoded: V) -> V:
    if not isinstance(decoded, FetchedBytes):
        read_counters().add(READ_BYTES, decoded.nbytes)
    return decoded
