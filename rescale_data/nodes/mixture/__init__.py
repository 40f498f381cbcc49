"""Mixtures: choose the source of each draw of a shard, and keep the counts of draws in its position."""
