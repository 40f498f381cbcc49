"""`CleanDocuments`. Many at a time: `test_many_at_a_time`."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd

texts = st.lists(st.lists(st.sampled_from([0, 1, 7, 8, 9]), max_size=9), min_size=2, max_size=20)
cleanings = st.fixed_dictionaries(
    {
        "strip": st.sampled_from([(), (0,), (0, 1)]),
        "min_length": st.integers(0, 3),
        "max_length": st.sampled_from([None, 3, 5]),
    }
)


def naive(document: list[int], strip: tuple[int, ...], min_length: int, max_length: int | None) -> list[list[int]]:
    while document and document[0] in strip:
        document = document[1:]
    while document and document[-1] in strip:
        document = document[:-1]
    if len(document) < min_length:
        return []
    step = max_length or len(document) or 1
    return [document[i : i + step] for i in range(0, len(document), step)] or [[]]


@given(texts, cleanings)
@settings(max_examples=100)
def test_pieces_are_what_the_arguments_say_and_keep_the_other_columns(
    docs: list[list[int]], cleaning: dict[str, Any]
) -> None:
    rows = [{"tokens": np.array(doc, dtype=np.uint16), "id": i} for i, doc in enumerate(docs)]
    node = rd.CleanDocuments(rd.Reader(rows, rd.Shard(), shuffle=False), "tokens", **cleaning)
    pieces = [(i, piece) for i, doc in enumerate(docs) for piece in naive(doc, **cleaning)]
    assert [(sample["id"], sample["tokens"].tolist()) for sample in node] == pieces
    assert node.get_state()["short"] == sum(not naive(doc, **cleaning) for doc in docs)
