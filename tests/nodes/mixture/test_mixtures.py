"""Mixtures as a whole: even batches by tokens, mixtures in mixtures, and what a skip costs.

That a skip is draws: `tests.laws.test_skip_is_draws`, and of mixtures in any others `tests.test_histories`.
"""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.engine.recipe import FIRST_SLOT, Recipe
from rescale_data.engine.runner import ShardRunner
from rescale_data.engine.schema import Schema
from rescale_data.nodes.below import epoch_end, skip
from rescale_data.nodes.mixture.circle import CIRCLE, arcs, weight_circle_of
from rescale_data.nodes.mixture.lengths import TokenWeightArcs
from tests.states import opened


class Rows:
    """Rows that say whose they are, with tokens of lengths 1 to 5."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"source": self.number, "row": row, "tokens": np.full(1 + (7 * row + self.number) % 5, self.number)}


def rows(number: int, size: int) -> rd.DatasetSource:
    return rd.DatasetSource(Rows(number, size), name=f"rows{number}x{size}")


def same(sample: Any) -> Any:
    return sample


def pair(a: Any, b: Any, **given: Any) -> rd.Node[Any]:
    return rd.WeightedSampler({"a": a, "b": b}, {"a": 1, "b": 2}, **given)


def inner(read: Any, stop: Any) -> rd.Node[Any]:
    return rd.Map(rd.WeightedSampler({"b": read(70), "c": read(65)}, {"b": 70, "c": 65}, stop=stop), same)


STEADY: dict[str, Callable[[Callable[[int], rd.Node[Any]]], rd.Node[Any]]] = {
    "rows": lambda read: read(900),
    "flat": lambda read: pair(read(40), read(900)),
    "few": lambda read: pair(read(2), read(900)),
    "first": lambda read: pair(read(40), read(900), stop="first"),
    "all": lambda read: pair(read(40), read(900), stop="all"),
    "capped": lambda read: pair(read(40), read(900), max_epochs={"a": 10**5}),
    "shuffled": lambda read: pair(rd.Shuffle(read(40), 8, shard=rd.Shard(1, 5)), read(900)),
    "never in it": lambda read: pair(read(40), inner(read, "never")),
    "first in it": lambda read: pair(read(40), inner(read, "first")),
    "all in it": lambda read: pair(read(40), inner(read, "all")),
}


@pytest.mark.parametrize("kind", STEADY)
def test_a_million_epochs_are_left_out_in_a_few_steps(kind: str) -> None:
    def pipeline(shard: rd.Shard) -> Any:
        return STEADY[kind](lambda size: rd.Reader(rows(size, size), shard))

    def steps(num_samples: int) -> int:
        count = 0

        def profile(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal count
            count += event == "call"

        recipe = Recipe(pipeline, 5, 0, repeat=True)
        runner = ShardRunner(recipe, Schema(recipe.build(0)))
        runner.skip(1, 100)
        sys.setprofile(profile)
        try:
            runner.skip(1, num_samples)
        finally:
            sys.setprofile(None)
        return count

    assert steps(10**8) < 12 * steps(1000)
    recipe = Recipe(pipeline, 5, 0, repeat=True)
    runner, skipped, drawn = ShardRunner(recipe, Schema(recipe.build(0))), recipe.build(1), recipe.build(1)
    runner.skip(1, 1100)
    skipped.bind(runner.table[1, FIRST_SLOT:].data)
    assert drawn_over_epochs(skipped, 1) == drawn_over_epochs(drawn, 1101)


def drawn_over_epochs(node: rd.Node[Any], num_samples: int) -> tuple[str, list[int]]:
    """Return the last of the next samples, over the ends of epochs, and the position behind it."""
    sample: Any = None
    for _ in range(num_samples):
        while (sample := next(node, None)) is None:
            node.bind(node.position)
    return str(sample), node.position.tolist()


def test_a_skip_over_a_billion_draws_reads_nothing() -> None:
    class Unread(Rows):
        def __getitem__(self, row: int) -> dict[str, Any]:
            raise AssertionError("it was read")

    source = rd.DatasetSource(Unread(0, 10**9), name="large")
    nodes = {f"s{i}": rd.Reader(source, rd.Shard(2, 5)) for i in range(5)}
    node = rd.WeightedSampler(nodes, {name: i + 1 for i, name in enumerate(nodes)}, stop="all")
    node.reset(None)
    skip(node, 85 * 10**7)
    state = node.get_state()
    assert state["draws"] == sum(state[name]["row"] + state[name]["epoch"] * 2 * 10**8 for name in nodes) == 85 * 10**7
    assert [name for name in nodes if state["drawn"][name] < 0] == ["s2", "s3", "s4"]
    left = epoch_end(node, np.array([node.position.tolist()]), np.array([2]))
    assert left is not None
    assert left[0].tolist() == [15 * 10**7]


def counted(pipeline: Any, o: int, n: int, num_steps: int, num_sources: int) -> Any:
    loader = rd.DataLoader(pipeline, global_batch_size=o, num_logical_shards=n, repeat=True)
    batches = itertools.islice(loader, num_steps)
    return np.array([np.bincount(batch["source"].numpy(), minlength=num_sources) for batch in batches])


def without_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"source": sample["source"]}


def flat(weights: Any) -> Any:
    """A pipeline over a source of each name."""

    def pipeline(shard: rd.Shard) -> Any:
        nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate(weights)}
        return rd.Map(rd.WeightedSampler(nodes, weights), without_tokens)

    return pipeline


def in_another(weights: dict[str, float], inner: dict[str, float], between: Any) -> Any:
    """A mixture of "a" and of an inner one, with something between them."""

    def pipeline(shard: rd.Shard) -> Any:
        nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate(["a", *inner])}
        rest = between(rd.WeightedSampler({name: nodes[name] for name in inner}, inner))
        return rd.Map(rd.WeightedSampler({"a": nodes["a"], "rest": rest}, weights), without_tokens)

    return pipeline


BETWEEN = {"nothing": lambda node: node, "maps": lambda node: rd.Map(rd.RandomMap(node, lambda x, _: x), same)}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_mixture_of_mixtures_is_the_flat_mixture(between: str) -> None:
    """Also while sources of the inner mixture end and begin again; drawn apart, the two would be correlated."""
    shares = {"a": 0.3, "b": 0.35, "c": 0.21, "d": 0.14}
    pipeline = in_another({"a": 0.3, "rest": 0.7}, {"b": 0.5, "c": 0.3, "d": 0.2}, BETWEEN[between])
    found = counted(pipeline, 128, 512, 60, 4)
    assert np.abs(found - 128 * np.array([*shares.values()])).max() <= 1 + 1e-9
    assert (found == counted(flat(shares), 128, 512, 60, 4)).all()


def test_a_mixture_below_a_filter_draws_by_constants_of_its_own() -> None:
    """With those of the mixture above, what it yields there would be far from its weights in a global batch."""
    pipeline = in_another(
        {"a": 0.5, "rest": 0.5}, {"b": 0.5, "c": 0.5}, lambda node: rd.Filter(node, lambda _: True, version=1)
    )
    found = counted(pipeline, 256, 1024, 60, 3)[8:]
    spread = np.abs(found - 256 * np.array([0.5, 0.25, 0.25]))
    assert spread[:, 0].max() <= 1
    assert spread.max() <= 4 * math.sqrt(256 * 0.25 * 0.75)  # as independent draws are, and no lockstep


def test_n_goes_on_when_weights_change_and_when_sources_end() -> None:
    """Arcs move, points do not: after a change a global batch is even at once, and a resume does not begin anew."""
    state: Any = None
    for weights in ({"a": 0.7, "b": 0.3}, {"a": 0.1, "b": 0.9}, {"a": 0.5, "b": 0.5}):
        loader = rd.DataLoader(flat(weights), global_batch_size=64, num_logical_shards=256, repeat=True)
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, 11):
            found = np.bincount(batch["source"].numpy(), minlength=2)
            assert np.abs(found - 64 * np.array(list(weights.values()))).max() <= 3
        state = loader.state_dict()
    assert opened(state)["shards"]["source.draws"].sum() == 3 * 11 * 64
    drawn = opened(state)["shards"]["source.drawn.a"].sum()
    assert abs(int(drawn) - 11 * 64 * (0.7 + 0.1 + 0.5)) < 20


def pack(
    weights: tuple[float, ...],
    lengths: list[list[int]],
    *,
    shards: int,
    tracks: int,
    steps: int,
    size: int,
    rng: np.random.Generator | None = None,
) -> tuple[Any, list[TokenWeightArcs]]:
    """Shares of each source in global batches of packed samples, and where the shards stand; with ``rng``, of random draws."""
    n, zeros = shards * tracks, [0] * len(weights)
    circles, standing = (
        [weight_circle_of(i, n) for i in range(n)],
        [TokenWeightArcs(weights, zeros, zeros, zeros) for _ in range(n)],
    )
    draws, rest, at = [0] * n, [(0, 0)] * n, list(zeros)
    found, fixed = np.zeros((steps, len(weights))), arcs(weights)
    for step in range(steps):
        for i in range(step % tracks, n, tracks):
            (source, left), need = rest[i], size
            while left < need:
                found[step, source] += left
                need -= left
                point = circles[i].point(draws[i]) if rng is None else int(rng.random() * CIRCLE)
                source = (standing[i] if rng is None else fixed).choose_source(point)
                left = lengths[source][at[source]]
                at[source] = (at[source] + 1) % len(lengths[source])
                if rng is None:
                    standing[i].add_document(source, left)
                draws[i] += 1
            found[step, source] += need
            rest[i] = (source, left - need)
    return found / (shards * size), standing


def drawn_lengths(rng: np.random.Generator, mean: int, sigma: float, num: int) -> list[int]:
    if not sigma:
        return [mean] * num
    return [max(1, round(x)) for x in rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, num)]


@pytest.mark.parametrize(
    ("weights", "mean", "sigma", "seeds", "bound"),
    [
        ((0.5, 0.3, 0.2), 4096, 0, 2, 0.15),
        ((0.7, 0.3), 500, 0, 1, 0.1),
        ((0.5, 0.3, 0.2), 100, 1, 1, 0.75),
        ((0.5, 0.3, 0.2), 500, 1, 2, 0.95),
        ((0.7, 0.3), 500, 1, 2, 0.95),
        ((0.7, 0.3), 2000, 1, 3, 1.05),
        ((0.5, 0.3, 0.2), 16000, 1, 8, 1.08),
    ],
)
def test_global_batches_by_tokens(
    weights: tuple[float, ...], mean: int, sigma: float, seeds: int, bound: float
) -> None:
    """How far a source's share of packed global batches is from its weight, against that of documents drawn independently."""
    shape = {"shards": 64 if mean > 100 else 32, "tracks": 4, "steps": 400, "size": 4096}
    even, independent = np.zeros(len(weights)), np.zeros(len(weights))

    def off_weights(found: Any) -> Any:
        first = len(found) // 5 if sigma else 0  # lengths are learnt, unless they are all alike
        return np.sqrt(np.square(found[first:] - np.array(weights)).mean(axis=0))

    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        lengths = [drawn_lengths(rng, mean, sigma, 5000) for _ in weights]
        found, standing = pack(weights, lengths, **shape)
        even += off_weights(found)
        independent += off_weights(pack(weights, lengths, **shape, rng=rng)[0])
        for each_shard in standing:
            off = [
                t - w * sum(each_shard.tokens) / sum(weights) for t, w in zip(each_shard.tokens, weights, strict=True)
            ]
            assert max(map(abs, off)) <= 4 * max(max(each) for each in lengths)
    assert np.linalg.norm(even) <= bound * np.linalg.norm(independent)
