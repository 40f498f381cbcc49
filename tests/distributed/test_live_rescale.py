"""Ranks that leave, or die, and ranks that go on, in live processes and on hosts. Wherever that happens in a run: histories.

With trainers, killed within a step, and others that join: `tests.trainers.test_trainers` and `test_elastic_torchrun`.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import rescale_data as rd
from tests.distributed.ranks import fails, gathered, run_ranks
from tests.states import opened


def leave():
    """All but the first of three ranks leave, and it goes on alone."""
    me, loader = dist.get_rank(), rd.DataLoader(range(96), global_batch_size=6, micro_batch_size=2, timeout=3.0)
    batches = iter(loader)
    rows, state = next(batches).tolist(), loader.state_dict()
    refused = r"mesh holds the ranks \[0, 1\]" if me == 2 else r"give state=, one state_dict\(\) of the old ranks"
    fails(refused, loader.reopen, mesh=DeviceMesh("cpu", [0, 1]), micro_batch_size=3, kind=ValueError)
    if me:
        loader.close()
        words = r"(?s)(?=.*A state is made by all dp ranks together)(?=.*the ranks \[0\] did not come to it in time)"
        fails(words, loader.state_dict, kind=RuntimeError)
    else:
        loader.reopen(state, dp_world_size=1)
        fails("no longer valid", next, batches, kind=RuntimeError)
        rows += [row for batch in loader for row in batch.tolist()]
        assert loader._stream.layout.micro_batch_size == 2
        assert opened(loader.state_dict())["samples"] == 96
    assert sorted(row for of_rank in gathered(rows) for row in of_rank) == list(range(96))


def test_a_state_of_a_loader_that_others_went_on_from_is_refused():
    run_ranks(3, leave)


REPOSITORY = Path(__file__).parents[2]
Kept = runpy.run_path(str(REPOSITORY / "examples" / "trainers" / "parts" / "kept.py"))["Kept"]
STEPS, DIES_IN, SURVIVORS = 15, 9, [0, 2, 3]


def steps_of(num_shards, micro_batch_size, **where):
    sizes = {"global_batch_size": 24, "num_logical_shards": num_shards, "micro_batch_size": micro_batch_size}
    return rd.DataLoader(range(360), **sizes, **where, timeout=60.0)


def survive(num_shards):
    """Rank 1 dies within a step, and the others go on with that step: the rows of this rank, step by step."""
    me, store, found = dist.get_rank(), dist.group.WORLD.get_group_store(), []
    loader, kept = steps_of(num_shards, 3), Kept(4)

    def take_all():
        batches = iter(loader)
        while len(found) < STEPS:
            assert loader.step == len(found)
            kept.keep(loader)
            rows = next(batches).tolist()
            if me == 1 and len(found) == DIES_IN:
                os._exit(0)
            rows += [row for _ in range(loader.gradient_accumulation_steps - 1) for row in next(batches).tolist()]
            dist.all_reduce(torch.ones(1))
            found.append(rows)

    with pytest.raises(RuntimeError):
        take_all()
    loader.close()
    dist.destroy_process_group()
    if me == 2:
        del kept.states[8]  # as if the other had died when this rank made that state
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=SURVIVORS.index(me), world_size=3)
    loader.reopen(*kept.agreed(DIES_IN), micro_batch_size=4)
    take_all()
    return found


def test_three_ranks_go_on_where_one_of_four_has_died():
    """As if nothing had happened; where the order depends on the topology, each row still comes once from there on."""
    expected = [batch.tolist() for batch in steps_of(72, 24, dp_world_size=1)]
    found = run_ranks(4, survive, 72, forks=True)
    for rank, steps in ((rank, found[rank]) for rank in SURVIVORS):
        i = SURVIVORS.index(rank)
        assert steps[:DIES_IN] == [rows[6 * rank : 6 * rank + 6] for rows in expected[:DIES_IN]]
        assert steps[DIES_IN:] == [rows[8 * i : 8 * i + 8] for rows in expected[DIES_IN:]]
    found = run_ranks(4, survive, 50, forks=True)
    rows = [row for rank in SURVIVORS for step in found[rank] for row in step]
    assert len(rows) == len(set(rows)) == 24 * STEPS - 6 * DIES_IN  # but for those of the rank that died


SCRIPT = REPOSITORY / "benchmarks" / "bench_hosts.py"
OWN = ["unshare", "-Urn"]
"""Hosts are namespaces, which reach each other through a network alone, where making some takes no rights."""


def can_make_networks():
    if not all(map(shutil.which, ("unshare", "ip", "sh"))):
        return False
    tried = "test -w /dev/net/tun && ip tuntap add dev fabric0 mode tun"
    return subprocess.run([*OWN, "sh", "-c", tried], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_make_networks(), reason="network namespaces cannot be made here without rights")
def test_a_host_vanishes_and_the_others_go_on_without_it():
    """Its cable is pulled, so that no connection ends; who is gone is said, and no row is read twice or lost."""
    few = ["--inside", "--fork", "--short", "--hosts", "3", "--delay", "0.002", "--rows", "400", "--timeout", "5"]
    command = [*OWN, sys.executable, SCRIPT, *few]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "because the ranks [2] did not come to it" in found.stdout
    assert "all were told who is gone: True; rows read twice: 0" in found.stdout
