"""Trainers of processes that share a dp rank (`peers=`): the one that reads nothing checks the loader as the others do."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.ranks import run_ranks


def packed() -> Any:
    source = rd.SyntheticSource(64, length=16)
    return lambda shard: rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=8, eos_id=0, labels=True)


def make(data: Any) -> rd.DataLoader:
    ranks = {"peers": dist.group.WORLD, "dp_rank": 0, "dp_world_size": 1}
    return rd.DataLoader(data, **ranks, global_batch_size=8, micro_batch_size=4, seed=3, timeout=60.0)


def said(call: Any) -> str:
    with pytest.raises(ValueError, match=r"rd\.DataLoader|the loader") as error:
        call()
    return str(error.value)


def rows() -> Any:
    return [{"x": torch.tensor([float(row)])} for row in range(32)]


def hugging_face(folder: Path) -> list[str]:
    from rescale_data.integrations import huggingface

    rank, size = str(dist.get_rank()), str(dist.get_world_size())  # as torchrun tells them to trainers
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # of a group that exists already

    def trainer(data: Any, tp_size: int, **sizes: Any) -> Any:
        model = torch.nn.Linear(1, 1)
        model._tp_size = tp_size  # what Trainer reads of a model that is split
        given = {"per_device_train_batch_size": 4, "data_seed": 3, **sizes}
        arguments = huggingface.TrainingArguments(str(folder), use_cpu=True, report_to=[], **given)
        return huggingface.DataStateMixin(model, arguments, train_loader=make(data))

    return [
        said(lambda: trainer(rows, 1)),
        said(lambda: trainer(rows, 2, per_device_train_batch_size=2)),
        said(lambda: trainer(packed, 2)),
        str(trainer(rows, 2).args.gradient_accumulation_steps),
    ]


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("rescale_data.integrations.huggingface")
    found = run_ranks(2, tmp_path, hugging_face, tmp_path)
    assert found[0] == found[1]
    ranks, micro_batch, labels, accumulation = found[0]
    assert "has 2 data-parallel ranks, but the loader serves its rows to 1" in ranks
    assert "per_device_train_batch_size=2), but" in micro_batch
    assert "labels=True" in labels
    assert accumulation == "2"
