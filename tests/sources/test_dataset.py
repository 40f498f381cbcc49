"""`DatasetSource`: a map-style dataset's own rows."""

import gc
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading.chunks import _all_chunks
from rescale_data.shard import Shard
from rescale_data.sources.dataset import DatasetSource, as_source
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.source import Source
from rescale_data.testing import assert_rescalable, assert_source
from tests.nodes.resume import assert_resumes
from tests.sources.test_rescalable import loader_of

pytestmark = pytest.mark.usefixtures("own_cache")


class Squares:
    _fingerprint = "abc"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index**2


def test_is_a_source_of_the_datasets_own_rows() -> None:
    source = DatasetSource(Squares())
    assert isinstance(source, Source)
    assert [source.row(i) for i in range(source.num_rows)] == [0, 1, 4, 9, 16]
    assert source.fragments is None
    assert source.locate(3) == "Squares[3]"
    assert source.manifest() == {"format": "dataset", "class": "Squares", "rows": 5, "fingerprint": "abc"}
    assert DatasetSource([1], name="mine").name == "mine"
    assert pickle.loads(pickle.dumps(source)).row(2) == 4


def test_a_dataset_is_wrapped_once_and_a_source_not_at_all() -> None:
    dataset = Squares()
    source = as_source(dataset)
    assert as_source(dataset) is source
    assert as_source(source) is source
    assert as_source(Squares()) is not source


def test_a_dataset_that_has_become_longer_is_an_error_while_readers_of_it_live() -> None:
    rows = list(range(4))
    reader = Reader(rows, Shard())
    rows.append(4)
    with pytest.raises(ValueError, match=r"list has 5 rows, and had 4 .* rd\.DatasetSource\(dataset\)"):
        Reader(rows, Shard())
    assert sorted(Reader(DatasetSource(rows), Shard())) == [0, 1, 2, 3, 4]
    assert sorted(reader) == [0, 1, 2, 3]
    del reader
    assert sorted(Reader(rows, Shard())) == [0, 1, 2, 3, 4]


class Fetching:
    """Rows of some bytes; remembers what was asked for at once."""

    def __init__(self, num_rows: int = 100, num_bytes: int = 10, broken: tuple[int, ...] = ()) -> None:
        self.num_rows, self.num_bytes, self.broken = num_rows, num_bytes, broken
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        if set(indices) & set(self.broken):
            raise OSError(f"cannot decode one of {indices}")
        return [{"i": i, "x": np.full(self.num_bytes, i % 200, np.uint8)} for i in indices]


class TestMany:
    def test_are_fetched_at_once(self) -> None:
        dataset = Fetching()
        rows = [row["i"] for row in Reader(DatasetSource(dataset, batch_rows=10), Shard())]
        assert sorted(rows) == list(range(100))
        assert [len(asked) for asked in dataset.asked] == [1, *[10] * 9, 9]
        assert rows == [row["i"] for row in Reader(DatasetSource([{"i": i} for i in range(100)]), Shard())]
        assert_source(DatasetSource(dataset))

    def test_resume_anywhere(self) -> None:
        source = DatasetSource(Fetching(30), batch_rows=4)
        assert_resumes(lambda: Reader(source, Shard()), num_samples=29)

    def test_fit_the_cache(self) -> None:
        gc.collect()
        dataset = Fetching(400, 1000)
        source = DatasetSource(dataset, batch_rows=16, cache_bytes=40_000)
        readers = [Reader(source, Shard(i, 8)) for i in range(8)]
        cache().clear()
        for _ in range(50):
            for reader in readers:
                next(reader)
        counts = Counter(i for asked in dataset.asked for i in asked)
        assert sorted(counts) == list(range(400))
        assert max(map(len, dataset.asked)) == max(1, 20 // len(_all_chunks))
        assert cache().nbytes <= max(40_000, cache().budget)

    def test_a_row_that_raises_is_blamed_and_costs_one_more_read_of_those_beside_it(self) -> None:
        source = DatasetSource(Fetching(30, broken=(7, 11)), batch_rows=8)
        reader = Reader(source, Shard(), shuffle=False)
        assert [next(reader)["i"] for _ in range(7)] == list(range(7))
        with pytest.raises(OSError, match=r"one of \[7\]") as caught:
            next(reader)
        assert caught.value.__notes__[0] == "while reading Fetching: Fetching[7]"
        dataset = Fetching(200, broken=(70, 77, 150))
        reader = Reader(DatasetSource(dataset, batch_rows=64), Shard(), shuffle=False, on_error="skip")
        assert [row["i"] for row in reader] == [i for i in range(200) if i not in (70, 77, 150)]
        assert reader.get_state()["skipped"] == 3
        assert max(Counter(i for asked in dataset.asked for i in asked).values()) == 2

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_blocked_rows_are_not_fetched(self, shuffle: bool) -> None:
        blocked = {*range(1, 100, 2), 40, 42, 98}
        dataset = Fetching(100, broken=tuple(blocked))
        reader = Reader(DatasetSource(dataset, batch_rows=16), Shard(), shuffle=shuffle, exclude=blocked)
        rows = [row["i"] for row in reader]
        assert sorted(rows) == sorted({*range(100)} - blocked)
        assert [i for asked in dataset.asked for i in asked] == rows


class TestHuggingFace:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Any:
        datasets = pytest.importorskip("datasets")
        image = pytest.importorskip("PIL.Image").new
        rows = {"image": [image("L", (4, 3), i) for i in range(48)], "n": list(range(48))}
        dataset = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
        dataset.save_to_disk(tmp_path / "saved")
        return datasets.load_from_disk(tmp_path / "saved")

    def test_images_are_decoded_when_they_are_read(self, saved: Any) -> None:
        row = DatasetSource(saved).rows([3, 5])[1]
        assert row["image"].getpixel((0, 0)) == row["n"] == 5
        assert DatasetSource(saved).batch_rows == 16

    def test_its_format_applies(self, saved: Any) -> None:
        rows = list(Reader(saved.select_columns(["n"]).with_format("torch"), Shard(), shuffle=False))
        assert [row["n"] for row in rows] == list(range(48))
        assert isinstance(rows[0]["n"], torch.Tensor)
        scaled = saved.select_columns(["n"]).with_transform(lambda batch: {"n": [2 * n for n in batch["n"]]})
        assert next(Reader(scaled, Shard(), shuffle=False)) == {"n": 0}

    def test_rescales_with_and_without_workers(self, saved: Any) -> None:
        assert_rescalable(partial(loader_of, saved, collate_fn=pixels), [(1, 4, 0), (2, 2, 2), (3, 4, 0)], steps=2)

    def test_is_known_again_wherever_it_lies(self, saved: Any, tmp_path: Path) -> None:
        import datasets

        (tmp_path / "saved").rename(tmp_path / "moved")
        moved = datasets.load_from_disk(tmp_path / "moved")
        assert DatasetSource(moved).manifest() == DatasetSource(saved).manifest()
        assert DatasetSource(moved.select(range(40))).manifest() != DatasetSource(saved).manifest()


def pixels(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(sample["image"])) for sample in samples])
