"""Runs the pipelines of logical shards in one process, each from its position in the table."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from rescale_data.engine.collate import collate as stack
from rescale_data.engine.micro_batch import MicroBatch, TableUpdate
from rescale_data.engine.recipe import FIRST_SLOT, SAMPLES, Recipe, VersionLogs
from rescale_data.engine.schema import Schema, set_histories
from rescale_data.errors import DataStateError
from rescale_data.layout.batch_shards import BatchShards
from rescale_data.nodes.abilities import VerifiesRows, WritesManySamples
from rescale_data.nodes.base import Node, initial
from rescale_data.nodes.batch_buffer import BatchBuffer
from rescale_data.nodes.below import columns_of, epoch_end, skip, skip_ahead, skip_epochs
from rescale_data.nodes.empty_draws import MAX_EMPTY_EPOCHS
from rescale_data.nodes.provenance import PROVENANCE
from rescale_data.sources.decoded.cache_demand import record_served_shards
from rescale_data.state import Ints

Collate: TypeAlias = Callable[[list[Any]], Any]


class NoSamplesLeft(Exception):
    """Error raised if a logical shard has no sample left in this epoch (``repeat=False``)."""


class ShardRunner:
    """Draws samples from the pipelines of logical shards, and keeps the table of their positions.

    A pipeline is built when it is first used, and bound to its row, so that each draw moves the row.

    Attributes:
        is_serving: True from `serve_shards` until `release_cache` or `load`.
        draw_in_workers: Makes worker processes look ahead in some shards, from the positions in a table (`LookAhead`).
    """

    def __init__(self, recipe: Recipe, schema: Schema) -> None:
        self._recipe, self.schema = recipe, schema
        self.table = schema.fresh_table(recipe.num_logical_shards)
        self.is_serving = False
        self.draw_in_workers: Callable[[Ints, VersionLogs, Sequence[int], int], list[Any]] | None = None
        self._histories: VersionLogs = {}
        self._built_nodes: dict[int, Node[Any]] = {}
        self._active_nodes: list[Node[Any] | None] = [None] * recipe.num_logical_shards
        self._columns = columns_of(schema.root)
        self._write_many = schema.root.write_many if isinstance(schema.root, WritesManySamples) else _write_no_rows
        self._sample_counts = self.table[:, SAMPLES]  # a view
        self._cached_batches: dict[int, _CachedBatch] = {}  # for shards that come again

    def load(self, table: Ints, histories: VersionLogs) -> None:
        """Set all positions to the ones in a table; later samples are drawn from there.

        Args:
            table: The positions; they are copied.
            histories: The data of each source, by epoch.
        """
        if histories != self._histories:
            self._histories, self._built_nodes = histories, {}
            self.schema.use_histories(histories)
        self.table[:], self.is_serving = table, False
        self._active_nodes, self._cached_batches = [None] * len(table), {}

    def serve_shards(self, shards: Ints) -> None:
        """Set the shards that this process reads from now on; their sources begin to read ahead, and divide the cache."""
        self.is_serving = True
        record_served_shards(self, self.schema.sources().values(), shards.tolist())
        self.schema.prefetch_shards(self.table, shards)

    def release_cache(self) -> None:
        """Give this loader's part of the decoded-data cache to other loaders of the process, until the next `serve_shards`."""
        self.is_serving = False
        record_served_shards(self, (), ())

    def make_micro_batch(self, batch_shards: BatchShards, collate: Collate | None) -> MicroBatch:
        """Draw one micro batch from the logical shards that `batch_shards` names, and return it with the advanced table rows.

        Args:
            collate: Makes a batch of samples. `None` stacks them; pipelines that can write then write them in place.
        """
        cached_batch = self._cached_batches.get(id(batch_shards))
        if cached_batch is not None and collate is None:
            batch = self._write_batch(cached_batch.nodes, batch_shards.shards)
            cached_batch.samples_not_counted_yet += cached_batch.samples_per_table_row
            # `tuple.__new__` takes half the time of a call of the class: together 2 % of a packed batch
            row_values = cached_batch.table_rows.copy()
            rows = tuple.__new__(TableUpdate, (batch_shards.rows, row_values, cached_batch.samples_not_counted_yet))
            return tuple.__new__(MicroBatch, (batch, rows, batch_shards.shards, len(cached_batch.nodes)))
        if batch_shards.sample_numbers is not None:  # `_sample_at` counts each sample
            draws = zip(batch_shards.shards, batch_shards.sample_numbers, batch_shards.is_real, strict=True)
            samples = [self._sample_at(*draw) for draw in draws]
            return self._as_micro_batch((collate or stack)(samples), batch_shards)
        if collate is None and self._columns:
            nodes = [self._active_nodes[shard] or self._activate_node(shard) for shard in batch_shards.shards]
            batch = self._write_batch(nodes, batch_shards.shards)
            if isinstance(batch_shards.samples_per_shard, int):
                self._cached_batches[id(batch_shards)] = _CachedBatch(
                    batch_shards, nodes, self.table[batch_shards.rows], batch_shards.samples_per_shard
                )
        else:
            batch = (collate or stack)([self._draw_sample(shard) for shard in batch_shards.shards])
        self._sample_counts[batch_shards.rows] += batch_shards.samples_per_shard
        return self._as_micro_batch(batch, batch_shards)

    def make_origin_batch(self, batch_shards: BatchShards, shards: Container[int]) -> MicroBatch:
        """Return one micro batch with the origin of each sample in place of the sample: a list of lines, one for each document.

        Args:
            shards: The shards whose samples are drawn. Samples of other shards are left out. In an endless stream their
                pipelines are not even moved, so the positions of these shards are wrong from there on.
        """
        sample_lines: list[list[str]] = [[] for _ in batch_shards.shards]
        for sample_index, shard in enumerate(
            batch_shards.shards if batch_shards.num_real < 0 else batch_shards.shards[: batch_shards.num_real]
        ):
            if batch_shards.sample_numbers is not None:
                self.skip(shard, batch_shards.sample_numbers[sample_index] - int(self._sample_counts[shard]))
            if shard in shards:
                sample_lines[sample_index] = _origin_lines(self._draw_sample(shard), self._active_nodes[shard])
            elif not self._recipe.repeat:
                self.skip(shard, 1)
                continue
            self._sample_counts[shard] += 1
        return self._as_micro_batch(sample_lines, batch_shards)

    def skip(self, shard: int, num_samples: int) -> None:
        """Skip samples of a shard, in constant time if its pipeline knows the number of samples in an epoch."""
        self.table[shard, SAMPLES] += num_samples
        while num_samples:
            node = self._active_nodes[shard]
            if node is None:
                node = self._activate_node(shard)
            if epoch_end(node, self._pipeline_slots(shard)[None], np.array([shard])) is None:
                num_samples -= skip_ahead(node, num_samples)
                if num_samples:
                    self._draw_sample(shard)
                    num_samples -= 1
                continue
            num_samples -= skip(node, num_samples)
            if num_samples:
                self._active_nodes[shard] = None
                num_samples -= skip_epochs(node, self._pipeline_slots(shard), shard, num_samples)

    def look_ahead(self, shard: int, num_samples: int) -> tuple[int, Ints | None]:
        """Draw up to `num_samples` samples of a shard to find the end of its epoch; call `load` before serving the shard again.

        Returns:
            The number of samples drawn. If that is less, also the slots at the beginning of the next epoch, else `None`.
        """
        for num_drawn in range(num_samples):
            try:
                self._draw_sample(shard)
            except NoSamplesLeft:
                return num_drawn, self._pipeline_slots(shard).copy()
        return num_samples, None

    def look_ahead_in(self, shards: Sequence[int], num_samples: int) -> list[tuple[int, Ints | None]]:
        """Return `look_ahead` of each of some shards, which worker processes draw if there are any."""
        if self.draw_in_workers is None:
            return [self.look_ahead(shard, num_samples) for shard in shards]
        results = self.draw_in_workers(self.table, self._histories, shards, num_samples)
        for shard, (*_, row) in zip(shards, results, strict=True):
            self.table[shard], self._active_nodes[shard] = row, None
        return [(num_drawn, next_slots) for num_drawn, next_slots, _ in results]

    def verify(self, shard: int, samples_left: int) -> None:
        """Raise ``DataStateError`` unless a shard delivered each row of its epoch once, except its last `samples_left` samples.

        These last samples are drawn. A source that ends with them compares the rows that were read with the size of its epoch.
        Any other source compares the rows up to its position.
        """
        node = self._build(shard)
        node.bind(self._pipeline_slots(shard).copy().data)
        difference = "fewer"
        if skip(node, samples_left) == samples_left:
            difference = "" if next(node, self) is self else "more"
        if difference:
            raise DataStateError(
                f"Logical shard {shard} of {self._recipe.num_logical_shards} has {difference} than the {samples_left} samples "
                f"left that are counted as dropped: rows would be lost. The data, the state or epoch_end() of a node is at "
                f"fault; go back to a checkpoint from before this epoch and report it."
            )
        for _, inner_node in node.walk():
            if isinstance(inner_node, VerifiesRows):
                inner_node.verify()

    def _pipeline_slots(self, shard: int) -> Ints:
        return self.table[shard, FIRST_SLOT:]

    def _as_micro_batch(self, batch: Any, batch_shards: BatchShards) -> MicroBatch:
        num_real = len(batch_shards.shards) if batch_shards.num_real < 0 else batch_shards.num_real
        rows = TableUpdate(batch_shards.rows, self.table[batch_shards.rows].copy())
        return MicroBatch(batch, rows, batch_shards.shards, num_real)

    def _write_batch(self, nodes: list[Node[Any]], shards: list[int]) -> Any:
        buffer = BatchBuffer(self._columns, len(shards))
        buffer_row = 0
        while (buffer_row := self._write_many(nodes, buffer, buffer_row)) < len(shards):
            self._draw_sample(shards[buffer_row], buffer, buffer_row)
            buffer_row += 1
        return buffer.batch()

    def _draw_sample(self, shard: int, buffer: BatchBuffer | None = None, row: int = 0) -> Any:
        """Return the next sample of a shard; with a buffer, write the sample into the buffer and return nothing."""
        num_epoch_ends = 0
        while num_epoch_ends <= MAX_EMPTY_EPOCHS:
            node: Any = self._active_nodes[shard]
            if node is None:
                node = self._activate_node(shard)
            try:
                return node.next() if buffer is None else node.write(buffer, row)
            except StopIteration:
                if not self._recipe.repeat:
                    raise NoSamplesLeft from None
                self._active_nodes[shard], num_epoch_ends = None, num_epoch_ends + 1  # its row begins the next epoch
            except Exception as error:
                self._built_nodes.pop(shard, None)  # a torchdata node may stay broken
                error.add_note(f"in the pipeline of logical shard {shard}")
                raise
        raise DataStateError(
            f"Logical shard {shard} of {self._recipe.num_logical_shards} yielded no sample in two whole epochs: all of its "
            f"rows were filtered out, it has none, or a node that is not of rescale_data does not start again at reset(None). "
            f"Use fewer logical shards, more data, a filter that keeps some of it, or an rd.Reader in place of that node."
        )

    def _sample_at(self, shard: int, number: int, is_real: bool) -> Any:
        """Return sample ``number`` of a shard whose table row may be outdated, because other processes served the shard."""
        if not is_real:
            return self._first_sample(shard)
        self.skip(shard, number - int(self.table[shard, SAMPLES]))
        sample = self._draw_sample(shard)
        self.table[shard, SAMPLES] += 1
        return sample

    def _first_sample(self, shard: int) -> Any:
        """Return the first sample of a shard in the run, to pad the last batch of an epoch; the table does not change.

        The sample is the same from any position and in every topology. The shard has samples, perhaps not in the first epoch.
        """
        node = self._build(shard)
        node.bind(initial(node))
        while True:
            try:
                return node.next()
            except StopIteration:
                node.bind(node.position)

    def _build(self, shard: int) -> Node[Any]:
        node = self._recipe.build(shard)
        set_histories(node, self._histories)
        return node

    def _activate_node(self, shard: int) -> Node[Any]:
        node = self._built_nodes.get(shard)
        if node is None:
            node = self._built_nodes[shard] = self._build(shard)
            self.schema.require_same_fields(node, shard)
            if columns_of(node) != self._columns:
                raise TypeError(
                    f"The pipeline of logical shard {shard} yields the columns {columns_of(node)}, the first one "
                    f"{self._columns}. Samples of all shards make up one batch, so they are alike."
                )
        if type(node) is not type(self.schema.root):
            self._write_many = _write_no_rows
        try:
            node.bind(self._pipeline_slots(shard).data)
        except BaseException:
            del self._built_nodes[shard]
            raise
        self._active_nodes[shard] = node
        return node


@dataclass(slots=True)
class _CachedBatch:
    """The nodes and the table rows of one micro batch, kept because later micro batches have the same shards.

    Args:
        nodes: The node of each sample.
        table_rows: A view of the rows of the table that the shards have.
        samples_per_table_row: The number of samples that each of these rows gives.
        samples_not_counted_yet: The number of samples that each row has given, and does not count yet, since that is expensive.
    """

    batch_shards: BatchShards
    nodes: list[Node[Any]]
    table_rows: Ints
    samples_per_table_row: int
    samples_not_counted_yet: int = 0


def _write_no_rows(nodes: Sequence[Any], buffer: BatchBuffer, first_row: int) -> int:
    """Write nothing and return ``first_row``: takes the place of `WritesManySamples.write_many` for nodes without it."""
    return first_row


def _origin_lines(sample: Any, node: Node[Any] | None) -> list[str]:
    provenance = cast(Mapping[str, Any], sample).get(PROVENANCE) if isinstance(sample, Mapping) else None
    return str(provenance or (node.locate() if node is not None else "")).splitlines()
