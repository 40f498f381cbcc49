"""The contract of a node, checked at every position of its stream; and segments of a run, by logical shard."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import rescale_data as rd
from rescale_data.nodes.base import Node
from rescale_data.sources.decoded.cache import cache

N, BATCH = 6, 12
"""Logical shards and the global batch of a segment, if it is not said otherwise."""


def plain(value: Any) -> Any:
    """A sample as Python values, which compare."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def endless(node: Node[Any]) -> Iterator[Any]:
    """The samples of a node, epoch after epoch."""
    silent = 0
    while silent < 3:
        silent += 1
        for sample in node:
            silent = 0
            yield sample
        assert next(node, None) is None, "an epoch that has ended stays ended"
        node.reset(node.get_state())


def take(node: Node[Any], num_samples: int) -> list[Any]:
    return [plain(sample) for sample in itertools.islice(endless(node), num_samples)]


def assert_resumes(build: Callable[[], Node[Any]], num_samples: int, ahead: int = 6) -> list[Any]:
    """From every position of the first samples the stream goes on as if it had not been left; returns the stream.

    By ``reset(get_state())``, twice in a row; bound to a row of a table; after what was cached is gone; and by `skip`.
    """
    whole = take(build(), num_samples + ahead)
    live = build()
    stream = endless(live)
    rows = [live.position.tolist()]
    for drawn in range(num_samples):
        expected = whole[drawn : drawn + ahead]
        resumed = build()
        resumed.reset(live.get_state())
        assert resumed.position == live.position
        again = build()
        again.reset(resumed.get_state())
        assert take(again, ahead) == expected, drawn
        if drawn % 3 == 1:
            cache().clear()
        assert plain(next(stream)) == whole[drawn], drawn
        rows.append(live.position.tolist())
    _assert_binds(build, rows, whole)
    return whole


def _assert_binds(build: Callable[[], Node[Any]], rows: list[list[int]], whole: list[Any]) -> None:
    """At each row of a table a new node, and one that is moved from row to row, forwards and back, write the next row there."""
    node, table, num = build(), np.array(rows), len(rows) - 1
    for step, i in enumerate([*range(num), *range(num), *reversed(range(num))]):
        row = table[i].copy()
        node = build() if step < num else node
        node.bind(row.data)
        found = list(itertools.islice(node, 1))
        if found:  # else the epoch ends here
            assert plain(found[0]) == whole[i], i
            assert row.tolist() == rows[i + 1], i
    for _ in range(2):  # from the beginning, which nothing that was read has changed
        node.bind(np.array(rows[0]).data)
        assert take(node, num) == whole[:num]


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
