"""Arcs by tokens follow from counts alone, in integers."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rescale_data.nodes.circle import TURN, circle_of
from rescale_data.nodes.lengths import TokenArcs

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
        kept.drew(kept.choose(circle.point(n)), length)
    made = TokenArcs(tuple(weights), kept.documents, kept.tokens, [0] * len(weights))
    for n in range(200):
        source = made.choose(circle.point(n))
        assert source == kept.choose(circle.point(n))
        assert weights[source] > 0
        assert 0 <= made.stretch(circle.point(n), source) < TURN


def test_golden() -> None:
    """Changing the order of mixtures is a breaking change of kind ORDER."""
    arcs, circle, drawn = fresh((0.5, 0.3, 0.2)), circle_of(5, 24), ""
    for n in range(64):
        source = arcs.choose(circle.point(n))
        arcs.drew(source, 1 + (37 * n + 11 * source) % 90 * (40 if n > 31 else 1))
        drawn += str(source)
    assert drawn == "0021002102100110011021002000100210021002102100200021021001102000"
