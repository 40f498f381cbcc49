"""Streams that cannot be indexed: resumed by their own state or by counting, or refused when they are saved."""

import gc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.nodes import stream_reader
from rescale_data.testing import assert_rescalable, full_state_dict
from tests.sources.corpora import loader_of

NUM_STREAMS, LENGTH = 12, 17


def numbers(stream: int) -> Iterator[dict[str, int]]:
    yield from ({"x": 1000 * stream + i} for i in range(LENGTH + stream % 3))


class Counting:
    """An iterator that says where it stands, in other words after each load, as those of Hugging Face do."""

    def __init__(self, stream: int, padding: int = 0) -> None:
        self.stream, self.at, self.padding, self.num_loads = stream, 0, padding, 0

    def __iter__(self) -> "Counting":
        return self

    def __next__(self) -> dict[str, int]:
        if self.at >= LENGTH + self.stream % 3:
            raise StopIteration
        self.at += 1
        return {"x": 1000 * self.stream + self.at - 1}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "padding": "x" * self.padding, "num_loads": self.num_loads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.num_loads = state["at"], state["num_loads"] + 1


def with_noise(row: dict[str, int], rng: np.random.Generator) -> dict[str, int]:
    return {"x": row["x"], "noise": int(rng.integers(1 << 40))}


TOPS: dict[str, Any] = {
    "rows": lambda node: node,
    "Shuffle": lambda node: rd.Shuffle(node, 4),
    "RandomMap": lambda node: rd.RandomMap(node, with_noise),
}


def over(source: rd.IterableSource, top: str, shard: rd.Shard) -> rd.Node[Any]:
    return TOPS[top](rd.StreamReader(source, shard))


SOURCES = {
    "factory": lambda: rd.IterableSource(numbers, num_streams=NUM_STREAMS),
    "list": lambda: rd.IterableSource([list(numbers(i)) for i in range(NUM_STREAMS)]),
    "stateful": lambda: rd.IterableSource(Counting, num_streams=NUM_STREAMS),
    "counted": lambda: rd.IterableSource(Counting, num_streams=NUM_STREAMS, state_bytes=0),
    "some stateful": lambda: rd.IterableSource(
        [list(numbers(i)) if i % 3 else Counting(i) for i in range(NUM_STREAMS)]
    ),
}


make_loader = partial(loader_of, num_logical_shards=6)


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("kind", SOURCES)
def test_rescales(kind: str, top: str) -> None:
    source = partial(over, SOURCES[kind](), top)
    chain = [(1, 4, 0), (3, 2, 0), (2, 6, 0), (1, 12, 0), (6, 1, 0)]
    assert_rescalable(partial(make_loader, source), chain, steps=5)


@pytest.mark.parametrize("num_shards", [5, 14])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_stream_once_an_epoch(kind: str, num_shards: int) -> None:
    source = SOURCES[kind]()
    readers = [rd.StreamReader(source, rd.Shard(i, num_shards)) for i in range(num_shards)]
    for epoch in range(2):
        rows = Counter(row["x"] for reader in readers for row in reader)
        assert rows == Counter(row["x"] for i in range(NUM_STREAMS) for row in numbers(i))
        for reader in readers:
            assert reader.get_state()["epoch"] == epoch + 1
            reader.reset(reader.get_state())


def test_resuming_with_a_state_reads_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = rd.StreamReader(SOURCES["stateful"](), rd.Shard(1, 6))
    rows = [next(reader)["x"] for _ in range(25)]
    drawn: list[int] = []
    following = Counting.__next__

    def count(self: Counting) -> Any:
        drawn.append(self.at)
        return following(self)

    monkeypatch.setattr(Counting, "__next__", count)
    other = rd.StreamReader(SOURCES["stateful"](), rd.Shard(1, 6))
    other.reset(reader.get_state())
    assert next(other)["x"] == next(reader)["x"] == rows[-1] + 1
    assert len(drawn) == 2


def test_counting_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    stream_reader._warned_sources.clear()
    source = rd.IterableSource(numbers, num_streams=4, name="web")
    [rd.StreamReader(source, rd.Shard(i, 4)) for i in range(4)]
    rd.StreamReader(SOURCES["stateful"](), rd.Shard())
    (message,) = caplog.messages
    assert "web: its streams have no state_dict()" in message


def test_what_cannot_be_resumed_is_refused_when_it_is_saved() -> None:
    source = rd.IterableSource([iter(list(numbers(i))) for i in range(6)], name="queue")
    loader = make_loader(source, 0, 1, 4, 0)
    next(iter(loader))
    for save in (loader.state_dict, loader.local_state_dict, lambda: full_state_dict([loader])):
        with pytest.raises(
            rd.DataStateError, match="queue cannot be saved: its streams are iterators that can be read once"
        ):
            save()


