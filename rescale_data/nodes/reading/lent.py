"""`Lent`: a fragment that documents are taken from, kept alive by those who hold them."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np

from rescale_data.nodes.reading.gather import copied, places_of
from rescale_data.nodes.reading.spans import NOTHING, Moves, Spans, plain
from rescale_data.sources.source import Tokens
from rescale_data.state import Ints


class Lent:
    """A fragment that the spans of one shard or more keep alive.

    Args:
        tokens: What was decoded.
        first: The row of the source at which the fragment begins.
        sharing: About so many shards keep it at once, each of which counts its part.
    """

    __slots__ = ("__weakref__", "_tokens", "first", "nbytes", "offsets", "values")

    def __init__(self, tokens: Tokens, first: int, sharing: int = 1) -> None:
        self._tokens = tokens  # which may let go of pages when it goes
        self.values, self.offsets = plain(tokens.values), np.ascontiguousarray(tokens.offsets, dtype=np.int64)
        self.first, self.nbytes = first + tokens.first, tokens.nbytes // sharing


lent: WeakValueDictionary[tuple[int, str, int, int], Lent] = WeakValueDictionary()
"""Fragments that a packer of any shard still holds, by source, column and number, and which piece of it."""


def located(rows: Ints, which: Ints, found: list[Lent]) -> Spans:
    """Return the places of rows in fragments, without their moves."""
    start, length = places_of(rows, which, [each.first for each in found], [each.offsets for each in found])
    return Spans(tuple([each.values for each in found]), which, start, length, NOTHING, tuple(found))


def copied_from(rows: Ints, found: Lent) -> Spans:
    """Documents of one fragment, without their moves."""
    there = located(rows, np.zeros_like(rows), [found])
    unmoved = Moves(np.zeros(len(rows) + 1, dtype=np.int64), NOTHING.slot, NOTHING.value)
    array, length = copied(found.values, there.start, there.length), there.length
    return Spans((array,), there.array, np.cumsum(length) - length, length, unmoved, (None,))
