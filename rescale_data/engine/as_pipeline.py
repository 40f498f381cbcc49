"""From what a loader may be given, files or rows or streams, to the pipeline that reads it."""

from __future__ import annotations

import functools
import os
from typing import Any

from rescale_data.engine.recipe import Pipeline
from rescale_data.nodes.base import BaseNode
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.stream_reader import StreamReader
from rescale_data.shard import Shard
from rescale_data.sources.dataset import MapStyle, as_source
from rescale_data.sources.iterable import IterableSource
from rescale_data.sources.source import Source


def as_pipeline(data: Pipeline | Source | IterableSource | MapStyle) -> Pipeline:
    """A pipeline itself, or the one that makes a sample of each row of a source or a map-style dataset."""
    if isinstance(data, IterableSource):
        return functools.partial(_read_streams, data)
    if isinstance(data, Source | MapStyle | os.PathLike) and not isinstance(data, type):
        return functools.partial(_read_rows, as_source(data))
    if not callable(data):
        raise TypeError(
            f"A {type(data).__name__} is no pipeline: give a function Shard -> node, a source, or a dataset with __len__ and "
            f"__getitem__."
        )
    return data


def _read_streams(source: IterableSource, shard: Shard) -> BaseNode[Any]:
    """The pipeline of a loader that is given streams."""
    return StreamReader(source, shard)


def _read_rows(source: Source, shard: Shard) -> BaseNode[Any]:
    """The pipeline of a loader that is given a source."""
    return Reader(source, shard)
