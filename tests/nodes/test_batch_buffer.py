"""Samples written side by side are the batch that stacking them makes."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import rescale_data as rd

DOCUMENTS = [{"tokens": list(range(i, i + 3 + i % 5))} for i in range(40)]


def cut(shard: rd.Shard, **kwargs: Any) -> rd.BaseNode[Any]:
    return rd.TokenPacker(rd.Reader(DOCUMENTS, shard), column="tokens", seq_len=4, eos_id=1, labels=True, **kwargs)


def cut_and_padded(shard: rd.Shard) -> rd.BaseNode[Any]:
    return cut(shard, doc_ids=True, last="pad", dtype=torch.int32)


def whole(shard: rd.Shard) -> rd.BaseNode[Any]:
    rows = rd.Reader(DOCUMENTS, shard, provenance=True)
    return rd.WholeDocumentPacker(rows, column="tokens", seq_len=8, eos_id=1, labels=True, window=4)


@pytest.mark.parametrize("pipeline", [cut, cut_and_padded, whole])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_batch_is_what_stacking_samples_makes(pipeline: Any, repeat: bool) -> None:
    given = {"global_batch_size": 4, "num_logical_shards": 4, "repeat": repeat}
    in_place, stacked = (rd.DataLoader(pipeline, collate_fn=f, **given) for f in (None, default_collate))
    kept, expected = (list(itertools.islice(loader, 20)) for loader in (in_place, stacked))
    assert len(kept) == len(expected) > 5
    for one, other in zip(kept, expected, strict=True):  # batches that are kept stay as they are
        assert set(one) == set(other)
        for column, value in one.items():
            assert torch.equal(value, other[column]) if isinstance(value, torch.Tensor) else value == other[column]
            assert getattr(value, "dtype", None) == getattr(other[column], "dtype", None)


def test_shards_that_yield_other_columns() -> None:
    loader = rd.DataLoader(unlike, global_batch_size=2, num_logical_shards=2)
    with pytest.raises(TypeError, match=r"logical shard 1 yields the columns .*Samples of all shards"):
        next(iter(loader))


def unlike(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.TokenPacker(rd.Reader(DOCUMENTS, shard), column="tokens", seq_len=4 + shard.index, eos_id=1)
