"""Law 1: `skip(n)` of a node leaves the samples and the positions that n calls of `next` leave. Of a loader: histories.

So does what `epoch_end` computes: how many samples are left, and where the next epoch begins.

Crossed: source, its order, unreadable rows, blocklist, node over rows, mixture, top, repeat, verify, sources smaller than N.
Hypothesis chooses n, how many samples were drawn before, which rows are unreadable and which are blocked.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.nodes.below import epoch_end, skip
from tests.corpus import listed, unreadable
from tests.laws.pairs import Case, cases, name_of
from tests.laws.tables import CORPORA, MIXTURES, ROWS, SOURCES, TOPS, mixture, with_length
from tests.nodes.resume import plain

ON_ERROR: dict[str, Any] = {
    "raise": "raise",
    "skip": "skip",
    "decide": lambda error, where: {"id": -1, "text": "", "tokens": np.zeros(2, np.uint16)} if "7" in where else None,
}


def damaged(kind: str, rows: list[Any], bad: set[int]) -> list[Any]:
    """Return the rows to write, of which `bad` cannot be read: a null among the tokens."""
    if kind == "dataset":
        return unreadable(rows, bad)
    return [{**row, "tokens": [1, None]} if i in bad else row for i, row in enumerate(rows)]


def fails_on_some(row: Any, *_: Any) -> Any:
    if len(row["tokens"]) % 4 == 2:
        raise ValueError("a row that the function cannot take")
    return row


ROWS_AND_ERRORS: dict[str, Callable[[rd.Node[Any]], rd.Node[Any]]] = {
    **ROWS,
    "Map-skip": lambda node: rd.Map(node, fails_on_some, on_error="skip"),
    "Map-Map": lambda node: rd.Map(rd.Map(node, with_length), with_length),
}
SCHEDULE = rd.Schedule([(0, {"web": 1, "code": 0, "books": 1}), (20, {"web": 1, "code": 2, "books": 1})], "linear")
MOSTLY_WEB = {"web": 9, "code": 1, "books": 2}
MIXED: dict[str, Callable[[Callable[[str], Any]], rd.Node[Any]]] = {
    **MIXTURES,
    "schedule": lambda below: rd.WeightedSampler({name: below(name) for name in CORPORA}, SCHEDULE),
    "max_epochs-first": partial(mixture, weights=MOSTLY_WEB, stop="first", max_epochs={"web": 2}),
    "max_epochs-all": partial(mixture, weights=MOSTLY_WEB, stop="all", max_epochs={"web": 3, "code": 2}),
    "one-Shuffle-all": lambda below: rd.Shuffle(mixture(below, stop="all"), 3),
}
DIMENSIONS: Mapping[str, Any] = {
    "source": [*SOURCES],
    "on_error": [*ON_ERROR],
    "blocked": ["none", "rows"],
    "rows": [*ROWS_AND_ERRORS],
    "mixture": [*MIXED],
    "top": [*TOPS],
    "repeat": [True, False],
    "verify": [False, True],
    "shards": [2, 40],
    "shuffle": [4, True, False],
}


def allowed(case: Case) -> bool:
    if "max_epochs" in case["mixture"] and case["repeat"] and case["shards"] == 40:  # refused: sources smaller than N
        return False
    return case["rows"] != "Tokenize" or case["source"] not in ("webdataset", "megatron")


def decoded(row: Any) -> Any:
    found = json.loads(row["json"])
    return {**found, "tokens": np.array(found["tokens"], dtype=np.uint16)}


def as_arrays(row: Any) -> Any:
    return {**row, "tokens": np.array(row["tokens"], dtype=np.uint16)}


def pipeline(case: Case, folder: Path, bad: set[int], blocked: set[int]) -> Callable[[rd.Shard], rd.Node[Any]]:
    """Return the pipeline of a case; `bad` rows cannot be read where the source and `on_error` know of such."""
    kind, on_error = case["source"], ON_ERROR[case["on_error"]]
    can_fail = kind in ("dataset", "parquet", "arrow") and on_error != "raise"
    sources = {}
    for name, rows in CORPORA.items():
        (folder / name).mkdir()
        sources[name] = SOURCES[kind](folder / name, damaged(kind, rows, bad) if can_fail else rows)

    def build(shard: rd.Shard) -> rd.Node[Any]:
        def below(name: str) -> Any:
            source = sources[name]
            exclude: Any = None
            if case["blocked"] == "rows":
                exclude = listed(source, {row for row in blocked if row < source.num_rows})
            how: Any = {"shuffle": case.get("shuffle", 4), "on_error": on_error, "exclude": exclude}
            node: Any = rd.Reader(source, shard, **how)
            node = (
                rd.Map(node, decoded) if kind == "webdataset" else rd.Map(node, as_arrays) if kind == "jsonl" else node
            )
            return ROWS_AND_ERRORS[case["rows"]](node)

        return TOPS[case["top"]](MIXED[case["mixture"]](below))

    return build


def outcome(node: Any, how: Callable[[Any], None], num_behind: int = 5) -> Any:
    """Return where a node stands after `how`, whether its epoch has ended, and the samples and positions behind that."""
    found: list[Any] = []
    try:
        how(node)
    except StopIteration:
        with pytest.raises(StopIteration):
            next(node)
        found.append("the epoch has ended")
        node.reset(None)
    except rd.DataStateError:  # two whole epochs without a sample
        return ["no sample"]
    found.append(node.position.tolist())
    try:
        for sample in islice(node, num_behind):
            found.append((plain(sample), node.position.tolist()))
    except rd.DataStateError:
        found.append("no sample")
    return found


def draws(node: Any, num_samples: int) -> None:
    for _ in range(num_samples):
        next(node)


def skips(node: Any, num_samples: int) -> None:
    if skip(node, num_samples) < num_samples:
        raise StopIteration


def require_end(node: Any, index: int) -> None:
    """Fail if drawing to the end of an epoch gives another number of samples, or another position, than is computed."""
    node.bind(node.position)
    row = np.array(node.position)
    known = epoch_end(node, row[None], np.array([index]))
    assert row.tolist() == node.position.tolist()
    try:
        num_samples = sum(1 for _ in islice(node, MOST))
    except rd.DataStateError:  # two whole epochs without a sample
        return
    if known is not None and num_samples < MOST:
        assert (known[0].tolist(), known[1].tolist()) == ([num_samples], [node.position.tolist()])


MOST = 500
"""Samples of an epoch that is not endless are fewer."""
some = settings(max_examples=max(6, settings().max_examples // 16), deadline=None)
rows_of = st.sets(st.integers(0, 35), max_size=12)


PLAIN: Case = {name: values[0] for name, values in DIMENSIONS.items()} | {"mixture": "one source", "top": "rows"}
ALONE = [{**PLAIN, "rows": name} for name in ROWS_AND_ERRORS] + [{**PLAIN, "top": name} for name in TOPS]
ALONE += [{**PLAIN, "blocked": "rows", "rows": name} for name in ("plain", "Map", "Shuffle", "Tokenize")]
ALONE += [{**PLAIN, "blocked": "rows", "verify": True, "shards": 40}]
ALONE += [{**PLAIN, "mixture": name} for name in MIXED]
ALONE += [{**PLAIN, "mixture": name, "on_error": "skip"} for name in MIXED]  # whose skips no other node makes draws


@pytest.mark.parametrize("case", cases(DIMENSIONS, allowed) + ALONE, ids=name_of)
@given(st.data())
@some
def test_skip_of_a_node(case: Case, data: st.DataObject) -> None:
    num_before, num_samples = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 30))
    index = data.draw(st.integers(0, case["shards"] - 1))
    shard = rd.Shard(index, case["shards"], seed=3, repeat=case["repeat"], verify=case["verify"])
    with tempfile.TemporaryDirectory() as folder:
        build = pipeline(case, Path(folder), data.draw(rows_of), data.draw(rows_of))
        drawn, skipped, resumed = (build(shard) for _ in range(3))
        begun = [outcome(node, partial(draws, num_samples=num_before), num_behind=0) for node in (drawn, skipped)]
        resumed.reset(drawn.get_state())
        expected = outcome(drawn, partial(draws, num_samples=num_samples))
        assert outcome(skipped, partial(skips, num_samples=num_samples)) == expected
        if "no sample" not in (*begun[0], *expected):  # how long a source is silent is no position
            assert outcome(resumed, partial(draws, num_samples=num_samples)) == expected
        require_end(drawn, index)
