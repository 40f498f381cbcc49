"""Values that are packed into shared memory and come back, and stay what they are when the memory is used again."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.engine.message import Inbox, PackedValue, Slabs
from tests.test_state import same, tensors

arrays = st.sampled_from([np.int8, np.uint16, np.int64, np.float32, np.float64, np.complex64, np.bool_]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    )
)
others = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=5), st.floats(allow_nan=False))
values = st.recursive(
    st.one_of(tensors(), arrays, others),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            type(other) is np.ndarray
            and one.dtype == other.dtype
            and one.shape == other.shape
            and np.array_equal(one, other)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return same(one, other) if isinstance(one, torch.Tensor) else type(one) is type(other) and one == other


def sent(slabs: Slabs, inbox: Inbox, slab: int, batch: list[Any]) -> list[Any]:
    return [inbox.unpack(*part) for part in inbox.open(slabs.pack(slab, [PackedValue(value) for value in batch]))]


@given(st.lists(st.lists(values, min_size=1, max_size=3), min_size=1, max_size=6))
def test_values_come_back_and_stay(batches: list[list[Any]]) -> None:
    slabs, inbox = Slabs(), Inbox(pin_memory=False)
    received = [sent(slabs, inbox, i % 2, batch) for i, batch in enumerate(batches)]
    assert all(equal(one, other) for one, other in zip(batches, received, strict=True))


def test_what_is_not_contiguous_dense_or_plain() -> None:
    turned = torch.arange(6).reshape(2, 3).t()
    records = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    batch = [
        turned,
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "b"]),
        np.datetime64("2020-01-01"),
        torch.eye(2).to_sparse(),
    ]
    found = sent(Slabs(), Inbox(pin_memory=False), 0, batch)
    assert torch.equal(found[0], turned)
    assert found[1].tolist() == batch[1].tolist()
    assert found[2].tolist() == ["a", "b"]
    assert found[3] == batch[3]
    assert torch.equal(found[4].to_dense(), torch.eye(2))
    assert sent(Slabs(), Inbox(pin_memory=False), 0, [records])[0].tolist() == records.tolist()


def test_a_received_value_can_be_written_to() -> None:
    slabs, inbox = Slabs(), Inbox(pin_memory=False)
    first = sent(slabs, inbox, 0, [torch.zeros(4)])[0]
    first.add_(1)
    assert sent(slabs, inbox, 0, [torch.zeros(4)])[0].tolist() == [0.0] * 4
    assert first.tolist() == [1.0] * 4
