"""Balanced steps on real ranks: the same global batches as sets, and the same table at each step's end, as without."""

import subprocess
import sys
import threading
from functools import partial
from itertools import chain, islice
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.ranks import fails, gathered, run_ranks

ROWS, GLOBAL = 93, 12
LENGTHS = np.random.default_rng(0).lognormal(2.5, 0.9, 4 * ROWS).astype(int).clip(1, 200).tolist()
COST = rd.transformer_cost(crossover=30)
ALL = rd.Balance(cost=COST, over="all")


def first(loader, num_batches):
    return [batch["id"] for batch in islice(loader, num_batches)]


def flat(lists):
    return sorted(chain.from_iterable(lists))


SECONDS = 120.0
"""Two processes start, and end, within this on a busy machine; ``timeout`` of a loader is longer."""


class Rows:
    """Rows with an id and as many tokens as the id says; one of them cannot be read, or none of them be sent."""

    def __init__(self, broken=-1, size=ROWS, *, locks=False):
        self.broken, self.size, self.locks = broken, size, locks

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        if row == self.broken:
            raise OSError("corrupt")
        lock = {"lock": threading.Lock()} if self.locks else {}
        return {"id": row, "tokens": torch.full((LENGTHS[row],), row), **lock}


def ragged(samples):
    for sample in samples:
        assert sample["tokens"].tolist() == [sample["id"]] * LENGTHS[sample["id"]]
    return {"id": [sample["id"] for sample in samples]}


def is_kept(row):
    return row["id"] % 3 != 0


def filtered(source, shard):
    return rd.Filter(rd.Reader(source, shard), is_kept)


def opened(balance, source=None, *, is_filtered=False, **kwargs):
    source = source or Rows()
    sizes = {
        "global_batch_size": GLOBAL,
        "micro_batch_size": GLOBAL // 2 // dist.get_world_size(),
        "num_logical_shards": 24,
    }
    data = partial(filtered, source) if is_filtered else source
    return rd.DataLoader(data, **{**sizes, "collate_fn": ragged, "balance": balance, **kwargs})


def played(loader, num_batches):
    """Return the ids of each batch with which are real, and the table at each step's end."""
    batches, tables = [], []
    with loader:
        while len(batches) < num_batches:
            for batch in loader:
                real = batch["valid"].tolist() if "valid" in batch else [True] * len(batch["id"])
                assert sum(real) == loader.last_batch_samples
                assert real == sorted(real, reverse=True)
                batches.append([row if is_real else -1 - row for row, is_real in zip(batch["id"], real, strict=True)])
                if loader._stream.num_in_step == 0:
                    tables.append(loader.state_dict()["table"])
                if len(batches) == num_batches:
                    break
    return batches, tables


FEEDS = {"": {}, "thread": {"prefetch": 1}, "workers": {"num_workers": 2, "prefetch": 1}}


CASES = [
    ("rank", "", {"repeat": True}),
    ("host", "thread", {"verify": True}),
    ("all", "", {"tail": "pad"}),
    ("host", "thread", {"is_filtered": True, "tail": "pad"}),
    ("all", "workers", {"repeat": True}),
]


def global_batches_and_tables_are_those_without_balance():
    for over, feed, kwargs in CASES[: 5 if dist.get_world_size() == 2 else 4]:
        given = {**FEEDS[feed], **kwargs}
        expected, tables = played(opened(None, **kwargs), 40)
        found, balanced = played(opened(rd.Balance(cost=COST, over=over), **given), 40)
        assert len(tables) == len(balanced)
        assert all(torch.equal(one, other) for one, other in zip(tables, balanced, strict=True))
        batches = gathered((expected, found))
        for step in range(20):
            one, other = (flat(b for rank in batches for b in rank[kind][2 * step : 2 * step + 2]) for kind in (0, 1))
            assert one == other, (step, one, other)
        assert over == "rank" or any(sorted(a) != sorted(b) for a, b in zip(expected, found, strict=True))


