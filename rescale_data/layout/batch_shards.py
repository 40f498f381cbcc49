"""`BatchShards`: the logical shards from which one rank draws the samples of each micro batch, in the order of the batch."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


@dataclass(frozen=True)
class BatchShards:
    """The logical shards from which one rank draws the samples of one micro batch.

    Args:
        shards: The shard of each of the b samples, in the order of the batch.
        rows: These shards, each once, as an index into the table: a slice or ``int64[M]``.
        samples_per_shard: The number of samples that each of them gives, an int or ``int64[M]``.
        sample_numbers: Only at the end of an epoch, where any rank may serve any shard: the number of each sample, counted
            from the shard's first; 0 for those that fill the last batch.
        num_real: The number of real samples; the others fill the last batch.
    """

    shards: list[int]
    rows: slice | Ints
    samples_per_shard: int | Ints
    sample_numbers: list[int] | None = None
    num_real: int = -1

    @property
    def is_real(self) -> list[bool]:
        return [i < self.num_real or self.num_real < 0 for i in range(len(self.shards))]


BatchShardsFunction: TypeAlias = Callable[[int], BatchShards]
"""Returns the shards of micro batch ``u`` of one rank. Calls come in ascending order of all u, or of those of one worker."""


class AlignedBatchShards:
    """Computes the shards of each micro batch of one rank in an aligned layout, in which a shard always has the same worker.

    Two results are the same object or have no shard in common.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank, self._micro_batches_per_period = layout, rank, layout.batch_period
        self._by_micro_batch: dict[int, BatchShards] = {}
        self._by_first_shard: dict[int, BatchShards] = {}  # by their first shard

    def batch_shards(self, u: int) -> BatchShards:
        u %= self._micro_batches_per_period
        batch_shards = self._by_micro_batch.get(u)
        if batch_shards is None:
            computed = self._compute_batch_shards(u)
            batch_shards = self._by_micro_batch[u] = self._by_first_shard.setdefault(computed.shards[0], computed)
        return batch_shards

    def _compute_batch_shards(self, u: int) -> BatchShards:
        layout = self._layout
        t, m = divmod(u, layout.gradient_accumulation_steps)
        b, g, c = layout.micro_batch_size, layout.shard_period_steps, layout.shard_samples_per_step
        first_row = self._rank * (layout.global_batch_size // layout.dp_world_size) + m * b
        shards = [(first_row + i) // c * g + t for i in range(b)]
        return BatchShards(shards, slice(shards[0], shards[-1] + 1, g), min(b, c))


class UnalignedBatchShards:
    """Picks the shards of each micro batch of one rank in a layout that is not aligned, whose order depends on the topology.

    Each worker serves, of its block of shards, the one that has delivered the fewest samples.

    Args:
        samples: ``int64[N]``, what each shard has delivered before the first micro batch.
    """

    def __init__(self, layout: Layout, rank: int, samples: Ints) -> None:
        self._layout = layout
        blocks = [layout.owned_shards(rank, worker) for worker in range(layout.workers_per_rank)]
        # Of each worker
        self._heap_by_worker = [sorted(zip(samples[b.start : b.stop].tolist(), b, strict=True)) for b in blocks]

    def batch_shards(self, u: int) -> BatchShards:
        heap, shards = self._heap_by_worker[u % len(self._heap_by_worker)], list[int]()
        for _ in range(self._layout.micro_batch_size):
            num_samples, shard = heap[0]
            heapq.heapreplace(heap, (num_samples + 1, shard))
            shards.append(shard)
        index, counts = np.unique(np.array(shards, dtype=np.int64), return_counts=True)
        return BatchShards(shards, index, counts)
