"""Which documents of a window share a sample: bin packing, a pure function of their lengths."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


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
