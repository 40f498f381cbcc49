"""Batches on their way to a GPU. A default device of the trainer's: `tests.test_loader`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import rescale_data as rd

MODES: dict[str, dict[str, int]] = {"none": {}, "a thread": {"prefetch": 2}, "workers": {"num_workers": 2}}


def packed(shard: rd.Shard, *, folder: Path, form: str) -> Any:
    reader = rd.Reader(rd.ArrowSource(folder), shard)
    if form == "rows":
        return reader
    return rd.TokenPacker(reader, column="tokens", seq_len=16, eos_id=0, doc_ids=True)


class Pair(NamedTuple):
    tokens: Any
    more: dict[str, Any]


def pairs(samples: list[dict[str, Any]]) -> Pair:
    tokens = torch.stack([sample["tokens"] for sample in samples])
    return Pair(tokens, {"list": [tokens + 1, tokens[:, :1].expand(-1, 9), "text"], "number": 3})


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)


def loader(folder: Path, mode: str, form: str = "packed", **more: Any) -> rd.DataLoader:
    pipeline = partial(packed, folder=folder, form=form)
    return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=8, seed=3, **MODES[mode], **more)


@pytest.mark.parametrize("collate", [None, pairs, rd.pad_collate(pad={"tokens": 0})])
@pytest.mark.parametrize("mode", MODES)
def test_all_tensors_arrive_in_pinned_memory_and_go_to_the_device(folder: Path, mode: str, collate: Any) -> None:
    form = "packed" if collate in (None, pairs) else "rows"
    plain = [list(tensors(b)) for b in loader(folder, mode, form, collate_fn=collate)]
    count = 0
    for batch, want in zip(loader(folder, mode, form, collate_fn=collate, pin_memory=True), plain, strict=True):
        got = list(tensors(batch))
        assert len(got) == len(want)
        for tensor, host in zip(got, want, strict=True):
            assert tensor.is_pinned(), tensor.shape
            assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), host)
            count += 1
    assert count > 20
