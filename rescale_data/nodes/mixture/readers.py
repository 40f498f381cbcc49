"""Which readers a part of a pipeline has."""

from __future__ import annotations

from typing import Any

from rescale_data.nodes.base import Node
from rescale_data.nodes.reader import Reader


def readers_of(node: Node[Any], start: int) -> list[tuple[Reader, int]]:
    """The readers of a node, and the first slot of each, which is its epoch, in a row where the node's begins at ``start``."""
    found = [(below, node.slot_of(path)) for path, below in node.walk() if isinstance(below, Reader)]
    return [(reader, start + slot) for reader, slot in found if slot is not None]
