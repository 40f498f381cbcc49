"""Check that each epoch of a pipeline yields every row of its sources once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from rescale_data.engine.recipe import Recipe
from rescale_data.nodes.base import Node
from rescale_data.sources.source import Source
from rescale_data.state import flatten

_NUM_EPOCHS = 3
_MAX_ROWS = 2000
_LEFT_OUT_COUNTERS = ("filtered", "skipped", "blocked")


class _NotARow(Exception):
    """Error raised because a sample is neither a row of a source nor a list of rows."""


def check_epochs(recipe: Recipe) -> None:
    """Raise ``AssertionError`` if an epoch repeats a row, or lacks one that is not counted as left out.

    Nothing is checked of other samples, of mixtures without an end, of more than 2,000 rows, and of sources with fewer rows
    than logical shards: there a shard without a row goes on to its next epoch.
    """
    nodes = [replace(recipe, repeat=False, verify=False).build(shard) for shard in range(recipe.num_logical_shards)]
    sources = [node.reads for _, node in nodes[0].walk() if isinstance(node.reads, Source)]
    if not 0 < sum(source.num_rows for source in sources) <= _MAX_ROWS:
        return
    if any(source.num_rows < recipe.num_logical_shards for source in sources):
        return
    rows = Counter(key for source in sources for key in _readable_keys(source))
    for epoch in range(_NUM_EPOCHS):
        num_left_out, served_rows = -_num_left_out(nodes), Counter[Hashable]()
        try:
            for node in nodes:
                served_rows.update(key for sample in islice(node, 2 * rows.total()) for key in _keys_in(sample, rows))
                if next(node, None) is not None:
                    return
                node.reset(None)
        except _NotARow:
            return
        _compare_epoch(epoch, rows, served_rows, num_left_out + _num_left_out(nodes))


def _compare_epoch(epoch: int, rows: Counter[Hashable], served_rows: Counter[Hashable], num_left_out: int) -> None:
    absent, extra = rows - served_rows, served_rows - rows
    if extra or absent.total() > num_left_out:
        raise AssertionError(
            f"Epoch {epoch} of the pipeline is not that of its sources: of {rows.total()} rows {absent.total()} do not come, "
            f"where {num_left_out} are counted as filtered, skipped or blocked, and {extra.total()} come too often (the first: "
            f"{next(iter(extra or absent))}). Give whole_epochs=False if that is meant, as with Batcher(drop_last=True)."
        )


def _readable_keys(source: Source) -> Iterator[Hashable]:
    """Yield keys of the rows that `Reader(on_error="skip")` would not leave out."""
    for index in range(source.num_rows):
        with suppress(Exception):
            yield _row_key(source.row(index))


def _keys_in(sample: Any, row_counts: Counter[Hashable]) -> Iterator[Hashable]:
    key = _row_key(sample)
    if key in row_counts:
        yield key
    elif isinstance(sample, list | tuple):
        for item in cast(list[Any], sample):
            yield from _keys_in(item, row_counts)
    else:
        raise _NotARow


def _num_left_out(nodes: list[Node[Any]]) -> int:
    states = (flatten(node.get_state()) for node in nodes)
    return sum(int(value) for state in states for path, value in state if path[-1] in _LEFT_OUT_COUNTERS)


def _row_key(value: Any) -> Hashable:
    """Return a hashable key of a row; equal rows have equal keys."""
    if isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        return tuple((str(name), _row_key(mapping[name])) for name in sorted(mapping, key=str))
    if isinstance(value, list | tuple):
        return tuple(_row_key(item) for item in cast(list[Any], value))
    if isinstance(value, np.ndarray | torch.Tensor | np.generic):
        return str(value.dtype), repr(value.tolist())
    return value if isinstance(value, Hashable) else repr(value)
