"""`Reader`: its order, its epochs and rows that cannot be read. Each row once an epoch: `tests.test_histories`."""

import itertools
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
from rescale_data.nodes.reading.rows import ShardRows
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


def epoch_of(reader: Reader) -> list[int]:
    return [row["x"] for row in reader]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(1, 12), shuffles)
@settings(max_examples=50)
def test_fragments_around_are_those_of_the_rows(lengths: list[int], num_shards: int, shuffle: bool | int) -> None:
    source = Fragmented(*lengths)
    for shard in range(num_shards):
        rows = ShardRows(source, Shard(0, num_shards), shuffle)
        for epoch, row in itertools.product(range(2), range(rows.order(0, shard).num_shard_rows)):
            of_rows = np.searchsorted(source.fragments, rows.window_rows(epoch, row, shard), side="right") - 1
            found = rows.fragments_around(epoch, row, shard)
            assert sorted(fragment for fragment in found if lengths[fragment]) == np.unique(of_rows).tolist()


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


def test_shuffles_differently_each_epoch_seed_and_shard() -> None:
    source = Fragmented(50, 50)
    orders = []
    for seed in range(2):
        reader = Reader(source, Shard(seed=seed))
        orders.append(epoch_of(reader))
        reader.reset(reader.get_state())
        orders.append(epoch_of(reader))
    assert len({tuple(order) for order in orders}) == 4


def test_a_window_keeps_rows_near_their_place() -> None:
    order = epoch_of(Reader(Fragmented(100), Shard(), shuffle=10))
    assert order != sorted(order)
    assert all(sorted(order[i : i + 10]) == list(range(i, i + 10)) for i in range(0, 100, 10))


def test_a_dataset_yields_its_own_samples_and_is_wrapped_once() -> None:
    dataset = [("a", 0), ("b", 1), ("c", 2)]
    first, second = Reader(dataset, Shard()), Reader(dataset, Shard())
    assert sorted(first) == dataset
    assert first.reads is second.reads
    assert list(Reader(dataset, Shard(), shuffle=False)) == dataset


def test_parameters_say_what_changes_the_order() -> None:
    kinds = [Reader(Fragmented(9), Shard(), shuffle=s).parameters() for s in (False, True, 7)]
    assert kinds == [{"shuffle": 0}, {"shuffle": 1024}, {"shuffle": 7}]
    assert Reader([1, 2], Shard()).parameters() == {"shuffle": "full"}


def test_parameters_say_which_columns_were_chosen(tmp_path: Path) -> None:
    """Other columns are other samples; but a packer reads its own whatever else the source has."""
    pq.write_table(pa.table({"n": [1], "text": ["a"], "tokens": [[1, 2]]}), tmp_path / "a.parquet")
    chosen = ParquetSource(tmp_path, columns=["text", "tokens"])
    assert Reader(chosen, Shard()).parameters()["columns"] == ["text", "tokens"]
    assert Reader(ParquetSource(tmp_path), Shard()).parameters()["columns"] == ["n", "text", "tokens"]
    readers = [Reader(source, Shard()) for source in (chosen, ParquetSource(tmp_path))]
    assert all(reader.open_documents("tokens") for reader in readers)
    assert readers[0].parameters() == readers[1].parameters()


@pytest.mark.parametrize("switched", [{"provenance": True}, {"on_error": "skip"}])
@pytest.mark.parametrize("packer", ["cut", "clean cut", "whole"])
def test_rows_of_a_saved_run_may_be_named_or_skipped_under_a_packer(
    packer: str, switched: dict[str, Any], tmp_path: Path
) -> None:
    table = pa.table({"n": range(60), "tokens": [[i] * (1 + i % 7) for i in range(60)]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource(tmp_path)

    def make(**kwargs: Any) -> rd.DataLoader:
        def pipeline(shard: Shard) -> rd.BaseNode[Any]:
            rows: rd.BaseNode[Any] = Reader(source, shard, **kwargs)
            if "clean" in packer:
                rows = rd.CleanDocuments(rows, "tokens", max_length=4)
            if "cut" in packer:
                return rd.TokenPacker(rows, column="tokens", seq_len=5, eos_id=None)
            return rd.WholeDocumentPacker(rows, column="tokens", seq_len=8, window=4)

        return rd.DataLoader(pipeline, global_batch_size=2, num_logical_shards=2, repeat=True)

    first, second = make(), make(**switched)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    for one, other in itertools.islice(zip(first, second, strict=True), 20):
        assert one["tokens"].tolist() == other["tokens"].tolist()
    make().load_state_dict(second.state_dict())


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
    assert epoch_of(reader) == [1, 2, 4, 5, 7, 8]
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
