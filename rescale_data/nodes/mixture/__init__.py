"""Mixtures: which source each draw of a shard takes, and what of it is kept."""
