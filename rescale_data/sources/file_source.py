"""What the sources of files share: an index of fragments made when it is opened, and rows read through the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer, ArrowSchema
from rescale_data.sources.bad_row import BadRow
from rescale_data.sources.decoded.ahead import far_ahead
from rescale_data.sources.decoded.cache import DEFAULT_BYTES, Sized, cache, handles, owner_of
from rescale_data.sources.decoded.pieces import Share
from rescale_data.sources.files.paths import Files, Paths, find
from rescale_data.sources.files.ranges import Ranges
from rescale_data.sources.files.remote import Remote, RemoteError
from rescale_data.state import Ints

V = TypeVar("V", bound=Sized)

_OPENING_THREADS = 16
_DAMAGE = (OSError, ValueError, IndexError, pa.ArrowException)


class Explained(ValueError):
    """An error that names the file and the cure already."""


class Rows(Protocol):
    """The rows of one fragment in memory."""

    @property
    def nbytes(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """A copy that the caller owns; `BadRow` where there is something wrong with it."""
        ...


@dataclass(frozen=True)
class Footer:
    """What is known of a file before any of its data is read.

    Args:
        rows: ``int64[F]``, rows of each of its fragments.
        nbytes: ``int64[F]``, about as many bytes as each takes in memory.
        detail: Whatever the format needs to read a fragment without the footer; it must pickle.
        schema: Of its rows, where they have one.
    """

    rows: Ints
    nbytes: Ints
    detail: Any
    schema: ArrowSchema = None


@dataclass(frozen=True)
class _Brought:
    """The bytes of a fragment that somebody will decode."""

    data: ArrowBuffer

    @property
    def nbytes(self) -> int:
        return self.data.size


class FileSource(ABC):
    """Rows of files that have fragments. A format says how to read a footer and a fragment."""

    FORMAT: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        paths: Paths,
        *,
        cache_bytes: int = DEFAULT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        remote: Remote | None = None,
    ) -> None:
        if cache_bytes < 1:
            raise ValueError(f"cache_bytes={cache_bytes}: give a number of bytes, at least 1.")
        self.cache_bytes, self.spill_bytes = cache_bytes, 0
        self._files = self._find(paths, storage_options, remote)
        footers = self._read_footers()
        self._accept(footers)
        self._details = [footer.detail for footer in footers]
        self._file_rows = [int(footer.rows.sum()) for footer in footers]
        counts = np.concatenate([footer.rows for footer in footers])
        self._file_of = np.repeat(np.arange(len(footers)), [len(footer.rows) for footer in footers])
        self._number_of = np.concatenate([np.arange(len(footer.rows)) for footer in footers])
        self._fragments = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.fragment_bytes = (
            int(np.median(np.concatenate([footer.nbytes for footer in footers]))) if len(counts) else 0
        )
        if not self.num_rows:
            raise ValueError(
                f"The {len(footers)} files below {self._files.root} have no rows. Give files that have some."
            )

    def _find(self, paths: Paths, storage_options: Mapping[str, Any] | None, remote: Remote | None) -> Files:
        return find(paths, self.SUFFIXES, storage_options, remote)

    @abstractmethod
    def _footer(self, file: int) -> Footer:
        """Read a footer; most errors mean that the file is damaged, and are made to say so."""

    @abstractmethod
    def _open(self, file: int) -> Any:
        """A handle to read fragments of a file from; the process keeps some of them."""

    @abstractmethod
    def _load(self, fragment: int) -> Rows:
        """Read a fragment."""

    def _extent(self, file: int, number: int) -> tuple[int, int] | None:
        """Offset and length of a fragment in its file, where rows are made of its bytes as they are; `None` elsewhere.

        Then no more than these bytes is brought ahead. A thread that also decoded would interrupt the trainer's at each step,
        to save it less than that costs.
        """
        del file, number
        return None

    def _ranges(self, file: int) -> Ranges:
        """An open file, where there are extents."""
        return self._handle(file)

    def _accept(self, footers: Sequence[Footer]) -> None:
        """Look at the footers of all files; ``ValueError`` where they do not go together."""
        del footers

    @property
    def name(self) -> str:
        """The folder above all files."""
        return self._files.root.rstrip("/").rpartition("/")[2] or self._files.root

    @property
    def num_rows(self) -> int:
        return int(self._fragments[-1])

    @property
    def fragments(self) -> Ints:
        return self._fragments

    def manifest(self) -> Mapping[str, Any]:
        files = zip(self._files.names, self._files.sizes, self._file_rows, strict=True)
        return {"format": self.FORMAT, "files": [list(file) for file in files]}

    def subset(self, manifest: Mapping[str, Any]) -> Ints:
        named = {name for name, *_ in manifest["files"]}
        files = np.array([name in named for name in self._files.names])
        return np.flatnonzero(files[self._file_of])

    def locate(self, index: int) -> str:
        file, row = self._in_file(index)
        return f"{self._files.path(file)}, row {row}"

    def row(self, index: int) -> dict[str, Any]:
        at = self._fragment_at(index)
        rows = self._rows(at)
        try:
            return rows.row(index - int(self._fragments[at]))
        except BadRow as bad:
            raise self._bad(index, bad) from None

    @property
    def reads_ahead(self) -> bool:
        """Whether `prepare` begins anything."""
        return self._files.filesystem is not None and self._files.remote.read_ahead

    def prepare(self, column: str | None, fragment: int, share: Share | None = None) -> None:
        """A hint that a fragment will be needed soon: its rows, the tokens of a column, or the piece of a share."""
        key = self._key(fragment, column, share)
        if not self.reads_ahead or cache().get(key) is not None:
            return
        place = self._place(fragment)
        extent = self._extent(*place) if share is None else None
        if extent is None:
            far_ahead().begin(key, partial(self._fill, column, fragment, share))
        elif cache().get(key := self._bytes_key(*place)) is None:
            far_ahead().begin(key, partial(self._bring, key, place[0], extent))

    def _fill(self, column: str | None, fragment: int, share: Share | None) -> None:
        """Bring into the cache what will be needed; run by another thread, for which nobody else does so."""
        del column, share  # a format that has more than rows brings that
        self._keep(self._key(fragment), self._load(fragment))

    def _bring(self, key: tuple[Any, ...], file: int, extent: tuple[int, int]) -> None:
        if cache().get(key) is None:  # it may have come since somebody looked
            self._keep(key, _Brought(self._ranges(file).read(*extent)))

    def _bytes(self, file: int, number: int, extent: tuple[int, int]) -> ArrowBuffer:
        """Those of a fragment, which may have been brought, or are read now."""
        key = self._bytes_key(file, number)
        brought: _Brought | None = self._awaited(key)
        if brought is None:
            return self._ranges(file).read(*extent)
        cache().forget(key)
        return brought.data

    def _bytes_key(self, file: int, number: int) -> tuple[Any, ...]:
        return (owner_of(self), "bytes", file, number)

    def _rows(self, fragment: int) -> Rows:
        key = self._key(fragment)
        return cache().get(key) or self._awaited(key) or self._keep(key, self._load(fragment))

    def _awaited(self, key: tuple[Any, ...]) -> Any:
        """What another thread has brought, or is about to."""
        if not self.reads_ahead:
            return None
        far_ahead().wait(key)
        return cache().get(key)

    def _key(self, fragment: int, column: str | None = None, share: Share | None = None) -> tuple[Any, ...]:
        """Where something of a fragment is in the cache."""
        named = () if column is None else (column,)
        return (owner_of(self), fragment, *named, *(() if share is None else ("piece", share.key)))

    def _fragment_at(self, index: int) -> int:
        return bisect_right(self._fragments.data, index) - 1

    def _in_file(self, index: int) -> tuple[int, int]:
        """The file of a row, and the row in it."""
        file = int(self._file_of[self._fragment_at(index)])
        return file, index - int(self._fragments[np.searchsorted(self._file_of, file)])

    def _place(self, fragment: int) -> tuple[int, int]:
        """The file of a fragment, and its number in it."""
        return int(self._file_of[fragment]), int(self._number_of[fragment])

    def _keep(self, key: tuple[Any, ...], decoded: V) -> V:
        cache().register(self)
        cache().put(key, decoded)
        return decoded

    def _handle(self, file: int) -> Any:
        return handles().make((owner_of(self), file), lambda: self._open(file))

    def _bad(self, index: int, why: BadRow) -> ValueError:
        return ValueError(f"{self.locate(index)}: {why}")

    @contextmanager
    def _blaming(self, file: int) -> Generator[None]:
        """Errors of reading a file name it."""
        try:
            yield
        except (FileNotFoundError, PermissionError, RemoteError, Explained):
            raise
        except _DAMAGE as error:
            raise ValueError(
                f"{self._files.path(file)} cannot be read as {self.FORMAT}: {error}. It may be half-written or of another "
                f"format: write it again, or leave it out."
            ) from error

    def _read_footers(self) -> list[Footer]:
        with ThreadPoolExecutor(_OPENING_THREADS) as pool:
            return list(pool.map(self._try_footer, range(len(self._files.names))))

    def _try_footer(self, file: int) -> Footer:
        with self._blaming(file):
            return self._footer(file)


def extent_of(places: Ints, number: int) -> tuple[int, int]:
    """Offset and length of the fragment ``number``, given where fragments begin and the last one ends."""
    start, stop = places[number : number + 2].tolist()
    return start, stop - start
