"""`IndexedSource`: files that hold no index of their own; one is written once, for all processes and runs."""

from __future__ import annotations

import hashlib
import logging
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rescale_data.errors import checks_kinds
from rescale_data.sources.decoded.cache import DEFAULT_BYTES
from rescale_data.sources.decoded.columns import chosen_columns
from rescale_data.sources.file_source import FileSource
from rescale_data.sources.files.blocks import BlockRanges, BlockTable, codec_of, decompressed, write_blocks
from rescale_data.sources.files.bundle import Bundle, write_bundle
from rescale_data.sources.files.once import make_once, write_aside
from rescale_data.sources.files.paths import Paths
from rescale_data.sources.files.ranges import Ranges
from rescale_data.sources.files.remote import Remote
from rescale_data.sources.fragments import Footer, cut, spans
from rescale_data.sources.known_files import CACHE_DIR_BYTES, Explained
from rescale_data.state import Ints

FRAGMENT_ROWS = 1024
FRAGMENT_BYTES = 2**22
_VERSION = 2
_log = logging.getLogger("rescale_data")


@dataclass(frozen=True)
class Scan:
    """The rows of one file, as its index has them.

    Args:
        starts: ``int64[R + 1]``, where each row begins among the bytes of the file, and where the last one ends.
        arrays: Whatever else the format wants to know.
        facts: JSON values.
    """

    starts: Ints
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Opened:
    ranges: Ranges
    index: Bundle


class IndexedSource(FileSource):
    """Rows of files that are scanned once. A format says how to scan a file and how to cut a fragment into rows."""

    @checks_kinds
    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        remote: Remote | None = None,
        index_dir: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_bytes: int = CACHE_DIR_BYTES,
        transcode: bool = True,
    ) -> None:
        self.columns, self._transcode = chosen_columns(columns), transcode
        super().__init__(
            paths,
            cache_bytes=cache_bytes,
            storage_options=storage_options,
            remote=remote,
            index_dir=index_dir,
            cache_dir=cache_dir,
            cache_dir_bytes=cache_dir_bytes,
        )

    @abstractmethod
    def _scan(self, ranges: Ranges) -> Scan:
        """Read a file from its beginning to its end; ``ValueError`` where it is not whole."""

    def _indexed(self, file: int) -> tuple[str, str | None]:
        """Return the paths of the index of a file and of its copy, made where they are missing."""
        path = self._index_path(file)
        copy = self._copy_path(path, file)
        facts = {
            "version": _VERSION,
            "format": self.FORMAT,
            "size": int(self._files.sizes[file]),
        }
        try:
            make_once(
                path,
                lambda: self._is_good(file, path, copy, facts),
                lambda aside: self._write_index(file, copy, aside, facts),
            )
        except PermissionError as error:
            raise PermissionError(
                f"The index of {self._files.path(file)} cannot be written beside it: {error}. Give index_dir=, a folder that "
                f"all ranks share and may write to."
            ) from error
        return path, copy

    def _footer(self, file: int) -> Footer:
        index = Bundle(self._indexed(file)[0])
        cuts = np.array(index.array("cuts"))
        places = np.array(index.array("starts")[cuts])
        return Footer(np.diff(cuts), *spans(places), index.facts["own"])

    def _open(self, file: int) -> Opened:
        path, copy = self._indexed(file)
        index = Bundle(path)
        return Opened(self._opened(file, copy, index), index)

    def _extent(self, fragment: int) -> tuple[int, int]:
        return self._span(fragment)

    def _part(self, fragment: int) -> tuple[Opened, slice, Ints]:
        """An open file, the rows in it that make a fragment, and where they begin, with the end of the last."""
        file = self._index.file_of(fragment)
        opened: Opened = self._handle(file)
        first, stop = (self._index.starts[fragment : fragment + 2] - self._index.first_row(file)).tolist()
        return opened, slice(first, stop), np.array(opened.index.array("starts")[first : stop + 1])

    def _opened(self, file: int, copy: str | None, index: Bundle) -> Ranges:
        if copy is None:
            return self._files.ranges(file)
        return BlockRanges(copy, BlockTable(np.array(index.array("raw")), np.array(index.array("stored"))))

    def _index_path(self, file: int) -> str:
        if self._index_dir is not None:
            root = hashlib.blake2b(self._files.root.encode(), digest_size=4).hexdigest()
            path = os.path.join(self._index_dir, root, f"{self._files.names[file]}.rdindex")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return path
        if self._files.filesystem is not None:
            raise Explained(
                f"{self._files.path(file)}: files of this format are scanned once, and their index must lie where all ranks "
                f"can read it. Give index_dir=, a folder that they share."
            )
        folder, name = os.path.split(self._files.path(file))
        return os.path.join(folder, f".{name}.rdindex")  # hidden, so that no folder is found to hold it

    def _copy_path(self, index: str, file: int) -> str | None:
        if codec_of(self._files.names[file]) is None:
            return None
        if not self._transcode:
            raise Explained(
                f"{self._files.path(file)} is compressed as a whole, so that none of its rows can be read without all before "
                f"it. Allow transcode=True, which writes a copy in blocks once beside the index, or decompress it."
            )
        return index.removesuffix(".rdindex") + ".rdblocks"

    def _is_good(self, file: int, path: str, copy: str | None, facts: Mapping[str, Any]) -> bool:
        """True if the index is of the file as it is now, and the copy that it speaks of is there."""
        try:
            known = Bundle(path).facts
            whole = copy is None or os.path.getsize(copy) == known["copy"]
        except (OSError, ValueError, KeyError):
            return False
        if not whole or any(known.get(name) != value for name, value in facts.items()):
            return False
        return known["stamp"] == self._files.stamps[file] or self._files.is_copy(file, known["probe"])

    def _write_index(self, file: int, copy: str | None, aside: str, facts: Mapping[str, Any]) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {}
        facts = {**facts, "stamp": self._files.stamps[file], "probe": self._files.probe(file)}
        if copy is None:
            ranges = self._files.ranges(file)
        else:
            table = self._write_copy(file, copy)
            arrays |= {"raw": table.raw, "stored": table.stored}
            facts["copy"] = int(table.stored[-1])
            ranges = BlockRanges(copy, table)
        scan = self._scan(ranges)
        cuts = cut(np.arange(len(scan.starts)), scan.starts, FRAGMENT_ROWS, FRAGMENT_BYTES)
        arrays |= {"starts": scan.starts, "cuts": cuts, **scan.arrays}
        write_bundle(aside, {**facts, "own": dict(scan.facts)}, arrays)

    def _write_copy(self, file: int, copy: str) -> BlockTable:
        if not self._files.sizes[file]:
            raise ValueError("it has no bytes, not even those of a compressed file that holds nothing")
        _log.warning(
            "%s (%d bytes) is compressed as a whole and cannot be read at random: a copy in blocks of about the same size is "
            "written once, to %s.", self._files.path(file), self._files.sizes[file], copy,
        )  # fmt: skip
        tables: list[BlockTable] = []
        codec = codec_of(self._files.names[file])

        def write(aside: str) -> None:
            with self._files.open(file) as stream:
                tables.append(write_blocks(decompressed(stream, str(codec)), aside))

        write_aside(copy, write)
        return tables[0]
