"""Best fit: pieces of documents that share a sample; long ones are cut or left out first, in each form of a window."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.nodes.form import MOST, Stage

Long: TypeAlias = Literal["split", "truncate", "drop"]
Piece: TypeAlias = tuple[int, int, int]
"""Of a document: where it begins and ends among the tokens of a window, and the document's number."""

COUNTED = {"split": "split_documents", "truncate": "truncated_documents", "drop": "dropped_documents"}


@dataclass(frozen=True)
class Fit:
    """Samples that documents were packed into.

    Args:
        pieces: Where each lies, and of which document.
        bins: The pieces of each sample.
        long: Documents longer than a sample, or with more than its limits.
    """

    pieces: list[Piece]
    bins: list[list[int]]
    long: frozenset[int]


def fit(
    documents: Sequence[Piece], stages: Iterable[Stage], long: Long, multiple: int, carried: Mapping[str, Sequence[int]]
) -> Fit:
    """Pack documents: in each form of which samples were yielded what the one before has left, then in that of now.

    Args:
        documents: Each of them whole, numbered from 0.
        multiple: Each piece takes a multiple of this.
        carried: By name, as much as each document carries, which comes with its first piece.
    """
    pieces = list(documents)
    too_long: set[int] = set()
    bins: list[list[int]] = []
    for stage in stages:
        limits = [(carried[name], most) for name, most in stage.limits.items()]
        too_much = {number for sizes, most in limits for number, size in enumerate(sizes) if size > most}
        too_long |= {number for a, b, number in pieces if b - a > stage.seq_len or (number in too_much and b > a)}
        if long == "drop":
            pieces = [piece for piece in pieces if piece[2] not in too_long]
        pieces = [part for piece in pieces for part in _cut(piece, stage.seq_len, long)]
        beside = [([_if_first(sizes, piece, documents) for piece in pieces], most) for sizes, most in limits]
        bins = best_fit([room(piece, multiple) for piece in pieces], stage.seq_len, stage.max_documents, beside)
        if stage.num_emitted:
            pieces = sorted(pieces[i] for items in bins[stage.num_emitted :] for i in items)
    if len(bins) > MOST:
        raise ValueError(f"A window has {len(bins)} samples, the most are {MOST}. Give a smaller window.")
    return Fit(pieces, bins, frozenset(too_long))


def num_untrained(
    documents: Sequence[Piece], fitted: Fit, seq_len: int, long: Long, learned: npt.NDArray[np.bool_]
) -> int:
    """Documents that are not dropped, and of whose tokens none is a label.

    Args:
        learned: Of all their tokens. The first of a piece has none before it, and so is no label.
    """
    dropped = fitted.long if long == "drop" else ()
    left = [document for document in documents if document[0] < document[1] and document[2] not in dropped]
    return sum(not any(learned[a + 1 : b].any() for a, b, _ in _cut(document, seq_len, long)) for document in left)


def room(piece: Piece, multiple: int) -> int:
    """Return the room of a piece in a sample, filled up."""
    start, stop, _ = piece
    return -(-(stop - start) // multiple) * multiple


def _cut(piece: Piece, seq_len: int, long: Long) -> list[Piece]:
    """Return the pieces of a document that are packed, in samples of ``seq_len`` tokens."""
    start, stop, document = piece
    if stop - start <= seq_len:
        return [piece] if stop > start else []
    if long == "split":
        return [(first, min(first + seq_len, stop), document) for first in range(start, stop, seq_len)]
    return [(start, start + seq_len, document)]


def _if_first(sizes: Sequence[int], piece: Piece, documents: Sequence[Piece]) -> int:
    """Return what a piece carries of its document's values."""
    start, _, number = piece
    return sizes[number] if start == documents[number][0] else 0


def best_fit(
    lengths: Sequence[int], capacity: int, max_items: int, beside: Sequence[tuple[Sequence[int], int]] = ()
) -> list[list[int]]:
    """Best fit decreasing: the longest first, each into the bin with the least room that is enough for it.

    It needs at most 11/9 of the fewest bins possible, and one more (D. S. Johnson, 1973); with limits beside, perhaps more.

    Args:
        lengths: Of each item, from 1 to ``capacity``.
        max_items: Of a bin, at least 1.
        beside: What else items take, each with the most of a bin; an item that takes more has a bin of its own.

    Returns:
        The items of each bin in ascending order; the bins in the order of the longest item of each, so that where items come in
        random order bins of long and of short items do too.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # room, and which
    taken: list[list[int]] = []  # of what is limited beside
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(open_bins, (lengths[item], -1))
        while beside and at < len(open_bins) and not _is_room(taken[open_bins[at][1]], item, beside):
            at += 1
        if at == len(open_bins):
            open_bins.append((capacity, len(bins)))
            bins.append([])
            taken.append([0] * len(beside))
        room, chosen = open_bins.pop(at)
        bins[chosen].append(item)
        if beside:
            taken[chosen] = [num + sizes[item] for num, (sizes, _) in zip(taken[chosen], beside, strict=True)]
        if len(bins[chosen]) < max_items and room > lengths[item]:
            insort(open_bins, (room - lengths[item], chosen))
    return [sorted(items) for items in sorted(bins, key=lambda items: items[0])]


def _is_room(taken: list[int], item: int, beside: Sequence[tuple[Sequence[int], int]]) -> bool:
    return all(not sizes[item] or num + sizes[item] <= most for num, (sizes, most) in zip(taken, beside, strict=True))
