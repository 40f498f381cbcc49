"""Loaders of all ranks, and what each logical shard yields in a segment of a run."""

from collections import defaultdict
from typing import Any

import rescale_data as rd

N, BATCH = 6, 12


def ranks_of(pipeline: Any, world_size: int = 1, state: Any = None, **given: Any) -> list[rd.DataLoader]:
    """Return the loaders of all ranks, which have loaded `state`; endless, if `given` does not say otherwise."""
    sizes = {"global_batch_size": BATCH, "micro_batch_size": BATCH // world_size, "num_logical_shards": N}
    given = {"repeat": True, **sizes, **given, "dp_world_size": world_size}
    ranks = [rd.DataLoader(pipeline, dp_rank=rank, **given) for rank in range(world_size)]
    for loader in ranks if state is not None else []:
        loader.load_state_dict(state)
    return ranks


def alone(pipeline: Any, state: Any = None, **given: Any) -> rd.DataLoader:
    """Return the loader of one rank and one logical shard, a sample a batch."""
    loader = rd.DataLoader(pipeline, **{"global_batch_size": 1, "num_logical_shards": 1, **given})
    if state is not None:
        loader.load_state_dict(state)
    return loader


def samples_by_shard(ranks: list[rd.DataLoader], num_micro_batches: int) -> dict[int, list[dict[str, Any]]]:
    """Return the samples of each logical shard in the next micro batches of all ranks."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for loader in ranks * num_micro_batches:
        taken = loader._stream.take()
        for i, shard in enumerate(taken.shards):
            found[shard].append({key: value[i] for key, value in taken.batch.items()})
    return found
