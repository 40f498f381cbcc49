"""Points on a circle: global batches, micro batches and each shard's own stream are near the weights."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rescale_data.layout.batch_shards import AlignedBatchShards, UnalignedBatchShards
from rescale_data.layout.layout import Layout
from rescale_data.nodes.mixture.circle import arcs, weight_circle_of
from rescale_data.nodes.mixture.lengths import TokenWeightArcs
from rescale_data.state import Ints

WEIGHTS = {
    "73": (0.7, 0.3),
    "532": (0.5, 0.3, 0.2),
    "11": (1.0, 1.0),
    "91": (0.9, 0.1),
    "power20": tuple(1 / (k + 1) for k in range(20)),
    "power200": tuple(1 / (k + 1) for k in range(200)),
}


def off(found: Ints, weights: Sequence[float]) -> float:
    """By how much the counts of some draws differ from the weights, at most."""
    wanted = np.array(weights) / math.fsum(weights)
    return float(np.abs(np.bincount(found, minlength=len(wanted)) - len(found) * wanted).max())


class Run:
    """All micro batches of a run over `weight_circle_of`, as the layouts deal them."""

    def __init__(self, layout: Layout, drawn: Ints | None = None) -> None:
        self.layout, n = layout, layout.num_logical_shards
        self.drawn = np.zeros(n, dtype=np.int64) if drawn is None else drawn.copy()
        circles = [weight_circle_of(shard, n) for shard in range(n)]
        self._starts, self._step = (
            np.array([c.start_point for c in circles], dtype=np.uint64),
            np.uint64(circles[0].point_step),
        )
        ranks = range(layout.dp_world_size)
        self._turns = [
            AlignedBatchShards(layout, r) if layout.aligned else UnalignedBatchShards(layout, r, self.drawn.copy())
            for r in ranks
        ]

    def steps(self, num_steps: int) -> Iterator[list[np.ndarray]]:
        """The points of each step's micro batches."""
        accumulation = self.layout.gradient_accumulation_steps
        for u in range(0, num_steps * accumulation, accumulation):
            yield [
                self._points(turns.batch_shards(micro).shards)
                for micro in range(u, u + accumulation)
                for turns in self._turns
            ]

    def _points(self, shards: list[int]) -> np.ndarray:
        numbers = np.zeros(len(shards), dtype=np.uint64)
        for place, shard in enumerate(shards):
            numbers[place] = self.drawn[shard]
            self.drawn[shard] += 1
        return self._starts[shards] + numbers * self._step


def worst(run: Run, weights: Sequence[float], num_steps: int) -> tuple[float, float]:
    """How far a global batch and a micro batch are off, at most."""
    words, batch, micro = arcs(tuple(weights)).end_points, 0.0, 0.0
    for step in run.steps(num_steps):
        found = [words.searchsorted(points, side="right") for points in step]
        batch = max(batch, off(np.concatenate(found), weights))
        micro = max(micro, *(off(each, weights) for each in found))
    return batch, micro


def layout(o: int, n: int, w: int, b: int, k: int) -> Layout:
    return Layout(num_logical_shards=n, global_batch_size=o, dp_world_size=w, micro_batch_size=b, num_workers=k)


@pytest.mark.parametrize(
    ("shape", "bound"),
    [
        ((256, 1024, 4, 8, 0), 1),
        ((512, 2048, 4, 16, 2), 1),
        ((64, 64, 2, 8, 0), 1),
        ((60, 240, 4, 5, 0), 1),
        ((96, 24, 4, 8, 0), 2),
        ((256, 64, 8, 8, 0), 2),
        ((576, 144, 4, 12, 0), 2),
        ((932, 233, 1, 932, 0), 2),
        ((256, 1024, 4, 8, 3), 2 * 12),
        ((256, 1024, 1, 256, 3), 2 * 3),
        ((60, 256, 4, 5, 0), 2 * 4),
        ((768, 1024, 4, 8, 0), 2 * 4),
    ],
)
def test_global_batches_and_micro_batches_are_even(shape: tuple[int, ...], bound: float) -> None:
    """One sample off where N is a multiple of O, two where O is one of N, two for each (rank, worker) where nothing aligns."""
    for wanted in WEIGHTS.values():
        batch, micro = worst(Run(layout(*shape)), wanted, 24)
        assert batch <= bound + 1e-9, (shape, len(wanted))
        assert micro <= 3 + 1e-9 or shape[3] > 64, (shape, len(wanted))


