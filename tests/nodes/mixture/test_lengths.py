"""Arcs by tokens follow from counts alone, in integers."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rescale_data.nodes.mixture.circle import CIRCLE, circle_of
from rescale_data.nodes.mixture.lengths import TokenArcs

weights = st.lists(st.sampled_from([0, 0.05, 0.3, 1]) | st.floats(0.01, 10), min_size=1, max_size=9).filter(any)


def fresh(weights: Any) -> TokenArcs:
    return TokenArcs(tuple(weights), *([0] * len(weights) for _ in range(3)))


@given(weights, st.lists(st.sampled_from([0, 1, 7, 90, 5000]), min_size=1, max_size=120), st.data())
@settings(max_examples=80, deadline=None)
def test_the_order_follows_from_counts_alone(weights: list[float], lengths: list[int], data: st.DataObject) -> None:
    """Kept up draw by draw, or made at any position: the same arcs."""
    kept, circle = fresh(weights), circle_of(3, 8)
    stop = data.draw(st.integers(0, len(lengths)))
    for n, length in enumerate(lengths[:stop]):
        kept.add_document(kept.choose_source(circle.point(n)), length)
    made = TokenArcs(tuple(weights), kept.num_documents, kept.tokens, [0] * len(weights))
    for n in range(200):
        source = made.choose_source(circle.point(n))
        assert source == kept.choose_source(circle.point(n))
        assert weights[source] > 0
        assert 0 <= made.scale_point(circle.point(n), source) < CIRCLE


@given(weights, st.sampled_from([0, 1, 30, 900, 10**5, 3 * 10**7]), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_c_draws_is_what_python_draws(weights: list[float], mean: int, seed: int, turns: bool) -> None:
    """Whatever has been drawn before, also of documents that count as shorter than they are."""
    rng, size = np.random.default_rng(seed), len(weights)
    documents = rng.integers(0, 50, size).tolist()
    tokens = [int(count * mean * rng.random() * 2) for count in documents]
    since = [int(count * rng.random()) for count in tokens]
    points = circle_of(3, 8).points(5, 300)
    known: Any = [np.floor(rng.lognormal(0, 1, rng.integers(0, 300)) * mean).astype(np.int64) for _ in weights]
    arcs = TokenArcs(tuple(weights), documents, tokens, since)
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


@given(weights, st.sampled_from([1, 30, 900]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_source_that_rests_may_as_well_be_left_out(weights: list[float], mean: int, seed: int) -> None:
    """By numbers of its own, whatever it has drawn before; in C and in Python."""
    rng, going = np.random.default_rng(seed), [i for i, weight in enumerate(weights) if weight]
    documents = rng.integers(0, 50, len(weights))
    tokens = (documents * mean * rng.random(len(weights)) * 9).astype(np.int64)
    since = np.where(weights, tokens * rng.random(len(weights)), tokens).astype(np.int64)
    lengths = np.floor(rng.lognormal(0, 1, 200) * mean).astype(np.int64)
    points, found = circle_of(3, 8).points(5, 200), []
    for there in (range(len(weights)), going):
        counts = ([int(each[i]) for i in there] for each in (documents, tokens, since))
        arcs, chosen = TokenArcs(tuple(weights[i] for i in there), *counts), np.zeros(200, dtype=np.int64)
        assert arcs.choose_sources(points, chosen, 0, arcs.counters(), [lengths] * len(there), -1) == (200, -1)
        by_draw: list[int] = []
        for n, point in enumerate(points.tolist()):
            by_draw.append(there[arcs.choose_source(point)])
            arcs.add_document(arcs.choose_source(point), int(lengths[n]))
        found.append(([there[number] for number in chosen], by_draw))
    assert found[0] == found[1]
