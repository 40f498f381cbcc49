"""`MixtureRow`: what a mixture itself keeps in its position, before what its sources keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from rescale_data.nodes.base import View
from rescale_data.state import COUNT, Field, Ints

Unit: TypeAlias = Literal["samples", "tokens"]

NUM, RULE = 0, 1
"""The slots of the number of draws, and of the digest of the rule by which weights are chosen."""

_FIRST = 2  # of those of each source
KINDS = _DRAWS, _RULE, _DRAWN, _TOKENS, _SINCE = "draws", "rule", "drawn", "tokens", "since"


class MixtureRow:
    """The slots of each source, kind by kind, in the order of the names.

    Args:
        names: Of the sources.
        unit: "tokens" are counted beside what is drawn.

    Attributes:
        drawn: Samples since the run began; the complement of their number where the source has ended in this epoch.
        tokens: By tokens, in those samples.
        since: By tokens, how many of them were drawn with other weights.
    """

    def __init__(self, names: Sequence[str], unit: Unit) -> None:
        self.names, self.unit = names, unit
        size = len(names)
        kinds = [slice(_FIRST + i * size, _FIRST + (i + 1) * size) for i in range(3)]
        self.drawn, self.tokens, self.since = kinds

    def fields(self) -> tuple[Field, ...]:
        return _fields(tuple(self.names), self.unit)

    def drawn_in(self, rows: Ints) -> Ints:
        """Return the draws, or by tokens the tokens, in each of ``int64[M, slots]``."""
        return rows[:, self.tokens].sum(axis=1) if self.unit == "tokens" else rows[:, NUM]

    def begin_epoch(self, rows: Ints) -> None:
        """Say in ``int64[M, slots]`` that no source has ended yet."""
        drawn = rows[:, self.drawn]
        drawn[:] = np.maximum(drawn, ~drawn)

    def counted_at(self, position: View) -> list[tuple[int, list[int]]]:
        """The first slot and the values of what is counted of each source: documents, by tokens these too."""
        kinds = [self.drawn, self.tokens] if self.unit == "tokens" else [self.drawn]
        return [(kind.start, position[kind].tolist()) for kind in kinds]


@lru_cache(maxsize=64)
def _fields(names: tuple[str, ...], unit: Unit) -> tuple[Field, ...]:
    drawn = ~COUNT[1], COUNT[1]  # the complement where a source has ended
    kinds = [Field((_DRAWN,), counts=True, limits=drawn)]
    if unit == "tokens":
        kinds += [Field((kind,), counts=True, limits=COUNT) for kind in (_TOKENS, _SINCE)]
    own = (Field((_DRAWS,), counts=True, limits=COUNT), Field((_RULE,)))
    return (*own, *(replace(kind, path=(*kind.path, name)) for kind in kinds for name in names))
