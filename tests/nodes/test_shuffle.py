"""`Shuffle`: every sample once, in windows, also where weights change below it."""

import gc
import itertools
import logging
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata import nodes

import rescale_data as rd
from rescale_data.nodes import room
from rescale_data.sources.decoded.cache import cache
from tests.nodes.resume import endless
from tests.states import opened

DOCUMENTS = {
    name: rd.DatasetSource(
        [{"tokens": np.arange(100 * i, 100 * i + n) + first} for i, n in enumerate(lengths)], name=name
    )
    for name, first, lengths in (("a", 0, [3, 17, 1, 30, 5] * 8), ("b", 10**6, [9, 2, 25, 4] * 10))
}


def packed(shard: rd.Shard, weight: float, window: int) -> rd.BaseNode[Any]:
    rows = {name: rd.Reader(source, shard, shuffle=4) for name, source in DOCUMENTS.items()}
    mixture = rd.WeightedSampler(rows, {"a": weight, "b": 1.0})
    return rd.Shuffle(rd.TokenPacker(mixture, column="tokens", seq_len=6, eos_id=None), window)


def test_windows_hold_what_the_node_yields() -> None:
    for epoch, size in enumerate((10, 10)):
        found = list(itertools.islice(endless(rd.Shuffle(rd.Reader(range(10), rd.Shard(), shuffle=False), 4)), 20))
        ids = found[size * epoch : size * (epoch + 1)]
        assert [sorted(ids[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert found[:10] != found[10:]
    assert found != sorted(found[:10]) * 2


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.2, 1.0, 5.0])), min_size=2, max_size=5), st.integers(1, 9)
)
@settings(max_examples=60, deadline=None)
def test_weights_change_below_a_packer(segments: list[tuple[int, float]], window: int) -> None:
    """In the middle of windows and documents: every token once, and the last weights are soon in use."""
    state: Any = None
    tokens: Counter[int] = Counter()

    def draw(loader: Any, num: int) -> None:
        for batch in itertools.islice(loader, num):
            tokens.update(batch["tokens"].flatten().tolist())

    for num, weight in segments:
        loader = rd.DataLoader(
            lambda shard, w=weight: packed(shard, w, window), global_batch_size=1, num_logical_shards=1, repeat=True
        )
        if state is not None:
            loader.load_state_dict(state)
        draw(loader, num)
        state = loader.state_dict()
    draw(loader, window + 10)
    while (shards := opened(loader.state_dict())["shards"])["emitted"].item():
        draw(loader, 1)
    fresh = rd.DataLoader(
        lambda shard: packed(shard, weight, window), global_batch_size=1, num_logical_shards=1, repeat=True
    )
    begun_with = opened(fresh.state_dict())["shards"]
    assert shards["source.source.rule"].item() == begun_with["source.source.rule"].item() != 0
    wanted: Counter[int] = Counter()
    for name, source in DOCUMENTS.items():
        drawn = int(shards[f"source.source.drawn.{name}"])
        reader = rd.Reader(source, rd.Shard(repeat=True), shuffle=4)
        for row in itertools.islice(endless(reader), drawn):
            wanted.update(row["tokens"].tolist())
    begun = tokens - wanted
    assert begun.total() == shards["source.offset"].item()
    assert not wanted - tokens


