"""Documents in the order of draws: `draws.c` and NumPy say the same, and C refuses what would reach beyond its buffers."""

from unittest import mock

import numpy as np
import pytest

from rescale_data.nodes.mixture import interleaved as module
from rescale_data.nodes.reading.spans import PositionUpdates, Spans


def documents(
    seed: int, *, by_tokens: bool, even: bool
) -> tuple[np.ndarray, Spans, np.ndarray, list[tuple[int, list[int]]]]:
    """Draws from some sources, more documents than are drawn, and what was counted before."""
    rng = np.random.default_rng(seed)
    sources, num = int(rng.integers(1, 6)), int(rng.integers(1, 50))
    chosen = rng.integers(0, sources, num)
    have = np.bincount(chosen, minlength=sources) + rng.integers(0, 3, sources)
    total, begins = int(have.sum()), np.cumsum(have) - have
    ends = np.concatenate([[0], np.cumsum(np.full(total, 2) if even else rng.integers(0, 3, total))])
    slot, value = rng.integers(0, 40, (2, ends[-1]))
    array = np.arange(100, dtype=np.uint16)
    spans = Spans(
        (array,), np.zeros(total, dtype=np.int64), rng.integers(0, 50, total), rng.integers(0, 50, total),
        PositionUpdates(ends, slot, value), (None,), tuple(map(str, range(total))),
    )  # fmt: skip
    counted = [(41 + 10 * kind, rng.integers(0, 99, sources).tolist()) for kind in range(1 + by_tokens)]
    return chosen, spans, begins, counted


@pytest.mark.skipif(module.kernel is None, reason="built without a compiler")
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_c_and_numpy_say_the_same(by_tokens: bool, even: bool) -> None:
    for seed in range(60):
        chosen, spans, begins, counted = documents(seed, by_tokens=by_tokens, even=even)
        fast = module.interleave_documents(chosen, spans, begins, 7, counted)
        with mock.patch.object(module, "kernel", None):
            slow = module.interleave_documents(chosen, spans, begins, 7, counted)
        for one, other in ((fast, slow), (fast.moves, slow.moves)):
            for name in type(one).__dataclass_fields__:
                if name not in ("arrays", "keeps", "moves"):
                    np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=f"{seed} {name}")


@pytest.mark.skipif(module.kernel is None, reason="built without a compiler")
def test_what_does_not_fit_is_refused() -> None:
    chosen, spans, begins, counted = documents(3, by_tokens=True, even=True)
    bad = [
        (np.full_like(chosen, 99), spans, begins, counted),
        (chosen, spans, begins + len(spans), counted),
        (
            chosen,
            spans.with_moves(PositionUpdates(spans.moves.ends + 10**6, spans.moves.slot, spans.moves.value)),
            begins,
            counted,
        ),
        (chosen, spans, begins, [(0, [0] * (len(begins) + 1))]),
    ]
    for chosen, spans, begins, counted in bad:
        with pytest.raises(ValueError, match=r"not there|out of range|do not fit"):
            module.interleave_documents(chosen, spans, begins, 0, counted)
