"""What a state is made of: a stream itself, or a stream as it stood at an earlier batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rescale_data.clock import Clock
from rescale_data.layout import Layout
from rescale_data.nodes.recipe import Schema
from rescale_data.ranks import Ranks
from rescale_data.state import Ints


class Standing(Protocol):
    """Where a run stands: all that its state is made of."""

    @property
    def schema(self) -> Schema: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def seed(self) -> int: ...
    @property
    def table(self) -> Ints: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def rows_are_dealt(self) -> bool: ...


@dataclass(frozen=True)
class Moment:
    """A stream as it stood at one batch; the table is a copy."""

    schema: Schema
    layout: Layout
    ranks: Ranks
    seed: int
    table: Ints
    clock: Clock
    rows_are_dealt: bool

    @classmethod
    def of(cls, stream: Standing) -> Moment:
        return cls(
            stream.schema,
            stream.layout,
            stream.ranks,
            stream.seed,
            stream.table.copy(),
            stream.clock,
            stream.rows_are_dealt,
        )
