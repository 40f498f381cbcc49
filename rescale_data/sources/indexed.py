"""`IndexedSource`: base class for formats without a footer; each file is scanned once, for all processes and runs."""

from __future__ import annotations

import logging
import os
import posixpath
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import numpy.typing as npt

from rescale_data.errors import checks_argument_types
from rescale_data.sources.decoded.columns import chosen_columns
from rescale_data.sources.file_source import FileSource, OpenFile
from rescale_data.sources.files.blocks import BlockRangeReader, codec_of, decompress_chunks, write_blocks
from rescale_data.sources.files.bundle import Bundle
from rescale_data.sources.files.once import open_or_create
from rescale_data.sources.files.ranges import RangeReader
from rescale_data.sources.fragments import Footer
from rescale_data.sources.index import ARRAY_PREFIX, make_part

FRAGMENT_BYTES = 2**22
_log = logging.getLogger("rescale_data")


@checks_argument_types
@dataclass(eq=False, repr=False, kw_only=True)
class IndexedSource(FileSource):
    """Base class of sources whose files are scanned once.

    A subclass for each format scans files, and cuts fragments into rows.
    """

    FILES_A_PART: ClassVar[int] = 1
    _must_index = True

    columns: Sequence[str] | None = None
    transcode: bool = True

    def __post_init__(self) -> None:
        self.columns = chosen_columns(self.columns)
        super().__post_init__()

    @abstractmethod
    def _scan_file(self, range_reader: RangeReader) -> Footer:
        """Find the rows of a file by reading all of it; raise ``ValueError`` if the file is damaged."""

    def _open_index(self) -> Bundle:
        files = self._files
        compressed_name = next((name for name in files.names if codec_of(name) is not None), None)
        if compressed_name is not None and not self.transcode:
            raise ValueError(
                f"{posixpath.join(files.root, compressed_name)} is compressed as a whole: no row can be read without all "
                f"before it. Allow transcode=True, which writes a copy in blocks once beside the index, or decompress it."
            )
        return super()._open_index()

    def _footer(self, file: int) -> Footer:
        return self._scan_file(self._open_range_reader(file, self._folder.part_path(self._files.select([file]))))

    def _open(self, file: int) -> OpenFile:
        path = self._folder.part_of_file(cast(Bundle, self._index_bundle), file)
        index_part = make_part(path, [file], self._read_footers)  # again, if it was deleted or damaged
        return OpenFile(self._open_range_reader(file, path), cast(Bundle, index_part))

    def _array(self, file: int, name: str) -> npt.NDArray[Any]:
        """Return an array that was stored when a file was scanned, such as ``starts``, the bytes at which its rows begin."""
        return self._file_handle(file).kept.array(ARRAY_PREFIX + name)

    def _open_range_reader(self, file: int, part_path: str) -> RangeReader:
        """Return an object that reads byte ranges of a file.

        A compressed file is first copied, if there is no copy yet, into blocks for random access.
        """
        codec = codec_of(self._files.names[file])
        if codec is None:
            return self._files.reader_of(file)
        copy_path = os.path.splitext(part_path)[0] + ".rdblocks"
        open_copy = partial(BlockRangeReader, store=self._files.store)
        copy = open_or_create(copy_path, open_copy, lambda temp: self._write_copy(file, codec, copy_path, temp))
        return cast(RangeReader, copy)

    def _write_copy(self, file: int, codec: str, copy_path: str, temporary_path: str) -> None:
        if not self._files.sizes[file]:
            raise ValueError("it has no bytes, not even those of a compressed file that holds nothing")
        _log.warning(
            "%s (%d bytes) is compressed as a whole and cannot be read at random: a copy in blocks of about the same size is "
            "written once, to %s.", self._files.path(file), self._files.sizes[file], copy_path,
        )  # fmt: skip
        with self._files.open(file) as stream:
            write_blocks(decompress_chunks(stream, codec), temporary_path)
