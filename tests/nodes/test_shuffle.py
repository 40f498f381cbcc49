"""`Shuffle`: every sample once, in windows; and what is said of windows, and batches of texts, that the cache does not hold."""

import gc
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.nodes import cache_check
from rescale_data.sources.decoded.cache import cache
from tests.corpus import Hooked


def test_skip_reads_the_window_that_it_ends_in() -> None:
    read: list[int] = []
    skipping = rd.Shuffle(rd.Reader(Hooked(range(100), read.append), rd.Shard(), shuffle=8), 10)
    skipping.reset(None)
    skipping.skip(95)
    assert len(read) <= 16  # with the window of the reader


Make = Callable[[rd.BaseNode[Any]], rd.Node[Any]]
WINDOWS: list[tuple[Make, int, str]] = [
    (lambda reader: rd.Shuffle(reader, 37), 1, "Shuffle(window=37)"),
    (
        lambda reader: rd.Tokenize(reader, lambda texts: [[1] * 1000 for _ in texts], "x", batch_size=8),
        1 + 2 + 4 + 1,
        "Tokenize(batch_size=8)",
    ),
]
"""Nodes that keep samples, with the draw that makes the first full window."""


@pytest.fixture
def warnings(own_cache: None, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is said of windows from now on."""
    caplog.set_level(logging.WARNING, "rescale_data")
    cache_check._warned_keys.clear()
    yield caplog
    cache_check._warned_keys.clear()


def source_of(rows: Any, cache_bytes: int) -> rd.DatasetSource:
    gc.collect()  # the source before, whose budget counts while it is alive
    source = rd.DatasetSource(rows, cache_bytes=cache_bytes)
    cache().register(source)
    return source


def texts(cache_bytes: int, num: int = 4000) -> rd.DatasetSource:
    return source_of([{"x": "a" * 8_000}] * num, cache_bytes)


def readers(source: Any, num: int, num_shards: int) -> list[rd.Reader]:
    return [rd.Reader(source, rd.Shard(i, num_shards, repeat=True), shuffle=False) for i in range(num)]


@pytest.mark.parametrize(("make", "num_draws", "argument"), WINDOWS)
def test_what_does_not_stay_in_the_cache_is_said_once_with_what_would_fit(
    make: Make, num_draws: int, argument: str, warnings: pytest.LogCaptureFixture
) -> None:
    def draws(cache_bytes: int) -> str:
        cache_check._warned_keys.clear()
        warnings.clear()
        shards = [make(reader) for reader in readers(texts(cache_bytes), 8, 8)]
        for _ in range(45):
            for shard in shards:
                next(shard)
        return "".join(message for message in warnings.messages if argument in message)

    assert not draws(2**26)
    said = draws(400_000)
    assert said.count(argument) == 1
    assert "8 logical shards" in said
    found = re.search(r"cache_bytes=(\d+), or run fewer", said)
    assert found is not None
    assert not draws(int(found[1]))


@pytest.mark.parametrize(("make", "num_draws", "argument"), WINDOWS)
def test_the_first_full_window_that_does_not_fit_for_all_shards_is_warned_of(
    make: Make, num_draws: int, argument: str, warnings: pytest.LogCaptureFixture
) -> None:
    """By the first of the shards that makes one: nothing has been evicted yet."""
    [reader] = readers(texts(400_000), 1, 8)
    node = make(reader)
    for _ in range(num_draws):
        assert not warnings.messages
        next(node)
    [said] = warnings.messages
    assert argument in said


def test_a_window_that_no_epoch_fills_is_not_warned_of(warnings: pytest.LogCaptureFixture) -> None:
    assert len(list(rd.Shuffle(rd.Reader(texts(100_000, 4), rd.Shard()), 1000))) == 4
    assert not warnings.messages


def test_windows_of_several_nodes_that_do_not_fit_together_are_warned_of(warnings: pytest.LogCaptureFixture) -> None:
    source = texts(400_000, 400)
    nodes = [rd.Shuffle(reader, 37) for _ in range(2) for reader in readers(source, 1, 1)]
    for node in [*nodes, *nodes]:
        assert not warnings.messages
        next(node)
    next(nodes[0])
    [said] = warnings.messages
    assert "Shuffle(window=37)" in said


def packed_windows(source: rd.Source, window: int, shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Shuffle(rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=100, eos_id=0), window)


def test_packed_windows_that_cannot_fit_are_said_when_the_loader_is_built(warnings: pytest.LogCaptureFixture) -> None:
    def built(cache_bytes: int, window: int, **workers: Any) -> str:
        pipeline = partial(packed_windows, source_of([{"tokens": [1] * 50}] * 64, cache_bytes), window)
        cache_check._warned_keys.clear()
        warnings.clear()
        rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=8, repeat=True, **workers)
        return "".join(message for message in warnings.messages if "Shuffle(" in message)

    assert not built(2**20, 64)
    said = built(2**18, 64)  # 8 shards of 64 samples of 800 bytes
    assert "Shuffle(window=64)" in said
    assert "8 logical shards of this process it takes about 409600 bytes" in said
    assert not built(2**18, int(said.split("Give window=")[1].split(",")[0]))
    # Two workers have 4 shards each, and a third of the cache
    forked: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    said = built(2**19, 64, **forked)
    assert "4 logical shards of this process it takes about 204800 bytes" in said
    assert not built(int(said.split("cache_bytes=")[1].split(",")[0]), 64, **forked)
