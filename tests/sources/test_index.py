"""The index of a source: made once for all processes, mapped by them, and right. However they are interleaved: law 7."""

import json
import multiprocessing
import os
import pickle
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

import rescale_data as rd
from rescale_data.sources import fragmented
from rescale_data.sources.files import once
from rescale_data.sources.fragmented import short_manifest
from rescale_data.testing import assert_source
from tests.formats import write_table
from tests.sources.corpora import FORMATS, make_source
from tests.sources.far import Far
from tests.sources.test_files import resident


def write(folder, name, first=0):
    write_table(folder / "data" / f"{name}.parquet", {"x": range(first, first + 20)}, 10)


def indexed(folder):
    return rd.ParquetSource(folder / "data", index_dir=folder / "index")


def open_counted(folder):
    return rd.ParquetSource(f"far://{folder / 'data'}", index_dir=folder / "index")


def open_and_count(folder):
    """Requests for files, other requests, bytes pickled, and bytes of memory that the source took."""
    Far.forget()
    before = resident()
    source = open_counted(folder)
    return Far.requests(), Far.asked.total() - Far.requests(), len(pickle.dumps(source)), resident() - before


def open_in_processes(folder, num_processes):
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:  # which have not read a footer
        return pool.map(open_and_count, [folder] * num_processes, chunksize=1)


def test_eight_processes_and_ten_thousand_files(far, tmp_path):
    (tmp_path / "data").mkdir()
    first = write_table(tmp_path / "first.parquet", {"x": range(20)}, 10)
    num_files, num_processes = 10_000, 8
    for i in range(num_files):
        os.link(first, tmp_path / "data" / f"{i:05d}.parquet")
    found, again = [open_in_processes(tmp_path, num_processes) for _ in range(2)]
    assert num_files <= sum(reads for reads, *_ in found)
    assert sum(reads + others for reads, others, *_ in found) <= num_files + 10 * num_processes
    assert [reads for reads, *_ in again] == [0] * num_processes
    assert max(others for _, others, *_ in again) <= 5
    assert max(size for *_, size, _ in found + again) < 4096
    assert max(memory for *_, memory in found + again) < 3 * 2**24  # 10,000 FileMetaData alone take 52 MB
    source = open_counted(tmp_path)
    assert source.num_rows == 20 * num_files
    [made] = (tmp_path / "index").glob("*.rdindex")
    assert made.stat().st_size <= 100 * (len(source.fragments) - 1)
    assert len(json.dumps(source.manifest())) < 200
    assert source.row(123_456)["x"] == 123_456 % 20


@pytest.mark.parametrize("kind", FORMATS)
def test_an_indexed_source_is_the_same(kind, far, tmp_path, caplog):
    """Made, mapped, pickled, by a URL; and where files have other times, as on another host, beside the index."""
    plain = make_source(kind, tmp_path / kind)
    make = partial(type(plain), tmp_path / kind, index_dir=tmp_path / "index")
    far.failures = [ConnectionResetError("reset by peer"), TimeoutError()]
    by_url = type(plain)(f"far://{tmp_path / kind}", index_dir=tmp_path / "index of the url")
    for source in (make(), make(), pickle.loads(pickle.dumps(make())), by_url):
        assert source.manifest() == short_manifest(plain.manifest())
        assert source.file_manifest(source.manifest()) == plain.manifest()
        assert source.fragments.tolist() == plain.fragments.tolist()
        assert [str(source.row(i)) for i in range(200)] == [str(plain.row(i)) for i in range(200)]
        assert source.locate(150).removeprefix("far://") == plain.locate(150)
    assert_source(make())
    before = {path: path.read_bytes() for path in (tmp_path / "index").rglob("*") if path.is_file()}
    for file in (tmp_path / kind).glob("[!.]*"):
        os.utime(file, ns=(1, 1))
    for again in (make(), make()):
        assert [str(again.row(i)) for i in range(200)] == [str(plain.row(i)) for i in range(200)]
        assert again.manifest() == short_manifest(plain.manifest())
    assert sum("other times than when their index was made" in message for message in caplog.messages) == 1
    assert {path: path.read_bytes() for path in before} == before


def test_only_files_that_were_added_or_have_changed_are_read(tmp_path, monkeypatch, caplog):
    read, footer = [], rd.ParquetSource._footer
    seen = lambda source, file: (read.append(source._files.names[file]), footer(source, file))[1]  # noqa: E731
    monkeypatch.setattr(rd.ParquetSource, "_footer", seen)
    write(tmp_path, "b"), write(tmp_path, "d")
    indexed(tmp_path)
    assert sorted(read) == ["b.parquet", "d.parquet"]
    write(tmp_path, "c", 100)
    source = indexed(tmp_path)
    assert read[2:] == ["c.parquet"]
    assert [source.row(i)["x"] for i in (0, 20, 40)] == [0, 100, 0]
    (tmp_path / "data" / "b.parquet").unlink()
    assert indexed(tmp_path).num_rows == 40
    assert any("b.parquet are in its index, and no longer there" in message for message in caplog.messages)
    assert len(read) == 3
    write(tmp_path, "d", 1000)
    os.utime(tmp_path / "data" / "d.parquet", ns=(1, 1))
    source = indexed(tmp_path)
    assert "d.parquet changed since they were indexed, and are read anew" in caplog.messages[-1]
    assert [source.row(i)["x"] for i in (0, 20)] == [100, 1000]
    assert read[3:] == ["d.parquet"]


def test_an_index_of_another_format_or_of_other_files_is_an_error(tmp_path):
    write(tmp_path, "a")
    indexed(tmp_path)
    [of_other_files] = (tmp_path / "index").glob("*.rdindex")
    write_table(tmp_path / "data" / "b.arrow", {"x": [1]})
    rd.ArrowSource(tmp_path / "data", index_dir=tmp_path / "arrow")
    [of_arrow] = (tmp_path / "arrow").glob("*.rdindex")
    write(tmp_path, "b")
    path = indexed(tmp_path)._index_bundle.path
    for index, words in ((of_other_files, "of other files"), (of_arrow, r"of .*'arrow'.* not of .*'parquet'")):
        shutil.copy(index, path)
        with pytest.raises(ValueError, match=f"is an index {words}"):
            indexed(tmp_path)


def test_an_index_of_another_version_is_left_alone(tmp_path, monkeypatch):
    write(tmp_path, "a")
    indexed(tmp_path)
    monkeypatch.setattr(fragmented, "INDEX_FORMAT_VERSION", 9)
    assert indexed(tmp_path).num_rows == 20
    assert len(list((tmp_path / "index").glob("*.rdindex"))) == 2


def test_a_file_that_another_process_makes_before_the_lease_is_not_made_again(tmp_path, monkeypatch):
    path, make = tmp_path / "file", Mock()
    monkeypatch.setattr(once, "Lease", lambda *_, **__: (path.write_text("whole"), nullcontext())[1])
    assert once.open_or_create(str(path), lambda name: Path(name).read_text(), make) == "whole"
    assert not make.called
