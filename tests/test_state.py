"""A node's state as slots of a row, the table as tensors, and what both cost in a checkpoint."""

import json
import math
import pickle
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.state import decode, encode, field_of, flatten, nest, slot_offsets, to_tensors
from tests.pipelines import PIPELINES, data_for, pipeline_of
from tests.states import opened

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip

numbers = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.sampled_from([math.inf, -0.0])
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bytes, in shapes of an odd number of them too, and of none, contiguous or not."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=num_bytes, max_size=num_bytes))), dtype=torch.uint8)
    tensor = (raw % 2 == 1 if dtype is torch.bool else raw.view(dtype)).reshape(shape)
    return tensor.expand(2, *shape).transpose(0, -1) if draw(st.booleans()) else tensor


values = st.one_of(numbers, tensors())
keys = st.text("abc", min_size=1, max_size=3)
states = st.recursive(
    st.dictionaries(keys, values, min_size=1, max_size=4),
    lambda inner: st.dictionaries(keys, st.one_of(values, inner), min_size=1, max_size=3),
    max_leaves=8,
)


def exact(value: Any) -> Any:
    """Return a value as something that compares, with all its types, shapes and bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, list):
        return [exact(each) for each in value]
    if isinstance(value, dict):
        return [(key, exact(each)) for key, each in value.items()]
    return type(value), repr(value)  # which tells -0.0 from 0.0


@given(states)
def test_a_nested_state_comes_back_from_its_leaves(state: dict[str, Any]) -> None:
    assert exact(nest(flatten(state))) == exact(state)


@given(st.lists(values, min_size=1, max_size=4), st.integers(1, 3))
def test_values_come_back_from_slots_and_from_the_tensors_of_a_table(row: list[Any], num_rows: int) -> None:
    fields = [field_of((f"f{i}",), value) for i, value in enumerate(row)]
    slots = [slot for field, value in zip(fields, row, strict=True) for slot in encode(field, value)]
    assert all(
        exact(decode(field, encode(field, value))) == exact(value) for field, value in zip(fields, row, strict=True)
    )
    assert slot_offsets(fields)[-1] == len(slots)
    table = np.array([slots] * num_rows, dtype=np.int64).reshape(num_rows, len(slots))
    columns = to_tensors(fields, table)
    for field, value in zip(fields, row, strict=True):
        assert columns[field.key].dtype is field.dtype
        assert columns[field.key].shape == (num_rows, *(field.shape or ()))
        for found in columns[field.key]:
            assert exact(found if isinstance(value, torch.Tensor) else found.item()) == exact(value)
    for column in columns.values():
        column.zero_()
    assert table.tolist() == [slots] * num_rows, "the tensors are copies"


def test_numpy_values_and_whole_numbers_are_taken_as_what_they_are() -> None:
    for value, plain in [(np.int32(4), 4), (np.float32(0.5), 0.5), (np.bool_(True), True)]:
        field = field_of(("at",), value)
        assert exact(decode(field, encode(field, value))) == exact(plain)
    field = field_of(("at",), np.arange(3, dtype=np.uint8))
    found = decode(field, encode(field, np.arange(3, dtype=np.uint8)))
    assert exact(found) == exact(torch.arange(3, dtype=torch.uint8))
    mean = field_of(("mean",), 0.0)
    assert exact(decode(mean, encode(mean, 3))) == exact(3.0)


def loader_of(kind: str, n: int = 32, num_rows: int = 300, **kwargs: Any) -> rd.DataLoader:
    given = {"global_batch_size": 8, "num_logical_shards": n, "repeat": True, "collate_fn": list}
    return rd.DataLoader(pipeline_of(kind, data_for(kind, num_rows)), **{**given, **kwargs})


def num_bytes(loader: rd.DataLoader) -> float:
    """Of the table, per logical shard; what is beside it does not grow with these."""
    state = loader.state_dict()
    assert len(state["header"]) < 2000
    return state["table"].nbytes / loader._stream.layout.num_logical_shards


@pytest.mark.parametrize("kind", PIPELINES)
def test_bytes_a_shard_are_the_same_whatever_the_data_the_topology_and_the_time(kind: str) -> None:
    """R5: they depend on the pipeline alone."""
    expected = num_bytes(loader_of(kind))
    assert {"rows": 48, "packed": 56}.get(kind, expected) == expected
    for n, num_rows, kwargs in [(16, 300, {}), (128, 900, {"micro_batch_size": 2}), (32, 300, {"repeat": False})]:
        assert num_bytes(loader_of(kind, n, num_rows, **kwargs)) == expected
    old = loader_of(kind)
    old.skip(8 * 200)
    assert num_bytes(old) == expected


def test_the_keys_of_a_state() -> None:
    state = loader_of("packed").state_dict()
    assert {name: type(value) for name, value in state.items()} == {"table": torch.Tensor, "header": str}
    assert sorted(json.loads(state["header"])) == [
        "columns", "dp_world_size", "dropped_samples", "epoch", "global_batch_size", "in_step", "micro_batch_size",
        "num_logical_shards", "num_workers", "origin", "padded_samples", "pipeline", "samples", "seed", "skipped", "sources",
        "step", "version",
    ]  # fmt: skip
    assert list(opened(state)["shards"]) == [
        "stamp", "samples", "remainder", "source.offset", "source.source.epoch", "source.source.row", "source.source.skipped",
    ]  # fmt: skip


def test_what_a_state_says_of_its_rows_is_pinned() -> None:
    """In numbers: a formula that the writer and the check share could change in both."""
    loader = rd.DataLoader(range(101), global_batch_size=4, micro_batch_size=2, num_logical_shards=12, seed=1)
    for _ in zip(range(11), loader, strict=False):
        pass
    state = loader.state_dict()
    assert state["table"][:, 0].tolist() == [-265 - shard for shard in range(12)]
    counts = "samples", "origin", "step", "epoch", "version"
    assert [opened(state)[name] for name in counts] == [22, 0, 5, 0, 1]
    list(loader)
    assert [opened(loader.state_dict())[name] for name in counts] == [100, 100, 25, 1, 1], "anew in each epoch"


def test_a_state_has_the_ranges_that_were_left_out_and_loses_them_with_an_older_state() -> None:
    def sized(b: int) -> rd.DataLoader:
        return rd.DataLoader(range(1000), global_batch_size=24, micro_batch_size=b, num_logical_shards=96, repeat=True)

    def take(loader: rd.DataLoader, num: int) -> list[int]:
        return [row for batch in islice(loader, num) for row in batch.tolist()]

    whole, first, then = take(sized(24), 8), sized(12), sized(8)
    taken = take(first, 4)
    before = first.state_dict()
    first.skip(48)
    first.skip(24)  # a range that goes on
    assert opened(first.state_dict())["skipped"] == [[48, 120]]
    then.load_state_dict(first.state_dict())
    taken += take(then, 3)
    then.skip(0)
    then.skip(24)
    taken += take(then, 3)
    assert taken == whole[:48] + whole[120:144] + whole[168:192]
    assert opened(then.state_dict())["skipped"] == [[48, 120], [144, 168]]
    then.load_state_dict(before)
    assert opened(then.state_dict())["skipped"] == []
    assert take(then, 3) == whole[48:72]


class Counted(rd.DatasetSource):
    """A source that counts how often its files are listed."""

    num_listed = 0

    def manifest(self) -> Mapping[str, Any]:
        self.num_listed += 1
        return {**super().manifest(), "files": [["a", 1, 2]] * 3}


def test_the_files_are_listed_once_whatever_is_saved_and_loaded() -> None:
    source = Counted(range(40))
    loader = rd.DataLoader(lambda shard: rd.Reader(source, shard), global_batch_size=4, repeat=True)
    for _ in range(3):
        next(iter(loader))
        loader.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert source.num_listed == 1
