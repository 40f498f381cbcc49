"""A training run's data order that reshards like its model."""

from rescale_data.checkpoint.check import check_checkpoint
from rescale_data.collate import pad_collate
from rescale_data.errors import DataStateError
from rescale_data.loader import DataLoader
from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.packer import TokenPacker
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.shards import LogicalShards
from rescale_data.plan import plan
from rescale_data.shard import Shard
from rescale_data.sources.arrow import ArrowSource
from rescale_data.sources.dataset import DatasetSource
from rescale_data.sources.parquet import ParquetSource
from rescale_data.sources.source import Source

__all__ = [
    "ArrowSource",
    "BaseNode",
    "DataLoader",
    "DataStateError",
    "DatasetSource",
    "LogicalShards",
    "Node",
    "ParquetSource",
    "Reader",
    "Shard",
    "Source",
    "TokenPacker",
    "check_checkpoint",
    "pad_collate",
    "plan",
]
