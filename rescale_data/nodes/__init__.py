"""Nodes that a user composes for one logical shard. With `foreign`, nodes of torchdata are among them."""

from rescale_data.nodes import foreign as foreign
