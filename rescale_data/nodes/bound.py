"""`EmptyDrawLimit`: raises an error if a node draws too long from an endless source without a sample to yield."""

from __future__ import annotations

from typing import Any

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View, slots_of
from rescale_data.nodes.below import find_shard, source_names

_EVERY = 256  # draws between two checks
SILENT_EPOCHS = 2
"""Whole epochs without a result after which a source is taken to have none."""
_MAX_EPOCHS_IF_SOME_IDLE = 64
_DRAWS = 2**24  # the limit where no source of ours shows progress


def require_tokens(num_epochs: int) -> None:
    """Raise ``DataStateError`` if an endless stream of documents had no token in more whole epochs than are allowed."""
    if num_epochs > SILENT_EPOCHS:
        raise DataStateError(
            f"A logical shard had no token in {SILENT_EPOCHS} whole epochs: its documents are empty, filtered out or dropped. "
            f"Check the column and the filters, or give fewer logical shards."
        )


class EmptyDrawLimit:
    """Counts the draws within one call of `next` that gave nothing to yield; raises an error if there are too many.

    Each source that was drawn from may be read for two whole epochs. If a mixture with small weights has not drawn from some
    sources, the limit is 64 epochs.

    Args:
        node: The node whose position shows how far its sources have come.
        name: Name of the node that draws, if it is another one.
    """

    def __init__(self, node: Node[Any], name: str = "") -> None:
        self._node, self._name = node, name or type(node).__name__
        self._since: list[list[int]] = []

    def count_empty(self, num_before: int, position: View | None = None, num: int = 1) -> int:
        """Return the number of draws without a result, after ``num`` more; raise `DataStateError` if there are too many.

        Args:
            num_before: The count so far.
            position: The position of ``node``, if it is not its own.
            num: Draws in vain since then.
        """
        after = num_before + num
        if after // _EVERY > num_before // _EVERY:
            where = self._node.position if position is None else position
            self._check_progress(after, where, is_first=num_before < _EVERY)
        return after

    def _check_progress(self, misses: int, position: View, *, is_first: bool) -> None:
        now = [
            _place(self._node, position, path, below) for path, below in self._node.walk() if below.reads is not None
        ]
        if is_first:
            self._since = now
            return
        passed = [here[0] - there[0] for here, there in zip(now, self._since, strict=True) if here != there]
        num_resting = len(now) - len(passed)
        enough = _MAX_EPOCHS_IF_SOME_IDLE if num_resting else SILENT_EPOCHS + 1
        if misses >= _DRAWS if not passed else min(passed) > SILENT_EPOCHS and max(passed) >= enough:
            self._raise(misses)

    def _raise(self, misses: int) -> None:
        names, shard = ", ".join(source_names(self._node)), find_shard(self._node)
        where = "" if shard is None else f" in logical shard {shard.index} of {shard.num_logical_shards}"
        raise DataStateError(
            f"{self._name} has drawn {misses} samples in a row from {names or 'its source'}{where} "
            f"and kept none, over more than {SILENT_EPOCHS} whole epochs: all were filtered out, skipped or empty. Check the "
            f"predicate or the column, or give fewer logical shards or more data."
        )


def _place(node: Node[Any], position: View, path: tuple[str, ...], below: Node[Any]) -> list[int]:
    """Return the position of the node ``below``, taken from ``position`` of ``node`` if possible, else its live position."""
    slots = slots_of(node, path)
    return (below.position if slots is None else position[slots]).tolist()
