"""Every allowed pair occurs, a value that no case has is an error, every pipeline of the tables yields samples."""

from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import pytest

import rescale_data as rd
from tests.laws.pairs import Case, cases, count_pairs, name_of
from tests.laws.tables import CORPORA, MIXTURES, ROWS, SOURCES, TOPS

DIMENSIONS = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 4]}


def test_each_pair_of_values_occurs() -> None:
    found = cases(DIMENSIONS)
    every = sum(len(x) * len(y) for x, y in combinations(DIMENSIONS.values(), 2))
    assert count_pairs(found) == every
    assert len(found) < len(list(product(*DIMENSIONS.values()))) / 2


def test_what_is_not_allowed_does_not_occur_and_what_remains_does() -> None:
    found = cases(DIMENSIONS, lambda case: not (case["a"] == 1 and case["b"] == "x"))
    every = sum(len(x) * len(y) for x, y in combinations(DIMENSIONS.values(), 2))
    assert not any(case["a"] == 1 and case["b"] == "x" for case in found)
    assert count_pairs(found) == every - 1


def test_a_value_that_no_case_has_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"No case has a in \[3\]"):
        cases(DIMENSIONS, lambda case: case["a"] != 3)


@pytest.mark.parametrize("case", cases({"rows": list(ROWS), "mixture": list(MIXTURES), "top": list(TOPS)}), ids=name_of)
def test_pipelines_of_the_tables_yield_samples(case: Case) -> None:
    def below(name: str) -> Any:
        return ROWS[case["rows"]](rd.Reader(rd.DatasetSource(CORPORA[name], name=name), rd.Shard(), shuffle=4))

    assert len(list(islice(TOPS[case["top"]](MIXTURES[case["mixture"]](below)), 5))) == 5


@pytest.mark.parametrize("kind", SOURCES)
def test_sources_of_the_tables_have_all_rows(kind: str, tmp_path: Path) -> None:
    assert SOURCES[kind](tmp_path, CORPORA["web"]).num_rows == len(CORPORA["web"])
