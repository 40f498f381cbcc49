"""Sources of fewer rows than logical shards: each row has one owner an epoch, and nobody waits for one."""

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

import rescale_data as rd

N = 24
SIZES = [1, 7, N - 1, N + 1]
CHAIN = [(1, 4, 0), (2, 3, 0), (3, 4, 0), (4, 1, 0), (2, 6, 0)]


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


@pytest.mark.parametrize("repeat", [False, True])
def test_a_shard_knows_how_much_is_left_of_its_epoch_and_an_endless_one_of_its_round(repeat: bool) -> None:
    for index in range(N):
        drawing, skipping = (rd.Reader(numbers(5), rd.Shard(index, N, repeat=repeat)) for _ in range(2))
        for _ in range(3 if repeat else N + 1):
            rows = [drawing.position.tolist()]
            rows += [drawing.position.tolist() for _ in drawing]
            end = drawing.position.tolist()
            for drawn, row in enumerate(rows):
                known = drawing.epoch_end(np.array([row]), np.array([index]))
                assert known is not None
                assert (known[0].tolist(), known[1].tolist()) == ([len(rows) - 1 - drawn], [end])
                skipping.bind(np.array(row).data)
                skipping.skip(len(rows) - 1 - drawn)
                assert skipping.position.tolist() == rows[-1]
                assert next(skipping, None) is None
                assert skipping.position.tolist() == end
            drawing.bind(drawing.position)


def mixed(shard: rd.Shard, small: Any, large: Any) -> rd.BaseNode[Any]:
    nodes = {"small": rd.Reader(small, shard), "large": rd.Reader(large, shard)}
    return rd.WeightedSampler(nodes, {"small": 0.1, "large": 0.9})


def loader_of(pipeline: Any, rank: int, world: int, micro: int, workers: int, **kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(
        pipeline, global_batch_size=12, micro_batch_size=micro, dp_rank=rank, dp_world_size=world, num_workers=workers,
        num_logical_shards=N, repeat=True, seed=5, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("num_rows", SIZES)
def test_in_a_mixture_rows_come_in_turn(num_rows: int) -> None:
    loader = loader_of(partial(mixed, small=numbers(num_rows), large=numbers(1000, first=1000)), 0, 1, 12, 0)
    drawn = np.concatenate([batch["x"].numpy() for batch in itertools.islice(loader, 400)])
    small = Counter(drawn[drawn < 1000].tolist())
    assert abs(sum(small.values()) - 480) <= N  # a sample a shard
    assert len(small) == num_rows
    if num_rows >= 7:
        assert max(small.values()) - min(small.values()) <= 480 / num_rows


def kept(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rd.Reader(numbers(N - 1), shard), _is_row_five)


def test_a_filter_that_leaves_little_is_no_silence() -> None:
    """A shard has seen every row before it is said to have none."""
    for batch in itertools.islice(loader_of(kept, 0, 1, 12, 0), 20):
        assert batch["x"].tolist() == [5] * 12


def _is_row_five(sample: dict[str, Any]) -> bool:
    return sample["x"] == 5


@pytest.mark.parametrize(
    ("num_rows", "is_said"), [(8 * N - 1, True), (8 * N, False), (8 * N + 1, True), (209 * N + 1, False)]
)
def test_few_rows_a_shard_are_said_once(num_rows: int, is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Few rows, or an uneven number of them."""
    source = rd.DatasetSource(numbers(num_rows), name="few")
    for _ in range(3):
        loader_of(source, 0, 1, 12, 0)
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
