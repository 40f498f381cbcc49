"""The compiled extension gives the samples, positions and rows that lists of tokens and of numbers give."""

import importlib
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rescale_data.nodes import reading
from rescale_data.nodes.reading import extension, gather, kernel
from rescale_data.nodes.reading.gather import TokenQueue
from rescale_data.nodes.reading.spans import EMPTY_SPANS, PositionUpdates, Spans

KINDS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"]
_PLAIN = gather.SpecialTokens(None, None, np.dtype("i8"))


@st.composite
def documents(draw: Any) -> tuple[Spans, list[list[int]]]:
    """Spans of several arrays, with marks among them, and their tokens; each moves its own slots of four."""
    numbers = [draw(st.lists(st.integers(0, 120), min_size=1, max_size=30)) for _ in range(draw(st.integers(1, 3)))]
    arrays = [  # some longer than the lines of memory that are copied at a time
        np.resize(np.array(each, dtype=draw(st.sampled_from(KINDS))), draw(st.sampled_from([len(each), 150])))
        for each in numbers
    ]
    places, moves, tokens = [], [], []
    for number in range(draw(st.integers(1, 12))):
        which = draw(st.integers(-1 if number else 0, len(arrays) - 1))
        size = len(arrays[which]) if which >= 0 else 0
        start = draw(st.integers(0, size))
        length = draw(st.integers(0, size - start))
        places.append((which, start, length))
        moves.append(draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 99)), max_size=3)))
        tokens.append([] if which < 0 else arrays[which][start : start + length].tolist())
    ends = np.cumsum([0, *map(len, moves)])
    slot, value = np.array([move for each in moves for move in each], dtype=np.int64).reshape(-1, 2).T
    array, begin, length = np.array(places, dtype=np.int64).T
    return Spans(tuple(arrays), array, begin, length, PositionUpdates(ends, slot, value), (None,) * len(arrays)), tokens


def ready(spans: Spans, around: gather.SpecialTokens, position: np.ndarray) -> Any:
    queue = TokenQueue(around, position.data)
    queue.append(spans)
    return queue


def places(spans: Spans) -> list[Any]:
    return [np.asarray(view).tolist() for view in spans.document_views()]


