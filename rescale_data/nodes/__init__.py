"""Nodes: the parts that a user composes into the pipeline of one logical shard. `foreign` wraps nodes of torchdata."""

from rescale_data.nodes import foreign as foreign
from rescale_data.nodes.below import epoch_end, skip

__all__ = ["epoch_end", "skip"]
