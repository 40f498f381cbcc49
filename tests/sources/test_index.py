"""The index of a source: made once for all processes, mapped by them, and right."""

import errno
import json
import logging
import multiprocessing
import os
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from typer.testing import CliRunner

import rescale_data as rd
from rescale_data.cli.commands import app
from rescale_data.sources import index as indexing
from rescale_data.sources.file_source import FileSource
from rescale_data.sources.files import once
from rescale_data.sources.files.bundle import Bundle
from rescale_data.sources.folders import fold
from rescale_data.testing import assert_rescalable, assert_source
from tests.formats import write_jsonl
from tests.sources.test_rescalable import loader_of, make_source, packed

FORMATS = ["parquet", "arrow", "jsonl", "jsonl.gz", "tar", "megatron"]


class Counting(LocalFileSystem):
    """Counts what would be requests."""

    protocol = "counted"
    cachable = False
    asked: ClassVar[Counter[str]] = Counter()

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        Counting.asked["ls"] += 1
        return super().ls(path, detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        Counting.asked["info"] += isinstance(path, str)  # else it is of a listing
        return super().info(path, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        Counting.asked[os.path.basename(path)] += 1
        return super().cat_file(path, start, end, **kwargs)


@pytest.fixture(autouse=True)
def counted() -> None:
    fsspec.register_implementation("counted", Counting, clobber=True)
    Counting.asked.clear()


def open_counted(folder: Path) -> rd.ParquetSource:
    return rd.ParquetSource(f"counted://{folder / 'data'}", index_dir=folder / "index")


def open_and_count(folder: Path) -> tuple[int, int, int, int]:
    """Requests for files, other requests, bytes pickled, and bytes of memory that the source took."""
    Counting.asked.clear()
    before = resident()
    source = open_counted(folder)
    reads = sum(count for name, count in Counting.asked.items() if name.endswith(".parquet"))
    return reads, Counting.asked.total() - reads, len(pickle.dumps(source)), resident() - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_eight_processes_and_ten_thousand_files(tmp_path: Path) -> None:
    """Each file is read once in all, each process asks for little, and nothing of the index is pickled."""
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "first", row_group_size=10)
    num_files, num_processes = 10_000, 8
    for i in range(num_files):
        os.link(tmp_path / "first", tmp_path / "data" / f"{i:05d}.parquet")
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        found = pool.map(open_and_count, [tmp_path] * num_processes, chunksize=1)
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:  # which have not read a footer
        again = pool.map(open_and_count, [tmp_path] * num_processes, chunksize=1)
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
def test_an_indexed_source_is_the_same(kind: str, tmp_path: Path) -> None:
    plain = make_source(kind, tmp_path / kind)
    make = partial(type(plain), tmp_path / kind, index_dir=tmp_path / "index")
    for source in (make(), make(), pickle.loads(pickle.dumps(make()))):
        assert source.manifest() == fold(plain.manifest())
        assert source.unfold(source.manifest()) == plain.manifest()
        assert source.fragments.tolist() == plain.fragments.tolist()
        assert [str(source.row(i)) for i in range(200)] == [str(plain.row(i)) for i in range(200)]
        assert source.locate(150) == plain.locate(150)
    assert_source(make())


def test_workers_map_it(tmp_path: Path) -> None:
    make_source("parquet", tmp_path / "data")
    source = rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index")
    assert_rescalable(
        partial(loader_of, partial(packed, source=source, kind="parquet")), [(1, 4, 2), (2, 3, 0)], steps=2
    )


def write(folder: Path, name: str, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": list(range(first, first + 20))}), folder / f"{name}.parquet", row_group_size=10)


def test_only_files_that_were_added_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[str] = []
    footer = rd.ParquetSource._footer

    def seen(self: Any, file: int) -> Any:
        read.append(self._files.names[file])
        return footer(self, file)

    monkeypatch.setattr(rd.ParquetSource, "_footer", seen)
    for name in ("b", "d"):
        write(tmp_path / "data", name)
    make = partial(rd.ParquetSource, tmp_path / "data", index_dir=tmp_path / "index")
    make()
    assert sorted(read) == ["b.parquet", "d.parquet"]
    write(tmp_path / "data", "c", 100)
    source = make()
    assert read[2:] == ["c.parquet"]
    assert [source.row(i)["x"] for i in (0, 20, 40)] == [0, 100, 0]
    (tmp_path / "data" / "b.parquet").unlink()
    with caplog.at_level(logging.WARNING, "rescale_data"):
        assert make().num_rows == 40
    assert any("b.parquet are in its index, and no longer there" in message for message in caplog.messages)
    assert len(read) == 3


def test_a_file_that_has_changed_is_named_and_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        write(tmp_path / "data", name)
    make = partial(rd.ParquetSource, tmp_path / "data", index_dir=tmp_path / "index")
    make()
    write(tmp_path / "data", "b", 1000)
    os.utime(tmp_path / "data" / "b.parquet", ns=(1, 1))
    with caplog.at_level(logging.WARNING, "rescale_data"):
        source = make()
    [message] = caplog.messages
    assert "b.parquet changed since an index of them was made, and are read anew" in message
    assert [source.row(i)["x"] for i in (0, 20)] == [0, 1000]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_copy_with_another_time_is_the_same_file(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a host to which the files were copied, and which shares the index."""
    open_it = partial(type(make_source(kind, tmp_path / "data")), tmp_path / "data", index_dir=tmp_path / "index")
    made = open_it()
    rows = [repr(made.row(i)) for i in range(made.num_rows)]
    before = {path: path.read_bytes() for path in (tmp_path / "index").rglob("*") if path.is_file()}
    for file in (tmp_path / "data").glob("[!.]*"):
        os.utime(file, ns=(1, 1))
    with caplog.at_level(logging.WARNING, "rescale_data"):
        for _ in range(2):
            again = open_it()
            assert [repr(again.row(i)) for i in range(made.num_rows)] == rows
    assert sum("other times than when their index was made" in message for message in caplog.messages) == 1
    assert again.manifest() == made.manifest()
    assert {path: path.read_bytes() for path in before} == before


def test_an_earlier_index_that_is_deleted_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_and_delete(folder: str) -> list[os.DirEntry[str]]:
        entries = list(os.scandir(folder))
        [os.unlink(entry.path) for entry in entries if entry.name.endswith(".rdindex")]
        return entries

    make_source("parquet", tmp_path / "data")
    rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index")
    (tmp_path / "data").joinpath("more.parquet").write_bytes(next((tmp_path / "data").glob("*")).read_bytes())
    monkeypatch.setattr(indexing, "os", SimpleNamespace(**vars(os) | {"scandir": list_and_delete}))
    assert rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index").num_rows > 200


def test_parts_are_shared_out_and_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process has read is not read again, and who dies in the middle leaves its parts."""
    monkeypatch.setattr(rd.ParquetSource, "FILES_A_PART", 2)
    for i in range(9):
        write(tmp_path / "data", f"{i}", 100 * i)
    make = partial(rd.ParquetSource, tmp_path / "data", index_dir=tmp_path / "index")
    footer, read = rd.ParquetSource._footer, []

    def fails(self: Any, file: int) -> Any:
        read.append(file)
        if len(read) > 5:
            raise KeyboardInterrupt
        return footer(self, file)

    monkeypatch.setattr(rd.ParquetSource, "_footer", fails)
    with pytest.raises(KeyboardInterrupt):
        make()
    monkeypatch.setattr(rd.ParquetSource, "_footer", footer)
    monkeypatch.setattr(FileSource, "_try_footer", _counting(FileSource._try_footer, again := []))
    source = make()
    assert 3 <= len(again) <= 7
    assert [source.row(20 * i)["x"] for i in range(9)] == [100 * i for i in range(9)]
    assert {path.suffix for path in (tmp_path / "index").iterdir()} == {".rdindex", ".rdpart"}


def _counting(function: Any, seen: list[int]) -> Any:
    def call(self: Any, file: int) -> Any:
        seen.append(file)
        return function(self, file)

    return call


class TestBadIndices:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        write(tmp_path / "data", "a")
        rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index")
        return next((tmp_path / "index").glob("*.rdindex"))

    @pytest.mark.parametrize("left", [0, 7, 12, 40, 200, -9])
    def test_cut_short_is_made_anew(self, left: int, made: Path, tmp_path: Path) -> None:
        whole = made.read_bytes()
        made.write_bytes(whole[:left])
        assert rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index").row(3) == {"x": 3}
        assert made.read_bytes() == whole

    def test_no_folder(self, made: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"rdindex cannot be a folder: .* Give index_dir="):
            rd.ParquetSource(tmp_path / "data", index_dir=made)
        with pytest.raises(ValueError, match=r"^index_dir='': give a folder"):
            rd.ParquetSource(tmp_path / "data", index_dir="")

    @pytest.mark.parametrize("why", [errno.EACCES, errno.EROFS])
    @pytest.mark.parametrize("index_dir", [None, "index"])
    def test_a_folder_that_cannot_be_written(
        self, why: int, index_dir: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError(why, os.strerror(why))

        write_jsonl(tmp_path / "a.jsonl", [{"x": 1}])
        monkeypatch.setattr(os, "makedirs", refuse)
        with pytest.raises(PermissionError, match=r"cannot be read or written: .* Give index_dir=, a folder that all"):
            rd.JsonlSource(tmp_path / "a.jsonl", index_dir=index_dir and tmp_path / index_dir)

    def test_of_another_format(self, made: Path, tmp_path: Path) -> None:
        with pa.ipc.new_file(tmp_path / "data" / "b.arrow", pa.schema({"x": pa.int64()})) as writer:
            writer.write_table(pa.table({"x": [1]}))
        rd.ArrowSource(tmp_path / "data", index_dir=tmp_path / "arrow")
        os.replace(next((tmp_path / "arrow").glob("*.rdindex")), made)
        with pytest.raises(ValueError, match=r"is an index of .*'arrow'.* not of .*'parquet'"):
            rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index")

    def test_of_other_files(self, made: Path, tmp_path: Path) -> None:
        write(tmp_path / "data", "b")
        source = rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index")
        assert source._known_files.bundle is not None
        made.replace(source._known_files.bundle.path)
        with pytest.raises(ValueError, match="is an index of other files"):
            rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index")

    def test_of_another_version_is_left_alone(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(indexing, "_INDEX_FORMAT_VERSION", 9)
        assert rd.ParquetSource(tmp_path / "data", index_dir=tmp_path / "index").num_rows == 20
        assert made.exists()
        assert len(list((tmp_path / "index").glob("*.rdindex"))) == 2


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_command(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_source(kind, tmp_path / "data")
    found = CliRunner().invoke(app, ["index", str(tmp_path / "data"), "--index-dir", str(tmp_path / "index")])
    assert found.exit_code == 0, found.output
    assert "with 200 rows are indexed" in found.output
    monkeypatch.setattr(type(plain), "_footer", None)
    assert type(plain)(tmp_path / "data", index_dir=tmp_path / "index").num_rows == 200
    assert any(Bundle(str(path)) for path in (tmp_path / "index").glob("*.rdindex"))


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["index", str(tmp_path / "nothing"), "--index-dir", str(tmp_path)])
    assert found.exit_code == 2
    assert "nothing" in found.output


def test_a_file_that_another_process_makes_before_the_lease_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AfterAnother(once.Lease):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            path.write_text("whole")

    def opened(name: str) -> str:
        text = Path(name).read_text()
        if text != "whole":
            raise ValueError(text)
        return text

    path, make = tmp_path / "file", Mock(side_effect=lambda aside: Path(aside).write_text("whole"))
    path.write_text("cut")
    assert (once.open_or_create(str(path), opened, make), make.call_count) == ("whole", 1)  # a damaged one is made anew
    path.write_text("cut")
    monkeypatch.setattr(once, "Lease", AfterAnother)
    assert (once.open_or_create(str(path), opened, make), make.call_count) == ("whole", 1)