def sample_of_lists(
    documents: list[list[int]], moves: list[Any], position: list[int], size: int, labels: bool
) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, labels and doc_ids of the next sample; remove the documents that end, and move the position."""
    flat, tokens, ids = [token for each in documents for token in each][position[0] :], list[int](), list[int]()
    while len(tokens) < size:
        taken = documents[0][position[0] :][: size - len(tokens)]
        ids += [ids[-1] + 1 if ids else 0] * len(taken)
        tokens += taken
        position[0] += len(taken)
        if position[0] == len(documents[0]):
            documents.pop(0)
            position[0] = 0
            for slot, value in moves.pop(0):
                position[1 + slot] = value
    return tokens, flat[1 : size + 1] if labels else [-7] * size, ids


@given(
    spans=documents(),
    size=st.integers(1, 9) | st.sampled_from([63, 200]),
    eos=st.sampled_from([None, 2, 70_000]),
    bos=st.sampled_from([None, 1]),
    dtype=st.sampled_from(["i4", "i8"]),
    labels=st.booleans(),
    offset=st.integers(0, 3),
    cut=st.integers(1, 12),
)
@settings(max_examples=400, deadline=None)
def test_samples_and_positions(spans, size, eos, bos, dtype, labels, offset, cut) -> None:
    made, tokens = spans
    around = gather.SpecialTokens(eos, bos, np.dtype(dtype))
    offset = min(offset, int(around.lengths(made)[0]))
    ends = made.moves.ends.tolist()
    moves = [
        list(zip(made.moves.slot[start:stop].tolist(), made.moves.slot_values[start:stop].tolist(), strict=True))
        for start, stop in itertools.pairwise(ends)
    ]
    lists = [
        [] if which < 0 else [*[bos] * (bos is not None), *document, *[eos] * (eos is not None)]
        for which, document in zip(made.array.tolist(), tokens, strict=True)
    ]
    position, expected = np.array([offset, 0, 0, 0, 0]), [offset, 0, 0, 0, 0]
    queue, parts, num_drawn, num_appended = TokenQueue(around, position.data), [made[:cut], made[cut:]], 3, 0
    while num_drawn == 3 or parts:
        if num_drawn < 3 or not num_appended:  # drawn from until a sample lacks tokens, or its last document has ended
            num_appended += len(parts[0])
            queue.append(parts.pop(0))
        columns = [np.full((3, size), -7, dtype) for _ in range(3)]
        num_drawn = gather.fill([queue] * 3, 0, columns[0], columns[1] if labels else None, columns[2])
        for row in range(num_drawn):
            sample = sample_of_lists(lists, moves, expected, size, labels)
            assert sample == tuple(column[row].tolist() for column in columns)
        num_left = num_appended - (len(made) - len(lists))
        assert position.tolist() == expected
        assert queue.left == sum(map(len, lists[:num_left])) - expected[0]
        assert num_drawn == 3 or queue.left < size + labels
        assert places(queue.rest()) == places(made[len(made) - len(lists) : num_appended])


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (3, 4), (0, 2**62), (2, -1)])
def test_nothing_beyond_an_array_is_read(start: int, length: int) -> None:
    numbers = (np.array([0]), np.array([start]), np.array([length]))
    spans = Spans((np.arange(6),), *numbers, PositionUpdates.of([0], np.array([[1]])), (None,))
    for use in (
        lambda: ready(spans, _PLAIN, np.array([0, 0])),
        lambda: gather.join_documents(spans, _PLAIN),
        spans.document_views,
    ):
        with pytest.raises(IndexError, match="beyond its array"):
            use()


def test_a_position_that_is_no_longer_one() -> None:
    spans = Spans.of_one_document(np.arange(3), PositionUpdates.of([0], np.array([[1]])))
    with pytest.raises(ValueError, match="the data is not what it was"):
        ready(spans, _PLAIN, np.array([4, 0]))


@pytest.mark.parametrize(
    ("kind", "token", "dtype"),
    [("u4", 2**31, "i4"), ("i8", -(2**31) - 1, "i4"), ("u8", 2**63, "i8"), ("u8", 2**31, "i4")],
)
def test_a_token_that_does_not_fit(kind: str, token: int, dtype: str) -> None:
    around, position = gather.SpecialTokens(None, None, np.dtype(dtype)), np.array([0, 0])
    spans = Spans.of_one_document(np.array([5, token], dtype=kind), PositionUpdates.of([0], np.array([[1]])))
    with pytest.raises(ValueError, match=rf"{token}.* do not fit int"):
        gather.fill([ready(spans, around, position)], 0, np.empty((1, 2), dtype), None, None)
    assert position.tolist() == [0, 0]


def test_arguments_of_other_types_are_refused() -> None:
    full = ready(
        Spans.of_one_document(np.arange(9), PositionUpdates.of([0], np.array([[1]]))), _PLAIN, np.array([0, 0])
    )
    numbers = [np.zeros(0, np.int64)] * 6
    with pytest.raises(TypeError, match="a tuple"):
        kernel.TokenQueue.append(full, [np.arange(3)], None, *numbers)  # pyright: ignore[reportArgumentType]
    for dtype in ("f8", "f4", "u8", ">i8", "i2"):
        with pytest.raises(TypeError, match="int64 or int32"):
            gather.fill([full], 0, np.empty((1, 2), dtype), None, None)
    with pytest.raises(TypeError, match="arguments"):
        kernel.TokenQueue(np.zeros(1, np.int64).data, np.zeros(0, np.int64).data, -1, -1, pad=0)  # pyright: ignore[reportCallIssue]
    assert full.left == 9


def test_where_there_is_none_it_stops() -> None:
    around, position = _PLAIN, np.array([0, 0])
    full = ready(Spans.of_one_document(np.arange(9), PositionUpdates.of([0], np.array([[1]]))), around, position)
    rows = np.zeros((3, 4), np.int64)
    assert gather.fill([full, None, full], 0, rows, None, None) == 1
    assert gather.fill([full, None, full], 2, rows, None, None) == 3
    assert rows.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [4, 5, 6, 7]]


def test_two_threads_that_draw_from_one_queue_have_no_token_twice() -> None:
    size, num = 512, 1 << 21
    tokens = np.arange(num, dtype=np.int32)
    token_queue = ready(
        Spans.of_one_document(tokens, PositionUpdates.of([0], np.array([[1]]))), _PLAIN, np.array([0, 0])
    )

    def draw() -> list[int]:
        firsts: list[int] = []
        rows = np.zeros((64, size), dtype=np.int64)
        while token_queue.left >= size:
            with suppress(ValueError):  # drawn from in two threads
                done = gather.fill([token_queue] * 64, 0, rows, None, None)
                assert (np.diff(rows[:done]) == 1).all()
                firsts += rows[:done, 0].tolist()
        return firsts

    with ThreadPoolExecutor(4) as threads:
        found = [first for each in [threads.submit(draw) for _ in range(4)] for first in each.result()]
    assert sorted(found) == list(range(0, num, size))


def test_what_parts_keep_together_is_counted_once() -> None:
    """Else windows of a mixture, which are joined of parts of a few fragments, would not fit the cache."""
    fragment = np.zeros(1000, dtype=np.uint16)
    part = Spans((fragment[:9].data,), *np.zeros((3, 1), dtype=np.int64), EMPTY_SPANS.moves, (fragment,))
    assert Spans.join([part] * 9).nbytes - part.nbytes < fragment.nbytes < part.nbytes


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(None, "lacks its C extension"), (SimpleNamespace(VERSION=3), "version 3 of its C extension")],
)
def test_without_the_extension_nothing_goes_on(kernel: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reading, "kernel")
    monkeypatch.setitem(sys.modules, "rescale_data.nodes.reading.kernel", kernel)
    with pytest.raises(ImportError, match=rf"{reason}.* pip install"):
        importlib.reload(extension)
