"""`FileSource`: base class of the sources of files; it reads rows through the cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from rescale_data.sources.arrow_types import ArrowBuffer
from rescale_data.sources.bad_row import BadRow
from rescale_data.sources.counts import READ_BYTES, counts
from rescale_data.sources.decoded.ahead import far_ahead
from rescale_data.sources.decoded.cache import Made, Sized, cache, handles, owner_of, room_for
from rescale_data.sources.decoded.interest import beside
from rescale_data.sources.decoded.pieces import Share
from rescale_data.sources.files.ranges import Ranges
from rescale_data.sources.fragmented import FragmentedSource

V = TypeVar("V", bound=Sized)

_GOLDEN = 2654435769  # its multiples, modulo 2**32, are spread evenly (Knuth, "The Art of Computer Programming", 6.4)


class Rows(Protocol):
    """The rows of one fragment in memory."""

    @property
    def nbytes(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return a copy of one row, which the caller owns; raise `BadRow` if the row is not good."""
        ...


@dataclass(frozen=True)
class Brought:
    """Bytes of a fragment that were fetched and are not decoded yet."""

    data: ArrowBuffer

    @property
    def nbytes(self) -> int:
        return self.data.size


@dataclass(frozen=True)
class Known(Brought, Made):
    """Footer or index of a file, with the places of its fragments. The cache keeps it longer than fragments."""


