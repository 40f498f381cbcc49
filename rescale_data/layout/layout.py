"""Assigns samples to ranks, workers and steps by arithmetic, so that the data order does not depend on the ranks.

Indices, all starting at 0:

    q   row of the global batch, 0 .. O-1, in rank order
    t   step, counted from `origin`
    u   micro batch of a rank, counted from `origin`; u = t * A + m, with m = 0 .. A-1
    r   data-parallel rank;   k   worker of a rank, makes the micro batches u with u mod K = k

    W = 2, O = 8, b = 2, so A = 2          rank 0        rank 1
                             m = 0      rows 0 1      rows 4 5
                             m = 1      rows 2 3      rows 6 7

Source: docs/design.md, 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rescale_data.layout.balance import max_samples_served, water_fill
from rescale_data.state import Ints

_MIN_DEFAULT_SHARDS, _MAX_DEFAULT_SHARDS = 256, 2048
"""Bounds of the default number of logical shards; each shard of a rank keeps a fragment of each source open."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of one topology of a run, and the logical shards that serve each micro batch in it.

    Args:
        num_logical_shards: N.
        global_batch_size: O, samples per optimizer step over all ranks.
        dp_world_size: W.
        micro_batch_size: b, samples per micro batch of one rank.
        num_workers: K; 0 counts as one worker.

    Raises:
        ValueError: ``W * b`` does not divide O, or there are fewer logical shards than ranks times workers that must own some.
    """

    num_logical_shards: int
    global_batch_size: int
    dp_world_size: int
    micro_batch_size: int
    num_workers: int = 0

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "num_logical_shards", "dp_world_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it is at least 1.")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers}: it is at least 0 (in the trainer's process).")
        if self.global_batch_size % (self.dp_world_size * self.micro_batch_size):
            raise ValueError(self._indivisible_message())
        if not self.aligned and self.num_logical_shards < self.dp_world_size * self.workers_per_rank:
            raise ValueError(
                f"num_logical_shards={self.num_logical_shards} is less than dp_world_size={self.dp_world_size} times "
                f"{self.workers_per_rank} worker(s): every worker must own at least one logical shard. Use fewer workers or "
                f"ranks; the number of logical shards itself is fixed when a run begins."
            )

    def _indivisible_message(self) -> str:
        o, w, b = self.global_batch_size, self.dp_world_size, self.micro_batch_size
        nearest_sizes = sorted({max(1, o // (w * b)) * w * b, -(-o // (w * b)) * w * b})
        fitting_sizes = [size for size in range(1, o // w + 1) if o % (w * size) == 0] if o % w == 0 else []
        size_advice = (
            f"micro_batch_size is one of {fitting_sizes}"
            if fitting_sizes
            else f"no micro_batch_size fits, as {w} ranks do not divide it"
        )
        return (
            f"global_batch_size={o} is not a multiple of dp_world_size * micro_batch_size = {w} * {b} = {w * b}. With "
            f"global_batch_size={o}, {size_advice}; with these ranks and this micro batch the nearest global_batch_size are "
            f"{nearest_sizes}."
        )

    @property
    def workers_per_rank(self) -> int:
        return max(self.num_workers, 1)

    @property
    def gradient_accumulation_steps(self) -> int:
        """A, the number of micro batches of a rank in one step."""
        return self.global_batch_size // (self.dp_world_size * self.micro_batch_size)

    @property
    def micro_step_samples(self) -> int:
        """The number of samples in one micro batch of all ranks together, dp world size times micro batch size."""
        return self.dp_world_size * self.micro_batch_size

    @property
    def shard_period_steps(self) -> int:
        """G, the number of steps after which a shard serves the same place of the global batch again (1 if N divides O)."""
        return max(1, self.num_logical_shards // self.global_batch_size)

    @property
    def shard_samples_per_step(self) -> int:
        """C, the number of samples that a shard serves in a step in which it takes part; 1 if N is a multiple of O."""
        return max(1, self.global_batch_size // self.num_logical_shards)

    @property
    def batch_period(self) -> int:
        """The number of micro batches after which an aligned layout repeats the same sequence of shards."""
        return self.shard_period_steps * self.gradient_accumulation_steps

    @cached_property
    def aligned(self) -> bool:
        """True if each shard is always served by the same worker, so that the order does not depend on the topology."""
        return is_aligned(*self._sizes_by_name().values())

    @cached_property
    def unaligned_reason(self) -> str | None:
        """A text that says that the order depends on the topology, with the nearest aligned sizes; `None` if aligned."""
        if self.aligned:
            return None
        sizes, remedies = self._sizes_by_name(), list[str]()
        for name in ("global_batch_size", "dp_world_size", "micro_batch_size", "num_workers"):
            nearest = _nearest_sizes(sizes[name], lambda size, name=name: is_aligned(*{**sizes, name: size}.values()))
            remedies += [f"{name}={' or '.join(map(str, nearest))}"] if nearest else []
        return (
            f"{', '.join(f'{name}={size}' for name, size in sizes.items())} do not divide so that each logical shard has one "
            f"worker for good. One of these alone keeps the order: {', '.join(remedies) or 'none'}; rd.plan lists all that fit"
        )

    def _sizes_by_name(self) -> dict[str, int]:
        size_names = ("num_logical_shards", "global_batch_size", "dp_world_size", "micro_batch_size")
        return {**{name: getattr(self, name) for name in size_names}, "num_workers": self.workers_per_rank}

    def owned_shards(self, rank: int, worker: int | None = None) -> range:
        """Return the contiguous block of shards that a rank owns, or the part of it that belongs to one worker."""
        block = block_of(rank, self.dp_world_size, self.num_logical_shards)
        if worker is None:
            return block
        num_rank_shards, k = len(block), self.workers_per_rank
        return range(block.start + worker * num_rank_shards // k, block.start + (worker + 1) * num_rank_shards // k)

    def served_shards(self, rank: int, worker: int) -> Ints:
        """Return the shards, ascending, that one worker of a rank serves: in the micro batches u with ``u % K == worker``."""
        if not self.aligned:
            return np.array(self.owned_shards(rank, worker), dtype=np.int64)
        t, m = np.divmod(np.arange(worker, self.batch_period, self.workers_per_rank), self.gradient_accumulation_steps)
        first_row = rank * self.global_batch_size // self.dp_world_size + m[:, None] * self.micro_batch_size
        batch_rows = first_row + np.arange(self.micro_batch_size)
        return np.unique(batch_rows // self.shard_samples_per_step * self.shard_period_steps + t[:, None])

    def samples_delivered(self, samples_before: Ints, first_batch: int, stop_batch: int) -> Ints:
        """Return the number of samples that each shard delivers in the micro batches ``first_batch .. stop_batch - 1``.

        Args:
            samples_before: ``int64[N]``, the samples that each has delivered before ``first_batch``.

        Returns:
            ``int64[N]``.
        """
        if self.aligned:
            return self._aligned_samples_before(stop_batch) - self._aligned_samples_before(first_batch)
        num_batches_by_worker = self._batches_by_worker(stop_batch) - self._batches_by_worker(first_batch)
        return water_fill(samples_before, num_batches_by_worker * self.micro_batch_size, self._block_starts)

    def epoch_remainder_start(self, samples: Ints, samples_left: Ints, first_batch: int) -> int:
        """Return the micro batch at which the main phase of an epoch ends: the last step boundary before a shard runs out.

        Args:
            samples: ``int64[N]``, the samples that each shard has delivered before ``first_batch``.
            samples_left: ``int64[N]``, the samples that each has left.
            first_batch: The next micro batch, counted from `origin`.

        Returns:
            u, a multiple of A; less than ``first_batch`` if the step that ``first_batch`` is part of cannot be completed.
        """
        a, k = self.gradient_accumulation_steps, self.workers_per_rank
        if self.aligned:
            total_samples = samples_left + self._aligned_samples_before(first_batch)
            steps = self._first_steps() + (total_samples // self.shard_samples_per_step) * self.shard_period_steps
            return int(steps.min()) * a
        more_batches = max_samples_served(samples, samples_left, self._block_starts) // self.micro_batch_size
        max_batches = self._batches_by_worker(first_batch) + more_batches
        return int((max_batches * k + np.arange(len(max_batches)) % k).min()) // a * a

    @cached_property
    def _block_starts(self) -> Ints:
        """The first shard of each worker of each rank, with N at the end: ``int64[W * K + 1]``."""
        rank_starts = np.arange(self.dp_world_size + 1, dtype=np.int64) * self.num_logical_shards // self.dp_world_size
        worker_offsets = np.diff(rank_starts)[:, None] * np.arange(self.workers_per_rank) // self.workers_per_rank
        return np.append(rank_starts[:-1, None] + worker_offsets, self.num_logical_shards)

    def _batches_by_worker(self, u: int) -> Ints:
        """Return how many of the micro batches ``0 .. u-1`` each worker of each rank makes: ``int64[W * K]``."""
        worker = np.arange(self.dp_world_size * self.workers_per_rank, dtype=np.int64) % self.workers_per_rank
        return (u - worker + self.workers_per_rank - 1) // self.workers_per_rank

    def _first_steps(self) -> Ints:
        return np.arange(self.num_logical_shards, dtype=np.int64) % self.shard_period_steps

    def _aligned_samples_before(self, u: int) -> Ints:
        """Return the samples that each shard of an aligned layout delivers before micro batch ``u``: ``int64[N]``."""
        t, m = divmod(u, self.gradient_accumulation_steps)
        g, c, first_step = self.shard_period_steps, self.shard_samples_per_step, self._first_steps()
        shards = np.arange(self.num_logical_shards, dtype=np.int64)
        row_in_rank = shards // g * c % (self.global_batch_size // self.dp_world_size)
        served_of_begun_step = np.clip(m * self.micro_batch_size - row_in_rank, 0, c) * (first_step == t % g)
        return (t - first_step + g - 1) // g * c + served_of_begun_step


def block_of(rank: int, world_size: int, num_logical_shards: int) -> range:
    """Return the contiguous block of logical shards that a rank owns, as a range."""
    return range(rank * num_logical_shards // world_size, (rank + 1) * num_logical_shards // world_size)


def owner_ranks(world_size: int, num_logical_shards: int) -> Ints:
    """Return the rank that owns each logical shard: ``int64[N]``."""
    return ((np.arange(num_logical_shards, dtype=np.int64) + 1) * world_size - 1) // num_logical_shards


def is_aligned(n: int, o: int, w: int, b: int, k: int) -> bool:
    """True if each shard is always served by the same worker, in a topology of these sizes."""
    a, k = o // (w * b), max(k, 1)
    if o % (w * b):
        return False
    if n % o == 0:
        return n // o * a % k == 0
    if o % n or n % w:
        return False
    c = o // n
    return (b % c == 0 and a % k == 0) or (c % b == 0 and k == 1)


def _nearest_sizes(start_size: int, size_fits: Callable[[int], bool]) -> list[int]:
    lower_size = next((size for size in range(start_size - 1, 0, -1) if size_fits(size)), None)
    upper_size = next((size for size in range(start_size + 1, 64 * start_size + 64) if size_fits(size)), None)
    return [size for size in (lower_size, upper_size) if size is not None]


def default_num_logical_shards(global_batch_size: int) -> int:
    """Return the default number of logical shards, N: 4 times the global batch size O, or less if that is more than 2,048.

    4 * O keeps the order for K = 0, 1, 2 and 4 workers; above 2,048 it costs too much. Then N is 2 * O or O. If O is more than
    2,048, N is the divisor of O from 256 to 2,048 that most world sizes divide, or O itself if it has no such divisor.
    """
    o = global_batch_size
    if o <= _MAX_DEFAULT_SHARDS:
        return next(k for k in (4, 2, 1) if k * o <= _MAX_DEFAULT_SHARDS) * o
    divisors = [n for n in range(_MIN_DEFAULT_SHARDS, _MAX_DEFAULT_SHARDS + 1) if o % n == 0]
    return max(divisors, key=lambda n: (sum(n % w == 0 for w in range(1, n + 1)), n), default=o)
