"""Nodes that yield one sample for each that their source yields, and so know as much of the epoch as it does."""

from __future__ import annotations

from typing import Any

import numpy as np

from rescale_data.nodes.base import Node
from rescale_data.state import Ints


def epoch_end_of_source(node: Node[Any], rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
    """`Node.epoch_end` of such a node, whose own slots stay as they are."""
    own = len(node.FIELDS)
    end = node.children["source"].epoch_end(rows[:, own:], shards)
    return None if end is None else (end[0], np.concatenate([rows[:, :own], end[1]], axis=1))
