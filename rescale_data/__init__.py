"""A training run's data order that reshards like its model.

Names are imported when they are used: torch and pyarrow take their time, and the command line seldom needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rescale_data import testing
    from rescale_data.audit.audit import Audit
    from rescale_data.broadcast import Broadcast
    from rescale_data.checkpoint.data_state import check_checkpoint, load_changed
    from rescale_data.engine.collate import pad_collate
    from rescale_data.engine.shards import LogicalShards
    from rescale_data.engine.states.statedict import whole_state
    from rescale_data.errors import DataStateError
    from rescale_data.layout.plan import plan
    from rescale_data.loader import DataLoader
    from rescale_data.nodes.base import BaseNode, Node
    from rescale_data.nodes.clean import CleanDocuments
    from rescale_data.nodes.exclude import Exclude
    from rescale_data.nodes.filter import Filter
    from rescale_data.nodes.map import Map, RandomMap
    from rescale_data.nodes.mixture.sampler import WeightedSampler
    from rescale_data.nodes.mixture.schedule import Schedule
    from rescale_data.nodes.mixture.sizes import weights_by_size
    from rescale_data.nodes.packing.packer import TokenPacker
    from rescale_data.nodes.packing.varlen import flat_cu_seqlens
    from rescale_data.nodes.packing.whole import WholeDocumentPacker
    from rescale_data.nodes.reader import Reader
    from rescale_data.nodes.shuffle import Shuffle
    from rescale_data.nodes.stream_reader import StreamReader
    from rescale_data.nodes.tokenize import Tokenize
    from rescale_data.shard import Shard
    from rescale_data.sources.arrow import ArrowSource
    from rescale_data.sources.dataset import DatasetSource
    from rescale_data.sources.files.remote import Remote
    from rescale_data.sources.iterable import IterableSource
    from rescale_data.sources.jsonl import JsonlSource
    from rescale_data.sources.megatron import MegatronSource
    from rescale_data.sources.parquet import ParquetSource
    from rescale_data.sources.source import Source
    from rescale_data.sources.synthetic import SyntheticSource
    from rescale_data.sources.webdataset import WebDatasetSource

__all__ = [
    "ArrowSource",
    "Audit",
    "BaseNode",
    "Broadcast",
    "CleanDocuments",
    "DataLoader",
    "DataStateError",
    "DatasetSource",
    "Exclude",
    "Filter",
    "IterableSource",
    "JsonlSource",
    "LogicalShards",
    "Map",
    "MegatronSource",
    "Node",
    "ParquetSource",
    "RandomMap",
    "Reader",
    "Remote",
    "Schedule",
    "Shard",
    "Shuffle",
    "Source",
    "StreamReader",
    "SyntheticSource",
    "TokenPacker",
    "Tokenize",
    "WebDatasetSource",
    "WeightedSampler",
    "WholeDocumentPacker",
    "check_checkpoint",
    "flat_cu_seqlens",
    "load_changed",
    "pad_collate",
    "plan",
    "testing",
    "weights_by_size",
    "whole_state",
]

_HOMES = {
    "audit.audit": ("Audit",),
    "broadcast": ("Broadcast",),
    "checkpoint.data_state": ("check_checkpoint", "load_changed"),
    "engine.collate": ("pad_collate",),
    "engine.shards": ("LogicalShards",),
    "engine.states.statedict": ("whole_state",),
    "errors": ("DataStateError",),
    "layout.plan": ("plan",),
    "loader": ("DataLoader",),
    "nodes.base": ("BaseNode", "Node"),
    "nodes.clean": ("CleanDocuments",),
    "nodes.exclude": ("Exclude",),
    "nodes.filter": ("Filter",),
    "nodes.map": ("Map", "RandomMap"),
    "nodes.packing.packer": ("TokenPacker",),
    "nodes.reader": ("Reader",),
    "nodes.mixture.sampler": ("WeightedSampler",),
    "nodes.shuffle": ("Shuffle",),
    "nodes.stream_reader": ("StreamReader",),
    "nodes.tokenize": ("Tokenize",),
    "nodes.packing.varlen": ("flat_cu_seqlens",),
    "nodes.mixture.schedule": ("Schedule",),
    "nodes.mixture.sizes": ("weights_by_size",),
    "nodes.packing.whole": ("WholeDocumentPacker",),
    "shard": ("Shard",),
    "sources.arrow": ("ArrowSource",),
    "sources.dataset": ("DatasetSource",),
    "sources.files.remote": ("Remote",),
    "sources.iterable": ("IterableSource",),
    "sources.jsonl": ("JsonlSource",),
    "sources.megatron": ("MegatronSource",),
    "sources.parquet": ("ParquetSource",),
    "sources.source": ("Source",),
    "sources.synthetic": ("SyntheticSource",),
    "sources.webdataset": ("WebDatasetSource",),
}
_ROOMS = ("checkpoint", "testing")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
