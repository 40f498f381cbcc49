"""`assert_rescalable` compares each epoch with the rows of the sources, not a pipeline with itself alone."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torchdata.nodes import Batcher, Unbatcher

import rescale_data as rd
from rescale_data.state import Field
from rescale_data.testing import assert_rescalable

SOURCE = rd.DatasetSource([{"i": i, "tokens": [i] * (i % 3)} for i in range(44)], name="rows")


class Loses(rd.Node[Any]):
    """After the first epoch it loses the first row of each, or yields it twice."""

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("number",)), Field(("epochs",), counts=True))

    def __init__(self, source: rd.BaseNode[Any], twice: bool) -> None:
        super().__init__(source=source)
        self._twice, self._held = twice, None

    def next(self) -> Any:
        try:
            sample = next(self.children["source"])
            if self.position[1] and not self.position[0] and not self._twice:
                self.position[0] += 1
                sample = next(self.children["source"])
        except StopIteration:
            self.position[0], self.position[1] = 0, self.position[1] + 1
            raise
        self.position[0] += 1
        return [sample, sample] if self._twice and self.position[1] and self.position[0] == 1 else sample


class Forgetful(rd.Node[Any]):
    """Counts its samples, and keeps the count for itself."""

    def __init__(self, source: rd.BaseNode) -> None:
        super().__init__(source=source)
        self.count = 0

    def next(self) -> Any:
        self.count += 1
        return {**next(self.children["source"]), "count": self.count}


PASS: dict[str, Callable[[rd.Shard], rd.BaseNode[Any]]] = {
    "rows": lambda shard: rd.Reader(SOURCE, shard),
    "filtered": lambda shard: rd.Filter(rd.Reader(SOURCE, shard), lambda row: row["i"] % 3 > 0),
    "batches": lambda shard: Unbatcher(Batcher(rd.Reader(SOURCE, shard), 4, drop_last=False)),
    "lists": lambda shard: Batcher(rd.Reader(SOURCE, shard), 4, drop_last=False),
    "endless": lambda shard: rd.WeightedSampler({"a": rd.Reader(SOURCE, shard)}, {"a": 1}),
    "others": lambda shard: rd.Map(rd.Reader(SOURCE, shard), lambda row: row["i"]),
}
FAIL: dict[str, Callable[[rd.Shard], rd.BaseNode[Any]]] = {
    "lost": lambda shard: Loses(rd.Reader(SOURCE, shard), twice=False),
    "twice": lambda shard: Loses(rd.Reader(SOURCE, shard), twice=True),
    "dropped": lambda shard: Batcher(rd.Reader(SOURCE, shard), 4, drop_last=True),
}


def check(pipeline: Callable[[rd.Shard], rd.BaseNode[Any]], **options: bool) -> None:
    def make(rank: int, world_size: int, b: int, k: int) -> rd.DataLoader:
        where = {"dp_rank": rank, "dp_world_size": world_size, "micro_batch_size": b, "num_workers": k}
        return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, collate_fn=list, repeat=True, **where)

    assert_rescalable(make, [(2, 2, 0), (4, 1, 0)], steps=1, **options)


@pytest.mark.parametrize("name", PASS)
def test_whole_epochs_pass(name: str) -> None:
    check(PASS[name])


def test_a_node_that_forgets_is_found() -> None:
    with pytest.raises(AssertionError, match=r"segment 1 \(W=4, b=1, K=0\), micro batch \d+, rank \d"):
        check(lambda shard: Forgetful(rd.Reader(SOURCE, shard)))


@pytest.mark.parametrize("name", FAIL)
def test_rows_that_do_not_come_once_are_said(name: str) -> None:
    with pytest.raises(
        AssertionError, match=r"of 44 rows \d+ do not come, where 0 are counted.*Give whole_epochs=False"
    ):
        check(FAIL[name])
    check(FAIL[name], whole_epochs=False)