def test_a_window_is_made_again_where_it_was_evicted_and_skipped_without_reading() -> None:
    read: list[int] = []

    class Rows(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    def node() -> Any:
        return rd.Shuffle(rd.Reader(Rows(range(100)), rd.Shard(), shuffle=8), 10)

    drawing, skipping = node(), node()
    for number in range(95):
        next(drawing)
        if number % 7 == 3:
            cache().clear()
    skipping.reset(None)
    read.clear()
    skipping.skip(95)
    assert len(read) <= 16  # the window that it ends in, and the one of the reader
    assert skipping.get_state() == drawing.get_state()
    assert list(skipping) == list(drawing)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda reader: rd.Shuffle(reader, 37), "Shuffle(window=37)"),
        (
            lambda reader: rd.Tokenize(reader, lambda texts: [[1] * 1000 for _ in texts], "x", batch_size=37),
            "Tokenize(batch_size=37)",
        ),
    ],
)
def test_what_does_not_stay_in_the_cache_is_said_once_with_what_would_fit(
    make: Any, argument: str, caplog: pytest.LogCaptureFixture
) -> None:
    def draws(cache_bytes: int, num: int) -> str:
        gc.collect()  # the source before, whose budget counts while it is alive
        rows = rd.DatasetSource([{"x": "a" * 8_000}] * 4000, cache_bytes=cache_bytes)
        cache().register(rows)
        shards = [make(rd.Reader(rows, rd.Shard(i, 8, repeat=True), shuffle=False)) for i in range(8)]
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rescale_data"):
            for _ in range(num):
                for shard in shards:
                    next(shard)
        return "".join(record.getMessage() for record in caplog.records if argument in record.getMessage())

    room._warned_keys.clear()
    assert not draws(2**26, 45)
    said = draws(600_000, 45)
    assert said.count(argument) == 1
    assert "8 logical shards" in said
    found = re.search(r"cache_bytes=(\d+), or run fewer", said)
    assert found is not None
    room._warned_keys.clear()
    assert not draws(int(found[1]), 45)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("make", "num_draws", "argument"),
    [
        (lambda reader: rd.Shuffle(reader, 37), 1, "Shuffle(window=37)"),
        (
            lambda reader: rd.Tokenize(reader, lambda texts: [[1] * 1000 for _ in texts], "x", batch_size=8),
            1 + 2 + 4 + 1,
            "Tokenize(batch_size=8)",
        ),
    ],
)
def test_the_first_full_window_that_does_not_fit_for_all_shards_is_warned_of(
    make: Any, num_draws: int, argument: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By the first of the shards that makes one: nothing has been evicted yet."""
    room._warned_keys.clear()
    rows = rd.DatasetSource([{"x": "a" * 8_000}] * 4000, cache_bytes=400_000)
    cache().register(rows)
    node = make(rd.Reader(rows, rd.Shard(0, 8, repeat=True), shuffle=False))
    for _ in range(num_draws):
        assert not caplog.messages
        next(node)
    assert len(caplog.messages) == 1
    assert argument in caplog.messages[0]


@pytest.mark.usefixtures("own_cache")
def test_a_window_that_no_epoch_fills_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    room._warned_keys.clear()
    rows = rd.DatasetSource([{"x": "a" * 8_000}] * 4, cache_bytes=100_000)
    cache().register(rows)
    assert len(list(rd.Shuffle(rd.Reader(rows, rd.Shard()), 1000))) == 4
    assert not caplog.messages


@pytest.mark.usefixtures("own_cache")
def test_windows_of_several_nodes_that_do_not_fit_together_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    room._warned_keys.clear()
    rows = rd.DatasetSource([{"x": "a" * 8_000}] * 400, cache_bytes=400_000)
    cache().register(rows)
    nodes = [rd.Shuffle(rd.Reader(rows, rd.Shard(repeat=True), shuffle=False), 37) for _ in range(2)]
    for _ in range(2):
        for node in nodes:
            assert not caplog.messages
            next(node)
    next(nodes[0])
    assert len(caplog.messages) == 1
    assert "Shuffle(window=37)" in caplog.messages[0]


@pytest.mark.usefixtures("own_cache")
def test_packed_windows_that_cannot_fit_are_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    num_warned: list[int] = []

    class Rows(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            num_warned.append(len(room._warned_keys))
            return super().__getitem__(index)

    def opened(cache_bytes: int, window: int) -> str:
        gc.collect()
        source = rd.DatasetSource(Rows([{"tokens": [1] * 50}] * 64), name="rows", cache_bytes=cache_bytes)
        cache().register(source)

        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            packer = rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=100, eos_id=0)
            return rd.Shuffle(packer, window)

        room._warned_keys.clear()
        caplog.clear()
        loader = rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=8, repeat=True)
        with caplog.at_level(logging.WARNING, "rescale_data"):
            next(iter(loader))
        return "".join(message for message in caplog.messages if "Shuffle(" in message)

    assert not opened(2**20, 64)
    num_warned.clear()
    said = opened(2**18, 64)  # 8 shards of 64 samples of 800 bytes
    assert num_warned[0] == 1, "a row was read before the warning"
    assert "Shuffle(window=64)" in said
    assert "8 logical shards of this process it takes about 409600 bytes" in said
    assert not opened(2**18, int(said.split("Give window=")[1].split(",")[0]))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"window=0: give the samples that are permuted .* at least 1"):
        rd.Shuffle(rd.Reader(range(3), rd.Shard()), 0)
    with pytest.raises(ValueError, match="shard=, what the pipeline was called with"):
        rd.Shuffle(nodes.IterableWrapper(range(3)), 3)
