"""Covering arrays of the laws: every allowed pair occurs, and a value that no case has is an error."""

from itertools import combinations, product

import pytest

from tests.laws.pairs import cases, count_pairs

DIMENSIONS = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 4]}


def test_each_allowed_pair_of_values_occurs_in_few_cases() -> None:
    every = sum(len(x) * len(y) for x, y in combinations(DIMENSIONS.values(), 2))
    found = cases(DIMENSIONS, lambda case: not (case["a"] == 1 and case["b"] == "x"))
    assert not any(case["a"] == 1 and case["b"] == "x" for case in found)
    assert (count_pairs(cases(DIMENSIONS)), count_pairs(found)) == (every, every - 1)
    assert len(found) < len(list(product(*DIMENSIONS.values()))) / 2


def test_a_value_that_no_case_has_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"No case has a in \[3\]"):
        cases(DIMENSIONS, lambda case: case["a"] != 3)
