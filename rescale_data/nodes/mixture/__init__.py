"""Mixtures: choose a source for each draw of a logical shard, and count the draws in its position."""
