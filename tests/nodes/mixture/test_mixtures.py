"""Mixtures as a whole: even batches by tokens, mixtures in mixtures, and what is skipped equals what is drawn."""

import functools
import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.engine.recipe import FIRST_SLOT_COLUMN, Recipe
from rescale_data.engine.runner import Runner
from rescale_data.engine.schema import Schema
from rescale_data.nodes.base import Node
from rescale_data.nodes.below import epoch_end, skip
from rescale_data.nodes.mixture.circle import CIRCLE, arcs, circle_of
from rescale_data.nodes.mixture.lengths import TokenArcs
from tests.nodes.resume import assert_resumes, endless
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


def is_odd(sample: dict[str, Any]) -> bool:
    return sample["row"] % 2 == 1


def same(sample: Any) -> Any:
    return sample


# What a random pipeline consists of: a leaf, a filter, a map, a mixture.
sizes = st.integers(3, 25)
LEAVES: dict[str, Any] = {
    "rows": lambda node, _: node,
    "few": lambda node, _: node,
    "filter": lambda node, _: rd.Filter(node, is_odd),
    "shuffle": lambda node, shard: rd.Shuffle(node, 3, shard=shard),
}
leaves = st.tuples(st.sampled_from(sorted(LEAVES)), sizes)
stops = st.sampled_from(["never", "first", "all"])
units = st.sampled_from(["samples", "samples", "samples", "tokens"])
features = st.sampled_from([None, None, "step", "linear", "epochs"])
trees = st.recursive(
    leaves,
    lambda below: st.builds(
        lambda parts, weights, stop, unit, mapped, what: (
            "mixture",
            parts,
            weights[: len(parts)],
            stop,
            unit,
            mapped,
            what,
        ),
        st.lists(below, min_size=1, max_size=3),
        st.lists(st.sampled_from([0.3, 1, 1, 2.5, 7]), min_size=3, max_size=3),
        stops,
        units,
        st.booleans(),
        features,
    ),
    max_leaves=6,
).filter(lambda tree: tree[0] == "mixture")


def build(tree: Any, shard: rd.Shard, numbers: Any = None) -> Node[Any]:
    numbers = itertools.count() if numbers is None else numbers
    kind, *what = tree
    if kind != "mixture":
        size = 2 if kind == "few" and shard.repeat else what[0] * shard.num_logical_shards + (kind == "few")
        node = rd.Reader(rows(next(numbers), size), shard, shuffle=4)
        return LEAVES[kind](node, shard)
    parts, weights, stop, unit, mapped, feature = what
    nodes = {f"part{i}": build(part, shard, numbers) for i, part in enumerate(parts)}
    column = "tokens" if unit == "tokens" else None
    given: Any = dict(zip(nodes, weights, strict=True))
    max_epochs = None
    if feature in ("step", "linear"):  # progress passes 90 after 30 draws
        later = {name: weight + 3 * i for i, (name, weight) in enumerate(reversed(given.items()))}
        given = rd.Schedule([(0, given), (40, later), (100, {**given, "part0": 9.0})], feature)
    elif feature is not None:
        max_epochs = {name: 2 for name in list(nodes)[1:] if reads_one(nodes[name])}
    mixture = rd.WeightedSampler(nodes, given, stop=stop, unit=unit, column=column, max_epochs=max_epochs)
    return rd.Map(mixture, same) if mapped else mixture


def reads_one(node: Node[Any]) -> bool:
    """Return True if the epochs of a source are those of one reader, of which each is an end."""
    below = [node for _, node in node.walk()]
    small = any(isinstance(each, rd.Reader) and each.shard.repeat and each.rows.is_small for each in below)
    return not small and not any(isinstance(each, rd.WeightedSampler) for each in below)


def place(sample: dict[str, Any]) -> tuple[int, int]:
    return sample["source"], sample["row"]


