"""Balanced steps on real ranks: the same global batches as sets, and the same table at each step's end, as without."""

import subprocess
import sys
import threading
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.ranks import run_ranks

ROWS, GLOBAL = 93, 12
LENGTHS = np.random.default_rng(0).lognormal(2.5, 0.9, 4 * ROWS).astype(int).clip(1, 200).tolist()
COST = rd.transformer_cost(crossover=30)


def first(loader: rd.DataLoader, num_batches: int) -> list[list[int]]:
    return [batch["id"] for batch in islice(loader, num_batches)]


def flat(lists: Any) -> list[int]:
    return sorted(chain.from_iterable(lists))


SECONDS = 120.0
"""Two processes start, and end, within this on a busy machine; ``timeout`` of a loader is longer."""


class Rows:
    """Rows with an id and as many tokens as the id says; one of them cannot be read, or none of them be sent."""

    def __init__(self, broken: int = -1, size: int = ROWS, *, locks: bool = False) -> None:
        self.broken, self.size, self.locks = broken, size, locks

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == self.broken:
            raise OSError("corrupt")
        lock = {"lock": threading.Lock()} if self.locks else {}
        return {"id": row, "tokens": torch.full((LENGTHS[row],), row), **lock}


def ragged(samples: list[Any]) -> dict[str, Any]:
    for sample in samples:
        assert sample["tokens"].tolist() == [sample["id"]] * LENGTHS[sample["id"]]
    return {"id": [sample["id"] for sample in samples]}


def is_kept(row: dict[str, Any]) -> bool:
    return row["id"] % 3 != 0


def filtered(source: Rows, shard: rd.Shard) -> Any:
    return rd.Filter(rd.Reader(source, shard), is_kept)


def opened(
    balance: rd.Balance | None, source: Any = None, *, is_filtered: bool = False, **kwargs: Any
) -> rd.DataLoader:
    source = source or Rows()
    sizes = {
        "global_batch_size": GLOBAL,
        "micro_batch_size": GLOBAL // 2 // dist.get_world_size(),
        "num_logical_shards": 24,
    }
    data = partial(filtered, source) if is_filtered else source
    return rd.DataLoader(data, **{**sizes, "collate_fn": ragged, "balance": balance, **kwargs})


def played(loader: rd.DataLoader, num_batches: int) -> tuple[list[list[int]], list[Any]]:
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


def compare(over: Any, feed: str, kwargs: dict[str, Any]) -> list[list[int]]:
    """Return this rank's batches with balance; everything else is compared here."""
    given = {**FEEDS[feed], **kwargs}
    expected, tables = played(opened(None, **kwargs), 40)
    found, balanced = played(opened(rd.Balance(cost=COST, over=over), **given), 40)
    assert len(tables) == len(balanced)
    assert all(torch.equal(one, other) for one, other in zip(tables, balanced, strict=True))
    batches: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(batches, (expected, found))
    for step in range(20):
        one, other = (
            sorted(row for rank in batches for batch in rank[kind][2 * step : 2 * step + 2] for row in batch)
            for kind in (0, 1)
        )
        assert one == other, (step, one, other)
    assert over == "rank" or any(sorted(a) != sorted(b) for a, b in zip(expected, found, strict=True))
    return found


CASES = [
    ("rank", "", {"repeat": True}),
    ("host", "thread", {"verify": True}),
    ("all", "", {"tail": "pad"}),
    ("host", "thread", {"is_filtered": True, "tail": "pad"}),
]
WORKERS = ("all", "workers", {"repeat": True})
"""Of two ranks."""


