"""`Lent`: a fragment from which documents are taken; their spans keep it alive."""

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
        tokens: The decoded tokens.
        first: The row of the source at which the fragment begins.
        sharing: About the number of shards that keep it at once; each of them counts its part of the bytes.
    """

    __slots__ = ("__weakref__", "_tokens", "first", "nbytes", "offsets", "values")

    def __init__(self, tokens: Tokens, first: int, sharing: int = 1) -> None:
        self._tokens = tokens  # kept because it may release pages when it is deleted
        self.values, self.offsets = plain(tokens.values), np.ascontiguousarray(tokens.offsets, dtype=np.int64)
        self.first, self.nbytes = first + tokens.first, tokens.nbytes // sharing


lent: WeakValueDictionary[tuple[int, str, int, int], Lent] = WeakValueDictionary()
"""Fragments that a packer of any shard still holds, by source, column, number of the fragment, and piece of it."""


def located(rows: Ints, which: Ints, found: list[Lent]) -> Spans:
    """Return rows as spans, which are places in fragments; without their moves."""
    start, length = places_of(rows, which, [each.first for each in found], [each.offsets for each in found])
    return Spans(tuple([each.values for each in found]), which, start, length, NOTHING, tuple(found))


def copied_from(rows: Ints, found: Lent) -> Spans:
    """Return copies of documents of one fragment, without their moves."""
    there = located(rows, np.zeros_like(rows), [found])
    unmoved = Moves(np.zeros(len(rows) + 1, dtype=np.int64), NOTHING.slot, NOTHING.value)
    array, length = copied(found.values, there.start, there.length), there.length
    return Spans((array,), there.array, np.cumsum(length) - length, length, unmoved, (None,))
