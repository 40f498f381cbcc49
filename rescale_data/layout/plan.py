"""What may a run rescale to? The topologies that keep its order, as a table that prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rescale_data.errors import require_int
from rescale_data.layout.layout import Layout, default_num_logical_shards


@dataclass(frozen=True)
class Option:
    """One topology: dp world size W, micro batch b, workers K, and A, the micro batches of a rank in one step."""

    dp_world_size: int
    micro_batch_size: int
    num_workers: int
    gradient_accumulation_steps: int


class Plan(Sequence[Option]):
    """The aligned topologies of a global batch, ascending in W, b and K; ``print`` shows them as a table."""

    def __init__(self, global_batch_size: int, num_logical_shards: int, options: Sequence[Option]) -> None:
        self.global_batch_size, self.num_logical_shards = global_batch_size, num_logical_shards
        self._options = tuple(options)

    def __len__(self) -> int:
        return len(self._options)

    def __getitem__(self, index: int) -> Option:  # type: ignore[override]
        return self._options[index]

    def __iter__(self) -> Iterator[Option]:
        return iter(self._options)

    def __str__(self) -> str:
        title = (
            f"global_batch_size={self.global_batch_size}, num_logical_shards={self.num_logical_shards}: "
            f"{'these' if self._options else 'no ranks, micro batch and workers that were asked for'} keep the same global "
            f"batches\n"
        )
        rows = ["  ranks W  micro batch b  accumulation A  workers K"]
        rows += [f"{w:9}{b:15}{a:16}  {', '.join(map(str, ks))}" for (w, b, a), ks in self._by_topology().items()]
        return title + "\n".join(rows)

    __repr__ = __str__

    def _by_topology(self) -> dict[tuple[int, int, int], list[int]]:
        found: dict[tuple[int, int, int], list[int]] = {}
        for option in self._options:
            key = (option.dp_world_size, option.micro_batch_size, option.gradient_accumulation_steps)
            found.setdefault(key, []).append(option.num_workers)
        return found


def plan(
    global_batch_size: int,
    micro_batch_size: int | None = None,
    num_logical_shards: int | None = None,
    num_workers: int | Sequence[int] = (0, 1, 2, 4, 8),
) -> Plan:
    """Which topologies are aligned, so that a run may rescale between them without a change of order.

    Args:
        global_batch_size: O.
        micro_batch_size: b; default: every one that fits.
        num_logical_shards: N; default as in `DataLoader`: 4 * O, at most about 2,048.
        num_workers: The K to look at, one or several.

    Raises:
        ValueError: A number is out of range.

    Returns:
        A sequence of `Option` that prints as a table.
    """
    require_int(global_batch_size=global_batch_size)
    o = global_batch_size
    n = default_num_logical_shards(o) if num_logical_shards is None else num_logical_shards
    workers = [num_workers] if isinstance(num_workers, int) else num_workers
    _check(
        1,
        global_batch_size=o,
        num_logical_shards=n,
        micro_batch_size=1 if micro_batch_size is None else micro_batch_size,
    )
    sizes = range(1, o + 1) if micro_batch_size is None else [micro_batch_size]
    for k in workers:
        _check(0, num_workers=k)
    options = [
        Option(w, b, k, o // (w * b))
        for w in _divisors(o)
        for b in sizes
        if o % (w * b) == 0
        for k in workers
        if _aligned(n, o, w, b, k)
    ]
    return Plan(o, n, options)


def _check(least: int, **values: int) -> None:
    require_int(**values)
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value}: it is at least {least}.")


def _aligned(n: int, o: int, w: int, b: int, k: int) -> bool:
    try:
        layout = Layout(num_logical_shards=n, global_batch_size=o, dp_world_size=w, micro_batch_size=b, num_workers=k)
    except ValueError:
        return False
    return layout.aligned


def _divisors(value: int) -> list[int]:
    return [d for d in range(1, value + 1) if value % d == 0]
