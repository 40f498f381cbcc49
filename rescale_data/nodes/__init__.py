"""Nodes that a user composes into the pipeline of one logical shard. `foreign` adds torchdata's nodes to them."""

from rescale_data.nodes import foreign as foreign
