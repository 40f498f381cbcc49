"""What `skip` and `epoch_end` compute is what drawing gives: of any nodes in any others, anywhere in an epoch."""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.engine.recipe import FIRST_SLOT, Recipe
from rescale_data.engine.runner import ShardRunner
from rescale_data.engine.schema import Schema
from rescale_data.nodes.base import Node, as_node
from rescale_data.nodes.below import epoch_end, skip
from tests.histories.plans import Pipeline, plan_of
from tests.nodes.resume import plain


class Step(NamedTuple):
    """A sample, or the end of an epoch, and the row of the node before it."""

    sample: Any
    ends: bool
    row: list[int]


SHARDS = 3


def played(node: Node[Any], most: int) -> list[Step]:
    """The first samples of a node and the ends of its epochs."""
    steps: list[Step] = []
    silent = 0
    while len(steps) < most and silent < 3:
        row = node.position.tolist()
        try:
            steps.append(Step(plain(next(node)), False, row))
            silent = 0
        except StopIteration:
            with pytest.raises(StopIteration):
                next(node)
            steps.append(Step(None, True, row))
            node.bind(node.position)
            silent += 1
    return [*steps, Step(None, True, node.position.tolist())]


@given(st.integers(0, 2**32), st.integers(0, SHARDS - 1), st.booleans(), st.data())
@settings(max_examples=settings().max_examples // 2, suppress_health_check=list(HealthCheck))
def test_computing_is_drawing(number: int, index: int, repeat: bool, data: st.DataObject) -> None:
    plan, _ = plan_of(random.Random(number))
    pipeline = Pipeline(plan, {"f1": 20, "f4": 9})

    def make(shard: rd.Shard) -> Node[Any]:
        return as_node(pipeline(shard))

    shard = rd.Shard(index, SHARDS, seed=5, repeat=repeat)
    try:
        steps = played(make(shard), 120)
    except rd.DataStateError:  # a source of a mixture without a sample
        assume(False)
    drawn = [step for step in steps[:-1] if not step.ends]
    assume(drawn)
    ends = [i for i, step in enumerate(steps[:-1]) if step.ends]
    event(f"{plan[0]}, {len(ends)} ends")
    begins = data.draw(st.lists(st.integers(0, len(steps) - 2), min_size=1, max_size=4))
    node = make(shard)
    for begin in begins:
        check_epoch(node, steps, begin, [i for i in ends if i >= begin], index, data)
    if repeat:
        check_over_epochs(make, steps, index, data)


def check_epoch(
    node: Node[Any], steps: list[Step], begin: int, ends: list[int], index: int, data: st.DataObject
) -> None:
    """Within an epoch, and over its end by one."""
    row = np.array(steps[begin].row)
    end = epoch_end(node, row[None], np.array([index]))
    assert (
        end is None or not ends or (end[0].tolist(), end[1].tolist()) == ([ends[0] - begin], [steps[ends[0] + 1].row])
    )
    assert row.tolist() == steps[begin].row
    last = ends[0] if ends else len(steps) - 1
    for until in {last, data.draw(st.integers(begin, last))}:
        node.bind(row.copy().data)
        skip(node, until - begin)
        assert node.position.tolist() == steps[until].row
        if until < len(steps) - 1:
            assert plain(next(node, None)) == steps[until].sample
            assert node.position.tolist() == steps[until + 1].row


def check_over_epochs(make: Any, steps: list[Step], index: int, data: st.DataObject) -> None:
    """As an endless loader leaves out samples, over the ends of epochs."""
    drawn = [i for i, step in enumerate(steps[:-1]) if not step.ends]
    recipe = Recipe(make, SHARDS, 5, repeat=True)
    runner = ShardRunner(recipe, Schema(recipe.build(0)))
    for _ in range(3):
        first = data.draw(st.integers(0, len(drawn) - 1))
        count = data.draw(st.integers(0, len(drawn) - 1 - first))
        table = runner.table.copy()
        table[index, FIRST_SLOT:] = steps[drawn[first]].row
        runner.load(table, {})
        runner.skip(index, count)
        node, row = make(rd.Shard(index, SHARDS, seed=5, repeat=True)), runner.table[index, FIRST_SLOT:].copy()
        node.bind(row.data)
        sample = next(node, None)
        while sample is None:
            node.bind(node.position)
            sample = next(node, None)
        assert plain(sample) == steps[drawn[first + count]].sample
        assert node.position.tolist() == steps[drawn[first + count] + 1].row
