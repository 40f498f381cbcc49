"""`Reader`: its order, its epochs and rows that cannot be read. Each row once an epoch: `tests.test_histories`."""

import itertools
import logging
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading.fetching import FragmentPrefetcher
from rescale_data.shard import Shard
from rescale_data.sources.parquet import ParquetSource


class Fragmented(rd.Source):
    """A source of integers with fragments, and nothing else: what a user would write."""

    def __init__(self, *lengths: int) -> None:
        self.fragments = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.num_rows = int(self.fragments[-1])
        self.name = "fragmented"

    def manifest(self) -> dict[str, Any]:
        return {"rows": self.num_rows}

    def row(self, index: int) -> dict[str, Any]:
        return {"x": index}

    def locate(self, index: int) -> str:
        return f"row {index}"


shuffles = st.sampled_from([False, True, 1, 4])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(1, 12), shuffles)
@settings(max_examples=50)
def test_fragments_around_are_those_of_the_rows(lengths: list[int], num_shards: int, shuffle: bool | int) -> None:
    source = Fragmented(*lengths)
    for shard in range(num_shards):
        rows = Reader(source, Shard(0, num_shards), shuffle=shuffle).rows
        for epoch, row in itertools.product(range(2), range(rows.order(0, shard).num_shard_rows)):
            of_rows = np.searchsorted(source.fragments, rows.window_rows(epoch, row, shard), side="right") - 1
            found = rows.fragments_around(epoch, row, shard)
            assert sorted(fragment for fragment in found if lengths[fragment]) == np.unique(of_rows).tolist()


@pytest.mark.parametrize(
    ("rows_a_fragment", "room_a_shard", "num_windows"),
    [
        (100, 1, 0),
        (100, 2, 1),
        (100, 3, 2),
        (100, 40, 5),
        (10, 10, 0),
        (10, 11, 1),
        (10, 30, 2),
        (1000, 1, 0),
        (1000, 2, 5),
    ],
)
def test_windows_are_fetched_that_have_room(rows_a_fragment: int, room_a_shard: int, num_windows: int) -> None:
    """One of them begins within a fragment, so it lies in one more than its rows fill."""
    fragments = np.arange(0, 4001, dtype=np.int64) * rows_a_fragment
    source: Any = Fragmented(rows_a_fragment)
    source.fragment_bytes, source.cache_bytes = 1, room_a_shard * 4000
    assert FragmentPrefetcher(source, fragments, rows_per_window=100).num_windows == num_windows


def test_nothing_is_decoded_ahead_behind_the_end_of_an_epoch() -> None:
    rows = Reader(Fragmented(8), Shard(), shuffle=4).rows
    assert [len(rows.next_window_ends(0, row, 0)) for row in (0, 3, 4, 7)] == [2, 2, 0, 0]


def test_reset_without_a_state_begins_an_epoch() -> None:
    """As torchdata's `Loader` does it: the next one after an end, or where something of this one has been drawn."""
    reader = Reader(Fragmented(3), Shard(), shuffle=False)
    for drawn, epoch in ((0, 0), (3, 1), (0, 1), (1, 2), (2, 3), (0, 3)):
        for _ in range(drawn):
            next(reader)
        if drawn == 3:  # after the last row the position still belongs to the epoch
            assert reader.get_state() == {"epoch": 0, "row": 3, "skipped": 0}
            assert next(reader, None) is None
        reader.reset(None)
        assert reader.get_state() == {"epoch": epoch, "row": 0, "skipped": 0}


def test_a_dataset_yields_its_own_samples_and_is_wrapped_once() -> None:
    dataset = [("a", 0), ("b", 1), ("c", 2)]
    first, second = Reader(dataset, Shard()), Reader(dataset, Shard())
    assert sorted(first) == dataset
    assert first.reads is second.reads
    assert list(Reader(dataset, Shard(), shuffle=False)) == dataset


def test_parameters_say_which_columns_were_chosen(tmp_path: Path) -> None:
    """Other columns are other samples; but a packer reads its own whatever else the source has."""
    pq.write_table(pa.table({"n": [1], "text": ["a"], "tokens": [[1, 2]]}), tmp_path / "a.parquet")
    chosen = ParquetSource(tmp_path, columns=["text", "tokens"])
    assert Reader(chosen, Shard()).parameters()["columns"] == ["text", "tokens"]
    assert Reader(ParquetSource(tmp_path), Shard()).parameters()["columns"] == ["n", "text", "tokens"]
    readers = [Reader(source, Shard()) for source in (chosen, ParquetSource(tmp_path))]
    assert all(reader.open_documents("tokens") for reader in readers)
    assert readers[0].parameters() == readers[1].parameters()


class Damaged(Fragmented):
    """Every third row cannot be read."""

    def row(self, index: int) -> dict[str, Any]:
        if index % 3 == 0:
            raise OSError("a bad sector")
        return super().row(index)


def test_a_row_that_cannot_be_read_raises_with_its_place() -> None:
    reader = Reader(Damaged(7), Shard(), shuffle=False)
    for _ in range(2):
        with pytest.raises(OSError, match="a bad sector") as caught:
            next(reader)
        assert caught.value.__notes__[0] == "while reading fragmented: row 0"
    assert reader.get_state() == {"epoch": 0, "row": 0, "skipped": 0}


