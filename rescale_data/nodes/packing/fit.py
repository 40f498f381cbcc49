"""Best fit: packs pieces of documents into samples; first cuts or drops long documents, in each form of a window."""

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
"""Begin and end of a piece among the tokens of a window, and the number of its document."""

COUNTED = {"split": "split_documents", "truncate": "truncated_documents", "drop": "dropped_documents"}


@dataclass(frozen=True)
class Fit:
    """Samples into which documents were packed.

    Args:
        pieces: All pieces.
        bins: Indices of the pieces of each sample.
        long: Numbers of the documents that are longer than a sample, or exceed its limits.
    """

    pieces: list[Piece]
    bins: list[list[int]]
    long: frozenset[int]


def fit(
    documents: Sequence[Piece], stages: Iterable[Stage], long: Long, multiple: int, carried: Mapping[str, Sequence[int]]
) -> Fit:
    """Pack documents in each form of a window in turn.

    The pieces that are left after the samples yielded in one form are packed again in the next. The last form is the present
    one.

    Args:
        documents: The whole documents, numbered from 0.
        stages: The forms, each with the number of samples yielded in it.
        long: As in `WholeDocumentPacker`.
        multiple: Each piece takes a multiple of this number of tokens.
        carried: By name, the size of each document's payload, which comes with its first piece.
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
    """Return the number of documents that are not dropped and have no token that is a label.

    Args:
        documents: The whole documents.
        fitted: The samples into which they were packed.
        seq_len: Tokens of a sample.
        long: As in `WholeDocumentPacker`.
        learned: For each token of all documents, true if it is learned. The first token of a piece has no token before it, and
            so is no label.
    """
    dropped = fitted.long if long == "drop" else ()
    left = [document for document in documents if document[0] < document[1] and document[2] not in dropped]
    return sum(not any(learned[a + 1 : b].any() for a, b, _ in _cut(document, seq_len, long)) for document in left)


def room(piece: Piece, multiple: int) -> int:
    """Return the length of a piece in a sample, filled up to a multiple of ``multiple``."""
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
    """Return the payload size of a piece: the size of its document for the first piece, 0 for the others."""
    start, _, number = piece
    return sizes[number] if start == documents[number][0] else 0


def best_fit(
    lengths: Sequence[int], capacity: int, max_items: int, beside: Sequence[tuple[Sequence[int], int]] = ()
) -> list[list[int]]:
    """Pack items by best fit decreasing: the longest first, each into the bin with the least room that is enough for it.

    It needs at most 11/9 of the fewest bins possible, plus one (D. S. Johnson, 1973). With limits in ``beside`` it may need
    more.

    Args:
        lengths: Length of each item, from 1 to ``capacity``.
        capacity: Length of a bin.
        max_items: Most items of a bin, at least 1.
        beside: Further sizes of the items, each with the most of a bin. An item with more has a bin of its own.

    Returns:
        The items of each bin in ascending order. The bins are sorted by the number of the longest item of each. So if items
        come in random order, bins of long and of short items do too.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # room of a bin, and its number
    taken: list[list[int]] = []  # sizes in each bin, for the limits in `beside`
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
