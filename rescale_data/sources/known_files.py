"""`KnownFiles`: the files of a source, the locations of their fragments, and the file of each row."""

from __future__ import annotations

import posixpath
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rescale_data.sources.files.bundle import Bundle
from rescale_data.sources.files.paths import Files
from rescale_data.sources.fragments import Fragments
from rescale_data.sources.index import listed_files
from rescale_data.state import Ints


@dataclass(frozen=True)
class KnownFiles:
    """The files of a source and the locations of their fragments. It pickles as the path of its index, if it has one.

    Args:
        files: The files.
        index: The locations of their fragments.
        bundle: The index on disk from which both are mapped; `None` if they are in memory.
    """

    files: Files
    index: Fragments
    bundle: Bundle | None = None

    @staticmethod
    def load(bundle: Bundle, files: Files) -> KnownFiles:
        """Return the files that an index lists, below the root of ``files``."""
        return KnownFiles(listed_files(bundle, files), Fragments.load(bundle), bundle)

    def __reduce__(self) -> tuple[Callable[..., KnownFiles], tuple[Any, ...]]:
        if self.bundle is None:
            return KnownFiles, (self.files, self.index)
        return KnownFiles.load, (self.bundle, self.files.with_files((), (), ()))

    @property
    def name(self) -> str:
        """Name of the source: the last part of the path of its root folder."""
        return self.files.root.rstrip("/").rpartition("/")[2] or self.files.root

    def manifest_entries(self) -> list[list[Any]]:
        """Return ``[name, bytes, rows]`` for each file, as in a manifest."""
        files = zip(self.files.names, map(int, self.files.sizes), self.index.file_row_counts, strict=True)
        return [list(file) for file in files]

    def file_named(self, name: str) -> int:
        """Return the number of a file, given its name below the root, its path, its URL, or the end of its path."""
        names, path_end = self.files.names, name.rpartition("://")[2]
        files: list[int] = []
        for end in (path_end, posixpath.normpath(path_end)):  # in a bucket, a//b is not a/b
            index = bisect_left(names, end)
            if index < len(names) and names[index] == end:
                return index
            files = files or [file for file in range(len(names)) if f"/{self.files.path(file)}".endswith(f"/{end}")]
        if len(files) != 1:
            raise ValueError(f"{len(files)} of the files of {self.name} are named {name!r}: give the path of one.")
        return files[0]

    def rows_of(self, file: int) -> range:
        """Return the range of the source's rows that are in a file, given the number of the file."""
        return range(self.index.first_row(file), self.index.first_row(file + 1))

    def kept_rows(self, file: int) -> Ints:
        """Return ``int64[n]``, the numbers within a file of its rows that the filter kept."""
        index, row_numbers = self.index, [np.zeros(0, dtype=np.int64)]
        for fragment in range(*index.files[file : file + 2].tolist()):
            row_numbers.append(index.location("base", fragment) + np.asarray(index.chosen_of(fragment), dtype=np.int64))
        return np.concatenate(row_numbers)

    def fragment_at(self, row: int) -> int:
        """Return the number of the fragment that contains a row."""
        return bisect_right(self.index.starts.data, row) - 1

    def file_and_row(self, row: int) -> tuple[int, int]:
        """Return the number of the file that holds a row, and the row's number in that file."""
        fragment = self.fragment_at(row)
        file, chosen = self.index.file_of(fragment), self.index.chosen_of(fragment)
        if chosen is None:
            return file, row - self.index.first_row(file)
        return file, self.index.location("base", fragment) + int(chosen[row - self.index.starts[fragment]])
