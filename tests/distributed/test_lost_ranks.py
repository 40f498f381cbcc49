"""Ranks that die, or go another way in the program: an error on the others, soon, that names them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rescale_data.engine.ranks import communicator
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import Data, take

LONG = 60.0
UNEVEN = Data("rows", 100, 7)
PACKED = Data("packed", 200, 12, repeat=False)


def on_3_ranks() -> str:
    """What the death of one says on the ranks that see it."""
    loader = PACKED.loader(12, 2, timeout=LONG)
    if dist.get_rank() == 1:
        take(loader, 2)
        os._exit(0)
    return _failure(lambda: list(loader))


def _failure(call: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    said = run_ranks(3, tmp_path, on_3_ranks)
    assert said[1] is None
    for rank in (0, 2):
        assert (
            f"A collective of the data loader failed on rank {rank} after at most {LONG:g} s, because the ranks [1] did"
            in said[rank]
        )


def one_exchange_apart() -> str:
    """What two ranks are told of a third that has sent one of them what it owed, and the other nothing."""
    group_of_3: Any = UNEVEN.loader(12, 2)._stream.ranks.communicator
    me, call = dist.get_rank(), communicator.Call("apart", LONG, "")
    mine, others = torch.full((1,), me), {rank: torch.empty(1, dtype=torch.int64) for rank in range(3)}
    group_of_3.gather(call, mine)
    dist.barrier()
    if me == 1:
        group_of_3.exchange(call, {2: mine}, {})
        os._exit(0)
    sends, receives = ({2: mine}, {1: others[1]}) if me == 0 else ({}, {0: others[0], 1: others[1]})
    if me == 2:
        group_of_3.exchange(call, sends, receives)
        receives = {0: others[0]}  # who comes no more, since it has seen that rank 1 is gone
    return _failure(lambda: group_of_3.exchange(call, sends, receives))


def test_ranks_that_see_a_dead_one_in_different_exchanges_name_it_alone(tmp_path: Path) -> None:
    said = run_ranks(3, tmp_path, one_exchange_apart)
    assert said[1] is None
    for rank in (0, 2):
        assert f"failed on rank {rank} after at most {LONG:g} s, because the ranks [1] did" in said[rank]
