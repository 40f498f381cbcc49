"""What a run was given, and what it should have been given."""

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from rescale_data.engine.recipe import Recipe
from rescale_data.engine.schema import set_histories
from tests.nodes.resume import plain
from tests.states import difference as difference_of_states

difference = partial(difference_of_states, unbatched=False)


class Failure(AssertionError):
    """A promise that was not kept."""


class Silent(Exception):
    """A shard yields nothing in three epochs: a loader says so with an error."""


def require(held: Any, what: Any) -> None:
    if not held:
        raise Failure(what)


class Books:
    """What was delivered; copied with each save, since a run may go back there."""

    def __init__(self) -> None:
        self.delivered: dict[Any, list[Any]] = defaultdict(list)  # by epoch and shard
        self.dropped: Counter[int] = Counter()  # samples, by epoch
        self.batches: list[Any] = []  # global: rows in rank order, and whether they are of the remainder
        self.open: list[list[Any]] = []  # of each rank, of the global batch that has begun
        self.segments: list[Any] = []  # stretches without a change: batches before it, state, pipeline
        self.histories: dict[str, Any] = {}  # of the sources: their files, by the epoch from which there were these
        self.ended = 0  # epochs
        self.counts = True  # whether it is known of which epoch what was dropped is

    def copy(self) -> "Books":
        """Return books of their own, with the same samples in them."""
        other = copy.copy(self)
        vars(other).update({name: copy.copy(value) for name, value in vars(self).items()})
        other.delivered = defaultdict(list, {key: [*samples] for key, samples in self.delivered.items()})
        other.open = [[*rank] for rank in self.open]
        return other

    def go_back_to(self, other: "Books") -> None:
        vars(self).update(vars(other.copy()))


class Reference:
    """What each shard yields where nothing interrupts it."""

    def __init__(self, recipe: Recipe, histories: Mapping[str, Any]) -> None:
        self.recipe, self.histories = recipe, histories
        self._nodes: dict[int, Any] = {}
        self._found: dict[int, list[Any]] = defaultdict(list)
        self._checked: dict[Any, int] = {}

    def _node(self, shard: int) -> Any:
        if shard not in self._nodes:
            self._nodes[shard] = node = self.recipe.build(shard)
            set_histories(node, self.histories)
        return self._nodes[shard]

    def epoch(self, shard: int, epoch: int) -> list[Any]:
        node, found = self._node(shard), self._found[shard]
        while len(found) <= epoch:
            found.append([plain(sample) for sample in node])
            node.bind(node.position)
        return found[epoch]

    def endless(self, shard: int, count: int) -> list[Any]:
        node, found, silent = self._node(shard), self._found[shard], 0
        while len(found) < count:
            sample = next(node, self)
            if sample is self:
                node.bind(node.position)
                silent += 1
                if silent > 2:
                    raise Silent
            else:
                silent = 0
                found.append(plain(sample))
        return found[:count]

    def check(self, books: Books, repeat: bool) -> None:
        """R1: the samples of each shard are those, in that order."""
        for (epoch, shard), samples in books.delivered.items():
            expected = self.endless(shard, len(samples)) if repeat else self.epoch(shard, epoch)[: len(samples)]
            since = min(self._checked.get((epoch, shard), 0), len(samples))
            if samples[since:] != expected[since:]:
                at = next((i for i, (x, y) in enumerate(zip(samples, expected, strict=False)) if x != y), len(expected))
                raise Failure(
                    f"R1: shard {shard} in epoch {epoch} at {at}: {samples[at : at + 1]} is not {expected[at : at + 1]} "
                    f"({len(samples)} delivered, {len(expected)} expected)"
                )
            self._checked[epoch, shard] = len(samples)

    def forget(self) -> None:
        """The run has gone back, so that what was checked may be delivered again."""
        self._checked.clear()

    def check_epochs(self, books: Books, n: int, tail: str) -> None:
        """R3: what an epoch has was delivered or dropped."""
        for epoch in range(books.ended if books.counts else 0):
            whole = sum(len(self.epoch(shard, epoch)) for shard in range(n))
            found = sum(len(samples) for (e, _), samples in books.delivered.items() if e == epoch)
            require(
                found + books.dropped[epoch] == whole,
                f"R1: epoch {epoch} has {whole} samples, {found} were delivered and {books.dropped[epoch]} dropped",
            )
            require(tail == "drop" or not books.dropped[epoch], "dropped with tail='pad'")


def comparable(batch: Any, *, filled: bool = True) -> Any:
    """A global batch; in a remainder, samples of one shard may change places with each other. ``filled``: with padding."""
    rows, in_remainder = batch
    rows = [row if row[2] or filled else (row[0], None, False) for row in rows]
    shards = [shard for shard, _, _ in rows]
    if in_remainder and len(set(shards)) < len(shards):
        return shards, sorted(map(repr, rows))
    return list(map(repr, rows))
