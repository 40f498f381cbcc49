"""Balanced steps: what a user says of them, what samples cost, and the same samples in each step as without.

On real ranks: `tests.distributed.test_balance`; whatever is called at any moment: law 4.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rescale_data as rd
from rescale_data.testing import full_state_dict

COST = rd.transformer_cost(crossover=10)


def cost_of(cost: Any, sample: Any) -> Any:
    return rd.Balance(cost=cost).measure(sample)


def first_batch(**given: Any) -> Any:
    return next(iter(rd.DataLoader([{"tokens": [0]}] * 8, global_batch_size=4, collate_fn=list, **given)))


WEIGHED = rd.Balance(cost=COST, over="rank", weight=lambda sample: 1)
ON_TWO_RANKS = {"micro_batch_size": 2, "dp_rank": 0, "dp_world_size": 2}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rd.Balance(cost="cost", over="node"), ValueError, "over='node'"),
        (lambda: rd.Balance(cost="cost", sync="batch"), ValueError, "sync='batch'"),
        (lambda: rd.Balance(cost="cost", max_tokens=0), ValueError, "max_tokens=0"),
        (lambda: rd.Balance(cost="cost", max_tokens=1.5), TypeError, "max_tokens=1.5"),
        (lambda: rd.Balance(cost=None), TypeError, "cost=None"),
        (lambda: rd.Balance(cost="cost", weight=3), TypeError, "weight=3"),
        (lambda: rd.Balance(cost="cost", padded="yes"), TypeError, "padded='yes'"),
        (lambda: rd.transformer_cost(), ValueError, "crossover"),
        (lambda: rd.transformer_cost(crossover=0), ValueError, "crossover"),
        (lambda: rd.transformer_cost(crossover=9, layers=2), ValueError, "crossover"),
        (lambda: rd.transformer_cost(active_parameters=9, layers=2), ValueError, "crossover"),
        (lambda: cost_of(COST, {"text": "x"}), ValueError, "'tokens' or 'input_ids'"),
        (lambda: cost_of(COST, 3), ValueError, "a int"),
        (lambda: cost_of("price", {"tokens": [1]}), ValueError, "there is no such column"),
        (lambda: cost_of(lambda sample: "much", {"tokens": [1]}), ValueError, "'much' is no integer"),
        (lambda: cost_of(lambda sample: -1, {"tokens": [1]}), ValueError, "a sample has -1"),
        (lambda: cost_of(lambda sample: 1 << 60, {"tokens": [1]}), ValueError, "give 0 to"),
        (lambda: first_batch(balance="host"), TypeError, "balance='host'"),
        (lambda: first_batch(balance=WEIGHED), TypeError, "collate_fn returns a list"),
        (
            lambda: first_batch(balance=rd.Balance(cost=int), **ON_TWO_RANKS),
            ValueError,
            "no process group in which ranks",
        ),
    ],
)
def test_what_is_wrong_is_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_document_costs_its_tokens_and_their_square() -> None:
    assert COST({"tokens": torch.zeros(20)}) == COST({"input_ids": [0] * 20}) == 20 + 40
    assert rd.transformer_cost(active_parameters=600, layers=3, attention_width=20)({"tokens": [0] * 20}) == 60
    assert COST({"tokens": [0] * 20, "cost": torch.tensor([200])}) == 20 + 20, "two documents of ten tokens"


def test_a_sample_without_tokens_counts_as_one() -> None:
    assert rd.Balance(cost="cost").measure({"cost": 5, "image": 0}) == (5, 1, 0)
    assert rd.Balance(cost="cost", tokens="n", weight="w").measure({"cost": 5, "n": 7, "w": 3}) == (5, 7, 3)


def test_one_micro_batch_a_step_is_said_to_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rd.DataLoader(range(8), global_batch_size=4, balance=rd.Balance(cost=int, over="rank"))
    assert "changes nothing" in caplog.text


def test_a_sample_that_is_longer_than_a_micro_batch_stands_alone(caplog: pytest.LogCaptureFixture) -> None:
    documents = [{"tokens": [row] * length} for row, length in enumerate([90, 5, 5, 5, 5, 5, 5, 5] * 4)]
    balance = rd.Balance(cost=COST, over="rank", max_tokens=40)
    with rd.DataLoader(
        documents, shuffle=False, global_batch_size=8, micro_batch_size=2, balance=balance, collate_fn=list
    ) as loader:
        for _ in range(2):
            step = [next(iter(loader)) for _ in range(4)]
            assert sorted(len(batch) for batch in step if any(len(s["tokens"]) == 90 for s in batch)) == [1]
            assert sum(len(batch) for batch in step) == 8
    assert caplog.text.count("a micro batch has 90 tokens") == 1


ROWS = [{"id": row, "tokens": [row] * (1 + row * row % 37)} for row in range(101)]


def mixed(shard: rd.Shard) -> Any:
    readers = {"a": rd.Reader(ROWS, shard), "b": rd.Reader(ROWS[:30], shard)}
    return rd.WeightedSampler(readers, {"a": 3, "b": 1})


def opened(data: Any, rank: int, world: int, b: int, **kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(
        data, global_batch_size=12, micro_batch_size=b, num_logical_shards=24, dp_rank=rank, dp_world_size=world,
        collate_fn=lambda samples: {"id": [sample["id"] for sample in samples]}, **kwargs,
    )  # fmt: skip


CHAINS: list[tuple[Any, dict[str, Any]]] = [
    (ROWS, {"tail": "pad", "verify": True}),
    (ROWS, {"tail": "drop"}),
    (mixed, {"repeat": True}),
]
BALANCES = [None, rd.Balance(cost=COST, over="rank"), rd.Balance(cost=COST, over="rank", padded=True)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("data", "given"), CHAINS, ids=["padded", "dropped", "mixed"])
def test_chains_of_topologies_with_and_without_balance_have_one_order(data: Any, given: Any, seed: int) -> None:
    """Balance begins and ends with a segment, also within a balanced step: that begins again."""
    rng = random.Random(seed)
    plain = opened(data, 0, 1, 12, **given)
    state: Any = plain.state_dict()
    for _ in range(6):
        world, b = rng.choice([(1, 12), (1, 4), (2, 3), (2, 6), (3, 2), (4, 3), (6, 1), (6, 2)])
        feed, balance = rng.choice([{}, {"prefetch": 2}]), rng.choice(BALANCES)
        loaders = [opened(data, rank, world, b, balance=balance, **feed, **given) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
        for _ in range(rng.randint(1, 6)):
            step = [row for _ in range(12 // world // b) for loader in loaders for row in taken(loader)]
            assert sorted(step) == sorted(taken(plain))
        state, expected = full_state_dict(loaders), plain.state_dict()
        assert state["table"].equal(expected["table"])
        if balance is not None and 12 // world // b > 1:
            for loader in loaders:
                taken(loader)
            within = full_state_dict(loaders)
            if not loaders[0].epoch > plain.epoch:  # the next epoch has not begun
                assert within["table"].equal(expected["table"])
                state = within
        for loader in loaders:
            loader.close()


def taken(loader: rd.DataLoader) -> list[int]:
    """Return the ids of the next batch, of the next epoch where one has ended; -1 for rows that fill it."""
    batch = next(iter(loader), None) or next(iter(loader))
    real = batch["valid"].tolist() if "valid" in batch else [True] * len(batch["id"])
    return [row if is_real else -1 for row, is_real in zip(batch["id"], real, strict=True)]


def test_what_was_delivered_within_a_balanced_step_is_refused_without_balance_too():
    """The samples of the step had changed places: others would be passed than those that were delivered."""
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "num_logical_shards": 8}
    state = rd.DataLoader(range(32), balance=rd.Balance(cost=lambda row: 1 + row % 5), **sizes).state_dict()
    loader = rd.DataLoader(range(32), **sizes)
    with pytest.raises(ValueError, match=r"ends within a step.*give whole steps"):
        loader.load_state_dict(state, delivered=2)
    loader.load_state_dict(state, delivered=8)
    assert loader.step == 1
