"""Sources that are no files: `assert_source` (whole sources pass, each broken promise fails) and `DatasetSource`."""

import dataclasses
import gc
import inspect
import itertools
import pickle
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import rescale_data as rd
from rescale_data.nodes.reading.fetching import _all_chunks
from rescale_data.sources import source as protocol
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.source import Source
from rescale_data.testing import assert_source
from tests.laws.tables import FILES

pytestmark = pytest.mark.usefixtures("own_cache")


class Rows(Source):
    """Integers; what a test breaks is one of its attributes or methods."""

    def __init__(self, **broken):
        self.name, self.num_rows = "rows", 10
        self.fragments = np.array([0, 4, 10])
        for name, value in broken.items():
            setattr(self, name, value)

    def manifest(self):
        return {"rows": 10}

    def row(self, index):
        return {"x": np.array([index])}

    def locate(self, index):
        return f"row {index}"


NUMBERS = [np.array([i]) for i in range(10)]
DRAWN = itertools.count()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (object(), "lacks .*'num_rows'"),
        (Rows(num_rows=0), "num_rows is 0"),
        (Rows(num_rows=np.int64(10)), "an int above 0"),
        (Rows(name=""), "a short text"),
        (Rows(fragments=[0, 10]), "int64"),
        (Rows(fragments=np.array([0, 4, 9])), "from 0 to num_rows"),
        (Rows(fragments=np.array([0, 8, 4, 10])), "go up"),
        (Rows(lock=(i for i in range(3))), "pickles"),
        (Rows(row=lambda _: {"x": next(DRAWN)}), r"row\(\d\) is .* now and was"),
        (Rows(row=lambda index: {"x": NUMBERS[index]}), r"row\(\d\) is"),
        (Rows(locate="somewhere".format), "same of two rows"),
        (Rows(manifest=lambda: {"rows": np.int64(10)}), "JSON"),
    ],
)
def test_a_broken_promise(source, message):
    with pytest.raises(AssertionError, match=message):
        assert_source(source)


def test_a_source_without_tokens():
    assert_source(Rows())
    with pytest.raises(AssertionError, match="no tokens"):
        assert_source(Rows(), columns=["x"])


def test_the_example_of_the_protocol(tmp_path):
    text = protocol.__doc__ or ""
    code = textwrap.dedent(text[text.index("    class LogLines") : text.index("Then ``")]).replace("\\\\", "\\")
    assert len(code.strip().splitlines()) <= 26
    scope = {"Path": Path, "np": np, "rd": rd, "__name__": __name__}
    exec(code, scope)
    globals()["LogLines"] = scope["LogLines"]  # pickles by name
    (tmp_path / "log.txt").write_text("one\ntwö\n\nfour")
    source = scope["LogLines"](str(tmp_path / "log.txt"))
    assert [source.row(i)["line"] for i in range(4)] == ["one", "twö", "", "four"]
    assert_source(source)


@pytest.mark.parametrize("source", [source for source, _ in FILES.values()])
def test_options_of_sources_of_files_are_given_by_name(source):
    parameters = inspect.signature(source).parameters.values()
    assert [about.name for about in parameters if about.kind is not inspect.Parameter.KEYWORD_ONLY] == ["paths"]


def test_a_subclass_may_be_a_dataclass_and_has_no_members_that_arguments_hide(tmp_path):
    @dataclasses.dataclass
    class Marked(rd.JsonlSource):
        mark: int = 3

    (tmp_path / "a.jsonl").write_text('{"n": 1}')
    one, two = (Marked(tmp_path, mark=5) for _ in range(2))
    assert (one.mark, len({one, two}), [*rd.Reader(one, rd.Shard())]) == (5, 2, [{"n": 1}])
    with pytest.raises(TypeError, match=r"Hidden defines \['cache_bytes', 'remote'\], which are arguments"):
        type("Hidden", (rd.JsonlSource,), {"cache_bytes": 7, "remote": property(id), "mark": 3})


def test_rows_of_a_synthetic_source_do_not_change():
    assert_source(rd.SyntheticSource(3000, length=(0, 20)), columns=["tokens"])
    assert_source(rd.SyntheticSource(5, length=7, seed=3), columns=["tokens"])
    source, other = (rd.SyntheticSource(2000, length=(2, 4), vocab_size=100, seed=seed) for seed in (0, 1))
    rows = [source.row(i)["tokens"].tolist() for i in (0, 1, 1999)]
    assert rows == [[80, 3], [63, 71, 91, 73], [50, 77, 92]]
    assert source.row(0)["tokens"].dtype == np.int32
    assert other.row(0)["tokens"].tolist() != rows[0]
    assert source.locate(7) == "synthetic row 7"


class Squares:
    _fingerprint = "abc"

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index**2


def test_is_a_source_of_the_datasets_own_rows():
    source = rd.DatasetSource(Squares())
    assert isinstance(source, rd.Source)
    assert [source.row(i) for i in range(source.num_rows)] == [0, 1, 4, 9, 16]
    assert source.fragments is None
    assert source.locate(3) == "Squares[3]"
    assert source.manifest() == {"format": "dataset", "class": "Squares", "rows": 5, "fingerprint": "abc"}
    assert rd.DatasetSource([1], name="mine").name == "mine"
    assert pickle.loads(pickle.dumps(source)).row(2) == 4


