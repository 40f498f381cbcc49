"""Trainers of processes that share a dp rank (`peers=`): the one that reads nothing checks the loader as the others do."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.ranks import fails, run_ranks


def packed() -> Any:
    source = rd.SyntheticSource(64, length=16)
    return lambda shard: rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=8, eos_id=0, labels=True)


def make(data: Any) -> rd.DataLoader:
    ranks = {"peers": dist.group.WORLD, "dp_rank": 0, "dp_world_size": 1}
    return rd.DataLoader(data, **ranks, global_batch_size=8, micro_batch_size=4, seed=3, timeout=60.0)


def rows() -> Any:
    return [{"x": torch.tensor([float(row)])} for row in range(32)]


def hugging_face(folder: Path) -> None:
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

    fails("has 2 data-parallel ranks, but the loader serves its rows to 1", trainer, rows, 1, kind=ValueError)
    sizes = {"per_device_train_batch_size": 2}
    fails(r"per_device_train_batch_size=2\), but", trainer, rows, 2, **sizes, kind=ValueError)
    fails("labels=True", trainer, packed, 2, kind=ValueError)
    assert trainer(rows, 2).args.gradient_accumulation_steps == 2


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("rescale_data.integrations.huggingface")
    run_ranks(2, tmp_path, hugging_face, tmp_path)
