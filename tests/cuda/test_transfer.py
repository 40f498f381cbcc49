"""Batches on their way to a GPU arrive whole, however they are made. States: `tests.test_ahead`, law 4."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.states import opened

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


BUSY = 100_000_000  # cycles that the device is behind: 0.05 s
ROWS = [{"tokens": torch.full((3 + 11 * i % 60,), i), "row": i} for i in range(96)]


@pytest.mark.parametrize("stream", ["the default stream", "a stream of the trainer's"])
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda:0")])
@pytest.mark.parametrize("collate", [None, pairs])
@pytest.mark.parametrize("mode", MODES)
def test_batches_are_on_the_gpu_and_equal_though_it_is_behind(
    folder: Path, mode: str, collate: Any, device: Any, stream: str
) -> None:
    """Each is used at once in the stream of training, without a wait, and none is overwritten while the copy is to come."""
    expected = [[t.clone() for t in tensors(b)] for b in loader(folder, mode, collate_fn=collate)]
    where = contextlib.nullcontext() if stream == "the default stream" else torch.cuda.stream(torch.cuda.Stream())
    with where, loader(folder, mode, collate_fn=collate, transfer=device) as sent:
        got = []
        for batch in sent:
            if len(got) % 8 == 0:
                torch.cuda._sleep(BUSY)
            for tensor in tensors(batch):
                assert tensor.device == torch.device("cuda:0")
            got.append([tensor + 0 for tensor in tensors(batch)])
    torch.cuda.synchronize()
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("mode", MODES)
def test_balanced_steps_go_to_the_gpu(mode: str) -> None:
    balance = rd.Balance(cost=rd.transformer_cost(crossover=1000), weight=lambda sample: len(sample["tokens"]))
    sizes = {"global_batch_size": 16, "micro_batch_size": 4}
    make = partial(rd.DataLoader, ROWS, balance=balance, collate_fn=joined, **sizes, **MODES[mode])

    with make() as plain, make(transfer="cuda") as sent:
        for mine, theirs in zip(sent, plain, strict=True):
            assert mine["tokens"].device.type == "cuda"
            assert torch.equal(mine["tokens"].cpu(), theirs["tokens"])
            assert mine["step_weight"] == theirs["step_weight"]


def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tokens": torch.cat([sample["tokens"] for sample in samples])}


def on_two_peers(folder: Path) -> list[tuple[list[torch.Tensor], int]]:
    """Return for each mode the batches of this peer and the samples that its state counts; both peers have one GPU."""
    peers = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"]
    pipeline, results = partial(packed, folder=folder, form="packed"), []
    given = {"dp_rank": 0, "dp_world_size": 1, "global_batch_size": 4, "num_logical_shards": 8, "seed": 3}
    for mode in MODES:
        with rd.DataLoader(lambda: pipeline, peers=peers, transfer="cuda", **given, **MODES[mode]) as sent:
            batches = []
            for batch in sent:
                torch.cuda._sleep(BUSY // 10)
                assert batch["tokens"].device.type == "cuda"
                batches.append(batch["tokens"] + 0)
            samples = opened(sent.state_dict())["shards"]["samples"].sum().item()
            results.append(([batch.cpu() for batch in batches], samples))
    return results


def test_peers_share_batches_that_each_copies_to_its_gpu(tmp_path: Path, folder: Path) -> None:
    expected = [batch["tokens"].clone() for batch in loader(folder, "none")]
    for rank in run_ranks(2, on_two_peers, folder):
        for batches, samples in rank:
            assert samples == 4 * len(expected)
            assert all(torch.equal(*pair) for pair in zip(batches, expected, strict=True))