def test_a_dataset_that_has_become_longer_is_an_error_while_readers_of_it_live():
    rows = list(range(4))
    reader = rd.Reader(rows, rd.Shard())
    rows.append(4)
    with pytest.raises(ValueError, match=r"list has 5 rows, and had 4 .* rd\.DatasetSource\(dataset\)"):
        rd.Reader(rows, rd.Shard())
    assert sorted(rd.Reader(rd.DatasetSource(rows), rd.Shard())) == [0, 1, 2, 3, 4]
    assert sorted(reader) == [0, 1, 2, 3]
    del reader
    assert sorted(rd.Reader(rows, rd.Shard())) == [0, 1, 2, 3, 4]


class Fetching:
    """Rows of some bytes; remembers what was asked for at once."""

    def __init__(self, num_rows=100, num_bytes=10, broken=()):
        self.num_rows, self.num_bytes, self.broken = num_rows, num_bytes, broken
        self.asked = []

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        self.asked.append(indices)
        if set(indices) & set(self.broken):
            raise OSError(f"cannot decode one of {indices}")
        return [{"i": i, "x": np.full(self.num_bytes, i % 200, np.uint8)} for i in indices]


class TestMany:
    def test_are_fetched_at_once(self):
        dataset = Fetching()
        rows = [row["i"] for row in rd.Reader(rd.DatasetSource(dataset, batch_rows=10), rd.Shard())]
        assert sorted(rows) == list(range(100))
        assert [len(asked) for asked in dataset.asked] == [1, *[10] * 9, 9]
        assert rows == [row["i"] for row in rd.Reader(rd.DatasetSource([{"i": i} for i in range(100)]), rd.Shard())]
        assert_source(rd.DatasetSource(dataset))

    def test_fit_the_cache(self):
        gc.collect()
        dataset = Fetching(400, 1000)
        source = rd.DatasetSource(dataset, batch_rows=16, cache_bytes=40_000)
        readers = [rd.Reader(source, rd.Shard(i, 8)) for i in range(8)]
        cache().clear()
        for _ in range(50):
            for reader in readers:
                next(reader)
        counts = Counter(i for asked in dataset.asked for i in asked)
        assert sorted(counts) == list(range(400))
        assert max(map(len, dataset.asked)) == max(1, 20 // len(_all_chunks))
        assert cache().nbytes <= max(40_000, cache().budget)

    def test_a_row_that_raises_is_blamed_and_costs_one_more_read_of_those_beside_it(self):
        source = rd.DatasetSource(Fetching(30, broken=(7, 11)), batch_rows=8)
        reader = rd.Reader(source, rd.Shard(), shuffle=False)
        assert [next(reader)["i"] for _ in range(7)] == list(range(7))
        with pytest.raises(OSError, match=r"one of \[7\]") as caught:
            next(reader)
        assert caught.value.__notes__[0] == "while reading Fetching: Fetching[7]"
        dataset = Fetching(200, broken=(70, 77, 150))
        reader = rd.Reader(rd.DatasetSource(dataset, batch_rows=64), rd.Shard(), shuffle=False, on_error="skip")
        assert [row["i"] for row in reader] == [i for i in range(200) if i not in (70, 77, 150)]
        assert reader.get_state()["skipped"] == 3
        assert max(Counter(i for asked in dataset.asked for i in asked).values()) == 2

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_blocked_rows_are_not_fetched(self, shuffle):
        blocked = {*range(1, 100, 2), 40, 42, 98}
        dataset = Fetching(100, broken=tuple(blocked))
        reader = rd.Reader(rd.DatasetSource(dataset, batch_rows=16), rd.Shard(), shuffle=shuffle, exclude=blocked)
        rows = [row["i"] for row in reader]
        assert sorted(rows) == sorted({*range(100)} - blocked)
        assert [i for asked in dataset.asked for i in asked] == rows


class TestHuggingFace:
    @pytest.fixture
    def saved(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        image = pytest.importorskip("PIL.Image").new
        rows = {"image": [image("L", (4, 3), i) for i in range(48)], "n": list(range(48))}
        dataset = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
        dataset.save_to_disk(tmp_path / "saved")
        return datasets.load_from_disk(tmp_path / "saved")

    def test_images_are_decoded_when_they_are_read(self, saved):
        row = rd.DatasetSource(saved).rows([3, 5])[1]
        assert row["image"].getpixel((0, 0)) == row["n"] == 5
        assert rd.DatasetSource(saved).batch_rows == 16

    def test_its_format_applies(self, saved):
        rows = list(rd.Reader(saved.select_columns(["n"]).with_format("torch"), rd.Shard(), shuffle=False))
        assert [row["n"] for row in rows] == list(range(48))
        assert isinstance(rows[0]["n"], torch.Tensor)
        scaled = saved.select_columns(["n"]).with_transform(lambda batch: {"n": [2 * n for n in batch["n"]]})
        assert next(rd.Reader(scaled, rd.Shard(), shuffle=False)) == {"n": 0}

    def test_is_known_again_wherever_it_lies(self, saved, tmp_path):
        import datasets

        (tmp_path / "saved").rename(tmp_path / "moved")
        moved = datasets.load_from_disk(tmp_path / "moved")
        assert rd.DatasetSource(moved).manifest() == rd.DatasetSource(saved).manifest()
        assert rd.DatasetSource(moved.select(range(40))).manifest() != rd.DatasetSource(saved).manifest()