def skipped_and_refused() -> None:
    with opened(rd.Balance(cost=COST, over="all"), repeat=True) as loader, opened(None, repeat=True) as plain:
        plain.skip(3 * GLOBAL)
        loader.skip(3 * GLOBAL)
        state = loader.state_dict()
        assert torch.equal(state["table"], plain.state_dict()["table"])
        with pytest.raises(ValueError, match=r"ends within a step, .*give whole steps"):
            loader.skip(GLOBAL // 2)
        next(iter(loader))
        with pytest.raises(ValueError, match="begins within a step: 1 of its 2 micro batches"):
            loader.skip(GLOBAL)
        assert torch.equal(loader.state_dict()["table"], state["table"])
        with pytest.raises(ValueError, match="give whole steps"):
            loader.load_state_dict(state, delivered=GLOBAL // 2)
        loader.load_state_dict(state, delivered=2 * GLOBAL)
        plain.skip(2 * GLOBAL)
        assert torch.equal(loader.state_dict()["table"], plain.state_dict()["table"])


def weighed(over: Any) -> list[int]:
    balance = rd.Balance(cost=COST, over=over, weight=len_of)
    with opened(balance, repeat=True, collate_fn=with_lengths) as loader:
        batches = list(islice(loader, 8))
    own = torch.tensor([[sum(batch["lengths"]), 0] for batch in batches]).reshape(4, 2, 2)[:, :, 0].sum(dim=1)
    dist.all_reduce(own)
    told = [batch["step_weight"] for batch in batches]
    assert told[::2] == told[1::2] == own.tolist()
    return told


def len_of(sample: Any) -> int:
    return len(sample["tokens"])


def with_lengths(samples: list[Any]) -> dict[str, Any]:
    return {"lengths": [len(sample["tokens"]) for sample in samples]}


def failing() -> list[str]:
    """One rank cannot read a row: all raise before the same step, and go on where they are when it can."""
    source = Rows()
    errors = []
    with opened(rd.Balance(cost=COST, over="all"), source, repeat=True, prefetch=1, timeout=60) as loader:
        batches = iter(loader)
        whole = [next(batches)["id"] for _ in range(4)]
        loader.reset()
        source.broken = whole[3][0]
        batches = iter(loader)
        found = []
        try:
            for _ in range(4):
                found.append(next(batches)["id"])
        except (OSError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert found == whole[:2]
        source.broken = -1
        assert [next(batches)["id"] for _ in range(2)] == whole[2:]
    return errors


def apart() -> list[str]:
    """One rank alone cannot collate a step that the other takes: no rank goes on before all load one state."""
    calls = [0]

    def collated(samples: list[Any]) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == 5 and dist.get_rank() == 1:
            raise OSError("no memory")
        return ragged(samples)

    errors = []
    balance = rd.Balance(cost=COST, over="all")
    with opened(balance, repeat=True, collate_fn=collated, timeout=200) as loader:
        state, found = loader.state_dict(), []
        batches = iter(loader)
        while len(errors) < 3:
            try:
                found.append(next(batches)["id"])
            except (OSError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        assert len(found) == (6 if dist.get_rank() == 0 else 4)
        loader.load_state_dict(state)
        assert first(loader, 4) == found[:4]
    return errors


def unsendable() -> str:
    source = Rows(locks=dist.get_rank() == 1)
    with (
        opened(rd.Balance(cost=COST, over="all"), source, repeat=True, timeout=200) as loader,
        pytest.raises(Exception, match=r"pickle|Another dp rank") as raised,
    ):
        first(loader, 4)
    return str(raised.value)


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


def test_a_rank_that_fails_ends_while_another_one_is_behind(tmp_path: Path) -> None:
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


def uneven_hosts() -> list[list[int]]:
    with patch("socket.gethostname", lambda: "a" if dist.get_rank() < 2 else "b"):
        loader = opened(rd.Balance(cost=COST, over="host"), repeat=True)
    found, _ = played(loader, 8)
    return found


def plain_batches() -> list[list[int]]:
    return played(opened(None, repeat=True), 8)[0]


def on_2_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {"compared": [compare(*case) for case in [*CASES, WORKERS]]}
    skipped_and_refused()
    found |= {f"weighed {over}": weighed(over) for over in ("rank", "all")}
    return {**found, "failing": failing(), "apart": apart(), "unsendable": unsendable()}


def on_3_ranks() -> dict[str, Any]:
    found = {"compared": [compare(*case) for case in CASES]}
    return {**found, "plain": plain_batches(), "on two hosts": uneven_hosts()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, tmp_path_factory.mktemp("two"), on_2_ranks)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(3, tmp_path_factory.mktemp("three"), on_3_ranks)


def test_global_batches_and_tables_are_those_without_balance(two: Any, three: Any) -> None:
    assert all(len(batches) == 40 for rank in [*two, *three] for batches in rank["compared"])


@pytest.mark.parametrize("over", ["rank", "all"])
def test_the_weight_is_that_of_the_global_batch(over: str, two: Any) -> None:
    one, other = (rank[f"weighed {over}"] for rank in two)
    assert one == other


def test_an_error_of_one_rank_is_raised_on_all_and_all_go_on(two: Any) -> None:
    errors = [error for rank in two for error in rank["failing"]]
    assert len(errors) == 2
    assert any("corrupt" in error for error in errors)
    assert all("corrupt" in error or "Another dp rank could not make its samples" in error for error in errors)


def test_ranks_that_are_at_different_steps_never_exchange_samples(two: Any) -> None:
    one, other = (rank["apart"] for rank in two)
    assert one[0].startswith("RuntimeError: Another dp rank has stopped")
    assert other[0] == "OSError: no memory"
    for errors in (one[1:], other[1:]):
        assert errors
        assert all("The dp ranks are at different places of the run, [24, 36] samples" in error for error in errors)


def test_samples_of_one_rank_that_cannot_be_sent_are_an_error_on_all(two: Any) -> None:
    one, other = (rank["unsendable"] for rank in two)
    assert "could not make its samples" in one
    assert "cannot pickle" in other


def test_samples_stay_on_their_host(three: Any) -> None:
    expected, found = ([rank[name] for rank in three] for name in ("plain", "on two hosts"))
    for step in range(0, 8, 2):
        assert flat(found[2][step : step + 2]) == flat(expected[2][step : step + 2])
    assert found[0] != expected[0]
    assert flat(found[0] + found[1]) == flat(expected[0] + expected[1])
