"""Ranks of a loader: nobody else's group disturbs their collectives, one that dies is named, ranks that differ are all told.

In arguments, in where they stand, in errors: at once, and they may go on together.
"""

import functools
import gc
import itertools
import logging
import os
import pickle
import re
import signal
import threading
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rescale_data as rd
from rescale_data.engine.ends import EpochEndFinder
from rescale_data.engine.ranks import communicator
from rescale_data.engine.ranks.find_ranks import find_ranks
from rescale_data.engine.report import COUNTER_NAMES
from rescale_data.engine.runner import ShardRunner
from tests.distributed.ranks import fails, gathered, run_ranks
from tests.distributed.segments import Data, Logged, take
from tests.states import opened, same_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

UNEVEN = Data("rows", 100, 7)


def samples_in(loader):
    """Return what each logical shard has delivered, which is the same on all ranks."""
    first, *others = gathered(opened(loader.state_dict())["shards"]["samples"].tolist())
    assert others == [first] * len(others)
    return first


def communicator_of(loader):
    return loader._stream.ranks.communicator


def a_state_takes_the_rows_of_each_rank_once():
    loader, sent = UNEVEN.loader(12, 1), []
    take(loader, 2)
    group = communicator_of(loader)
    begin = group.begin_gather
    with patch.object(group, "begin_gather", lambda call, rows: (sent.append(rows.shape), begin(call, rows))[1]):
        loader.state_dict()
    assert [shape[0] for shape in sent if len(shape) == 2] == [2]  # of 7 logical shards on 4 ranks


def forked_workers_that_take_the_store_with_them_are_warned_about():
    for context, num_warnings in (("forkserver", 0), ("fork", int(dist.get_rank() == 0))):
        with Logged() as said:
            UNEVEN.loader(12, 1, num_workers=1, multiprocessing_context=context)
        assert sum("which torch removes" in line for line in said) == num_warnings


def a_report_compares_the_ranks_and_is_the_same_on_all():
    loader = UNEVEN.loader(12, 1)
    loader._wait_seconds = [1.0, 8.0, 2.0, 3.0][dist.get_rank()]
    report = loader.report()
    assert report["wait_seconds"] == (1.0, 2.5, 8.0, 1)
    assert list(report) == list(COUNTER_NAMES)
    assert gathered(report) == [report] * 4


def no_group_spans_the_peers_that_share_a_dp_rank():
    me = dist.get_rank()
    loader = UNEVEN.loader(12, 6, dp_rank=me // 2, dp_world_size=2)  # two TP peers each
    take(loader, 3)
    assert sum(samples_in(loader)) == 36
    assert communicator_of(loader)._member_ranks == [me % 2, me % 2 + 2]


def the_trainers_own_group_serves_if_it_holds_the_dp_ranks():
    dist.new_group([0])  # legal, and what made the names of torch's groups differ between ranks
    pair, world = dist.new_group([0, 1]), dist.group.WORLD
    given = UNEVEN.loader(12, 1, mesh=world)
    take(given, 2)
    assert sum(samples_in(given)) == 8
    assert sum(samples_in(UNEVEN.loader(12, 1, mesh=dist.new_group(backend="cuda:gloo")))) == 0
    if dist.get_rank() < 2:
        assert UNEVEN.loader(12, 6, mesh=pair)._stream.ranks.world_size == 2


def threads_may_come_to_several_exchanges_in_any_order():
    ranks = [find_ranks(None, None, None, 60.0).with_new_loader({}) for _ in range(2)]
    owner = np.arange(4)
    merged = [[], []]

    def exchange(which):
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


def ranks_may_connect_when_they_first_exchange_something():
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # docs/scale.md
    loader = UNEVEN.loader(12, 1)
    take(loader, 2)
    gc.collect()
    assert sum(samples_in(loader)) == 8


LONG = 60.0
PACKED = Data("packed", 200, 12, repeat=False)


def names_rank_1(call, *args):
    words = rf"failed on rank {dist.get_rank()} after at most 60 s, because the ranks \[1\] did"
    fails(words, call, *args, kind=RuntimeError)


def a_rank_that_dies_is_named():
    loader = PACKED.loader(12, 2, timeout=LONG)
    if dist.get_rank() == 1:
        take(loader, 2)
        os._exit(0)
    names_rank_1(list, loader)


def ranks_that_see_a_dead_one_in_different_exchanges_name_it_alone():
    """It has sent one of them what it owed, and the other nothing."""
    group_of_3 = communicator_of(UNEVEN.loader(12, 2))
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


DATA, FEW_A_SHARD = Data("every", 300, 48), Data("rows", 200, 25)
ROWS = rd.DatasetSource([{"tokens": np.arange(i, i + 2 + i % 9)} for i in range(400)], "rows")
DIFFERENT = {"seed": (0, 1), "tail": ("drop", "pad"), "verify": (False, True), "steps_per_epoch": (None, 5)}
FAULT = []


def breaks(row):
    if FAULT and not next(FAULT[0], None):
        raise OSError("the disk is gone")
    return len(row["tokens"]) > 2


def fragile(shard):
    return rd.Map(rd.Filter(rd.Reader(ROWS, shard), breaks, version=1), lambda row: row["tokens"][:1])


def make(pipeline=ROWS, **given):
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 8}
    return rd.DataLoader(pipeline, **sizes, seed=1, collate_fn=list, **given)


