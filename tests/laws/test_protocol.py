"""The model of the commit protocol holds, and needs each look and each order."""

from __future__ import annotations

import random

import pytest

from tests.laws.protocol import CASTS, LOOKS, ORDERS, RULES, one

RUNS = 60


@pytest.mark.parametrize("cast", CASTS)
def test_nothing_is_wrong(cast: str) -> None:
    rng = random.Random(1)
    assert not any(one(CASTS[cast], rng) for _ in range(RUNS))


@pytest.mark.parametrize("rule", [*LOOKS, *ORDERS])
def test_without_one_of_its_rules_something_is(rule: str) -> None:
    rng = random.Random(1)
    assert any(one(cast, rng, RULES - {rule}) for _ in range(40 * RUNS) for cast in CASTS.values())
