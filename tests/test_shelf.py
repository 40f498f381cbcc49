"""Samples side by side: the same batch as stacking gives, without a copy where nothing came between."""

import numpy as np
import torch

from rescale_data.shelf import Shelf

INT64 = np.dtype(np.int64)


def test_what_was_put_in_order_is_already_stacked() -> None:
    shelf = Shelf()
    shelf.open(3)
    values = [np.arange(4, dtype=np.uint16) + i for i in range(3)]
    samples = [shelf.put("x", v, INT64) for v in values]
    whole = shelf.stacked("x", samples)
    assert whole is not None
    assert torch.equal(whole, torch.stack(samples))
    assert whole.tolist() == np.stack(values).tolist()
    assert whole.data_ptr() == samples[0].data_ptr()
    assert shelf.stacked("x", samples) is None


def test_samples_changed_in_place_are_the_batch() -> None:
    shelf = Shelf()
    shelf.open(2)
    samples = [shelf.put("x", np.zeros(2, np.uint8), INT64) for _ in range(2)]
    samples[1].fill_(7)
    assert shelf.stacked("x", samples).tolist() == [[0, 0], [7, 7]]  # type: ignore[union-attr]


def test_anything_else_is_for_others_to_stack() -> None:
    shelf = Shelf()
    assert shelf.put("x", np.arange(2), INT64).tolist() == [0, 1]
    assert shelf.stacked("x", []) is None
    shelf.open(2)
    first, second = (shelf.put("x", np.arange(2) + i, INT64) for i in range(2))
    assert shelf.put("x", np.arange(2) + 5, INT64).tolist() == [5, 6]
    for samples in ([second, first], [first], [first, second.clone()], [first, second, second]):
        assert shelf.stacked("x", samples) is None
        shelf.open(2)
        first, second = (shelf.put("x", np.arange(2) + i, INT64) for i in range(2))
    assert shelf.put("y", np.arange(3), INT64).tolist() == [0, 1, 2]
    assert shelf.put("y", np.arange(2), INT64).tolist() == [0, 1]


def test_batches_do_not_share_memory() -> None:
    shelf, batches = Shelf(), []
    for i in range(4):
        shelf.open(2)
        batches.append(shelf.stacked("x", [shelf.put("x", np.full(2, i), INT64) for _ in range(2)]))
    assert [batch.tolist() for batch in batches] == [[[i, i], [i, i]] for i in range(4)]
