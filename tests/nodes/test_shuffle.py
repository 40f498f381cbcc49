"""`Shuffle`: every sample once, in windows; and what is said of windows, and batches of texts, that the cache does not hold."""

import gc
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.nodes import room
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
    room._warned_keys.clear()
    yield caplog
    room._warned_keys.clear()


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
        room._warned_keys.clear()
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


def test_packed_windows_that_cannot_fit_are_said_at_once(warnings: pytest.LogCaptureFixture) -> None:
    num_warned: list[int] = []

    def opened(cache_bytes: int, window: int) -> str:
        rows = Hooked([{"tokens": [1] * 50}] * 64, lambda _: num_warned.append(len(room._warned_keys)))
        source = source_of(rows, cache_bytes)

        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            packer = rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=100, eos_id=0)
            return rd.Shuffle(packer, window)

        room._warned_keys.clear()
        warnings.clear()
        next(iter(rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=8, repeat=True)))
        return "".join(message for message in warnings.messages if "Shuffle(" in message)

    assert not opened(2**20, 64)
    num_warned.clear()
    said = opened(2**18, 64)  # 8 shards of 64 samples of 800 bytes
    assert num_warned[0] == 1, "a row was read before the warning"
    assert "Shuffle(window=64)" in said
    assert "8 logical shards of this process it takes about 409600 bytes" in said
    assert not opened(2**18, int(said.split("Give window=")[1].split(",")[0]))
