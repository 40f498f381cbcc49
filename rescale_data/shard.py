"""`Shard`: the logical shard for which a pipeline is built."""

from __future__ import annotations

from dataclasses import dataclass

from rescale_data.errors import checks_argument_types


@checks_argument_types
@dataclass(frozen=True)
class Shard:
    """A logical shard: one of ``num_logical_shards`` independent streams of samples.

    The defaults make a pipeline run in a notebook or a debugger: ``next(pipeline(rd.Shard()))``.

    Args:
        index: Number of this shard, ``0 <= index < num_logical_shards``.
        num_logical_shards: N, fixed for the whole run.
        seed: Seed of every order that the pipeline derives.
        repeat: Whether the stream is endless. If so a packed sample may span two epochs; if not, the root of the
            pipeline raises ``StopIteration`` at the end of each epoch.

        verify: Whether readers keep a digest of the rows that they have delivered, and prove at an epoch's end that each
            was delivered once.
        global_batch_size: O, samples of an optimizer step over all shards. It may change in a run: whatever depends on it
            belongs to a node's `parameters`, and another one is then refused.
        provenance: Whether readers say of each sample, if it is a dict, which row it is (`Reader`).

    Raises:
        ValueError: ``index`` is not in ``[0, num_logical_shards)``.

    Example:
        >>> import rescale_data as rd
        >>> shards = [rd.Shard(index, num_logical_shards=2) for index in range(2)]
        >>> [list(rd.Reader(range(8), shard, shuffle=False)) for shard in shards]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    index: int = 0
    num_logical_shards: int = 1
    seed: int = 0
    repeat: bool = False
    verify: bool = False
    global_batch_size: int = 1
    provenance: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_logical_shards:
            raise ValueError(
                f"Shard(index={self.index}, num_logical_shards={self.num_logical_shards}): the index of a logical "
                f"shard is at least 0 and less than the number of logical shards."
            )


def require_shard(shard: object, node: object) -> None:
    """Raise ``TypeError`` if a node's logical shard is not a `Shard`."""
    if not isinstance(shard, Shard):
        raise TypeError(
            f"rd.{type(node).__name__} was given the shard {shard!r}: pass what the pipeline is given, or rd.Shard() to try."
        )
