"""Files from globs, folders, lists and URLs, in the same order everywhere."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile

import rescale_data as rd
from rescale_data.sources.files.paths import find_matching_files

NAMES = ("b/2.parquet", "b/10.parquet", "a.parquet", "B.parquet", "notes.txt", "_tmp/x.parquet", ".hidden.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return tmp_path / "corpus"


def names(paths: Any) -> list[str]:
    return list(find_matching_files(paths, (".parquet",)).names)


@pytest.mark.parametrize("place", ["", "file://", "memory:/"])
def test_folders_globs_and_lists(place: str, folder: Path) -> None:
    if place == "memory:/":
        fsspec.filesystem("memory").put(str(folder), str(folder), recursive=True)
    root = f"{place}{folder}"
    whole = ["B.parquet", "a.parquet", "b/10.parquet", "b/2.parquet"]
    assert names(root) == names(f"{root}/") == whole
    assert names(f"{root}/?.parquet") == ["B.parquet", "a.parquet"]
    assert names(f"{root}/*.txt") == ["notes.txt"]
    assert names(f"{root}/b/*") == ["10.parquet", "2.parquet"]
    assert names(f"{root}/**/?.parquet") == sorted([*whole[:2], "_tmp/x.parquet", "b/2.parquet"])
    assert names(f"{root}/**/*.parquet") == sorted([*whole, "_tmp/x.parquet"])
    assert names(f"{root}/.*.parquet") == [".hidden.parquet"]
    assert names(f"{root}/a.parquet") == ["a.parquet"]
    assert names([f"{root}/b/2.parquet", f"{root}/a.parquet", f"{root}/b"]) == ["a.parquet", *whole[2:]]
    files = find_matching_files(root, (".parquet",))
    assert files.sizes == (9, 9, 12, 11)
    assert files.path(3).endswith(f"{folder}/b/2.parquet")
    with files.open(1) as file:
        assert file.read() == b"x" * 9


def test_a_folder_that_cannot_be_listed_is_no_empty_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if os.path.basename(path) in ("b", "_tmp"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="corpus/b'"):
        names(folder)


class TestLinks:
    def test_to_a_folder_are_followed(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "part").symlink_to(folder / "b")
        assert names(tmp_path / "run") == ["part/10.parquet", "part/2.parquet"]

    @pytest.mark.parametrize(("link", "to"), [("b/up", ".."), ("b/itself", "itself"), ("b/out", "../../outside")])
    def test_that_lead_in_a_circle_are_named(self, link: str, to: str, folder: Path) -> None:
        (folder.parent / "outside").mkdir()
        (folder.parent / "outside" / "back").symlink_to(folder)
        (folder / link).symlink_to(to)
        with pytest.raises(ValueError, match=f"{link}.* is a symbolic link that leads in a circle.*give a glob"):
            names(folder)

    def test_to_nothing_are_not_left_out(self, folder: Path) -> None:
        (folder / "c.parquet").symlink_to("nowhere")
        for given in (f"{folder}/*.parquet", folder):
            with pytest.raises(FileNotFoundError, match=r"c\.parquet"):
                names(given)


def test_relative_to_where_we_are(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert names("b/*.parquet") == ["10.parquet", "2.parquet"]
    assert names(".") == names(folder)
    folder.rename(tmp_path / "run[1]")
    monkeypatch.chdir(tmp_path / "run[1]")
    assert names("*.parquet") == names("../run[[]1]/*.parquet") == ["B.parquet", "a.parquet"]


@pytest.mark.parametrize("place", ["", "file://"])
@pytest.mark.parametrize("again", ["b/./2.parquet", "b//2.parquet", "b/../b/2.parquet", "b//*.parquet", "./b"])
def test_one_file_spelled_in_two_ways_is_read_once(place: str, again: str, folder: Path) -> None:
    root = f"{place}{folder}"
    assert names([f"{root}/a.parquet", f"{root}/b", f"{root}/{again}"]) == ["a.parquet", "b/10.parquet", "b/2.parquet"]


def test_a_name_with_brackets_is_a_file_first(tmp_path: Path) -> None:
    (tmp_path / "part[1].parquet").write_bytes(b"x")
    fsspec.filesystem("memory").pipe("/brackets/part[1].parquet", b"x")
    for folder in (tmp_path, "memory://brackets"):
        assert names(f"{folder}/part[1].parquet") == ["part[1].parquet"]
        with pytest.raises(FileNotFoundError, match="matches no file"):
            names(f"{folder}/part[2].parquet")


@pytest.mark.parametrize("below", ["s/", "s//", "s/../"])
def test_keys_stay_as_they_are(below: str) -> None:
    """In a bucket a//b, a/./b, a/../b and a/b are four objects."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    keys = [below + key for key in ("a//b.parquet", "a/b.parquet", "a/./b.parquet", "a/../b.parquet", "/c/b.parquet")]
    for key in keys:
        memory.store[f"/{key}"] = MemoryFile(memory, f"/{key}", key.encode())
    for given in (keys, *([key] for key in keys)):
        files = find_matching_files([f"memory://{key}" for key in given], (".parquet",))
        found = [files.reader_of(file).read(0, 99).to_pybytes().decode() for file in range(len(files.names))]
        assert sorted(found) == sorted(given)


def test_a_row_s_file_is_found_by_its_name() -> None:
    """As `exclude=` does. A name that only a disk takes for the same is found if no file has it."""
    memory, table = fsspec.filesystem("memory"), pa.table({"x": [1, 2]})
    keys = ("rows/a//b.parquet", "rows/a/b.parquet", "rows/c.parquet")
    for key in keys:
        with memory.open(f"/{key}", "wb") as file:
            pq.write_table(table, file)
    source = rd.ParquetSource([f"memory://{key}" for key in keys])
    for row in range(source.num_rows):
        name, row_in_file = source.file_row(row)
        for given in (name, f"memory://rows/{name}"):
            assert source.rows_of_file(given)[row_in_file] == row
    assert source.rows_of_file("./c.parquet") == source.rows_of_file("c.parquet")
