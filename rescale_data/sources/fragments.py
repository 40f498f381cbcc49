"""`Fragments`: the locations of all fragments in a source's files, as arrays that can be mapped from one index file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rescale_data.sources.files.bundle import Bundle
from rescale_data.state import Ints

NamedArrays = Mapping[str, npt.NDArray[Any]]

MAX_FRAGMENT_ROWS = 1024
"""Rows of a fragment at most, in formats whose files have no fragments of their own size."""

_PLACE = "place."
_ARRAYS = ("starts", "nbytes", "files", "kind_of", "chosen", "unfiltered_rows")


@dataclass(frozen=True)
class Footer:
    """The fragments of one file, known before any of its data is read.

    Args:
        row_counts: ``int64[F]``, the number of rows of each fragment.
        nbytes: ``int64[F]``, the bytes that each fragment takes in memory, estimated.
        locations: Arrays ``int64[F]`` by name, from which the format finds a fragment in the file.
        format_facts: Facts of the file that the format needs, as JSON values. Equal facts of many files are kept once.
        chosen: ``uint32[sum of rows]``, for each row that a filter kept its number in the fragment; `None` without a filter.
        arrays: Other arrays that the format keeps of the file, in a part of the index that holds this file alone.
        unfiltered_rows: The number of rows of the file, the ones that a filter left out included; unused without a filter.
    """

    row_counts: Ints
    nbytes: Ints
    locations: Mapping[str, Ints] = field(default_factory=dict[str, Ints])
    format_facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chosen: npt.NDArray[np.uint32] | None = None
    arrays: NamedArrays = field(default_factory=dict[str, npt.NDArray[Any]])
    unfiltered_rows: int = 0


@dataclass(frozen=True)
class Fragments:
    """The fragments of all files of a source, in memory or memory-mapped.

    Args:
        starts: ``int64[F + 1]``, the first row of each fragment, and the number of rows.
        nbytes: ``int64[F]``, the bytes that each fragment takes in memory, estimated.
        locations: Arrays ``int64[F]`` by name, see `Footer`.
        files: ``int64[files + 1]``, the first fragment of each file, and the number of fragments.
        kinds: The different ``Footer.format_facts`` of the files, each once.
        kind_of: ``int32[files]``, the index of each file's kind in ``kinds``.
        chosen: See `Footer`.
        unfiltered_rows: ``int64[files]``, see `Footer`; `None` without a filter.
    """

    starts: Ints
    nbytes: Ints
    locations: Mapping[str, Ints]
    files: Ints
    kinds: Sequence[Mapping[str, Any]]
    kind_of: npt.NDArray[np.int32]
    chosen: npt.NDArray[np.uint32] | None = None
    unfiltered_rows: Ints | None = None

    def __len__(self) -> int:
        return len(self.nbytes)

    def file_of(self, fragment: int) -> int:
        return bisect_right(self.files.data, fragment) - 1

    def location(self, name: str, fragment: int) -> int:
        return int(self.locations[name][fragment])

    def facts_of(self, file: int) -> Mapping[str, Any]:
        return self.kinds[int(self.kind_of[file])]

    def first_row(self, file: int) -> int:
        return int(self.starts[self.files[file]])

    def rows_in_file(self, fragment: int) -> slice:
        """Return the rows of a fragment, as numbers within its file."""
        return slice(*(self.starts[fragment : fragment + 2] - self.first_row(self.file_of(fragment))).tolist())

    def rows_of(self, file: int) -> range:
        """Return the range of the source's rows that are in a file, given the number of the file."""
        return range(self.first_row(file), self.first_row(file + 1))

    def kept_rows(self, file: int) -> Ints:
        """Return ``int64[n]``, the numbers within a file of its rows that the filter kept."""
        fragments = range(*self.files[file : file + 2].tolist())
        kept = [self.location("base", i) + np.asarray(self.chosen_of(i), dtype=np.int64) for i in fragments]
        return np.concatenate([np.zeros(0, dtype=np.int64), *kept])

    def fragment_at(self, row: int) -> int:
        """Return the number of the fragment that contains a row."""
        return bisect_right(self.starts.data, row) - 1

    def file_and_row(self, row: int) -> tuple[int, int]:
        """Return the number of the file that holds a row, and the row's number in that file."""
        fragment = self.fragment_at(row)
        file, chosen = self.file_of(fragment), self.chosen_of(fragment)
        if chosen is None:
            return file, row - self.first_row(file)
        return file, self.location("base", fragment) + int(chosen[row - self.starts[fragment]])

    @property
    def file_row_counts(self) -> list[int]:
        return np.diff(self.starts[self.files]).tolist()

    def chosen_of(self, fragment: int) -> npt.NDArray[np.uint32] | None:
        return None if self.chosen is None else self.chosen[self.starts[fragment] : self.starts[fragment + 1]]

    def footer(self, file: int) -> Footer:
        """Return the fragments of one file as a `Footer`."""
        fragment_range = slice(*self.files[file : file + 2].tolist())
        row_range = slice(*self.starts[[fragment_range.start, fragment_range.stop]].tolist())
        return Footer(
            np.diff(self.starts[fragment_range.start : fragment_range.stop + 1]),
            self.nbytes[fragment_range],
            {name: values[fragment_range] for name, values in self.locations.items()},
            self.facts_of(file),
            None if self.chosen is None else self.chosen[row_range],
            unfiltered_rows=0 if self.unfiltered_rows is None else int(self.unfiltered_rows[file]),
        )

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays of the fragments, by name, as an index stores them; `load` reads them back."""
        arrays = {name: values for name in _ARRAYS if (values := getattr(self, name)) is not None}
        return {**arrays, **{_PLACE + name: values for name, values in self.locations.items()}}

    @staticmethod
    def load(bundle: Bundle, *, copy: bool = False) -> Fragments:
        """Return the fragments that an index stores, as views of the mapped file or as copies."""
        names = [name for name in bundle.names if name in _ARRAYS or name.startswith(_PLACE)]
        arrays = {name: np.array(bundle.array(name)) if copy else bundle.array(name) for name in names}
        locations = {name.removeprefix(_PLACE): arrays.pop(name) for name in names if name.startswith(_PLACE)}
        return Fragments(**arrays, locations=locations, kinds=bundle.json_metadata["kinds"])


def join_footers(footers: Sequence[Footer]) -> Fragments:
    """Join the fragments of several files, in the order of the files."""
    kinds: dict[str, tuple[int, Mapping[str, Any]]] = {}  # the index of each kind and its facts, by their text
    kind_of = [kinds.setdefault(repr(facts), (len(kinds), facts))[0] for facts in (f.format_facts for f in footers)]
    chosen = [footer.chosen for footer in footers if footer.chosen is not None]
    return Fragments(
        cumulative_sums(_joined([footer.row_counts for footer in footers])),
        _joined([footer.nbytes for footer in footers]),
        {name: _joined([footer.locations[name] for footer in footers]) for name in footers[0].locations},
        cumulative_sums(np.array([len(footer.row_counts) for footer in footers], dtype=np.int64)),
        [facts for _, facts in kinds.values()],
        np.array(kind_of, dtype=np.int32),
        np.concatenate(chosen) if chosen else None,
        np.array([footer.unfiltered_rows for footer in footers], dtype=np.int64) if chosen else None,
    )


def contiguous_footer(
    starts: Ints, max_bytes: int, facts: Mapping[str, Any], arrays: NamedArrays | None = None
) -> Footer:
    """Return the footer of a file whose rows lie end to end; each fragment has as many rows as the limits allow.

    Args:
        starts: ``int64[R + 1]``, the byte at which each row begins, and the byte at which the last one ends.
        max_bytes: Bytes of a fragment at most, unless its only row has more.
        facts: `Footer.format_facts`.
        arrays: `Footer.arrays`.
    """
    cuts = group_pieces(np.arange(len(starts)), starts, MAX_FRAGMENT_ROWS, max_bytes)
    bounds = starts[cuts]
    lengths = np.diff(bounds)
    return Footer(np.diff(cuts), lengths, {"offset": bounds[:-1], "length": lengths}, facts, arrays=arrays or {})


def group_pieces(cumulative_rows: Ints, nbytes: Ints, max_rows: int, max_bytes: int, ends: Ints | None = None) -> Ints:
    """Group consecutive pieces into fragments, each with as many pieces as the limits allow, at least one.

    Return the first piece of each fragment, and the number of pieces.

    Args:
        cumulative_rows: ``int64[P + 1]``, the number of rows before each piece, and of all pieces.
        nbytes: ``int64[P + 1]``, the number of bytes before each piece, and of all pieces.
        max_rows: Rows of a fragment at most, unless its only piece has more.
        max_bytes: Bytes of a fragment at most, unless its only piece has more.
        ends: Pieces at which a fragment begins in any case, ascending.
    """
    num_pieces = len(cumulative_rows) - 1
    stops, cuts = np.append([] if ends is None else ends, num_pieces).astype(np.int64), [0]
    while (start := cuts[-1]) < num_pieces:
        row_stop = np.searchsorted(cumulative_rows, cumulative_rows[start] + max_rows, side="right") - 1
        byte_stop = np.searchsorted(nbytes, nbytes[start] + max_bytes, side="right") - 1
        cuts.append(max(start + 1, int(min(row_stop, byte_stop, stops[np.searchsorted(stops, start, side="right")]))))
    return np.array(cuts, dtype=np.int64)


def cumulative_sums(counts: Ints) -> Ints:
    """Return the cumulative sums of counts with a leading 0, ``int64[n + 1]``."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays).astype(np.int64)


NO_FRAGMENTS = join_footers([Footer(np.zeros(0, np.int64), np.zeros(0, np.int64))])
"""The fragments of files that are not read yet."""
