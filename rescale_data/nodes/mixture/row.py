"""`MixtureRow`: the layout of a mixture's own integers in its position; the integers of its sources follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from rescale_data.nodes.base import View
from rescale_data.state import COUNT_LIMITS, Field, Ints, counter

Unit: TypeAlias = Literal["samples", "tokens"]

DRAWS_SLOT, RULE_SLOT = 0, 1
"""Indices, in a position, of the number of draws and of the digest of the rule that gives the weights."""

_FIRST_SOURCE = 2  # first slot of the values for each source
FIELD_NAMES = _DRAWS_FIELD, _RULE_FIELD, _DRAWN_FIELD, _TOKENS, _OLD_TOKEN = "draws", "rule", "drawn", "tokens", "since"


class MixtureRow:
    """The slices of a position that hold the counts of all sources, in the order of their names.

    Args:
        names: Names of the sources.
        unit: With "tokens", tokens are counted in addition to samples.

    Attributes:
        drawn_slots: Number of samples since the run began; the complement of the number if the source has ended in this epoch.
        token_slots: By tokens: number of tokens in those samples.
        old_token_slots: By tokens: number of those tokens that were drawn with other weights.
    """

    def __init__(self, names: Sequence[str], unit: Unit) -> None:
        self.sources, self.unit = names, unit
        num_sources = len(names)
        count_slices = [slice(_FIRST_SOURCE + i * num_sources, _FIRST_SOURCE + (i + 1) * num_sources) for i in range(3)]
        self.drawn_slots, self.token_slots, self.old_token_slots = count_slices

    def fields(self) -> tuple[Field, ...]:
        return _fields(tuple(self.sources), self.unit)

    def amounts_drawn(self, rows: Ints) -> Ints:
        """Return the number of draws (or of tokens, if the unit is tokens) at each of the positions ``int64[M, slots]``."""
        return rows[:, self.token_slots].sum(axis=1) if self.unit == "tokens" else rows[:, DRAWS_SLOT]

    def begin_epoch(self, rows: Ints) -> None:
        """Mark no source as ended in the positions ``int64[M, slots]``, at the beginning of an epoch."""
        drawn = rows[:, self.drawn_slots]
        drawn[:] = np.maximum(drawn, ~drawn)

    def slot_counts(self, position: View) -> list[tuple[int, list[int]]]:
        """Return (first slot, values) of each kind of count: documents by source, and in a mixture by tokens also tokens."""
        count_slices = [self.drawn_slots, self.token_slots] if self.unit == "tokens" else [self.drawn_slots]
        return [(kind.start, position[kind].tolist()) for kind in count_slices]


@lru_cache(maxsize=64)
def _fields(names: tuple[str, ...], unit: Unit) -> tuple[Field, ...]:
    drawn_limits = ~COUNT_LIMITS[1], COUNT_LIMITS[1]  # the complement if a source has ended
    source_fields = [Field((_DRAWN_FIELD,), counts=True, limits=drawn_limits)]
    if unit == "tokens":
        source_fields += [counter(kind) for kind in (_TOKENS, _OLD_TOKEN)]
    own_fields = (counter(_DRAWS_FIELD), Field((_RULE_FIELD,)))
    return (*own_fields, *(replace(kind, path=(*kind.path, name)) for kind in source_fields for name in names))
