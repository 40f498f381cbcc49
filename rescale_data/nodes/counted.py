"""What is known of epochs without drawing."""

from __future__ import annotations

from typing import Any

import numpy as np

from rescale_data.nodes.base import Node
from rescale_data.nodes.mixture.readers import readers_of
from rescale_data.state import Ints


def epoch_end_of_source(node: Node[Any], rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
    """`Node.epoch_end` of a node that yields one sample for each of its source, and whose own slots stay as they are."""
    own = len(node.FIELDS)
    end = node.children["source"].epoch_end(rows[:, own:], shards)
    return None if end is None else (end[0], np.concatenate([rows[:, :own], end[1]], axis=1))


def pass_epochs(node: Node[Any], row: Ints, shard: int, most: int) -> int:
    """Move a row of a node, at the beginning of an epoch, over whole epochs, up to that in which so many samples end.

    Args:
        row: ``int64[slots]``.
        shard: The logical shard.
        most: Samples, at least 1.

    Returns:
        The samples of those epochs; 0 where they are not known.
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
    if not all(below is reader or below.one_for_one for below in nodes):  # a window lies over several epochs of a round
        return 0
    row[slot], num = reader.rows.epoch_after(int(row[slot]), most, shard)
    return num
