"""Law 8: numbers from outside never crash. Any number in any field of a state is a `DataStateError`, or samples.

Crossed: every field of every pipeline that the tables can make of a node over rows, a mixture and what stands on top, with
numbers at the limits of int64, of float64 as bits, of counts, and any others, of one logical shard or of all; set in a node,
and in the state of a loader; and given to each function in C, which `.ci/sanitize` builds with sanitizers. Limits:
`rescale_data.StreamReader` opens a stream again and reads as many rows as its state says.
"""

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.errors import DataStateError
from rescale_data.nodes.reading import kernel
from rescale_data.state import state_of
from tests.laws.pairs import Case, name_of
from tests.laws.tables import CASES, ENDLESS, pipeline
from tests.nodes.nested import Stream
from tests.states import closed, opened

NUM_SHARDS = 4
LIMITS = [0, 1, -1, -2, -4, 2**20, 2**31, 2**40, 2**47, 2**48, 2**53, 2**62, 2**63 - 1, -(2**63)]
"""Numbers at which something begins to be wrong: signs, widths, counts, products."""
FLOATS = np.array([0.5, -1.0, 1e300, 5e-324, np.inf, -np.inf, np.nan]).view(np.int64).tolist()
NUMBERS = st.sampled_from([*LIMITS, *FLOATS]) | st.integers(-50, 50) | st.integers(-(2**63), 2**63 - 1)


OTHERS = {
    "Reader-exclude": lambda shard: rd.Reader(range(40), shard, shuffle=4, exclude=[1, 2, 30]),
    "Reader-verify": lambda shard: rd.Reader(range(40), replace(shard, verify=True), shuffle=4),
    "Reader-few": lambda shard: rd.Reader(range(3), replace(shard, repeat=True)),
    "StreamReader": lambda shard: rd.StreamReader(rd.IterableSource([[1, 2, 3], [4]] * NUM_SHARDS), shard),
    "StreamReader-state": lambda shard: rd.StreamReader(
        rd.IterableSource([Stream([1, 2, 3]) for _ in range(NUM_SHARDS)], state_bytes=24), shard
    ),
}
"""Nodes that the tables do not cross: they stand over a source alone."""


def refuses_or_goes_on(node: rd.Node[Any], data: st.DataObject) -> None:
    list(islice(node, data.draw(st.sampled_from([0, 1, 3]))))
    position = np.array(node.position)
    for slot in data.draw(st.sets(st.integers(0, len(position) - 1), min_size=1, max_size=3)):
        position[slot] = data.draw(NUMBERS)
    try:
        node.reset(state_of(node.fields, position.data))
        list(islice(node, 4))
        node.reset(node.get_state())
    except DataStateError:
        pass


@pytest.mark.parametrize("case", CASES, ids=name_of)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_a_node_refuses_a_state_or_goes_on(case: Case, data: st.DataObject) -> None:
    refuses_or_goes_on(pipeline(case, rd.Shard(1, NUM_SHARDS, repeat=case["mixture"] in ENDLESS)), data)


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_reader_refuses_a_state_or_goes_on(name: str, data: st.DataObject) -> None:
    refuses_or_goes_on(OTHERS[name](rd.Shard(1, NUM_SHARDS)), data)


@pytest.mark.parametrize("case", CASES[::3], ids=name_of)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_a_loader_refuses_a_table_or_goes_on(case: Case, data: st.DataObject) -> None:
    def make() -> rd.DataLoader:
        how: Any = {"dp_rank": 0, "dp_world_size": 1, "repeat": case["mixture"] in ENDLESS, "collate_fn": list}
        return rd.DataLoader(partial(pipeline, case), global_batch_size=4, num_logical_shards=NUM_SHARDS, **how)

    loader = make()
    list(islice(loader, data.draw(st.sampled_from([0, 1, 3]))))
    state = loader.state_dict()
    numbers = state["table"]
    at = data.draw(st.integers(0, numbers.shape[1] - 1))
    numbers[data.draw(st.sampled_from([slice(0, 1), slice(None)])), at] = data.draw(NUMBERS)
    loader = make()
    try:
        loader.load_state_dict(state)
        list(islice(loader, 3))
        loader.state_dict()
    except DataStateError:
        pass