@given(trees, st.integers(0, 60), st.integers(1, 80), st.integers(0, 2), st.booleans())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_skipped_is_as_if_it_had_been_drawn(tree: Any, before: int, num: int, index: int, repeat: bool) -> None:
    """At every distance from the ends of epochs, of any source at any depth: position and samples from there on."""
    shard = rd.Shard(index, 3, repeat=repeat)
    drawing, skipping = build(tree, shard), build(tree, shard)
    for node in (drawing, skipping):
        node.reset(None)
        for _ in itertools.islice(endless(node), before):
            pass
    assert drawing.position == skipping.position
    left = num
    while left:  # an epoch after the other, as the loader does
        count = sum(1 for _ in itertools.islice(drawing, left))
        skip(skipping, count)
        left -= count
        if left:
            ends = [next(node, None) is None for node in (drawing, skipping)]
            assert ends == [True, True]
        assert drawing.position.tolist() == skipping.position.tolist()
        if left:
            for node in (drawing, skipping):
                node.bind(node.position)
    assert [place(s) for s in itertools.islice(endless(drawing), 12)] == [
        place(s) for s in itertools.islice(endless(skipping), 12)
    ]


@given(trees, st.integers(0, 40), st.integers(1, 120), st.integers(0, 2))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_endless_loader_skips_over_the_ends_of_epochs(tree: Any, before: int, num: int, index: int) -> None:
    recipe = Recipe(functools.partial(build, tree), 3, 0, repeat=True)
    drawing, skipping = (Runner(recipe, Schema(recipe.build(0))) for _ in range(2))
    drawing.look_ahead(index, before)
    skipping.load(drawing.table.copy(), {})
    skipping.skip(index, num)
    drawing.look_ahead(index, num)
    assert drawing.table[index, FIRST_SLOT_COLUMN:].tolist() == skipping.table[index, FIRST_SLOT_COLUMN:].tolist()


STEADY: dict[str, Any] = {
    "flat": lambda a, b: rd.WeightedSampler({"a": a(40), "b": b(900)}, {"a": 1, "b": 2}),
    "few": lambda a, b: rd.WeightedSampler({"a": a(2), "b": b(900)}, {"a": 1, "b": 2}),
    "first": lambda a, b: rd.WeightedSampler({"a": a(40), "b": b(900)}, {"a": 1, "b": 2}, stop="first"),
    "all": lambda a, b: rd.WeightedSampler({"a": a(40), "b": b(900)}, {"a": 1, "b": 2}, stop="all"),
    "capped": lambda a, b: rd.WeightedSampler({"a": a(40), "b": b(900)}, {"a": 1, "b": 2}, max_epochs={"a": 10**5}),
    "shuffled": lambda a, b: rd.WeightedSampler(
        {"a": rd.Shuffle(a(40), 8, shard=rd.Shard(1, 5)), "b": b(900)}, {"a": 1, "b": 2}
    ),
    **{
        f"{stop} in it": lambda a, b, stop=stop: rd.WeightedSampler(
            {
                "a": a(40),
                "rest": rd.Map(rd.WeightedSampler({"b": b(70), "c": a(65)}, {"b": 70, "c": 65}, stop=stop), same),
            },
            {"a": 1, "rest": 2},
        )
        for stop in ("never", "first", "all")
    },
}


@pytest.mark.parametrize("kind", STEADY)
def test_a_million_epochs_are_left_out_in_a_few_steps(kind: str) -> None:
    def pipeline(shard: rd.Shard) -> Any:
        def reader(size: int) -> Any:
            return rd.Reader(rows(size, size), shard)

        return STEADY[kind](reader, reader)

    def steps(num_samples: int) -> int:
        count = 0

        def profile(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal count
            count += event == "call"

        recipe = Recipe(pipeline, 5, 0, repeat=True)
        runner = Runner(recipe, Schema(recipe.build(0)))
        runner.skip(1, 100)
        sys.setprofile(profile)
        try:
            runner.skip(1, num_samples)
        finally:
            sys.setprofile(None)
        return count

    assert steps(10**8) < 12 * steps(1000)


@given(trees, st.integers(0, 60))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_epoch_s_end_is_known_only_as_drawing_finds_it(tree: Any, before: int) -> None:
    node = build(tree, rd.Shard(1, 3))
    node.reset(None)
    for _ in itertools.islice(endless(node), before):
        pass
    end = epoch_end(node, np.array([node.position.tolist()]), np.array([1]))
    if end is not None:
        assert end[0].tolist() == [sum(1 for _ in node)]
        assert end[1].tolist() == [node.position.tolist()]


@given(trees)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mixture_resumes(tree: Any) -> None:
    assert_resumes(lambda: build(tree, rd.Shard(1, 3)), num_samples=25)


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
    loader = rd.DataLoader(pipeline, global_batch_size=o, num_logical_shards=n, dp_rank=0, dp_world_size=1, repeat=True)
    batches = itertools.islice(loader, num_steps)
    return np.array([np.bincount(batch["source"].numpy(), minlength=num_sources) for batch in batches])


def without_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"source": sample["source"]}


