"""Questions about the nodes below a node: their logical shard, sources and readers, and how epochs move them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rescale_data.nodes.base import Node
from rescale_data.nodes.reader import Reader
from rescale_data.shard import Shard, require_shard
from rescale_data.state import Ints


def find_shard(node: Node[Any]) -> Shard | None:
    """Return the logical shard that a node or one below it reads; `None` if no node has one (`Node.of_shard`)."""
    return next((below.of_shard for _, below in node.walk() if below.of_shard is not None), None)


def is_endless(node: Node[Any]) -> bool:
    """True if a node reads an endless stream (`Shard.repeat`): its consumer then restarts it at an epoch's end."""
    return any(below.of_shard.repeat for _, below in node.walk() if below.of_shard is not None)


def shard_of(node: Node[Any], given: Shard | None) -> Shard:
    """Return ``given``, or else the logical shard that the node reads; ``ValueError`` if there is neither."""
    if given is not None:
        require_shard(given, node)
    found = given or find_shard(node)
    if found is None:
        raise ValueError(
            "No node below reads a logical shard (as rd.Reader does), so there is nothing to key random numbers with. Give "
            "shard=, what the pipeline was called with, or set `of_shard` in your node."
        )
    return found


def num_below(node: Node[Any], kind: type[Node[Any]]) -> int:
    """Count the nodes of a kind below a node. Nodes below a mixture do not count: they may come and go between segments."""
    found = [(path, below) for path, below in node.walk() if path]
    mixtures = [path for path, below in node.walk() if below.CHILDREN_MAY_CHANGE]
    return sum(
        isinstance(below, kind) and not any(path[: len(above)] == above for above in mixtures) for path, below in found
    )


def source_names(node: Node[Any]) -> list[str]:
    """Return the names of the sources that are read at or below a node, each once, sorted."""
    return sorted({below.reads.name for _, below in node.walk() if below.reads is not None})


def readers_of(node: Node[Any], start: int) -> list[tuple[Reader, int]]:
    """Return the readers of a node, each with its first slot, in a row in which the node's slots begin at ``start``.

    The first slot of a reader is its epoch.
    """
    found = [(below, node.slots_of(path)) for path, below in node.walk() if isinstance(below, Reader)]
    return [(reader, start + slots.start) for reader, slots in found if slots is not None]


def pass_epochs(node: Node[Any], row: Ints, shard: int, most: int) -> int:
    """Move a row of a node over whole epochs, up to the epoch that holds the last of the next ``most`` samples.

    Args:
        row: ``int64[slots]``, at the beginning of an epoch; changed in place.
        shard: Index of the logical shard.
        most: Number of samples, at least 1.

    Returns:
        The number of samples in the epochs that were passed; 0 if it is not known.
    """
    end, readers, nodes = node.epoch_end(row[None], np.array([shard])), readers_of(node, 0), [n for _, n in node.walk()]
    if end is None or not all(below.one_for_one or below.repeats_itself for below in nodes):
        return 0
    if not any(reader.rows.is_small or reader.rows.grows for reader, _ in readers):  # each epoch is like the next
        size = int(end[0][0])
        num = (most - 1) // size if size else 0
        row += num * (end[1][0] - row)
        return num * size
    reader, slot = readers[0]
    if not all(below is reader or below.one_for_one for below in nodes):  # a window spans several epochs of a round
        return 0
    row[slot], num = reader.rows.epoch_after(int(row[slot]), most, shard)
    return num