class TestStreamsThatCanBeReadOnce:
    @pytest.mark.parametrize("act", ["close", "skip", "reset"])
    def test_rows_read_ahead_are_never_lost_in_silence(self, act: str) -> None:
        source = rd.IterableSource([iter(list(numbers(i))) for i in range(6)], name="queue")
        loader = make_loader(source, 0, 1, 4, 0, prefetch=2)
        batches = iter(loader)
        next(batches)
        acts = {"close": loader.close, "skip": lambda: loader.skip(4), "reset": loader.reset}
        with pytest.raises(rd.DataStateError, match=r"Stream \d of queue cannot be read again"):
            next(iter([acts[act](), loader][1]))

    def test_an_epoch_of_them_has_no_end_that_could_be_counted(self) -> None:
        streams = [list(numbers(0)), iter(list(numbers(1)))]  # one of them is enough
        with pytest.raises(rd.DataStateError, match="nor the end of an epoch be counted"):
            rd.DataLoader(rd.IterableSource(streams), global_batch_size=2, num_logical_shards=2)


def test_a_stream_that_raises_is_opened_again() -> None:
    opened: list[int] = []

    def fails_once(stream: int) -> Iterator[int]:
        opened.append(stream)
        yield from range(3)
        if len(opened) == 1:
            raise OSError("this passes")
        yield 3

    reader, rows = rd.StreamReader(rd.IterableSource(fails_once, num_streams=1), rd.Shard()), list[int]()
    opened.clear()
    with pytest.raises(OSError, match="this passes"):
        rows.extend(next(reader) for _ in range(9))
    assert [*rows, *reader] == [0, 1, 2, 3]


class Odd(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"at": {1, 2}}


SHORTER = {"epoch": 0, "stream": 0, "count": 5}
ERRORS: list[tuple[rd.IterableSource, Any, str]] = [
    (
        rd.IterableSource(partial(Counting, padding=85), num_streams=2, state_bytes=64),
        None,
        r"takes 1\d\d bytes, 5\d more than state_bytes=64",
    ),
    (rd.IterableSource(Odd, num_streams=2), None, r"not made of JSON values.*state_bytes=0"),
    (rd.IterableSource([list(range(3))]), SHORTER, "stream 0 ended before row 5"),
]


@pytest.mark.parametrize(("source", "state", "words"), ERRORS)
def test_a_stream_whose_state_does_not_fit_or_that_is_shorter_than_its_state(
    source: rd.IterableSource, state: Any, words: str
) -> None:
    reader = rd.StreamReader(source, rd.Shard())
    reader.reset(state)
    with pytest.raises(rd.DataStateError, match=words):
        next(reader)


class TestHuggingFace:
    @pytest.fixture
    def stream(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # a second for each stream that ends
        for number in range(6):
            datasets.Dataset.from_list(list(numbers(number))).to_parquet(tmp_path / f"{number}.parquet")
        files = sorted(str(path) for path in tmp_path.glob("*.parquet"))
        yield datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
        gc.collect()  # streams that were left end here, and not in a later test, where each sleeps that second

    @pytest.mark.parametrize("top", TOPS)
    def test_is_resumed_by_its_own_state(self, stream: Any, top: str) -> None:
        source = rd.IterableSource(stream)
        assert (source.num_streams, source.keeps) == (6, "state")
        pipeline = partial(over, source, top)
        assert_rescalable(partial(make_loader, pipeline), [(1, 4, 0), (3, 2, 0), (2, 6, 0)], steps=3)

    def test_a_shuffle_buffer_is_not_in_its_state(self, stream: Any) -> None:
        """So it is read again: resumed by its state alone it would lose what was in the buffer."""
        shuffled = stream.shuffle(seed=1, buffer_size=3).map(lambda row: row)
        source = rd.IterableSource(shuffled)
        assert source.keeps == "count"
        assert_rescalable(partial(make_loader, source), [(1, 4, 0), (3, 2, 0), (2, 6, 0)], steps=3)

    def test_a_loader_takes_it_as_it_is(self, stream: Any) -> None:
        loader = rd.DataLoader(stream, global_batch_size=2, num_logical_shards=2, collate_fn=list)
        rows = Counter(row["x"] for batch in loader for row in batch)
        assert rows == Counter(row["x"] for i in range(6) for row in numbers(i))