@pytest.mark.parametrize("between", ["nothing", "map"])
def test_a_mixture_of_mixtures_is_the_flat_mixture(between: str) -> None:
    """Also while sources of the inner mixture end and begin again; drawn apart, the two would be correlated."""
    outer, inner = {"a": 0.3, "rest": 0.7}, {"b": 0.5, "c": 0.3, "d": 0.2}

    def pipeline(shard: rd.Shard) -> Any:
        nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate("abcd")}
        rest: Any = rd.WeightedSampler({name: nodes[name] for name in "bcd"}, inner)
        if between == "map":
            rest = rd.Map(rd.RandomMap(rest, lambda sample, _: sample), same)
        return rd.Map(rd.WeightedSampler({"a": nodes["a"], "rest": rest}, outer), without_tokens)

    def flat(shard: rd.Shard) -> Any:
        nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate("abcd")}
        weights = {"a": 0.3, "b": 0.35, "c": 0.21, "d": 0.14}
        return rd.Map(rd.WeightedSampler(nodes, weights), without_tokens)

    found = counted(pipeline, 128, 512, 60, 4)
    assert np.abs(found - 128 * np.array([0.3, 0.35, 0.21, 0.14])).max() <= 1 + 1e-9
    assert (found == counted(flat, 128, 512, 60, 4)).all()


def test_a_mixture_below_a_filter_draws_by_constants_of_its_own() -> None:
    """With those of the mixture above, what it yields there would be far from its weights in a global batch."""

    def pipeline(shard: rd.Shard) -> Any:
        nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate("abc")}
        inner = rd.WeightedSampler({name: nodes[name] for name in "bc"}, {"b": 0.5, "c": 0.5})
        kept = rd.Filter(inner, lambda _: True)
        return rd.Map(rd.WeightedSampler({"a": nodes["a"], "kept": kept}, {"a": 0.5, "kept": 0.5}), without_tokens)

    found = counted(pipeline, 256, 1024, 60, 3)[8:]
    spread = np.abs(found - 256 * np.array([0.5, 0.25, 0.25]))
    assert spread[:, 0].max() <= 1
    assert spread.max() <= 4 * math.sqrt(256 * 0.25 * 0.75)  # as independent draws are, and no lockstep


def test_n_goes_on_when_weights_change_and_when_sources_end() -> None:
    """Arcs move, points do not: after a change a global batch is even at once, and a resume does not begin anew."""

    def pipeline(shard: rd.Shard, weights: dict[str, float]) -> Any:
        nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate(weights)}
        return rd.Map(rd.WeightedSampler(nodes, weights), without_tokens)

    state: Any = None
    for weights in ({"a": 0.7, "b": 0.3}, {"a": 0.1, "b": 0.9}, {"a": 0.5, "b": 0.5}):
        loader = rd.DataLoader(
            lambda shard, w=weights: pipeline(shard, w), global_batch_size=64, num_logical_shards=256,
            dp_rank=0, dp_world_size=1, repeat=True,
        )  # fmt: skip
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
) -> tuple[Any, list[TokenArcs]]:
    """Shares of each source in global batches of packed samples, and where the shards stand; with ``rng``, of random draws."""
    n, zeros = shards * tracks, [0] * len(weights)
    circles, standing = [circle_of(i, n) for i in range(n)], [TokenArcs(weights, zeros, zeros, zeros) for _ in range(n)]
    draws, rest, at = [0] * n, [(0, 0)] * n, list(zeros)
    found, fixed = np.zeros((steps, len(weights))), arcs(weights)
    for step in range(steps):
        for i in range(step % tracks, n, tracks):
            (source, left), need = rest[i], size
            while left < need:
                found[step, source] += left
                need -= left
                point = circles[i].point(draws[i]) if rng is None else int(rng.random() * CIRCLE)
                source = (standing[i] if rng is None else fixed).choose(point)
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


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (0.7, 0.3)])
@pytest.mark.parametrize(
    ("mean", "sigma", "seeds", "bound"),
    [
        (4096, 0, 2, 0.15),
        (500, 0, 1, 0.1),
        (100, 1, 1, 0.75),
        (500, 1, 2, 0.95),
        (2000, 1, 3, 1.05),
        (16000, 1, 8, 1.08),
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