def whole_steps_are_skipped_and_parts_are_refused():
    with opened(ALL, repeat=True) as loader, opened(None, repeat=True) as plain:
        plain.skip(3 * GLOBAL)
        loader.skip(3 * GLOBAL)
        state = loader.state_dict()
        assert torch.equal(state["table"], plain.state_dict()["table"])
        fails(r"ends within a step, .*give whole steps", loader.skip, GLOBAL // 2)
        next(iter(loader))
        fails("begins within a step: 1 of its 2 micro batches", loader.skip, GLOBAL)
        assert torch.equal(loader.state_dict()["table"], state["table"])
        fails("give whole steps", loader.load_state_dict, state, delivered=GLOBAL // 2)
        loader.load_state_dict(state, delivered=2 * GLOBAL)
        plain.skip(2 * GLOBAL)
        assert torch.equal(loader.state_dict()["table"], plain.state_dict()["table"])


def the_weight_is_that_of_the_global_batch():
    for over in ("rank", "all"):
        balance = rd.Balance(cost=COST, over=over, weight=len_of)
        with opened(balance, repeat=True, collate_fn=with_lengths) as loader:
            batches = list(islice(loader, 8))
        own = torch.tensor([sum(batch["lengths"]) for batch in batches]).reshape(4, 2).sum(dim=1)
        dist.all_reduce(own)
        told = [batch["step_weight"] for batch in batches]
        assert told[::2] == told[1::2] == own.tolist()


def len_of(sample):
    return len(sample["tokens"])


def with_lengths(samples):
    return {"lengths": [len(sample["tokens"]) for sample in samples]}


def a_row_that_one_rank_cannot_read_is_an_error_on_all_and_all_go_on():
    source, found = Rows(), []
    with opened(ALL, source, repeat=True, prefetch=1, timeout=60) as loader:
        batches = iter(loader)
        whole = [next(batches)["id"] for _ in range(4)]
        loader.reset()
        source.broken = whole[3][0]
        batches = iter(loader)
        with pytest.raises((OSError, RuntimeError), match=r"corrupt|Another dp rank could not make its") as raised:
            found.extend(next(batches)["id"] for _ in range(4))
        assert found == whole[:2]
        source.broken = -1
        assert [next(batches)["id"] for _ in range(2)] == whole[2:]
    assert any("corrupt" in error for error in gathered(str(raised.value)))


def ranks_that_are_at_different_steps_never_exchange_samples():
    """One rank alone cannot collate a step that the other takes: no rank goes on before all load one state."""
    calls, me = [0], dist.get_rank()

    def collated(samples):
        calls[0] += 1
        if calls[0] == 5 and me == 1:
            raise OSError("no memory")
        return ragged(samples)

    with opened(ALL, repeat=True, collate_fn=collated, timeout=200) as loader:
        state, batches = loader.state_dict(), iter(loader)
        found = [next(batches)["id"] for _ in range(4 if me else 6)]
        fails("no memory" if me else "Another dp rank has stopped", next, batches)
        for _ in range(2):
            fails(r"The dp ranks are at different places of the run, \[24, 36\] samples", next, batches)
        loader.load_state_dict(state)
        assert first(loader, 4) == found[:4]


def samples_of_one_rank_that_cannot_be_sent_are_an_error_on_all():
    me = dist.get_rank()
    with opened(ALL, Rows(locks=me == 1), repeat=True, timeout=200) as loader:
        fails("cannot pickle" if me else "could not make its samples", first, loader, 4)


def samples_stay_on_their_host():
    with patch("socket.gethostname", lambda: "a" if dist.get_rank() < 2 else "b"):
        loader = opened(rd.Balance(cost=COST, over="host"), repeat=True)
    found, expected = (gathered(played(each, 8)[0]) for each in (loader, opened(None, repeat=True)))
    for step in range(0, 8, 2):
        assert flat(found[2][step : step + 2]) == flat(expected[2][step : step + 2])
    assert found[0] != expected[0]
    assert flat(found[0] + found[1]) == flat(expected[0] + expected[1])


PROMISES = [
    (2, global_batches_and_tables_are_those_without_balance),
    (3, global_batches_and_tables_are_those_without_balance),
    (2, whole_steps_are_skipped_and_parts_are_refused),
    (2, the_weight_is_that_of_the_global_batch),
    (2, a_row_that_one_rank_cannot_read_is_an_error_on_all_and_all_go_on),
    (2, ranks_that_are_at_different_steps_never_exchange_samples),
    (2, samples_of_one_rank_that_cannot_be_sent_are_an_error_on_all),
    (3, samples_stay_on_their_host),
]


@pytest.mark.parametrize(("num_ranks", "promise"), PROMISES)
def test_ranks(num_ranks, promise):
    run_ranks(num_ranks, promise)


TRAINER = """
import sys
import torch.distributed as dist
import rescale_data as rd
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
loader = rd.DataLoader([{"tokens": [0] * (1 + i % 7)} for i in range(4000)], global_batch_size=8, micro_batch_size=4,
    repeat=True, prefetch=2, collate_fn=len, balance=rd.Balance(cost=lambda sample: len(sample["tokens"]), over="all"))
batches = iter(loader)
next(batches)
if rank == 0:
    next(batches)
    raise SystemExit(3)
else:
    sys.stdin.read()
    try:
        while True:
            next(batches)
    except RuntimeError as error:
        assert "ranks [0] did not come" in str(error) or "Another dp rank has stopped" in str(error), error
"""


def test_a_rank_that_fails_ends_while_another_one_is_behind(tmp_path):
    """The one that fails waits for nobody, the other one sees that when it comes. Neither closes, nor ends by a signal."""
    command, pipe = [sys.executable, "-c", TRAINER], subprocess.PIPE
    failing, behind = (
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdin=pipe, stderr=pipe, text=True)
        for rank in range(2)
    )
    try:
        _, said = failing.communicate(timeout=SECONDS)
        assert failing.returncode == 3, said
        assert behind.poll() is None
        _, said = behind.communicate("", timeout=SECONDS)
        assert behind.returncode == 0, said
    finally:
        failing.kill()
        behind.kill()
