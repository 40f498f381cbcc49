"""Which logical shard a part of a pipeline belongs to."""

from __future__ import annotations

from typing import Any

from rescale_data.nodes.base import Node
from rescale_data.shard import Shard


def find_shard(node: Node[Any]) -> Shard | None:
    """The logical shard that a node or one below it reads; `None` where no node says so."""
    return next((below.of_shard for _, below in node.walk() if below.of_shard is not None), None)


def require_shard(shard: object, node: Node[Any]) -> None:
    """``TypeError`` where a node was given something else as its logical shard."""
    if not isinstance(shard, Shard):
        raise TypeError(
            f"rd.{type(node).__name__} was given the shard {shard!r}: pass what the pipeline is given, or rd.Shard() to try."
        )


def shard_of(node: Node[Any], given: Shard | None) -> Shard:
    """``given``, or the logical shard that the node reads; ``ValueError`` where there is neither."""
    if given is not None:
        require_shard(given, node)
    found = given or find_shard(node)
    if found is None:
        raise ValueError(
            "No node below reads a logical shard (as rd.Reader does), so there is nothing to key random numbers with. Give "
            "shard=, what the pipeline was called with, or set `of_shard` in your node."
        )
    return found
