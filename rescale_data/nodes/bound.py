"""`Bound`: how long a node may draw without anything to yield, where what it draws from has no end."""

from __future__ import annotations

from typing import Any

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View
from rescale_data.nodes.below import find_shard, source_names

_EVERY = 256  # draws between two looks
SILENT_EPOCHS = 2
"""After so many whole epochs without anything a source has none."""
_EPOCHS_BESIDE_RESTING = 64
_DRAWS = 2**24  # where no source of ours says how far it has come


def require_tokens(num_epochs: int) -> None:
    """``DataStateError`` where an endless stream of documents has had no token in too many whole epochs."""
    if num_epochs > SILENT_EPOCHS:
        raise DataStateError(
            f"A logical shard had no token in {SILENT_EPOCHS} whole epochs: its documents are empty, filtered out or dropped. "
            f"Check the column and the filters, or give fewer logical shards."
        )


class Bound:
    """Draws of a node that yielded nothing, counted within one `next`.

    Each source that was drawn from may be read for two whole epochs; where others were not drawn from, as a mixture does with
    small weights, for 64.

    Args:
        node: Where it stands tells how far its sources have come.
        name: Of the node that draws, if it is another.
    """

    def __init__(self, node: Node[Any], name: str = "") -> None:
        self._node, self._name = node, name or type(node).__name__
        self._since: list[list[int]] = []

    def missed(self, num_before: int, position: View | None = None, num: int = 1) -> int:
        """Count so many more; `DataStateError` where that was in vain for too long.

        Args:
            position: Where ``node`` stands, if not at its own position.
        """
        after = num_before + num
        if after // _EVERY > num_before // _EVERY:
            where = self._node.position if position is None else position
            self._look(after, where, is_first=num_before < _EVERY)
        return after

    def _look(self, misses: int, position: View, *, is_first: bool) -> None:
        now = [
            _place(self._node, position, path, below) for path, below in self._node.walk() if below.reads is not None
        ]
        if is_first:
            self._since = now
            return
        passed = [here[0] - there[0] for here, there in zip(now, self._since, strict=True) if here != there]
        num_resting = len(now) - len(passed)
        enough = _EPOCHS_BESIDE_RESTING if num_resting else SILENT_EPOCHS + 1
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
    """The slots of a node below in a position of ``node``; inside a torchdata node, as they are."""
    slots = node.slots_of(path)
    return (below.position if slots is None else position[slots]).tolist()