def a_load_that_failed_on_one_rank_leaves_the_next_one_right(*_):
    """Also where rows have to be read for it: ranks then have made different numbers of loads."""
    loader = make(fragile, timeout=20)
    state = loader.state_dict()
    if dist.get_rank():
        fails("The header of the state", loader.load_state_dict, {**state, "header": state["header"][:-5]})
    else:
        loader.load_state_dict(state)
    loader.load_state_dict(state, delivered=44)
    assert loader.step == 11


def ranks_that_save_at_different_batches_are_told_and_go_on_from_one_state(folder):
    loader = FEW_A_SHARD.loader(12, 6)
    take(loader, 1)
    dcp.save({"loader": loader}, checkpoint_id=folder / "whole")
    whole, rows_of_this_rank = loader.state_dict(), loader.local_state_dict()
    expected = take(loader, 3)
    loader.load_state_dict(whole)
    take(loader, dist.get_rank())
    state, local = loader.state_dict(), loader.local_state_dict()  # as dcp.load asks for one
    apart = r"The ranks save at different batches[\s\S]*others between 12 and 24"
    fails(apart, pickle.dumps, state)
    fails(apart, rd.whole_state, {"root": local})
    fails("The ranks save at different batches", dcp.save, {"loader": loader}, checkpoint_id=folder / "apart")
    fails(
        "are not those of their logical shards at sample",
        FEW_A_SHARD.loader(12, 6).load_state_dict,
        state,
        kind=rd.DataStateError,
    )
    for call in (pickle.dumps, lambda rows: torch.save(rows, "/dev/null")):
        fails(r"Keep loader.state_dict\(\), which is whole", call, local, kind=TypeError)
    dcp.load({"loader": loader}, checkpoint_id=folder / "whole")
    assert same_state(loader.state_dict(), whole)
    assert take(loader, 3) == expected
    again = FEW_A_SHARD.loader(12, 6)
    again.load_state_dict(rows_of_this_rank)
    assert same_state(again.state_dict(), whole)


def trouble_on_one_rank_is_an_error_on_all_at_once(*_):
    me = dist.get_rank()
    loader = make()
    fails("different delivered", loader.load_state_dict, loader.state_dict(), delivered=8 * (me + 1))
    words = "Another dp rank" if me else "the disk is gone"
    for repeat in (False, True):
        for num_rows in (0, 20, 60):
            loader, FAULT[:] = make(fragile, repeat=repeat), []
            state = loader.state_dict()
            for call in (loader.skip, lambda n, to=loader, of=state: to.load_state_dict(of, delivered=n)):
                FAULT[:] = [] if me else [iter([True] * num_rows)]
                fails(words, call, 160)
                FAULT.clear()
    loader, states = make(), []
    for move in (lambda: loader.skip(4), lambda: next(iter(loader))):
        loader.reset()
        move()
        states.append(loader.state_dict())
    loader.load_state_dict(states[me])
    fails("not left out the same", pickle.dumps, loader.state_dict())
    loader, began = make(timeout=200.0), time.monotonic()
    dist.barrier()
    if me == 0:  # the signal leaves an exchange half begun
        signal.signal(signal.SIGALRM, stop_it)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        fails("preempted$", loader.state_dict)
        assert time.monotonic() - began < 120
    dist.barrier()