class FileSource(FragmentedSource):
    """Rows of files that have fragments. A subclass for each format reads footers and fragments."""

    @abstractmethod
    def _open(self, file: int) -> Any:
        """Return a handle from which the fragments of a file are read. The process keeps some handles open."""

    @abstractmethod
    def _load(self, fragment: int) -> Rows:
        """Return the rows of a fragment, read from its file."""

    def _extent(self, fragment: int) -> tuple[int, int] | None:
        """Return offset and length of a fragment in its file, if rows are made from these bytes without decoding; else `None`.

        Of such a fragment only the bytes are fetched ahead. A background thread that also made the rows would interrupt the
        trainer's thread at each step, and that costs more than it saves.
        """
        del fragment
        return None

    def _ranges(self, file: int) -> Ranges:
        """Return the byte ranges of an open file. Called only if `_extent` is not `None`."""
        return self._handle(file).ranges

    def row(self, index: int) -> dict[str, Any]:
        at = self._known.fragment_at(index)
        rows = self._rows(at)
        try:
            return rows.row(index - int(self._index.starts[at]))
        except BadRow as bad:
            raise self._bad(index, bad) from None

    @property
    def reads_ahead(self) -> bool:
        return self._files.filesystem is not None and self._files.remote.read_ahead

    def prepare(self, column: str | None, fragment: int, share: Share | None = None) -> None:
        key = self._key(fragment, column, share)
        if not self.reads_ahead or cache().get(key) is not None:
            return
        extent = self._extent(fragment) if share is None else None
        if extent is None:
            far_ahead().begin(key, partial(self._fill, column, fragment, share))
        elif cache().get(key := self._bytes_key(fragment)) is None:
            far_ahead().begin(key, partial(self._bring, key, self._index.file_of(fragment), extent))

    def _fill(self, column: str | None, fragment: int, share: Share | None) -> None:
        """Put a fragment that will be needed soon into the cache. Runs in a background thread, once at a time for a key."""
        del column, share  # a format with token columns or pieces overrides this
        self._once(self._key(fragment), partial(self._load, fragment))

    def _bring(self, key: tuple[Any, ...], file: int, extent: tuple[int, int]) -> None:
        self._once(key, lambda: Brought(self._ranges(file).read(*extent)))

    def _bytes(self, fragment: int, extent: tuple[int, int]) -> ArrowBuffer:
        """Return the bytes of a fragment, fetched ahead or read now."""
        key = self._bytes_key(fragment)
        if self.reads_ahead:
            far_ahead().wait(key)
        brought: Brought | None = cache().get(key)
        if brought is None:
            return self._ranges(self._index.file_of(fragment)).read(*extent)
        cache().forget(key)
        return brought.data

    def _brought(self, what: str, file: int, fetch: Callable[[], ArrowBuffer], *, soon: bool = True) -> ArrowBuffer:
        """Return the footer or the index of a file. For a remote file, the cache keeps these bytes after the file is closed.

        Args:
            what: "footer" or "index", a part of the key in the cache.
            file: Number of the file.
            fetch: Reads the bytes.
            soon: True if the file is about to be read. Otherwise the bytes are kept only if as many bytes for each file take
                at most a sixteenth of the cache.
        """
        if self._files.filesystem is None:
            return fetch()
        key = (owner_of(self), what, file)
        with cache().alone(key):
            kept: Known | None = cache().get(key)
            found = Known(fetch()) if kept is None else kept
            if soon or found.nbytes * len(self._files.names) <= room_for(self) // 16:
                cache().register(self)
                cache().put(key, found)
        return found.data

    def _bytes_key(self, fragment: int) -> tuple[Any, ...]:
        return (owner_of(self), "bytes", fragment)

    def _span(self, fragment: int) -> tuple[int, int]:
        """Return offset and length of a fragment in its file, which most formats keep as its place."""
        return self._index.place("offset", fragment), self._index.place("length", fragment)

    def _rows(self, fragment: int) -> Rows:
        key = self._key(fragment)
        return cache().get(key) or self._read(key, fragment, self._load)

    def _read(self, key: tuple[Any, ...], fragment: int, load: Callable[[int], V], *, stays: bool = True) -> V:
        """Return a value that the cache lacks, read now or by another thread that has already begun.

        Args:
            stays: Whether the cache keeps the value. If not, this thread reads it without a look at other threads.
        """
        with self._reading(fragment):
            return self._once(key, partial(load, fragment)) if stays else _counted(load(fragment))

    @contextmanager
    def _reading(self, fragment: int) -> Generator[None]:
        """Name the file that this thread waits for, in counters and in errors."""
        file = self._index.file_of(fragment)
        with counts().reading(self._files.path(file)), self._blaming(file):
            yield

    def _once(self, key: tuple[Any, ...], make: Callable[[], V]) -> V:
        """Return the value at a key. If it is missing, one thread makes it and the others wait."""
        cache().register(self)
        return cache().make(key, lambda: _counted(make()))

    def _stays(self, fragment: int) -> bool:
        """True if the cache keeps a mapped fragment after a packer has passed its tokens.

        Each fragment is read once an epoch. If a source is larger than the cache and all its fragments were kept, most would be
        evicted before they are read again. So some fragments stay, always the same ones: as many as the cache holds in addition
        to the fragments that are being read.
        """
        sources, shards = beside(owner_of(self))
        room = room_for(self)
        rest = room - 2 * sources * shards * self.fragment_bytes
        total = sources * len(self._index) * self.fragment_bytes
        if self._files.filesystem is not None or total <= room or 2 * rest < room:
            return True
        return fragment * _GOLDEN % 2**32 * total < rest * 2**32

    def _key(self, fragment: int, column: str | None = None, share: Share | None = None) -> tuple[Any, ...]:
        """Return the cache key of a fragment, of one of its columns, or of a piece."""
        named = () if column is None else (column,)
        return (owner_of(self), fragment, *named, *(() if share is None else ("piece", share.key)))

    def _handle(self, file: int) -> Any:
        return handles().make((owner_of(self), file), lambda: self._open(file))

    def _bad(self, index: int, why: BadRow) -> ValueError:
        return ValueError(f"{self.locate(index)}: {why}")


def _counted(decoded: V) -> V:
    if not isinstance(decoded, Brought):
        counts().add(READ_BYTES, decoded.nbytes)
    return decoded
