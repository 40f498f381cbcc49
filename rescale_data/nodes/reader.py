"""`Reader`: the rows of one logical shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rescale_data.nodes.base import Node, View
from rescale_data.nodes.documents import Documents
from rescale_data.nodes.proof import Proof
from rescale_data.nodes.spans import Spans, block_bytes
from rescale_data.order import FragmentOrder, ShardOrder, fragment_order, shard_sizes
from rescale_data.provenance import with_provenance
from rescale_data.shard import Shard
from rescale_data.sources.cache import cache, owner_of
from rescale_data.sources.dataset import MapStyle, as_source
from rescale_data.sources.source import Source, TokenSource
from rescale_data.state import Field, Ints

DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Plan:
    """Rows of the source for the shard's rows ``first ..`` of an epoch, in the order in which they are read."""

    epoch: int
    first: int
    rows: Ints

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def covers(self, epoch: int, row: int) -> bool:
        return self.epoch == epoch and 0 <= row - self.first < len(self.rows)


class Reader(Node[Any]):
    """The rows of one logical shard, one epoch until `StopIteration`.

    Args:
        source: A source, or anything with ``__len__`` and ``__getitem__``.
        shard: The logical shard to read.
        shuffle: `False`: the order of the files. A number: fragments are permuted, and so are the rows in windows of that
            many. `True`: windows of 1024 rows; map-style data is permuted as a whole.
        provenance: Add ``"provenance"`` to each sample, a line that says which row of which file of which source it is.
            `Map`, `Tokenize` and packers hand it on. The order stays the same, but packers read a row at a time.

    Yields:
        ``{column: value}`` of arrays, bytes, strings or numbers; from a map-style dataset, its own samples.

    Raises:
        ValueError: ``shuffle`` is no window, or the stream is endless and the shard owns no row.
        TypeError: ``provenance`` of samples that are no dicts.
    """

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("epoch",)), Field(("row",)))
    PROOF: ClassVar[Field] = Field(("digest",))
    """What is kept in addition where `Shard.verify` asks for it."""

    def __init__(
        self, source: Source | MapStyle, shard: Shard, *, shuffle: bool | int = True, provenance: bool = False
    ) -> None:
        self.shard = self.of_shard = shard
        super().__init__()
        self.reads = self.source = as_source(source)
        self.repeat = shard.repeat
        self.shuffle = shuffle
        self.provenance = provenance
        full = shuffle is True and self.source.fragments is None
        self.order = ShardOrder(
            num_rows=self.source.num_rows,
            shard=shard.index,
            num_logical_shards=shard.num_logical_shards,
            seed=shard.seed,
            window=0 if full else _window(shuffle),
            full=full,
        )
        self._size = self.order.size
        self._over = False
        self._drawn = -1
        self._plan_key = (owner_of(self), "plan")
        self._source_key = owner_of(self.source)
        _refuse_empty(self.source, shard)
        name = f"{self.source.name}, logical shard {shard.index} of {shard.num_logical_shards}"
        self._proof = Proof(name, self._size, self.rows_from, self._owned, self._window_of) if shard.verify else None

    def own_fields(self) -> tuple[Field, ...]:
        return (*self.FIELDS, self.PROOF) if self.shard.verify else self.FIELDS

    def seek(self) -> None:
        self._over = False

    def next(self) -> Any:
        epoch, row = self.position[0], self.position[1]
        if self._over or row >= self._size:
            self._finish()
        plan = self.plan(epoch, row)
        self._drawn = index = int(plan.rows[row - plan.first])
        value = self.source.row(index)
        self.advance(self.position, 1)
        return with_provenance(value, self.locate()) if self.provenance else value

    def skip(self, num_samples: int) -> None:
        if self._over or self.position[1] + num_samples > self._size:
            self._finish()
        self.advance(self.position, num_samples)

    def advance(self, position: View, num_rows: int) -> None:
        """Write into a position where to go on after so many rows more."""
        if self._proof is not None:
            position[2] = self._proof.read(position[2], position[0], position[1], num_rows)
        position[1] += num_rows

    def turn(self, position: View) -> None:
        """Write the beginning of the next epoch into a position of one; what was left of it, a packer has dropped."""
        if self._proof is not None:
            self._proof.check(position[0], position[1], position[2])
            position[2] = 0
        position[0], position[1] = position[0] + 1, 0

    def verify(self) -> None:
        if self._proof is not None:
            self._proof.check(self.position[0], self.position[1], self.position[2])

    def plan(self, epoch: int, row: int) -> Plan:
        """Which rows of the source the shard reads around ``row``."""
        plan: Plan | None = cache().get(self._plan_key)
        if plan is None or not plan.covers(epoch, row):
            plan = Plan(epoch, self.order.span(row)[0], self.order.rows(epoch, row, self._fragments(epoch)))
            cache().put(self._plan_key, plan)
        return plan

    def documents(self, column: str) -> Documents | None:
        if self.provenance or not isinstance(self.source, TokenSource):
            return None
        num_bytes = block_bytes(self.source.cache_bytes, self.shard.num_logical_shards)
        return Spans(self.source, column, self, num_bytes)

    @property
    def size(self) -> int:
        """Rows of the shard in one epoch."""
        return self._size

    def rows_from(self, epoch: int, row: int) -> Ints:
        """Rows of the source that the shard reads from ``row`` of an epoch on, up to the end of a window."""
        plan = self.plan(epoch, row)
        return plan.rows[row - plan.first :]

    def rows_soon(self, epoch: int, row: int) -> list[int]:
        """The two ends of what the next window permutes, if there is one."""
        return self.order.ends(self.order.span(row)[1], self._fragments(epoch))

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        sizes = shard_sizes(shards, self.source.num_rows, self.shard.num_logical_shards)
        end = np.zeros_like(rows)
        end[:, 0] = rows[:, 0] + 1
        return sizes - rows[:, 1], end

    def locate(self) -> str:
        return f"{self.source.name}: {self.source.locate(self._drawn)}" if self._drawn >= 0 else ""

    def parameters(self) -> dict[str, Any]:
        return {"shuffle": "full" if self.order.full else self.order.window}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        sizes = shard_sizes(shards, self.source.num_rows, self.shard.num_logical_shards)
        name = self.source.name
        return {
            f"rows/{name}": float((rows[:, 0] * sizes + rows[:, 1]).sum()),
            f"epoch_min/{name}": float(rows[:, 0].min()),
            f"epoch_max/{name}": float(rows[:, 0].max()),
        }

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self.turn(self.position)
        raise StopIteration

    def _window_of(self, row: int) -> int:
        return self.order.span(row)[0]

    def _owned(self, epoch: int, first: int, stop: int) -> Ints:
        return self.order.owned(epoch, first, stop, self._fragments(epoch))

    def _fragments(self, epoch: int) -> FragmentOrder | None:
        fragments = self.source.fragments
        if fragments is None or not self.order.window:
            return None
        key = (self._source_key, "order", self.shard.seed, epoch)
        return cache().make(key, lambda: fragment_order(fragments, self.shard.seed, epoch))


def _window(shuffle: bool | int) -> int:
    if isinstance(shuffle, bool):
        return DEFAULT_WINDOW if shuffle else 0
    if shuffle < 1:
        raise ValueError(
            f"shuffle={shuffle!r}: give the window in rows (at least 1), True, or False for the files' order."
        )
    return int(shuffle)


def _refuse_empty(source: Source, shard: Shard) -> None:
    if shard.repeat and shard.num_logical_shards > source.num_rows:
        raise ValueError(
            f"{source.name} has {source.num_rows} rows for {shard.num_logical_shards} logical shards, so some shards own "
            f"no row, and an endless stream (repeat=True) cannot be made of none. Give num_logical_shards of at most "
            f"{source.num_rows}, or more data."
        )
