"""Streams that cannot be indexed: resumed by their own state or by counting, or refused when they are saved."""

import gc
from collections import Counter
from functools import partial

import pytest

import rescale_data as rd
from rescale_data.nodes import stream_reader
from rescale_data.testing import assert_rescalable, full_state_dict
from tests.sources.corpora import loader_of

NUM_STREAMS, LENGTH = 12, 17


def numbers(stream):
    yield from ({"x": 1000 * stream + i} for i in range(LENGTH + stream % 3))


class Counting:
    """An iterator that says where it stands, in other words after each load, as those of Hugging Face do."""

    def __init__(self, stream, padding=0):
        self.stream, self.at, self.padding, self.num_loads = stream, 0, padding, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= LENGTH + self.stream % 3:
            raise StopIteration
        self.at += 1
        return {"x": 1000 * self.stream + self.at - 1}

    def state_dict(self):
        return {"at": self.at, "padding": "x" * self.padding, "num_loads": self.num_loads}

    def load_state_dict(self, state):
        self.at, self.num_loads = state["at"], state["num_loads"] + 1


def with_noise(row, rng):
    return {"x": row["x"], "noise": int(rng.integers(1 << 40))}


TOPS = {
    "rows": lambda node: node,
    "Shuffle": lambda node: rd.Shuffle(node, 4),
    "RandomMap": lambda node: rd.RandomMap(node, with_noise),
}


def over(source, top, shard):
    return TOPS[top](rd.StreamReader(source, shard))


SOURCES = {
    "factory": lambda: rd.IterableSource(numbers, num_streams=NUM_STREAMS),
    "list": lambda: rd.IterableSource([list(numbers(i)) for i in range(NUM_STREAMS)]),
    "stateful": lambda: rd.IterableSource(Counting, num_streams=NUM_STREAMS),
    "counted": lambda: rd.IterableSource(Counting, num_streams=NUM_STREAMS, state_bytes=0),
    "some stateful": lambda: rd.IterableSource(
        [(list(numbers(i)), Counting(i))[i % 3 == 0] for i in range(NUM_STREAMS)]
    ),
}
make_loader = partial(loader_of, num_logical_shards=6)


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("kind", SOURCES)
def test_rescales(kind, top):
    source = partial(over, SOURCES[kind](), top)
    chain = [(1, 4, 0), (3, 2, 0), (2, 6, 0), (1, 12, 0), (6, 1, 0)]
    assert_rescalable(partial(make_loader, source), chain, steps=5)


@pytest.mark.parametrize("num_shards", [5, 14])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_stream_once_an_epoch(kind, num_shards):
    source = SOURCES[kind]()
    readers = [rd.StreamReader(source, rd.Shard(i, num_shards)) for i in range(num_shards)]
    for epoch in range(2):
        rows = Counter(row["x"] for reader in readers for row in reader)
        assert rows == Counter(row["x"] for i in range(NUM_STREAMS) for row in numbers(i))
        for reader in readers:
            assert reader.get_state()["epoch"] == epoch + 1
            reader.reset(reader.get_state())


def test_resuming_with_a_state_reads_nothing_again(monkeypatch):
    reader, other = (rd.StreamReader(SOURCES["stateful"](), rd.Shard(1, 6)) for _ in range(2))
    rows = [next(reader)["x"] for _ in range(25)]
    drawn, following = [], Counting.__next__
    monkeypatch.setattr(Counting, "__next__", lambda stream: (drawn.append(stream.at), following(stream))[1])
    other.reset(reader.get_state())
    assert next(other)["x"] == next(reader)["x"] == rows[-1] + 1
    assert len(drawn) == 2


def test_counting_is_announced_once(caplog):
    stream_reader._warned_sources.clear()
    source = rd.IterableSource(numbers, num_streams=4, name="web")
    [rd.StreamReader(source, rd.Shard(i, 4)) for i in range(4)]
    rd.StreamReader(SOURCES["stateful"](), rd.Shard())
    (message,) = caplog.messages
    assert "web: its streams have no state_dict()" in message


