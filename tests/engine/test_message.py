"""Values that are packed into shared memory and come back, and stay what they are when the memory is used again."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.engine.message import Inbox, PackedValue, Slabs
from tests.test_state import exact, tensors

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


def sent(slabs: Slabs, inbox: Inbox, slab: int, batch: list[Any]) -> list[Any]:
    inbox.messages.put(slabs.pack(slab, [PackedValue(value) for value in batch]))
    received = [inbox.next_value(0) for _ in batch]
    assert [is_last for _, is_last in received] == [False] * (len(batch) - 1) + [True]
    return [value for value, _ in received]


@given(st.lists(st.lists(values, min_size=1, max_size=3), min_size=1, max_size=6))
def test_values_come_back_and_stay(batches: list[list[Any]]) -> None:
    slabs, inbox = Slabs(), Inbox(pin_memory=False)
    received = [sent(slabs, inbox, i % 2, batch) for i, batch in enumerate(batches)]
    assert exact(received) == exact(batches)


def test_what_is_not_contiguous_dense_or_plain() -> None:
    batch = [
        torch.arange(6).reshape(2, 3).t(),
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "b"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.datetime64("2020-01-01"),
    ]
    *found, sparse = sent(Slabs(), Inbox(pin_memory=False), 0, [*batch, torch.eye(2).to_sparse()])
    assert exact(found) == exact(batch)
    assert torch.equal(sparse.to_dense(), torch.eye(2))
