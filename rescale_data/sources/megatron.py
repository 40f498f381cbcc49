"""`MegatronSource`: documents of Megatron-LM's indexed datasets: tokens in a ``.bin`` file, their places in an ``.idx`` file.

Layout of the index: ``megatron/core/datasets/indexed_dataset.py`` of Megatron-LM.

    "MMIDIDX\\0\\0" | int64 1 | uint8 dtype | int64 S sequences | int64 D + 1 documents
    int32[S] lengths | int64[S] places in the .bin | int64[D + 1] first sequence of each document | ...
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.file_source import FileSource, OpenFile
from rescale_data.sources.files.ranges import ArrowBuffer
from rescale_data.sources.fragments import Footer, contiguous_footer
from rescale_data.sources.source import RowRanges, Tokens, TokenSource
from rescale_data.state import Ints

TOKEN_COLUMN = "tokens"
FRAGMENT_BYTES = 2**24
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class MegatronSource(FileSource, TokenSource):
    """Documents of Megatron-LM's ``.bin`` and ``.idx`` files, memory-mapped: ``{"tokens": array}`` in the stored dtype.

    Files of Megatron-LM usually hold an end-of-document token after each document: then pack with ``eos_id=None``.

    Args:
        paths: A glob of ``.bin`` files, a folder, a file, or a list; local or any fsspec URL. Each has its ``.idx`` beside it.
        cache_bytes, storage_options, remote, index_dir, cache_dir, cache_dir_bytes: See `ParquetSource`.

    Raises:
        FileNotFoundError: ``paths`` stand for no file, or an ``.idx`` is missing.
        ValueError: A file is damaged, two files differ in their dtype, or there is no row. The message names the file.

    Example:
        >>> import struct
        >>> import tempfile
        >>> from pathlib import Path
        >>> import rescale_data as rd
        >>> with tempfile.TemporaryDirectory() as folder:  # two documents of uint16, [5, 6, 7] and [8]
        ...     index = b"MMIDIDX" + bytes(2) + struct.pack("<qBqq2i2q3q", 1, 8, 2, 3, 3, 1, 0, 6, 0, 1, 2)
        ...     _ = Path(folder, "docs.idx").write_bytes(index)
        ...     _ = Path(folder, "docs.bin").write_bytes(struct.pack("<4H", 5, 6, 7, 8))
        ...     rd.MegatronSource(folder).row(0)["tokens"].tolist()
        [5, 6, 7]
    """

    FORMAT: ClassVar[str] = "megatron"
    SUFFIXES: ClassVar[tuple[str, ...]] = (".bin",)

    def _check_files(self) -> None:
        dtypes = [kind["dtype"] for kind in self._index.kinds]
        if len(dtypes) > 1:
            raise ValueError(
                f"The files differ in their dtype: {dtypes[0]} in {self._files.path(0)}, {dtypes[1]} in "
                f"{self._files.path(int(np.argmax(self._index.kind_of)))}. Give a source for each kind of file."
            )
        super()._check_files()

    def token_dtype(self, column: str) -> np.dtype[Any]:
        if column != TOKEN_COLUMN:
            raise ValueError(f"{self.name} has no column {column!r}. A MegatronSource has {TOKEN_COLUMN!r}.")
        return np.dtype(self._index.kinds[0]["dtype"])

    def num_tokens(self, column: str | None, fragments: Ints | None = None) -> int:
        nbytes, dtype = self._index.locations["length"], self.token_dtype(column or TOKEN_COLUMN)
        return int((nbytes if fragments is None else nbytes[fragments]).sum()) // dtype.itemsize

    def tokens(self, column: str, fragment: int) -> Tokens:
        key = self._cache_key(fragment)
        return cache().get(key) or self._read(key, fragment, self._load, cached=self._may_stay_cached(fragment))

    def prefetch(self, column: str | None, fragment: int, share: RowRanges | None = None) -> None:
        super().prefetch(None, fragment, share)

    def _footer(self, file: int) -> Footer:
        index = _DocumentIndex(self._footer_bytes(file, read_soon=False))
        starts = index.document_offsets(0, index.num_documents)
        if int(starts[-1]) != self._files.sizes[file]:
            raise ValueError(f"its index speaks of {int(starts[-1])} bytes of tokens, it has {self._files.sizes[file]}")
        if index.dtype.kind not in "iu":
            raise ValueError(f"it holds numbers of type {index.dtype}, not tokens")
        return contiguous_footer(starts, FRAGMENT_BYTES, {"dtype": index.dtype.str})

    def _open(self, file: int) -> OpenFile:
        return OpenFile(self._files.reader_of(file), _DocumentIndex(self._footer_bytes(file)))

    def _read_footer_bytes(self, file: int) -> ArrowBuffer:
        """Return the content of the ``.idx`` file that belongs to a ``.bin`` file."""
        path = self._files.path(file).removesuffix(".bin") + ".idx"
        try:
            ranges = self._files.other_file_reader(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self._files.path(file)} has no index: there is no {path}.") from error
        return ranges.read(0, ranges.size)

    def _rows_from_bytes(self, data: ArrowBuffer, fragment: int) -> _Documents:
        rows, index = self._index.rows_in_file(fragment), self._file_handle(self._index.file_of(fragment)).kept
        starts = index.document_offsets(rows.start, rows.stop)
        return _Documents(np.frombuffer(data, dtype=index.dtype), (starts - starts[0]) // index.dtype.itemsize)


class _Documents(Tokens):
    """The documents of one fragment."""

    def row(self, index: int) -> dict[str, Any]:
        return {TOKEN_COLUMN: self.copy_of(index)}


class _DocumentIndex:
    """An open ``.idx`` file; ``ValueError`` if it is damaged, or if documents are not adjacent in the ``.bin`` file."""

    def __init__(self, data: ArrowBuffer) -> None:
        raw = np.frombuffer(data, dtype=np.uint8)
        if raw[:9].tobytes() != _MAGIC or len(raw) < _HEADER_BYTES:
            raise ValueError("its .idx is not one of Megatron's, or ends in its header")
        dtype_code = int(raw[17])
        num_sequences, documents = (int.from_bytes(raw[offset : offset + 8].tobytes(), "little") for offset in (18, 26))
        ends = np.cumsum([_HEADER_BYTES, 4 * num_sequences, 8 * num_sequences, 8 * documents]).tolist()
        if dtype_code not in _DTYPES or documents < 1 or ends[-1] > len(raw):
            raise ValueError(f"its .idx ends at byte {len(raw)} of {ends[-1]}, or has an unknown dtype ({dtype_code})")
        self.dtype = np.dtype(_DTYPES[dtype_code])
        self.num_documents = documents - 1
        self._checked_ranges: set[tuple[int, int]] = set()  # ranges of documents that were checked: they lie end to end
        self._lengths = raw[ends[0] : ends[1]].view("<i4")
        self._sequence_offsets = raw[ends[1] : ends[2]].view("<i8")
        self._first_sequences = raw[ends[2] : ends[3]].view("<i8")

    def document_offsets(self, first_document: int, stop_document: int) -> Ints:
        """Return the offsets in the ``.bin`` at which documents ``start .. stop - 1`` begin, and at which the last one ends."""
        sequences = np.array(self._first_sequences[first_document : stop_document + 1], dtype=np.int64)
        first_sequence, stop_sequence = int(sequences[0]), int(sequences[-1])
        sequence_starts = np.zeros(max(0, stop_sequence - first_sequence) + 1, dtype=np.int64)
        if stop_sequence > first_sequence:
            sequence_starts[:-1] = self._sequence_offsets[first_sequence:stop_sequence]
            sequence_starts[-1] = sequence_starts[-2] + int(self._lengths[stop_sequence - 1]) * self.dtype.itemsize
        if (first_document, stop_document) not in self._checked_ranges:
            nbytes = self._lengths[first_sequence:stop_sequence].astype(np.int64) * self.dtype.itemsize
            if (np.diff(sequence_starts) != nbytes).any() or (np.diff(sequences) < 0).any():
                raise ValueError("its sequences do not lie end to end in the order of the index; write them anew")
            self._checked_ranges.add((first_document, stop_document))
        return sequence_starts[sequences - first_sequence]
