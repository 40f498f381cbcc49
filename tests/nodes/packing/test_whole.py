"""`WholeDocumentPacker`: every document whole, once, and what attention needs to know of it."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.nodes.packing.fit import best_fit
from tests.corpus import documents
from tests.nodes.resume import plain

EOS, BOS = 2, 1
lengths = st.lists(st.integers(0, 14), min_size=1, max_size=30)


def packer(source: Any, shard: rd.Shard | None = None, **kwargs: Any) -> rd.WholeDocumentPacker:
    rows = source if isinstance(source, rd.Node) else rd.Reader(source, shard or rd.Shard(), shuffle=4)
    return rd.WholeDocumentPacker(rows, **{"column": "tokens", "seq_len": 8, "window": 6, **kwargs})


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"tokens": np.array(doc, dtype=np.uint16)} for doc in documents(lengths)]


def parts(sample: dict[str, Any]) -> list[list[int]]:
    """The documents of a sample, by its cumulative lengths; the last may be padding."""
    cu, tokens = sample["cu_seqlens"].tolist(), sample["tokens"].tolist()
    return [tokens[a:b] for a, b in itertools.pairwise(cu) if b > a]


@given(
    lengths=lengths,
    long=st.sampled_from(["split", "truncate", "drop"]),
    eos=st.sampled_from([None, EOS]),
    bos=st.sampled_from([None, BOS]),
    window=st.integers(1, 9),
    max_documents=st.integers(1, 4),
)
@settings(max_examples=120)
def test_every_document_is_whole_and_there_once(
    lengths: list[int], long: Any, eos: int | None, bos: int | None, window: int, max_documents: int
) -> None:
    data = rows_of(lengths)
    form: Any = {"long": long, "eos_id": eos, "bos_id": bos, "window": window, "max_documents": max_documents}
    node = packer(data, pad_id=0, labels=True, **form)
    expected, num_long = [], 0
    for row in data:
        doc = [*([] if bos is None else [bos]), *row["tokens"].tolist(), *([] if eos is None else [eos])]
        num_long += len(doc) > 8
        if len(doc) <= 8 or long == "split":
            expected += [doc[i : i + 8] for i in range(0, len(doc), 8)]
        elif long == "truncate":
            expected.append(doc[:8])
    found, padding = [], 0
    for sample in node:
        here = parts(sample)
        used = int((sample["doc_ids"] >= 0).sum())
        if used < 8:
            assert here.pop() == [0] * (8 - used)
        assert 1 <= len(here) <= max_documents
        assert_columns_agree(sample, used, max_documents)
        found += here
        padding += 8 - used
    assert sorted(found) == sorted(expected)
    state = node.get_state()
    assert (state["padding"], state["long"]) == (padding, num_long)


def assert_columns_agree(sample: dict[str, Any], used: int, max_documents: int) -> None:
    cu = sample["cu_seqlens"]
    assert (cu.dtype, cu.shape) == (torch.int32, (max_documents + 2,))
    assert (cu[0], cu[-1]) == (0, 8)
    values = plain(sample)
    for doc in range(max(values["doc_ids"]) + 1):
        a, b = values["cu_seqlens"][doc : doc + 2]
        assert values["doc_ids"][a:b] == [doc] * (b - a)
        assert values["positions"][a:b] == list(range(b - a))
        assert values["labels"][a:b] == [*values["tokens"][a + 1 : b], -100]
        assert values["loss_mask"][a:b] == [True] * (b - a - 1) + [False]
    padding = {"tokens": 0, "labels": -100, "loss_mask": False, "positions": 0, "doc_ids": -1}
    assert {name: values[name][used:] for name in padding} == {name: [of] * (8 - used) for name, of in padding.items()}


def test_a_window_without_a_sample_is_passed() -> None:
    data = rows_of([20, 20, 20, 20, 20, 20, 3])
    node = packer(rd.Reader(data, rd.Shard(), shuffle=False), window=2, long="drop")
    assert len(list(node)) == 1
    assert node.get_state()["long"] == 6


@given(st.lists(st.integers(1, 20), max_size=60))
def test_few_samples_are_made(lengths: list[int]) -> None:
    bins = best_fit(lengths, 20, 100)
    assert len(bins) <= 2 * -(-sum(lengths) // 20)
    assert sum(sum(lengths[i] for i in items) * 2 <= 20 for items in bins) <= 1  # two that are half empty would be one


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_attention_by_cumulative_lengths_is_attention_within_documents(dtype: torch.dtype) -> None:
    """What varlen attention computes from the batch is what each document gives alone."""
    loader = rd.DataLoader(
        lambda shard: packer(rows_of([5, 3, 2, 7, 1, 4, 6, 2]), shard, dtype=dtype),
        global_batch_size=3,
        num_logical_shards=1,
    )
    batch = next(iter(loader))
    cu, longest = rd.flat_cu_seqlens(batch["cu_seqlens"])
    assert (batch["tokens"].dtype, cu.dtype) == (dtype, torch.int32)
    flat = batch["doc_ids"].flatten()
    row = torch.arange(len(flat)) // 8
    same = (flat[:, None] == flat[None, :]) & (row[:, None] == row[None, :])
    by_cu = torch.bucketize(torch.arange(len(flat)), cu[1:], right=True)
    assert torch.equal(same, by_cu[:, None] == by_cu[None, :])
    assert longest == max((cu[1:] - cu[:-1]).tolist())