def test_a_row_that_cannot_be_read_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader(Damaged(7, 3), Shard(), shuffle=False, on_error="skip")
    assert [row["x"] for row in reader] == [1, 2, 4, 5, 7, 8]
    assert reader.get_state() == {"epoch": 1, "row": 0, "skipped": 4}
    assert caplog.messages[0] == (
        "Reader left out fragmented: row 0 (number 1 of its logical shard): OSError: a bad sector"
    )
    assert reader.epoch_end(np.array([[0, 0, 0]]), np.arange(1)) is None


def test_ten_billion_rows_need_no_array() -> None:
    reader = Reader(range(10**10), Shard(5, 1000))
    rows = list(itertools.islice(reader, 3000))
    assert len(set(rows)) == 3000
    assert max(rows) - min(rows) > 9 * 10**9


# Sources of fewer rows than logical shards: each row has one owner an epoch, and nobody waits for one


N = 24
SIZES = [1, 7, N - 1, N + 1]


def numbers(num_rows: int, first: int = 0) -> list[dict[str, int]]:
    return [{"x": first + i} for i in range(num_rows)]


def parquet(folder: Path, num_rows: int, **kwargs: Any) -> rd.ParquetSource:
    folder.mkdir(exist_ok=True)
    tokens = pa.array([[100 + i] * (1 + i % 5) for i in range(num_rows)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": tokens}), folder / "a.parquet", row_group_size=5)
    return rd.ParquetSource(folder, **kwargs)


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_row_once_an_epoch_and_once_a_round_in_each_shard(num_rows: int, shuffle: bool, tmp_path: Path) -> None:
    """Also where fragments are cut up for the shards of one process."""
    for source in (parquet(tmp_path, num_rows), parquet(tmp_path, num_rows, cache_bytes=1), numbers(num_rows)):
        in_epochs: Counter[tuple[int, str]] = Counter()
        in_rounds: Counter[tuple[int, int, str]] = Counter()
        for shard in range(N):
            reader = rd.Reader(source, rd.Shard(shard, N, seed=3, repeat=True), shuffle=shuffle)
            reader.reset()
            while (epoch := reader.position[0]) < 2 * N:
                row = next(reader, None)
                if row is None:
                    reader.reset(reader.get_state())
                    continue
                in_epochs[epoch, str(row)] += 1
                in_rounds[epoch // N, shard, str(row)] += 1
        assert set(in_epochs.values()) == {1}
        assert len(in_epochs) == 2 * N * num_rows
        assert num_rows > N or len(in_rounds) == len(in_epochs)


def mixed(shard: rd.Shard, small: Any, large: Any) -> rd.BaseNode[Any]:
    nodes = {"small": rd.Reader(small, shard), "large": rd.Reader(large, shard)}
    return rd.WeightedSampler(nodes, {"small": 0.1, "large": 0.9})


def loader_of(pipeline: Any) -> rd.DataLoader:
    return rd.DataLoader(pipeline, global_batch_size=12, num_logical_shards=N, repeat=True, seed=5)


@pytest.mark.parametrize("num_rows", SIZES)
def test_in_a_mixture_rows_come_in_turn(num_rows: int) -> None:
    loader = loader_of(partial(mixed, small=numbers(num_rows), large=numbers(1000, first=1000)))
    drawn = np.concatenate([batch["x"].numpy() for batch in itertools.islice(loader, 400)])
    small = Counter(drawn[drawn < 1000].tolist())
    assert abs(sum(small.values()) - 480) <= N  # a sample a shard
    assert len(small) == num_rows
    if num_rows >= 7:
        assert max(small.values()) - min(small.values()) <= 480 / num_rows


def kept(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rd.Reader(numbers(N - 1), shard), lambda row: row["x"] == 5)


def test_a_filter_that_leaves_little_is_no_silence() -> None:
    """A shard has seen every row before it is said to have none."""
    for batch in itertools.islice(loader_of(kept), 20):
        assert batch["x"].tolist() == [5] * 12


@pytest.mark.parametrize(
    ("num_rows", "is_said"), [(8 * N - 1, True), (8 * N, False), (8 * N + 1, True), (209 * N + 1, False)]
)
def test_few_rows_a_shard_are_said_once(num_rows: int, is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Few rows, or an uneven number of them."""
    source = rd.DatasetSource(numbers(num_rows), name="few")
    for _ in range(3):
        loader_of(source)
    said = f"few has {num_rows} rows for 24 logical shards, {num_rows / N:.2f} each"
    assert [said in message for message in caplog.messages if "draws as much from a shard" in message] == [
        True
    ] * is_said


def test_small_sources_of_a_mixture_are_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    few = {f"s{i}": numbers(5 + i) for i in range(7)}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.WeightedSampler({name: rd.Reader(each, shard) for name, each in few.items()}, dict.fromkeys(few, 1))

    with caplog.at_level(logging.WARNING, "rescale_data"):
        rd.DataLoader(pipeline, global_batch_size=N, num_logical_shards=N, repeat=True)
    (said,) = [message for message in caplog.messages if "few to shuffle" in message]
    assert "the smallest of 7 small sources, has 5 rows for 24 logical shards" in said