@pytest.mark.parametrize(
    ("n", "before", "after"), [(1024, 256, 512), (1024, 256, 1024), (1024, 256, 128), (1024, 64, 1024)]
)
def test_another_global_batch_in_the_middle_of_a_round_of_tracks(n: int, before: int, after: int) -> None:
    for done in range(1, n // before):
        old = layout(before, n, 1, before, 0)
        drawn = old.samples_delivered(np.zeros(n, dtype=np.int64), 0, done)
        for wanted in WEIGHTS.values():
            assert worst(Run(layout(after, n, 1, after, 0), drawn=drawn), wanted, 2 * n // after)[0] <= 3


@pytest.mark.parametrize("n", [1, 2, 3, 8, 24, 64, 96, 144, 233, 256, 1024, 2048, 3072, 4096])
def test_a_shard_s_own_stream(n: int) -> None:
    """Of every source, right before and after each of its draws, where its count is farthest from its share."""
    for path, wanted in itertools.product(["", "inner"], WEIGHTS.values()):
        share, words = np.array(wanted) / math.fsum(wanted), arcs(wanted).end_points
        found = words.searchsorted(weight_circle_of(n // 2, n, path).points(0, 200_000), side="right").astype(np.int16)
        counts = np.bincount(found, minlength=len(share))
        at = np.argsort(found, kind="stable")
        number = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
        before, after = number - at * share[found[at]], number + 1 - (at + 1) * share[found[at]]
        assert np.abs(np.concatenate([before, after, counts - len(found) * share])).max() <= 8


def test_golden() -> None:
    """Changing the order of mixtures in mixtures is a breaking change of kind ORDER. Of others: `tests.golden`."""
    points = weight_circle_of(5, 24, "inner").points(0, 24)
    found = arcs(WEIGHTS["532"]).end_points.searchsorted(points, side="right")
    assert "".join(map(str, found)) == "100100210021021002100110"


# Arcs by tokens follow from counts alone, in integers

weights_of_tokens = st.lists(st.sampled_from([0, 0.05, 0.3, 1]) | st.floats(0.01, 10), min_size=1, max_size=9).filter(
    any
)


@given(weights_of_tokens, st.sampled_from([0, 1, 30, 900, 10**5, 3 * 10**7]), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_c_draws_is_what_python_draws(weights: list[float], mean: int, seed: int, turns: bool) -> None:
    """Whatever has been drawn before, also of documents that count as shorter than they are."""
    rng, size = np.random.default_rng(seed), len(weights)
    documents = rng.integers(0, 50, size).tolist()
    tokens = [int(count * mean * rng.random() * 2) for count in documents]
    since = [int(count * rng.random()) for count in tokens]
    points = weight_circle_of(3, 8).points(5, 300)
    known: Any = [np.floor(rng.lognormal(0, 1, rng.integers(0, 300)) * mean).astype(np.int64) for _ in weights]
    arcs = TokenWeightArcs(tuple(weights), documents, tokens, since)
    numbers, chosen = arcs.counters(), np.zeros(300, dtype=np.int64)
    change_at = sum(tokens) + 40 * mean if turns else -1
    num, missing = arcs.choose_sources(
        points, chosen, 0, numbers, [None if not len(k) else k for k in known], change_at
    )
    by_draw, next_source = list[int](), -1
    for point in points.tolist():
        next_source = arcs.choose_source(point)
        if by_draw.count(next_source) == len(known[next_source]):
            break
        arcs.add_document(next_source, int(known[next_source][by_draw.count(next_source)]))
        by_draw.append(next_source)
        next_source = -1
        if 0 <= change_at <= arcs.num_tokens:
            break
    assert (num, missing, chosen[:num].tolist()) == (len(by_draw), next_source, by_draw)
    assert numbers[4].tolist() == np.bincount(by_draw, minlength=size).tolist()
    for source, counts in enumerate(zip(arcs.num_documents, arcs.tokens, strict=True)):
        assert not weights[source] or numbers[1:3, source].tolist() == [*counts]


@given(weights_of_tokens, st.sampled_from([1, 30, 900]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_source_that_rests_may_as_well_be_left_out(weights: list[float], mean: int, seed: int) -> None:
    """By numbers of its own, whatever it has drawn before; in C and in Python."""
    rng, going = np.random.default_rng(seed), [i for i, weight in enumerate(weights) if weight]
    documents = rng.integers(0, 50, len(weights))
    tokens = (documents * mean * rng.random(len(weights)) * 9).astype(np.int64)
    since = np.where(weights, tokens * rng.random(len(weights)), tokens).astype(np.int64)
    lengths = np.floor(rng.lognormal(0, 1, 200) * mean).astype(np.int64)
    points, found = weight_circle_of(3, 8).points(5, 200), []
    for there in (range(len(weights)), going):
        counts = ([int(each[i]) for i in there] for each in (documents, tokens, since))
        arcs, chosen = TokenWeightArcs(tuple(weights[i] for i in there), *counts), np.zeros(200, dtype=np.int64)
        assert arcs.choose_sources(points, chosen, 0, arcs.counters(), [lengths] * len(there), -1) == (200, -1)
        by_draw: list[int] = []
        for n, point in enumerate(points.tolist()):
            by_draw.append(there[arcs.choose_source(point)])
            arcs.add_document(arcs.choose_source(point), int(lengths[n]))
        found.append(([there[number] for number in chosen], by_draw))
    assert found[0] == found[1]
