"""Tar files: samples by key, with an index that is written once."""

import logging
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rescale_data.nodes.reader import Reader
from rescale_data.shard import Shard
from rescale_data.sources import indexed
from rescale_data.sources.webdataset import WebDatasetSource
from rescale_data.testing import assert_source
from tests.formats import pack, tar_bytes, write_tar

SAMPLES = [{"jpg": bytes([i]) * (i * 7 % 600), "json": b'{"n": %d}' % i, "cls": b"%d" % (i % 3)} for i in range(40)]
PACKED = ["", ".gz", ".zst", ".bz2"]


@pytest.fixture(autouse=True)
def small_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "FRAGMENT_ROWS", 7)


@pytest.fixture(params=PACKED)
def packed(request: pytest.FixtureRequest) -> str:
    return request.param


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
    members = [
        ("a/b.x/1.SEG.png", b"1"),
        ("a/b.x/1.txt", b"2"),
        ("a/b.x/noextension", b"3"),
        ("__meta__.json", b"4"),
        ("a/c/" + "long" * 60 + ".txt", b"5"),
        ("a/c/" + "long" * 60 + ".seg.png", "ü".encode()),
    ]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    source = WebDatasetSource(tmp_path)
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


def test_urls(packed: str, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe(
        f"/tars{packed}/a.tar{packed}", write_tar(tmp_path / f"a.tar{packed}", SAMPLES).read_bytes()
    )
    source = WebDatasetSource(f"memory://tars{packed}", index_dir=tmp_path / "index")
    assert [source.row(i)["jpg"] for i in range(40)] == [sample["jpg"] for sample in SAMPLES]


class TestBadData:
    def test_a_missing_member(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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

    def test_a_column_that_no_sample_has(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "a.tar", SAMPLES)
        with pytest.raises(ValueError, match=r"no column 'png'. They have \['jpg', 'json', 'cls'\]"):
            WebDatasetSource(tmp_path, columns=["png"])

    def test_a_member_twice(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(tar_bytes([("1.txt", b"a"), ("1.txt", b"b")]))
        with pytest.raises(ValueError, match=r"a\.tar cannot be read as tar: the sample '1' has two members 'txt'"):
            WebDatasetSource(tmp_path)

    @pytest.mark.parametrize("kept", [0, 100, 512, 700, 1024, 0.5, -3000])
    def test_a_file_that_was_cut_off(self, packed: str, kept: float, tmp_path: Path) -> None:
        write_tar(tmp_path / f"a.tar{packed}", SAMPLES)
        data = tar_bytes([(f"{i}.{ext}", data) for i, s in enumerate(SAMPLES) for ext, data in s.items()])
        data = data[: data.rstrip(b"\0").__len__()]
        data = data[: int(len(data) * kept) if isinstance(kept, float) else kept]
        (tmp_path / f"b.tar{packed}").write_bytes(pack(data, packed))
        with pytest.raises(ValueError, match=rf"b\.tar{packed} cannot be read as tar.*half-written"):
            WebDatasetSource(tmp_path)

    def test_a_file_of_another_kind(self, packed: str, tmp_path: Path) -> None:
        (tmp_path / f"a.tar{packed}").write_bytes(pack(b"a,b\n1,2\n" * 500, packed))
        with pytest.raises(ValueError, match=rf"a\.tar{packed} cannot be read"):
            WebDatasetSource(tmp_path)
        (tmp_path / f"a.tar{packed}").write_bytes(b"a,b\n1,2\n" * 500)
        with pytest.raises(ValueError, match=rf"a\.tar{packed} cannot be read"):
            WebDatasetSource(tmp_path)

    def test_tars_one_behind_the_other(self, packed: str, tmp_path: Path) -> None:
        (tmp_path / f"a.tar{packed}").write_bytes(pack(2 * tar_bytes([("1.txt", b"a")]), packed))
        with pytest.raises(ValueError, match=rf"a\.tar{packed} cannot .*more behind its end .*tar --concatenate"):
            WebDatasetSource(tmp_path)

    def test_a_member_with_the_name_of_the_key_is_refused(self, packed: str, tmp_path: Path) -> None:
        (tmp_path / f"a.tar{packed}").write_bytes(pack(tar_bytes([("1.__key__", b"a"), ("1.txt", b"b")]), packed))
        with pytest.raises(ValueError, match=r"extension '__key__', .* Give columns= without it: \['txt'\]"):
            WebDatasetSource(tmp_path)
        assert WebDatasetSource(tmp_path, columns=["txt"]).row(0) == {"__key__": "1", "txt": b"b"}

    def test_what_is_no_file(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A link has no bytes of its own, so it makes no row: that is said. Bytes with holes are not read at all."""
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name, kind in (("1.txt", tarfile.REGTYPE), ("2.txt", tarfile.LNKTYPE), ("3.txt", tarfile.SYMTYPE)):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "1.txt"
                tar.addfile(info)
        source = WebDatasetSource(tmp_path)
        assert [source.row(i) for i in range(source.num_rows)] == [{"__key__": "1", "txt": b""}]
        assert "a.tar: 2 members are links and are left out" in caplog.text
        sparse = tarfile.TarInfo("4.txt")
        sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": "8", "GNU.sparse.numblocks": "1"}
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(sparse)
        with pytest.raises(ValueError, match=r"a\.tar cannot .*'4\.txt' is stored with holes"):
            WebDatasetSource(tmp_path)

    def test_without_samples(self, packed: str, tmp_path: Path) -> None:
        (tmp_path / f"a.tar{packed}").write_bytes(pack(tar_bytes([]), packed))
        with pytest.raises(ValueError, match="have no rows"):
            WebDatasetSource(tmp_path)
        write_tar(tmp_path / f"b.tar{packed}", SAMPLES[:3])
        assert WebDatasetSource(tmp_path).num_rows == 3

    def test_a_sparse_archive_of_folders(self, tmp_path: Path) -> None:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "1.txt").write_bytes(b"one")
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            tar.add(tmp_path / "x", "x")
        source: Any = WebDatasetSource(tmp_path / "a.tar")
        assert source.row(0) == {"__key__": "x/1", "txt": b"one"}
