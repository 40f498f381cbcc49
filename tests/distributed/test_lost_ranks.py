"""Ranks that die, or go another way in the program: an error on the others, soon, that names them."""

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.legs import Data, take, take_epoch
from tests.distributed.ranks import run_ranks
from tests.pipelines import Rows, as_samples, skewed

TIMEOUT = 5.0
UNEVEN = Data("rows", 100, 7)
PACKED = Data("packed", 200, 12, repeat=False)


class SlowRow(Rows):
    """One row takes longer than ranks wait for each other: the first, which the first shard has."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:
            time.sleep(1.5 * TIMEOUT)
        return super().__getitem__(index)


def on_3_ranks() -> list[str]:
    """What each failure says, on the ranks that see it."""
    slow = rd.DataLoader(
        functools.partial(skewed, SlowRow(30)), global_batch_size=6, timeout=TIMEOUT, collate_fn=as_samples
    )
    assert len(take_epoch(slow)) == 3  # 20 of 30 rows are kept
    saved, packed = (data.loader(12, 2, timeout=TIMEOUT) for data in (UNEVEN, PACKED))
    take(saved, 1)
    dist.barrier()
    said = [] if dist.get_rank() == 1 else [_failure(saved.state_dict)]
    dist.barrier()
    if dist.get_rank() == 1:
        take(packed, 2)
        os._exit(0)
    return [*said, _failure(lambda: take_epoch(packed))]


def _failure(call: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


def test_a_rank_that_does_not_join_and_one_that_dies_are_named(tmp_path: Path) -> None:
    found = run_ranks(3, tmp_path, on_3_ranks)
    assert found[1] is None
    for rank in (0, 2):
        assert len(found[rank]) == 2
        for said in found[rank]:
            assert (
                f"A collective of the data loader failed on rank {rank} after at most 5 s, because the ranks [1] did"
                in said
            )
