"""Which pieces of documents share a sample: long ones are cut or left out, then best fit, in each form of a window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rescale_data.nodes.bins import best_fit
from rescale_data.nodes.form import MOST, Stage

Long: TypeAlias = Literal["split", "truncate", "drop"]
Piece: TypeAlias = tuple[int, int, int]
"""Of a document: where it begins and ends among the tokens of a window, and the document's number."""

COUNTED = {"split": "split_documents", "truncate": "truncated_documents", "drop": "dropped_documents"}


@dataclass(frozen=True)
class Fit:
    """How documents were packed.

    Args:
        pieces: Where each lies, and of which document.
        bins: The pieces of each sample.
        num_long: Documents longer than a sample.
    """

    pieces: list[Piece]
    bins: list[list[int]]
    num_long: int


def fit(pieces: list[Piece], stages: Iterable[Stage], long: Long, multiple: int) -> Fit:
    """Pack documents: in each form of which samples were yielded what the one before has left, then in that of now.

    Args:
        pieces: Whole documents.
        multiple: Each piece takes a multiple of this.
    """
    too_long: set[int] = set()
    bins: list[list[int]] = []
    for stage in stages:
        too_long |= {document for start, stop, document in pieces if stop - start > stage.seq_len}
        pieces = [part for piece in pieces for part in _cut(piece, stage.seq_len, long)]
        bins = best_fit([room(piece, multiple) for piece in pieces], stage.seq_len, stage.max_documents)
        if stage.num_emitted:
            pieces = sorted(pieces[i] for items in bins[stage.num_emitted :] for i in items)
    if len(bins) > MOST:
        raise ValueError(f"A window has {len(bins)} samples, the most are {MOST}. Give a smaller window.")
    return Fit(pieces, bins, len(too_long))


def room(piece: Piece, multiple: int) -> int:
    """Of a piece in a sample, filled up."""
    start, stop, _ = piece
    return -(-(stop - start) // multiple) * multiple


def _cut(piece: Piece, seq_len: int, long: Long) -> list[Piece]:
    """What is packed of a document in samples of ``seq_len`` tokens."""
    start, stop, document = piece
    if stop - start <= seq_len:
        return [piece] if stop > start else []
    if long == "split":
        return [(first, min(first + seq_len, stop), document) for first in range(start, stop, seq_len)]
    return [(start, start + seq_len, document)] if long == "truncate" else []
