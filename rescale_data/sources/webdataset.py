"""`WebDatasetSource`: rows of tar files; members with the same key (file name up to its first dot) make one row."""

from __future__ import annotations

import io
import logging
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rescale_data.sources.file_source import FragmentRows
from rescale_data.sources.files.blocks import CODECS
from rescale_data.sources.files.bundle import string_arrays
from rescale_data.sources.files.ranges import ArrowBuffer, RangeReader, RangesFile
from rescale_data.sources.fragments import Footer, contiguous_footer, cumulative_sums
from rescale_data.sources.indexed import FRAGMENT_BYTES, IndexedSource
from rescale_data.sources.source import BadRow
from rescale_data.state import Ints

KEY_COLUMN = "__key__"
_MEMBER_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_READ_BYTES = 2**22
_log = logging.getLogger("rescale_data")


class WebDatasetSource(IndexedSource):
    """Rows of tar files in the layout of WebDataset: ``{"__key__": key, extension: bytes, ...}``.

    Consecutive members whose names are the same up to the first dot make one row. The rest of the name, in lower case, is the
    column. One of the processes scans each file, once, and an index beside the files keeps the places of its members.

    Args:
        paths: A glob, a folder (``*.tar`` below it, also with ``.gz``, ``.zst`` or ``.bz2``), a file, or a list; local or
            any fsspec URL.
        columns: Columns to read; default: all columns that occur in any row. A row without one of them is an error when it
            is read.
        cache_bytes, storage_options, remote, cache_dir, cache_dir_bytes: See `ParquetSource`.
        index_dir, transcode: See `JsonlSource`.

    Raises:
        FileNotFoundError: ``paths`` stand for no file.
        ValueError: A file is damaged, no file has one of ``columns``, or there is no row.

    Example:
        >>> import tarfile
        >>> import tempfile
        >>> from pathlib import Path
        >>> import rescale_data as rd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "cat.txt").write_text("meow")
        ...     with tarfile.open(f"{folder}/rows.tar", "w") as tar:
        ...         tar.add(f"{folder}/cat.txt", "cat.txt")
        ...     rd.WebDatasetSource(folder).row(0)
        {'__key__': 'cat', 'txt': b'meow'}
    """

    FORMAT: ClassVar[str] = "tar"
    SUFFIXES: ClassVar[tuple[str, ...]] = tuple(f".tar{codec_suffix}" for codec_suffix in ("", *CODECS))

    def _check_files(self) -> None:
        names = list(dict.fromkeys(name for kind in self._index.kinds for name in kind["counts"]))
        self.columns = self.columns or names
        if missing := [name for name in self.columns if name not in names]:
            raise ValueError(f"The files below {self._files.root} have no column {missing[0]!r}. They have {names}.")
        if KEY_COLUMN in self.columns:
            raise ValueError(
                f"The files below {self._files.root} have members with the extension {KEY_COLUMN!r}, which is the name of a "
                f"sample's key. Give columns= without it: {[name for name in self.columns if name != KEY_COLUMN]}."
            )
        super()._check_files()
        self._warn_of_missing_members()

    def _warn_of_missing_members(self) -> None:
        for file, num_rows in enumerate(self._index.file_row_counts):
            counts, num_links = (self._index.facts_of(file)[name] for name in ("counts", "links"))
            if num_links:
                _log.warning(
                    "%s: %d members are links and are left out. Write it with tar --dereference --hard-dereference.",
                    self._files.path(file), num_links,
                )  # fmt: skip
            num_missing = {name: num_rows - n for name in self.columns or () if (n := counts.get(name, 0)) < num_rows}
            if num_missing:
                _log.warning(
                    "%s: of %d rows, %s have no such member. They are errors when they are read: give columns=[...] that all "
                    "rows have, or rd.Reader(..., on_error='skip').", self._files.path(file), num_rows, num_missing,
                )  # fmt: skip

    def _scan_file(self, range_reader: RangeReader) -> Footer:
        return _group_members(list(read_tar_members(range_reader)))

    def _rows_from_bytes(self, data: ArrowBuffer, fragment: int) -> FragmentRows:
        file, rows = self._index.file_of(fragment), self._index.rows_in_file(fragment)
        names = list(self._index.facts_of(file)["counts"])
        bounds, key_ends = (self._array(file, name)[rows.start : rows.stop + 1] for name in ("first", "keys.ends"))
        keys = self._array(file, "keys.text")[key_ends[0] : key_ends[-1]].tobytes()
        members = [self._array(file, name)[bounds[0] : bounds[-1]] for name in ("column", "offset", "size")]
        table = np.stack(members, dtype=np.int64)
        table[1] -= self._index.location("offset", fragment)
        return _Samples(data, keys, key_ends - key_ends[0], bounds - bounds[0], table, names, self.columns or ())


