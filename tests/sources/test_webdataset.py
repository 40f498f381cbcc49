"""Tar files: samples by key, with an index that is written once."""

import logging
import tarfile
from pathlib import Path

import pytest

from rescale_data.nodes.reader import Reader
from rescale_data.shard import Shard
from rescale_data.sources.webdataset import WebDatasetSource
from rescale_data.testing import assert_source
from tests.formats import tar_bytes, write_tar

SAMPLES = [{"jpg": bytes([i]) * (i * 7 % 600), "json": b'{"n": %d}' % i, "cls": b"%d" % (i % 3)} for i in range(40)]


pytestmark = pytest.mark.usefixtures("small_fragments")


def test_rows_are_samples(packed: str, tmp_path: Path) -> None:
    write_tar(tmp_path / f"a.tar{packed}", SAMPLES[:25])
    write_tar(tmp_path / f"b.tar{packed}", SAMPLES[25:], first=25)
    source = WebDatasetSource(tmp_path)
    assert source.columns == ["jpg", "json", "cls"]
    assert [source.row(i) for i in range(40)] == [{"__key__": f"{i:06d}", **SAMPLES[i]} for i in range(40)]
    assert source.fragments.tolist() == [0, 7, 14, 21, 25, 32, 39, 40]
    assert source.locate(26) == f"{tmp_path}/b.tar{packed}, row 1"
    assert_source(source)
    assert_source(WebDatasetSource(tmp_path, columns=["cls"]))


def test_names(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(b"one")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path, "folder", recursive=False)
        tar.add(tmp_path / "1.txt", "folder/1.txt")
    members = [
        ("a/b.x/1.SEG.png", b"1"),
        ("a/b.x/1.txt", b"2"),
        ("a/b.x/noextension", b"3"),
        ("__meta__.json", b"4"),
        ("a/c/" + "long" * 60 + ".txt", b"5"),
        ("a/c/" + "long" * 60 + ".seg.png", "ü".encode()),
    ]
    (tmp_path / "b.tar").write_bytes(tar_bytes(members))
    assert WebDatasetSource(tmp_path / "a.tar").row(0) == {"__key__": "folder/1", "txt": b"one"}
    source = WebDatasetSource(tmp_path / "b.tar")
    assert [source.row(i) for i in range(2)] == [
        {"__key__": "a/b.x/1", "seg.png": b"1", "txt": b"2"},
        {"__key__": "a/c/" + "long" * 60, "seg.png": "ü".encode(), "txt": b"5"},
    ]


def test_is_what_the_webdataset_library_reads(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    path = write_tar(tmp_path / "a.tar", SAMPLES)
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False))
    source = WebDatasetSource(path)
    assert [{k: v for k, v in row.items() if k not in ("__url__", "__local_path__")} for row in theirs] == [
        source.row(i) for i in range(source.num_rows)
    ]


def test_a_member_that_is_missing_is_told_and_an_error_of_its_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [*SAMPLES[:5], {"jpg": b"alone"}, *SAMPLES[5:9]]
    path = write_tar(tmp_path / "a.tar", samples)
    with caplog.at_level(logging.WARNING, "rescale_data"):
        source = WebDatasetSource(path)
    assert f"{path}: of 10 rows, {{'json': 1, 'cls': 1}} have no such member" in caplog.text
    with pytest.raises(ValueError, match=r"a\.tar, row 5: the sample '000005' has no member \['json', 'cls'\]"):
        source.row(5)
    reader = Reader(source, Shard(), shuffle=False, on_error="skip")
    assert [row["json"] for row in reader] == [sample["json"] for sample in samples if "json" in sample]
    caplog.clear()
    assert WebDatasetSource(path, columns=["jpg"]).row(5)["jpg"] == b"alone"
    assert not caplog.records


def test_a_link_has_no_bytes_so_it_makes_no_row_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("1.txt", tarfile.REGTYPE), ("2.txt", tarfile.LNKTYPE), ("3.txt", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "1.txt"
            tar.addfile(info)
    source = WebDatasetSource(tmp_path)
    assert [source.row(i) for i in range(source.num_rows)] == [{"__key__": "1", "txt": b""}]
    assert "a.tar: 2 members are links and are left out" in caplog.text
