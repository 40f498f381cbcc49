"""Converts the first argument of `DataLoader` (a source, files, a dataset, streams or a function) to a pipeline."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from torch.utils.data import IterableDataset

from rescale_data.engine.recipe import Pipeline
from rescale_data.nodes.base import BaseNode
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.stream_reader import StreamReader
from rescale_data.sources.dataset import MapStyle, as_source
from rescale_data.sources.iterable import IterableSource, Shardable
from rescale_data.sources.source import Source

_ARGUMENT_REPLACEMENTS = {
    "batch_size": "micro_batch_size= says the samples of one batch of a rank, global_batch_size= those of a step of all ranks",
    "sampler": "the order follows from shuffle= and seed=, and reshards with the ranks; weights are rd.WeightedSampler's",
    "drop_last": "tail='drop' or tail='pad' says what becomes of the rest of an epoch",
    "generator": "seed= says the order, at any number of ranks",
    "persistent_workers": "workers live until close()",
    "in_order": "batches always come in order",
    "pin_memory_device": "pin_memory= pins for the accelerator that there is",
    "snapshot_every_n_steps": "a state is exact at every batch, and costs no traffic to workers",
    "dataset": "the dataset, the source or the pipeline is the first argument, without a name",
}
_ARGUMENT_REPLACEMENTS["batch_sampler"] = _ARGUMENT_REPLACEMENTS["sampler"]


def refuse_arguments(arguments: Mapping[str, object], num_positional: int) -> None:
    """Raise ``TypeError`` for an argument of torch's ``DataLoader`` that this loader lacks; the message names a replacement."""
    for argument in ["batch_size"] * (num_positional > 1) + list(arguments):
        if argument in _ARGUMENT_REPLACEMENTS:
            raise TypeError(f"rd.DataLoader has no argument {argument}=: {_ARGUMENT_REPLACEMENTS[argument]}.")


def as_pipeline(
    data: Pipeline | Source | IterableSource | Shardable | MapStyle, shuffle: bool | int | None = None
) -> Pipeline:
    """Return `data` if it is a pipeline, else a pipeline that yields each row of a source, a dataset or a stream as a sample.

    Args:
        shuffle: See `DataLoader`.
    """
    name = f"The class {data.__name__}" if isinstance(data, type) else f"A {type(data).__name__}"
    no_pipeline = TypeError(
        f"{name} is no pipeline: give a function that makes the nodes of one logical shard, Shard -> node, or an object, not "
        f"its class: a source, a dataset with __len__ and __getitem__, or an rd.IterableSource of streams."
    )
    if isinstance(data, type) and not issubclass(data, BaseNode):
        raise no_pipeline
    if isinstance(data, Source | MapStyle | os.PathLike) and not isinstance(data, type | IterableSource):
        is_shuffled = True if shuffle is None else shuffle
        return functools.partial(Reader, as_source(data), shuffle=is_shuffled, by_global_batch=shuffle is False)
    if shuffle is not None:
        raise TypeError(
            f"shuffle={shuffle!r} with a {type(data).__name__}: only rows of a source or a dataset are shuffled by the loader. "
            f"A pipeline says it where it reads, rd.Reader(source, shard, shuffle=...); streams are read as they come."
        )
    if isinstance(data, IterableSource | Shardable):
        return functools.partial(StreamReader, data if isinstance(data, IterableSource) else IterableSource(data))
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"A {type(data).__name__} is an IterableDataset, which no rank can read in part: give rd.IterableSource(function, "
            f"num_streams=...), whose function makes stream number i, or a dataset with __len__ and __getitem__."
        )
    if not callable(data):
        raise no_pipeline
    return data