@dataclass(frozen=True, eq=False)
class _Samples:
    """The samples of one fragment, each copied when its row is read.

    Args:
        data: The bytes of the fragment.
        keys: The keys of all samples, joined.
        key_ends: The byte at which each key begins in ``keys``, and the last one ends.
        member_bounds: The first member of each sample, and the number of members.
        members: ``int64[3, M]``: for each member the index of its name in ``names``, its offset in ``data``, its size.
        names: Extensions of the members.
        columns: Extensions to read.
    """

    data: ArrowBuffer
    keys: bytes
    key_ends: Ints
    member_bounds: Ints
    members: Ints
    names: Sequence[str]
    columns: Sequence[str]

    @property
    def nbytes(self) -> int:
        return self.data.size + len(self.keys) + self.members.nbytes

    def row(self, index: int) -> dict[str, Any]:
        key = self.keys[slice(*self.key_ends[index : index + 2].tolist())].decode()
        members = self.members[:, slice(*self.member_bounds[index : index + 2].tolist())].T.tolist()
        ranges = {self.names[column]: (offset, size) for column, offset, size in members}
        if missing := [name for name in self.columns if name not in ranges]:
            raise BadRow(f"the sample {key!r} has no member {missing}; it has {list(ranges)}. Add it, or leave it out.")
        return {KEY_COLUMN: key, **{name: self.data.slice(*ranges[name]).to_pybytes() for name in self.columns}}


class TarMember(NamedTuple):
    """A file or a link in a tar, with the offsets of its header and of its data."""

    key: str
    column: str
    header_offset: int
    offset: int
    size: int
    is_link: bool


def read_tar_members(ranges: RangeReader) -> Iterator[TarMember]:
    """Yield the files and links in a tar that belong to samples.

    Raises:
        ValueError: The tar is cut off, or there are bytes after its end mark.
    """
    try:
        with tarfile.open(fileobj=cast(Any, io.BufferedReader(RangesFile(ranges), _READ_BYTES)), mode="r:") as tar:
            for member in tar:
                name_match = _MEMBER_NAME.match(member.name)
                if member.issparse():
                    raise ValueError(f"its member {member.name!r} is stored with holes; write it without --sparse")
                if not member.isdir() and name_match and not member.name.rpartition("/")[2].startswith("__"):
                    key, column, is_link = name_match[1], name_match[2].lower(), not member.isreg()
                    yield TarMember(key, column, member.offset, member.offset_data, member.size, is_link)
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # else tarfile keeps all members
            end_offset = tar.offset
    except tarfile.TarError as error:
        raise ValueError(str(error)) from error
    if ranges.read(end_offset, 512).to_pybytes() != bytes(512):
        raise ValueError(f"it ends at byte {ranges.size} without the mark of its end")
    for offset in range(end_offset, ranges.size, _READ_BYTES):
        if ranges.read(offset, _READ_BYTES).to_pybytes().strip(b"\0"):
            raise ValueError(
                f"there is more behind its end at byte {end_offset}, as where tars were joined by cat: join them by tar "
                f"--concatenate, or give each as a file"
            )


def _group_members(members: Sequence[TarMember]) -> Footer:
    files = [member for member in members if not member.is_link]
    samples = [list(sample) for _, sample in groupby(files, attrgetter("key"))]
    for sample in samples:
        column, count = Counter(member.column for member in sample).most_common(1)[0]
        if count > 1:
            raise ValueError(f"the sample {sample[0].key!r} has two members {column!r}")
    counts = Counter(member.column for member in files)
    column_numbers = {column: number for number, column in enumerate(counts)}
    arrays: dict[str, npt.NDArray[Any]] = {
        "first": cumulative_sums(np.array([len(sample) for sample in samples])),
        "column": np.array([column_numbers[member.column] for member in files], dtype=np.int32),
        "offset": np.array([member.offset for member in files], dtype=np.int64),
        "size": np.array([member.size for member in files], dtype=np.int64),
        **string_arrays("keys", [sample[0].key for sample in samples]),
    }
    starts = [sample[0].header_offset for sample in samples] + [files[-1].offset + files[-1].size if files else 0]
    facts = {"counts": counts, "links": len(members) - len(files)}
    return contiguous_footer(np.array(starts, dtype=np.int64), FRAGMENT_BYTES, facts, arrays)