class TestStreamsThatCanBeReadOnce:
    @pytest.fixture
    def loader(self):
        source = rd.IterableSource([iter(list(numbers(i))) for i in range(6)], name="queue")
        loader = make_loader(source, 0, 1, 4, 0, prefetch=2)
        next(iter(loader))
        return loader

    def test_are_refused_when_they_are_saved(self, loader):
        words = "queue cannot be saved: its streams are iterators that can be read once"
        for save in (loader.state_dict, loader.local_state_dict, lambda: full_state_dict([loader])):
            with pytest.raises(rd.DataStateError, match=words):
                save()

    @pytest.mark.parametrize("act", [rd.DataLoader.close, lambda loader: loader.skip(4), rd.DataLoader.reset])
    def test_rows_read_ahead_are_never_lost_in_silence(self, act, loader):
        with pytest.raises(rd.DataStateError, match=r"Stream \d of queue cannot be read again"):
            next(iter([act(loader), loader][1]))

    def test_an_epoch_of_them_has_no_end_that_could_be_counted(self):
        streams = [list(numbers(0)), iter(list(numbers(1)))]  # one of them is enough
        with pytest.raises(rd.DataStateError, match="nor the end of an epoch be counted"):
            rd.DataLoader(rd.IterableSource(streams), global_batch_size=2, num_logical_shards=2)


def test_a_stream_that_raises_is_opened_again():
    opened = []

    def fails_once(stream):
        opened.append(stream)
        yield from range(3)
        if len(opened) == 1:
            raise OSError("this passes")
        yield 3

    reader, rows = rd.StreamReader(rd.IterableSource(fails_once, num_streams=1), rd.Shard()), []
    opened.clear()
    with pytest.raises(OSError, match="this passes"):
        rows.extend(next(reader) for _ in range(9))
    assert [*rows, *reader] == [0, 1, 2, 3]


class Odd(Counting):
    def state_dict(self):
        return {"at": {1, 2}}


LONG = rd.IterableSource(partial(Counting, padding=85), num_streams=2, state_bytes=64)
SHORTER = {"epoch": 0, "stream": 0, "count": 5}
ERRORS = [
    (LONG, None, r"takes 1\d\d bytes, 5\d more than state_bytes=64"),
    (rd.IterableSource(Odd, num_streams=2), None, r"not made of JSON values.*state_bytes=0"),
    (rd.IterableSource([list(range(3))]), SHORTER, "stream 0 ended before row 5"),
]


@pytest.mark.parametrize(("source", "state", "words"), ERRORS)
def test_a_stream_whose_state_does_not_fit_or_that_is_shorter_than_its_state(source, state, words):
    reader = rd.StreamReader(source, rd.Shard())
    reader.reset(state)
    with pytest.raises(rd.DataStateError, match=words):
        next(reader)


class TestHuggingFace:
    @pytest.fixture
    def stream(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # a second for each stream that ends
        for number in range(6):
            datasets.Dataset.from_list(list(numbers(number))).to_parquet(tmp_path / f"{number}.parquet")
        files = sorted(str(path) for path in tmp_path.glob("*.parquet"))
        yield datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
        gc.collect()  # streams that were left end here, and not in a later test, where each sleeps that second

    @pytest.mark.parametrize("top", TOPS)
    def test_is_resumed_by_its_own_state(self, stream, top):
        source = rd.IterableSource(stream)
        assert (source.num_streams, source.keeps) == (6, "state")
        pipeline = partial(over, source, top)
        assert_rescalable(partial(make_loader, pipeline), [(1, 4, 0), (3, 2, 0), (2, 6, 0)], steps=3)

    def test_a_shuffle_buffer_is_not_in_its_state(self, stream):
        """So it is read again: resumed by its state alone it would lose what was in the buffer."""
        shuffled = stream.shuffle(seed=1, buffer_size=3).map(lambda row: row)
        source = rd.IterableSource(shuffled)
        assert source.keeps == "count"
        assert_rescalable(partial(make_loader, source), [(1, 4, 0), (3, 2, 0), (2, 6, 0)], steps=3)

    def test_a_loader_takes_it_as_it_is(self, stream):
        loader = rd.DataLoader(stream, global_batch_size=2, num_logical_shards=2, collate_fn=list)
        rows = Counter(row["x"] for batch in loader for row in batch)
        assert rows == Counter(row["x"] for i in range(6) for row in numbers(i))
