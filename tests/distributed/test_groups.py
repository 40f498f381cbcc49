"""The processes that a loader's collectives are made among: nobody else's group disturbs them, and one that dies is named."""

import gc
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from rescale_data.engine.ranks import communicator
from rescale_data.engine.ranks.find_ranks import find_ranks
from rescale_data.engine.report import COUNTER_NAMES
from tests.distributed.ranks import fails, gathered, run_ranks
from tests.distributed.segments import Data, Logged, take
from tests.states import opened

UNEVEN = Data("rows", 100, 7)


def samples_in(loader: rd.DataLoader) -> list[int]:
    """Return what each logical shard has delivered, which is the same on all ranks."""
    first, *others = gathered(opened(loader.state_dict())["shards"]["samples"].tolist())
    assert others == [first] * len(others)
    return first


def communicator_of(loader: rd.DataLoader) -> Any:
    return loader._stream.ranks.communicator


def a_state_takes_the_rows_of_each_rank_once() -> None:
    loader, sent = UNEVEN.loader(12, 1), list[Any]()
    take(loader, 2)
    group = communicator_of(loader)
    begin = group.begin_gather
    with patch.object(group, "begin_gather", lambda call, rows: (sent.append(rows.shape), begin(call, rows))[1]):
        loader.state_dict()
    assert [shape[0] for shape in sent if len(shape) == 2] == [2]  # of 7 logical shards on 4 ranks


def forked_workers_that_take_the_store_with_them_are_warned_about() -> None:
    for context, num_warnings in (("forkserver", 0), ("fork", int(dist.get_rank() == 0))):
        with Logged() as said:
            UNEVEN.loader(12, 1, num_workers=1, multiprocessing_context=context)
        assert sum("which torch removes" in line for line in said) == num_warnings


def a_report_compares_the_ranks_and_is_the_same_on_all() -> None:
    loader = UNEVEN.loader(12, 1)
    loader._wait_seconds = [1.0, 8.0, 2.0, 3.0][dist.get_rank()]
    report = loader.report()
    assert report["wait_seconds"] == (1.0, 2.5, 8.0, 1)
    assert list(report) == list(COUNTER_NAMES)
    assert gathered(report) == [report] * 4


def no_group_spans_the_peers_that_share_a_dp_rank() -> None:
    me = dist.get_rank()
    loader = UNEVEN.loader(12, 6, dp_rank=me // 2, dp_world_size=2)  # two TP peers each
    take(loader, 3)
    assert sum(samples_in(loader)) == 36
    assert communicator_of(loader)._ranks == [me % 2, me % 2 + 2]


def the_trainers_own_group_serves_if_it_holds_the_dp_ranks() -> None:
    dist.new_group([0])  # legal, and what made the names of torch's groups differ between ranks
    pair, world = dist.new_group([0, 1]), dist.group.WORLD
    given = UNEVEN.loader(12, 1, mesh=world)
    take(given, 2)
    assert sum(samples_in(given)) == 8
    assert sum(samples_in(UNEVEN.loader(12, 1, mesh=dist.new_group(backend="cuda:gloo")))) == 0
    if dist.get_rank() < 2:
        assert UNEVEN.loader(12, 6, mesh=pair)._stream.ranks.world_size == 2


def threads_may_come_to_several_exchanges_in_any_order() -> None:
    ranks = [find_ranks(None, None, None, 60.0).with_new_loader({}) for _ in range(2)]
    owner = np.arange(4)
    merged: list[list[Any]] = [[], []]

    def exchange(which: int) -> None:
        for turn in range(10):
            if (turn + which + ranks[0].rank) % 3 == 0:
                ranks[which].begin_gather_ints([0])  # and nobody waits for it
            table = np.full((4, 2), 100 * turn + which)
            table[:, 1] = ranks[0].rank
            merged[which].append(ranks[which].merge(table, owner))

    threads = [threading.Thread(target=exchange, args=(which,)) for which in range(2)]
    for thread in threads[:: 1 if ranks[0].rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    want = [[[[100 * turn + which, rank] for rank in range(4)] for turn in range(10)] for which in range(2)]
    assert [[table.tolist() for table in tables] for tables in merged] == want


def ranks_may_connect_when_they_first_exchange_something() -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # docs/scale.md
    loader = UNEVEN.loader(12, 1)
    take(loader, 2)
    gc.collect()
    assert sum(samples_in(loader)) == 8


PROMISES = [
    a_state_takes_the_rows_of_each_rank_once,
    forked_workers_that_take_the_store_with_them_are_warned_about,
    a_report_compares_the_ranks_and_is_the_same_on_all,
    no_group_spans_the_peers_that_share_a_dp_rank,
    the_trainers_own_group_serves_if_it_holds_the_dp_ranks,
    threads_may_come_to_several_exchanges_in_any_order,
    ranks_may_connect_when_they_first_exchange_something,
]


@pytest.mark.parametrize("promise", PROMISES)
def test_four_ranks(promise: Any, tmp_path: Path) -> None:
    run_ranks(4, tmp_path, promise)


LONG = 60.0
PACKED = Data("packed", 200, 12, repeat=False)


def names_rank_1(call: Any, *args: Any) -> None:
    words = rf"failed on rank {dist.get_rank()} after at most 60 s, because the ranks \[1\] did"
    fails(words, call, *args, kind=RuntimeError)


def a_rank_that_dies_is_named() -> None:
    loader = PACKED.loader(12, 2, timeout=LONG)
    if dist.get_rank() == 1:
        take(loader, 2)
        os._exit(0)
    names_rank_1(list, loader)


def ranks_that_see_a_dead_one_in_different_exchanges_name_it_alone() -> None:
    """It has sent one of them what it owed, and the other nothing."""
    group_of_3: Any = communicator_of(UNEVEN.loader(12, 2))
    me, call = dist.get_rank(), communicator.Call("apart", LONG, "")
    mine, others = torch.full((1,), me), {rank: torch.empty(1, dtype=torch.int64) for rank in range(3)}
    group_of_3.begin_gather(call, mine.numpy())()
    dist.barrier()
    if me == 1:
        group_of_3.exchange(call, {2: mine}, {})
        os._exit(0)
    sends, receives = ({2: mine}, {1: others[1]}) if me == 0 else ({}, {0: others[0], 1: others[1]})
    if me == 2:
        group_of_3.exchange(call, sends, receives)
        receives = {0: others[0]}  # who comes no more, since it has seen that rank 1 is gone
    names_rank_1(group_of_3.exchange, call, sends, receives)


@pytest.mark.parametrize(
    "promise", [a_rank_that_dies_is_named, ranks_that_see_a_dead_one_in_different_exchanges_name_it_alone]
)
def test_three_ranks_of_which_one_dies(promise: Any, tmp_path: Path) -> None:
    run_ranks(3, tmp_path, promise)
