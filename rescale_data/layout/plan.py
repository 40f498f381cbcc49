"""`plan`: lists the topologies between which a run keeps its order, as a table that prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rescale_data.errors import checks_argument_types, require_int, require_type
from rescale_data.layout.layout import default_num_logical_shards, is_aligned

_MAX_GLOBAL_BATCH_SIZE = 2**32
_NUM_LOADER_COLUMNS, _NUM_READER_COLUMNS = 3, 3  # of the table: samples, remainder and stamp; epoch, row and skipped


@dataclass(frozen=True)
class LayoutOption:
    """One topology: dp world size W, micro batch size b, workers K, and A, the micro batches of a rank in one step."""

    dp_world_size: int
    micro_batch_size: int
    num_workers: int
    gradient_accumulation_steps: int


class HasRows(Protocol):
    """Protocol of a source that `plan` describes: a name and a number of rows."""

    @property
    def name(self) -> str: ...
    @property
    def num_rows(self) -> int: ...


@dataclass(frozen=True, repr=False)
class Plan(Sequence[LayoutOption]):
    """The aligned topologies of one or several global batch sizes, in ascending order of W, b and K.

    ``print`` shows them as a table, a row for each number of ranks and workers that go with them.
    """

    global_batch_sizes: tuple[int, ...]
    num_logical_shards: int
    options: tuple[LayoutOption, ...]
    sources: tuple[HasRows, ...]

    def __len__(self) -> int:
        return len(self.options)

    def __getitem__(self, index: int) -> LayoutOption:  # type: ignore[override]
        return self.options[index]

    def __str__(self) -> str:
        workers_by_sizes = dict[tuple[int, int], list[int]]()
        for option in self.options:
            workers_by_sizes.setdefault((option.dp_world_size, option.micro_batch_size), []).append(option.num_workers)
        sizes_by_workers = dict[tuple[int, str], list[int]]()
        for (w, b), workers in workers_by_sizes.items():
            sizes_by_workers.setdefault((w, _join_ints(workers)), []).append(b)
        subject = "these" if self.options else "no ranks, micro batch and workers that were asked for"
        width = max([13, *(len(workers) for _, workers in sizes_by_workers)])
        lines = [
            f"global_batch_size={_join_ints(self.global_batch_sizes)}, num_logical_shards={self.num_logical_shards}: {subject} "
            f"keep the same global batches",
            f"  ranks W  {'workers K':{width}}  micro batches b",
            *(f"{w:9}  {workers:{width}}  {_join_ints(sizes)}" for (w, workers), sizes in sizes_by_workers.items()),
        ]
        return "\n".join([*lines, *self._cost_lines()])

    __repr__ = __str__

    def _cost_lines(self) -> list[str]:
        """Return lines about the memory and checkpoint size that N logical shards cost, and about the smallest source."""
        if not self.sources:
            return []
        n, num_sources = self.num_logical_shards, len(self.sources)
        max_ranks = max((option.dp_world_size for option in self.options), default=1)
        sizes = [getattr(source, "fragment_bytes", 0) for source in self.sources]
        smallest = min(self.sources, key=lambda source: source.num_rows)
        table_bytes = 8 * n * (_NUM_LOADER_COLUMNS + _NUM_READER_COLUMNS * num_sources)
        return [
            f"  {n} logical shards of {num_sources} source(s): each keeps a fragment of each source open",
            *(
                f"    {w:5} rank(s): {-(-n // w) * num_sources} open fragments a rank, "
                f"{format_size(-(-n // w) * sum(sizes))} decoded"
                for w in sorted({1, max_ranks})
            ),
            f"    the table in a checkpoint: at least {format_size(table_bytes)}",
            f"    the smallest source, {smallest.name}: {smallest.num_rows} rows, {smallest.num_rows / n:.3g} a logical shard",
        ]


@checks_argument_types
def plan(
    global_batch_size: int | Sequence[int],
    micro_batch_size: int | None = None,
    num_logical_shards: int | None = None,
    num_workers: int | Sequence[int] = (0, 1, 2, 4, 8),
    sources: Sequence[HasRows] = (),
) -> Plan:
    """Return the aligned topologies, between which a run may rescale without changing its order.

    Args:
        global_batch_size: O; several, of a ramp (`DataLoader.reopen`), for what is aligned with all of them.
        micro_batch_size: b; default: every one that fits.
        num_logical_shards: N; default as in `DataLoader`: 4 * O, at most about 2,048. Of several O, the one of which most
            topologies are aligned with all: give it to `DataLoader`.
        num_workers: The K to look at, one or several.
        sources: The sources of the run: the plan then prints what N means for memory, checkpoints and the smallest source.

    Raises:
        ValueError: A number is out of range.

    Returns:
        A sequence of `LayoutOption` that prints as a table.

    Example:
        >>> import rescale_data as rd
        >>> rd.plan([1024, 1536, 2048]).num_logical_shards
        6144
    """
    require_type(Sequence, "a list of sources", sources=sources)
    global_sizes = _require_ints(1, global_batch_size=global_batch_size)
    worker_counts = _require_ints(0, num_workers=num_workers)
    if not global_sizes:
        raise ValueError("global_batch_size is empty: give one O, or those of a ramp.")
    if max(global_sizes) > _MAX_GLOBAL_BATCH_SIZE:
        raise ValueError(
            f"global_batch_size={max(global_sizes)}: a plan goes through all its divisors, up to {_MAX_GLOBAL_BATCH_SIZE}."
        )
    _require_ints(1, micro_batch_size=1 if micro_batch_size is None else micro_batch_size)
    tried_shard_counts = _default_shard_counts(global_sizes) if num_logical_shards is None else [num_logical_shards]
    options_by_shard_count = {
        n: _topologies(global_sizes, n, micro_batch_size, worker_counts)
        for n in _require_ints(1, num_logical_shards=tried_shard_counts)
    }
    n, options = max(options_by_shard_count.items(), key=lambda item: (len(item[1]), -item[0]))
    return Plan(tuple(global_sizes), n, tuple(options), tuple(sources))


def _default_shard_counts(global_sizes: Sequence[int]) -> list[int]:
    """Return the numbers of logical shards to try for these global batch sizes."""
    defaults = {default_num_logical_shards(o) for o in global_sizes}
    return [*defaults] if len(set(global_sizes)) == 1 else [*defaults, math.lcm(*global_sizes), math.gcd(*global_sizes)]


def _topologies(global_sizes: Sequence[int], n: int, b: int | None, worker_counts: Sequence[int]) -> list[LayoutOption]:
    """Return the topologies that are aligned with every global batch size in ``global_sizes``."""
    sizes_gcd = math.gcd(*global_sizes)
    micro_batch_sizes = [b] if b is not None else _divisors(sizes_gcd)
    return [
        LayoutOption(w, size, k, global_sizes[0] // (w * size))
        for w in _divisors(sizes_gcd)
        for size in micro_batch_sizes
        if sizes_gcd % (w * size) == 0
        for k in worker_counts
        if all(is_aligned(n, o, w, size, k) for o in global_sizes)
    ]


def _join_ints(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def format_size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, for people to read."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _require_ints(minimum: int, **argument: object) -> list[int]:
    """Return an argument that is an int, or a sequence of ints, as a list of ints that are at least ``minimum``."""
    ((name, value),) = argument.items()
    values: Sequence[object] = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]  # pyright: ignore[reportUnknownVariableType]
    numbers = [number for item in values for number in require_int(**{name: item})]
    for number in numbers:
        if number < minimum:
            raise ValueError(f"{name}={number}: it is at least {minimum}.")
    return numbers


def _divisors(value: int) -> list[int]:
    small_divisors = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    return sorted({*small_divisors, *(value // divisor for divisor in small_divisors)})
