"""What a user composes for one logical shard. With `foreign`, nodes of torchdata are among it wherever a node is made."""

from rescale_data.nodes import foreign as foreign