def interrupted_on_rank_0(owner, method, at):
    """Patch a method so that Ctrl-C comes at the end of one of its calls."""
    function, numbers = getattr(owner, method), itertools.count(1)

    def call(*arguments):
        result = function(*arguments)
        if next(numbers) == at and dist.get_rank() == 0:
            raise KeyboardInterrupt
        return result

    return patch.object(owner, method, call)


def a_rank_that_ctrl_c_interrupts_as_it_plans_a_remainder_goes_on_with_the_others(*_):
    """They wait in an exchange behind the ones that it has taken part in."""
    expected = [*make(fragile)]
    for interrupted in ((ShardRunner, "look_ahead", 2), (EpochEndFinder, "plan_remainder_round", 2)):
        found, batches, num_interrupts = [], iter(make(fragile, timeout=20)), 0
        with interrupted_on_rank_0(*interrupted):
            try:
                found.extend(batches)
            except KeyboardInterrupt:
                num_interrupts = 1
                found.extend(batches)
        assert num_interrupts == (dist.get_rank() == 0)
        assert found == expected


def uneven(shard):
    """Most rows of the first logical shards, few of the others: the remainder of an epoch has many rounds."""
    rows = rd.Reader(ROWS, shard, shuffle=False)
    return rd.Map(rd.Filter(rows, lambda row: row["tokens"][0] % (1 + shard.index) == 0), lambda row: row["tokens"][:1])


def ranks_that_ctrl_c_has_set_apart_in_a_skip_fail_and_never_mix(*_):
    """One begins again, while the others wait in a later exchange."""
    for pipeline, first, num_samples, interrupted in (
        (fragile, 0, 128, (ShardRunner, "look_ahead", 12)),
        (uneven, 104, 80, (EpochEndFinder, "plan_remainder_round", 1)),
    ):
        undisturbed = make(pipeline)
        undisturbed.skip(first)
        state = undisturbed.state_dict()
        undisturbed.skip(num_samples)
        expected = [*undisturbed]
        for is_load in (False, True):
            loader, errors = make(pipeline, timeout=3), []
            loader.load_state_dict(state)
            skip = functools.partial(loader.load_state_dict, state, delivered=num_samples) if is_load else loader.skip
            with interrupted_on_rank_0(*interrupted):
                while len(errors) < 4:
                    try:
                        skip(**{} if is_load else {"num_samples": num_samples})
                        break
                    except (KeyboardInterrupt, RuntimeError) as error:
                        errors.append(error)
            assert 0 < len(errors) < 4
            assert [*loader] == expected


def a_skip_within_a_remainder_saves_the_rows_of_the_ranks_that_skipped(*_):
    tables = []
    for num_skipped in (0, 4):
        loader = make(uneven)
        loader.skip(104)
        take_batches = itertools.islice(iter(loader), 6 - num_skipped)
        assert len([*take_batches]) == 6 - num_skipped
        loader.skip(4 * num_skipped)
        tables.append(loader.state_dict()["table"])
    assert torch.equal(*tables)


def an_exchange_of_a_remainder_that_fails_on_one_rank_alone_leaves_nothing_for_the_next_call(*_):
    expected, end = [*make(fragile)], communicator._Group.end
    for failing in (1, 3):
        found, exchanges, plan = [], [], EpochEndFinder.plan_remainder_round

        def planned(finder, cursor, exchanges=exchanges, plan=plan):
            exchanges.append(0)
            return plan(finder, cursor)

        def ended(*arguments, exchanges=exchanges, failing=failing):
            end(*arguments)
            exchanges.extend(exchanges and [1])
            if sum(exchanges) == failing and dist.get_rank() == 0:
                exchanges.append(1)
                raise OSError("the network")

        batches, errors = iter(make(fragile, timeout=3)), 0
        with (
            patch.object(EpochEndFinder, "plan_remainder_round", planned),
            patch.object(communicator._Group, "end", ended),
        ):
            while errors < 4:
                try:
                    found.extend(batches)
                    break
                except (RuntimeError, OSError):  # the other rank may wait its whole timeout before it comes again
                    errors += 1
        assert 0 < errors < 4
        assert found == expected


