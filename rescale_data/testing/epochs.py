"""A check that each epoch of a pipeline holds the rows of its sources, where its samples are such rows."""

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

_EPOCHS = 3
_READ_WHOLE = 2000
_COUNTED = ("filtered", "skipped", "blocked")


class _Other(Exception):
    """A sample is no row of a source, and no list of rows."""


def check_epochs(recipe: Recipe) -> None:
    """``AssertionError`` where an epoch lacks rows that are not counted as filtered, skipped or blocked, or has some twice.

    Nothing is checked of other samples, of mixtures without an end, of more than 2,000 rows, and of sources with fewer rows
    than logical shards: there a shard without a row goes on to its next epoch.
    """
    nodes = [replace(recipe, repeat=False, verify=False).build(shard) for shard in range(recipe.num_logical_shards)]
    sources = [node.reads for _, node in nodes[0].walk() if isinstance(node.reads, Source)]
    if not 0 < sum(source.num_rows for source in sources) <= _READ_WHOLE:
        return
    if any(source.num_rows < recipe.num_logical_shards for source in sources):
        return
    rows = Counter(key for source in sources for key in _readable(source))
    for epoch in range(_EPOCHS):
        counted, served = -_counted(nodes), Counter[Hashable]()
        try:
            for node in nodes:
                served.update(key for sample in islice(node, 2 * rows.total()) for key in _rows_in(sample, rows))
                if next(node, None) is not None:
                    return
                node.reset(None)
        except _Other:
            return
        _compare(epoch, rows, served, counted + _counted(nodes))


def _compare(epoch: int, rows: Counter[Hashable], served: Counter[Hashable], counted: int) -> None:
    missing, extra = rows - served, served - rows
    if extra or missing.total() > counted:
        raise AssertionError(
            f"Epoch {epoch} of the pipeline is not that of its sources: of {rows.total()} rows {missing.total()} do not come, "
            f"where {counted} are counted as filtered, skipped or blocked, and {extra.total()} come too often (the first: "
            f"{next(iter(extra or missing))}). Give whole_epochs=False if that is meant, as with Batcher(drop_last=True)."
        )


def _readable(source: Source) -> Iterator[Hashable]:
    """The rows that `Reader(on_error="skip")` would not leave out."""
    for index in range(source.num_rows):
        with suppress(Exception):
            yield _key(source.row(index))


def _rows_in(sample: Any, rows: Counter[Hashable]) -> Iterator[Hashable]:
    key = _key(sample)
    if key in rows:
        yield key
    elif isinstance(sample, list | tuple):
        for part in cast(list[Any], sample):
            yield from _rows_in(part, rows)
    else:
        raise _Other


def _counted(nodes: list[Node[Any]]) -> int:
    states = (flatten(node.get_state()) for node in nodes)
    return sum(int(value) for state in states for path, value in state if path[-1] in _COUNTED)


def _key(value: Any) -> Hashable:
    """A row as something that compares."""
    if isinstance(value, Mapping):
        given = cast(Mapping[Any, Any], value)
        return tuple((str(name), _key(given[name])) for name in sorted(given, key=str))
    if isinstance(value, list | tuple):
        return tuple(_key(part) for part in cast(list[Any], value))
    if isinstance(value, np.ndarray | torch.Tensor | np.generic):
        return str(value.dtype), repr(value.tolist())
    return value if isinstance(value, Hashable) else repr(value)
