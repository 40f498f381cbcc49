"""Data that grows, moves, shrinks and changes between the segments of a run."""

import itertools
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import rescale_data as rd
from rescale_data.sources.fragmented import num_rows, short_manifest
from tests.formats import write_jsonl, write_table
from tests.laws.tables import TOPS
from tests.states import opened

SHARDS, BATCH = 6, 6
WITH_WINDOWS = ["TokenPacker", "WholeDocumentPacker", "Shuffle"]


def write(folder, kind, name, rows):
    if kind == "jsonl":
        write_jsonl(folder / f"{name}.jsonl", [{"x": i} for i in rows])
    else:
        write_table(folder / f"{name}.parquet", {"x": rows}, 7)


def source_of(folder, kind):
    return rd.JsonlSource(folder) if kind == "jsonl" else rd.ParquetSource(folder, index_dir=index_of(folder))


def index_of(folder):
    return Path(f"{folder}.index")


def make_loader(data, **kwargs):
    return rd.DataLoader(data, global_batch_size=BATCH, num_logical_shards=SHARDS, **kwargs)


def segment(source, state, steps, **kwargs):
    """Return the rows of so many steps from a state on, over ends of epochs, and the state after them."""
    with make_loader(source, **kwargs) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = itertools.islice((batch for _ in range(9) for batch in loader), steps)
        return Counter(row for batch in batches for row in batch["x"].tolist()), loader.state_dict()


@pytest.fixture(params=["parquet", "jsonl"])
def kind(request):
    return request.param


def write_two(folder, kind, first=0):
    write(folder, kind, "b", range(first, first + 30))
    write(folder, kind, "d", range(first + 30, first + 60))
    return folder