def stop_it(*_):
    raise InterruptedError("preempted")


def meshes_and_arguments_that_differ_are_refused_and_a_missing_mesh_is_told(*_):
    me, mesh = dist.get_rank(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    wrong = [
        ("share their samples. Pass the data-parallel dims alone", {"mesh": mesh}),
        (rf"rank {me}, but mesh holds the ranks \[{1 - me}\]", {"mesh": DeviceMesh("cpu", [1 - me], _init_backend=False)}),
        ("Give mesh= or dp_rank= and dp_world_size=, not both", {"mesh": mesh["dp"], "dp_rank": 0, "dp_world_size": 1}),
        ("dp_rank=2 was given to 0 processes, and dp_rank=0 to 1. Give each dp rank to as many",
         {"dp_rank": me, "dp_world_size": 4, "b": 6}),
    ]  # fmt: skip
    for name, values in DIFFERENT.items():
        given = re.escape(f"different {name}; dp rank {me} has {{'{name}': {values[me]!r}}}")
        wrong.append((given, {name: values[me]}))
    for words, arguments in wrong:
        fails(words, DATA.loader, 24, **{"b": 12, **arguments})
    on_error = ("raise", "skip")[me]
    reads = functools.partial(rd.Reader, ROWS, on_error=on_error)
    sizes = {"global_batch_size": 24, "micro_batch_size": 12, "num_logical_shards": 24}
    fails(f"different epoch_size_is_known; dp rank {me} has", rd.DataLoader, reads, **sizes)
    logging.getLogger("rescale_data").setLevel(logging.INFO)
    with Logged(logging.INFO) as information:
        DATA.loader(24, 12)
    [said] = [line for line in information if "rows for" not in line]  # that shards have few is said as well
    assert "all 2 ranks of the process group read different samples. With TP, PP or CP pass mesh=" in said


PROMISES = [
    (2, a_load_that_failed_on_one_rank_leaves_the_next_one_right),
    (2, ranks_that_save_at_different_batches_are_told_and_go_on_from_one_state),
    (2, trouble_on_one_rank_is_an_error_on_all_at_once),
    (2, a_rank_that_ctrl_c_interrupts_as_it_plans_a_remainder_goes_on_with_the_others),
    (2, ranks_that_ctrl_c_has_set_apart_in_a_skip_fail_and_never_mix),
    (2, a_skip_within_a_remainder_saves_the_rows_of_the_ranks_that_skipped),
    (2, an_exchange_of_a_remainder_that_fails_on_one_rank_alone_leaves_nothing_for_the_next_call),
    (2, meshes_and_arguments_that_differ_are_refused_and_a_missing_mesh_is_told),
    (4, a_state_takes_the_rows_of_each_rank_once),
    (4, forked_workers_that_take_the_store_with_them_are_warned_about),
    (4, a_report_compares_the_ranks_and_is_the_same_on_all),
    (4, no_group_spans_the_peers_that_share_a_dp_rank),
    (4, the_trainers_own_group_serves_if_it_holds_the_dp_ranks),
    (4, threads_may_come_to_several_exchanges_in_any_order),
    (4, ranks_may_connect_when_they_first_exchange_something),
    (3, a_rank_that_dies_is_named),
    (3, ranks_that_see_a_dead_one_in_different_exchanges_name_it_alone),
]


@pytest.mark.parametrize(("num_ranks", "promise"), PROMISES)
def test_ranks(num_ranks, promise, tmp_path):
    run_ranks(num_ranks, promise, *[tmp_path] * (num_ranks == 2))
