"""`EmptyDrawLimit`: raises an error if a node draws too many samples from an endless source and can yield none."""

from __future__ import annotations

from typing import Any

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View, slots_of
from rescale_data.nodes.below import find_shard, source_names

_DRAWS_PER_CHECK = 256  # draws between two checks
MAX_EMPTY_EPOCHS = 2
"""Whole epochs without a result after which a source is taken to have none."""
_MAX_EPOCHS_IF_SOME_IDLE = 64
_MAX_DRAWS = 2**24  # the limit where no source of ours shows progress


def limit_empty_epochs(num_empty_epochs: int) -> None:
    """Raise ``DataStateError`` if an endless stream of documents had no token in more whole epochs than are allowed."""
    if num_empty_epochs > MAX_EMPTY_EPOCHS:
        raise DataStateError(
            f"A logical shard had no token in {MAX_EMPTY_EPOCHS} whole epochs: its documents are empty, filtered out or "
            f"dropped. Check the column and the filters, or give fewer logical shards."
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
        self._start_positions: list[list[int]] = []

    def count_empty_draws(self, num_draws_before: int, position: View | None = None, num: int = 1) -> int:
        """Count ``num`` more draws without a result and return their total; raise `DataStateError` if there are too many.

        Args:
            num_draws_before: The count so far.
            position: The position of ``node``, if it is not its own.
            num: Number of draws without a result since then.
        """
        num_after = num_draws_before + num
        if num_after // _DRAWS_PER_CHECK > num_draws_before // _DRAWS_PER_CHECK:
            current_position = self._node.position if position is None else position
            self._check_progress(num_after, current_position, is_first=num_draws_before < _DRAWS_PER_CHECK)
        return num_after

    def _check_progress(self, num_draws: int, position: View, *, is_first: bool) -> None:
        positions = list[list[int]]()  # of the nodes that read rows
        for path, node in self._node.walk():
            if node.reads is not None:
                slots = slots_of(self._node, path)
                positions.append((node.position if slots is None else position[slots]).tolist())
        if is_first:
            self._start_positions = positions
            return
        epochs = [new[0] - old[0] for new, old in zip(positions, self._start_positions, strict=True) if new != old]
        num_idle_sources = len(positions) - len(epochs)
        epochs_to_error = _MAX_EPOCHS_IF_SOME_IDLE if num_idle_sources else MAX_EMPTY_EPOCHS + 1
        if num_draws >= _MAX_DRAWS if not epochs else min(epochs) > MAX_EMPTY_EPOCHS and max(epochs) >= epochs_to_error:
            self._raise_limit_error(num_draws)

    def _raise_limit_error(self, num_draws: int) -> None:
        names, shard = ", ".join(source_names(self._node)), find_shard(self._node)
        shard_text = "" if shard is None else f" in logical shard {shard.index} of {shard.num_logical_shards}"
        raise DataStateError(
            f"{self._name} has drawn {num_draws} samples in a row from {names or 'its source'}{shard_text} "
            f"and kept none, over more than {MAX_EMPTY_EPOCHS} whole epochs: all were filtered out, skipped or empty. Check "
            f"the predicate or the column, or give fewer logical shards or more data."
        )
