"""The processes that a loader's collectives are made among: nobody else's group disturbs them, and one that dies is named."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rescale_data.engine.ranks import communicator
from rescale_data.engine.ranks.find_ranks import find_ranks
from rescale_data.engine.report import COUNTER_NAMES
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import Data, Logged, take
from tests.states import opened

UNEVEN = Data("rows", 100, 7)


def on_4_ranks() -> dict[str, Any]:
    me = dist.get_rank()
    found: dict[str, Any] = {}
    dist.new_group([0])  # legal, and what made the names of torch's groups differ between ranks
    pair = dist.new_group([0, 1]) if me < 2 else dist.new_group([0, 1]) and None
    UNEVEN.loader(12, 1)  # ranks that started at different times have met
    loader = UNEVEN.loader(12, 1, timeout=10.0)
    take(loader, 2)
    communicator, sent = loader._stream.ranks.communicator, []
    begin_gather = communicator.begin_gather  # type: ignore[union-attr]
    communicator.begin_gather = lambda call, values: (sent.append(values.shape), begin_gather(call, values))[1]  # type: ignore[union-attr, method-assign]
    loader.state_dict()
    del communicator.begin_gather  # type: ignore[union-attr]
    found["rows sent"] = [shape[0] for shape in sent if len(shape) == 2]

    loader._wait_seconds = [1.0, 8.0, 2.0, 3.0][me]
    found["report"] = loader.report()

    for context in ("forkserver", "fork"):
        with Logged() as said:
            UNEVEN.loader(12, 1, num_workers=1, multiprocessing_context=context)
        found[context] = sum("which torch removes" in line for line in said)

    by_dp_rank = UNEVEN.loader(12, 6, dp_rank=me // 2, dp_world_size=2)  # two TP peers each
    take(by_dp_rank, 3)
    found["peers"] = opened(by_dp_rank.state_dict())["shards"]["samples"].tolist()
    found["members"] = by_dp_rank._stream.ranks.communicator._ranks  # type: ignore[union-attr]

    world: Any = dist.group.WORLD
    given = UNEVEN.loader(12, 1, mesh=world)
    take(given, 2)
    found["of the trainer"] = opened(given.state_dict())["shards"]["samples"].tolist()
    no_cpu = UNEVEN.loader(12, 1, mesh=dist.new_group(backend="cuda:gloo"))
    found["no CPU"] = sum(opened(no_cpu.state_dict())["shards"]["samples"].tolist())
    if pair is not None:
        found["pair"] = UNEVEN.loader(12, 6, mesh=pair)._stream.ranks.world_size
    dist.barrier()
    found["threads"] = _in_threads()
    return found


def _in_threads() -> bool:
    """Two threads of each process, that come to their exchanges in another order on each rank."""
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
    return [[table.tolist() for table in tables] for tables in merged] == want


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, tmp_path_factory.mktemp("groups"), on_4_ranks)


def test_a_state_takes_the_rows_of_each_rank_once(found: list[dict[str, Any]]) -> None:
    assert all(rank["rows sent"] == [2] for rank in found)  # of 7 logical shards on 4 ranks


def test_forked_workers_that_take_the_store_with_them_are_warned_about(found: list[dict[str, Any]]) -> None:
    assert [(rank["forkserver"], rank["fork"]) for rank in found] == [(0, 1), (0, 0), (0, 0), (0, 0)]


def test_a_report_compares_the_ranks_and_is_the_same_on_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["report"]["wait_seconds"] == (1.0, 2.5, 8.0, 1)
    assert list(found[0]["report"]) == list(COUNTER_NAMES)
    assert all(rank["report"] == found[0]["report"] for rank in found)


def test_no_group_spans_the_peers_that_share_a_dp_rank(found: list[dict[str, Any]]) -> None:
    assert [rank["members"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(sum(rank["peers"]) == 36 and rank["peers"] == found[0]["peers"] for rank in found)


def test_the_trainers_own_group_serves_if_it_holds_the_dp_ranks(found: list[dict[str, Any]]) -> None:
    assert all(rank["of the trainer"] == found[0]["of the trainer"] for rank in found)
    assert [rank.get("pair") for rank in found] == [2, 2, None, None]
    assert all(rank["no CPU"] == 0 for rank in found)


def test_threads_may_come_to_several_exchanges_in_any_order(found: list[dict[str, Any]]) -> None:
    assert all(rank["threads"] for rank in found)


def lazily_connected() -> int:
    """Return the samples of the state after two micro batches. Ranks connect when they first exchange something."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # docs/scale.md
    loader = UNEVEN.loader(12, 1)
    take(loader, 2)
    gc.collect()
    return int(opened(loader.state_dict())["shards"]["samples"].sum())


def test_a_group_may_connect_lazily(tmp_path: Path) -> None:
    assert run_ranks(3, tmp_path, lazily_connected) == [6] * 3


LONG = 60.0
PACKED = Data("packed", 200, 12, repeat=False)


def on_3_ranks() -> str:
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
    group_of_3.begin_gather(call, mine.numpy())()
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