@pytest.mark.parametrize("given", ["", "/*/*.{}", "/**/*.{}", "://"])
def test_a_folder_joins_where_there_was_one(kind, given, tmp_path):
    """Names are below what was given, so those of files in the first folder stay."""
    below = f"local://{tmp_path}/data" if given == "://" else f"{tmp_path}/data{given.format(kind)}"
    make = partial(rd.JsonlSource if kind == "jsonl" else rd.ParquetSource, below, index_dir=tmp_path / "index")
    write(tmp_path / "data" / "2025", kind, "a", range(30))
    first, state = segment(make(), None, 4)
    write(tmp_path / "data" / "2026", kind, "a", range(30, 60))
    rest, state = segment(make(), state, 1)
    second, _ = segment(make(), state, 10)
    assert (first + rest, second) == (Counter(range(30)), Counter(range(60)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_runs_that_began_with_other_files_go_on_over_one_source(kind, tmp_path, shuffle):
    open_source = rd.JsonlSource if kind == "jsonl" else rd.ParquetSource
    rows = {"a": range(30), "b": range(100, 130), "c": range(200, 230)}
    for names in ("ab", "ac", "abc"):
        for name in names:
            write(tmp_path / names, kind, name, rows[name])
    source = open_source(tmp_path / "abc")
    for names in ("ab", "ac"):
        before, after = (make_loader(each, shuffle=shuffle) for each in (open_source(tmp_path / names), source))
        served = next(iter(before))["x"].tolist()
        after.load_state_dict(before.state_dict())
        served += [row for batch in after for row in batch["x"].tolist()]
        assert sorted(served) == [row for name in names for row in rows[name]]


@pytest.mark.parametrize("top", WITH_WINDOWS)
@pytest.mark.parametrize(("prefix", "read_ahead"), [("", True), ("file://", False), ("file://", True)])
def test_what_is_read_ahead_of_a_window_has_not_begun(prefix, read_ahead, top, tmp_path, caplog):
    """Else files would join later where the cache has room for more."""
    for name, first in (("b", 0), ("d", 30), ("a", 100)):
        tokens = pa.array([[row] * 5 for row in range(first, first + 30)], pa.list_(pa.int32()))
        write_table(tmp_path / f"{name}.parquet", {"tokens": tokens}, 7)

    def begun(names):
        files = [f"{prefix}{tmp_path}/{name}.parquet" for name in names]
        source = rd.ParquetSource(files, remote=rd.Remote(read_ahead=read_ahead))
        return make_loader(lambda shard: TOPS[top](rd.Reader(source, shard)), repeat=True)

    before, after = begun("bd"), begun("abd")
    next(iter(before))
    after.load_state_dict(before.state_dict())
    assert "they join at epoch 1" in caplog.text


def test_a_remainder_that_is_planned_anew_at_the_end_of_a_step_is_no_step_begun_anew(tmp_path, caplog):
    """Files join a source that has ended while the other one of a mixture has not."""

    def loader_of(names):
        source = rd.ParquetSource([tmp_path / f"{name}.parquet" for name in names])

        def uneven(shard, rows):
            return rd.Filter(rd.Reader(rows, shard), lambda row: row["x"] % (1 + shard.index) == 0, version=1)

        def mixed(shard):
            sources = {"a": uneven(shard, source), "b": uneven(shard, few)}
            return rd.WeightedSampler(sources, {"a": 3, "b": 1}, stop="all")

        return make_loader(mixed)

    few = rd.DatasetSource([{"x": i} for i in range(41)], name="few")
    for name, first in (("b", 0), ("d", 30), ("a", 100)):
        write(tmp_path, "parquet", name, range(first, first + 30))
    before = loader_of("bd")
    for _ in zip(range(4), before, strict=False):
        pass
    loader_of("abd").load_state_dict(before.state_dict())
    assert "they join at epoch 1" in caplog.text
    assert "middle of a step" not in caplog.text


class TestDigests:
    """With an index a state has a digest a folder, and the index has the list of the files."""

    @pytest.fixture
    def folder(self, tmp_path):
        for part, first in (("x", 0), ("y", 60)):
            write_two(tmp_path / "data" / part, "parquet", first)
        return tmp_path / "data"

    def state(self, folder):
        return segment(source_of(folder, "parquet"), None, 4, repeat=True)[1]

    def test_with_and_without_an_index_it_is_the_same_data(self, folder):
        plain, digests = segment(rd.ParquetSource(folder), None, 4, repeat=True)[1], self.state(folder)
        (saved,) = opened(digests)["sources"].values()
        assert [(name, files, rows) for name, files, _, rows in saved["folders"]] == [("x", 2, 60), ("y", 2, 60)]
        assert "files" not in saved
        with_index = segment(source_of(folder, "parquet"), plain, 5)[0]
        assert with_index == segment(rd.ParquetSource(folder), digests, 5)[0]

    @pytest.mark.parametrize("saved_with", ["list", "digests"])
    def test_what_was_added_is_found(self, folder, saved_with, caplog):
        before = rd.ParquetSource(folder) if saved_with == "list" else source_of(folder, "parquet")
        state = segment(before, None, 4, repeat=True)[1]
        write(folder / "x", "parquet", "c", range(200, 212))
        seen, state = segment(source_of(folder, "parquet"), state, 16, repeat=True)
        assert "1 files were added" in caplog.text
        assert "x/c.parquet" in caplog.text
        assert not {*range(200, 212)} & {*seen}
        seen = segment(source_of(folder, "parquet"), state, 22, repeat=True)[0]
        assert seen == Counter([*range(120), *range(200, 212)])

    @pytest.mark.parametrize("now_with_index", [True, False])
    def test_without_the_index_of_then_the_folder_is_named(self, folder, now_with_index):
        state = self.state(folder)
        shutil.rmtree(index_of(folder))
        (folder / "y" / "d.parquet").unlink()
        source = source_of(folder, "parquet") if now_with_index else rd.ParquetSource(folder)
        said = r"folders: y: saved \[2, .*, now \[1, .*the index that lists the files of then is no longer in.*restore"
        with pytest.raises(rd.DataStateError, match=said) as error:
            segment(source, state, 1)
        assert "folders: x" not in str(error.value)

    @pytest.mark.parametrize("steps", [6, 17])
    def test_the_index_of_then_is_needed_until_all_shards_are_past_it(self, folder, steps):
        state = self.state(folder)
        write(folder / "x", "parquet", "c", range(200, 212))
        state = segment(source_of(folder, "parquet"), state, steps, repeat=True)[1]
        expected = segment(source_of(folder, "parquet"), state, 20, repeat=True)[0]
        shutil.rmtree(index_of(folder))
        if steps == 6:
            with pytest.raises(rd.DataStateError, match="the index that lists those is no longer in index_dir"):
                segment(source_of(folder, "parquet"), state, 1, repeat=True)
        else:
            found, state = segment(source_of(folder, "parquet"), state, 20, repeat=True)
            assert found == expected
            assert "by_epoch" not in opened(state)["sources"]

    def test_of_very_many_folders_there_is_one_digest(self):
        for count, folders in ((64, 64), (65, 1)):
            files = [[f"{i}/a", 10, 5] for i in range(count)]
            folded = short_manifest({"format": "parquet", "files": files})
            assert len(folded["folders"]) == folders
            assert num_rows(folded) == 5 * count


def test_a_skip_of_packed_samples_reads_the_files_of_the_epoch_that_has_begun(tmp_path):
    def add(name, rows):
        tokens = pa.array([[row] * (1 + row % 5) for row in rows], pa.list_(pa.int32()))
        write_table(tmp_path / f"{name}.parquet", {"tokens": tokens}, 7)

    def loader_at(state=None, num_skipped=0):
        source = rd.ParquetSource(tmp_path)
        loader = make_loader(lambda shard: TOPS["TokenPacker"](rd.Reader(source, shard, shuffle=8), seq_len=8))
        if state is not None:
            loader.load_state_dict(state)
        loader.skip(num_skipped * BATCH)
        return loader

    def rest(num_skipped):
        loader = loader_at(state, num_skipped)
        batches = (batch["tokens"].tolist() for _ in range(9) for batch in loader)
        return list(itertools.islice(batches, 20 - num_skipped))

    add("b", range(80))
    state = loader_at(num_skipped=3).state_dict()
    add("a", range(100, 135))
    expected = rest(0)
    assert any(token >= 100 for batch in expected for sample in batch for token in sample)
    assert all(rest(num) == expected[num:] for num in (1, 4, 9))


@pytest.mark.parametrize("steps", [0, 3])
def test_they_join_at_once_before_anything_was_drawn_and_after_a_reset(kind, tmp_path, steps):
    data = write_two(tmp_path / "data", kind)
    state = segment(source_of(data, kind), None, steps)[1]
    write(data, kind, "a", range(100, 112))
    loader = make_loader(source_of(data, kind))
    loader.load_state_dict(state)
    if steps:
        loader.reset()
    seen = Counter(row for batch in loader for row in batch["x"].tolist())
    assert seen == Counter([*range(60), *range(100, 112)])


@pytest.mark.parametrize("change", ["removed", "changed"])
def test_a_file_that_is_gone_or_another_one_is_an_error(kind, tmp_path, change):
    data = write_two(tmp_path / "data", kind)
    state = segment(source_of(data, kind), None, 4)[1]
    file = data / f"d.{kind}"
    later = file.stat().st_mtime_ns + 10**9
    file.unlink()
    if change == "changed":
        write(data, kind, "d", range(30, 54))
        os.utime(file, ns=(later, later))
    with pytest.raises(rd.DataStateError, match=rf"d\.{kind}.*restore the files, or begin a new run"):
        segment(source_of(data, kind), state, 1)


def test_a_list_whose_files_share_another_folder_names_the_cure(tmp_path):
    for folder in ("a", "b"):
        write(tmp_path / folder, "parquet", "d", range(30))
    files = [tmp_path / folder / "d.parquet" for folder in ("a", "b")]
    state = segment(rd.ParquetSource(files[:1]), None, 4)[1]
    with pytest.raises(rd.DataStateError, match="now another one; a folder or a glob keeps"):
        segment(rd.ParquetSource(files), state, 1)


def ids(batches):
    return {i for batch in batches for i in batch["x"][batch["valid"]].tolist()}


@pytest.mark.parametrize("num_taken", [0, 1])
@pytest.mark.parametrize("asks", [iter, lambda loader: iter(loader) and loader.peek(), rd.DataLoader.start])
def test_an_epoch_that_is_planned_has_begun_with_its_first_batch(kind, tmp_path, asks, num_taken):
    """With fewer rows than a global batch an epoch is redistributed as soon as it is asked for."""
    write(tmp_path, kind, "b", range(5))

    def loader():
        return rd.DataLoader(source_of(tmp_path, kind), global_batch_size=8, micro_batch_size=4, tail="pad")

    first = loader()
    assert ids(first) == {*range(5)}
    asks(first)
    seen = ids(next(first_batches) for _ in range(num_taken)) if (first_batches := iter(first)) else set()
    state = first.state_dict()
    write(tmp_path, kind, "c", range(100, 130))
    second = loader()
    second.load_state_dict(state)
    assert second.epoch == 1
    joined = {*range(5), *range(100, 130)}
    assert seen | ids(second) == ({*range(5)} if num_taken else joined)
    assert ids(second) == joined
