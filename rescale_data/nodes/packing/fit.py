"""Best-fit packing: puts documents, or pieces of long ones, into as few samples of one length as it can."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.nodes.sample_format import MAX_SAMPLES, Format

LongDocumentRule: TypeAlias = Literal["split", "truncate", "drop"]
DocPiece: TypeAlias = tuple[int, int, int]
"""Begin and end of a piece among the tokens of a window, and the number of its document."""

LONG_COUNTERS = {"split": "split_documents", "truncate": "truncated_documents", "drop": "dropped_documents"}


def pack_documents(
    documents: Sequence[DocPiece],
    formats: Iterable[Format],
    long: LongDocumentRule,
    multiple: int,
    payload_sizes: Mapping[str, Sequence[int]],
) -> tuple[list[list[DocPiece]], set[int]]:
    """Pack documents into samples; after a change of format within a window, pack the documents that are left anew.

    The pieces that are left after the samples yielded in one format are packed again in the next. The last format is the
    present one.

    Args:
        documents: The whole documents, numbered from 0.
        formats: The formats, each with the number of samples yielded in it.
        long: As in `WholeDocumentPacker`.
        multiple: Each piece takes a multiple of this number of tokens.
        payload_sizes: By name, the size of each document's payload, which comes with its first piece.

    Returns:
        The pieces of each sample, and the numbers of the documents that are longer than a sample or exceed its limits.
    """
    pieces, too_long, samples = list(documents), set[int](), list[list[DocPiece]]()
    for fmt in formats:
        limits = [(payload_sizes[name], limit) for name, limit in fmt.limits.items()]
        too_big = {doc for sizes, limit in limits for doc, size in enumerate(sizes) if size > limit}
        too_long |= {
            doc for start, stop, doc in pieces if stop - start > fmt.seq_len or (doc in too_big and stop > start)
        }
        if long == "drop":
            pieces = [piece for piece in pieces if piece[2] not in too_long]
        pieces = [cut_piece for piece in pieces for cut_piece in _cut(piece, fmt.seq_len, long)]
        extra = [([_piece_payload_size(sizes, piece, documents) for piece in pieces], limit) for sizes, limit in limits]
        bins = best_fit([padded_length(piece, multiple) for piece in pieces], fmt.seq_len, fmt.max_documents, extra)
        samples = [[pieces[item] for item in items] for items in bins]
        if fmt.num_samples_emitted:
            pieces = sorted(piece for sample in samples[fmt.num_samples_emitted :] for piece in sample)
    if len(samples) > MAX_SAMPLES:
        raise ValueError(f"A window has {len(samples)} samples, the most are {MAX_SAMPLES}. Give a smaller window.")
    return samples, too_long


def num_untrained(
    documents: Iterable[DocPiece], seq_len: int, long: LongDocumentRule, learned: npt.NDArray[np.bool_]
) -> int:
    """Return the number of documents that have tokens, and no learned token among the labels of their pieces.

    Args:
        documents: The whole documents, without those that were dropped.
        seq_len: Tokens of a sample.
        long: As in `WholeDocumentPacker`.
        learned: For each token of all documents, true if it is learned. The first token of a piece has no token before it, and
            so is no label.
    """
    packed = [pieces for document in documents if (pieces := _cut(document, seq_len, long))]
    return sum(not any(learned[start + 1 : end].any() for start, end, _ in pieces) for pieces in packed)


def padded_length(piece: DocPiece, pad_multiple: int) -> int:
    """Return the length of a piece within a sample, rounded up to a multiple of ``pad_multiple``."""
    start, stop, _ = piece
    return -(-(stop - start) // pad_multiple) * pad_multiple


def _cut(piece: DocPiece, seq_len: int, long: LongDocumentRule) -> list[DocPiece]:
    """Return the pieces in which a document is packed: whole, split or truncated to ``seq_len`` tokens."""
    start, stop, document = piece
    if stop - start <= seq_len:
        return [piece] if stop > start else []
    if long == "split":
        return [(begin, min(begin + seq_len, stop), document) for begin in range(start, stop, seq_len)]
    return [(start, start + seq_len, document)]


def _piece_payload_size(sizes: Sequence[int], piece: DocPiece, documents: Sequence[DocPiece]) -> int:
    """Return the payload size of a piece: the size of the document for its first piece, 0 for the other pieces."""
    first_token, _, document_number = piece
    return sizes[document_number] if first_token == documents[document_number][0] else 0


def best_fit(
    lengths: Sequence[int], capacity: int, max_bin_items: int, extra_limits: Sequence[tuple[Sequence[int], int]] = ()
) -> list[list[int]]:
    """Pack items by best fit decreasing: the longest first, each into the fullest bin that still has room for it.

    It needs at most 11/9 of the fewest bins possible, plus one (D. S. Johnson, 1973). With ``extra_limits`` it may need more.

    Args:
        lengths: Length of each item, from 1 to ``capacity``.
        capacity: Length of a bin.
        max_bin_items: Most items of a bin, at least 1.
        extra_limits: Further sizes of the items, each with the most of a bin. An item with more has a bin of its own.

    Returns:
        The items of each bin in ascending order. The bins are sorted by the number of the longest item of each. So if items
        come in random order, bins of long and of short items do too.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # room of a bin, and its number
    bin_sizes: list[list[int]] = []  # sizes in each bin, for the limits in `extra_limits`
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = bisect_left(open_bins, (lengths[item], -1))
        while extra_limits and index < len(open_bins) and not _fits(bin_sizes[open_bins[index][1]], item, extra_limits):
            index += 1
        if index == len(open_bins):
            open_bins.append((capacity, len(bins)))
            bins.append([])
            bin_sizes.append([0] * len(extra_limits))
        free_length, bin_number = open_bins.pop(index)
        bins[bin_number].append(item)
        if extra_limits:
            sizes_before = zip(bin_sizes[bin_number], extra_limits, strict=True)
            bin_sizes[bin_number] = [num + sizes[item] for num, (sizes, _) in sizes_before]
        if len(bins[bin_number]) < max_bin_items and free_length > lengths[item]:
            insort(open_bins, (free_length - lengths[item], bin_number))
    return [sorted(items) for items in sorted(bins, key=lambda items: items[0])]


def _fits(used_sizes: list[int], item: int, extra_limits: Sequence[tuple[Sequence[int], int]]) -> bool:
    limits = zip(used_sizes, extra_limits, strict=True)
    return all(not sizes[item] or num + sizes[item] <= limit for num, (sizes, limit) in limits)
