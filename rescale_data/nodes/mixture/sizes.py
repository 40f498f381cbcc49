"""`Sizes`: weights by how large the sources are, which may grow in the course of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from rescale_data.nodes.base import Node, View
from rescale_data.nodes.below import readers_of
from rescale_data.nodes.mixture.schedule import Pieces, pieces_of
from rescale_data.nodes.reader import Reader

Size: TypeAlias = Literal["rows", "tokens"]


class Sizes:
    """Weights of ``size ** (1 / temperature)``, of the sizes that hold in the epochs in which a position lies.

    Args:
        sources: The children of a mixture.
        starts: The first slot of each in its position.
        by: "rows" or "tokens".
        column: Of the tokens.
    """

    def __init__(
        self,
        sources: Mapping[str, Node[object]],
        starts: Mapping[str, int],
        by: Size,
        column: str | None,
        temperature: float,
    ) -> None:
        self._by, self._column, self._temperature = by, column, temperature
        self.readers = {name: _readers(name, node, starts[name], by) for name, node in sources.items()}
        self._found: dict[tuple[int, ...], Pieces] = {}

    def forget(self) -> None:
        """Sources consist of something else now."""
        self._found.clear()

    @property
    def grow(self) -> bool:
        """Whether they differ from epoch to epoch."""
        return any(reader.rows.grows for readers in self.readers.values() for reader, _ in readers)

    def grow_from(self, position: View) -> bool:
        """Whether they change after a position."""
        each = (pair for readers in self.readers.values() for pair in readers)
        return any(position[slot] < reader.rows.alike_from for reader, slot in each)

    def weights(self, position: View) -> dict[str, float]:
        sizes = {
            name: sum(reader.size_in(position[slot], self._by, self._column) for reader, slot in readers)
            for name, readers in self.readers.items()
        }
        largest = max(1, *sizes.values())
        # rounded, so that they are the same on every processor
        return {name: float(f"{(size / largest) ** (1 / self._temperature):.9g}") for name, size in sizes.items()}

    def pieces(self, position: View) -> Pieces:
        epochs = tuple(position[slot] for readers in self.readers.values() for _, slot in readers)
        if epochs not in self._found:
            self._found = {epochs: pieces_of(list(self.readers), self.weights(position))}
        return self._found[epochs]


def _readers(name: str, node: Node[object], start: int, by: Size) -> list[tuple[Reader, int]]:
    """`readers_of` a source, which are all that read in it."""
    found = readers_of(node, start)
    known = [reader for reader, _ in found]
    for _, below in node.walk():
        if below.reads is not None and below not in known:
            raise ValueError(
                f"weights={by!r}: the source {name!r} reads {below.reads.name} by a {type(below).__name__}, which does not "
                f"know its number of {by}. Give the weights as numbers."
            )
    if not found:
        raise ValueError(
            f"weights={by!r}: nothing is known of the size of the source {name!r}. Give the weights as numbers."
        )
    return found