@pytest.mark.parametrize("wrong", [-1, 2**62, 1.5, None, "1", [1]])
def test_counts_of_a_run_are_refused_where_they_are_none(wrong: Any) -> None:
    def make() -> rd.DataLoader:
        return rd.DataLoader(range(22), global_batch_size=8, num_logical_shards=8)

    loader = make()
    list(loader)
    state = loader.state_dict()
    assert opened(state)["dropped_samples"] == 6
    for name in ("samples", "step", "epoch", "num_workers", "dropped_samples"):
        with pytest.raises(DataStateError):
            make().load_state_dict(closed({**opened(state), name: wrong}))


INTS = st.lists(NUMBERS | st.integers(0, 9), max_size=6).map(lambda numbers: np.array(numbers, dtype=np.int64))
SIZED = INTS | st.integers(0, 40).map(lambda size: np.zeros(size, dtype=np.int64))
ARRAYS = st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "S0"]).map(
    lambda d: np.zeros(7, dtype=d)
)


@st.composite
def calls(draw: Any) -> tuple[str, tuple[Any, ...]]:
    """A function in C, with arguments of the right types."""
    name = draw(st.sampled_from(["join", "find", "cut", "permute", "run", "interleave", "append"]))
    ints, sized, number = (lambda kind=kind: draw(kind) for kind in (INTS, SIZED, NUMBERS))

    def ints_of(size: int, high: int = 3) -> np.ndarray[Any, Any]:
        numbers = st.integers(0, high) | NUMBERS
        return np.array(draw(st.lists(numbers, min_size=size, max_size=size)), dtype=np.int64)

    if name == "join":
        return name, (draw(st.integers(-1, 8)), draw(ARRAYS), ints(), ints(), draw(ARRAYS))
    if name == "find":
        rows = ints()
        return name, (rows, ints(), draw(st.just(np.zeros_like(rows)) | SIZED))
    if name == "cut":
        return name, (ints(), ints(), ints(), sized(), sized(), *(ints() for _ in range(draw(st.integers(0, 3)))))
    if name == "permute":
        fragments = draw(st.just((None, None)) | st.tuples(INTS, INTS))
        return name, (number(), draw(st.binary(min_size=15, max_size=17)), *fragments, sized())
    if name == "run":
        num, points = draw(st.integers(0, 3)), sized()
        numbers = np.array(draw(st.lists(NUMBERS | st.integers(0, 99), min_size=5 * num, max_size=5 * num)), np.int64)
        return name, (draw(st.integers(0, 9)), number(), points, points.copy(), numbers, *(ints() for _ in range(num)))
    if name == "interleave":
        num, sources, documents, kinds = (draw(st.integers(low, 4)) for low in (0, 1, 1, 1))
        chosen, ends = ints_of(num, high=sources - 1), np.arange(documents + 1)
        moves, counts = (documents, documents), (kinds, kinds * sources)
        read = (chosen, *map(ints_of, (sources, documents)), ends, *map(ints_of, (*moves, *counts)))
        written = (num, num + 1, 40, 40)
        given = [*read, *(np.zeros(size, dtype=np.int64) for size in written)]
        if draw(st.booleans()):
            given[draw(st.integers(0, 11))] = sized()
        return name, (number(), *given)
    arrays, dtypes = (
        draw(st.lists(ARRAYS, max_size=2)),
        st.sampled_from(["i8", "i8", "i8", "i4", "u8", "f8", ">i8", "i2"]),
    )
    given_arrays = draw(st.sampled_from([tuple(arrays), tuple(arrays), arrays]))
    columns = np.zeros((1, 3), draw(dtypes)), np.zeros((1, 3), draw(dtypes))
    return name, (ints(), draw(st.integers(-2, 9)), (given_arrays, None, *(ints() for _ in range(6))), columns)


@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(calls())
def test_c_refuses_what_it_is_given_or_does_it(call: tuple[str, tuple[Any, ...]]) -> None:
    name, given = call
    try:
        if name != "append":
            getattr(kernel, name)(*given)
            return
        position, eos, parts, columns = given
        queue = kernel.TokenQueue(position.data, position[1:].copy().data, -1, eos)
        queue.append(*parts)
        kernel.TokenQueue.fill([queue], 0, *columns, None)
    except (ValueError, IndexError, OverflowError):
        pass
    except TypeError:
        assert name == "append"
        assert isinstance(given[2][0], list) or any(column.dtype not in (np.int64, np.int32) for column in given[3])
