"""Files from globs, folders, lists and URLs, in the same order everywhere."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from rescale_data.sources.files.paths import find_matching_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "b/2.parquet",
        "b/10.parquet",
        "a.parquet",
        "B.parquet",
        "notes.txt",
        "_tmp/x.parquet",
        ".hidden.parquet",
    ):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return tmp_path / "corpus"


def names(paths, suffixes=(".parquet",), **kwargs) -> list[str]:
    return list(find_matching_files(paths, suffixes, **kwargs).names)


def test_a_folder_is_searched_through_without_hidden_names(folder: Path) -> None:
    assert names(folder) == ["B.parquet", "a.parquet", "b/10.parquet", "b/2.parquet"]
    assert names(str(folder) + "/") == names(folder)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if os.path.basename(path) in ("b", "_tmp"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="corpus/b'"):
        find_matching_files(folder, (".parquet",))


def test_a_link_to_a_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "part").symlink_to(folder / "b")
    assert names(tmp_path / "run") == ["10.parquet", "2.parquet"]


@pytest.mark.parametrize(("link", "to"), [("b/up", ".."), ("b/itself", "itself"), ("b/out", "../../outside")])
def test_links_that_lead_in_a_circle_are_named(link: str, to: str, folder: Path) -> None:
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside" / "back").symlink_to(folder)
    (folder / link).symlink_to(to)
    with pytest.raises(ValueError, match=f"{link}.* is a symbolic link that leads in a circle.*give a glob"):
        find_matching_files(folder, (".parquet",))


def test_a_glob_takes_what_it_matches(folder: Path) -> None:
    assert names(f"{folder}/*.txt") == ["notes.txt"]
    assert names(f"{folder}/b/*") == ["10.parquet", "2.parquet"]
    assert names(f"{folder}/**/*.parquet") == sorted([*names(folder), "_tmp/x.parquet"])


def test_a_list_is_sorted_and_has_each_file_once(folder: Path) -> None:
    given = [folder / "b/2.parquet", f"{folder}/a.parquet", str(folder / "b")]
    assert names(given) == ["a.parquet", "b/10.parquet", "b/2.parquet"]


def test_sizes_and_paths(folder: Path) -> None:
    files = find_matching_files(folder, (".parquet",))
    assert files.sizes == (9, 9, 12, 11)
    assert files.path(3) == str(folder / "b/2.parquet")
    with files.open(1) as file:
        assert file.read() == b"x" * 9


def test_relative_to_where_we_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert names("b/*.parquet") == ["10.parquet", "2.parquet"]
    assert names(".") == names(folder)


def test_a_folder_with_brackets_in_which_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run[1]").mkdir()
    (tmp_path / "run[1]" / "a.parquet").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "run[1]")
    assert names("*.parquet") == names("../run[[]1]/*.parquet") == ["a.parquet"]


def test_a_link_to_nothing_is_not_left_out_of_a_glob(folder: Path) -> None:
    (folder / "c.parquet").symlink_to("nowhere")
    for given in (f"{folder}/*.parquet", folder):
        with pytest.raises(FileNotFoundError, match=r"c\.parquet"):
            find_matching_files(given, (".parquet",))


def test_a_name_with_brackets_is_a_file_first(tmp_path: Path) -> None:
    (tmp_path / "part[1].parquet").write_bytes(b"x")
    fsspec.filesystem("memory").pipe("/brackets/part[1].parquet", b"x")
    for folder in (tmp_path, "memory://brackets"):
        assert names(f"{folder}/part[1].parquet") == ["part[1].parquet"]
        with pytest.raises(FileNotFoundError, match="matches no file"):
            find_matching_files(f"{folder}/part[2].parquet", (".parquet",))


def test_urls(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*.parquet"):
        memory.pipe(f"/corpus/{path.relative_to(folder).as_posix()}", path.read_bytes())
    assert names("memory://corpus") == names(folder)
    assert names("memory://corpus/b/*.parquet") == ["10.parquet", "2.parquet"]
    assert names(["memory://corpus/a.parquet"]) == ["a.parquet"]
    files = find_matching_files("memory://corpus", (".parquet",))
    assert files.sizes == find_matching_files(folder, (".parquet",)).sizes
    assert files.open(1).read() == b"x" * 9
    assert names(f"file://{folder}") == names(folder)
    with pytest.raises(FileNotFoundError, match="memory://nowhere"):
        find_matching_files("memory://nowhere/*", (".parquet",))


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
        found = [files.ranges(file).read(0, 99).to_pybytes().decode() for file in range(len(files.names))]
        assert sorted(found) == sorted(given)


@pytest.mark.parametrize("missing", ["*.parquet", "nowhere", "nowhere.parquet"])
def test_nothing_found(tmp_path: Path, missing: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"matches no file .*Give a glob"):
        find_matching_files(tmp_path / missing, (".parquet",))


def test_a_folder_without_such_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder without files that end in \.arrow, \.ipc"):
        find_matching_files(tmp_path, (".arrow", ".ipc"))
    with pytest.raises(FileNotFoundError, match="No paths"):
        find_matching_files([], (".arrow",))


def test_local_and_remote_in_one_list(folder: Path) -> None:
    with pytest.raises(ValueError, match="a source for each"):
        find_matching_files([str(folder), "memory://corpus"], (".parquet",))
